//! The rates that an estimate rests on: facts where there are any, else named assumptions.

use tierkeep_doctor::{DiskReadSpeed, Fact, Facts, GpuFact};

use crate::budget::Reads;

/// Memory bandwidth assumed where none was measured, bytes/s: two channels of DDR4.
const ASSUMED_MEMORY_BYTES_PER_S: f64 = 20e9;
/// Disk bandwidth assumed where none was measured, bytes/s: a middling NVMe drive.
const ASSUMED_DISK_BYTES_PER_S: f64 = 1.5e9;
/// Bandwidth of a card's memory assumed where none is known, bytes/s: the slower cards with 8 GB.
const ASSUMED_VRAM_BYTES_PER_S: f64 = 250e9;
/// A card's link assumed where none is known, bytes/s: PCIe 3.0 x16, less what is lost.
const ASSUMED_LINK_BYTES_PER_S: f64 = 12e9;

/// How much in a second, and where that comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct Rate {
    /// Bytes, or weights.
    pub per_s: f64,
    /// In words, for a plan.
    pub evidence: String,
}

/// The rates of one graphics card.
#[derive(Clone, Debug, PartialEq)]
pub struct CardRates {
    /// Reading of its own memory, bytes/s.
    pub memory: Rate,
    /// Its link, bytes/s one way.
    pub link: Rate,
}

/// Everything that takes time.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// Reading of main memory by all threads, bytes/s.
    pub memory: Rate,
    /// Reads that bring experts, bytes/s.
    pub experts: Rate,
    /// Reads that bring dense weights layer by layer, bytes/s.
    pub layers: Rate,
    /// Weights that all threads multiply in a second.
    pub kernels: Rate,
    /// By card number.
    pub cards: Vec<CardRates>,
}

/// Weights that one thread multiplies in a second under exact numerics, by instruction set.
///
/// Measured on one Xeon of 2023 at 2.3 GHz over packed weights in memory; assumed elsewhere
/// until a run calibrates the estimate.
fn weights_per_s(isa: &str) -> f64 {
    match isa {
        "avx512" => 14e9,
        "avx2" => 10e9,
        _ => 4e9,
    }
}

impl Rates {
    /// The rates of a machine for reads of an expert's size, made as the plan has it, and of a layer's
    /// dense weights, which are cut in the same way.
    #[must_use]
    pub fn of(
        machine: &Facts,
        (isa, threads): (&str, u64),
        (expert_bytes, reads): (u64, Reads),
        layer_bytes: u64,
    ) -> Self {
        // Threads beyond those of the hardware take turns: they multiply nothing more.
        let usable = machine.cpu.usable_threads.value().copied().filter(|n| *n < threads);
        let kernels = weights_per_s(isa) * usable.unwrap_or(threads) as f64;
        let on = usable.map_or_else(String::new, |n| format!(" on {n} hardware threads"));
        let evidence = format!(
            "kernel rate {:.1} G weights/s: assumed for {isa}, {threads} threads{on}, exact numerics",
            kernels / 1e9
        );
        Self {
            memory: rate(
                &machine.memory.read_bandwidth_bytes_per_s,
                ASSUMED_MEMORY_BYTES_PER_S,
                "memory bandwidth",
            ),
            experts: disk(machine, expert_bytes, reads, reads.depth),
            layers: disk(machine, layer_bytes, reads, reads.depth),
            kernels: Rate { per_s: kernels, evidence },
            cards: cards(machine).map(card_rates).collect(),
        }
    }
}

/// Every graphics card of the facts, NVIDIA's first; its place in this order is its number.
pub fn cards(machine: &Facts) -> impl Iterator<Item = &GpuFact> {
    let gpus = &machine.gpus;
    gpus.nvidia.value().into_iter().chain(gpus.others.value()).flatten()
}

fn card_rates(card: &GpuFact) -> CardRates {
    let name = card.name.value().map_or("graphics card", String::as_str);
    let memory = format!("memory of {name}");
    let link = format!("link of {name}");
    CardRates {
        memory: rate(&card.memory_bandwidth_bytes_per_s, ASSUMED_VRAM_BYTES_PER_S, &memory),
        link: rate(&card.link_bytes_per_s, ASSUMED_LINK_BYTES_PER_S, &link),
    }
}

/// The disk where ranges of `bytes` are read, cut as the plan has it, `depth` reads at once: the measured point whose size is nearest by ratio, and of
/// these the one whose queue depth is nearest. The read size measured must be the size used.
fn disk(machine: &Facts, bytes: u64, reads: Reads, depth: u64) -> Rate {
    let (bytes, depth) = (bytes / reads.n_pieces(bytes), depth.max(1));
    let nearest = machine.disk.reads.value().and_then(|points| {
        let distance = |point: &&DiskReadSpeed| {
            let ratio = point.read_bytes.max(1) as f64 / bytes.max(1) as f64;
            (ratio.ln().abs(), u64::from(point.queue_depth).abs_diff(depth))
        };
        points.iter().filter(|p| p.bytes_per_s > 0.0).min_by(|a, b| {
            let (a, b) = (distance(a), distance(b));
            a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
        })
    });
    let name = "disk bandwidth";
    match nearest {
        Some(point) => Rate {
            per_s: point.bytes_per_s,
            evidence: format!(
                "{name} {:.1} GB/s at reads of {}, {} under way: {}",
                point.bytes_per_s / 1e9,
                crate::units::Bytes(point.read_bytes),
                point.queue_depth,
                said(machine.disk.reads.source().as_str(), machine.disk.reads.detail())
            ),
        },
        None => {
            rate(&machine.disk.read.clone().map(|r| r.bytes_per_s), ASSUMED_DISK_BYTES_PER_S, name)
        }
    }
}

/// A source and its detail, which facts written by hand may lack.
fn said(source: &str, detail: &str) -> String {
    if detail.is_empty() { source.to_owned() } else { format!("{source}, {detail}") }
}

/// A rate from a fact, or the assumed one; either way the evidence says which.
fn rate(fact: &Fact<f64>, assumed: f64, name: &str) -> Rate {
    match fact.value() {
        Some(&value) if value > 0.0 && value.is_finite() => Rate {
            per_s: value,
            evidence: format!(
                "{name} {:.1} GB/s: {}",
                value / 1e9,
                said(fact.source().as_str(), fact.detail())
            ),
        },
        _ => Rate {
            per_s: assumed,
            evidence: format!(
                "{name} {:.1} GB/s: {}",
                assumed / 1e9,
                said("assumed", fact.detail())
            ),
        },
    }
}

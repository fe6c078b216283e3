//! The rates that an estimate rests on: facts where there are any, else named assumptions.

use tierkeep_doctor::{DiskReadSpeed, Fact, Facts, GpuFact};

use crate::budget::{ByClass, KernelClass, Numerics, Reads};

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
    /// Bytes.
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
    /// Products.
    pub kernels: KernelRates,
    /// By card number.
    pub cards: Vec<CardRates>,
}

/// What multiplies.
#[derive(Clone, Copy, Debug)]
pub struct Compute<'a> {
    /// The instruction set of the kernels, by its name in plans.
    pub isa: &'a str,
    /// Threads.
    pub threads: u64,
    /// What the kernels make of activations.
    pub numerics: Numerics,
}

/// Weights that all threads multiply in a second.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelRates {
    /// By how weights are stored.
    pub per_s: ByClass<f64>,
    /// On what machine, and how they are known, in words.
    basis: String,
}

impl KernelRates {
    fn of(compute: Compute<'_>, machine: &Facts) -> Self {
        let Compute { isa, threads, numerics } = compute;
        // Threads beyond those of the hardware take turns: they multiply nothing more.
        let usable = machine.cpu.usable_threads.value().copied().filter(|n| *n < threads);
        let n = usable.unwrap_or(threads) as f64;
        let on = usable.map_or_else(String::new, |n| format!(" on {n} hardware threads"));
        let from = match isa {
            "avx512" | "avx2" => " (what one Xeon at 2.3 GHz was measured at)",
            _ => "",
        };
        Self {
            per_s: ByClass::from_fn(|class| weights_per_s(isa, numerics, class) * n),
            basis: format!(
                "assumed for {isa}, {threads} threads{on}, {} numerics{from}",
                numerics.name()
            ),
        }
    }

    /// The rates of these classes, in words.
    pub(super) fn evidence(&self, classes: impl Iterator<Item = KernelClass>) -> String {
        let each: Vec<String> = classes
            .map(|class| format!("{:.1} over {}", self.per_s.get(class) / 1e9, class.name()))
            .collect();
        format!("kernel rate in G weights/s {}: {}", each.join(", "), self.basis)
    }
}

/// Weights that one thread multiplies in a second, one vector at a time.
///
/// Measured on one Xeon of 2023 at 2.3 GHz over weights in main memory, so that where products are fast
/// enough they say what one thread draws from there; f16 in AVX2 is taken to be bf16's. Plain code was not
/// measured. Assumed elsewhere until a run calibrates the estimate.
fn weights_per_s(isa: &str, numerics: Numerics, class: KernelClass) -> f64 {
    use KernelClass::{Bf16, F16, F32, Fp8, Int2, Int4, Int8, MxFp4};
    let avx512 = match (numerics, class) {
        (_, F32) => 3.5e9,
        (_, F16 | Bf16) => 5.2e9,
        (_, Fp8) => 7.8e9,
        (_, MxFp4) => 9.6e9,
        (Numerics::Exact, Int8) => 11.8e9,
        (Numerics::Exact, Int4) => 8.7e9,
        (Numerics::Exact, Int2) => 8e9,
        (Numerics::Fast, Int8 | Int2) => 17e9,
        (Numerics::Fast, Int4) => 20e9,
    };
    let avx2 = match (numerics, class) {
        (_, F32) => 3.5e9,
        (_, F16 | Bf16) => 5.4e9,
        (_, Fp8) => 5.6e9,
        (_, MxFp4) => 6.8e9,
        (Numerics::Exact, Int8) => 11e9,
        (Numerics::Exact, Int4) => 3.9e9,
        (Numerics::Exact, Int2) => 4e9,
        (Numerics::Fast, Int8 | Int2) => 14e9,
        (Numerics::Fast, Int4) => 17e9,
    };
    match isa {
        "avx512" => avx512,
        "avx2" => avx2,
        _ => 4e9,
    }
}

impl Rates {
    /// The rates of a machine for reads of an expert's size, made as the plan has it, and of a layer's
    /// dense weights, which are cut in the same way.
    #[must_use]
    pub fn of(
        machine: &Facts,
        compute: Compute<'_>,
        (expert_bytes, reads): (u64, Reads),
        layer_bytes: u64,
    ) -> Self {
        Self {
            memory: rate(
                &machine.memory.read_bandwidth_bytes_per_s,
                ASSUMED_MEMORY_BYTES_PER_S,
                "memory bandwidth",
            ),
            experts: disk(machine, expert_bytes, reads, reads.depth),
            layers: disk(machine, layer_bytes, reads, reads.depth),
            kernels: KernelRates::of(compute, machine),
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

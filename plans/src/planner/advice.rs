//! What would help: the same request planned again for a machine or a model that differs in one thing.
//! Pure and cheap, for it is asked with every plan.

use serde::Serialize;
use tierkeep_doctor::{Fact, Facts, GpuFact};

use super::{Options, PinRule, Solved};
use crate::budget::ModelBytes;
use crate::catalogue::{Catalogue, TENSOR_ALIGN};
use crate::estimate::{self, View};
use crate::plan::Plan;
use crate::units::{Bytes, SizeRequest, round_up};
use crate::usage::History;

/// Memory that is added.
const MORE_BYTES: u64 = 8_000_000_000;
/// Bits of a weight in groups of 64 with a scale of 16 bits.
const FEW_BITS: f64 = 4.25;
/// Experts with at most so many bits a weight count as stored at 4 bits: in groups of 32 with a scale of
/// 32 bits they have 5.
const ALREADY_FEW_BITS: f64 = 5.01;

/// One thing that could be different.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// 8 GB more main memory, in the machine and in the budget.
    MoreRam,
    /// 8 GB more graphics memory: on the first usable card, or on a card that is not there yet.
    MoreVram,
    /// A disk of twice the speed.
    FasterDisk,
    /// Routed experts stored at 4 bits.
    FewerBits,
    /// Half the context.
    HalfContext,
}

/// What one change would bring.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The change.
    pub change: Change,
    /// In words, for people.
    pub what: String,
    /// Tokens/s at the median as planned.
    pub tokens_per_s_before: f64,
    /// Tokens/s at the median with the change.
    pub tokens_per_s_after: f64,
    /// After over before.
    pub ratio: f64,
    /// What else is to be known; may be empty.
    pub note: String,
}

/// Plans again, for the machine of `plan` and with the options that it was made with, with one change
/// at a time.
///
/// All figures are estimates of the same kind, without trials of pins, so that they compare with each
/// other; where pins are planned, the plan's own figure may differ a little. A change that makes no
/// sense here, or that makes it slower, is left out.
#[must_use]
pub fn what_would_help(
    model: &Catalogue,
    plan: &Plan,
    options: &Options,
    history: Option<&History>,
) -> Vec<Advice> {
    let machine = &plan.machine;
    let sums = ModelBytes::of(model, plan.engine.io);
    let mut options = options.clone();
    if options.pins == PinRule::Judged {
        options.pins = PinRule::None;
    }
    let Ok(base) = Solved::of(&sums, machine, &options, history) else { return Vec::new() };
    let question = Question { sums: &sums, machine, options: &options, history };
    let before = speed(&base);
    let answers = [
        Some(question.more_ram()),
        Some(question.more_vram()),
        Some(question.faster_disk(&base)),
        question.fewer_bits(),
        question.half_context(&base),
    ];
    let advice = |Answer { change, what, after, note }| {
        let after: f64 = after?;
        let ratio = after / before;
        // What makes it slower is no help, however it comes about.
        (ratio >= 1.0).then_some(Advice {
            change,
            what,
            tokens_per_s_before: before,
            tokens_per_s_after: after,
            ratio,
            note,
        })
    };
    answers.into_iter().flatten().filter_map(advice).collect()
}

struct Question<'a> {
    sums: &'a ModelBytes<'a>,
    machine: &'a Facts,
    options: &'a Options,
    history: Option<&'a History>,
}

struct Answer {
    change: Change,
    what: String,
    /// `None` where it does not fit.
    after: Option<f64>,
    note: String,
}

fn speed(solved: &Solved) -> f64 {
    solved.prediction.decode_tokens_per_s.p50
}

impl Question<'_> {
    fn ask(&self, sums: &ModelBytes<'_>, machine: &Facts, options: &Options) -> Option<f64> {
        Solved::of(sums, machine, options, self.history).ok().as_ref().map(speed)
    }

    fn more_ram(&self) -> Answer {
        let mut machine = self.machine.clone();
        for fact in [&mut machine.memory.usable_bytes, &mut machine.memory.total_bytes] {
            *fact = std::mem::take(fact).map(|bytes: u64| bytes.saturating_add(MORE_BYTES));
        }
        let ram = self.options.ram.map(more);
        let options = Options { ram, ..self.options.clone() };
        Answer {
            change: Change::MoreRam,
            what: format!("{} more main memory", Bytes(MORE_BYTES)),
            after: self.ask(self.sums, &machine, &options),
            note: String::new(),
        }
    }

    fn more_vram(&self) -> Answer {
        let mut machine = self.machine.clone();
        let gpus = &mut machine.gpus;
        let cards = [&mut gpus.nvidia, &mut gpus.others];
        let first = cards.into_iter().filter_map(value_mut).flatten().find(|card| {
            card.is_unified.value() != Some(&true) && card.memory_free_bytes.value().is_some()
        });
        let what = match first {
            Some(card) => {
                let free = std::mem::take(&mut card.memory_free_bytes);
                card.memory_free_bytes = free.map(|bytes| bytes.saturating_add(MORE_BYTES));
                let name = card.name.value().map_or("the first graphics card", String::as_str);
                format!("{} more memory on {name}", Bytes(MORE_BYTES))
            }
            None => {
                let mut cards = gpus.nvidia.value().cloned().unwrap_or_default();
                cards.push(GpuFact {
                    index: cards.len() as u32,
                    memory_free_bytes: Fact::assumed(MORE_BYTES, "what would help"),
                    ..GpuFact::default()
                });
                gpus.nvidia = Fact::assumed(cards, "what would help");
                format!("a graphics card with {} free", Bytes(MORE_BYTES))
            }
        };
        let mut options = self.options.clone();
        let none = matches!(
            options.vram,
            Some(SizeRequest::Absolute(Bytes(0))) | Some(SizeRequest::Percent(0.0))
        );
        options.vram = if none { None } else { options.vram.map(more) };
        options.engine.vram = true;
        let note = if self.options.engine.vram {
            String::new()
        } else {
            "this build's engine does not use graphics cards yet; all that are there count in this \
             figure"
                .to_owned()
        };
        let after = self.ask(self.sums, &machine, &options);
        Answer { change: Change::MoreVram, what, after, note }
    }

    /// Places nothing anew: where things go does not depend on the disk.
    fn faster_disk(&self, base: &Solved) -> Answer {
        let mut rates = base.rates.clone();
        rates.experts.per_s *= 2.0;
        rates.layers.per_s *= 2.0;
        let view = View {
            sums: self.sums,
            workload: &base.placed.workload,
            holding: base.placed.holding(),
            hits: base.hits,
        };
        let after = estimate::tokens_per_s(&view, &rates, base.hits.hit_rate.p50);
        Answer {
            change: Change::FasterDisk,
            what: "a disk of twice the speed".to_owned(),
            after: Some(after * base.prediction.calibration),
            note: String::new(),
        }
    }

    fn fewer_bits(&self) -> Option<Answer> {
        let spec = &self.sums.model.spec;
        let weights = 3.0 * spec.hidden_size as f64 * spec.expert_ff_size as f64;
        let (mut bytes, mut n) = (0.0, 0.0);
        for layer in self.sums.layers.iter().filter(|l| l.n_experts > 0) {
            bytes += layer.expert_read as f64;
            n += 1.0;
        }
        let bits = bytes * 8.0 / (weights * n);
        if !bits.is_finite() || bits <= ALREADY_FEW_BITS {
            return None;
        }
        let mut sums = self.sums.clone();
        let fewer = |bytes: u64| (bytes as f64 * FEW_BITS / bits) as u64;
        for layer in &mut sums.layers {
            layer.slot = round_up(fewer(layer.slot), TENSOR_ALIGN);
            layer.expert_read = fewer(layer.expert_read);
        }
        sums.largest_slot = sums.layers.iter().map(|l| l.slot).max().unwrap_or(0);
        Some(Answer {
            change: Change::FewerBits,
            what: format!("experts at {FEW_BITS} bits a weight, not {}", bits_in_words(bits)),
            after: self.ask(&sums, self.machine, self.options),
            note: match self.sums.model.experts.first().and_then(|e| e.gate.stored.packed()) {
                Some(_) => "from the published weights: packed ones are not packed again; it costs quality",
                None => {
                    "`tierkeep convert MODEL OUT --experts 4 --group 64 --scales f16`; it costs quality"
                }
            }
            .to_owned(),
        })
    }

    fn half_context(&self, base: &Solved) -> Option<Answer> {
        let half = base.placed.workload.context / 2;
        if half == 0 {
            return None;
        }
        let options = Options { context: Some(half), ..self.options.clone() };
        Some(Answer {
            change: Change::HalfContext,
            what: format!("half the context: --ctx {half}"),
            after: self.ask(self.sums, self.machine, &options),
            note: String::new(),
        })
    }
}

/// Bits of a weight, as many digits as there are.
fn bits_in_words(bits: f64) -> String {
    let tenths = (bits * 10.0).round() / 10.0;
    tenths.to_string()
}

fn more(size: SizeRequest) -> SizeRequest {
    match size {
        SizeRequest::Absolute(bytes) => SizeRequest::Absolute(bytes + Bytes(MORE_BYTES)),
        share @ SizeRequest::Percent(_) => share,
    }
}

/// The value of a fact, to be changed.
fn value_mut<T>(fact: &mut Fact<T>) -> Option<&mut T> {
    match fact {
        Fact::Measured { value, .. }
        | Fact::Read { value, .. }
        | Fact::Estimated { value, .. }
        | Fact::Assumed { value, .. } => Some(value),
        Fact::Unknown { .. } => None,
    }
}

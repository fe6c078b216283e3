//! What would make a model fit that does not: every single change to what was asked for, with the least
//! memory that it then needs, found by placing the model again. Pure; it is asked for refusals alone.

use serde::Serialize;
use tierkeep_doctor::Facts;

use super::{Options, machine, policy, request};
use crate::budget::{KvElement, ModelBytes};
use crate::place::{self, DenseRule, DoesNotFit};
use crate::plan::Need;
use crate::units::{Bytes, counted};
use crate::usage::History;

/// Everything that would make a model fit, one thing at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WouldFit {
    /// The least budget with all dense weights in memory, mapped where that was asked for; `None` where
    /// streaming was.
    #[serde(rename = "resident_budget_bytes")]
    pub resident_budget: Option<Bytes>,
    /// The least budget with dense weights that are read for every token; `None` where that needs no
    /// less than the other.
    #[serde(rename = "streamed_budget_bytes")]
    pub streamed_budget: Option<Bytes>,
    /// Changes with which it fits in the budget as it is.
    pub changes: Vec<FittingChange>,
}

/// What could be asked for instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FittingChangeKind {
    /// A shorter context.
    Context,
    /// Caches of 16 bits.
    Kv,
    /// Fewer sequences at once.
    Sessions,
    /// Smaller prefill batches.
    Batch,
    /// Fewer slots for experts.
    Slots,
    /// Dense weights that are read for every token.
    Streaming,
    /// Graphics cards.
    Vram,
}

/// One change with which the model fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FittingChange {
    /// What changes.
    pub change: FittingChangeKind,
    /// How it is asked for.
    pub flag: String,
    /// In words, for people.
    pub what: String,
    /// The least memory that is then needed: within the budget.
    pub needs_bytes: Bytes,
    /// What the engine must be able to do for it.
    pub needs: Option<Need>,
}

/// Looks for all of it. `result` is how the same options did not fit.
pub(super) fn would_fit(
    sums: &ModelBytes<'_>,
    machine: &Facts,
    options: &Options,
    history: Option<&History>,
    result: &DoesNotFit,
) -> WouldFit {
    let uses = policy::uses(sums.model, history);
    let question =
        Question { sums, machine, options, uses: uses.as_deref(), budget: result.budget };
    let kept = match options.dense {
        DenseRule::Mapped => DenseRule::Mapped,
        DenseRule::Auto | DenseRule::Resident | DenseRule::Streamed => DenseRule::Resident,
    };
    let resident = question.least(&with_dense(options, kept));
    let streamed = question.least_streamed(options);
    WouldFit {
        resident_budget: resident.filter(|_| options.dense != DenseRule::Streamed),
        streamed_budget: streamed.filter(|s| resident.is_none_or(|r| *s < r)),
        changes: [
            result.context_that_fits.and_then(|context| question.context(context)),
            question.kv(),
            question.sessions(|n| n > 1),
            question.sessions(|n| n == 1),
            question.batch(),
            question.slots(),
            question.streaming(),
            question.vram(),
        ]
        .into_iter()
        .flatten()
        .collect(),
    }
}

fn with_dense(options: &Options, dense: DenseRule) -> Options {
    let mut options = Options { dense, ..options.clone() };
    options.engine.mapped_dense = true;
    options.engine.streamed_dense = true;
    options
}

struct Question<'a> {
    sums: &'a ModelBytes<'a>,
    machine: &'a Facts,
    options: &'a Options,
    uses: Option<&'a [Vec<f64>]>,
    budget: Bytes,
}

impl Question<'_> {
    /// The least memory that options need; `None` where they make no sense.
    fn least(&self, options: &Options) -> Option<Bytes> {
        let request = request(self.sums, self.machine, options, self.budget).ok()?;
        let cards = machine::vram(self.machine, options).ok()?.cards;
        let request = place::Request { cards, ..request };
        Some(place::smallest(self.sums, &request, self.uses).total())
    }

    /// The same with as many dense weights streamed as make it least.
    fn least_streamed(&self, options: &Options) -> Option<Bytes> {
        let rules = [DenseRule::Auto, DenseRule::Streamed];
        rules.into_iter().filter_map(|rule| self.least(&with_dense(options, rule))).min()
    }

    /// The change, if it is enough.
    fn change(
        &self,
        (change, needs): (FittingChangeKind, Option<Need>),
        options: &Options,
        flag: String,
        what: impl Into<String>,
    ) -> Option<FittingChange> {
        let needs_bytes = self.least(options).filter(|least| *least <= self.budget)?;
        Some(FittingChange { change, flag, what: what.into(), needs_bytes, needs })
    }

    /// The largest number below `asked` with which it fits, `lowest` or more.
    fn largest(&self, lowest: u64, asked: u64, with: impl Fn(u64) -> Options) -> Option<u64> {
        let fits = |n| self.least(&with(n)).is_some_and(|least| least <= self.budget);
        if asked <= lowest || !fits(lowest) {
            return None;
        }
        let (mut low, mut high) = (lowest, asked - 1);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        Some(low)
    }

    fn context(&self, context: u64) -> Option<FittingChange> {
        let options = Options { context: Some(context), ..self.options.clone() };
        let kind = (FittingChangeKind::Context, None);
        self.change(kind, &options, format!("--ctx {context}"), "a shorter context")
    }

    fn kv(&self) -> Option<FittingChange> {
        match self.options.kv.unwrap_or(self.options.numerics.unwrap_or_default().usual_kv()) {
            KvElement::F16 | KvElement::Bf16 => None,
            KvElement::F32 => {
                let options = Options { kv: Some(KvElement::F16), ..self.options.clone() };
                let kind = (FittingChangeKind::Kv, None);
                self.change(kind, &options, "--kv f16".to_owned(), "caches of 16 bits an element")
            }
        }
    }

    /// The most sequences that fit, or the one that any engine can hold.
    fn sessions(&self, is_wanted: fn(u64) -> bool) -> Option<FittingChange> {
        let asked = self.options.sessions.unwrap_or(1);
        let with = |n| Options { sessions: Some(n), ..self.options.clone() };
        let most = self.largest(1, asked, with)?;
        let n = if is_wanted(most) { most } else { 1 };
        if !is_wanted(n) {
            return None;
        }
        let kind = (FittingChangeKind::Sessions, (n > 1).then_some(Need::Sessions(n)));
        let what = format!("{} at once", counted(n, "sequence"));
        self.change(kind, &with(n), format!("--sessions {n}"), what)
    }

    fn batch(&self) -> Option<FittingChange> {
        let with = |n| Options { prefill_batch: Some(n), ..self.options.clone() };
        let n = self.largest(1, self.options.prefill_batch?, with)?;
        let kind = (FittingChangeKind::Batch, None);
        let what = format!("a prompt in batches of {}", counted(n, "token"));
        self.change(kind, &with(n), format!("--batch {n}"), what)
    }

    fn slots(&self) -> Option<FittingChange> {
        let with = |n| Options {
            slots: Some(u32::try_from(n).unwrap_or(u32::MAX)),
            ..self.options.clone()
        };
        let n = self.largest(0, u64::from(self.options.slots?), with)?;
        let kind = (FittingChangeKind::Slots, None);
        let what = format!("{} in each layer", counted(n, "slot"));
        self.change(kind, &with(n), format!("--slots {n}"), what)
    }

    fn streaming(&self) -> Option<FittingChange> {
        let streams = match self.options.dense {
            DenseRule::Streamed => true,
            DenseRule::Auto => self.options.engine.streamed_dense,
            DenseRule::Resident | DenseRule::Mapped => false,
        };
        let options = with_dense(self.options, DenseRule::Streamed);
        let kind = (FittingChangeKind::Streaming, Some(Need::StreamedDense));
        let what = "dense weights are read for every token";
        if streams {
            return None;
        }
        self.change(kind, &options, "--dense streamed".to_owned(), what)
    }

    fn vram(&self) -> Option<FittingChange> {
        if !machine::vram(self.machine, self.options).ok()?.cards.is_empty() {
            return None;
        }
        let mut options = Options { vram: None, ..self.options.clone() };
        options.engine.vram = true;
        let cards = machine::vram(self.machine, &options).ok()?.cards;
        let free: Bytes = cards.iter().map(|card| card.budget).sum();
        if free == Bytes(0) {
            return None;
        }
        let kind = (FittingChangeKind::Vram, Some(Need::Vram));
        let what = format!("{free} of graphics memory, which is free");
        self.change(kind, &options, format!("--vram {}", free.0), what)
    }
}

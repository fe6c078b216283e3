//! What a run counts: accesses to routed experts by tier, layer and phase, which experts they were, and
//! reads by what they are for. Counting allocates nothing.

use std::time::Duration;

use serde::Serialize;

/// Where an access found its expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// In a pinned slot.
    Pinned,
    /// In a cache slot.
    Cache,
    /// Nowhere: it was read.
    Disk,
}

/// Accesses by the tier that answered them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AccessCounts {
    /// Found in a pinned slot.
    pub pinned_hits: u64,
    /// Found in a cache slot.
    pub cache_hits: u64,
    /// Read from disk.
    pub misses: u64,
}

impl AccessCounts {
    pub(crate) fn add(&mut self, tier: Tier) {
        match tier {
            Tier::Pinned => self.pinned_hits += 1,
            Tier::Cache => self.cache_hits += 1,
            Tier::Disk => self.misses += 1,
        }
    }

    /// All accesses.
    #[must_use]
    pub fn accesses(&self) -> u64 {
        self.pinned_hits + self.cache_hits + self.misses
    }

    /// Hits over accesses; `None` without any access.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        let accesses = self.accesses();
        (accesses > 0).then(|| (accesses - self.misses) as f64 / accesses as f64)
    }
}

impl std::ops::Add for AccessCounts {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            pinned_hits: self.pinned_hits + other.pinned_hits,
            cache_hits: self.cache_hits + other.cache_hits,
            misses: self.misses + other.misses,
        }
    }
}

/// Prefill counts once per expert of a batch's union; decode once per (token, layer, expert).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Tokens that are given.
    Prefill,
    /// Tokens that are generated.
    Decode,
}

/// Reads: how much, how many, and how long they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Bytes asked for and brought.
    pub bytes: u64,
    /// Number of reads.
    pub reads: u64,
    /// Time from the call to its return, summed over reads; reads side by side count each.
    pub time: Duration,
    /// Time in which at least one of them was under way.
    pub busy: Duration,
}

impl Reads {
    fn since(self, earlier: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(earlier.bytes),
            reads: self.reads.saturating_sub(earlier.reads),
            time: self.time.saturating_sub(earlier.time),
            busy: self.busy.saturating_sub(earlier.busy),
        }
    }
}

/// Reads of experts by threads of their own, so that others computed meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowReads {
    /// Time in which at least one of them was under way.
    pub time: Duration,
    /// Time that was spent waiting for them, nothing else being done.
    pub waited: Duration,
}

impl WindowReads {
    /// How much of the time was hidden: all but what was waited for.
    #[must_use]
    pub fn hidden(&self) -> Duration {
        // A wait is a little longer than the end of the read that it waits for.
        self.time.saturating_sub(self.waited)
    }

    fn since(self, earlier: Self) -> Self {
        Self {
            time: self.time.saturating_sub(earlier.time),
            waited: self.waited.saturating_sub(earlier.waited),
        }
    }
}

/// Reads by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCounts {
    /// Weights that every token touches.
    pub dense: Reads,
    /// Rows of an embedding that stays on disk.
    pub embedding: Reads,
    /// Routed experts.
    pub experts: Reads,
    /// Time in which at least one read of any kind was under way.
    pub busy: Duration,
    /// Those of experts by threads of their own.
    pub window: WindowReads,
}

impl ReadCounts {
    /// All of them.
    #[must_use]
    pub fn all(&self) -> Reads {
        let kinds = [self.dense, self.embedding, self.experts];
        let sum = |of: fn(&Reads) -> u64| kinds.iter().map(of).sum();
        Reads {
            bytes: sum(|reads| reads.bytes),
            reads: sum(|reads| reads.reads),
            time: kinds.iter().map(|reads| reads.time).sum(),
            busy: self.busy,
        }
    }

    /// What has come since.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            dense: self.dense.since(earlier.dense),
            embedding: self.embedding.since(earlier.embedding),
            experts: self.experts.since(earlier.experts),
            busy: self.busy.saturating_sub(earlier.busy),
            window: self.window.since(earlier.window),
        }
    }
}

/// Which experts of each layer were asked for: a bit for each.
#[derive(Clone, Debug, Default)]
struct Touched {
    words_per_layer: usize,
    bits: Vec<u64>,
}

impl Touched {
    fn new(n_layers: usize, n_experts: usize) -> Self {
        let words_per_layer = n_experts.div_ceil(64);
        Self { words_per_layer, bits: vec![0; n_layers * words_per_layer] }
    }

    fn layer(&self, layer: usize) -> &[u64] {
        &self.bits[layer * self.words_per_layer..(layer + 1) * self.words_per_layer]
    }

    fn layer_mut(&mut self, layer: usize) -> &mut [u64] {
        &mut self.bits[layer * self.words_per_layer..(layer + 1) * self.words_per_layer]
    }
}

/// Counts the accesses of one layer in one phase.
#[derive(Debug)]
pub(crate) struct LayerCounter<'a> {
    counts: &'a mut AccessCounts,
    touched: &'a mut [u64],
}

impl LayerCounter<'_> {
    pub(crate) fn add(&mut self, expert: u32, tier: Tier) {
        self.counts.add(tier);
        self.touched[expert as usize / 64] |= 1 << (expert % 64);
    }
}

/// Counts of every layer. What an interrupted step had asked for is counted: it was read.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Accesses in prefill, by layer.
    pub prefill: Vec<AccessCounts>,
    /// Accesses in decode, by layer.
    pub decode: Vec<AccessCounts>,
    prefill_touched: Touched,
    decode_touched: Touched,
}

impl Counters {
    pub(crate) fn new(n_layers: usize, n_experts: usize) -> Self {
        Self {
            prefill: vec![AccessCounts::default(); n_layers],
            decode: vec![AccessCounts::default(); n_layers],
            prefill_touched: Touched::new(n_layers, n_experts),
            decode_touched: Touched::new(n_layers, n_experts),
        }
    }

    /// Forgets what was counted.
    pub(crate) fn clear(&mut self) {
        self.prefill.fill(AccessCounts::default());
        self.decode.fill(AccessCounts::default());
        self.prefill_touched.bits.fill(0);
        self.decode_touched.bits.fill(0);
    }

    pub(crate) fn layer(&mut self, phase: Phase, layer: usize) -> LayerCounter<'_> {
        let (counts, touched) = match phase {
            Phase::Prefill => (&mut self.prefill, &mut self.prefill_touched),
            Phase::Decode => (&mut self.decode, &mut self.decode_touched),
        };
        LayerCounter { counts: &mut counts[layer], touched: touched.layer_mut(layer) }
    }

    /// Different experts of a layer that were asked for in decode.
    #[must_use]
    pub fn distinct_in_decode(&self, layer: usize) -> u32 {
        self.decode_touched.layer(layer).iter().map(|word| word.count_ones()).sum()
    }

    /// Different experts of a layer that were asked for, in prefill or decode.
    #[must_use]
    pub fn distinct(&self, layer: usize) -> u32 {
        let both = self.prefill_touched.layer(layer).iter().zip(self.decode_touched.layer(layer));
        both.map(|(prefill, decode)| (prefill | decode).count_ones()).sum()
    }

    /// Sum over all layers.
    #[must_use]
    pub fn total(&self, phase: Phase) -> AccessCounts {
        let layers = match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode => &self.decode,
        };
        layers.iter().fold(AccessCounts::default(), |a, b| a + *b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_told_apart_and_counted_once() {
        let mut counters = Counters::new(2, 130);
        for (phase, layer, expert, tier) in [
            (Phase::Prefill, 0, 129, Tier::Disk),
            (Phase::Decode, 0, 129, Tier::Cache),
            (Phase::Decode, 0, 64, Tier::Pinned),
            (Phase::Decode, 0, 64, Tier::Pinned),
            (Phase::Decode, 1, 0, Tier::Disk),
        ] {
            counters.layer(phase, layer).add(expert, tier);
        }
        let distinct = |layer| (counters.distinct_in_decode(layer), counters.distinct(layer));
        assert_eq!((distinct(0), distinct(1)), ((2, 2), (1, 1)));
        let decode = counters.total(Phase::Decode);
        assert_eq!((decode.pinned_hits, decode.cache_hits, decode.misses), (2, 1, 1));
        assert_eq!(counters.total(Phase::Prefill).hit_rate(), Some(0.0));
        counters.clear();
        assert_eq!((counters.distinct(0), counters.total(Phase::Decode).accesses()), (0, 0));
    }

    #[test]
    fn reads_are_added_and_told_apart_by_when() {
        let ms = Duration::from_millis;
        let reads = |bytes| Reads { bytes, reads: 1, time: ms(bytes), busy: ms(bytes) };
        let before = ReadCounts { dense: reads(7), busy: ms(7), ..ReadCounts::default() };
        // Both kinds were under way for a while.
        let after = ReadCounts { experts: reads(5), busy: ms(9), ..before };
        assert_eq!((after.all().bytes, after.all().time, after.all().busy), (12, ms(12), ms(9)));
        let since = after.since(&before);
        assert_eq!((since.dense.reads, since.all()), (0, Reads { busy: ms(2), ..reads(5) }));
    }
}

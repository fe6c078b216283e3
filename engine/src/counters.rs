//! What a run counts: accesses to routed experts by tier and layer, by phase.

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

/// Counts of every layer.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counters {
    /// Accesses in prefill, by layer.
    pub prefill: Vec<AccessCounts>,
    /// Accesses in decode, by layer.
    pub decode: Vec<AccessCounts>,
}

impl Counters {
    pub(crate) fn new(n_layers: usize) -> Self {
        Self {
            prefill: vec![AccessCounts::default(); n_layers],
            decode: vec![AccessCounts::default(); n_layers],
        }
    }

    pub(crate) fn layer_mut(&mut self, phase: Phase, layer: usize) -> &mut AccessCounts {
        match phase {
            Phase::Prefill => &mut self.prefill[layer],
            Phase::Decode => &mut self.decode[layer],
        }
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

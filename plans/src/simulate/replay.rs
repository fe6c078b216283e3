//! One layer's cache as arithmetic: the engine's rule and its optimum. Owns both replays.

use std::collections::BinaryHeap;

use crate::usage::NO_ACCESS;

/// Contiguous tokens' routing, `(n_tokens, n_layers, n_experts_active)`.
#[derive(Clone, Copy, Debug)]
pub struct RoutingSample<'a> {
    experts: &'a [u16],
    n_layers: usize,
    n_experts: usize,
    n_experts_active: usize,
}

impl<'a> RoutingSample<'a> {
    /// A view of `experts`; what does not fill a whole token at its end is left out.
    #[must_use]
    pub fn new(
        experts: &'a [u16],
        n_layers: usize,
        n_experts: usize,
        n_experts_active: usize,
    ) -> Self {
        Self { experts, n_layers, n_experts, n_experts_active }
    }

    /// Whole tokens.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.experts.len().checked_div(self.n_layers * self.n_experts_active).unwrap_or(0)
    }

    /// Routed experts per layer.
    #[must_use]
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// Each token's experts in one layer (by its place in the sample), in descending router
    /// weight; choices that are no access are left out. Empty for a layer that the sample does not have.
    pub fn layer(&self, layer: usize) -> impl Iterator<Item = &'a [u16]> + use<'a> {
        let per_token = self.n_layers * self.n_experts_active;
        let start = layer * self.n_experts_active;
        let end = start + self.n_experts_active;
        let n_tokens = if layer < self.n_layers { self.n_tokens() } else { 0 };
        let experts = self.experts;
        (0..n_tokens).map(move |token| {
            let chosen = &experts[token * per_token + start..token * per_token + end];
            let n = chosen.iter().position(|&expert| expert == NO_ACCESS);
            &chosen[..n.unwrap_or(chosen.len())]
        })
    }

    /// The tokens from `from` on, up to `to`.
    #[must_use]
    pub fn tokens(&self, from: usize, to: usize) -> Self {
        let per_token = self.n_layers * self.n_experts_active;
        let end = to.min(self.n_tokens()) * per_token;
        let start = (from * per_token).min(end);
        Self { experts: &self.experts[start..end], ..*self }
    }
}

/// Hits among accesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Accesses that found their expert resident.
    pub hits: u64,
    /// All accesses.
    pub accesses: u64,
}

impl Hits {
    /// The share of hits, `None` without accesses.
    #[must_use]
    pub fn rate(self) -> Option<f64> {
        (self.accesses > 0).then(|| self.hits as f64 / self.accesses as f64)
    }
}

impl std::ops::AddAssign for Hits {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.accesses += other.accesses;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Residence {
    Absent,
    Cached,
    Pinned,
}

/// One expert of a [`LayerCache`]; a link of the recency list while it is cached.
#[derive(Clone, Copy, Debug)]
struct Node {
    residence: Residence,
    newer: u32,
    older: u32,
    /// The token that last used it: of this token it is leased.
    token: u64,
}

/// The cache of one layer under the engine's rule, without the experts' bytes. An access costs a
/// few list operations, whatever the cap.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// One per expert, then the ends of the recency list: `ends.older` is the newest expert,
    /// `ends.newer` the least recently used.
    nodes: Vec<Node>,
    n_free: usize,
    token: u64,
}

impl LayerCache {
    /// A cache of `cap` slots with these experts pinned and loaded and the rest empty. Pins that
    /// repeat, do not exist or do not fit are left out: a plan's own check refuses them.
    #[must_use]
    pub fn new(n_experts: usize, cap: usize, pins: &[u32]) -> Self {
        let ends = n_experts as u32;
        let empty = Node { residence: Residence::Absent, newer: ends, older: ends, token: 0 };
        let mut nodes = vec![empty; n_experts + 1];
        let mut n_free = cap;
        for &pin in pins {
            let Some(node) = nodes[..n_experts].get_mut(pin as usize) else { continue };
            if n_free > 0 && node.residence == Residence::Absent {
                node.residence = Residence::Pinned;
                n_free -= 1;
            }
        }
        Self { nodes, n_free, token: 0 }
    }

    /// Accesses one token's experts in this order and returns how many were hits. An id that is no
    /// expert is a miss.
    pub fn access_token(&mut self, experts: &[u16]) -> u64 {
        self.token += 1;
        experts.iter().map(|&expert| u64::from(self.access(u32::from(expert)))).sum()
    }

    fn access(&mut self, expert: u32) -> bool {
        let ends = self.nodes.len() as u32 - 1;
        if expert >= ends {
            return false;
        }
        match self.nodes[expert as usize].residence {
            Residence::Pinned => true,
            Residence::Cached => {
                self.unlink(expert);
                self.link_newest(expert);
                true
            }
            Residence::Absent => {
                if self.n_free > 0 {
                    self.n_free -= 1;
                } else {
                    let oldest = self.nodes[ends as usize].newer;
                    // The list is in the order of last use: if its oldest is leased, all are.
                    if oldest == ends || self.nodes[oldest as usize].token == self.token {
                        return false;
                    }
                    self.unlink(oldest);
                    self.nodes[oldest as usize].residence = Residence::Absent;
                }
                self.nodes[expert as usize].residence = Residence::Cached;
                self.link_newest(expert);
                false
            }
        }
    }

    fn unlink(&mut self, expert: u32) {
        let Node { newer, older, .. } = self.nodes[expert as usize];
        self.nodes[newer as usize].older = older;
        self.nodes[older as usize].newer = newer;
    }

    fn link_newest(&mut self, expert: u32) {
        let ends = self.nodes.len() as u32 - 1;
        let second = self.nodes[ends as usize].older;
        self.nodes[ends as usize].older = expert;
        self.nodes[second as usize].newer = expert;
        let node = &mut self.nodes[expert as usize];
        (node.newer, node.older, node.token) = (ends, second, self.token);
    }
}

/// Replays one layer (by its place in the sample) from an empty cache of `cap` slots in which
/// `pins` are loaded: cold misses count.
#[must_use]
pub fn replay(sample: &RoutingSample<'_>, layer: usize, cap: usize, pins: &[u32]) -> Hits {
    let mut cache = LayerCache::new(sample.n_experts, cap, pins);
    let mut total = Hits::default();
    for experts in sample.layer(layer) {
        total += Hits { hits: cache.access_token(experts), accesses: experts.len() as u64 };
    }
    total
}

/// The most hits that any rule could have had with `cap` slots from empty: on a miss, of the
/// residents and the newcomer, the one whose next access is farthest is left out (Belady 1966,
/// with bypass). Leases do not bind it, so no rule of the engine can exceed it.
#[must_use]
pub fn replay_optimum(sample: &RoutingSample<'_>, layer: usize, cap: usize) -> Hits {
    let accesses: Vec<u16> = sample.layer(layer).flatten().copied().collect();
    let never = accesses.len();
    let mut next_seen = vec![never; usize::from(u16::MAX) + 1];
    let mut next_access = vec![never; accesses.len()];
    for (index, &expert) in accesses.iter().enumerate().rev() {
        next_access[index] = std::mem::replace(&mut next_seen[usize::from(expert)], index);
    }
    // By expert the next access of a resident one; entries of `farthest` that differ are stale.
    let mut resident: Vec<Option<usize>> = vec![None; usize::from(u16::MAX) + 1];
    let mut farthest: BinaryHeap<(usize, u16)> = BinaryHeap::new();
    let (mut n_resident, mut hits) = (0, 0);
    for (&expert, &next) in accesses.iter().zip(&next_access) {
        let is_hit = resident[usize::from(expert)].is_some();
        hits += u64::from(is_hit);
        n_resident += usize::from(!is_hit);
        resident[usize::from(expert)] = Some(next);
        farthest.push((next, expert));
        while n_resident > cap {
            let Some((next, expert)) = farthest.pop() else { break };
            if resident[usize::from(expert)] == Some(next) {
                resident[usize::from(expert)] = None;
                n_resident -= 1;
            }
        }
    }
    Hits { hits, accesses: accesses.len() as u64 }
}

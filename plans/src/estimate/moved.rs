//! What a token moves and multiplies: bytes and weights by where they are and by how they are stored, read off
//! the sums of `budget`. How long that takes in main memory; the rest of the terms is `estimate`'s.

use super::{Rates, View};
use crate::budget::{self, ByClass, KernelClass, Touched};

/// What is touched in main memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    /// Bytes and weights of products.
    by_class: ByClass<(f64, f64)>,
    /// Bytes that no product over weights touches: caches, and what comes with an expert besides its
    /// matrices.
    other_bytes: f64,
}

/// Seconds in main memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HostTime {
    /// Of what memory bounds.
    pub(super) memory: f64,
    /// Of what the kernels bound.
    pub(super) kernels: f64,
}

impl HostTime {
    fn seconds(self) -> f64 {
        self.memory + self.kernels
    }
}

impl Load {
    fn of(part: &ByClass<Touched>, other_bytes: f64) -> Self {
        let by_class = ByClass::from_fn(|class| {
            let Touched { bytes, weights } = part.get(class);
            (bytes as f64, weights as f64)
        });
        Self { by_class, other_bytes }
    }

    /// This and `share` of another.
    pub(super) fn and(&self, other: &Self, share: f64) -> Self {
        let by_class = ByClass::from_fn(|class| {
            let ((bytes, weights), more) = (self.by_class.get(class), other.by_class.get(class));
            (bytes + more.0 * share, weights + more.1 * share)
        });
        Self { by_class, other_bytes: self.other_bytes + other.other_bytes * share }
    }

    pub(super) fn bytes(&self) -> f64 {
        self.by_class.each().map(|(_, (bytes, _))| bytes).sum::<f64>() + self.other_bytes
    }

    /// The classes that there are weights of.
    pub(super) fn classes(&self) -> impl Iterator<Item = KernelClass> {
        let present = self.by_class.each().filter(|(_, (_, weights))| *weights > 0.0);
        present.map(|(class, _)| class)
    }

    /// For each class the larger of bytes over bandwidth and weights over the kernels' rate, and the other
    /// bytes over bandwidth.
    pub(super) fn time(&self, rates: &Rates) -> HostTime {
        let mut time =
            HostTime { memory: self.other_bytes / rates.memory.per_s, ..HostTime::default() };
        for (class, (bytes, weights)) in self.by_class.each() {
            let memory = bytes / rates.memory.per_s;
            let kernels = weights / rates.kernels.per_s.get(class);
            if memory >= kernels { time.memory += memory } else { time.kernels += kernels }
        }
        time
    }
}

/// Bytes that a token moves, by where they are; routed experts not counted.
#[derive(Clone, Debug)]
pub(super) struct Moved {
    pub(super) host: Load,
    /// Bytes by card, in the order of the holding.
    pub(super) card_bytes: Vec<f64>,
    pub(super) streamed_bytes: u64,
    /// Times that a state goes one way between main memory and a card, or from card to card.
    pub(super) crossings: f64,
    /// Bytes of routed experts that a token is sent to.
    pub(super) routed_bytes: f64,
    /// The same, as they are multiplied.
    pub(super) routed: Load,
    /// Layers whose reads run under what else they compute.
    pub(super) windows: Vec<Window>,
}

/// What a layer touches while its experts are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// On which card; `None` in main memory.
    card: Option<usize>,
    /// What is computed whatever is read.
    load: Load,
    /// Routed experts that a token is sent to in this layer.
    routed: Load,
    /// Their bytes as read.
    pub(super) read_bytes: f64,
}

impl Window {
    /// How long it takes to compute, with the share of the routed experts that are in memory.
    pub(super) fn seconds(&self, view: &View<'_>, rates: &Rates, resident: f64) -> f64 {
        let card = self.card.and_then(|card| view.holding.cards.get(card));
        match card {
            None => self.load.and(&self.routed, resident).time(rates).seconds(),
            Some(card) => {
                let card = rates.cards.get(card.card as usize);
                card.map_or(0.0, |card| self.load.bytes() / card.memory.per_s)
            }
        }
    }
}

impl Moved {
    pub(super) fn of(view: &View<'_>) -> Self {
        let View { sums, workload, holding, .. } = view;
        let spec = &sums.model.spec;
        let half = workload.context / 2;
        let on_cards = holding.on_cards(sums.layers.len());
        let mut moved = Self {
            host: Load::default(),
            card_bytes: vec![0.0; holding.cards.len()],
            streamed_bytes: budget::streamed_bytes_per_token(sums, holding.streamed),
            crossings: 0.0,
            routed_bytes: sums.routed_per_token() as f64,
            routed: Load::default(),
            windows: Vec::new(),
        };
        let mut before = None;
        for (layer, bytes) in sums.layers.iter().enumerate() {
            let caches = budget::layer_kv_bytes(spec, layer, half, workload.kv)
                .saturating_add(budget::layer_indexer_bytes(spec, layer, half, workload.kv))
                as f64;
            let place = holding.cards.iter().position(|c| c.layers().contains(&layer));
            let dense = Load::of(&bytes.dense.by_class, caches);
            match place {
                Some(card) => moved.card_bytes[card] += dense.bytes(),
                None => moved.host = moved.host.and(&dense, 1.0),
            }
            let apart = bytes.expert_read.saturating_sub(bytes.expert.bytes()) as f64;
            let active = sums.active_per_layer(bytes);
            let routed = Load::default().and(&Load::of(&bytes.expert, apart), active);
            if workload.reads.depth > 0 && bytes.n_experts > 0 {
                let mut load = Load::of(&bytes.shared.by_class, 0.0);
                if workload.reads.begins_early && bytes.window.stored > 0 {
                    let n_blocks = spec.layers[layer].feed_forward.n_sub_blocks().max(1);
                    let window = Load::of(&bytes.window.by_class, caches / n_blocks as f64);
                    load = load.and(&window, 1.0);
                }
                let read_bytes = sums.routed_per_layer(bytes);
                moved.windows.push(Window { card: place, load, routed, read_bytes });
            }
            moved.crossings += f64::from(u8::from(place != before));
            before = place;
            if bytes.n_experts > 0 {
                moved.routed = moved.routed.and(&routed, 1.0);
                // A layer on a card whose experts are not all there asks main memory, and waits; one in
                // main memory asks the cards for theirs.
                let apart = match place {
                    Some(_) => on_cards[layer] < bytes.n_experts,
                    None => on_cards[layer] > 0,
                };
                moved.crossings += if apart { 2.0 } else { 0.0 };
            }
        }
        let head = sums.head().and(sums.final_norm);
        let place = holding.cards.iter().position(|c| c.head);
        match place {
            Some(card) => moved.card_bytes[card] += head.stored as f64,
            None => moved.host = moved.host.and(&Load::of(&head.by_class, 0.0), 1.0),
        }
        // Logits are wanted in main memory.
        moved.crossings +=
            f64::from(u8::from(place != before)) + f64::from(u8::from(place.is_some()));
        moved
    }
}

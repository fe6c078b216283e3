//! How experts are read, as far as memory depends on it: the size of a slot and of the buffer that
//! unaligned reads pass through. Reads nothing.

use serde::{Deserialize, Serialize};

use crate::catalogue::{Catalogue, DIRECT_ALIGN, ExpertLayout};
use crate::units::{Bytes, round_up};

/// How experts are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoMode {
    /// Past the page cache, straight into the slot, in whole blocks of
    /// [`DIRECT_ALIGN`](crate::catalogue::DIRECT_ALIGN).
    Direct,
    /// Through the page cache, pages dropped after each read: an expert is never cached twice.
    Dropped,
    /// Through the page cache, which may keep what it likes.
    Buffered,
}

impl IoMode {
    /// Its name in plans and options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Dropped => "dropped",
            Self::Buffered => "buffered",
        }
    }

    /// Whether reads leave pages in the page cache while they are under way.
    #[must_use]
    pub fn uses_page_cache(self) -> bool {
        match self {
            Self::Direct => false,
            Self::Dropped | Self::Buffered => true,
        }
    }
}

/// How reads are made: how many at once, how large, and which before they are needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Reads that are under way at once, each by a thread of its own; 0 where the threads that compute read
    /// what they ask for, one after another.
    pub depth: u64,
    /// About how much one read brings; what is larger is cut into pieces that several threads read.
    /// `None` where nothing is cut.
    pub bytes: Option<Bytes>,
    /// Whether experts that a layer knows a sub-block early are begun then.
    pub begins_early: bool,
}

impl Reads {
    /// Into how many reads of about equal size a range of so many bytes is cut.
    #[must_use]
    pub fn n_pieces(self, bytes: u64) -> u64 {
        match self.bytes {
            // To the nearest number of whole reads, so that none is a small rest.
            Some(Bytes(piece)) if piece > 0 => (bytes.saturating_add(piece / 2) / piece).max(1),
            Some(_) | None => 1,
        }
    }

    /// The most that one read of an expert of so many bytes brings, whichever of its parts it is of.
    #[must_use]
    pub fn largest(self, expert_bytes: u64) -> u64 {
        match self.bytes {
            // What is under one and a half pieces is one read.
            Some(Bytes(piece)) => {
                let most = piece.saturating_add(piece / 2);
                expert_bytes.min(round_up(most, DIRECT_ALIGN).saturating_add(DIRECT_ALIGN))
            }
            None => expert_bytes,
        }
    }
}

/// What direct reads pass through whose bytes are wanted elsewhere than a block begins: dense weights
/// while they are loaded, rows of the embedding. Large enough that the disk is busy with one read.
const BOUNCE_BYTES: u64 = 4 << 20;
/// Into most parts that it is divided, so that reads side by side need not wait for each other and are
/// still large.
const MAX_BOUNCES: u64 = 4;

/// Bytes of the buffers that reads of anything but experts pass through, all of them.
#[must_use]
pub fn bounce_bytes(io: IoMode) -> u64 {
    if io.uses_page_cache() { 0 } else { BOUNCE_BYTES }
}

/// How many such buffers of equal size there are: as many as reads at once, up to a few, and a power of two,
/// so that each is whole pages.
#[must_use]
pub fn n_bounces(reads: Reads) -> u64 {
    1 << reads.depth.clamp(1, MAX_BOUNCES).ilog2()
}

/// An expert as it lies in a slot.
#[must_use]
pub fn slot_layout(expert: &ExpertLayout, io: IoMode) -> ExpertLayout {
    if io.uses_page_cache() { *expert } else { expert.aligned() }
}

/// Bytes of a slot that can hold any expert of the layer; 0 where it has none.
#[must_use]
pub fn slot_bytes(model: &Catalogue, layer: usize, io: IoMode) -> Bytes {
    let experts = model.layer_experts(layer).iter();
    Bytes(experts.map(|expert| bytes_in_slot(expert, io)).max().unwrap_or(0))
}

/// Bytes of the largest expert slot of the decoder layers.
#[must_use]
pub fn largest_slot_bytes(model: &Catalogue, io: IoMode) -> u64 {
    model.spec.expert_layers().map(|layer| slot_bytes(model, layer, io).0).max().unwrap_or(0)
}

pub(super) fn bytes_in_slot(expert: &ExpertLayout, io: IoMode) -> u64 {
    if io.uses_page_cache() { expert.slab_bytes } else { expert.aligned_slab_bytes() }
}

/// What direct reads add to a slot for every expert, as a share of what it takes otherwise.
#[must_use]
pub fn direct_padding_share(model: &Catalogue) -> f64 {
    let all = |io| {
        let layers = model.spec.expert_layers();
        layers.fold(0_u64, |sum, layer| {
            let n = model.layer_experts(layer).len() as u64;
            sum.saturating_add(slot_bytes(model, layer, io).0.saturating_mul(n))
        })
    };
    let (direct, dropped) = (all(IoMode::Direct), all(IoMode::Dropped));
    direct.saturating_sub(dropped) as f64 / dropped.max(1) as f64
}

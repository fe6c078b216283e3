//! How main memory is divided over the layers, slot by slot.

use crate::budget::{ModelBytes, Slots};
use crate::units::Bytes;

/// Divides `left` bytes over the layers so that they have equally many experts at hand, those on
/// cards included; then one more for layer after layer, the ones with the smallest experts first. The
/// first that does not fit ends it: were it passed over, a larger budget could give it a slot and take
/// others' away.
pub(super) fn divide(sums: &ModelBytes<'_>, on_cards: &[u32], left: Bytes) -> Slots {
    let mut slots = Slots::none(sums.layers.len());
    let mut layers: Vec<(u64, usize)> = sums
        .layers
        .iter()
        .enumerate()
        .filter(|(_, bytes)| bytes.n_experts > 0)
        .map(|(layer, bytes)| (bytes.slot, layer))
        .collect();
    layers.sort_unstable();
    let cap = |layer: usize, level: u32| {
        level.min(sums.layers[layer].n_experts).saturating_sub(on_cards[layer])
    };
    let cost = |level: u32| {
        layers.iter().fold(0_u64, |sum, &(slot, layer)| {
            sum.saturating_add(slot.saturating_mul(u64::from(cap(layer, level))))
        })
    };
    // The highest level that fits whole.
    let (mut low, mut high) = (0, sums.layers.iter().map(|l| l.n_experts).max().unwrap_or(0));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if cost(middle) <= left.0 { low = middle } else { high = middle - 1 }
    }
    let mut left = left.0.saturating_sub(cost(low));
    for &(_, layer) in &layers {
        slots.caps[layer] = cap(layer, low);
    }
    for (slot, layer) in layers {
        if cap(layer, low.saturating_add(1)) == slots.caps[layer] {
            continue;
        }
        if slot > left {
            break;
        }
        left -= slot;
        slots.caps[layer] += 1;
    }
    slots
}

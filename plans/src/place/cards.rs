//! What goes to graphics cards: contiguous layers to each, so that a token crosses from card to card
//! once, and in the rest of their memory routed experts.

use crate::budget::{
    self, CardLedger, CardPlacement, ExpertList, LayerExperts, ModelBytes, Workload,
};
use crate::units::Bytes;

/// What one card can give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardBudget {
    /// Its place among the cards of the machine's facts.
    pub card: u32,
    /// The maker's name for it.
    pub name: String,
    /// What of its memory may be used.
    pub budget: Bytes,
}

/// What layers take on a card, as sums from the first on; the head is the last.
struct Weights {
    /// Taken by a card that is used at all.
    fixed: u64,
    /// Bytes of all units before each.
    before: Vec<u64>,
    n_layers: usize,
    slot: u64,
    n_experts: u64,
}

/// The best that some cards can do with the units from one on.
#[derive(Clone, Copy, Debug)]
struct Best {
    /// The unit after the last one placed.
    end: usize,
    /// Experts besides; counted only where all units are placed.
    experts: u64,
    /// How unevenly layers lie relative to the cards' sizes; smaller is better.
    imbalance: f64,
    /// The unit after the last on the first of these cards.
    cut: usize,
}

impl Best {
    fn is_better_than(&self, other: &Self) -> bool {
        (self.end, self.experts)
            .cmp(&(other.end, other.experts))
            .then(other.imbalance.total_cmp(&self.imbalance))
            .is_gt()
    }
}

/// The smallest budget with which a card holds one layer.
#[must_use]
pub fn least_card_bytes(sums: &ModelBytes<'_>, workload: &Workload) -> Bytes {
    budget::card_ledger_without_experts(sums, workload, 0..1.min(sums.layers.len()), false).total()
}

/// Fills the cards; those that hold nothing are left out.
///
/// As many layers as fit, from the first on, and the head after the last; experts only when all of
/// these have a place, so that what every token touches comes before what some do. Of all ways to cut
/// the layers the one is taken that leaves room for the most experts, which is why more memory never
/// means fewer, and of these the most even one.
pub(super) fn place(
    sums: &ModelBytes<'_>,
    workload: &Workload,
    budgets: &[CardBudget],
    uses: Option<&[Vec<f64>]>,
) -> Vec<CardPlacement> {
    if budgets.is_empty() {
        return Vec::new();
    }
    let weights = Weights::of(sums, workload);
    let cuts = weights.cut(budgets);
    let mut cards = Vec::with_capacity(budgets.len());
    let mut start = 0;
    for (budget, end) in budgets.iter().zip(cuts) {
        let layers = start.min(weights.n_layers)..end.min(weights.n_layers);
        let head = start <= weights.n_layers && end > weights.n_layers;
        start = end;
        let ledger = budget::card_ledger_without_experts(sums, workload, layers.clone(), head);
        if ledger.total() > budget.budget {
            continue;
        }
        cards.push(CardPlacement {
            card: budget.card,
            name: budget.name.clone(),
            budget_bytes: budget.budget,
            unused_bytes: budget.budget.saturating_sub(ledger.total()),
            first_layer: layers.start as u32,
            end_layer: layers.end as u32,
            head,
            ledger,
            experts: Vec::new(),
        });
    }
    if start > weights.n_layers {
        fill(sums, &mut cards, uses);
    }
    cards.retain(|card| !card.layers().is_empty() || card.head || !card.experts.is_empty());
    for card in &mut cards {
        settle(sums, workload, card);
    }
    cards
}

fn settle(sums: &ModelBytes<'_>, workload: &Workload, card: &mut CardPlacement) {
    let ledger: CardLedger = budget::card_ledger(sums, workload, card);
    card.unused_bytes = card.budget_bytes.saturating_sub(ledger.total());
    card.ledger = ledger;
}

impl Weights {
    fn of(sums: &ModelBytes<'_>, workload: &Workload) -> Self {
        let bytes = |layers, head| {
            budget::card_ledger_without_experts(sums, workload, layers, head).total().0
        };
        let n_layers = sums.layers.len();
        let fixed = bytes(0..0, false);
        let units = (0..n_layers).map(|l| bytes(l..l + 1, false)).chain([bytes(0..0, true)]);
        let mut before = vec![0_u64];
        let mut sum = 0_u64;
        for unit in units {
            sum = sum.saturating_add(unit - fixed);
            before.push(sum);
        }
        Self { fixed, before, n_layers, slot: sums.largest_slot, n_experts: sums.n_experts() }
    }

    /// Bytes left on a card with some units, `None` if they do not fit.
    fn left(&self, budget: u64, start: usize, end: usize) -> Option<u64> {
        let units = self.before[end] - self.before[start];
        budget.checked_sub(self.fixed)?.checked_sub(units)
    }

    /// Where the units of each card end.
    fn cut(&self, budgets: &[CardBudget]) -> Vec<usize> {
        let n_units = self.n_layers + 1;
        let nothing = |start: usize| Best { end: start, experts: 0, imbalance: 0.0, cut: start };
        // By card, then by the first unit that it may take.
        let mut table: Vec<Vec<Best>> = Vec::with_capacity(budgets.len());
        let mut after: Vec<Best> = (0..=n_units).map(nothing).collect();
        for card in budgets.iter().rev() {
            let of_start = |start: usize| self.best_from(card.budget.0, start, &after);
            let here: Vec<Best> = (0..=n_units).map(of_start).collect();
            table.push(std::mem::replace(&mut after, here.clone()));
            after = here;
        }
        table.reverse();
        // `table[c]` is what follows card c, so that the cut of card c is found again from it.
        let mut start = 0;
        let mut cuts = Vec::with_capacity(budgets.len());
        for (card, after) in budgets.iter().zip(&table) {
            start = self.best_from(card.budget.0, start, after).cut;
            cuts.push(start);
        }
        cuts
    }

    fn best_from(&self, budget: u64, start: usize, after: &[Best]) -> Best {
        let n_units = self.n_layers + 1;
        let mut best: Option<Best> = None;
        for (end, rest) in after.iter().enumerate().skip(start) {
            let left = self.left(budget, start, end);
            if left.is_none() && end > start {
                break;
            }
            let room = left.unwrap_or(0).checked_div(self.slot).unwrap_or(0);
            let experts = if rest.end == n_units {
                rest.experts.saturating_add(room).min(self.n_experts)
            } else {
                0
            };
            let layers = (end - start) as f64;
            let imbalance = rest.imbalance + layers * layers / budget.max(1) as f64;
            let found = Best { end: rest.end, experts, imbalance, cut: end };
            if best.is_none_or(|best| found.is_better_than(&best)) {
                best = Some(found);
            }
        }
        best.unwrap_or(after[start])
    }
}

/// Puts experts into what the cards have left: those of a card's own layers there, the rest wherever
/// there is room. The most used first; without history one of each layer in turn.
fn fill(sums: &ModelBytes<'_>, cards: &mut [CardPlacement], uses: Option<&[Vec<f64>]>) {
    let n_layers = sums.layers.len();
    let mut room: Vec<u64> = cards.iter().map(|c| c.unused_bytes.0).collect();
    let owner: Vec<Option<usize>> =
        (0..n_layers).map(|l| cards.iter().position(|c| c.layers().contains(&l))).collect();
    let mut lists = vec![vec![Vec::new(); n_layers]; cards.len()];
    let mut elsewhere = Vec::new();
    for (layer, expert) in order(sums, uses) {
        let slot = sums.layers[layer].slot;
        match owner[layer] {
            Some(card) if room[card] >= slot => {
                room[card] -= slot;
                lists[card][layer].push(expert);
            }
            Some(_) | None => elsewhere.push((layer, expert)),
        }
    }
    let least = sums.layers.iter().map(|l| l.slot).filter(|&slot| slot > 0).min().unwrap_or(0);
    for (layer, expert) in elsewhere {
        if room.iter().all(|&room| room < least) {
            break;
        }
        let slot = sums.layers[layer].slot;
        if let Some(card) = room.iter().position(|&room| room >= slot) {
            room[card] -= slot;
            lists[card][layer].push(expert);
        }
    }
    for (card, layers) in cards.iter_mut().zip(lists) {
        let layers = layers.into_iter().enumerate().filter(|(_, experts)| !experts.is_empty());
        card.experts = layers
            .map(|(layer, mut experts)| {
                experts.sort_unstable();
                LayerExperts { layer: layer as u32, experts: ExpertList(experts) }
            })
            .collect();
    }
}

/// Every routed expert, the one that is expected to be used most first.
fn order(sums: &ModelBytes<'_>, uses: Option<&[Vec<f64>]>) -> Vec<(usize, u32)> {
    let most = sums.layers.iter().map(|l| l.n_experts).max().unwrap_or(0);
    let layers: Vec<(usize, u32)> =
        sums.layers.iter().enumerate().map(|(layer, l)| (layer, l.n_experts)).collect();
    let mut order: Vec<(usize, u32)> = Vec::new();
    for expert in 0..most {
        let of_layers = layers.iter().filter(|(_, n_experts)| expert < *n_experts);
        order.extend(of_layers.map(|&(layer, _)| (layer, expert)));
    }
    if let Some(uses) = uses {
        let used = |&(layer, expert): &(usize, u32)| {
            uses.get(layer).and_then(|l| l.get(expert as usize)).copied().unwrap_or(0.0)
        };
        order.sort_by(|a, b| used(b).total_cmp(&used(a)));
    }
    order
}

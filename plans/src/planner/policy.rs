//! Which rule decides who gives way, and which experts never do. Owns the regimes; replays are
//! `simulate`'s.

use super::{Options, PinRule};
use crate::budget::{Holding, ModelBytes};
use crate::catalogue::Catalogue;
use crate::place::Placed;
use crate::plan::Policy;
use crate::simulate;
use crate::units::{Bytes, LayerId};
use crate::usage::History;

/// Below this share of one token's routed bytes no replacement helps: what is brought is gone again
/// before it is asked for (see the measurements that DESIGN.md names under Placement).
const STATIC_BELOW: f64 = 1.0 / 3.0;
/// Up to one token's routed bytes frequency wins, above recency.
const FREQUENCY_BELOW: f64 = 1.0;

/// A policy, the pins under it, and why.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub(super) policy: Policy,
    pub(super) policy_evidence: String,
    pub(super) pins_evidence: String,
}

/// Chooses the policy by the regime and the pins by history; pins are put into `placed`.
pub(super) fn choose(
    sums: &ModelBytes<'_>,
    options: &Options,
    history: Option<&History>,
    placed: &mut Placed,
) -> Choice {
    let uses = uses(sums.model, history);
    let (policy, policy_evidence) = policy(sums, options, uses.is_some(), placed);
    let pins_evidence = match policy {
        Policy::Static => pin_all(sums, uses.as_deref(), placed),
        Policy::Recency | Policy::Frequency => pin(sums, options, history, placed),
    };
    Choice { policy, policy_evidence, pins_evidence }
}

/// The policy that the regime asks for, as far as the engine has it and history can feed it.
fn policy(
    sums: &ModelBytes<'_>,
    options: &Options,
    has_history: bool,
    placed: &Placed,
) -> (Policy, String) {
    let regime = regime(sums, placed);
    if let Some(policy) = options.policy {
        return (policy, format!("{}: given with --policy; {}", policy.name(), regime.finding));
    }
    match regime.wants {
        Policy::Recency => (Policy::Recency, format!("recency: {}", regime.finding)),
        Policy::Static if options.pins == PinRule::None => {
            (Policy::Recency, format!("recency: {}; --pins none forbids pins", regime.finding))
        }
        Policy::Static if !has_history => (
            Policy::Recency,
            format!(
                "recency: {}, and only pins would; there is no usage history to choose them from \
                 yet, so that the slots are left to recency",
                regime.finding
            ),
        ),
        Policy::Static => (Policy::Static, format!("static: {}: pins do", regime.finding)),
        Policy::Frequency if !options.engine.frequency => (
            Policy::Recency,
            format!(
                "recency: {}, but this build's engine has no such policy; --policy frequency plans \
                 with it",
                regime.finding
            ),
        ),
        Policy::Frequency => (Policy::Frequency, format!("frequency: {}", regime.finding)),
    }
}

struct Regime {
    wants: Policy,
    finding: String,
}

/// How the slots compare with what one token is sent to.
fn regime(sums: &ModelBytes<'_>, placed: &Placed) -> Regime {
    let holding = placed.holding();
    if holding.hold_everything(&sums.model.spec) {
        let finding = "every expert has a place of its own, nothing gives way".to_owned();
        return Regime { wants: Policy::Recency, finding };
    }
    let slots = placed.slot_bytes();
    if slots == Bytes(0) {
        let finding = "no expert has a slot, nothing gives way".to_owned();
        return Regime { wants: Policy::Recency, finding };
    }
    let routed = Bytes(sums.routed_per_token());
    let share = slots.as_f64() / routed.as_f64().max(1.0);
    let hold = format!("slots hold {slots}, {share:.2} times the {routed} that a token is sent to");
    if share < STATIC_BELOW {
        let finding = format!("{hold}: below about a third replacement cannot help");
        return Regime { wants: Policy::Static, finding };
    }
    if share < FREQUENCY_BELOW {
        let finding = format!("{hold}: there frequency wins");
        return Regime { wants: Policy::Frequency, finding };
    }
    Regime { wants: Policy::Recency, finding: format!("{hold}: above 1 recency wins") }
}

/// Under static every slot is a pin: the most used experts, then those of the lowest ids, for an empty
/// slot serves nobody. Experts that are on a card are left out.
fn pin_all(sums: &ModelBytes<'_>, uses: Option<&[Vec<f64>]>, placed: &mut Placed) -> String {
    let taken = on_cards(sums, &placed.holding());
    let mut n_unused = 0_usize;
    let pins = placed.slots.caps.iter().enumerate().map(|(layer, &cap)| {
        let used = |expert: u32| {
            uses.and_then(|u| u.get(layer)?.get(expert as usize)).copied().unwrap_or(0.0)
        };
        let mut experts: Vec<u32> = (0..sums.layers[layer].n_experts)
            .filter(|expert| taken[layer].binary_search(expert).is_err())
            .collect();
        experts.sort_by(|&a, &b| used(b).total_cmp(&used(a)));
        experts.truncate(cap as usize);
        n_unused += experts.iter().filter(|&&expert| used(expert) == 0.0).count();
        experts.sort_unstable();
        experts
    });
    let pins: Vec<Vec<u32>> = pins.collect();
    let n_pins: usize = pins.iter().map(Vec::len).sum();
    placed.pin(sums, pins);
    match uses {
        Some(_) => format!(
            "counted: the {n_pins} experts that history used most, {n_unused} of them never, to fill \
             every slot"
        ),
        None => format!(
            "assumed: there is no usage history, so that the {n_pins} pins are those of the lowest \
             ids, no better than any others"
        ),
    }
}

/// Pins from history where its replay supports them; returns why.
fn pin(
    sums: &ModelBytes<'_>,
    options: &Options,
    history: Option<&History>,
    placed: &mut Placed,
) -> String {
    let spec = &sums.model.spec;
    let router = &spec.router;
    let (n_experts, n_active) = (router.n_experts as u32, router.n_experts_active as u32);
    let caps: Vec<(LayerId, u32)> =
        spec.expert_layers().map(|l| (LayerId(l as u32), placed.slots.caps[l])).collect();
    let choice = match options.pins {
        PinRule::None => return "no pins: --pins none".to_owned(),
        PinRule::Judged => simulate::choose_pins(history, &caps, n_experts, n_active),
        PinRule::Share(share) => {
            simulate::pins_of_share(history, &caps, n_experts, n_active, share)
        }
    };
    let taken = on_cards(sums, &placed.holding());
    let mut pins = vec![Vec::new(); spec.n_layers];
    for (layer, mut chosen) in spec.expert_layers().zip(choice.pins) {
        // An expert on a card is not also in main memory.
        chosen.retain(|expert| taken[layer].binary_search(expert).is_err());
        pins[layer] = chosen;
    }
    placed.pin(sums, pins);
    choice.evidence
}

/// Experts of each layer that are on some card, ascending.
fn on_cards(sums: &ModelBytes<'_>, holding: &Holding<'_>) -> Vec<Vec<u32>> {
    let mut taken = vec![Vec::new(); sums.layers.len()];
    for layer in holding.cards.iter().flat_map(|c| &c.experts) {
        if let Some(taken) = taken.get_mut(layer.layer as usize) {
            taken.extend(&layer.experts.0);
        }
    }
    taken.iter_mut().for_each(|experts| experts.sort_unstable());
    taken
}

/// How often each expert of each decoder layer was used, decayed; `None` without a history of this
/// shape that knows any use.
pub(super) fn uses(model: &Catalogue, history: Option<&History>) -> Option<Vec<Vec<f64>>> {
    let history = history?;
    let (shape, router) = (history.shape(), &model.spec.router);
    let n_experts = router.n_experts;
    let is_alike = shape.n_experts as usize == n_experts
        && shape.n_experts_active as usize == router.n_experts_active;
    if !is_alike || n_experts == 0 || history.counts().iter().all(|&count| count <= 0.0) {
        return None;
    }
    let mut uses = vec![Vec::new(); model.spec.n_layers];
    for (layer, counts) in shape.layers.iter().zip(history.counts().chunks_exact(n_experts)) {
        if let Some(uses) = uses.get_mut(layer.0 as usize) {
            *uses = counts.to_vec();
        }
    }
    Some(uses)
}

/// The share of accesses that go to experts on cards, and what that rests on.
pub(super) fn share_on_cards(
    sums: &ModelBytes<'_>,
    holding: &Holding<'_>,
    history: Option<&History>,
) -> (f64, String) {
    let taken = on_cards(sums, holding);
    if let Some(uses) = uses(sums.model, history) {
        let all: f64 = uses.iter().flatten().sum();
        let there = |(uses, taken): (&Vec<f64>, &Vec<u32>)| {
            taken.iter().filter_map(|&e| uses.get(e as usize)).sum::<f64>()
        };
        let share = uses.iter().zip(&taken).map(there).sum::<f64>() / all;
        let evidence = format!(
            "graphics cards {:.0} % of accesses: counted in the usage history",
            share * 100.0
        );
        return (share, evidence);
    }
    let routing = sums.layers.iter().zip(&taken).filter(|(bytes, _)| bytes.n_experts > 0);
    let (sum, n) = routing.fold((0.0, 0), |(sum, n), (bytes, taken)| {
        (sum + taken.len() as f64 / f64::from(bytes.n_experts), n + 1)
    });
    let share = sum / f64::from(n.max(1));
    let evidence = format!(
        "graphics cards {:.0} % of accesses: assumed, their share of the experts, for there is no \
         usage history to choose them by",
        share * 100.0
    );
    (share, evidence)
}

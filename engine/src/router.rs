//! The router: from a layer's router logits to the experts of a token and their weights.

use std::ops::Range;

use tierkeep_kernels::ops;
use tierkeep_plans::spec::{GroupScore, RouterScoring, RouterSpec};

/// Chooses the experts of one token.
///
/// `scores` `(n_outputs)` comes as logits and is left as scores; where the chosen alone share a softmax
/// (gpt-oss), the logits are the scores. The bias takes part in the choice
/// and not in the weights (DeepSeek-V3, section 2.1.2); with groups, only experts of the best
/// groups can be chosen. `chosen` and `weights` `(n_experts_active)` come out in descending weight, ties by
/// lower id. Outputs from `n_experts` on are experts without weights, chosen as the others are.
pub(crate) fn route(
    spec: &RouterSpec,
    bias: Option<&[f32]>,
    scores: &mut [f32],
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    match spec.scoring {
        RouterScoring::Sigmoid => {
            for score in scores.iter_mut() {
                *score = ops::sigmoid(*score);
            }
        }
        RouterScoring::Softmax => ops::softmax_in_place(scores),
        RouterScoring::SoftmaxOfChosen => {}
    }
    let selection = |expert: usize| scores[expert] + bias.map_or(0.0, |b| b[expert]);
    // The best so far in descending order; of equals the first stays before the others.
    let mut found = 0;
    for group in (0..spec.n_groups).filter(|&group| group_is_open(spec, group, &selection)) {
        for expert in group_of(spec, group) {
            let score = selection(expert);
            let is_better = |other: u32| score.total_cmp(&selection(other as usize)).is_gt();
            let mut at = found;
            while at > 0 && is_better(chosen[at - 1]) {
                at -= 1;
            }
            found = (found + 1).min(chosen.len());
            if at < found {
                chosen[at..found].rotate_right(1);
                chosen[at] = expert as u32;
            }
        }
    }
    for (weight, expert) in weights.iter_mut().zip(chosen.iter()) {
        *weight = scores[*expert as usize];
    }
    match spec.scoring {
        RouterScoring::Sigmoid | RouterScoring::Softmax => {}
        RouterScoring::SoftmaxOfChosen => ops::softmax_in_place(weights),
    }
    if spec.renormalise {
        let sum: f32 = weights.iter().sum::<f32>() + 1e-20;
        for weight in weights.iter_mut() {
            *weight /= sum;
        }
    }
    for weight in weights.iter_mut() {
        *weight *= spec.scale;
    }
    sort_by_weight(chosen, weights);
}

/// Outputs of a group.
fn group_of(spec: &RouterSpec, group: usize) -> Range<usize> {
    let size = spec.n_outputs() / spec.n_groups;
    group * size..(group + 1) * size
}

/// Whether a group is among the selected ones: fewer than `n_groups_active` groups are better, ties going
/// to the lower group.
fn group_is_open(spec: &RouterSpec, own: usize, selection: &impl Fn(usize) -> f32) -> bool {
    if spec.n_groups_active >= spec.n_groups {
        return true;
    }
    let group_score = |group: usize| {
        let mut best = [f32::NEG_INFINITY; 2];
        for expert in group_of(spec, group) {
            let score = selection(expert);
            if score > best[0] {
                best = [score, best[0]];
            } else if score > best[1] {
                best[1] = score;
            }
        }
        match spec.group_score {
            GroupScore::BestTwo if group_of(spec, group).len() > 1 => best[0] + best[1],
            GroupScore::BestTwo | GroupScore::Best => best[0],
        }
    };
    let own_score = group_score(own);
    let better = (0..spec.n_groups)
        .filter(|&group| {
            let order = group_score(group).total_cmp(&own_score);
            group != own && (order.is_gt() || order.is_eq() && group < own)
        })
        .count();
    better < spec.n_groups_active
}

/// Insertion sort by descending weight, ties by lower id; there are a few entries.
fn sort_by_weight(chosen: &mut [u32], weights: &mut [f32]) {
    for end in 1..chosen.len() {
        let mut at = end;
        while at > 0 {
            let order = weights[at].total_cmp(&weights[at - 1]);
            if order.is_lt() || order.is_eq() && chosen[at] > chosen[at - 1] {
                break;
            }
            weights.swap(at, at - 1);
            chosen.swap(at, at - 1);
            at -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(n_experts: usize, active: usize) -> RouterSpec {
        RouterSpec {
            n_experts,
            n_zero_experts: 0,
            logit_bias: false,
            group_score: GroupScore::BestTwo,
            n_experts_active: active,
            scoring: RouterScoring::Sigmoid,
            selection_bias: true,
            renormalise: true,
            scale: 2.0,
            n_groups: 1,
            n_groups_active: 1,
        }
    }

    #[test]
    fn the_bias_selects_and_does_not_weigh() {
        let mut scores = [0.0, 1.0, -1.0, 0.5];
        let (mut chosen, mut weights) = ([0; 2], [0.0; 2]);
        let bias = [0.0, 0.0, 9.0, 0.0];
        route(&spec(4, 2), Some(&bias), &mut scores, &mut chosen, &mut weights);
        assert_eq!(chosen, [1, 2]);
        let (a, b) = (1.0 / (1.0 + (-1.0f32).exp()), 1.0 / (1.0 + 1.0f32.exp()));
        assert!((weights[0] - 2.0 * a / (a + b)).abs() < 1e-6);
        assert!((weights[0] + weights[1] - 2.0).abs() < 1e-6);
    }

    #[test]
    fn the_chosen_alone_can_share_a_softmax() {
        let scoring = RouterScoring::SoftmaxOfChosen;
        let spec = RouterSpec { scoring, renormalise: false, scale: 1.0, ..spec(4, 2) };
        let mut scores = [9.0, -2.0, 8.0, 7.5];
        let (mut chosen, mut weights) = ([0; 2], [0.0; 2]);
        route(&spec, None, &mut scores, &mut chosen, &mut weights);
        assert_eq!(chosen, [0, 2]);
        let first = 1.0 / (1.0 + (-1.0f32).exp());
        assert!((weights[0] - first).abs() < 1e-6 && (weights[1] - (1.0 - first)).abs() < 1e-6);
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        let mut scores = [0.3; 6];
        let (mut chosen, mut weights) = ([9; 3], [0.0; 3]);
        route(&spec(6, 3), None, &mut scores, &mut chosen, &mut weights);
        assert_eq!(chosen, [0, 1, 2]);
    }

    #[test]
    fn only_the_best_groups_are_open() {
        let spec = RouterSpec { n_groups: 3, n_groups_active: 1, ..spec(6, 2) };
        // Group 1 has the best pair although group 0 has the best single expert.
        let mut scores = [3.0, -9.0, 2.0, 2.0, 1.0, 1.0];
        let (mut chosen, mut weights) = ([0; 2], [0.0; 2]);
        route(&spec, None, &mut scores, &mut chosen, &mut weights);
        assert_eq!(chosen, [2, 3]);
    }

    #[test]
    fn a_group_can_be_worth_its_best() {
        let group_score = GroupScore::Best;
        let spec = RouterSpec { n_groups: 3, n_groups_active: 1, group_score, ..spec(6, 2) };
        let mut scores = [3.0, -9.0, 2.0, 2.0, 1.0, 1.0];
        let (mut chosen, mut weights) = ([0; 2], [0.0; 2]);
        route(&spec, None, &mut scores, &mut chosen, &mut weights);
        assert_eq!(chosen, [0, 1]);
    }

    /// A softmax over all outputs, the bias in the choice alone, no renormalisation, the scale last.
    #[test]
    fn experts_without_weights_are_chosen_as_the_others_are() {
        let spec = RouterSpec {
            n_zero_experts: 2,
            scoring: RouterScoring::Softmax,
            renormalise: false,
            scale: 6.0,
            ..spec(3, 2)
        };
        let mut scores = [0.0, 1.0, 0.5, 0.0, 2.0];
        let (mut chosen, mut weights) = ([0; 2], [0.0; 2]);
        let bias = [0.0, 0.0, 0.0, 9.0, 0.0];
        route(&spec, Some(&bias), &mut scores, &mut chosen, &mut weights);
        assert_eq!(chosen, [4, 3]);
        let sum: f32 = [0.0f32, 1.0, 0.5, 0.0, 2.0].map(f32::exp).iter().sum();
        assert!((weights[0] - 6.0 * 2.0f32.exp() / sum).abs() < 1e-5, "{weights:?}");
        assert!((weights[1] - 6.0 / sum).abs() < 1e-5, "{weights:?}");
    }

    #[test]
    fn experts_stay_distinct_when_scores_are_not_numbers() {
        let mut scores = [f32::NAN; 4];
        let (mut chosen, mut weights) = ([0; 3], [0.0; 3]);
        route(&spec(4, 3), None, &mut scores, &mut chosen, &mut weights);
        chosen.sort_unstable();
        assert!(chosen.windows(2).all(|w| w[0] < w[1]));
    }
}

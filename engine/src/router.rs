//! The router: from a layer's router logits to the experts of a token and their weights.

use tierkeep_kernels::ops;
use tierkeep_plans::spec::{RouterScoring, RouterSpec};

/// Chooses the experts of one token.
///
/// `scores` `(n_experts)` comes as logits and is left as scores. The bias takes part in the choice
/// and not in the weights (DeepSeek-V3, section 2.1.2); with groups, only experts of the best
/// groups can be chosen, a group's score being the sum of its two best. `chosen` and `weights`
/// `(n_experts_active)` come out in descending weight, ties by lower id.
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
        // `supports` refuses a softmax of the chosen alone.
        RouterScoring::Softmax | RouterScoring::SoftmaxOfChosen => ops::softmax_in_place(scores),
    }
    let selection = |expert: usize| scores[expert] + bias.map_or(0.0, |b| b[expert]);
    for rank in 0..chosen.len() {
        let (taken, rest) = chosen.split_at_mut(rank);
        let mut best: Option<usize> = None;
        for expert in 0..spec.n_experts {
            let open = !taken.contains(&(expert as u32)) && group_is_open(spec, expert, &selection);
            let better = best.is_none_or(|b| selection(expert).total_cmp(&selection(b)).is_gt());
            if open && better {
                best = Some(expert);
            }
        }
        // The config guarantees that the open groups hold enough experts.
        rest[0] = best.unwrap_or(0) as u32;
    }
    for (weight, expert) in weights.iter_mut().zip(chosen.iter()) {
        *weight = scores[*expert as usize];
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

/// Whether an expert's group is among the selected ones: fewer than `n_groups_active` groups are
/// better, ties going to the lower group.
fn group_is_open(spec: &RouterSpec, expert: usize, selection: &impl Fn(usize) -> f32) -> bool {
    if spec.n_groups_active >= spec.n_groups {
        return true;
    }
    let size = spec.n_experts / spec.n_groups;
    let group_score = |group: usize| {
        let mut best = [f32::NEG_INFINITY; 2];
        for expert in group * size..(group + 1) * size {
            let score = selection(expert);
            if score > best[0] {
                best = [score, best[0]];
            } else if score > best[1] {
                best[1] = score;
            }
        }
        if size == 1 { best[0] } else { best[0] + best[1] }
    };
    let own = expert / size;
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
    use tierkeep_plans::spec::GroupScore;

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
    fn experts_stay_distinct_when_scores_are_not_numbers() {
        let mut scores = [f32::NAN; 4];
        let (mut chosen, mut weights) = ([0; 3], [0.0; 3]);
        route(&spec(4, 3), None, &mut scores, &mut chosen, &mut weights);
        chosen.sort_unstable();
        assert!(chosen.windows(2).all(|w| w[0] < w[1]));
    }
}

//! The routed experts of a batch: each is read at most once, and those that are at hand are computed
//! together. Owns the way of tokens to their experts' rows and back; the products are `expert_products`'s.
//!
//! A token's experts are added in ascending id, whatever is computed together.

use crate::compute::Compute;
use crate::error::EngineError;
use crate::expert_products::{self, Leased, Tokens};
use crate::feed_forward::{ExpertLists, Experts, MAX_ACTIVE, ascending};
use crate::profile::Stage;
use crate::workspace::Workspace;

/// Adds the experts of a batch of `n` to `work.block`.
pub(crate) fn union(
    compute: Compute<'_>,
    n: usize,
    experts: &mut Experts<'_>,
    work: &mut Workspace,
) -> Result<(), EngineError> {
    let layer = experts.layer;
    let n_chosen = n * experts.spec.router.n_experts_active;
    experts.begin(&work.chosen[..n_chosen], n)?;
    list_rows(experts.lists, &work.chosen[..n_chosen]);
    // Nothing is read and nothing gives way, so that it does not matter how many are held at once.
    let is_at_hand = experts.store.are_at_hand(layer, &experts.lists.union);
    let most_rows = if is_at_hand { work.gathered.len() / experts.spec.hidden_size } else { 0 };
    let mut first = 0;
    while first < experts.lists.union.len() {
        let end = group_end(&experts.lists.starts, first, most_rows);
        for at in first..end {
            let expert = experts.lists.union[at];
            let stays = experts.lists.keep.contains(&expert);
            let lease = experts.lease(expert, stays)?;
            experts.lists.leases.push(lease);
        }
        compute.profile.lap(Stage::Lookup);
        group(compute, (n, first..end), experts, work)?;
        compute.profile.lap(Stage::Experts);
        for lease in experts.lists.leases.drain(..) {
            experts.store.release(lease);
        }
        for at in first..end {
            let expert = experts.lists.union[at];
            let stays = experts.lists.keep.contains(&expert);
            experts.store.set_wanted(layer, expert, stays);
        }
        first = end;
    }
    experts.close();
    Ok(())
}

/// Gives every choice of the batch its row: those of the first expert of the union come first.
fn list_rows(lists: &mut ExpertLists, chosen: &[u32]) {
    let ExpertLists { counts, union, order, row_of, starts, leases, .. } = lists;
    leases.clear();
    starts.clear();
    let mut end = 0;
    for &expert in union.iter() {
        starts.push(end);
        // From here on where the next choice of this expert goes.
        end += std::mem::replace(&mut counts[expert as usize], end);
    }
    starts.push(end);
    for (at, &expert) in chosen.iter().enumerate() {
        row_of[at] = u32::MAX;
        if let Some(next) = counts.get_mut(expert as usize) {
            row_of[at] = *next;
            order[*next as usize] = at as u32;
            *next += 1;
        }
    }
}

/// The end of the experts from `first` on that have at most so many rows together; at least one.
fn group_end(starts: &[u32], first: usize, most_rows: usize) -> usize {
    let mut end = first + 1;
    while end + 1 < starts.len()
        && end - first < MAX_ACTIVE
        && (starts[end + 1] - starts[first]) as usize <= most_rows
    {
        end += 1;
    }
    end
}

/// Some experts of the union, which are leased, for the tokens that chose them.
fn group(
    compute: Compute<'_>,
    (n, own): (usize, std::ops::Range<usize>),
    experts: &Experts<'_>,
    work: &mut Workspace,
) -> Result<(), EngineError> {
    let (hidden, ff_size) = (experts.spec.hidden_size, experts.spec.expert_ff_size);
    let k = experts.spec.router.n_experts_active;
    let ExpertLists { leases, order, row_of, starts, .. } = &*experts.lists;
    let starts = &starts[own.start..=own.end];
    let rows = starts[0] as usize..starts[starts.len() - 1] as usize;
    let Workspace {
        normed,
        gathered,
        expert_inner,
        expert_output,
        chosen,
        chosen_weights,
        block,
        norm,
        ..
    } = work;
    let x = &mut gathered[..rows.len() * hidden];
    let of_rows = &order[rows.clone()];
    compute.pool.for_each_chunk(x, hidden, |row, x| {
        let token = of_rows[row] as usize / k;
        x.copy_from_slice(&normed[token * hidden..(token + 1) * hidden]);
    });
    let leased = Leased { store: experts.store, leases };
    let inner = &mut expert_inner[..2 * rows.len() * ff_size];
    let tokens = Tokens::Of(x, starts);
    expert_products::inner(compute, experts.spec, leased, tokens, inner, norm)?;
    let output = &mut expert_output[..rows.len() * hidden];
    expert_products::outputs(compute, experts.spec, leased, (inner, tokens), output, norm)?;
    let (output, kernels) = (&*output, compute.kernels);
    compute.pool.for_each_chunk(&mut block[..n * hidden], hidden, |token, block| {
        let choices = token * k..(token + 1) * k;
        for rank in ascending(&chosen[choices]) {
            let row = row_of[token * k + rank] as usize;
            if rows.contains(&row) {
                let start = (row - rows.start) * hidden;
                let weight = chosen_weights[token * k + rank];
                kernels.add_scaled(block, weight, &output[start..start + hidden]);
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::group_end;

    #[test]
    fn experts_are_computed_together_while_their_rows_fit() {
        let starts = [0, 3, 5, 9, 10];
        assert_eq!(group_end(&starts, 0, 0), 1, "at least one");
        assert_eq!(group_end(&starts, 0, 5), 2);
        assert_eq!(group_end(&starts, 0, 8), 2);
        assert_eq!(group_end(&starts, 0, 9), 3);
        assert_eq!(group_end(&starts, 2, 99), 4, "no further than the last");
    }
}

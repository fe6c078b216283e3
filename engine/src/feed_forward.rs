//! The feed-forward half of a layer: dense SwiGLU, routed experts through the store, shared experts.
//!
//! A token's experts are added in ascending id whatever the batch, so that a token by itself and the
//! same token in a batch give the same bits.

use tierkeep_kernels::ops;
use tierkeep_plans::spec::{Activation, ArchSpec};

use crate::compute::{Batch, Compute, add};
use crate::counters::LayerCounter;
use crate::error::EngineError;
use crate::expert_batch;
use crate::expert_products::{self, Leased, Tokens, activate};
use crate::profile::Stage;
use crate::router;
use crate::shard_io::ShardFiles;
use crate::store::{Lease, Store};
use crate::weights::{RouterWeights, SwiGlu};
use crate::window::Window;
use crate::workspace::Workspace;

/// Most experts that a token may be routed to.
pub(crate) const MAX_ACTIVE: usize = 64;

/// Lists that a layer's experts need, allocated once.
#[derive(Debug)]
pub(crate) struct ExpertLists {
    /// Those of one token.
    pub(crate) leases: Vec<Lease>,
    /// Tokens of the batch that each expert has.
    pub(crate) counts: Vec<u32>,
    /// Experts of the batch, ascending.
    pub(crate) union: Vec<u32>,
    /// Those of them that are to stay, by ascending count.
    pub(crate) keep: Vec<u32>,
    /// Which choice of the batch each row of the experts is: those of the first expert, then of the next.
    pub(crate) order: Vec<u32>,
    /// The row of each choice of the batch.
    pub(crate) row_of: Vec<u32>,
    /// Where the rows of each expert of `union` begin, and where the last ones end.
    pub(crate) starts: Vec<u32>,
    /// What was begun before it is needed.
    pub(crate) window: Window,
}

impl ExpertLists {
    /// For batches of at most `batch`.
    pub(crate) fn new(spec: &ArchSpec, batch: usize) -> Self {
        let n_chosen = batch * spec.router.n_experts_active;
        let n_experts = spec.router.n_experts;
        Self {
            leases: Vec::with_capacity(MAX_ACTIVE),
            order: vec![0; n_chosen],
            row_of: vec![0; n_chosen],
            starts: Vec::with_capacity(n_experts + 1),
            counts: vec![0; n_experts],
            union: Vec::with_capacity(n_experts),
            keep: Vec::with_capacity(n_experts),
            window: Window::new(n_experts),
        }
    }
}

/// Where routed experts come from, and who counts.
pub(crate) struct Experts<'a> {
    pub(crate) spec: &'a ArchSpec,
    pub(crate) store: &'a mut Store,
    pub(crate) files: &'a ShardFiles,
    pub(crate) lists: &'a mut ExpertLists,
    pub(crate) counts: LayerCounter<'a>,
    pub(crate) layer: usize,
}

/// Fills `work.block (batch, hidden)` from `work.normed (batch, hidden)` by a dense feed-forward.
pub(crate) fn dense(
    compute: Compute<'_>,
    weights: &SwiGlu,
    batch: Batch,
    spec: &ArchSpec,
    work: &mut Workspace,
) -> Result<(), EngineError> {
    let Workspace { normed, inner, block, .. } = work;
    let x = (&normed[..], spec.hidden_size);
    let shape = (spec.dense_ff_size, spec.activation);
    swiglu(compute, weights, shape, batch.len, x, inner, block)
}

/// Fills `work.block (batch, hidden)` from `work.normed (batch, hidden)` by the experts in `work.chosen`
/// and the shared ones.
pub(crate) fn experts(
    compute: Compute<'_>,
    shared: Option<&SwiGlu>,
    batch: Batch,
    experts: &mut Experts<'_>,
    work: &mut Workspace,
) -> Result<(), EngineError> {
    let (n, hidden) = (batch.len, experts.spec.hidden_size);
    work.block[..n * hidden].fill(0.0);
    let spec = experts.spec;
    // What the shared ones come to is kept in `gathered` until the others are added up.
    let share = |work: &mut Workspace| match shared {
        Some(shared) => {
            let Workspace { normed, inner, gathered, .. } = work;
            let shape = (spec.shared_ff_size, spec.activation);
            swiglu(compute, shared, shape, n, (normed, hidden), inner, gathered)?;
            compute.profile.lap(Stage::Dense);
            Ok(())
        }
        None => Ok(()),
    };
    if n == 1 {
        one_token(compute, experts, work, share)?;
        zero_experts(spec, n, work);
    } else {
        expert_batch::union(compute, n, experts, work)?;
        zero_experts(spec, n, work);
        share(work)?;
    }
    if shared.is_some() {
        let Workspace { gathered, block, .. } = work;
        add(compute.pool, &mut block[..n * hidden], &gathered[..n * hidden], hidden);
    }
    Ok(())
}

/// Experts without weights return their input (LongCat-Flash, section 2.1.1): nothing is looked up,
/// read or counted. Their ids are above those of the others, so that they are added after them.
fn zero_experts(spec: &ArchSpec, n: usize, work: &mut Workspace) {
    let (router, hidden) = (&spec.router, spec.hidden_size);
    if router.n_zero_experts == 0 {
        return;
    }
    let Workspace { normed, chosen, chosen_weights, block, .. } = work;
    let k = router.n_experts_active;
    for token in 0..n {
        let chosen = &chosen[token * k..(token + 1) * k];
        let row = token * hidden..(token + 1) * hidden;
        for rank in ascending(chosen).filter(|&rank| router.is_zero(chosen[rank])) {
            let weight = chosen_weights[token * k + rank];
            ops::add_scaled(&mut block[row.clone()], weight, &normed[row.clone()]);
        }
    }
}

/// `out = down(silu(gate(x)) * up(x))`, or with another activation, for a whole batch.
fn swiglu(
    compute: Compute<'_>,
    weights: &SwiGlu,
    (ff_size, activation): (usize, Activation),
    n: usize,
    (x, hidden): (&[f32], usize),
    inner: &mut [f32],
    out: &mut [f32],
) -> Result<(), EngineError> {
    let x = &x[..n * hidden];
    let inner = &mut inner[..2 * n * ff_size];
    compute.products([weights.gate, weights.up], x, n, inner)?;
    let (gate, up) = inner.split_at_mut(n * ff_size);
    activate(compute, activation, gate, up);
    compute.product(weights.down, gate, n, &mut out[..n * hidden])
}

/// Routes every token of the batch by `work.normed`, into `work.chosen` and `work.chosen_weights`.
pub(crate) fn choose(
    compute: Compute<'_>,
    router: &RouterWeights,
    batch: Batch,
    spec: &ArchSpec,
    work: &mut Workspace,
) -> Result<(), EngineError> {
    let (n, n_outputs, k) = (batch.len, spec.router.n_outputs(), spec.router.n_experts_active);
    let scores = &mut work.router_scores[..n * n_outputs];
    compute.product(router.weight, &work.normed[..n * spec.hidden_size], n, scores)?;
    compute.add_bias(router.logit_bias, scores, &mut work.norm)?;
    let bias = match router.selection_bias {
        Some(bias) => Some(compute.weights.vector(compute.kernels, bias, &mut work.norm)?),
        None => None,
    };
    for ((scores, chosen), weights) in scores
        .chunks_exact_mut(n_outputs)
        .zip(work.chosen.chunks_exact_mut(k))
        .zip(work.chosen_weights.chunks_exact_mut(k))
    {
        router::route(&spec.router, bias, scores, chosen, weights);
    }
    Ok(())
}

/// The experts of one token, all leased at once, and those that all tokens share. The products of what is
/// in memory take two wake-ups; what is read meanwhile is computed as it comes. Every output has a place of
/// its own and they are added up in the order of their ids, so that no bit depends on who came first.
fn one_token(
    compute: Compute<'_>,
    experts: &mut Experts<'_>,
    work: &mut Workspace,
    mut share: impl FnMut(&mut Workspace) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let (hidden, ff_size) = (experts.spec.hidden_size, experts.spec.expert_ff_size);
    let n_active = experts.spec.router.n_experts_active;
    experts.lease_all(&work.chosen[..n_active])?;
    compute.profile.lap(Stage::Lookup);
    let k = experts.lists.leases.len();
    let mut is_shared = false;
    let mut done = 0;
    while done < k {
        let come = bring_forward(experts, done)?;
        if come == done {
            // Nothing is there to be computed, but the shared ones.
            match std::mem::replace(&mut is_shared, true) {
                false => share(work)?,
                true => {
                    experts.store.wait_for_any();
                    compute.profile.lap(Stage::Lookup);
                }
            }
            continue;
        }
        let Workspace { normed, expert_inner, expert_output, norm, .. } = &mut *work;
        let leased = Leased { store: experts.store, leases: &experts.lists.leases[done..come] };
        let inner = &mut expert_inner[2 * done * ff_size..2 * come * ff_size];
        let tokens = Tokens::One(&normed[..hidden]);
        expert_products::inner(compute, experts.spec, leased, tokens, inner, norm)?;
        let output = &mut expert_output[done * hidden..come * hidden];
        expert_products::outputs(compute, experts.spec, leased, (inner, tokens), output, norm)?;
        compute.profile.lap(Stage::Experts);
        done = come;
    }
    if !is_shared {
        share(work)?;
    }
    let Workspace { expert_output, chosen, chosen_weights, block, .. } = work;
    let leases = &mut experts.lists.leases;
    for rank in ascending(&chosen[..n_active]) {
        // Those without weights have no lease.
        let Some(at) = leases.iter().position(|lease| lease.is_of(chosen[rank])) else { continue };
        let output = &expert_output[at * hidden..(at + 1) * hidden];
        compute.kernels.add_scaled(&mut block[..hidden], chosen_weights[rank], output);
    }
    for lease in leases.drain(..) {
        experts.store.release(lease);
    }
    Ok(())
}

/// Of the leases from `first` on, brings those forward whose bytes are there; returns where they end.
fn bring_forward(experts: &mut Experts<'_>, first: usize) -> Result<usize, EngineError> {
    let leases = &mut experts.lists.leases;
    let mut end = first;
    for at in first..leases.len() {
        if experts.store.has_come(&leases[at])? {
            leases.swap(end, at);
            end += 1;
        }
    }
    Ok(end)
}

/// Positions of `chosen` in ascending order of its values, which are distinct.
pub(crate) fn ascending(chosen: &[u32]) -> impl Iterator<Item = usize> + '_ {
    let mut last: Option<u32> = None;
    std::iter::from_fn(move || {
        let later = chosen.iter().enumerate().filter(|(_, id)| last.is_none_or(|l| **id > l));
        let (rank, id) = later.min_by_key(|(_, id)| **id)?;
        last = Some(*id);
        Some(rank)
    })
}

/// Lists the experts of a batch, and those of them that are to stay: the most used.
pub(crate) fn list_union(chosen: &[u32], experts: &mut Experts<'_>) {
    let layer = experts.layer;
    let ExpertLists { counts, union, keep, .. } = &mut *experts.lists;
    counts.fill(0);
    for &expert in chosen {
        // Those without weights have no count.
        if let Some(count) = counts.get_mut(expert as usize) {
            *count += 1;
        }
    }
    union.clear();
    union.extend((0..counts.len() as u32).filter(|&e| counts[e as usize] > 0));
    keep.clear();
    keep.extend(union.iter().copied().filter(|&e| !experts.store.is_pinned(layer, e)));
    keep.sort_unstable_by_key(|&e| (counts[e as usize], std::cmp::Reverse(e)));
    let surplus = keep.len().saturating_sub(experts.store.cache_slots(layer));
    keep.drain(..surplus);
    for &expert in union.iter() {
        experts.store.set_wanted(layer, expert, true);
    }
}

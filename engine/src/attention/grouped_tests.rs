//! A window's ring against a cache of every position, bit for bit.

use super::*;
use crate::kv::{KvCache, LayerCache};
use crate::memory::Account;
use tierkeep_kernels::Isa;
use tierkeep_plans::budget::{KvElement, Ledger, LedgerLine, Line, layer_kv_bytes};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::spec::{ArchSpec, AttentionSpec};
use tierkeep_plans::units::Bytes;

const CONTEXT: usize = 512;
const WINDOW: usize = 8;

/// An architecture of which every layer has a window of [`WINDOW`].
fn windowed() -> ArchSpec {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/oracles/mixtral");
    let mut spec = Catalogue::open(directory.as_ref()).unwrap().spec;
    spec.layers.iter_mut().for_each(|layer| layer.window = Some(WINDOW));
    spec
}

fn grouped(spec: &ArchSpec) -> &GroupedAttention {
    match &spec.attention {
        AttentionSpec::Grouped(grouped) => grouped,
        AttentionSpec::Latent(_) => panic!("latent"),
    }
}

/// The cache of the first layer, with not a byte more than planned.
fn cache(spec: &ArchSpec, kv: KvElement) -> GroupedCache {
    let bytes = (0..spec.n_layers).map(|l| layer_kv_bytes(spec, l, CONTEXT as u64, kv)).sum();
    let line = LedgerLine { line: Line::KvCache, bytes: Bytes(bytes), note: String::new() };
    let mut account = Account::new(&Ledger(vec![line]));
    let mut cache = KvCache::new(spec, CONTEXT, kv, &mut account).unwrap();
    assert_eq!(account.bound(Line::KvCache), Bytes(bytes), "bound as planned");
    match cache.caches.swap_remove(0) {
        LayerCache::Grouped(cache) => cache,
        LayerCache::Latent(_) => panic!("latent"),
    }
}

/// A number that looks like no other: of what, of which position, of which element.
fn value(what: u32, position: usize, at: usize) -> f32 {
    let mut hash = what ^ (position as u32).wrapping_mul(0x9e37_79b9) ^ (at as u32) << 7;
    for _ in 0..3 {
        hash = (hash ^ (hash >> 15)).wrapping_mul(0x85eb_ca6b);
    }
    (hash as f32 / u32::MAX as f32 - 0.5) * 4.0
}

/// `(n, width)` of the positions from `first`.
fn rows(what: u32, first: usize, n: usize, width: usize) -> Vec<f32> {
    (0..n * width).map(|i| value(what, first + i / width, i % width)).collect()
}

/// Outputs of all positions, `batch` at a time.
fn through_the_ring(
    spec: &ArchSpec,
    kv: KvElement,
    (batch, threads, columns): (usize, usize, usize),
    sinks: Option<&[f32]>,
) -> Vec<u32> {
    let a = grouped(spec);
    let (q, kv_width) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
    let mut cache = cache(spec, kv);
    let kernels = Kernels::new(Isa::Scalar).unwrap();
    let pool = Pool::new(threads, &[]).unwrap();
    let mut all = Vec::new();
    let mut first = 0;
    while first < CONTEXT {
        let len = batch.min(CONTEXT - first);
        let mut buffers = GroupedBuffers {
            projected: [
                rows(1, first, len, q),
                rows(2, first, len, kv_width),
                rows(3, first, len, kv_width),
            ]
            .concat(),
            output: vec![f32::NAN; len * q],
            scratch: vec![f32::NAN; threads * columns * (WINDOW + a.head_dim)],
            columns,
        };
        let batch = Batch { len, first, row_len: CONTEXT };
        enter(((kernels, &pool), (a, sinks)), batch, &mut cache, &mut buffers).unwrap();
        all.extend(buffers.projected[..len * q].iter().map(|x| x.to_bits()));
        first += len;
    }
    all
}

/// The same from a cache of every position, of which each token is shown the last [`WINDOW`].
fn from_a_full_cache(spec: &ArchSpec, kv: KvElement, sinks: Option<&[f32]>) -> Vec<u32> {
    let a = grouped(spec);
    let mut full = spec.clone();
    full.layers.iter_mut().for_each(|layer| layer.window = None);
    let mut cache = cache(&full, kv);
    let kernels = Kernels::new(Isa::Scalar).unwrap();
    let pool = Pool::new(1, &[]).unwrap();
    let width = a.n_kv_heads * a.head_dim;
    for position in 0..CONTEXT {
        let (key, value) = (rows(2, position, 1, width), rows(3, position, 1, width));
        for head in 0..a.n_kv_heads {
            let own = head * a.head_dim..(head + 1) * a.head_dim;
            let row = head * CONTEXT + position;
            let parts = (kernels, &pool);
            cache.keys.put(parts, (row, 1), |_| &key[own.clone()]);
            cache.values.put(parts, (row, 1), |_| &value[own.clone()]);
        }
    }
    let n_rows = a.n_kv_heads * CONTEXT;
    let (keys, values) =
        (cache.keys.matrix(0, n_rows).unwrap(), cache.values.matrix(0, n_rows).unwrap());
    let mut all = Vec::new();
    for position in 0..CONTEXT {
        let query = rows(1, position, 1, a.n_heads * a.head_dim);
        for (head, query) in query.chunks_exact(a.head_dim).enumerate() {
            let base = head / (a.n_heads / a.n_kv_heads) * CONTEXT;
            let seen = base + (position + 1).saturating_sub(WINDOW)..base + position + 1;
            let mut scores = vec![0.0; seen.len()];
            kernels.dot_rows(&keys, seen.clone(), query, &mut scores);
            scores.iter_mut().for_each(|score| *score *= 1.0 / (a.head_dim as f32).sqrt());
            match sinks {
                Some(sinks) => {
                    tierkeep_kernels::ops::softmax_with_sink_in_place(&mut scores, sinks[head])
                }
                None => tierkeep_kernels::ops::softmax_in_place(&mut scores),
            }
            let mut out = vec![0.0; a.head_dim];
            kernels.accumulate_rows(&values, seen, &scores, &mut out);
            all.extend(out.iter().map(|x| x.to_bits()));
        }
    }
    all
}

#[test]
fn a_window_is_a_cache_of_every_position_seen_in_part() {
    let spec = windowed();
    let sinks: Vec<f32> = (0..grouped(&spec).n_heads).map(|head| value(4, 0, head)).collect();
    for kv in [KvElement::F32, KvElement::F16] {
        for sinks in [None, Some(sinks.as_slice())] {
            let expected = from_a_full_cache(&spec, kv, sinks);
            let steps = [(1, 1, 16), (3, 2, 1), (WINDOW, 1, 4), (WINDOW + 1, 2, 6), (64, 3, 16)];
            for steps in steps {
                assert!(through_the_ring(&spec, kv, steps, sinks) == expected, "{kv:?} {steps:?}");
            }
        }
    }
    assert!(
        from_a_full_cache(&spec, KvElement::F32, None)
            != from_a_full_cache(&spec, KvElement::F32, Some(&sinks)),
        "sinks change something"
    );
}

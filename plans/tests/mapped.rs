//! Plans whose dense weights are mapped: what they count, and what is refused of them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use std::collections::HashSet;
use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;
use tierkeep_doctor::Facts;
use tierkeep_plans::budget::{
    EmbeddingResidency, Line, MAP_PAGE_BYTES, mapped_ranges, resident_tensors,
};
use tierkeep_plans::catalogue::{Catalogue, Role, Span, Tensor};
use tierkeep_plans::place::DenseRule;
use tierkeep_plans::plan::{Abilities, Need, Plan, PlanError};
use tierkeep_plans::planner::{self, Options, PlanRefusal};
use tierkeep_plans::units::{Bytes, SizeRequest};

fn open(path: &str) -> Catalogue {
    Catalogue::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

/// Of one file in our own container, and of published form with its tensors in another order.
static NANO: LazyLock<Catalogue> = LazyLock::new(|| open("examples/glm-nano"));
static OLMOE: LazyLock<Catalogue> = LazyLock::new(|| open("tests/oracles/olmoe"));

fn mapped(model: &Catalogue, budget: u64) -> Result<Plan, PlanRefusal> {
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(budget))),
        allow_overcommit: true,
        context: Some(64),
        prefill_batch: Some(8),
        dense: DenseRule::Mapped,
        ..Options::default()
    };
    planner::plan(model, &Facts::default(), &options, None)
}

/// Every page that holds a byte of the tensors, one by one.
fn pages<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> u64 {
    let mut pages = HashSet::new();
    for span in tensors.flat_map(|t| [Some(t.weight), t.scales]).flatten() {
        let end = (span.offset + span.bytes).div_ceil(MAP_PAGE_BYTES);
        pages.extend((span.offset / MAP_PAGE_BYTES..end).map(|page| (span.shard, page)));
    }
    pages.len() as u64 * MAP_PAGE_BYTES
}

#[test]
fn the_line_is_the_pages_that_hold_dense_weights() {
    for model in [&*OLMOE, &*NANO] {
        let whole = mapped(model, 1 << 30).unwrap();
        whole.check(model).unwrap();
        assert_eq!(whole.engine.embedding, EmbeddingResidency::Resident);
        let all = resident_tensors(model, EmbeddingResidency::Resident);
        assert_eq!(whole.ledger.bytes(Line::DenseWeights), Bytes(pages(all)));
        assert!(whole.placement.streamed.layers.is_empty());
        // Half of the experts less: the embedding stays on disk, and its pages are not mapped.
        let less = whole.ledger.total().0 - model.routed_bytes().0 / 2;
        let small = mapped(model, less).unwrap();
        assert_eq!(small.engine.embedding, EmbeddingResidency::RowRead);
        let all = resident_tensors(model, EmbeddingResidency::RowRead);
        assert_eq!(small.ledger.bytes(Line::DenseWeights), Bytes(pages(all)));
    }
}

/// A plan that is edited to map and to stream keeps in its line what is not streamed.
#[test]
fn streamed_layers_are_not_mapped() {
    let model = &*NANO;
    let mut plan = mapped(model, 1 << 30).unwrap();
    plan.placement.streamed.layers = vec![1, 3];
    assert!(matches!(
        plan.check(model),
        Err(PlanError::LedgerMismatch { line: Line::DenseWeights | Line::StreamBuffers, .. })
    ));
    plan.settle(model);
    plan.check(model).unwrap();
    let stays = resident_tensors(model, EmbeddingResidency::Resident)
        .filter(|t| !matches!(t.role, Role::Layer { layer: 1 | 3, .. }));
    assert_eq!(plan.ledger.bytes(Line::DenseWeights), Bytes(pages(stays)));
}

#[test]
fn mapping_is_a_need_with_a_remedy_and_is_never_chosen_unasked() {
    let plan = mapped(&OLMOE, 1 << 30).unwrap();
    let without = Abilities { mapped_dense: false, ..Abilities::ALL };
    assert_eq!(plan.needs_beyond(&without), [Need::MappedDense]);
    assert!(Need::MappedDense.remedy().contains("--dense resident"));
    let text = plan.to_toml().unwrap();
    assert!(text.contains("dense = \"mapped\""), "{text}");
    let read = Plan::from_toml(&text, "plan.toml".as_ref()).unwrap();
    assert_eq!(read, plan);
    let auto = Options { ram: Some(SizeRequest::Absolute(Bytes(1 << 30))), ..Options::default() };
    let auto = planner::plan(&OLMOE, &Facts::default(), &auto, None).unwrap();
    assert!(auto.to_toml().unwrap().contains("dense = \"resident\""));
}

#[test]
fn what_does_not_fit_mapped_says_what_would() {
    let Err(PlanRefusal::DoesNotFit { result, would_fit, .. }) = mapped(&NANO, 1000) else {
        panic!("it fits in 1000 bytes")
    };
    assert_eq!(would_fit.resident_budget, Some(result.smallest_budget));
    assert!(mapped(&NANO, result.smallest_budget.0).is_ok());
    assert!(mapped(&NANO, result.smallest_budget.0 - 1).is_err());
}

#[test]
fn ranges_are_whole_pages_and_one_where_they_touch() {
    const P: u64 = MAP_PAGE_BYTES;
    let span = |shard, offset, bytes| Span { shard, offset, bytes };
    let cases = [
        (vec![span(0, 5, 1)], vec![span(0, 0, P)]),
        // Neighbours in a page, in pages that touch, and with a page between them.
        (vec![span(0, 9, 4), span(0, 5, 4)], vec![span(0, 0, P)]),
        (vec![span(0, 0, P), span(0, P, 1)], vec![span(0, 0, 2 * P)]),
        (vec![span(0, 0, 1), span(0, 2 * P, 1)], vec![span(0, 0, P), span(0, 2 * P, P)]),
        // One within another, the same place of two shards, and nothing at all.
        (vec![span(0, 0, 9 * P), span(0, P, 1)], vec![span(0, 0, 9 * P)]),
        (vec![span(1, 0, 1), span(0, 0, 1)], vec![span(0, 0, P), span(1, 0, P)]),
        (vec![span(0, 77, 0)], vec![]),
    ];
    for (spans, expected) in cases {
        assert_eq!(mapped_ranges(spans.clone()), expected, "{spans:?}");
    }
}

proptest! {
    /// Against sets of pages; and no range touches the next.
    #[test]
    fn ranges_hold_exactly_the_pages_of_their_spans(
        spans in prop::collection::vec((0_u32..3, 0_u64..200_000, 0_u64..30_000), 0..30)
    ) {
        let spans: Vec<Span> =
            spans.into_iter().map(|(shard, offset, bytes)| Span { shard, offset, bytes }).collect();
        let of = |spans: &[Span]| {
            let mut pages = HashSet::new();
            for span in spans.iter().filter(|s| s.bytes > 0) {
                let end = (span.offset + span.bytes).div_ceil(MAP_PAGE_BYTES);
                pages.extend((span.offset / MAP_PAGE_BYTES..end).map(|page| (span.shard, page)));
            }
            pages
        };
        let ranges = mapped_ranges(spans.clone());
        prop_assert_eq!(of(&ranges), of(&spans));
        let held: u64 = ranges.iter().map(|r| r.bytes).sum();
        prop_assert_eq!(held, of(&spans).len() as u64 * MAP_PAGE_BYTES);
        for pair in ranges.windows(2) {
            let (a, b) = (pair[0], pair[1]);
            prop_assert!(a.shard < b.shard || a.offset + a.bytes < b.offset);
        }
    }
}

//! Two containers over one text: against itself, against figures of numpy, against sums that this test
//! makes of all logits at once, however the text is cut.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops where something is wrong")]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tierkeep_doctor::Facts;
use tierkeep_engine::compare::{
    CompareError, Compared, Place, Progress, Sequence, Side, Tally, Windows, compare, position,
};
use tierkeep_engine::convert::{Bits, ConvertOptions, Execution, Packing, convert};
use tierkeep_engine::verify::read_oracle;
use tierkeep_engine::{Engine, Observer, Phase};
use tierkeep_plans::catalogue::{Catalogue, Group, PackedBits, ScaleType};
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

fn oracle(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles").join(family)
}

fn engine(directory: &Path, batch: u64) -> Engine {
    let model = Catalogue::open(directory).unwrap();
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(1 << 30))),
        context: Some(64),
        threads: Some(1),
        prefill_batch: Some(batch),
        isa: Some("scalar".to_owned()),
        ..Options::default()
    };
    let plan = planner::plan(&model, &Facts::default(), &options, None).unwrap();
    Engine::open(&plan, &model, &mut |_, _, _| {}).unwrap()
}

/// A model with every matrix in 4 bits.
fn packed(directory: &Path) -> TempDir {
    let out = TempDir::new().unwrap();
    let four = Bits::Packed(PackedBits::Four);
    let options = ConvertOptions {
        experts: four.into(),
        dense: four.into(),
        embedding: four.into(),
        mtp: four.into(),
        packing: Packing { group: Group::Of64, scale: ScaleType::F16 },
        ..ConvertOptions::default()
    };
    let model = Catalogue::open(directory).unwrap();
    convert(
        &model,
        out.path(),
        &options,
        &Execution::default(),
        &mut |_| ControlFlow::Continue(()),
    )
    .unwrap();
    out
}

/// The oracle's prompt and what the reference goes on with.
fn tokens(family: &str) -> Vec<u32> {
    let case = read_oracle(&oracle(family)).unwrap().remove(0);
    let greedy = case.greedy.iter().map(|(token, _)| *token);
    case.prompt.iter().copied().chain(greedy).collect()
}

fn go(
    a: &mut Engine,
    b: &mut Engine,
    texts: &[&[u32]],
    (context, stride, kept): (usize, usize, usize),
) -> Result<Compared, CompareError> {
    let sequences: Vec<Sequence<'_>> =
        texts.iter().enumerate().map(|(group, tokens)| Sequence { group, tokens }).collect();
    let windows = Windows { context, stride };
    compare([a, b], &sequences, windows, kept, &mut |_| ControlFlow::Continue(()))
}

/// Logits of every position, `(positions, vocab)`.
struct All(Vec<Vec<f32>>);

impl Observer for All {
    fn wants_all_logits(&self) -> bool {
        true
    }

    fn logits(&mut self, _position: usize, logits: &[f32]) {
        self.0.push(logits.to_vec());
    }
}

fn logits(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut all = All(Vec::new());
    engine.clear();
    engine.run(tokens, Phase::Prefill, &mut all).unwrap();
    all.0
}

/// Probabilities by the definition, in f64.
fn probabilities(logits: &[f32]) -> Vec<f64> {
    let powers: Vec<f64> = logits.iter().map(|x| f64::from(*x).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|p| p / sum).collect()
}

fn best(p: &[f64]) -> usize {
    (0..p.len()).fold(0, |best, i| if p[i] > p[best] { i } else { best })
}

fn near(found: f64, expected: f64, within: f64) {
    assert!((found / expected - 1.0).abs() <= within, "{found} {expected}");
}

#[test]
fn a_model_does_not_differ_from_itself() {
    for family in ["olmoe", "glm_moe_dsa"] {
        let tokens = tokens(family);
        let (mut a, mut b) = (engine(&oracle(family), 64), engine(&oracle(family), 64));
        let all = go(&mut a, &mut b, &[&tokens], (64, 64, 9)).unwrap().all.unwrap();
        assert_eq!((all.positions, all.equal, all.agreement), (64, 64, 1.0), "{family}");
        assert_eq!((all.kl.mean, all.kl.max, all.kl.p99), (0.0, 0.0, 0.0), "{family}");
        assert_eq!(all.perplexity[0], all.perplexity[1], "{family}");
        assert_eq!((all.predicted, all.first_disagreement), (63, None), "{family}");
    }
}

/// Each position of the reference's logits against the next one: mean and largest KL, where that is, and
/// perplexity of the prompt, computed with numpy in f64.
#[test]
fn figures_equal_those_of_numpy() {
    for (family, mean, largest, at, perplexity) in [
        ("olmoe", 0.765_995_443_303_002_3, 1.241_017_988_336_269_5, 19, 474.801_256_632_613_16),
        (
            "glm_moe_dsa",
            0.780_109_245_412_404_3,
            1.149_558_834_567_633_7,
            11,
            496.073_593_100_018_4,
        ),
    ] {
        let case = read_oracle(&oracle(family)).unwrap().remove(0);
        let vocab = case.logits.len() / case.prompt.len();
        let rows: Vec<&[f32]> = case.logits.chunks_exact(vocab).collect();
        let mut tally = Tally::default();
        for (i, pair) in rows.windows(2).enumerate() {
            let found = position(pair[0], pair[1], Some(case.prompt[i + 1])).unwrap();
            tally.add(Place { group: 0, text: 0, position: i }, &found);
        }
        let summary = tally.summary().unwrap();
        near(summary.kl.mean, mean, 1e-12);
        near(summary.kl.max, largest, 1e-12);
        near(summary.perplexity[0].unwrap(), perplexity, 1e-12);
        assert_eq!((summary.kl.max_at.position, summary.positions, summary.equal), (at, 39, 0));
    }
}

/// Whatever is kept at a time and however large batches are, the figures are the ones of all logits at once;
/// where ties of a sparse indexer fall by the length of a call, of calls of the same length.
#[test]
fn figures_are_those_of_all_logits_at_once() {
    for family in ["olmoe", "glm_moe_dsa"] {
        let (tokens, out) = (tokens(family), packed(&oracle(family)));
        let (mut a, mut b) = (engine(&oracle(family), 64), engine(out.path(), 64));
        let (of_a, of_b) = (logits(&mut a, &tokens), logits(&mut b, &tokens));
        let (mut kl, mut equal, mut losses) = (Vec::new(), 0, [0.0; 2]);
        for (i, (a, b)) in of_a.iter().zip(&of_b).enumerate() {
            let (p, q) = (probabilities(a), probabilities(b));
            kl.push(p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum::<f64>());
            equal += u64::from(best(&p) == best(&q));
            if let Some(&next) = tokens.get(i + 1) {
                losses[0] -= p[next as usize].ln() / 63.0;
                losses[1] -= q[next as usize].ln() / 63.0;
            }
        }
        assert!(equal < 64, "{family}: 4 bits change something");
        let mean = kl.iter().sum::<f64>() / 64.0;
        for (kept, batch) in [(64, 64), (200, 5), (7, 64), (1, 3)] {
            if kept < 64 && family == "glm_moe_dsa" {
                continue;
            }
            let (mut a, mut b) = (engine(&oracle(family), batch), engine(out.path(), batch));
            let all = go(&mut a, &mut b, &[&tokens], (64, 64, kept)).unwrap().all.unwrap();
            assert_eq!((all.positions, all.equal), (64, equal), "{family} {kept} {batch}");
            near(all.kl.mean, mean, 1e-9);
            near(all.kl.max, kl.iter().copied().fold(0.0, f64::max), 1e-9);
            near(all.perplexity[0].unwrap(), losses[0].exp(), 1e-9);
            near(all.perplexity[1].unwrap(), losses[1].exp(), 1e-9);
            let first = all.first_disagreement.unwrap();
            let differs =
                |i: &usize| best(&probabilities(&of_a[*i])) != best(&probabilities(&of_b[*i]));
            assert_eq!((0..64).find(differs), Some(first.place.position));
        }
    }
}

/// A window begins anew, a position counts in the first window that has it, and a group is summed up
/// by itself.
#[test]
fn windows_and_groups_are_what_they_say() {
    let (tokens, out) = (tokens("olmoe"), packed(&oracle("olmoe")));
    let (mut a, mut b) = (engine(&oracle("olmoe"), 64), engine(out.path(), 64));
    let mean = |compared: &Compared, group: usize| compared.groups[group].as_ref().unwrap().kl.mean;
    let cut = go(&mut a, &mut b, &[&tokens[..40]], (16, 16, 5)).unwrap();
    let apart: [&[u32]; 3] = [&tokens[..16], &tokens[16..32], &tokens[32..40]];
    let by_group = go(&mut a, &mut b, &apart, (16, 16, 64)).unwrap();
    let (cut, all) = (cut.all.unwrap(), by_group.all.as_ref().unwrap());
    assert_eq!((cut.positions, all.positions), (40, 40));
    // The last token of a window has a next one in the text, the last of a text has none.
    assert_eq!((cut.predicted, all.predicted), (39, 37));
    near(cut.kl.mean, all.kl.mean, 1e-12);
    let of_groups =
        (mean(&by_group, 0) * 16.0 + mean(&by_group, 1) * 16.0 + mean(&by_group, 2) * 8.0) / 40.0;
    near(all.kl.mean, of_groups, 1e-12);
    // With a stride each later position has at least 12 tokens before it: the last of 20 is as in a text
    // that begins at 4.
    let overlapping = go(&mut a, &mut b, &[&tokens[..20]], (16, 4, 64)).unwrap().all.unwrap();
    assert_eq!((overlapping.positions, overlapping.predicted), (20, 19));
    let head = go(&mut a, &mut b, &[&tokens[..16]], (16, 16, 64)).unwrap().all.unwrap();
    let (of_a, of_b) = (logits(&mut a, &tokens[4..20]), logits(&mut b, &tokens[4..20]));
    let tail: f64 = (12..16).map(|i| position(&of_a[i], &of_b[i], None).unwrap().kl).sum();
    near(overlapping.kl.mean, (head.kl.mean * 16.0 + tail) / 20.0, 1e-9);
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let (mut a, mut b) = (engine(&oracle("olmoe"), 8), engine(&oracle("glm_moe_dsa"), 8));
    let error = go(&mut a, &mut b, &[&[1, 2]], (8, 8, 8)).unwrap_err().to_string();
    assert!(error.contains("not one model") && error.contains("more"), "{error}");
    let mut b = engine(&oracle("olmoe"), 8);
    let error = go(&mut a, &mut b, &[&[]], (8, 8, 8)).unwrap_err();
    assert!(matches!(error, CompareError::Empty));
    for stride in [0, 9] {
        let error = go(&mut a, &mut b, &[&[1, 2]], (8, stride, 8)).unwrap_err().to_string();
        assert!(error.contains("give 1 to 8"), "{error}");
    }
    let error = go(&mut a, &mut b, &[&[1, u32::MAX]], (8, 8, 8)).unwrap_err().to_string();
    assert!(error.starts_with("A failed: token id"), "{error}");
}

#[test]
fn logits_that_are_not_finite_are_named() {
    let directory = TempDir::new().unwrap();
    for entry in std::fs::read_dir(oracle("olmoe")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
    }
    let model = Catalogue::open(directory.path()).unwrap();
    // A weight of the final norm that is infinite makes every logit so, or no number.
    let norm = model.tensors.iter().find(|t| t.role == tierkeep_plans::catalogue::Role::FinalNorm);
    let span = norm.unwrap().weight;
    let path = &model.shards[span.shard as usize].path;
    let mut bytes = std::fs::read(path).unwrap();
    let at = span.offset as usize;
    bytes[at..at + 2].copy_from_slice(&half::bf16::INFINITY.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
    let (mut good, mut bad) = (engine(&oracle("olmoe"), 8), engine(directory.path(), 8));
    let error = go(&mut good, &mut bad, &[&[1, 2, 3]], (8, 8, 8)).unwrap_err();
    let CompareError::NotFinite { side: Side::B, place, .. } = error else { panic!("{error}") };
    assert_eq!(place, Place { group: 0, text: 0, position: 0 });
    let error = go(&mut bad, &mut good, &[&[1, 2, 3]], (8, 8, 8)).unwrap_err();
    assert!(error.to_string().starts_with("A gives a logit that is not finite"), "{error}");
}

/// What was compared until then is the result.
#[test]
fn an_interrupt_keeps_what_is_done() {
    let tokens = tokens("olmoe");
    let (mut a, mut b) = (engine(&oracle("olmoe"), 64), engine(&oracle("olmoe"), 64));
    let sequences = [Sequence { group: 0, tokens: &tokens }];
    let windows = Windows { context: 64, stride: 64 };
    let compared = compare([&mut a, &mut b], &sequences, windows, 10, &mut |at: Progress| {
        assert_eq!(at.total, 64);
        if at.done >= 20 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap();
    assert!(compared.interrupted);
    assert_eq!(compared.all.unwrap().positions, 20);
    let compared =
        compare([&mut a, &mut b], &sequences, windows, 10, &mut |_| ControlFlow::Break(()));
    assert_eq!(compared.unwrap().all, None);
}

//! Views of the usage history, in every style. The history is made here, token by token.
#![allow(clippy::unwrap_used, reason = "a test stops where something is wrong")]

use std::path::{Path, PathBuf};

use tierkeep_plans::units::{Bytes, LayerId};
use tierkeep_plans::usage::{
    self, History, Reset, RunRecord, Session, Summary, experts_of_layer, import_counts,
};

use super::testing::snapshot;
use super::usage::{HistoryView, history, history_layer, imported, no_history, reset};

const FILE: &str = "/models/glm-nano/.usage";

fn session() -> Session {
    let layers: Vec<LayerId> = (1..6).map(LayerId).collect();
    Session::new("model", &layers, 32, 4)
}

/// Two sessions of different work, and their runs.
fn remembered() -> History {
    let mut all = History::new(session().shape().clone());
    for (seed, n) in [(0, 400), (5, 120)] {
        let mut session = session();
        for token in 0..n {
            let expert = |at: u16| (seed + at * at * (1 + token % 7) + token % (3 + at)) % 32;
            session.record_token(&(0..20).map(expert).collect::<Vec<u16>>());
        }
        session.set_run(RunRecord {
            predicted_tok_per_s_p50: Some(6.25),
            predicted_hit_rate: Some(0.42),
            actual_tok_per_s: (seed > 0).then_some(5.5),
            actual_hit_rate: (seed > 0).then_some(0.4),
            decoded_tokens: Some(u64::from(n)),
            budget_bytes: Some(Bytes(20_000_000_000)),
            ..RunRecord::default()
        });
        all.merge(&session).unwrap();
    }
    all
}

#[test]
fn a_usage_history() {
    let all = remembered();
    let summary = Summary::of(&all);
    let view =
        |version| HistoryView { path: Path::new(FILE), version, bytes: 45_678, summary: &summary };
    snapshot("usage-show", |style| history(&view(2), style));
    let of_version_1 = |style| history(&view(1), style).lines().nth(1).unwrap().to_owned();
    snapshot("usage-show-version-1", of_version_1);
    let experts = experts_of_layer(&all, LayerId(2)).unwrap();
    snapshot("usage-show-layer", |style| history_layer(2, 32, &experts, style));
}

#[test]
fn no_usage_history() {
    snapshot("usage-show-none", |style| no_history(Path::new(FILE), style));
    let empty = Summary::of(&History::new(session().shape().clone()));
    let view = HistoryView { path: Path::new(FILE), version: 2, bytes: 400, summary: &empty };
    snapshot("usage-show-empty", |style| history(&view, style));
}

#[test]
fn imported_counts() {
    let counts = import_counts("1 0 5\n3 2 70\n0 7 9\n6 1 2\n", 7, 32).unwrap();
    let taken = counts.taken(session().shape());
    snapshot("usage-import", |style| imported(Path::new(FILE), &taken, 6, Some(4), style));
    snapshot("usage-import-dry-run", |style| imported(Path::new(FILE), &taken, 6, None, style));
}

#[test]
fn a_history_that_was_reset() {
    let to = Reset::MovedTo(PathBuf::from("/models/glm-nano/.usage.reset-1"));
    snapshot("usage-reset", |style| {
        [&to, &Reset::Deleted, &Reset::Absent].map(|r| reset(Path::new(FILE), r, style)).concat()
    });
    assert_eq!(usage::FORMAT_VERSION, 2, "the snapshots say which version is written");
}

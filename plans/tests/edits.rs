//! Edits of a plan that its format refuses: versions, fields that do not exist, processors that are none.
//! What contradicts a model or the ledger is in `planning.rs`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use std::path::Path;
use std::sync::LazyLock;

use support::{Checkpoint, Form};
use tierkeep_doctor::{Fact, Facts};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

static GLM: LazyLock<Catalogue> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::glm(Form::INT8).write(dir.path());
    Catalogue::open(dir.path()).unwrap()
});

/// A plan for four threads.
static PLAN: LazyLock<Plan> = LazyLock::new(|| {
    let mut facts = Facts::default();
    facts.memory.usable_bytes = Fact::read(1_000_000_000, "of this test");
    facts.cpu.usable_threads = Fact::read(4, "of this test");
    let ram = Some(SizeRequest::Absolute(Bytes(500_000_000)));
    planner::plan(&GLM, &facts, &Options { ram, ..Options::default() }, None).unwrap()
});

/// What happens to the plan with one value replaced: refused with this message, or accepted.
fn judged(path: &str, value: &toml::Value) -> Result<(), String> {
    let mut plan: toml::Table = toml::from_str(&PLAN.to_toml().unwrap()).unwrap();
    let (tables, last) = path.rsplit_once('.').unwrap_or(("", path));
    let mut table = &mut plan;
    for key in tables.split('.').filter(|key| !key.is_empty()) {
        table = table.get_mut(key).unwrap().as_table_mut().unwrap();
    }
    table.insert(last.to_owned(), value.clone());
    let text = toml::to_string(&plan).unwrap();
    let plan = Plan::from_toml(&text, Path::new("plan.toml")).map_err(|e| e.to_string())?;
    plan.check(&GLM).map_err(|e| e.to_string())
}

fn list(values: &[i64]) -> toml::Value {
    values.to_vec().into()
}

#[test]
fn what_the_format_does_not_know_is_named() {
    let cases: [(&str, toml::Value, &[&str]); 9] = [
        ("version", 0.into(), &["version 0", "reads version 5", "tierkeep plan"]),
        ("version", (-1).into(), &["version"]),
        ("version", 6.into(), &["version 6", "reads version 5"]),
        ("colour", "blue".into(), &["unknown field `colour`"]),
        ("placement.slots.cap", 5.into(), &["unknown field `cap`", "caps"]),
        ("engine.cpus", list(&[0, 1, 2, -1]), &["cpus", "-1"]),
        ("engine.cpus", list(&[0, 1, 2, 1 << 32]), &["cpus", "4294967296"]),
        ("engine.cpus", list(&[0, 1, 1, 2]), &["engine.cpus = [0, 1, 1, 2]", "4 different"]),
        ("engine.cpus", list(&[0, 1, 2, 3, 4]), &["[0, 1, 2, 3, 4]", "4 different processors"]),
    ];
    for (path, value, expected) in &cases {
        let shown = format!("{path} = {value}");
        let message = judged(path, value).expect_err(&shown);
        for part in *expected {
            assert!(message.contains(part), "{shown}: {message:?} lacks {part:?}");
        }
    }
}

#[test]
fn processors_may_be_any_or_none() {
    for cpus in [&[][..], &[0, 1, 2, 3], &[7, 3, 1024, 0]] {
        judged("engine.cpus", &list(cpus)).unwrap();
    }
}

//! The programs in `examples/`, run as a newcomer would.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

#[path = "support/binary.rs"]
mod binary;

use std::path::Path;
use std::process::Command;

use binary::{NANO, Ran, root, tierkeep};

/// Runs an example. Testing everything builds the examples too; where only this file is tested, cargo
/// is asked for them.
fn example(name: &str, args: &[&str]) -> Ran {
    let profile = Path::new(env!("CARGO_BIN_EXE_tierkeep")).parent().unwrap();
    let program = profile.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    if !program.is_file() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root()).args(["build", "--quiet", "--example", name]);
        cargo.arg("--target-dir").arg(profile.parent().unwrap());
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success(), "{name} is not built");
    }
    Ran::of(Command::new(program).current_dir(root()).args(args))
}

#[test]
fn a_plan_for_a_machine_of_a_file() {
    for machine in ["laptop-32gb", "epyc-200gb-4xl40s"] {
        let machine = format!("examples/machines/{machine}.toml");
        let ran = example("plan_for_machine", &[&machine, NANO, "32MB"]);
        assert_eq!(ran.code, 0, "{ran:?}");
        for part in ["glm_moe_dsa with", "dense weights", "where 32.00 MB go", "expected: "] {
            assert!(ran.out.contains(part), "{part}: {ran:?}");
        }
    }
    let laptop = "examples/machines/laptop-32gb.toml";
    let refused = example("plan_for_machine", &[laptop, NANO, "1MB"]);
    assert_eq!(refused.code, 1);
    assert!(refused.err.contains("DoesNotFit"), "{refused:?}");
}

#[test]
fn a_plan_is_run_and_its_report_read() {
    let folder = tempfile::tempdir().unwrap();
    let model = root().join(NANO);
    let plan = folder.path().join("plan.toml");
    let (model, plan) = (model.to_str().unwrap(), plan.to_str().unwrap());
    let args = ["plan", model, "--ram", "24MB", "--ctx", "256", "--no-measure", "-o", plan];
    assert_eq!(tierkeep(folder.path(), &args).code, 0);
    let ran = example("run_plan", &[plan, "What is 2+2?"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    for part in ["2 + 2 = 4.", "ended by StopToken", "experts read: ", "of 160"] {
        assert!(ran.out.contains(part), "{part}: {ran:?}");
    }
}

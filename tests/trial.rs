//! The trial of instruction sets, as the binary runs it for itself.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::process::Command;

fn tierkeep(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_tierkeep")).args(arguments).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn each_set_is_named_before_and_after() {
    let said = tierkeep(&["try-instructions", "nonsense", "more"]);
    assert_eq!(said, "nonsense begins\nnonsense unfamiliar\nmore begins\nmore unfamiliar\n");
}

#[test]
fn doctor_counts_what_it_has_run() {
    let said: serde_json::Value =
        serde_json::from_str(&tierkeep(&["doctor", "--no-measure", "--json"])).unwrap();
    let sets = &said["facts"]["cpu"]["instruction_sets"];
    if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        assert_eq!(sets["source"], "measured", "{sets}");
        let detail = sets["detail"].as_str().unwrap();
        assert!(detail.starts_with("run in a child process; "), "{detail}");
        assert!(!detail.contains("not tried"), "{detail}");
    }
}

#[test]
fn the_help_does_not_show_it() {
    assert!(!tierkeep(&["--help"]).contains("try-instructions"));
}

//! `plan` as a user runs it: for other machines, with plan files, and what each answers by its exit
//! code. Figures that are compared come from the binary's own JSON.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

#[path = "support/binary.rs"]
mod binary;

use std::fs;
use std::path::Path;

use binary::{NANO, Ran, copy_of, tierkeep};
use serde_json::Value;

impl Ran {
    /// A refusal: its code, and every part of what is said.
    fn refuses(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is not said: {self:?}");
        }
        assert!(!self.err.contains("panicked"), "{self:?}");
    }
}

/// The folder of a test, with a copy of the small model.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy_of(NANO, folder.path());
    folder
}

/// Facts of a machine that nobody has.
const MACHINE: &str = r#"
schema_version = 1

[cpu]
usable_threads = { source = "read", value = 3 }
instruction_sets = { source = "read", value = ["avx2", "f16c"] }

[memory]
read_bandwidth_bytes_per_s = { source = "measured", value = 50e9 }
"#;

const SMALL: [&str; 5] = ["--ram", "28MB", "--ctx", "256", "--no-measure"];

fn plan(folder: &Path, args: &[&str]) -> Ran {
    tierkeep(folder, &[&["plan", "model"], args].concat())
}

#[test]
fn another_machine_is_planned_from_its_facts_alone() {
    let folder = folder();
    let folder = folder.path();
    fs::write(folder.join("server.toml"), MACHINE).unwrap();
    let base = ["--machine", "server.toml", "--ctx", "256"];
    // What the file does not know is asked for, not looked up here.
    plan(folder, &base).refuses(1, &["memory is available is unknown", "--ram"]);
    let ran = plan(folder, &[&base[..], &["--ram", "28MB", "--json"]].concat());
    let json = ran.json();
    assert_eq!((ran.code, &json["engine"]["threads"]), (0, &Value::from(3)), "{json}");
    assert_eq!(json["engine"]["isa"], "avx2");
    // Facts written by hand may lack details, and then nothing dangles.
    for evidence in json["prediction"]["evidence"].as_array().unwrap() {
        let evidence = evidence.as_str().unwrap();
        assert!(!evidence.trim_end().ends_with([',', ':']), "{evidence:?}");
    }
    assert_eq!(json["machine"]["disk"]["path"]["source"], "unknown");
    let evidence = json["prediction"]["evidence"].to_string();
    assert!(evidence.contains("memory bandwidth 50.0 GB/s: measured"), "{evidence}");
    // Nothing is measured for another machine, so that asking for just that changes nothing.
    let same = plan(folder, &[&base[..], &["--ram", "28MB", "--json", "--no-measure"]].concat());
    assert_eq!((same.code, same.json()), (0, json));
    plan(folder, &["--machine", "nowhere.toml"]).refuses(2, &["nowhere.toml"]);
    fs::write(folder.join("server.toml"), "schema_version = 1\n[cpu]\nthraeds = 3\n").unwrap();
    let ran = plan(folder, &base);
    assert_ne!(ran.code, 0);
    assert!(ran.err.contains("thraeds"), "{ran:?}");
}

#[test]
fn a_machine_that_does_not_exist_is_assumed_and_says_so() {
    let folder = folder();
    let folder = folder.path();
    fs::write(folder.join("server.toml"), MACHINE).unwrap();
    let base = ["--machine", "server.toml", "--ctx", "256", "--what-if"];
    let ran = plan(folder, &[&base[..], &["ram=2GB,disk=7GB/s,cores=5", "--json"]].concat());
    let json = ran.json();
    assert_eq!((ran.code, &json["engine"]["threads"]), (0, &Value::from(5)), "{json}");
    let usable = &json["machine"]["memory"]["usable_bytes"];
    assert_eq!(
        (&usable["source"], &usable["value"]),
        (&"assumed".into(), &2_000_000_000_u64.into())
    );
    assert_eq!(usable["detail"], "what if");
    assert_eq!(json["what_if"].as_array().unwrap().len(), 3);
    let shown = plan(folder, &[&base[..], &["ram=2GB"]].concat());
    assert!(shown.out.contains("what if  ram 2.00 GB"), "{shown:?}");
    // A card is planned with where one is asked about, though this build could not run that.
    let card = plan(folder, &[&base[..], &["ram=2GB,vram=8GB", "--json"]].concat()).json();
    assert_eq!(card["placement"]["cards"].as_array().unwrap().len(), 1, "{card}");
    for (changes, part) in
        [("rma=2GB", "ram, vram, disk"), ("ram", "KEY=VALUE"), ("disk=7GB", "7GB/s")]
    {
        plan(folder, &[&base[..], &[changes]].concat()).refuses(2, &[part, "--what-if"]);
    }
}

#[test]
fn a_plan_is_checked_shown_and_explained() {
    let folder = folder();
    let folder = folder.path();
    let made = plan(folder, &[&SMALL[..], &["-o", "plan.toml"]].concat());
    assert_eq!(made.code, 0, "{made:?}");
    let check = ["plan", "--check", "plan.toml", "--json"];
    let ran = tierkeep(folder, &check);
    assert_eq!((ran.code, &ran.json()["holds"]), (0, &Value::Bool(true)), "{ran:?}");

    let shown = tierkeep(folder, &["plan", "plan.toml"]);
    assert_eq!(shown.code, 0, "{shown:?}");
    for part in ["ledger", "unused", "accesses expected", "time of a token", "rests on"] {
        assert!(shown.out.contains(part), "{part}: {}", shown.out);
    }
    tierkeep(folder, &["plan", "plan.toml", "--ram", "30MB"]).refuses(2, &["--ram", "already"]);

    let explained = tierkeep(folder, &["plan", "plan.toml", "--explain", "3:17", "--json"]);
    let explanation = &explained.json()["explanation"];
    assert_eq!(explanation["names"][1], "model.layers.3.mlp.experts.17.up_proj.weight");
    let again = plan(folder, &[&SMALL[..], &["--explain", "3:17", "--json"]].concat());
    assert_eq!(&again.json()["explanation"], explanation, "a plan file and a plan made anew");
    tierkeep(folder, &["plan", "plan.toml", "--explain", "0:1"])
        .refuses(2, &["layer 0 has no routed experts"]);

    // A plan whose machine had more threads than there are is stale, and says which.
    let text = fs::read_to_string(folder.join("plan.toml")).unwrap();
    let threads = text.lines().find(|line| line.starts_with("threads = ")).unwrap();
    fs::write(folder.join("wide.toml"), text.replace(threads, "threads = 1000")).unwrap();
    let ran = tierkeep(folder, &["plan", "--check", "wide.toml", "--json"]);
    let json = ran.json();
    assert_eq!((ran.code, &json["holds"]), (1, &Value::Bool(false)), "{json}");
    assert!(json["findings"].to_string().contains("cpu.threads"), "{json}");
    fs::remove_file(folder.join("model/config.json")).unwrap();
    tierkeep(folder, &check).refuses(2, &["config.json", "name it before --check"]);
}

#[test]
fn plans_are_compared() {
    let folder = folder();
    let folder = folder.path();
    plan(folder, &[&SMALL[..], &["-o", "a.toml"]].concat());
    plan(folder, &["--ram", "24MB", "--ctx", "256", "--no-measure", "-o", "b.toml"]);
    let ran = tierkeep(folder, &["plan", "--diff", "a.toml", "b.toml", "--json"]);
    let json = ran.json();
    assert_eq!(ran.code, 0, "{ran:?}");
    let all = json["differences"].as_array().unwrap();
    let budget = all.iter().find(|d| d["name"] == "budget_bytes").unwrap();
    assert_eq!((&budget["was"], &budget["is"]), (&28_000_000.into(), &24_000_000.into()));
    let same = tierkeep(folder, &["plan", "--diff", "a.toml", "a.toml"]);
    assert_eq!(same.code, 0);
    assert!(same.out.contains("no difference"), "{same:?}");
    tierkeep(folder, &["plan", "--diff", "a.toml"]).refuses(2, &["--diff"]);
    tierkeep(folder, &["plan", "model", "--diff", "a.toml", "b.toml"]).refuses(2, &["--diff"]);
    tierkeep(folder, &["plan", "--check", "a.toml", "--ram", "1GB"]).refuses(2, &["--ram"]);
    tierkeep(folder, &["plan"]).refuses(2, &["MODEL|PLAN"]);
}

#[test]
fn a_plan_on_standard_output_is_the_plan_and_nothing_else() {
    let folder = folder();
    let folder = folder.path();
    let ran = plan(folder, &[&SMALL[..], &["-o", "-"]].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    fs::write(folder.join("plan.toml"), &ran.out).unwrap();
    assert_eq!(tierkeep(folder, &["plan", "--check", "plan.toml"]).code, 0);
    plan(folder, &[&SMALL[..], &["-o", "-", "--json"]].concat()).refuses(2, &["-o -", "--json"]);
}

#[test]
fn refusals_are_objects_under_json() {
    let folder = folder();
    let folder = folder.path();
    let cases: [(&[&str], i32, &str); 5] = [
        (&["plan", "nowhere", "--json"], 2, "model.io"),
        (&["plan", "model", "--ram", "1MB", "--no-measure", "--json"], 1, "plan.does_not_fit"),
        (&["plan", "model", "--ctx", "0", "--no-measure", "--json"], 2, "usage"),
        (&["plan", "--json"], 2, "usage"),
        (&["plan", "--check", "nowhere.toml", "--json"], 2, "plan.io"),
    ];
    for (args, code, kind) in cases {
        let ran = tierkeep(folder, args);
        let json = ran.json();
        assert_eq!((ran.code, &json["error"]["kind"]), (code, &kind.into()), "{args:?}: {json}");
        assert_eq!(json["schema_version"], 1);
        // JSON is for programs; people read the same on standard error.
        let message = json["error"]["message"].as_str().unwrap();
        assert!(ran.err.contains(message), "{message:?} is not in {:?}", ran.err);
    }
}

/// What would make a model fit is found with the verdict, for people and for programs.
#[test]
fn what_would_make_it_fit_is_said() {
    let folder = folder();
    let folder = folder.path();
    let base = ["--ram", "28MB", "--ctx", "1024", "--sessions", "8", "--no-measure"];
    let ran = plan(folder, &base);
    ran.refuses(1, &[]);
    for part in ["does not fit in 28.00 MB", "what would make it fit", "--ram ", "--sessions 1"] {
        assert!(ran.out.contains(part), "{part:?} is not in {}", ran.out);
    }
    let json = plan(folder, &[&base[..], &["--json"]].concat()).json();
    let budget = json["resident_budget_bytes"].as_u64().unwrap();
    assert!(json["streamed_budget_bytes"].as_u64().unwrap() < budget, "{json}");
    assert_eq!(json["can_stream"], true);
    let changes = json["changes_that_fit"].as_array().unwrap();
    assert!(!changes.is_empty(), "{json}");
    for change in changes {
        let flag: Vec<&str> = change["flag"].as_str().unwrap().split(' ').collect();
        // The last of two is what counts, as of any flag that is given anew.
        let kept: Vec<&str> =
            base.chunks(2).filter(|pair| pair[0] != flag[0]).flatten().copied().collect();
        let ran = plan(folder, &[&kept[..], &flag].concat());
        assert_eq!(ran.code, 0, "{flag:?}: {ran:?}");
    }
}

#[test]
fn more_threads_than_the_hardware_has_are_warned_of_and_predict_nothing_faster() {
    let folder = folder();
    let folder = folder.path();
    tierkeep(folder, &["doctor", "--no-measure", "--save", "here.toml"]);
    let here = ["plan", "model", "--machine", "here.toml", "--what-if", "cores=2"];
    let with = |more: &[&str]| tierkeep(folder, &[&here[..], more].concat());
    let few = with(&["--threads", "2", "--json"]).json();
    let many = with(&["--threads", "512", "--json"]).json();
    let speed = |json: &Value| json["prediction"]["decode_tokens_per_s"]["p50"].as_f64().unwrap();
    assert!(speed(&many) <= speed(&few), "{} against {}", speed(&many), speed(&few));
    let said = with(&["--threads", "512", "--strict"]);
    assert_eq!(said.code, 3, "{said:?}");
    assert!(said.err.contains("--threads 2"), "{said:?}");
    let streamed = with(&["--threads", "512", "--strict", "-o", "-"]);
    assert_eq!(streamed.code, 3, "where the plan goes changes no verdict: {streamed:?}");
}

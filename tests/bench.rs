//! `bench` as a user meets it: figures of small models, rows in files, curves, and what it refuses. No
//! figure of time is held to anything.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops where something is wrong")]

#[path = "support/binary.rs"]
mod binary;

use std::fs;
use std::path::Path;

use binary::{NANO, OLMOE, Ran, copy_of, root, tierkeep};
use serde_json::Value;
use tempfile::TempDir;

/// Runs `bench` on a committed model, on tiny counts.
fn bench(folder: &Path, model: &str, args: &[&str]) -> Ran {
    let model = root().join(model);
    let tiny = ["bench", model.to_str().unwrap(), "--no-measure", "--repeat", "2"];
    let counts: &[&str] = if args.contains(&"--decode") {
        &[]
    } else {
        &["--decode", "3", "--prompt", "4", "--warm-up", "1"]
    };
    tierkeep(folder, &[&tiny[..], counts, args].concat())
}

fn rows(ran: &Ran) -> Vec<Value> {
    assert_eq!(ran.code, 0, "{ran:?}");
    ran.json()["rows"].as_array().unwrap().clone()
}

#[test]
fn every_combination_is_measured_at_every_context() {
    let folder = TempDir::new().unwrap();
    let vary = ["--vary", "threads=1,2", "--vary", "io=direct,buffered", "--contexts", "3,10"];
    let ran = bench(folder.path(), OLMOE, &[&vary[..], &["--csv", "runs.csv", "--json"]].concat());
    let rows = rows(&ran);
    let shown: Vec<(&str, u64)> = rows
        .iter()
        .map(|row| (row["label"].as_str().unwrap(), row["figures"]["context"].as_u64().unwrap()))
        .collect();
    assert_eq!(shown.len(), 8);
    assert_eq!(shown[0], ("threads=1 io=direct", 3));
    assert_eq!(shown[7], ("threads=2 io=buffered", 10));
    assert_eq!(rows[7]["engine"]["threads"], 2);
    assert_eq!(rows[7]["engine"]["io"], "buffered");
    for row in &rows {
        let figures = &row["figures"];
        let context = figures["context"].as_u64().unwrap();
        assert_eq!(figures["prefill_tokens"], context.min(4));
        assert_eq!(figures["fill_tokens_per_s"].is_null(), context <= 4);
        assert_eq!(
            (figures["repeats"].as_u64(), figures["decode_tokens"].as_u64()),
            (Some(2), Some(3))
        );
        let counts = &figures["accesses"];
        let sum: u64 = ["pinned_hits", "cache_hits", "misses"]
            .iter()
            .map(|n| counts[n].as_u64().unwrap())
            .sum();
        // Two repeats of 3 tokens, 2 layers and 4 experts each.
        let layers = row["slots"].as_array().unwrap().iter().filter(|slots| **slots != 0).count();
        assert_eq!(sum % (2 * 3 * layers as u64), 0, "{figures}");
        assert!(sum > 0 && figures["touched"]["weights"].as_u64().unwrap() > 0);
        assert!(figures["memory_share"].is_null(), "nothing was timed");
    }
    // The same again: no second header.
    let ran = bench(folder.path(), OLMOE, &["--csv", "runs.csv", "--contexts", "3"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let csv = fs::read_to_string(folder.path().join("runs.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 8 + 1);
    assert!(csv.starts_with("commit,date,machine,") && csv.matches("commit,").count() == 1);
    assert!(!root().join(OLMOE).join(".usage").exists());
}

#[test]
fn the_same_stream_asks_for_the_same_experts() {
    let folder = TempDir::new().unwrap();
    let experts = |args: &[&str]| -> Vec<Value> {
        let rows =
            rows(&bench(folder.path(), NANO, &[args, &["--contexts", "6", "--json"]].concat()));
        rows.iter().map(|row| row["figures"]["distinct_in_decode"].clone()).collect()
    };
    let both = experts(&["--vary", "threads=1,2"]);
    assert_eq!(both[0], both[1]);
    assert_eq!(both[0], experts(&["--stream", "uniform:0"])[0]);
    fs::write(folder.path().join("x.ids"), "5 5 5 5 5 5 5 5 5 5 5").unwrap();
    fs::write(folder.path().join("x.trace"), "5 1 0 1\n5 2 0 3\n5 1 2 3\n").unwrap();
    fs::write(folder.path().join("x.txt"), "Call me Ishmael.").unwrap();
    let ids = experts(&["--stream", "ids:x.ids"]);
    assert_eq!(ids, experts(&["--stream", "trace:x.trace"]));
    experts(&["--stream", "text:x.txt"]);
    experts(&["--stream", "zipf:1.2:3"]);
}

#[test]
fn too_few_experts_are_void_and_a_longer_run_is_not() {
    let folder = TempDir::new().unwrap();
    let few = ["--contexts", "1", "--decode", "1", "--prompt", "1", "--warm-up", "0"];
    let ran = bench(folder.path(), NANO, &few);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("void") && ran.out.contains("under 80.0 % of the experts"), "{ran:?}");
    let ran = bench(folder.path(), NANO, &[&few[..], &["--strict"]].concat());
    assert_eq!(ran.code, 3, "{ran:?}");
    let many =
        ["--contexts", "400", "--decode", "2", "--prompt", "400", "--warm-up", "0", "--strict"];
    let ran = bench(folder.path(), NANO, &many);
    assert!(ran.code == 0 && !ran.out.contains("oid:"), "{ran:?}");
}

#[test]
fn curves_are_drawn_over_ascending_values() {
    let folder = TempDir::new().unwrap();
    for (sweep, over) in [("ram", None), ("threads", Some("1,2")), ("context", Some("8,2,5"))] {
        let svg = format!("{sweep}.svg");
        let mut args = vec!["--sweep", sweep, "--svg", &svg, "--json"];
        args.extend(over.iter().flat_map(|over| ["--over", over]));
        let rows = rows(&bench(folder.path(), NANO, &args));
        assert!(rows.len() >= 2, "{sweep}");
        if sweep != "context" {
            let values: Vec<f64> =
                rows.iter().map(|row| row["swept_value"].as_f64().unwrap()).collect();
            assert!(values.is_sorted_by(|a, b| a < b), "{sweep}: {values:?}");
        }
        let drawn = fs::read_to_string(folder.path().join(&svg)).unwrap();
        assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"));
        assert_eq!(drawn.matches("<circle").count(), rows.len());
    }
}

#[test]
fn plans_are_executed_as_they_stand() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    copy_of(NANO, folder);
    let plan = |out: &str, slots: &str| {
        let args =
            ["plan", "model", "--ram", "26MB", "--ctx", "32", "--no-measure", "--slots", slots];
        let ran = tierkeep(folder, &[&args[..], &["-o", out]].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
    };
    plan("a.toml", "4");
    plan("b.toml", "8");
    let tiny = ["--no-measure", "--repeat", "1", "--decode", "2", "--warm-up", "1", "--json"];
    let ran = tierkeep(
        folder,
        &[&["bench", "a.toml", "b.toml", "--threads-list", "1,2"], &tiny[..]].concat(),
    );
    let found = rows(&ran);
    let shown: Vec<(&str, u64)> = found
        .iter()
        .map(|row| (row["label"].as_str().unwrap(), row["engine"]["threads"].as_u64().unwrap()))
        .collect();
    assert_eq!(shown.len(), 4);
    assert_eq!((shown[0], shown[3]), (("a.toml threads=1", 1), ("b.toml threads=2", 2)));
    // What the plan has room for: 32 tokens, 2 of them decoded.
    assert_eq!(found[0]["figures"]["context"], 30);
    for (args, kind, code) in [
        (&["--ram", "30MB"][..], "usage", 2),
        (&["--vary", "io=direct"], "usage", 2),
        (&["--sweep", "ram"], "usage", 2),
        (&["--contexts", "31"], "engine.context_full", 1),
    ] {
        let ran = tierkeep(folder, &[&["bench", "a.toml"], args, &tiny[..]].concat());
        assert_eq!(ran.code, code, "{args:?}: {ran:?}");
        assert_eq!(ran.json()["error"]["kind"], kind, "{args:?}: {ran:?}");
    }
    assert!(!folder.join("model/.usage").exists(), "nothing was asked to be remembered");
    let ran = tierkeep(folder, &[&["bench", "a.toml", "--usage", "history"], &tiny[..]].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(folder.join("history").exists());
}

#[test]
fn what_cannot_be_measured_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("other.csv"), "a,b\n1,2\n").unwrap();
    fs::write(folder.path().join("bad.trace"), "1 2\n").unwrap();
    fs::write(folder.path().join("high.ids"), "1 99999999").unwrap();
    fs::write(folder.path().join("empty.ids"), "").unwrap();
    for (args, kind, said) in [
        (&["--stream", "dice"][..], "usage", "no such stream"),
        (&["--contexts", "99999999"], "usage", "the model's"),
        (&["--contexts", "0"], "usage", "at least 1"),
        (&["--repeat", "0"], "usage", "--repeat"),
        (&["--vary", "colour=red"], "usage", "--colour"),
        (&["--vary", "io=quick"], "usage", "quick"),
        (&["--vary", "io=direct", "--vary", "io=dropped"], "usage", "twice"),
        (&["--sweep", "threads", "--over", "two"], "usage", "two"),
        (&["--over", "1,2"], "usage", "--sweep"),
        (&["--stream", "trace:bad.trace"], "usage", "line 1"),
        (&["--stream", "ids:high.ids"], "engine.unknown_token", "99999999"),
        (&["--stream", "ids:empty.ids"], "engine.empty", "no token"),
        (&["--stream", "ids:absent.ids"], "io", "absent.ids"),
        (&["--csv", "absent/x.csv"], "io", "absent/x.csv"),
        (&["--sweep", "threads", "--svg", "absent/x.svg"], "io", "absent/x.svg"),
        (&["--csv", "other.csv"], "other", "not the header"),
    ] {
        let counts = if args[0] == "--repeat" { &[][..] } else { &["--repeat", "1"][..] };
        let model = root().join(NANO);
        let tiny = ["bench", model.to_str().unwrap(), "--no-measure", "--decode", "1", "--json"];
        let ran = tierkeep(folder.path(), &[&tiny[..], counts, args].concat());
        assert_eq!(ran.code, 2, "{args:?}: {ran:?}");
        let at = ran.out.rfind("{\n  \"error\"").unwrap_or(0);
        let error: Value =
            serde_json::from_str(&ran.out[at..]).unwrap_or_else(|e| panic!("{e}: {ran:?}"));
        assert_eq!(error["error"]["kind"], kind, "{args:?}: {ran:?}");
        assert!(ran.err.contains(said), "{args:?}: {ran:?}");
    }
    let ran = bench(folder.path(), NANO, &["--ram", "1MB", "--json"]);
    assert_eq!(ran.code, 1, "does not fit: {ran:?}");
}

#[test]
fn single_products_are_timed_and_listed() {
    let folder = TempDir::new().unwrap();
    let args = [
        "bench",
        "kernels",
        "--types",
        "bf16,int4-g64-f16",
        "--shapes",
        "8x64,16x32",
        "--batch",
        "1,3",
        "--isa",
        "scalar",
        "--threads",
        "1",
        "--bytes",
        "8KB",
        "--repeat",
        "2",
        "--no-measure",
    ];
    let ran = tierkeep(folder.path(), &[&args[..], &["--json", "--csv", "k.csv"]].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    let products = ran.json()["products"].as_array().unwrap().clone();
    // Two types, shapes and batches, and for packed integers two arithmetics.
    assert_eq!(products.len(), 4 + 8);
    assert_eq!(products[0]["product"]["element"], "bf16");
    let fast: Vec<&Value> =
        products.iter().filter(|p| p["product"]["numerics"] == "fast").collect();
    assert!(fast.len() == 4 && fast.iter().all(|p| p["product"]["element"] != "bf16"));
    // 8 x 64 in bf16 are 1024 bytes: 7 copies in 8 kB.
    assert_eq!(
        (products[0]["copies"].as_u64(), products[0]["bytes"].as_u64()),
        (Some(7), Some(7168))
    );
    assert_eq!(fs::read_to_string(folder.path().join("k.csv")).unwrap().lines().count(), 13);
    let ran = tierkeep(folder.path(), &args);
    assert!(ran.code == 0 && ran.out.contains("G weights/s"), "{ran:?}");
    for (args, said) in [
        (["--types", "int3"], "no stored type"),
        (["--shapes", "3by4"], "ROWSxCOLS"),
        (["--batch", "0"], "--batch"),
        (["--bytes", "10%"], "a share"),
    ] {
        let ran =
            tierkeep(folder.path(), &[&["bench", "kernels", "--no-measure"], &args[..]].concat());
        assert!(ran.code == 2 && ran.err.contains(said), "{args:?}: {ran:?}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_shows_what_was_finished() {
    use std::process::{Command, Stdio};

    let folder = TempDir::new().unwrap();
    let model = root().join(NANO);
    let endless =
        ["--repeat", "100000", "--decode", "2", "--prompt", "4", "--no-measure", "--json"];
    let mut command = binary::command(folder.path());
    command.args(["bench", model.to_str().unwrap(), "--usage", "history"]).args(endless);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It is written when a round is done.
    while !folder.path().join("history").exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["ended"], "interrupted");
    assert!(json["rows"][0]["figures"]["repeats"].as_u64().unwrap() >= 1, "{json}");
}

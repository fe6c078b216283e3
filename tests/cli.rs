//! The binary as a user runs it: verbs, exit codes, errors that name the thing and the remedy, and
//! that nothing is written where something is refused.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

#[path = "support/binary.rs"]
mod binary;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use binary::{NANO, OLMOE, copy_of, root, tierkeep};
use serde_json::Value;

/// Every file below a folder with its contents.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let contents = fs::read(&path).unwrap();
                files.insert(path, contents);
            }
        }
    }
    files
}

/// Runs the binary and expects a refusal: its code, every part of the message, nothing written.
fn refused(folder: &Path, args: &[&str], code: i32, parts: &[&str]) {
    let before = snapshot(folder);
    let ran = tierkeep(folder, args);
    assert_eq!(ran.code, code, "{args:?}: {ran:?}");
    // JSON escapes quotation marks.
    let said = format!("{}{}", ran.out, ran.err).replace("\\\"", "\"");
    for part in parts {
        assert!(said.contains(part), "{args:?} does not say {part:?}: {ran:?}");
    }
    assert!(!said.contains("panicked"), "{ran:?}");
    assert!(snapshot(folder) == before, "{args:?} wrote something");
}

#[test]
fn damaged_models_are_refused_by_every_verb() {
    let verbs: [&[&str]; 4] = [
        &["plan", "model", "--ram", "100MB", "--no-measure", "-o", "plan.toml"],
        &["run", "model", "--ids", "1,2", "--ram", "100MB", "--no-measure"],
        &["verify", "model"],
        &["doctor", "model", "--no-measure", "--json"],
    ];
    type Damage = fn(&Path);
    let damages: [(Damage, &[&str]); 5] = [
        (
            |m| fs::remove_file(m.join("model-00002-of-00004.safetensors")).unwrap(),
            &["model-00002-of-00004.safetensors is missing", "fetch it again"],
        ),
        (
            |m| {
                let shard = m.join("model-00003-of-00004.safetensors");
                let bytes = fs::read(&shard).unwrap();
                fs::write(shard, &bytes[..bytes.len() - 4096]).unwrap();
            },
            &["model-00003-of-00004.safetensors is 332440 bytes long", "336536", "cut off"],
        ),
        (
            |m| {
                let shard = m.join("model-00001-of-00004.safetensors");
                let mut bytes = fs::read(&shard).unwrap();
                bytes[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
                fs::write(shard, bytes).unwrap();
            },
            &["model-00001-of-00004.safetensors declares a header of 1152921504606846976"],
        ),
        (
            |m| {
                let config = fs::read_to_string(m.join("config.json")).unwrap();
                let other = config.replace("\"olmoe\"", "\"mamba\"");
                fs::write(m.join("config.json"), other).unwrap();
            },
            &["unknown family \"mamba\"", "glm_moe_dsa, olmoe"],
        ),
        (
            |m| {
                let config = fs::read_to_string(m.join("config.json")).unwrap();
                let other = config.replace("\"hidden_size\": 64", "\"hidden_size\": 96");
                fs::write(m.join("config.json"), other).unwrap();
            },
            &["has shape [320, 64], expected [320, 96] by config.json"],
        ),
    ];
    for (damage, parts) in damages {
        let folder = tempfile::tempdir().unwrap();
        damage(&copy_of(OLMOE, folder.path()));
        for verb in verbs {
            refused(folder.path(), verb, 1, parts);
        }
    }
}

/// What a later version may write is refused, never read as something else.
#[test]
fn a_container_of_another_form_is_refused() {
    type Case = (&'static str, &'static str, [&'static str; 2]);
    let cases: [Case; 2] = [
        (
            "tierkeep.format\":\"1",
            "tierkeep.format\":\"9",
            ["form that this build does not read", "newer tierkeep"],
        ),
        (
            "group\":\"row",
            "group\":\"128",
            ["group = 128, where bytes show row", "fetch the file again"],
        ),
    ];
    for (key, other, parts) in cases {
        let folder = tempfile::tempdir().unwrap();
        let model = copy_of(NANO, folder.path());
        let shard = model.join("model-00001-of-00001.safetensors");
        let mut bytes = fs::read(&shard).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
        let changed = header.replace(key, other);
        assert_eq!((changed.len(), changed == header), (length, false), "{key}");
        bytes[8..8 + length].copy_from_slice(changed.as_bytes());
        fs::write(shard, bytes).unwrap();
        let args = ["plan", "model", "--ram", "30MB", "--no-measure"];
        refused(folder.path(), &args, 1, &parts);
    }
}

#[test]
fn what_is_no_model_is_a_usage_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("empty")).unwrap();
    refused(folder.path(), &["plan", "empty"], 2, &["empty has no config.json"]);
    refused(folder.path(), &["plan", "nowhere"], 2, &["nowhere", "No such file"]);
    refused(folder.path(), &["run", "nowhere", "-p", "x"], 2, &["nowhere", "No such file"]);
    refused(folder.path(), &["run", "nowhere"], 2, &["--prompt"]);
    refused(folder.path(), &["frobnicate"], 2, &["unrecognized subcommand"]);
    refused(folder.path(), &["plan", "empty", "--ram", "lots"], 2, &["write 20GB, 20GiB"]);
    refused(folder.path(), &["plan", "empty", "--pins", "lots"], 2, &["auto, none or a share"]);
}

#[test]
fn budgets_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    copy_of(NANO, folder.path());
    let plan = |ram| ["plan", "model", "--no-measure", "-o", "plan.toml", "--ram", ram];
    let path = folder.path();
    refused(
        path,
        &plan("1MB"),
        1,
        &["does not fit in 1.00 MB", "dense weights", "what would make it fit", "--ram "],
    );
    refused(path, &plan("500GB"), 1, &["500.0 GB is above the", "--allow-overcommit"]);
    refused(
        path,
        &["plan", "model", "--ctx", "9999999", "--no-measure"],
        2,
        &["--ctx 9999999", "1024"],
    );
    let run = ["run", "model", "-p", "x", "--ram", "1MB", "--no-measure"];
    refused(path, &run, 1, &["does not fit in 1.00 MB", "smallest budget"]);

    let ran = tierkeep(path, &["plan", "model", "--ram", "1MB", "--no-measure", "--json"]);
    assert_eq!((ran.code, &ran.json()["fits"]), (1, &Value::Bool(false)));
    let smallest = ran.json()["smallest_budget_bytes"].as_u64().unwrap().to_string();
    let fits = tierkeep(path, &["plan", "model", "--no-measure", "--ram", &smallest]);
    assert_eq!(fits.code, 0, "the smallest budget that is named does fit: {fits:?}");
}

/// Writes a plan of a copy of glm-nano in `folder` and returns its text.
fn planned(folder: &Path) -> String {
    copy_of(NANO, folder);
    let args =
        ["plan", "model", "--ram", "27MB", "--ctx", "256", "--no-measure", "-o", "plan.toml"];
    let ran = tierkeep(folder, &args);
    assert_eq!(ran.code, 0, "{ran:?}");
    fs::read_to_string(folder.join("plan.toml")).unwrap()
}

#[test]
fn an_edited_plan_is_refused_where_it_makes_no_sense() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let plan = planned(folder);
    let field = |name: &str| {
        plan.lines().find(|l| l.starts_with(&format!("{name} = "))).unwrap().to_owned()
    };
    let edits = [
        (plan.replacen("version = 5", "version = 7", 1), "version 7"),
        (plan.replace("threads = ", "treads = "), "treads"),
        (plan.replace(&field("threads"), "threads = 0"), "engine.threads = 0"),
        (plan.replace(&field("context"), "context = 4000"), "request.context = 4000"),
        (plan.replace(&field("prefill_batch"), "prefill_batch = 1"), "bytes for activations"),
        (plan.replace(&field("budget_bytes"), "budget_bytes = 1000"), "over its budget of 1.00 kB"),
        (plan.replace(&field("isa"), "isa = \"sse9\""), "sse9"),
        (plan.replace(&field("fingerprint"), "fingerprint = \"00\""), "model 00"),
        (plan.replace(&field("numerics"), "numerics = \"loose\""), "loose"),
        (plan[..plan.len() / 2].to_owned(), "plan.toml"),
        ("\u{0}\u{1}".to_owned(), "plan.toml is not a plan"),
        (String::new(), "plan.toml is not a plan"),
    ];
    for (text, part) in edits {
        assert_ne!(text, plan, "{part}");
        fs::write(folder.join("plan.toml"), text).unwrap();
        refused(folder, &["run", "plan.toml", "-p", "x"], 1, &[part]);
    }
    fs::write(folder.join("plan.toml"), [0xff, 0xfe]).unwrap();
    refused(folder, &["run", "plan.toml", "-p", "x"], 1, &["not text"]);
}

#[test]
fn a_plan_is_for_its_model_only() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    let olmoe = root().join(OLMOE);
    let args = ["run", "plan.toml", "--ids", "1", "--model", olmoe.to_str().unwrap()];
    refused(folder, &args, 1, &["the plan is for model", "tierkeep plan"]);
    refused(
        folder,
        &["run", "plan.toml", "-p", "x", "--ctx", "9"],
        2,
        &["--ctx belongs to the plan"],
    );
    fs::rename(folder.join("model"), folder.join("moved")).unwrap();
    refused(folder, &["run", "plan.toml", "-p", "x"], 2, &["--model"]);
    let args = ["run", "plan.toml", "-p", "What is 2+2?", "--model", "moved", "--no-usage"];
    let ran = tierkeep(folder, &args);
    assert_eq!((ran.code, ran.out.as_str()), (0, "2 + 2 = 4.\n"), "{ran:?}");
}

#[test]
fn a_run_answers_reports_and_is_learnt_from() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    let ran = tierkeep(folder, &["run", "plan.toml", "-p", "What is 2+2?"]);
    assert_eq!((ran.code, ran.out.as_str()), (0, "2 + 2 = 4.\n"), "{ran:?}");
    for part in [
        "ended     the model said that it is done",
        "load ",
        "first token after",
        "decode ",
        "worst layer",
        "different ones of 160 were asked for",
        "touched in decode",
        "share of the bandwidth of memory unknown",
        "budget 27.00 MB",
        "dense weights ",
        "experts read for a token",
        "too short to judge",
        "usage history",
    ] {
        assert!(ran.err.contains(part), "{part}: {}", ran.err);
    }
    assert!(folder.join("model/.usage").is_file());
    let prose = [
        "run",
        "plan.toml",
        "--raw",
        "-p",
        "Call me Ishmael. Some years ago",
        "-n",
        "120",
        "--json",
    ];
    let ran = tierkeep(folder, &prose);
    let json = ran.json();
    let report = &json["report"];
    assert_eq!(report["decode"]["tokens"], 119);
    assert_eq!(report["ended"], "length");
    let accesses = &report["decode"]["accesses"];
    let count = |tier: &str| accesses[tier].as_u64().unwrap();
    assert_eq!(count("pinned_hits") + count("cache_hits") + count("misses"), 119 * 5 * 4);
    let ledger = report["ledger"].as_array().unwrap();
    for line in ledger {
        if line["source"].as_str().unwrap().starts_with("bound") {
            assert_eq!(line["actual_bytes"], line["planned_bytes"], "{line}");
        }
    }
    let runtime = ledger.iter().find(|line| line["line"] == "runtime").unwrap();
    assert!(runtime["actual_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{runtime}");
    let read = &report["decode"]["read"]["experts"];
    let per_miss = read["bytes"].as_u64().unwrap() / count("misses");
    assert_eq!(read["bytes"].as_u64().unwrap(), count("misses") * per_miss, "an expert is a read");
    let layers = report["layers"].as_array().unwrap();
    let misses: u64 = layers.iter().map(|l| l["decode"]["misses"].as_u64().unwrap()).sum();
    assert_eq!((layers.len(), misses), (5, count("misses")));
    let experts = &report["experts"];
    assert!(experts["distinct"].as_u64() >= experts["distinct_in_decode"].as_u64());
    assert_eq!(experts["total"], 160);
    // The next plan judges pins by what was recorded, and its estimate is calibrated.
    let args = ["plan", "model", "--ram", "27MB", "--ctx", "256", "--no-measure", "--json"];
    let plan = tierkeep(folder, &args).json();
    let evidence = plan["prediction"]["evidence"].to_string();
    assert!(evidence.contains("replayed") && evidence.contains("earlier runs"), "{evidence}");
    let pinned = tierkeep(folder, &[&args[..], &["--pins", "50%"]].concat()).json();
    let pins: usize = pinned["placement"]["slots"]["pins"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| layer.as_array().unwrap().len())
        .sum();
    assert!(pins > 0, "{pinned}");
}

#[test]
fn pins_and_placement_change_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(NANO, folder);
    let prompt = ["--raw", "-p", "The foreign relations of the United States", "-n", "40"];
    let run = |extra: &[&str]| {
        let base = ["run", "model", "--json", "--no-measure", "--ctx", "128"];
        tierkeep(folder, &[&base[..], &prompt, extra].concat()).json()["report"]["tokens"].clone()
    };
    let expected = run(&["--ram", "100MB"]);
    assert_eq!(expected.as_array().unwrap().len(), 40);
    let others: [&[&str]; 6] = [
        &["--ram", "26MB", "--threads", "1"],
        &["--ram", "25MB", "--threads", "2", "--batch", "3"],
        &["--ram", "27MB", "--pins", "50%"],
        &["--ram", "27MB", "--pins", "none", "--batch", "1"],
        &["--ram", "27MB", "--isa", "scalar"],
        &["--ram", "27.5MB", "--io", "buffered", "--no-usage"],
    ];
    for other in others {
        assert_eq!(run(other), expected, "{other:?}");
    }
}

#[test]
fn without_a_tokenizer_ids_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(OLMOE, folder);
    let base = ["run", "model", "--ram", "100MB", "--no-measure", "--no-usage"];
    refused(folder, &[&base[..], &["-p", "hello"]].concat(), 1, &["tokenizer.json", "--ids"]);
    let ran = tierkeep(folder, &[&base[..], &["--ids", "177,223,187", "-n", "3"]].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.out.trim().split(',').count(), 3, "{ran:?}");
    refused(folder, &[&base[..], &["--ids", "99999"]].concat(), 2, &["token id 99999", "320"]);
    refused(folder, &[&base[..], &["--ids", "1,x"]].concat(), 2, &["--ids"]);
}

/// The shard that holds a tensor, and where its data begin in the file.
fn find_tensor(model: &Path, name: &str) -> (PathBuf, usize) {
    for entry in fs::read_dir(model).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("model-") {
            let bytes = fs::read(&path).unwrap();
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let names: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
            if let Some(at) = names[name]["data_offsets"][0].as_u64() {
                return (path, 8 + header + at as usize);
            }
        }
    }
    panic!("{name} is in no shard");
}

#[test]
fn verify_finds_the_reference_and_where_a_fault_begins() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(OLMOE, folder);
    let ran = tierkeep(folder, &["verify", "model", "--layers", "--json"]);
    let json = ran.json();
    assert_eq!((ran.code, &json["holds"]), (0, &Value::Bool(true)), "{json}");
    assert_eq!(json["cases"][0]["layer_differences"].as_array().unwrap().len(), 4);
    // One weight of the third layer is changed: the layers before it are unharmed.
    let (shard, at) = find_tensor(&model, "model.layers.2.input_layernorm.weight");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[at + 1] = 0x41;
    fs::write(shard, bytes).unwrap();
    let ran = tierkeep(folder, &["verify", "model", "--layers", "--json"]);
    let json = ran.json();
    assert_eq!((ran.code, &json["holds"]), (1, &Value::Bool(false)));
    let layer = |l: usize| json["cases"][0]["layer_differences"][l].as_f64().unwrap();
    assert!(layer(1) < 1e-5 && layer(2) > 1e-3, "{json}");
    fs::remove_file(model.join("oracle.json")).unwrap();
    refused(folder, &["verify", "model"], 2, &["oracle.json", "verify needs"]);
}

#[test]
fn doctor_finds_what_is_wrong_and_says_where_facts_come_from() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(NANO, folder);
    let ran = tierkeep(folder, &["doctor", "model", "--no-measure", "--json"]);
    let json = ran.json();
    assert_eq!(ran.code, 0, "{json}");
    assert_eq!(json["schema_version"], 2);
    let sources = json["facts"]["memory"]["total_bytes"]["source"].as_str().unwrap().to_owned();
    assert!(["read", "unknown"].contains(&sources.as_str()));
    let ids: Vec<&str> =
        json["checks"].as_array().unwrap().iter().map(|c| c["id"].as_str().unwrap()).collect();
    for id in ["machine.memory", "model.shards", "model.tokenizer", "model.chat_template"] {
        assert!(ids.contains(&id), "{ids:?}");
    }
    fs::write(folder.join("model/tokenizer.json"), "{}").unwrap();
    let ran = tierkeep(folder, &["doctor", "model", "--no-measure"]);
    assert_eq!(ran.code, 0);
    assert!(ran.out.contains("model.tokenizer") && ran.out.contains("--ids"), "{}", ran.out);
    let ran = tierkeep(folder, &["doctor", "model", "--no-measure", "--strict"]);
    assert_eq!(ran.code, 3);
}

#[test]
fn a_foreign_usage_file_is_named_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(NANO, folder);
    fs::write(folder.join("model/.usage"), "tierkeep-usage 1 blake3=00 bytes=3\n{}").unwrap();
    let base = ["run", "model", "--ram", "30MB", "--no-measure", "-p", "What is 2+2?"];
    let ran = tierkeep(folder, &base);
    assert_eq!((ran.code, ran.out.as_str()), (0, "2 + 2 = 4.\n"), "{ran:?}");
    assert!(ran.err.contains(".usage") && ran.err.contains("moved to"), "{ran:?}");
    let aside = fs::read(folder.join("model/.usage.damaged-1")).unwrap();
    assert!(aside.starts_with(b"tierkeep-usage 1 blake3=00"));
    assert!(folder.join("model/.usage").is_file(), "a new history was written");
}

#[test]
fn a_history_that_cannot_be_saved_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(NANO, folder);
    let config = fs::read(model.join("config.json")).unwrap();
    for usage in ["model", "model/config.json"] {
        let base = ["run", "model", "--ram", "30MB", "--no-measure", "-p", "What is 2+2?"];
        let ran = tierkeep(folder, &[&base[..], &["--usage", usage, "--strict"]].concat());
        assert_eq!((ran.code, ran.out.as_str()), (3, "2 + 2 = 4.\n"), "{ran:?}");
        assert!(
            ran.err.contains("was not saved") && !ran.err.contains("usage history: "),
            "{ran:?}"
        );
    }
    assert_eq!(
        fs::read(model.join("config.json")).unwrap(),
        config,
        "no file of the model is lost"
    );
}

/// An interrupt ends a run with 130, and what was learned until then is kept.
#[cfg(unix)]
#[test]
fn an_interrupt_saves_the_history() {
    use std::io::Read;
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(NANO, folder);
    let mut child = Command::new(env!("CARGO_BIN_EXE_tierkeep"))
        .args(["run", "model", "--ram", "60MB", "--ctx", "1024", "--no-measure", "--ignore-stop"])
        .args(["--raw", "-p", "Call me Ishmael.", "-n", "1000", "--isa", "scalar"])
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Text is coming, so that tokens are being decoded.
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 40]).unwrap();
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    child.stdout.take().unwrap().read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(folder.join("model/.usage").is_file());
}

#[test]
fn convert_writes_a_model_that_runs() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let olmoe = root().join(OLMOE);
    let olmoe = olmoe.to_str().unwrap();
    let dry = tierkeep(folder, &["convert", olmoe, "out", "--dry-run"]);
    assert_eq!(dry.code, 0, "{dry:?}");
    assert!(!folder.join("out").exists());
    let ran = tierkeep(folder, &["convert", olmoe, "out", "--experts", "4"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let args = ["run", "out", "--ids", "1,2", "-n", "4", "--ram", "90MB", "--no-measure"];
    let ran = tierkeep(folder, &args);
    assert_eq!(ran.code, 0, "{ran:?}");
    refused(folder, &["convert", olmoe, "out"], 2, &["out"]);
    refused(folder, &["convert", olmoe, "new", "--experts", "5"], 2, &["8, 4, 2, 16 or keep"]);
}

/// What the options of packing ask for is what the written model is said to be stored in, and it runs.
#[test]
fn convert_packs_with_groups_and_halves_as_asked() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let olmoe = root().join(OLMOE);
    let olmoe = olmoe.to_str().unwrap();
    let cases = [("2", "32", "f16", "int2-g32-f16"), ("4", "32", "f32", "int4-g32")];
    for (bits, group, scales, name) in cases {
        let options = ["--experts", bits, "--dense", "keep", "--embedding", "keep"];
        let packing = ["--group", group, "--scales", scales];
        let args = [&["convert", olmoe, name][..], &options, &packing].concat();
        let ran = tierkeep(folder, &args);
        assert_eq!(ran.code, 0, "{ran:?}");
        let seen = tierkeep(folder, &["inspect", name, "--json"]);
        assert_eq!(seen.code, 0, "{seen:?}");
        assert!(seen.out.contains(&format!("\"{name}\"")), "{name}: {seen:?}");
        let deep = tierkeep(folder, &["doctor", name, "--deep", "--no-measure", "--json"]);
        assert_eq!(deep.code, 0, "{deep:?}");
        let run = ["run", name, "--ids", "1,2", "-n", "4", "--ram", "90MB", "--no-measure"];
        let ran = tierkeep(folder, &run);
        assert_eq!(ran.code, 0, "{ran:?}");
    }
    refused(folder, &["convert", olmoe, "new", "--group", "48"], 2, &["row, 128, 64 or 32"]);
    refused(folder, &["convert", olmoe, "new", "--scales", "bf16"], 2, &["f32", "f16"]);
    assert!(!folder.join("new").exists());
}

#[test]
fn the_demo_shows_the_whole_motion() {
    let folder = tempfile::tempdir().unwrap();
    let ran = tierkeep(folder.path(), &["demo", "--json"]);
    let json = ran.json();
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(json["first"]["answers"][0][1], "2 + 2 = 4.");
    assert_eq!(json["same_answers"], true);
    assert!(json["second"]["pins"].as_u64().unwrap() > 0, "{json}");
    for run in ["first", "second", "second_without_pins"] {
        let rate = json[run]["hit_rate"].as_f64().unwrap();
        assert!(rate > 0.0 && rate < 1.0, "the budget does not hold every expert: {run} {rate}");
    }
    assert!(!root().join(NANO).join(".usage").exists(), "the demo leaves no history behind");
    let gone = tierkeep(folder.path(), &["demo", "--model", "nowhere"]);
    assert_eq!(gone.code, 2, "{gone:?}");
}

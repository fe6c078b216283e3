//! `convert` as a user meets it: killed and started again, without room, interrupted, and what it says.
#![cfg(unix)]
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
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use binary::{OLMOE, Ran, command, copy_of, tierkeep};

/// So many files that a kill falls between some of them.
const SMALL: [&str; 6] = ["--experts", "gate=4,up=4,down=8", "--shard", "40000", "--threads", "2"];

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let read = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
    };
    entries.map(read).collect()
}

fn n_shards(folder: &Path) -> usize {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".safetensors")).count()
}

/// Every file under a final name is whole: it has the bytes of the undisturbed run.
fn assert_no_half_shard(out: &Path, whole: &BTreeMap<String, Vec<u8>>) {
    for (name, bytes) in files(out).iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        assert!(whole.get(name) == Some(bytes), "{name} is half or other");
    }
}

#[test]
fn killed_at_ten_moments_and_started_again_it_writes_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(OLMOE, folder);
    let convert = |out: &str| {
        let mut command = command(folder);
        command.args(["convert", "model", out]).args(SMALL);
        command
    };
    let started = Instant::now();
    let ran = Ran::of(&mut convert("whole"));
    assert_eq!(ran.code, 0, "{ran:?}");
    let took = started.elapsed();
    let whole = files(&folder.join("whole"));
    assert!(n_shards(&folder.join("whole")) > 10);

    // Moments spread over what a run took, by a generator without a clock.
    let (mut seed, mut n_killed, mut n_partial) = (12_345_u64, 0, 0);
    let out = folder.join("out");
    for attempt in 0_u32.. {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let share = (seed >> 40) as f64 / f64::from(1 << 24);
        let mut child = convert("out").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(took.mul_f64(share * 0.9) / (1 + attempt / 20));
        // One that has ended is not killed, and is begun anew.
        let _ = child.kill();
        let status = child.wait().unwrap();
        assert!(status.code().is_none_or(|code| code == 0), "{status}");
        if status.code().is_none() {
            n_killed += 1;
            if out.is_dir() {
                assert_no_half_shard(&out, &whole);
                n_partial += usize::from(n_shards(&out) > 0);
            }
            assert!(!out.join("config.json").exists() || files(&out).len() >= whole.len());
        } else {
            assert!(files(&out) == whole);
            fs::remove_dir_all(&out).unwrap();
        }
        if n_killed >= 10 && n_partial > 0 {
            break;
        }
    }
    let ran = Ran::of(&mut convert("out"));
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(files(&out) == whole);
}

#[test]
fn a_finished_conversion_is_no_error_and_another_one_is() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(OLMOE, folder);
    let convert = |more: &[&str]| {
        tierkeep(folder, &[&["convert", "model", "out"][..], &SMALL, more].concat())
    };
    assert_eq!(convert(&[]).code, 0);
    let out = folder.join("out");
    let whole = files(&out);
    let again = convert(&[]);
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.out.contains("holds this conversion already, finished"), "{again:?}");
    let json = convert(&["--json"]).json();
    assert_eq!((&json["was_finished"], &json["quality"]["experts"]), (&true.into(), &"4".into()));
    // Killed after config.json has its name and before the journal is gone.
    fs::write(out.join("tierkeep-convert.partial"), "").unwrap();
    assert_eq!(convert(&[]).code, 0);
    assert!(files(&out) == whole);
    for other in [&["--dense", "4"][..], &["--restart"]] {
        let ran = convert(other);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("is not empty"), "{ran:?}");
    }
    // A source that was written to since is another one.
    let shard = model.join("model-00001-of-00004.safetensors");
    let later = std::time::SystemTime::now() + Duration::from_secs(60);
    fs::File::options().write(true).open(shard).unwrap().set_modified(later).unwrap();
    assert_eq!(convert(&[]).code, 2);
    assert!(files(&out) == whole);
}

#[test]
fn a_consumed_source_and_a_finished_output_are_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(OLMOE, folder);
    let args = [&["convert", "model", "out", "--consume"][..], &SMALL].concat();
    for _ in 0..2 {
        let ran = tierkeep(folder, &args);
        assert_eq!(ran.code, 0, "{ran:?}");
    }
    assert_eq!(tierkeep(folder, &args[..3]).code, 1);
}

#[test]
fn an_interrupt_leaves_what_can_go_on_and_says_how() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(OLMOE, folder);
    let ran = tierkeep(folder, &[&["convert", "model", "whole"][..], &SMALL].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    let child = command(folder)
        .args(["convert", "model", "out"])
        .args(SMALL)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let out = folder.join("out");
    while n_shards(&out) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let ran = tierkeep(folder, &[&["convert", "model", "out", "--json"][..], &SMALL].concat());
    if !out.join("tierkeep-convert.partial").exists() && ran.code == 2 {
        return; // It had ended before the interrupt came.
    }
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.json()["files_of_earlier"].as_u64().unwrap() > 0);
    assert!(files(&out) == files(&folder.join("whole")));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("the same command goes on from there"), "{said}");
}

/// A filesystem of its own in a mount namespace; where there are none, there is nothing to test.
#[test]
fn without_room_it_says_so_keeps_what_is_finished_and_goes_on_later() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(OLMOE, folder);
    let ran = tierkeep(folder, &[&["convert", "model", "whole"][..], &SMALL].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    let whole = files(&folder.join("whole"));
    let total: usize = whole.values().map(Vec::len).sum();
    fs::create_dir(folder.join("small")).unwrap();
    // There is room when it begins. It is stopped after its second file, and goes on when there is none.
    let script = format!(
        "mount -t tmpfs -o size={size} none small || exit 77
         \"$0\" convert model small/out {args} > first.out 2> first.err & id=$!
         until ls small/out/model-00002-*.safetensors > /dev/null 2>&1; do
             kill -0 $id 2> /dev/null || break
         done
         kill -STOP $id; cat /dev/zero > small/filler 2> /dev/null; kill -CONT $id
         wait $id; echo $? > first.code
         rm small/filler; cp -r small/out first
         \"$0\" convert model small/out {args} > second.out 2> second.err; echo $? > second.code
         cp -r small/out second",
        size = total * 2,
        args = SMALL.join(" "),
    );
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--map-root-user", "sh", "-c", &script]);
    unshare.arg(env!("CARGO_BIN_EXE_tierkeep")).current_dir(folder).env("HOME", folder);
    match unshare.output() {
        Ok(output) if output.status.success() => {}
        Ok(_) | Err(_) => return,
    }
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    if read("first.code").trim() == "0" {
        return; // It had ended before it was stopped.
    }
    assert_eq!(read("first.code").trim(), "2", "{}", read("first.err"));
    let said = read("first.err");
    assert!(said.contains("no space left") && said.contains("again"), "{said}");
    let first = folder.join("first");
    assert!(n_shards(&first) >= 2 && !first.join("config.json").exists());
    assert_no_half_shard(&first, &whole);
    let halves = files(&first).into_keys().filter(|name| name.ends_with(".safetensors.partial"));
    assert_eq!(halves.count(), 0, "half a file keeps no room");
    assert_eq!(read("second.code").trim(), "0", "{}", read("second.err"));
    assert!(files(&folder.join("second")) == whole);
}

#[test]
fn a_dry_run_says_what_would_follow_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    copy_of(OLMOE, folder);
    let args = ["convert", "model", "out", "--dry-run", "--json"];
    let dry = tierkeep(folder, &[&args[..], &SMALL].concat());
    assert_eq!(dry.code, 0, "{dry:?}");
    assert!(!folder.join("out").exists());
    let ran = tierkeep(folder, &[&["convert", "model", "out", "--json"][..], &SMALL].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    let (dry, ran) = (dry.json(), ran.json());
    assert_eq!(dry["planned_bytes"], ran["bytes_out"]);
    assert!(dry["peak_bytes_consuming"].as_u64() <= dry["planned_bytes"].as_u64());
    assert!(dry["plan"]["decode_tokens_per_s"].is_array() || dry["plan"].is_object(), "{dry}");
    let seen = tierkeep(folder, &["inspect", "out"]);
    assert!(seen.out.contains("int4") && seen.out.contains("int8"), "{seen:?}");
    let deep = tierkeep(folder, &["doctor", "out", "--deep", "--no-measure", "--json"]).json();
    let checks = deep["checks"].as_array().unwrap();
    let sums = checks.iter().find(|check| check["id"] == "model.checksums").unwrap();
    assert_eq!(sums["status"], "ok");
}

#[test]
fn a_consumed_source_is_announced_and_gone() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = copy_of(OLMOE, folder);
    let kept = files(&model).into_keys().filter(|name| !is_shard(name)).count();
    let ran = tierkeep(folder, &[&["convert", "model", "out", "--consume"][..], &SMALL].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.err.contains("--consume: the"), "{ran:?}");
    let left = files(&model);
    assert_eq!(left.len(), kept, "{:?}", left.keys());
    assert!(left.contains_key("config.json"));
}

fn is_shard(name: &str) -> bool {
    name.starts_with("model") && name.ends_with(".safetensors")
}

//! The corpus of the fuzz targets, replayed: what each file is named for is what is said of it, and
//! no damage to it leads to a panic.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

#[path = "../../fuzz/targets/replay.rs"]
mod replay;
#[path = "../../fuzz/targets/plans.rs"]
mod targets;

use std::fmt::{Debug, Display};

/// Damaged copies of each file: a few seconds in a debug build.
const N_COPIES: usize = 40;

/// Checks the outcome of every file of a corpus by the beginning of its name: accepted, or refused
/// with a message that contains a text. Every file must be covered and every line must be of use.
fn outcomes<T: Debug, E: Display>(
    name: &str,
    expected: &[(&str, Option<&str>)],
    target: impl Fn(&[u8]) -> Result<T, E>,
) {
    let mut used = vec![false; expected.len()];
    for (file, bytes) in replay::corpus(name) {
        let at = expected.iter().position(|(prefix, _)| file.starts_with(prefix));
        let at = at.unwrap_or_else(|| panic!("nothing is expected of {name}/{file}"));
        used[at] = true;
        match (target(&bytes), expected[at].1) {
            (Ok(_), None) => {}
            (Ok(found), Some(_)) => panic!("{name}/{file} was accepted: {found:?}"),
            (Err(error), None) => panic!("{name}/{file}: {error}"),
            (Err(error), Some(text)) => {
                let message = error.to_string();
                assert!(message.contains(text), "{name}/{file}: {message:?} lacks {text:?}");
            }
        }
    }
    let unused = expected.iter().zip(used).find(|(_, used)| !used);
    assert!(unused.is_none(), "no file of {name} is {unused:?}");
}

#[test]
fn every_lie_of_a_header_is_told_apart() {
    let expected = [
        ("good-", None),
        ("length-2-to-the-60", Some("a header of 1152921504606846976 bytes, more than the cap")),
        ("length-all-ones", Some("more than the cap of 100000000")),
        ("length-over-the-cap", Some("100000001 bytes, more than the cap")),
        ("length-past-the-end", Some("a header of 3 bytes but is only 10 bytes long")),
        ("length-at-the-cap", Some("a header of 100000000 bytes but is only 8 bytes long")),
        ("length-zero", Some("not valid: EOF")),
        ("file-empty", Some("0 bytes long, too short")),
        ("file-of-seven-bytes", Some("7 bytes long, too short")),
        ("not-json-git-lfs", Some("more than the cap")),
        ("not-json-", Some("a header that is not valid: ")),
        ("entry-field-twice", Some("tensor a: a field is listed twice")),
        ("entry-lacks-dtype", Some("tensor a: missing field `dtype`")),
        ("entry-lacks-shape", Some("tensor a: missing field `shape`")),
        ("entry-lacks-offsets", Some("tensor a: missing field `data_offsets`")),
        ("entry-", Some("not valid: tensor a: ")),
        ("number-", Some("not valid: ")),
        ("rank-33", Some("tensor a: more than 32 dimensions")),
        ("offsets-overlap", Some("tensor b starts at 2, expected 4 (a gap or an overlap)")),
        ("offsets-the-same", Some("tensor b starts at 0, expected 4 (a gap or an overlap)")),
        ("offsets-with-a-gap", Some("tensor b starts at 5, expected 4 (a gap or an overlap)")),
        ("offsets-not-from-zero", Some("tensor a starts at 2, expected 0 (a gap or an overlap)")),
        ("offsets-reversed", Some("tensor a ends at 0, before its start at 4")),
        ("offsets-", Some("the file was cut off")),
        ("data-longer-than-said", Some("bytes follow the last tensor")),
        ("shape-of-half-a-byte", Some("shape [3] and type F4 does not fill its 1 bytes")),
        ("shape-of-fewer-bytes", Some("shape [2] and type F32 does not fill its 4 bytes")),
        ("shape-that-overflows-to-right", Some("type F64 does not fill its 8 bytes")),
        ("shape-that-overflows", Some("does not fill its 4 bytes")),
        ("shape-with-a-zero", Some("tensor a has no elements")),
        ("name-twice", Some("lists tensor a twice")),
        ("metadata-twice", Some("lists tensor __metadata__ twice")),
        ("metadata-", Some("not valid: ")),
    ];
    outcomes("header", &expected, targets::header);
}

#[test]
fn what_an_index_says_is_believed_only_of_files_that_are_there() {
    let absent = Some("is missing (named by model.safetensors.index.json)");
    let expected = [
        ("good", None),
        ("escaped-name", None),
        // Its second file is not named, and nothing else tells that it exists.
        ("one-file-of-two", Some("tensor model.layers.0.mlp.gate.weight is in none of the 1")),
        ("name-twice", Some("tensor model.layers.0.mlp.gate.weight is in none of the 1")),
        ("absent-file", None),
        ("lists-nothing", Some("no model*.safetensors")),
        ("leaves-the-folder", absent),
        ("empty-names", Some("no model*.safetensors")),
        ("numbered-", absent),
        ("config-as-a-shard", absent),
        ("in-other-scripts", absent),
        ("values-not-text", Some("no model*.safetensors")),
        ("a-list", Some("no model*.safetensors")),
        ("empty", Some("no model*.safetensors")),
        ("not-utf8", Some("no model*.safetensors")),
        ("nested-", Some("no model*.safetensors")),
        ("no-map", Some("no model*.safetensors")),
        ("cut-off", Some("no model*.safetensors")),
        ("other-fields-nested", Some("no model*.safetensors")),
    ];
    outcomes("index", &expected, targets::index);
}

#[test]
fn packed_types_are_told_from_headers_or_refused() {
    let contradicts = Some("expected what its file's metadata say (tierkeep.");
    let expected = [
        ("good-", None),
        ("contradiction-", contradicts),
        ("unknown-group", Some("does not read (tierkeep.dense.group = 48)")),
        ("scales-of-no-group", Some("scales of shape [3, 4] for 3 x 72, expected [3] (one a row)")),
        ("scales-of-bytes", Some("packed U8 with U8 scales")),
        ("scales-of-groups-by-rows", Some("scales of shape [2, 3] for 3 x 72")),
        ("rows-cut", Some("51 packed bytes for 3 x 72, expected 216 (8 bits)")),
    ];
    outcomes("container", &expected, targets::container);
}

#[test]
fn usage_files_and_counts_are_refused_for_what_is_wrong() {
    let expected = [
        ("good", None),
        ("out-of-range", Some("layer 3 does not exist")),
        ("fields", Some("found 2 fields")),
        ("", Some("whole number")),
    ];
    outcomes("counts", &expected, targets::counts);
    for (file, bytes) in replay::corpus("usage") {
        assert_eq!(targets::usage(&bytes).is_ok(), file.starts_with("good"), "{file}");
    }
}

#[test]
fn good_configs_are_read_and_the_others_are_only_refused() {
    for (file, bytes) in replay::corpus("config") {
        let result = targets::config(&bytes);
        assert!(result.is_ok() || !file.starts_with("good-"), "{file}: {result:?}");
    }
}

#[test]
fn no_damage_leads_to_a_panic() {
    let targets: [(&str, replay::Target<'_>); 7] = [
        ("container", &mut |bytes| drop(targets::container(bytes))),
        ("header", &mut |bytes| drop(targets::header(bytes))),
        ("config", &mut |bytes| drop(targets::config(bytes))),
        ("index", &mut |bytes| drop(targets::index(bytes))),
        ("plan", &mut |bytes| drop(targets::plan(bytes))),
        ("usage", &mut |bytes| drop(targets::usage(bytes))),
        ("counts", &mut |bytes| drop(targets::counts(bytes))),
    ];
    for (name, target) in targets {
        replay::with_damage(name, N_COPIES, target);
    }
}

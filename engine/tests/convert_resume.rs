//! Conversions that are stopped, go on, are refused, and delete their source.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

#[path = "support/conversion.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::Path;

use support::*;
use tempfile::TempDir;
use tierkeep_engine::convert::{
    Bits, ConvertError, ConvertOptions, ConvertReport, Execution, checksums, convert, forecast,
    open_consumed,
};
use tierkeep_plans::catalogue::{Catalogue, CatalogueError};
use tierkeep_plans::checks::Status;
use tierkeep_plans::units::Bytes;

/// So many files that a stop falls between some of them.
fn small_files() -> ConvertOptions {
    ConvertOptions { shard_bytes: Bytes(600), ..options(FOUR, EIGHT) }
}

/// Tensors in the order of published files, the head last.
fn in_order() -> Vec<SourceTensor> {
    let mut tensors = glm_tensors("BF16");
    let head = tensors.remove(0);
    let norm = tensors.remove(1);
    assert_eq!((head.name.as_str(), norm.name.as_str()), ("lm_head.weight", "model.norm.weight"));
    tensors.extend([norm, head]);
    tensors
}

/// Every file of a folder by name.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    let read = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
    };
    entries.map(read).collect()
}

/// Converts until so many pieces have been told.
fn stopped_after(
    source: &Path,
    out: &Path,
    n_told: usize,
    execution: &Execution,
) -> Result<ConvertReport, ConvertError> {
    let model = match open_consumed(source, out) {
        Some(model) => model.unwrap(),
        None => Catalogue::open(source).unwrap(),
    };
    let mut told = 0;
    convert(&model, out, &small_files(), execution, &mut |_| {
        told += 1;
        if told > n_told { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

#[test]
fn what_was_stopped_goes_on_to_the_same_bytes() {
    let source = model(&glm_tensors("BF16"));
    let whole = TempDir::new().unwrap();
    let execution = Execution { threads: Some(1), ..Execution::default() };
    let undisturbed = stopped_after(source.path(), whole.path(), usize::MAX, &execution).unwrap();
    assert!(undisturbed.files.len() > 5, "{} files", undisturbed.files.len());
    for threads in [1, 3] {
        for read_back in [false, true] {
            let execution = Execution { threads: Some(threads), read_back, ..execution };
            let out = TempDir::new().unwrap();
            // Stopped again and again, each time a little later.
            let mut n_told = 0;
            let report = loop {
                match stopped_after(source.path(), out.path(), n_told, &execution) {
                    Ok(report) => break report,
                    Err(ConvertError::Interrupted) => {
                        let error = Catalogue::open(out.path()).unwrap_err();
                        assert!(matches!(error, CatalogueError::NotAModel { .. }));
                    }
                    Err(error) => panic!("{error}"),
                }
                n_told += 3;
            };
            assert!(files(out.path()) == files(whole.path()));
            assert!(report.files_of_earlier > 0);
            assert_eq!(report.classes, undisturbed.classes, "errors of earlier tries are counted");
        }
    }
}

#[test]
fn another_conversion_does_not_go_on() {
    let source = model(&glm_tensors("BF16"));
    let out = TempDir::new().unwrap();
    let execution = Execution::default();
    stopped_after(source.path(), out.path(), 20, &execution).unwrap_err();
    let before = files(out.path());

    let other = ConvertOptions { experts: EIGHT.into(), ..small_files() };
    let error = run(source.path(), out.path(), &other).unwrap_err().to_string();
    assert!(error.contains("was begun with --experts 4") && error.contains("--restart"), "{error}");
    assert!(files(out.path()) == before, "nothing written or removed");

    let copy = model(&glm_tensors("BF16"));
    let shard = copy.path().join("model-00001-of-00002.safetensors");
    File::options().append(true).open(&shard).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    let error = stopped_after(copy.path(), out.path(), 20, &execution).unwrap_err().to_string();
    assert!(error.contains("model-00001-of-00002.safetensors was last written"), "{error}");

    let wider = model(&glm_tensors_of("BF16", 12));
    let error = stopped_after(wider.path(), out.path(), 20, &execution).unwrap_err().to_string();
    assert!(error.contains("of another model"), "{error}");

    let model = Catalogue::open(source.path()).unwrap();
    let restart = Execution { restart: true, ..execution };
    convert(&model, out.path(), &other, &restart, &mut |_| ControlFlow::Continue(())).unwrap();
    let anew = TempDir::new().unwrap();
    run(source.path(), anew.path(), &other).unwrap();
    assert!(files(out.path()) == files(anew.path()));
}

#[test]
fn a_damaged_weight_leaves_what_is_finished_and_no_half_file() {
    let mut tensors = glm_tensors("BF16");
    let last = tensors.last_mut().unwrap();
    assert_eq!(last.name, "model.layers.2.eh_proj.weight");
    let cols = last.shape[1];
    last.values[3 * cols] = f32::NAN;
    *last = SourceTensor::from_values(&last.name, &last.shape, "BF16", last.values.clone());
    let bad = model(&tensors);
    let out = TempDir::new().unwrap();
    let error = run(bad.path(), out.path(), &small_files()).unwrap_err().to_string();
    let place = "model.layers.2.eh_proj.weight row 3 column 0 holds";
    assert!(error.starts_with(place), "{error}");
    assert!(!shards(out.path()).is_empty(), "finished files keep their names");
    let halves = files(out.path()).into_keys().filter(|n| n.ends_with(".safetensors.partial"));
    assert_eq!(halves.count(), 0);
    assert!(matches!(Catalogue::open(out.path()).unwrap_err(), CatalogueError::NotAModel { .. }));
}

#[test]
fn what_is_not_finite_becomes_no_bf16_either() {
    let sixteen = ConvertOptions { mtp: Bits::Sixteen.into(), ..options(FOUR, EIGHT) };
    for bad in [f32::NAN, f32::INFINITY] {
        let mut tensors = glm_tensors("F32");
        let last = tensors.last_mut().unwrap();
        last.values[3 * last.shape[1] + 1] = bad;
        *last = SourceTensor::from_values(&last.name, &last.shape, "F32", last.values.clone());
        let damaged = model(&tensors);
        let out = TempDir::new().unwrap();
        let error = run(damaged.path(), out.path(), &sixteen).unwrap_err().to_string();
        let place = "model.layers.2.eh_proj.weight row 3 column 1 holds";
        assert!(error.starts_with(place), "{error}");
    }
}

#[test]
fn checksums_find_a_changed_byte_and_a_missing_file() {
    let source = model(&glm_tensors("BF16"));
    let out = TempDir::new().unwrap();
    run(source.path(), out.path(), &small_files()).unwrap();
    let check = || checksums(out.path(), &mut |_| ControlFlow::Continue(()));
    assert_eq!(check().status, Status::Ok, "{:?}", check());
    let shard = shards(out.path()).pop().unwrap();
    let mut bytes = fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&shard, &bytes).unwrap();
    let found = check();
    let name = shard.file_name().unwrap().to_str().unwrap();
    assert_eq!(found.status, Status::Fail);
    assert!(found.finding.contains(name) && found.finding.contains("other bytes"), "{found:?}");
    fs::remove_file(&shard).unwrap();
    assert!(check().finding.contains(name));
    fs::remove_file(out.path().join("tierkeep-manifest.json")).unwrap();
    assert_eq!(check().status, Status::Skip);
}

#[test]
fn a_consumed_source_goes_file_by_file_and_the_output_is_the_same() {
    let tensors = in_order();
    let kept = model(&tensors);
    let whole = TempDir::new().unwrap();
    run(kept.path(), whole.path(), &small_files()).unwrap();
    let source = model(&tensors);
    let out = TempDir::new().unwrap();
    let execution = Execution { consume: true, ..Execution::default() };
    let mut n_told = 0;
    let mut was_partly_gone = false;
    let report = loop {
        match stopped_after(source.path(), out.path(), n_told, &execution) {
            Ok(report) => break report,
            Err(ConvertError::Interrupted) => {}
            Err(error) => panic!("{error}"),
        }
        was_partly_gone |= shards(source.path()).len() == 1;
        if was_partly_gone && shards(source.path()).len() == 1 {
            let model = open_consumed(source.path(), out.path()).unwrap().unwrap();
            let restart = Execution { restart: true, ..Execution::default() };
            let mut go_on = |_| ControlFlow::Continue(());
            let refused =
                convert(&model, out.path(), &small_files(), &restart, &mut go_on).unwrap_err();
            assert!(refused.to_string().contains("deleted already"), "{refused}");
        }
        n_told += 3;
    };
    assert!(was_partly_gone, "no stop fell between the two files of the source");
    assert_eq!(report.consumed.len(), 2);
    assert_eq!(shards(source.path()), Vec::<std::path::PathBuf>::new());
    assert!(source.path().join("config.json").is_file());
    assert!(source.path().join("tokenizer.json").is_file());
    assert!(source.path().join("notes.txt").is_file());
    assert!(files(out.path()) == files(whole.path()));
}

#[test]
fn what_must_not_be_deleted_is_refused() {
    let execution = Execution { consume: true, ..Execution::default() };
    let refused = |source: &Path, out: &Path| {
        let model = Catalogue::open(source).unwrap();
        let options = small_files();
        let mut go_on = |_| ControlFlow::Continue(());
        let error = convert(&model, out, &options, &execution, &mut go_on).unwrap_err();
        assert!(matches!(error, ConvertError::CannotConsume { .. }), "{error}");
        assert!(!out.exists() || fs::read_dir(out).unwrap().count() == 0);
        error.to_string()
    };
    let source = model(&glm_tensors("BF16"));
    let error = refused(source.path(), &source.path().join("out"));
    assert!(error.contains("inside the model"), "{error}");
    let out = TempDir::new().unwrap();
    #[cfg(unix)]
    {
        // A folder that is not there yet has no real path of its own; what it will be in has.
        let link = out.path().join("link");
        std::os::unix::fs::symlink(source.path(), &link).unwrap();
        for inside in ["new", "new/deeper"] {
            let error = refused(source.path(), &link.join(inside));
            assert!(error.contains("inside the model"), "{error}");
        }
        let links = TempDir::new().unwrap();
        for entry in fs::read_dir(source.path()).unwrap() {
            let entry = entry.unwrap();
            std::os::unix::fs::symlink(entry.path(), links.path().join(entry.file_name())).unwrap();
        }
        assert!(refused(links.path(), &out.path().join("a")).contains("it is a link"));
        let name = "model-00001-of-00002.safetensors";
        let other = out.path().join("other-name");
        fs::hard_link(source.path().join(name), &other).unwrap();
        assert!(refused(source.path(), &out.path().join("b")).contains("other names"));
        fs::remove_file(other).unwrap();
    }
    let shard = source.path().join("model-00002-of-00002.safetensors");
    let mut permissions = fs::metadata(&shard).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&shard, permissions).unwrap();
    assert!(refused(source.path(), &out.path().join("c")).contains("read-only"));
}

#[test]
fn a_forecast_is_what_comes_of_it() {
    let source = model(&in_order());
    let out = TempDir::new().unwrap();
    let before = Catalogue::open(source.path()).unwrap();
    let forecast = forecast(&before, out.path(), &small_files()).unwrap();
    let planned = forecast.catalogue.unwrap();
    let report = run(source.path(), out.path(), &small_files()).unwrap();
    let written = Catalogue::open(out.path()).unwrap();
    assert_eq!(planned.fingerprint, written.fingerprint);
    assert_eq!(planned.tensors, written.tensors);
    assert_eq!(planned.experts, written.experts);
    assert_eq!(forecast.bytes_out, report.bytes_out);
    assert_eq!(forecast.bytes_in, report.bytes_in);
    assert!(forecast.peak_consuming < forecast.bytes_out);
}

#[test]
fn folders_that_hold_something_else_are_refused() {
    let source = model(&glm_tensors("BF16"));
    let options = ConvertOptions::default();
    let refused = |out: &Path| {
        let before = fs::read_dir(out).unwrap().count();
        let error = run(source.path(), out, &options).unwrap_err();
        assert_eq!(fs::read_dir(out).unwrap().count(), before, "nothing written or removed");
        error.to_string()
    };
    // Its own source.
    assert!(refused(source.path()).contains("is not empty (it holds config.json)"));
    // A finished conversion of other choices; of the same there is nothing left to do.
    let out = TempDir::new().unwrap();
    run(source.path(), out.path(), &small_files()).unwrap();
    assert!(refused(out.path()).contains("is not empty"));
    let before = fs::read_dir(out.path()).unwrap().count();
    run(source.path(), out.path(), &small_files()).unwrap();
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), before);
    // An interrupted one beside a user's file.
    let out = TempDir::new().unwrap();
    fs::write(out.path().join("tierkeep-convert.partial"), "").unwrap();
    fs::write(out.path().join("model-00001-of-00002.safetensors"), "x").unwrap();
    fs::write(out.path().join("thesis.tex"), "x").unwrap();
    assert!(refused(out.path()).contains("it holds thesis.tex"));
    // A download that was cut off.
    let out = TempDir::new().unwrap();
    fs::write(out.path().join("model-00001-of-00002.safetensors"), "x").unwrap();
    assert!(refused(out.path()).contains("is not empty"));
    // Another conversion at work.
    let out = TempDir::new().unwrap();
    let marker = File::create(out.path().join("tierkeep-convert.partial")).unwrap();
    marker.lock().unwrap();
    assert!(refused(out.path()).contains("another conversion"));
}

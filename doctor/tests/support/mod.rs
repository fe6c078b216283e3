//! Trees of `/proc` and `/sys` files for tests: recorded ones, and ones made up on the spot.
#![allow(dead_code, clippy::unwrap_used, missing_docs, reason = "helpers of several tests")]

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tierkeep_doctor::{Facts, Probe};

pub(crate) fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub(crate) fn made(files: &[(&str, &str)]) -> TempDir {
    let root = TempDir::new().unwrap();
    for (path, text) in files {
        write(root.path(), path, text);
    }
    root
}

pub(crate) fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

pub(crate) fn facts(root: &Path) -> Facts {
    Probe::new().root(root.to_path_buf()).measure(false).run(&mut |_| {})
}

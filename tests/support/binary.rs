//! Running the binary in a folder of a test, and copies of committed models to run it on. Owns what no
//! test may see of the machine: a history, a cache or a width that is the user's.
#![allow(dead_code, reason = "each file of tests uses its part of this")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

pub(crate) const OLMOE: &str = "tests/oracles/olmoe";
pub(crate) const NANO: &str = "examples/glm-nano";

/// What a run of the binary came to.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    /// Runs a command to its end.
    pub(crate) fn of(command: &mut Command) -> Self {
        let output = command.output().unwrap();
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

/// The binary in `folder`, its data folder and home there too, with nothing to read.
pub(crate) fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tierkeep"));
    command
        .current_dir(folder)
        .env("XDG_DATA_HOME", folder.join("data"))
        .env("HOME", folder)
        .env_remove("COLUMNS")
        .stdin(Stdio::null());
    command
}

/// Runs the binary in `folder`.
pub(crate) fn tierkeep(folder: &Path, args: &[&str]) -> Ran {
    Ran::of(command(folder).args(args))
}

/// Where the tree is.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The files of a committed model, without what runs have left there, in a new folder `to`.
pub(crate) fn copy(model: &str, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(root().join(model)).unwrap() {
        let entry = entry.unwrap();
        if !entry.file_name().to_string_lossy().starts_with('.') {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

/// A copy of a committed model as `model` in `folder`, to be damaged at will.
pub(crate) fn copy_of(model: &str, folder: &Path) -> PathBuf {
    let to = folder.join("model");
    copy(model, &to);
    to
}

//! Which folders of models our own files may be put into. Owns that question and asks it without
//! writing.

use std::fs;
use std::path::{Component, Path};

/// Whether files of ours may lie in a model's folder: it can be written, and is no hub cache, whose
/// folders are the hub client's to keep and delete.
pub(crate) fn takes_files(model_dir: &Path) -> bool {
    let real = fs::canonicalize(model_dir).unwrap_or_else(|_| model_dir.to_owned());
    !is_hub_cache(model_dir) && !is_hub_cache(&real) && is_writable(&real)
}

/// `.../hub/.../snapshots/...` or `.../models--<owner>--<name>/.../snapshots/...`.
fn is_hub_cache(folder: &Path) -> bool {
    let mut in_hub = false;
    folder.components().any(|component| {
        let Component::Normal(name) = component else { return false };
        let found = in_hub && name == "snapshots";
        in_hub |= name == "hub" || name.to_string_lossy().starts_with("models--");
        found
    })
}

/// Asks without writing: a plan should not touch the model's folder.
#[cfg(unix)]
fn is_writable(folder: &Path) -> bool {
    use rustix::fs::{Access, access};
    access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

#[cfg(not(unix))]
fn is_writable(folder: &Path) -> bool {
    fs::metadata(folder).is_ok_and(|m| m.is_dir() && !m.permissions().readonly())
}

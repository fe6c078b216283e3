//! The checksums of a container's files, in a file beside them. Owns its form and the comparison of
//! files with it.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tierkeep_plans::checks::Check;
use tierkeep_plans::units::Bytes;

use super::disk::{OutputDisk, SystemOutput};
use super::journal::Finished;
use super::writer::hash_file;

/// Its name.
pub(super) const MANIFEST: &str = "tierkeep-manifest.json";
const CHECK: &str = "model.checksums";

/// Sizes and checksums of weight files.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    version: u32,
    /// Fingerprint of the weights that were published.
    pub(super) source: String,
    /// As arguments of the command line.
    pub(super) options: String,
    pub(super) files: Vec<Listed>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) bytes: u64,
    blake3: String,
}

impl Manifest {
    pub(super) fn new(source: &str, options: String, finished: &[&Finished]) -> Self {
        let listed = |f: &&Finished| Listed {
            name: f.file.clone(),
            bytes: f.bytes,
            blake3: f.blake3.clone(),
        };
        let files = finished.iter().map(listed).collect();
        Self { version: 1, source: source.to_owned(), options, files }
    }

    pub(super) fn text(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }
}

/// Bytes that [`checksums`] would read of a folder; 0 where it has no checksums.
#[must_use]
pub fn checksummed_bytes(directory: &Path) -> Bytes {
    match read(directory) {
        Some(Ok(manifest)) => manifest.files.iter().map(|file| Bytes(file.bytes)).sum(),
        Some(Err(_)) | None => Bytes(0),
    }
}

/// The manifest of a folder, if there is one; what is wrong with it.
pub(super) fn read(directory: &Path) -> Option<Result<Manifest, String>> {
    let text = std::fs::read(directory.join(MANIFEST)).ok()?;
    let manifest: Result<Manifest, _> = serde_json::from_slice(&text);
    Some(match manifest {
        Ok(manifest) if manifest.version == 1 => Ok(manifest),
        Ok(manifest) => Err(format!("version {}", manifest.version)),
        Err(error) => Err(error.to_string()),
    })
}

/// Reads every weight file that a container's manifest lists and compares size and checksum. `progress`
/// is told the bytes of each read and stops the check by [`ControlFlow::Break`].
#[must_use]
pub fn checksums(directory: &Path, progress: &mut dyn FnMut(u64) -> ControlFlow<()>) -> Check {
    let manifest = match read(directory) {
        None => return Check::skip_because(CHECK, format!("there is no {MANIFEST}")),
        Some(Err(why)) => {
            let remedy = format!("remove {MANIFEST}, or convert the model again");
            return Check::warn(CHECK, format!("{MANIFEST} cannot be read: {why}"), remedy);
        }
        Some(Ok(manifest)) => manifest,
    };
    let mut faults = Vec::new();
    for listed in &manifest.files {
        match fault(directory, listed, progress) {
            ControlFlow::Continue(None) => {}
            ControlFlow::Continue(Some(fault)) => faults.push(fault),
            ControlFlow::Break(()) => return Check::skip_because(CHECK, "it was interrupted"),
        }
    }
    match faults.first() {
        None => {
            let bytes: Bytes = manifest.files.iter().map(|file| Bytes(file.bytes)).sum();
            let n = manifest.files.len();
            Check::ok(CHECK, format!("{n} files, {bytes}, are those that were written"))
        }
        Some(first) => {
            let finding = match faults.len() {
                1 => first.clone(),
                n => format!("{n} files are not those that were written: {first}"),
            };
            let remedy =
                "convert the model again, or fetch these files again; the others are whole";
            Check::fail(CHECK, finding, remedy).with_details(faults)
        }
    }
}

/// What is wrong with a file, or that the check is to stop.
fn fault(
    directory: &Path,
    listed: &Listed,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> ControlFlow<(), Option<String>> {
    let name = Path::new(&listed.name);
    // A list that was tampered with is not to lead elsewhere.
    if name.components().count() != 1 || name.file_name().is_none() {
        return ControlFlow::Continue(Some(format!("{:?} is no file name", listed.name)));
    }
    let path: PathBuf = directory.join(name);
    let found = match std::fs::metadata(&path) {
        Ok(found) => found.len(),
        Err(error) => return ControlFlow::Continue(Some(format!("{}: {error}", listed.name))),
    };
    if found != listed.bytes {
        let bytes = listed.bytes;
        let fault = format!("{} has {found} bytes, {bytes} were written", listed.name);
        return ControlFlow::Continue(Some(fault));
    }
    let hash = SystemOutput.open(&path).and_then(|file| {
        hash_file(file.as_ref(), listed.bytes, &mut |bytes| progress(bytes).is_continue())
    });
    match hash {
        Ok(None) => ControlFlow::Break(()),
        Ok(Some(hash)) if hash.to_hex().as_str() == listed.blake3 => ControlFlow::Continue(None),
        Ok(Some(_)) => {
            let fault = format!("{} holds other bytes than were written", listed.name);
            ControlFlow::Continue(Some(fault))
        }
        Err(error) => ControlFlow::Continue(Some(format!("{}: {error}", listed.name))),
    }
}

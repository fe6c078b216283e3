//! A folder that holds the whole output of a conversion. Owns how that is told: a kill after the last
//! rename, or the same command twice, finds nothing left to do, and that is no error.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::SystemTime;

use tierkeep_plans::catalogue::Catalogue;

use super::ConvertOptions;
use super::layout::{OutputPlan, ShardPlan};
use super::manifest::{MANIFEST, Manifest, read};
use super::output::{CONFIG, HEADERS, MARKER};

/// Whether a folder holds the whole output of a conversion with these options, of whatever model:
/// config.json has its name, which it gets last, and the files that the manifest lists are there. Their
/// bytes are not read: `doctor --deep` does that.
#[must_use]
pub fn is_finished(out: &Path, options: &ConvertOptions) -> bool {
    whole(out, &options.in_words()).is_some()
}

fn whole(out: &Path, options: &str) -> Option<Manifest> {
    let manifest = read(out)?.ok()?;
    let is_whole = out.join(CONFIG).is_file()
        && manifest.options == options
        && manifest.files.iter().all(|listed| {
            fs::metadata(out.join(&listed.name)).is_ok_and(|found| found.len() == listed.bytes)
        });
    is_whole.then_some(manifest)
}

/// Whether a folder holds the whole output of this very conversion: as [`is_finished`], and the headers of
/// its files are the planned ones, and no file of the source was written to since.
pub(super) fn is_done(
    catalogue: &Catalogue,
    out: &Path,
    options: &ConvertOptions,
    (plan, published): (&OutputPlan, &str),
) -> bool {
    let Some(manifest) = whole(out, &options.in_words()) else { return false };
    let written = modified(&out.join(MANIFEST));
    manifest.source == published
        && manifest.files.len() == plan.shards.len()
        && plan.shards.iter().zip(&manifest.files).all(|(shard, listed)| {
            shard.file_name == listed.name
                && shard.file_bytes() == listed.bytes
                && has_header(out, shard)
        })
        && catalogue.shards.iter().all(|shard| modified(&shard.path) <= written)
}

/// `None`, which is before everything, for what is gone.
fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.modified().ok()
}

fn has_header(out: &Path, shard: &ShardPlan) -> bool {
    let mut found = Vec::new();
    let bytes = shard.header.len() as u64;
    File::open(out.join(&shard.file_name))
        .and_then(|file| file.take(bytes).read_to_end(&mut found))
        .is_ok_and(|_| found == shard.header)
}

/// Removes what a conversion that was killed at its end may have left. What cannot be removed does no harm.
pub(super) fn tidy_up(out: &Path) {
    for name in [HEADERS, MARKER] {
        let _ = fs::remove_file(out.join(name));
    }
}

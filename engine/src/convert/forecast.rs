//! What a conversion would come to, before anything is written: bytes by class, room on the disk, and the
//! catalogue of the output, made of its planned headers.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use tierkeep_plans::catalogue::header::HeaderBytes;
use tierkeep_plans::catalogue::{Catalogue, CatalogueError, Entry, Folder, HeaderError, Source};
use tierkeep_plans::units::Bytes;

use super::layout::OutputPlan;
use super::report::class_bytes;
use super::{ClassReport, ConvertError, ConvertOptions, consume};

/// What a conversion would come to.
#[derive(Debug)]
pub struct Forecast {
    /// Bytes by class; errors are not known before the weights are read.
    pub classes: Vec<ClassReport>,
    /// Source bytes of all weights.
    pub bytes_in: Bytes,
    /// Bytes of all weight files.
    pub bytes_out: Bytes,
    /// Most bytes over what the disk holds now where the source is deleted while it is converted, both
    /// being on one disk.
    pub peak_consuming: Bytes,
    /// Weight files.
    pub n_files: usize,
    /// Source bytes that would be left out because no table knows their names.
    pub unrecognised_bytes: Bytes,
    /// The output as it would be read.
    pub catalogue: Result<Catalogue, CatalogueError>,
}

/// Works out what a conversion would come to.
///
/// # Errors
/// As [`super::planned_bytes`].
pub fn forecast(
    catalogue: &Catalogue,
    out: &Path,
    options: &ConvertOptions,
) -> Result<Forecast, ConvertError> {
    let (plan, _) = super::plan(catalogue, options, Some(out))?;
    let classes = class_bytes(&plan);
    Ok(Forecast {
        bytes_in: classes.iter().map(|class| class.bytes_in).sum(),
        classes,
        bytes_out: plan.file_bytes(),
        peak_consuming: consume::peak_bytes(&plan, catalogue),
        n_files: plan.shards.len(),
        unrecognised_bytes: catalogue.unrecognised_bytes,
        catalogue: Catalogue::open_from(&Planned::new(out, &catalogue.directory, &plan)),
    })
}

/// A container that is not written yet: small files of its source, headers of its plan.
struct Planned {
    out: PathBuf,
    small: Folder,
    index: String,
    headers: BTreeMap<String, (Vec<u8>, u64)>,
}

impl Planned {
    fn new(out: &Path, source: &Path, plan: &OutputPlan) -> Self {
        let header = |shard: &super::layout::ShardPlan| {
            let json = shard.header.get(8..).unwrap_or_default().to_vec();
            (shard.file_name.clone(), (json, shard.file_bytes()))
        };
        Self {
            out: out.to_owned(),
            small: Folder::new(source),
            index: plan.index(),
            headers: plan.shards.iter().map(header).collect(),
        }
    }
}

const INDEX: &str = "model.safetensors.index.json";

impl Source for Planned {
    fn label(&self) -> &Path {
        &self.out
    }

    fn list(&self) -> io::Result<Option<Vec<Entry>>> {
        let mut entries = self.small.list()?.unwrap_or_default();
        entries.retain(|entry| !entry.name.ends_with(".safetensors") && entry.name != INDEX);
        let written = self.headers.iter().map(|(name, (_, bytes))| (name.as_str(), *bytes));
        let written = written.chain([(INDEX, self.index.len() as u64)]);
        entries.extend(written.map(|(name, bytes)| Entry {
            name: name.to_owned(),
            bytes: Some(bytes),
            broken_link: None,
        }));
        Ok(Some(entries))
    }

    fn small_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        if name == INDEX {
            return Ok(Some(self.index.clone().into_bytes()));
        }
        self.small.small_file(name)
    }

    fn file_bytes(&self, name: &str) -> io::Result<Option<u64>> {
        self.small.file_bytes(name)
    }

    fn header(&self, name: &str) -> Result<HeaderBytes, HeaderError> {
        match self.headers.get(name) {
            Some((json, bytes)) => Ok(HeaderBytes { json: json.clone(), file_bytes: *bytes }),
            None => Err(HeaderError::Io(io::ErrorKind::NotFound.into())),
        }
    }

    fn index_is_cheap(&self) -> bool {
        true
    }
}

//! What names a model, for every verb that takes one, and the options of one that is not here yet.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::Args;
use tierkeep_hub::Rate;

/// A model as it is written: a folder, `owner/name` in the hub client's cache, `hf:owner/name`, or a
/// URL. Which of them it is, is looked up later; what exists as a path is a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelArg(OsString);

impl From<OsString> for ModelArg {
    fn from(text: OsString) -> Self {
        Self(text)
    }
}

impl ModelArg {
    /// The text as it was given.
    pub(crate) fn text(&self) -> &OsStr {
        &self.0
    }

    /// The text as a path.
    pub(crate) fn path(&self) -> &Path {
        Path::new(&self.0)
    }
}

/// Of a model that is not downloaded.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct RemoteArgs {
    /// How fast a model that is not here would be downloaded: 100MB/s, 1Gbit/s. Default: as measured
    /// while its headers are fetched.
    #[arg(long, value_name = "RATE")]
    pub(crate) bandwidth: Option<Rate>,
}

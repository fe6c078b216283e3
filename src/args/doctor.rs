//! Arguments of `doctor`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Folder of a model to check as well.
    pub(crate) model: Option<PathBuf>,
    /// Read facts only; measure neither memory nor disk.
    #[arg(long)]
    pub(crate) no_measure: bool,
}

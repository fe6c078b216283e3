//! Arguments of `doctor`.

use std::path::PathBuf;

use clap::Args;

use super::{ModelArg, RemoteArgs};

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// A model to check as well: a folder, OWNER/NAME in the hub client's cache,
    /// hf:OWNER/NAME[@REVISION] or an https URL. Of the last two only config and headers are fetched.
    pub(crate) model: Option<ModelArg>,
    /// Read facts only; measure neither memory nor disk.
    #[arg(long)]
    pub(crate) no_measure: bool,
    /// Read every byte of the model, past the page cache: finds what the disk cannot give back, and
    /// values that no trained weight has.
    #[arg(long, requires = "model")]
    pub(crate) deep: bool,
    /// Write the facts here as TOML, for `tierkeep plan --machine` on any machine.
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) remote: RemoteArgs,
}

//! Arguments of `inspect`.

use clap::Args;

use super::{ModelArg, RemoteArgs};

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A folder, OWNER/NAME in the hub client's cache, hf:OWNER/NAME[@REVISION] or an https URL; of
    /// the last two only config and headers are fetched.
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) remote: RemoteArgs,
}

//! Arguments of `demo`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// The model to show it on. Default: examples/glm-nano, looked for beside the binary.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
}

//! `tierkeep usage show|import|reset MODEL`. Owns whose history is meant and how one that cannot be used
//! is named.

mod import;
mod reset;
mod show;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::usage::{self, FormatError};

use super::{Context, model};
use crate::args::{HistoryArgs, RemoteArgs, UsageArgs, UsageVerb};
use crate::exit::Outcome;

pub(crate) fn run(args: &UsageArgs, context: &Context) -> Result<Outcome> {
    match &args.verb {
        UsageVerb::Show(args) => show::run(args, context),
        UsageVerb::Import(args) => import::run(args, context),
        UsageVerb::Reset(args) => reset::run(args, context),
    }
}

/// The model and the file of its history. Headers are enough, so the model need not be here.
fn history_of(args: &HistoryArgs, context: &Context) -> Result<(Catalogue, PathBuf)> {
    let model = model::open(&args.model, &RemoteArgs::default(), context)?.catalogue;
    let path = args.usage.clone().unwrap_or_else(|| {
        let data_dir = context.data_dir.as_deref();
        usage::default_path(&model.directory, data_dir, &model.fingerprint)
    });
    Ok((model, path))
}

/// A file that is there and is not used.
#[derive(Debug)]
pub(crate) struct Unusable {
    path: PathBuf,
    reason: FormatError,
}

impl Unusable {
    fn new(path: &Path, reason: FormatError) -> Self {
        Self { path: path.to_owned(), reason }
    }
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let remedy = match self.reason {
            FormatError::TooLarge { .. }
            | FormatError::Header
            | FormatError::Length { .. }
            | FormatError::Checksum
            | FormatError::Body(_)
            | FormatError::Inconsistent { .. } => {
                "it is not used; the next plan or run moves it aside, or tierkeep usage reset does now"
            }
            FormatError::Version { .. } => {
                "a newer tierkeep reads it; name another file with --usage FILE, or put it out of the way with tierkeep usage reset"
            }
            FormatError::OtherModel { .. } | FormatError::NotUsage | FormatError::NotAFile => {
                "it was left as it is, name another file with --usage FILE"
            }
            FormatError::Read(_) => "nothing was changed",
        };
        write!(f, "{}: {}; {remedy}", self.path.display(), self.reason)
    }
}

impl std::error::Error for Unusable {}

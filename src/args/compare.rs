//! Arguments of `compare`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{ArgGroup, Args};
use tierkeep_plans::budget::{Numerics, NumericsError};
use tierkeep_plans::units::SizeRequest;

use super::ModelArg;
use super::planning::{Dense, Io, IsaName, Kv};

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("over").args(["text", "ids"]).multiple(true).required(true)))]
pub(crate) struct CompareArgs {
    /// The reference: a folder, or OWNER/NAME in the hub client's cache.
    #[arg(value_name = "A")]
    pub(crate) reference: ModelArg,
    /// What is compared with it: another container of the same model.
    #[arg(value_name = "B")]
    pub(crate) other: ModelArg,
    /// Files of text; - reads standard input. The text is given to the models as it is, without a chat
    /// template. A file named *.json is a list of texts, each a sequence of its own.
    #[arg(long, value_name = "FILE|-", num_args = 1..)]
    pub(crate) text: Vec<Input>,
    /// Files of token ids between commas, blanks or line breaks; - reads standard input. A file named
    /// *.json is a list of ids, or a list of such lists.
    #[arg(long, value_name = "FILE|-", num_args = 1..)]
    pub(crate) ids: Vec<Input>,
    /// Tokens from the start of a window to that of the next, where a text is longer than the
    /// context. Less than the context gives each position more to go by, and takes longer. Default:
    /// the context.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) stride: Option<usize>,
    /// Exit with 1 where fewer positions have the same best token: 90% or 0.9.
    #[arg(long, value_name = "SHARE")]
    pub(crate) min_agreement: Option<Share>,
    /// Exit with 1 where the mean KL is larger, nats.
    #[arg(long, value_name = "NATS")]
    pub(crate) max_kl: Option<Nats>,
    #[command(flatten)]
    pub(crate) planning: PairArgs,
}

/// How both models are planned.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Planning, of both models")]
pub(crate) struct PairArgs {
    /// The budget of both together: 20GB, 20GiB, 512MB or 90% (of what is available). Default: what is
    /// available less the larger of 1 GB and 8 %.
    #[arg(long, value_name = "SIZE")]
    pub(crate) ram: Option<SizeRequest>,
    /// Tokens of a window. Default: the longest text, 4096 or what the models have, whichever is least.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) ctx: Option<u64>,
    /// Threads that compute. Default: the physical cores that this process may use.
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<u64>,
    /// How activations are computed: exact or fast, or A's and B's: exact,fast. Default: exact.
    #[arg(long, value_name = "HOW[,HOW]")]
    pub(crate) numerics: Option<PairNumerics>,
    /// Type of the KV cache and of the indexer's keys. Default: f32, with fast numerics f16.
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv: Option<Kv>,
    /// Most tokens of one prefill batch. Default: chosen from the budget.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) batch: Option<u64>,
    /// How the weights that every token touches live in memory. Default: auto.
    #[arg(long, value_name = "RULE")]
    pub(crate) dense: Option<Dense>,
    /// Instruction set of the kernels. Default: the best of this machine.
    #[arg(long, value_name = "NAME")]
    pub(crate) isa: Option<IsaName>,
    /// How experts are read.
    #[arg(long, value_name = "MODE")]
    pub(crate) io: Option<Io>,
    /// Accept a budget above what the machine has available.
    #[arg(long)]
    pub(crate) allow_overcommit: bool,
}

/// How both sides compute activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairNumerics(pub(crate) [Numerics; 2]);

impl FromStr for PairNumerics {
    type Err = NumericsError;

    fn from_str(text: &str) -> Result<Self, NumericsError> {
        let (first, second) = text.split_once(',').unwrap_or((text, text));
        Ok(Self([first.parse()?, second.parse()?]))
    }
}

/// Where a text or token ids come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// A file.
    File(PathBuf),
    /// Standard input.
    Standard,
}

impl From<std::ffi::OsString> for Input {
    fn from(text: std::ffi::OsString) -> Self {
        if text == OsStr::new("-") { Self::Standard } else { Self::File(PathBuf::from(text)) }
    }
}

impl Input {
    /// The file; `None` for standard input.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Standard => None,
        }
    }

    /// Whether it holds JSON by its name.
    pub(crate) fn is_json(&self) -> bool {
        let extension = |path: &Path| path.extension().is_some_and(|e| e == "json");
        matches!(self, Self::File(path) if extension(path))
    }
}

/// A share, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share(pub(crate) f64);

impl FromStr for Share {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (number, whole) = match text.strip_suffix('%') {
            Some(percent) => (percent.trim_end(), 100.0),
            None => (text, 1.0),
        };
        let share = number.parse().map_or(f64::NAN, |number: f64| number / whole);
        if (0.0..=1.0).contains(&share) {
            return Ok(Self(share));
        }
        anyhow::bail!("write a share such as 90% or 0.9")
    }
}

/// A divergence, 0 or more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Nats(pub(crate) f64);

impl FromStr for Nats {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let nats = text.parse().unwrap_or(f64::NAN);
        if nats >= 0.0 && f64::is_finite(nats) {
            return Ok(Self(nats));
        }
        anyhow::bail!("write nats such as 0.02")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_nats_are_read_as_people_write_them() {
        let share = |text: &str| text.parse::<Share>().ok().map(|s| s.0);
        assert_eq!(["90%", "0.9", "1", "0 %"].map(share), [0.9, 0.9, 1.0, 0.0].map(Some));
        assert_eq!(["90", "-1%", "nan", "", "%"].map(share), [None; 5]);
        let nats = |text: &str| text.parse::<Nats>().ok().map(|n| n.0);
        assert_eq!(["0.02", "0"].map(nats), [Some(0.02), Some(0.0)]);
        assert_eq!(["-0.1", "inf", "nan", "x"].map(nats), [None; 4]);
    }

    #[test]
    fn a_dash_is_standard_input_and_json_goes_by_its_name() {
        let input = |text: &str| Input::from(std::ffi::OsString::from(text));
        assert_eq!(input("-"), Input::Standard);
        assert!(input("a/b.json").is_json() && !input("a.txt").is_json() && !input("-").is_json());
    }
}

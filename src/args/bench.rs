//! Arguments of `bench` and `bench kernels`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tierkeep_engine::bench::products::ProductNumerics;
use tierkeep_plans::units::SizeRequest;

use super::{IsaName, ModelArg, PlanningArgs};

const EXAMPLES: &str = "\
Examples:
  tierkeep bench plan.toml
  tierkeep bench MODEL --ram 8GB --contexts 64,512,4096 --repeat 5
  tierkeep bench MODEL --vary threads=1,2 --vary io=direct,buffered --csv runs.csv
  tierkeep bench before.toml after.toml --json      two plans, interleaved
  tierkeep bench MODEL --sweep ram --over 2GB,3GB,4GB --svg ram.svg
  tierkeep bench MODEL --stream text:novel.txt
  tierkeep bench kernels --types int4-g64-f16 --shapes 2048x1024 --batch 1,8";

const KERNEL_EXAMPLES: &str = "\
Examples:
  tierkeep bench kernels
  tierkeep bench kernels --types int8,int4-g64-f16 --isa avx2,avx512 --threads 1,2
  tierkeep bench kernels --shapes 2048x6144 --batch 1,8,64 --resident --csv kernels.csv";

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true,
    after_help = EXAMPLES
)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: Option<BenchVerb>,
    #[command(flatten)]
    pub(crate) model: BenchModelArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchVerb {
    /// Time single products by stored type, shape, batch, instruction set and threads; no model is read.
    #[command(after_help = KERNEL_EXAMPLES)]
    Kernels(KernelArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BenchModelArgs {
    /// Plan files, or models to plan first: folders, or OWNER/NAME in the hub cache. Several are
    /// interleaved.
    #[arg(value_name = "MODEL|PLAN", required = true)]
    pub(crate) targets: Vec<ModelArg>,
    /// Tokens in the sequence when decoding begins. Default: 128, or what a plan file has room for.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub(crate) contexts: Vec<usize>,
    /// Of these, the last that are timed as prefill; those before them fill the sequence.
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub(crate) prompt: usize,
    /// Tokens that are decoded at each context.
    #[arg(long, value_name = "TOKENS", default_value_t = 32)]
    pub(crate) decode: usize,
    /// Tokens that are decoded after loading and before anything is counted, behind a prompt.
    #[arg(long, value_name = "TOKENS", default_value_t = 4)]
    pub(crate) warm_up: usize,
    /// Rounds; in each, every configuration is measured once, one after another.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) repeat: u32,
    /// Threads to compare: short for --vary threads=N,...; for plan files too.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub(crate) threads_list: Vec<u64>,
    /// Values of a planning option to compare, such as io=direct,buffered; several are combined.
    #[arg(long, value_name = "OPTION=V,...")]
    pub(crate) vary: Vec<Vary>,
    /// Where token ids come from: uniform[:SEED], zipf:SKEW[:SEED], text:FILE, ids:FILE or trace:FILE.
    #[arg(long, value_name = "STREAM", default_value = "uniform")]
    pub(crate) stream: StreamArg,
    /// Draw a curve over values of this, for one model: at one context, or over contexts.
    #[arg(long, value_name = "WHAT")]
    pub(crate) sweep: Option<Sweep>,
    /// The values. Default: five budgets from the least that does to all experts in memory; 1, 2, 4...
    /// threads; contexts of 64, 256, 1024 and 4096.
    #[arg(long, value_name = "V,...", value_delimiter = ',', requires = "sweep")]
    pub(crate) over: Vec<String>,
    /// Where the curve goes, as SVG.
    #[arg(long, value_name = "FILE", requires = "sweep")]
    pub(crate) svg: Option<PathBuf>,
    /// Append a row for each configuration and context to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Neither time this machine before planning nor memory between the measurements.
    #[arg(long)]
    pub(crate) no_measure: bool,
    #[command(flatten)]
    pub(crate) planning: PlanningArgs,
}

#[derive(Debug, Args)]
pub(crate) struct KernelArgs {
    /// Stored types, such as bf16, int8, int4-g64-f16, or all.
    #[arg(
        long,
        value_name = "TYPE,...",
        value_delimiter = ',',
        default_value = "bf16,fp8,int8,int4,int4-g64-f16,int2"
    )]
    pub(crate) types: Vec<String>,
    /// Outputs x inputs.
    #[arg(
        long,
        value_name = "ROWSxCOLS,...",
        value_delimiter = ',',
        default_value = "1024x2048,2048x1024"
    )]
    pub(crate) shapes: Vec<Shape>,
    /// Vectors at once.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8")]
    pub(crate) batch: Vec<usize>,
    /// What activations are: floats (exact) or, against packed integers, 8 bits (fast).
    #[arg(long, value_name = "HOW,...", value_delimiter = ',', default_value = "exact,fast")]
    pub(crate) numerics: Vec<KernelNumerics>,
    /// Instruction sets. Default: the best of this machine.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(crate) isa: Vec<IsaName>,
    /// Threads. Default: the physical cores that this process may use.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub(crate) threads: Vec<usize>,
    /// Bytes of weights that are gone through in a pass: more than the caches hold.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", conflicts_with = "resident")]
    pub(crate) bytes: SizeRequest,
    /// Go through 256 KiB, or one matrix where that is more, so that the caches hold it.
    #[arg(long)]
    pub(crate) resident: bool,
    /// Passes over all products; medians are shown.
    #[arg(long, value_name = "N", default_value_t = 7)]
    pub(crate) repeat: u32,
    /// Append a row for each product to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Do not time memory between the measurements.
    #[arg(long)]
    pub(crate) no_measure: bool,
}

/// What activations are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KernelNumerics {
    Exact,
    Fast,
}

impl From<KernelNumerics> for ProductNumerics {
    fn from(numerics: KernelNumerics) -> Self {
        match numerics {
            KernelNumerics::Exact => Self::Exact,
            KernelNumerics::Fast => Self::Fast,
        }
    }
}

/// What a curve is drawn over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sweep {
    /// Budgets.
    Ram,
    /// Threads.
    Threads,
    /// Tokens in the sequence.
    Context,
}

/// A planning option with values to compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Vary {
    /// Its name, without dashes.
    pub(crate) option: String,
    /// The values, at least one.
    pub(crate) values: Vec<String>,
}

impl FromStr for Vary {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || anyhow::anyhow!("write OPTION=VALUE,VALUE, such as threads=1,2");
        let (option, values) = text.split_once('=').ok_or_else(wrong)?;
        let option = option.trim().trim_start_matches('-').to_owned();
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        if option.is_empty() || values.iter().any(String::is_empty) {
            return Err(wrong());
        }
        Ok(Self { option, values })
    }
}

/// Outputs and inputs of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl FromStr for Shape {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let sizes = text.split_once('x');
        let sizes = sizes.and_then(|(rows, cols)| Some((rows.parse().ok()?, cols.parse().ok()?)));
        match sizes {
            Some((rows, cols)) if rows > 0 && cols > 0 => Ok(Self { rows, cols }),
            _ => anyhow::bail!("write ROWSxCOLS, such as 1024x2048"),
        }
    }
}

/// Where token ids come from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum StreamArg {
    Uniform(u64),
    Zipf(f64, u64),
    Text(PathBuf),
    Ids(PathBuf),
    Trace(PathBuf),
}

impl FromStr for StreamArg {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let kinds = "uniform[:SEED], zipf:SKEW[:SEED], text:FILE, ids:FILE or trace:FILE";
        let wrong = || anyhow::anyhow!("there is no such stream: write {kinds}");
        let (kind, rest) = text.split_once(':').map_or((text, None), |(k, rest)| (k, Some(rest)));
        let file = || rest.filter(|rest| !rest.is_empty()).map(PathBuf::from).ok_or_else(wrong);
        match kind {
            "uniform" => Ok(Self::Uniform(rest.map_or(Ok(0), str::parse).map_err(|_| wrong())?)),
            "zipf" => {
                let rest = rest.ok_or_else(wrong)?;
                let (skew, seed) = rest.split_once(':').unwrap_or((rest, "0"));
                let skew: f64 = skew.parse().map_err(|_| wrong())?;
                if !(0.0..=10.0).contains(&skew) {
                    anyhow::bail!("a skew is a number from 0 to 10, such as zipf:1.0");
                }
                Ok(Self::Zipf(skew, seed.parse().map_err(|_| wrong())?))
            }
            "text" => Ok(Self::Text(file()?)),
            "ids" => Ok(Self::Ids(file()?)),
            "trace" => Ok(Self::Trace(file()?)),
            _ => Err(wrong()),
        }
    }
}

/// Planning options alone, for values that are given in another option.
#[derive(Debug, Parser)]
#[command(name = "--vary", no_binary_name = true, disable_help_flag = true)]
struct Alone {
    #[command(flatten)]
    planning: PlanningArgs,
}

impl PlanningArgs {
    /// These with some options set, each by its name without dashes.
    ///
    /// # Errors
    /// What the parser says of a name or a value.
    pub(crate) fn with(&self, settings: &[(String, String)]) -> Result<Self, clap::Error> {
        let words = settings.iter().map(|(option, value)| format!("--{option}={value}"));
        let mut alone = Alone { planning: self.clone() };
        alone.try_update_from(words)?;
        // What has a default, and a flag, would be set back by not being named.
        alone.planning.allow_overcommit = self.allow_overcommit;
        if !settings.iter().any(|(option, _)| option == "pins") {
            alone.planning.pins = self.pins;
        }
        Ok(alone.planning)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops where something is wrong")]
mod tests {
    use super::*;

    #[test]
    fn options_are_set_and_others_kept() {
        let words = [
            "--ram=2GB",
            "--vram=0",
            "--ctx=64",
            "--sessions=2",
            "--slots=3",
            "--policy=recency",
            "--pins=50%",
            "--dense=mapped",
            "--threads=2",
            "--kv=f16",
            "--batch=8",
            "--isa=scalar",
            "--io=direct",
            "--prefetch=off",
            "--allow-overcommit",
            "--usage=u",
        ];
        let before = Alone::try_parse_from(words).unwrap().planning;
        // A new option with a default of its own fails here until it is kept too.
        let same = before.with(&[]).unwrap();
        assert_eq!(format!("{same:?}"), format!("{before:?}"));
        let settings = [("threads", "7"), ("io", "buffered")];
        let settings = settings.map(|(option, value)| (option.to_owned(), value.to_owned()));
        let after = before.with(&settings).unwrap();
        assert_eq!((after.threads, after.slots, after.pins), (Some(7), Some(3), before.pins));
        let wrong = |option: &str, value: &str| {
            before.with(&[(option.to_owned(), value.to_owned())]).unwrap_err().to_string()
        };
        assert!(wrong("io", "quick").contains("quick"));
        assert!(wrong("colour", "red").contains("--colour"));
    }

    #[test]
    fn what_is_varied_and_streamed_is_read_or_refused() {
        let vary: Vary = "--io=direct,buffered".parse().unwrap();
        assert_eq!((vary.option.as_str(), vary.values.len()), ("io", 2));
        for wrong in ["io", "=1", "io=", "io=a,,b"] {
            assert!(wrong.parse::<Vary>().is_err(), "{wrong}");
        }
        assert_eq!("uniform".parse::<StreamArg>().unwrap(), StreamArg::Uniform(0));
        assert_eq!("uniform:7".parse::<StreamArg>().unwrap(), StreamArg::Uniform(7));
        assert_eq!("zipf:1.5:9".parse::<StreamArg>().unwrap(), StreamArg::Zipf(1.5, 9));
        assert_eq!("ids:a:b".parse::<StreamArg>().unwrap(), StreamArg::Ids("a:b".into()));
        for wrong in ["", "random", "zipf", "zipf:-1", "zipf:nan", "text", "text:", "uniform:x"] {
            assert!(wrong.parse::<StreamArg>().is_err(), "{wrong}");
        }
        assert_eq!("3x4".parse::<Shape>().unwrap(), Shape { rows: 3, cols: 4 });
        assert!("3x".parse::<Shape>().is_err() && "0x4".parse::<Shape>().is_err());
    }
}

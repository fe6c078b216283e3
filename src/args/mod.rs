//! The arguments as they are written, one module for each group of verbs. Parsed into plain
//! structs; nothing is looked up here.
#![allow(rustdoc::broken_intra_doc_links, reason = "help writes what may be left out in brackets")]

mod bench;
mod compare;
mod convert;
mod demo;
mod doctor;
mod inspect;
mod model;
mod plan;
mod planning;
mod run;
mod trial;
mod usage;
mod verify;

use clap::{Parser, Subcommand};

pub(crate) use self::bench::{
    BenchArgs, BenchModelArgs, BenchVerb, KernelArgs, StreamArg, Sweep, Vary,
};
pub(crate) use self::compare::{CompareArgs, Input, PairArgs};
pub(crate) use self::convert::ConvertArgs;
pub(crate) use self::demo::DemoArgs;
pub(crate) use self::doctor::DoctorArgs;
pub(crate) use self::inspect::InspectArgs;
pub(crate) use self::model::{ModelArg, RemoteArgs};
pub(crate) use self::plan::PlanVerbArgs;
pub(crate) use self::planning::{IsaName, PlanningArgs, PrefetchRule};
pub(crate) use self::run::{Ids, RunArgs};
pub(crate) use self::trial::TrialArgs;
pub(crate) use self::usage::{
    HistoryArgs, UsageArgs, UsageImportArgs, UsageResetArgs, UsageShowArgs, UsageVerb,
};
pub(crate) use self::verify::VerifyArgs;

const INSPECT_EXAMPLES: &str = "\
Examples:
  tierkeep inspect examples/glm-nano
  tierkeep inspect hf:allenai/OLMoE-1B-7B-0125 --json";

const PLAN_EXAMPLES: &str = "\
Examples:
  tierkeep plan examples/glm-nano --ram 32MB --ctx 512 -o plan.toml
  tierkeep plan MODEL --ram 20GB --ctx 4096
  tierkeep plan MODEL --ram 90% --json
For another machine, or one that does not exist yet:
  tierkeep plan MODEL --machine server.toml --ram 200GB
  tierkeep plan MODEL --what-if ram=64GB,vram=24GB,disk=7GB/s
With plan files:
  tierkeep plan plan.toml                        show it
  tierkeep plan --check plan.toml                does it still hold?
  tierkeep plan --diff before.toml after.toml    what became of what
  tierkeep plan plan.toml --explain 3:17         layer 3, expert 17
  tierkeep plan MODEL --ram 20GB --explain lm_head.weight";

const CONVERT_EXAMPLES: &str = "\
BITS are 8, 4, 2, 16 or keep, with a group and scales of their own if need be (4-g64-f16, 8-row), then
parts apart: BITS,PART=BITS,... or PART=BITS,... alone.

Examples:
  tierkeep convert MODEL OUT --dry-run
  tierkeep convert MODEL OUT --experts 4 --group 64 --scales f16
  tierkeep convert MODEL OUT --experts gate=4,up=4,down=8 --dense 8,shared.down=16
  tierkeep convert MODEL OUT --experts 4-g32-f16 --dense 8-row --embedding 8,head=16 --mtp keep
  tierkeep convert MODEL OUT --experts 4 --consume    where there is no room for both
A conversion that was stopped goes on when the same command is given again.";

const COMPARE_EXAMPLES: &str = "\
Examples:
  tierkeep compare MODEL OUT --text novel.txt
  tierkeep compare MODEL OUT --text novel.json speech.json --ram 20GB --ctx 1024
  tierkeep compare MODEL OUT --ids tokens.ids --min-agreement 90% --max-kl 0.02 --json
  cat book.txt | tierkeep compare MODEL OUT --text - --ctx 512 --stride 256";

const USAGE_EXAMPLES: &str = "\
Examples:
  tierkeep usage show examples/glm-nano
  tierkeep usage import MODEL counts.txt --dry-run
  tierkeep usage reset MODEL";

/// Runs Mixture-of-Experts models larger than memory, within the memory that you give.
#[derive(Debug, Parser)]
#[command(
    name = "tierkeep",
    version,
    propagate_version = true,
    max_term_width = 100,
    after_help = "Exit codes: 0 fits, works; 1 a verdict (does not fit, damaged, refused, stale, a check failed);\n2 usage, I/O or internal error; 3 works with warnings, under --strict; 130 interrupted.\n\nStart with:  tierkeep demo"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) verb: Verb,
    /// Print JSON on standard output instead of text.
    #[arg(long, global = true, display_order = 900)]
    pub(crate) json: bool,
    /// Exit with 3 where everything works but there are warnings.
    #[arg(long, global = true, display_order = 901)]
    pub(crate) strict: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Look at this machine, and at whether a model is whole.
    #[command(
        after_help = "Examples:\n  tierkeep doctor\n  tierkeep doctor examples/glm-nano\n  tierkeep doctor --no-measure --json"
    )]
    Doctor(DoctorArgs),
    /// Say what a model is made of, from its headers alone.
    #[command(after_help = INSPECT_EXAMPLES)]
    Inspect(InspectArgs),
    /// Plan a model within a memory budget: every byte, every slot, the expected speed.
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanVerbArgs),
    /// Execute a plan, or plan a model and execute that.
    #[command(
        after_help = "Examples:\n  tierkeep run plan.toml -p \"What is 2+2?\"\n  tierkeep run examples/glm-nano --ram 32MB -p \"Count from 3 to 14.\"\n  tierkeep run MODEL --ids 1,2,3 -n 16 --json\n  tierkeep run plan.toml --ids @prompt.ids --report report.json --layers\n  echo \"some text to go on with\" | tierkeep run MODEL --raw -p -"
    )]
    Run(RunArgs),
    /// Measure how fast a model runs, and how close that is to what this machine can give.
    Bench(Box<BenchArgs>),
    /// Compare a model's tokens and logits with the reference's answers beside it.
    #[command(
        after_help = "Examples:\n  tierkeep verify examples/glm-nano\n  tierkeep verify tests/oracles/olmoe --layers\n  tierkeep verify MODEL --ram 2GB --batch 16 --isa scalar --json"
    )]
    Verify(VerifyArgs),
    /// Measure how far one container of a model is from another: agreement, KL, perplexity.
    #[command(after_help = COMPARE_EXAMPLES)]
    Compare(CompareArgs),
    /// Write a model as a packed container: 8-, 4- or 2-bit weights, each expert in one read.
    #[command(after_help = CONVERT_EXAMPLES)]
    Convert(ConvertArgs),
    /// What is remembered of a model's use: show it, import counts, reset it.
    #[command(after_help = USAGE_EXAMPLES)]
    Usage(UsageArgs),
    /// Show the whole motion on the small model in examples/: doctor, plan, run, learn, run.
    #[command(after_help = "Example:\n  tierkeep demo")]
    Demo(DemoArgs),
    /// Execute instructions of the given sets; `doctor` runs this in a child process.
    #[command(hide = true)]
    TryInstructions(TrialArgs),
    /// Time reading of memory; `bench` runs this in a child process.
    #[command(hide = true)]
    MeasureMemory,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops where something is wrong")]
mod tests {
    use clap::CommandFactory;

    use super::Cli;
    use crate::render::testing::snapshot;

    #[test]
    fn arguments_do_not_contradict_each_other() {
        Cli::command().debug_assert();
    }

    /// What `--help` says, of every verb that it shows.
    #[test]
    fn help() {
        let names = |command: &clap::Command| -> Vec<String> {
            let shown = command.get_subcommands().filter(|verb| !verb.is_hide_set());
            shown.map(|verb| verb.get_name().to_owned()).filter(|name| name != "help").collect()
        };
        let mut verbs = vec!["tierkeep".to_owned()];
        for verb in names(&Cli::command()) {
            let below = Cli::command().find_subcommand(&verb).map(&names).unwrap_or_default();
            verbs.push(verb.clone());
            verbs.extend(below.into_iter().map(|below| format!("{verb}-{below}")));
        }
        for verb in verbs {
            snapshot(&format!("help-{verb}"), |style| {
                let mut cli = Cli::command().term_width(usize::from(style.width));
                // Names and settings of the whole reach the verbs when the whole is built.
                cli.build();
                let mut command = &mut cli;
                for name in verb.split('-').filter(|&name| name != "tierkeep") {
                    command = command.find_subcommand_mut(name).unwrap();
                }
                let help = command.render_long_help();
                let text = if style.colour { help.ansi().to_string() } else { help.to_string() };
                text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
            });
        }
    }
}

//! The binary: arguments in, exit code out. The only place that reads the environment, installs
//! the interrupt handler and exits.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod exit;
mod render;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use clap::Parser;

use crate::commands::Context;

fn main() -> ExitCode {
    render::set_error_style(render::Style::of_errors(is_plain()));
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return ExitCode::from(exit::usage(&error, asks_for_json())),
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    let n_heeding = Arc::new(AtomicUsize::new(0));
    let (flag, heeding) = (Arc::clone(&interrupted), Arc::clone(&n_heeding));
    // Work that does not look at the flag has nothing to save, and a second interrupt does not wait
    // for anything to be saved.
    let installed = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::SeqCst) || heeding.load(Ordering::SeqCst) == 0 {
            render::note("interrupted");
            std::process::exit(i32::from(exit::INTERRUPTED));
        }
    });
    refuse_large_writes();
    let context = Context {
        json: cli.json,
        style: style(),
        interrupted: Arc::clone(&interrupted),
        n_heeding,
        data_dir: data_dir(),
        hub: tierkeep_hub::Settings::from_env(|name| std::env::var_os(name)),
        program: std::env::current_exe().ok(),
        work_dir: std::env::current_dir().ok(),
    };
    if let Err(error) = installed {
        render::note(&format!("interrupts will not save the usage history: {error}"));
    }
    let result = commands::run(&cli.verb, &context);
    let code = exit::code(result, cli.strict, cli.json);
    // One that came as the work that looks for it had just ended is an interrupt all the same.
    let was_interrupted = interrupted.load(Ordering::SeqCst);
    ExitCode::from(if was_interrupted { exit::INTERRUPTED } else { code })
}

/// Makes a write past a limit on file sizes (`ulimit -f`) an error of that write. By default a signal
/// ends the program, which leaves a temporary file and no word of why.
#[cfg(unix)]
fn refuse_large_writes() {
    let signal = signal_hook::consts::SIGXFSZ;
    // Where no handler can be installed it is as it was.
    let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
}

#[cfg(not(unix))]
fn refuse_large_writes() {}

/// Whether `--json` is among arguments that could not be read.
fn asks_for_json() -> bool {
    std::env::args_os().any(|argument| argument == "--json")
}

/// How text is set: `COLUMNS` where there is no terminal to ask, and no colour under `NO_COLOR`.
fn style() -> render::Style {
    let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    // Some terminals export 0 for "not known".
    let columns = columns.filter(|&columns| columns > 0);
    render::Style::of_output(columns, is_plain())
}

/// Whether the user wants no colour.
fn is_plain() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
}

/// The user's data folder, by the XDG convention; on Windows and macOS their own.
fn data_dir() -> Option<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if cfg!(windows) {
        return var("LOCALAPPDATA");
    }
    if cfg!(target_os = "macos") {
        return var("HOME").map(|home| home.join("Library/Application Support"));
    }
    // The convention has a relative path ignored: it would be another folder wherever we are called.
    let given = var("XDG_DATA_HOME").filter(|folder| folder.is_absolute());
    given.or_else(|| var("HOME").map(|home| home.join(".local/share")))
}

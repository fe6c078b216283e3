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
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;

use crate::commands::Context;

fn main() -> ExitCode {
    render::set_error_style(render::Style::of_errors(is_plain()));
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return ExitCode::from(exit::usage(&error, asks_for_json())),
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    let handler = Arc::clone(&interrupted);
    // A second interrupt does not wait for anything to be saved.
    let installed = ctrlc::set_handler(move || {
        if handler.swap(true, Ordering::SeqCst) {
            std::process::exit(i32::from(exit::INTERRUPTED));
        }
    });
    let context = Context {
        json: cli.json,
        style: style(),
        interrupted,
        data_dir: data_dir(),
        hub: tierkeep_hub::Settings::from_env(|name| std::env::var_os(name)),
        program: std::env::current_exe().ok(),
        work_dir: std::env::current_dir().ok(),
    };
    if let Err(error) = installed {
        render::note(&format!("interrupts will not save the usage history: {error}"));
    }
    let result = commands::run(&cli.verb, &context);
    ExitCode::from(exit::code(result, cli.strict, cli.json))
}

/// Whether `--json` is among arguments that could not be read.
fn asks_for_json() -> bool {
    std::env::args_os().any(|argument| argument == "--json")
}

/// How text is set: `COLUMNS` where there is no terminal to ask, and no colour under `NO_COLOR`.
fn style() -> render::Style {
    let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
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
    var("XDG_DATA_HOME").or_else(|| var("HOME").map(|home| home.join(".local/share")))
}

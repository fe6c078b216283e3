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
    let cli = args::Cli::parse();
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
        interrupted,
        data_dir: data_dir(),
        program: std::env::current_exe().ok(),
        work_dir: std::env::current_dir().ok(),
    };
    if let Err(error) = installed {
        render::note(&format!("interrupts will not save the usage history: {error}"));
    }
    let result = commands::run(&cli.verb, &context);
    ExitCode::from(exit::code(result, cli.strict))
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

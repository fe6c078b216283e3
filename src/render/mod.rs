//! Everything that is printed. Data go to standard output, everything else to standard error;
//! nothing here computes what it shows.
//!
//! What has a layout is a pure function from data and a [`Style`] to text, which
//! [`data`] prints: so snapshot tests see what a person sees.

mod answer;
mod bar;
mod bench;
mod compared;
mod conversion;
mod conversion_cost;
mod demo;
mod doctor;
mod download;
mod explanation;
mod facts;
mod inspection;
mod ledger;
mod model_comparison;
mod plan;
mod profile;
#[cfg(test)]
mod result_tests;
mod run;
mod style;
mod table;
#[cfg(test)]
pub(crate) mod testing;
mod usage;
#[cfg(test)]
mod usage_tests;
mod verification;
#[cfg(test)]
mod view_tests;

use std::io::{self, Write};
use std::sync::OnceLock;

use anyhow::Result;
use serde::Serialize;

pub(crate) use answer::Answer;
pub(crate) use bar::Bar;
pub(crate) use bench::{
    BENCH_CSV_HEADER, Bandwidth, BenchRow, BenchView, CurveView, KERNELS_CSV_HEADER, KernelView,
    bench, bench_csv, bench_json, kernels, kernels_csv, kernels_json, progress_of_bench,
};
pub(crate) use compared::{differences, staleness};
pub(crate) use conversion::{DryRun, PlanAfter, conversion, was_finished};
pub(crate) use conversion_cost::Cost;
pub(crate) use demo::{demo_close, demo_machine, demo_prompt, demo_run, demo_title};
pub(crate) use doctor::DoctorReport;
pub(crate) use download::{
    date, download, download_json, download_size, download_time, with_download,
};
pub(crate) use explanation::explanation;
pub(crate) use inspection::inspection;
pub(crate) use model_comparison::{ComparedView, LimitsView, ModelView, compared_json, comparison};
pub(crate) use plan::{
    Misfit, PlanView, does_not_fit, does_not_fit_json, plan, plan_in_brief, plan_json,
};
pub(crate) use run::{keep_the_plan, progress_of_tokens, run_json, run_report};
pub(crate) use style::Style;
use style::Tone;
pub(crate) use usage::{HistoryView, history, history_layer, imported, no_history, reset};
pub(crate) use verification::{Verified, verification};

/// Prints data.
pub(crate) fn data(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Prints JSON.
pub(crate) fn json<T: Serialize>(value: &T) -> Result<()> {
    data(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// Prints what to do next.
pub(crate) fn next(text: &str) -> Result<()> {
    data(&format!("{text}\n"))
}

/// How text is set on standard error. It is said once, by `main`: warnings come from everywhere.
static ERROR_STYLE: OnceLock<Style> = OnceLock::new();

/// Says how text is set on standard error from now on; only the first call counts.
pub(crate) fn set_error_style(style: Style) {
    let _ = ERROR_STYLE.set(style);
}

/// How text is set on standard error.
pub(crate) fn error_style() -> Style {
    // Nobody asked: the environment is not read here, so no colour.
    *ERROR_STYLE.get_or_init(|| Style::of_errors(true))
}

/// Prints something that is not data. A standard error that is gone is nobody's concern.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints a warning.
pub(crate) fn warning(text: &str) {
    note(warning_text(text, error_style()).trim_end());
}

/// A warning as it is printed.
fn warning_text(text: &str, style: Style) -> String {
    style.toned_paragraph(Tone::Warn, "warning: ", text)
}

/// Prints an error with its causes; under `--json` as an object on standard output too, which
/// `kind` names for programs, with the command that would do instead where there is one.
pub(crate) fn error(error: &anyhow::Error, kind: Option<&str>, command: Option<&str>) {
    let message = harmless(&causes(error));
    note(error_text(&message, error_style()).trim_end());
    if let Some(kind) = kind {
        let mut value = error_json(kind, &message);
        if let Some(command) = command {
            value["error"]["command"] = command.into();
        }
        // Who does not read standard output has the message from standard error.
        let _ = json(&value);
    }
}

/// An error as it is printed.
fn error_text(message: &str, style: Style) -> String {
    style.toned_paragraph(Tone::Fail, "error: ", message)
}

/// A text without characters that steer a terminal: names in it may be from files of others.
fn harmless(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}

/// An error as programs read it.
pub(crate) fn error_json(kind: &str, message: &str) -> serde_json::Value {
    serde_json::json!({
        "schema_version": 1,
        "error": { "kind": kind, "message": message },
    })
}

/// Prints what the arguments' parser says: an error, the help or the version.
pub(crate) fn usage(error: &clap::Error) {
    let _ = error.print();
}

/// The same as text, without the word that begins it.
pub(crate) fn usage_text(error: &clap::Error) -> String {
    let text = error.render().to_string();
    text.trim_start_matches("error: ").trim_end().to_owned()
}

/// An error and its causes on one line; a cause that its error repeats is left out.
fn causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// A share as users read it.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A speed with as many digits as it deserves.
pub(crate) fn speed(tokens_per_s: f64) -> String {
    match tokens_per_s {
        slow if slow < 1.0 => format!("{slow:.3}"),
        slow if slow < 10.0 => format!("{slow:.2}"),
        fast => format!("{fast:.1}"),
    }
}

/// A number with its thousands apart.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// How many of something, `1 file` or `2 files`.
pub(crate) fn plural(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// How many files.
pub(crate) fn files(number: usize) -> String {
    plural(number as u64, "file", "files")
}

/// A time with as many digits as it deserves.
pub(crate) fn seconds(seconds: f64) -> String {
    if seconds < 1e-3 {
        format!("{:.0} us", seconds * 1e6)
    } else if seconds < 1.0 {
        format!("{:.1} ms", seconds * 1e3)
    } else {
        format!("{seconds:.2} s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart() {
        let shown: Vec<String> = [0, 999, 1000, 19_456, 384_100_000_000].map(count).into();
        assert_eq!(shown, ["0", "999", "1,000", "19,456", "384,100,000,000"]);
    }

    #[test]
    fn an_error_says_each_cause_once_and_steers_no_terminal() {
        let error = anyhow::anyhow!("it is short").context("m: it is short: fetch it again");
        assert_eq!(causes(&error), "m: it is short: fetch it again");
        let error = anyhow::anyhow!("because").context("it failed");
        assert_eq!(causes(&error), "it failed: because");
        assert_eq!(harmless("a\u{1b}[31m\0b\nc"), "a\u{fffd}[31m\u{fffd}b\nc");
    }

    #[test]
    fn times_have_the_unit_that_reads_best() {
        let shown: Vec<String> = [40e-6, 0.0125, 2.5].map(seconds).into();
        assert_eq!(shown, ["40 us", "12.5 ms", "2.50 s"]);
    }
}

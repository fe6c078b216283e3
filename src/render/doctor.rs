//! What the doctor found: facts by group, each with its source, and checks with what to do.

use std::path::Path;

use serde_json::{Value, json};
use tierkeep_doctor::Facts;
use tierkeep_plans::checks::{Check, Status};

use super::style::Tone;
use super::{Style, download, download_json, facts};
use crate::commands::model::DownloadAnswer;

/// Version of the JSON.
const SCHEMA_VERSION: u32 = 2;
/// Columns of a check's status and of its id.
const STATUS_WIDTH: usize = 4;
/// See [`STATUS_WIDTH`]: the longest id that is shown on the line of its finding.
const ID_WIDTH: usize = 24;
/// Details of one check that are shown; JSON has them all.
const DETAILS_SHOWN: usize = 10;

/// Everything that a run of `doctor` found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DoctorReport<'a> {
    /// The model as it was asked for.
    pub(crate) model: Option<&'a Path>,
    /// The machine.
    pub(crate) facts: &'a Facts,
    /// Checks, in the order in which they are shown.
    pub(crate) checks: &'a [Check],
    /// Of a model that is not here: what a download would be.
    pub(crate) download: Option<&'a DownloadAnswer>,
}

impl DoctorReport<'_> {
    /// For programs; docs/doctor.md describes it.
    pub(crate) fn json(&self) -> Value {
        let mut json = json!({
            "schema_version": SCHEMA_VERSION,
            // What is no text is shown as near to it as can be, as on a terminal.
            "model": self.model.map(|model| model.to_string_lossy()),
            "summary": {
                "ok": self.count(Status::Ok),
                "warn": self.count(Status::Warn),
                "fail": self.count(Status::Fail),
                "skip": self.count(Status::Skip),
            },
            "facts": self.facts,
            "checks": self.checks,
        });
        if let (Some(download), Some(json)) = (self.download, json.as_object_mut()) {
            json.insert("download".to_owned(), download_json(download));
        }
        json
    }

    /// For people.
    pub(crate) fn text(&self, style: Style) -> String {
        let mut text = facts::facts_text(self.facts, style);
        for (title, prefix) in
            [("checks of the machine", "machine."), ("checks of the model", "model.")]
        {
            let of_group: Vec<&Check> =
                self.checks.iter().filter(|check| check.id.starts_with(prefix)).collect();
            if of_group.is_empty() {
                continue;
            }
            text.push('\n');
            text.push_str(&style.heading(title));
            for check in of_group {
                text.push_str(&check_text(check, style));
            }
        }
        text.push('\n');
        if let Some(answer) = self.download {
            text.push_str(&download(answer, style));
            text.push('\n');
        }
        text.push_str(&self.close(style));
        text
    }

    fn count(&self, status: Status) -> usize {
        self.checks.iter().filter(|check| check.status == status).count()
    }

    /// How many checks came out how, and what to do next.
    fn close(&self, style: Style) -> String {
        let counted = |status: Status| {
            let n = self.count(status);
            let (word, tone) = status_word(status);
            let tone = if n == 0 { Tone::Plain } else { tone };
            style.paint(tone, &format!("{n} {word}"))
        };
        let statuses = [Status::Ok, Status::Warn, Status::Fail, Status::Skip].map(counted);
        let mut text = format!("{}\n", statuses.join(", "));
        match self.model {
            None => text.push_str("next: tierkeep doctor MODEL\n"),
            Some(model) if self.count(Status::Fail) == 0 => {
                text.push_str(&format!("next: tierkeep plan {}\n", model.display()));
            }
            Some(_) => {}
        }
        text
    }
}

/// The word for a status, and its tone.
fn status_word(status: Status) -> (&'static str, Tone) {
    match status {
        Status::Ok => ("ok", Tone::Ok),
        Status::Warn => ("warn", Tone::Warn),
        Status::Fail => ("FAIL", Tone::Fail),
        Status::Skip => ("skip", Tone::Plain),
    }
}

/// One check: status, id and finding, and under the finding its details and its remedy.
fn check_text(check: &Check, style: Style) -> String {
    let (word, tone) = status_word(check.status);
    let label = format!("  {word:<STATUS_WIDTH$}  {:<ID_WIDTH$}  ", check.id);
    let indent = " ".repeat(label.chars().count());
    // The label is measured without colour, so that is put on afterwards: its word comes first.
    let mut text =
        style.paragraph(&label, &check.finding).replacen(word, &style.paint(tone, word), 1);
    for detail in check.details.iter().take(DETAILS_SHOWN) {
        text.push_str(&style.paragraph(&format!("{indent}- "), detail));
    }
    if let Some(more) = check.details.len().checked_sub(DETAILS_SHOWN).filter(|more| *more > 0) {
        let line = format!("and {more} more, which --json lists");
        text.push_str(&style.paragraph(&format!("{indent}- "), &line));
    }
    if !check.remedy.is_empty() {
        text.push_str(&style.paragraph(&format!("{indent}-> "), &check.remedy));
    }
    text
}

//! What a conversion wrote, or would write.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tierkeep_engine::Unsupported;
use tierkeep_engine::convert::{ClassReport, ConvertReport, Forecast};
use tierkeep_plans::plan::Plan;
use tierkeep_plans::units::Bytes;

use super::download::duration;
use super::{Cost, Style, count, files, plan_in_brief, table};

/// Bytes and error by class.
pub(crate) fn conversion(
    (out, report, cost): (&Path, &ConvertReport, Option<&Cost>),
    elapsed: Duration,
    style: Style,
) -> String {
    if report.was_finished {
        return was_finished(out);
    }
    let mut rows = table::table(
        style,
        &["class", "weights", "in", "out", "mean row error", "worst row error"],
    );
    for class in &report.classes {
        let error = |e: Option<f64>| e.map_or_else(|| "-".to_owned(), super::percent);
        rows.add_row([
            class.class.to_string(),
            count(class.n_weights as u64),
            class.bytes_in.to_string(),
            class.bytes_out.to_string(),
            error(class.mean_relative_error),
            error(class.worst_relative_error),
        ]);
    }
    for column in 1..=5 {
        table::right(&mut rows, column);
    }
    let out = out.display();
    let mut wrote = format!(
        "{} written to {out} in {}, {} of it padding; read {}",
        report.bytes_out,
        files(report.files.len()),
        report.padding_bytes,
        report.bytes_in,
    );
    match report.files_of_earlier {
        0 => {
            let per_s = report.bytes_in.as_f64() / elapsed.as_secs_f64().max(1e-9);
            wrote += &format!(
                " in {}, {:.2} GB/s of source (measured)",
                duration(elapsed.as_secs_f64()),
                per_s / 1e9
            );
        }
        n => wrote += &format!("; {} were finished by an earlier try", files(n)),
    }
    if !report.consumed.is_empty() {
        wrote += &format!("; {} of the source are deleted", files(report.consumed.len()));
    }
    let cost = cost.map_or_else(String::new, |cost| style.paragraph("cost: ", &cost.text()));
    let next = format!("next: tierkeep doctor {out}\n");
    format!("{}\n{}{cost}{next}", table::text(&rows), style.paragraph("", &wrote))
}

/// What is said where nothing is left to do.
pub(crate) fn was_finished(out: &Path) -> String {
    let out = out.display();
    format!(
        "{out} holds this conversion already, finished; nothing was read or written\n\
         next: tierkeep doctor {out} --deep\n"
    )
}

/// How the output would run on this machine.
#[derive(Debug)]
pub(crate) enum PlanAfter {
    /// With the planner's defaults.
    Fits {
        /// The plan.
        plan: Box<Plan>,
        /// What reads of this disk were measured at, bytes/s.
        read: Option<f64>,
    },
    /// The planner's refusal.
    Refused {
        /// Why.
        why: String,
        /// What reads of this disk were measured at, bytes/s.
        read: Option<f64>,
    },
    /// The headers that would be written could not be read.
    Unreadable(String),
}

/// What a conversion would come to.
#[derive(Debug)]
pub(crate) struct DryRun<'a> {
    /// Where to.
    pub(crate) out: &'a Path,
    /// Its bytes.
    pub(crate) forecast: &'a Forecast,
    /// What it costs in quality.
    pub(crate) cost: Option<Cost>,
    /// Free bytes of the disk.
    pub(crate) free: Option<Bytes>,
    /// Whether the source goes while it is converted.
    pub(crate) consumes: bool,
    /// The plan that would follow.
    pub(crate) after: &'a PlanAfter,
    /// What this build's engine lacks for the output.
    pub(crate) lacking: Option<Unsupported>,
}

impl DryRun<'_> {
    fn needed(&self) -> Bytes {
        if self.consumes { self.forecast.peak_consuming } else { self.forecast.bytes_out }
    }

    /// Seconds by reads and writes at the measured speed of reads.
    fn seconds(&self) -> Option<f64> {
        let read = match self.after {
            PlanAfter::Fits { read, .. } | PlanAfter::Refused { read, .. } => (*read)?,
            PlanAfter::Unreadable(_) => return None,
        };
        let written = self.forecast.bytes_out.as_f64();
        let read_back = if self.consumes { written } else { 0.0 };
        Some((self.forecast.bytes_in.as_f64() + written + read_back) / read)
    }

    /// As people read it.
    pub(crate) fn text(&self, style: Style) -> String {
        let mut rows = table::table(style, &["class", "weights", "in", "out"]);
        let class = |class: &ClassReport| {
            [
                class.class.to_string(),
                count(class.n_weights as u64),
                class.bytes_in.to_string(),
                class.bytes_out.to_string(),
            ]
        };
        for of_class in &self.forecast.classes {
            rows.add_row(class(of_class));
        }
        for column in 1..=3 {
            table::right(&mut rows, column);
        }
        let out = self.out.display();
        let would = format!(
            "{} would be written to {out} in {}, from {} read",
            self.forecast.bytes_out,
            files(self.forecast.n_files),
            self.forecast.bytes_in
        );
        let free = match self.free {
            Some(free) if free < self.needed() => format!("{free} are free: too few"),
            Some(free) => format!("{free} are free"),
            None => "how much is free is unknown".to_owned(),
        };
        let peak = format!(
            "{} more on the disk, at most {} with --consume where the source is on the same disk; {free}",
            self.forecast.bytes_out, self.forecast.peak_consuming
        );
        let time = self.seconds().map_or_else(
            || "unknown: the disk was not measured".to_owned(),
            |time| {
                format!(
                    "about {} (estimated from reads as measured here; writes are assumed to be as fast, and \
                     the cores to keep up)",
                    duration(time)
                )
            },
        );
        let mut text = format!("{}\n{}", table::text(&rows), style.paragraph("", &would));
        text += &style.paragraph("disk: ", &peak);
        text += &style.paragraph("time: ", &time);
        if let Some(cost) = &self.cost {
            text += &style.paragraph("cost: ", &cost.text());
        }
        if self.forecast.unrecognised_bytes > Bytes(0) {
            let left = format!("{} that no table knows", self.forecast.unrecognised_bytes);
            text += &style.paragraph("left out: ", &left);
        }
        if let Some(lacking) = &self.lacking {
            text += &style.paragraph("not run by this build: ", &lacking.to_string());
        }
        text + &match self.after {
            PlanAfter::Fits { plan, .. } => plan_in_brief(plan, style),
            PlanAfter::Refused { why, .. } => style.paragraph("planned: ", why),
            PlanAfter::Unreadable(why) => style.paragraph("not planned: ", why),
        }
    }

    /// As programs read it.
    pub(crate) fn json(&self) -> Value {
        let forecast = self.forecast;
        let (plan, why) = match self.after {
            PlanAfter::Fits { plan, .. } => (
                json!({
                    "budget_bytes": plan.request.budget_bytes,
                    "ledger_bytes": plan.ledger.total(),
                    "decode_tokens_per_s": plan.prediction.decode_tokens_per_s,
                    "hit_rate": plan.prediction.hit_rate,
                }),
                None,
            ),
            PlanAfter::Refused { why, .. } | PlanAfter::Unreadable(why) => {
                (Value::Null, Some(why.clone()))
            }
        };
        json!({
            "schema_version": 2,
            "planned_bytes": forecast.bytes_out,
            "read_bytes": forecast.bytes_in,
            "files": forecast.n_files,
            "classes": forecast.classes,
            "peak_bytes_consuming": forecast.peak_consuming,
            "needed_bytes": self.needed(),
            "free_bytes": self.free,
            "estimated_seconds": self.seconds(),
            "quality": Cost::json(self.cost.as_ref()),
            "plan": plan,
            "not_planned_because": why,
            "not_run_because": self.lacking.as_ref().map(ToString::to_string),
        })
    }
}

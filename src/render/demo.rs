//! The demo's narration: a pure function for each of its parts.

use std::path::Path;

use tierkeep_doctor::Facts;
use tierkeep_plans::catalogue::{Catalogue, StopTokens};
use tierkeep_plans::checks::{self, Status};
use tierkeep_plans::units::Bytes;

use super::style::Tone;
use super::{Style, percent, plural, speed, table};
use crate::commands::demo::DemoRun;

/// Columns of a check's id.
const ID_WIDTH: usize = 18;

/// Checks that the demo shows.
const IN_BRIEF: [&str; 6] = [
    "machine.memory",
    "machine.disk",
    "machine.disk_speed",
    "model.family",
    "model.shards",
    "model.types",
];

/// A step's title.
pub(crate) fn demo_title(title: &str, style: Style) -> String {
    format!("\n{}\n", style.heading(&format!("== {title}")))
}

/// The doctor in brief.
pub(crate) fn demo_machine(facts: &Facts, model: &Catalogue, style: Style) -> String {
    let mut text = demo_title("1. doctor, in brief (tierkeep doctor MODEL has all of it)", style);
    let cpu = facts.cpu.model_name.value().map_or("unknown CPU", String::as_str);
    let threads = facts.cpu.usable_threads.value();
    let threads = threads.map_or_else(
        || "how many threads are usable is unknown".to_owned(),
        |&n| plural(n, "usable thread", "usable threads"),
    );
    let label = |id: &str| format!("{id:ID_WIDTH$}  ");
    text += &style.paragraph(&label("machine.cpu"), &format!("{cpu}, {threads}"));
    let all = checks::machine_checks(facts).into_iter().chain(checks::whole_model_checks(
        model,
        &StopTokens::default(),
        None,
    ));
    for check in all.filter(|check| IN_BRIEF.contains(&check.id)) {
        let (mark, tone) = match check.status {
            Status::Ok => ("", Tone::Ok),
            Status::Warn => ("warning: ", Tone::Warn),
            Status::Fail => ("FAILED: ", Tone::Fail),
            Status::Skip => ("skipped: ", Tone::Plain),
        };
        let line = style.paragraph(&label(check.id), &format!("{mark}{}", check.finding));
        let word = mark.trim_end();
        text +=
            &if word.is_empty() { line } else { line.replacen(word, &style.paint(tone, word), 1) };
    }
    text
}

/// A prompt, before its answer.
pub(crate) fn demo_prompt(prompt: &str, is_prose: bool) -> String {
    // Prose goes on where its beginning ends.
    if is_prose { format!("> {prompt}|") } else { format!("> {prompt}\n  ") }
}

/// What a run came to.
pub(crate) fn demo_run(run: &DemoRun, style: Style) -> String {
    let line = format!(
        "{} at {}; hit rate {} (expected {}), {} of it from pins; {} read",
        plural(run.tokens as u64, "token", "tokens"),
        run.tokens_per_s
            .map_or_else(|| "a speed unknown".to_owned(), |s| format!("{} tokens/s", speed(s))),
        hit(run),
        percent(run.expected_hit_rate),
        percent(run.pinned_share),
        Bytes(run.read_bytes),
    );
    format!("\n{}", style.paragraph("", &line))
}

fn hit(run: &DemoRun) -> String {
    run.hit_rate.map_or_else(|| "-".to_owned(), percent)
}

/// All hit rates as they are, and where to go next.
pub(crate) fn demo_close(
    (first, second, without): (&DemoRun, &DemoRun, &DemoRun),
    (judgement, same_answers): (&str, bool),
    model: &Path,
    style: Style,
) -> String {
    let mut text = demo_title("5. what pins did", style);
    text += &style.paragraph("the planner's judgement  ", judgement);
    if second.pins_evidence != judgement {
        text += &style.paragraph("the second run used      ", &second.pins_evidence);
    }
    text.push('\n');
    let mut rows = table::table(style, &["", "hit rate", "read"]);
    let mut row = |what: &str, run: &DemoRun| {
        rows.add_row([what.to_owned(), hit(run), Bytes(run.read_bytes).to_string()]);
    };
    row("first run, no pins", first);
    let pins = plural(second.pins as u64, "pin", "pins");
    row(&format!("second run, other prompts, {pins}"), second);
    row("second run's prompts again, no pins", without);
    table::right(&mut rows, 1);
    table::right(&mut rows, 2);
    text += &table::text(&rows);
    let same = if same_answers {
        style.paint(Tone::Ok, "the same, token for token")
    } else {
        style.paint(Tone::Fail, "DIFFERENT")
    };
    text += &format!("\nanswers with and without pins: {same}\n");
    text += &demo_title("where to go next", style);
    let model = model.display();
    text + &format!(
        "tierkeep doctor {model}\n\
         tierkeep plan {model} --ram 30MB --ctx 512 -o plan.toml\n\
         tierkeep run plan.toml -p \"What is 7+8?\"\n\
         tierkeep verify {model}\n\
         tierkeep --help\n"
    )
}

//! The demo's narration.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;
use tierkeep_doctor::Facts;
use tierkeep_plans::catalogue::{Catalogue, StopTokens};
use tierkeep_plans::checks::{self, Check, Status};
use tierkeep_plans::units::Bytes;

use super::{data, percent, speed};
use crate::commands::demo::DemoRun;

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
pub(crate) fn demo_heading(title: &str) -> Result<()> {
    data(&format!("\n== {title}\n\n"))
}

/// The doctor in brief.
pub(crate) fn demo_machine(facts: &Facts, model: &Catalogue) -> Result<()> {
    demo_heading("1. doctor, in brief (tierkeep doctor MODEL has all of it)")?;
    let cpu = facts.cpu.model_name.value().map_or("unknown CPU", String::as_str);
    let threads = facts.cpu.usable_threads.value().map_or("?".to_owned(), u64::to_string);
    let mut text = format!("machine.cpu      {cpu}, {threads} usable threads\n");
    let brief = |text: &mut String, check: &Check| {
        let mark = match check.status {
            Status::Ok => "",
            Status::Warn => "warning: ",
            Status::Fail => "FAILED: ",
            Status::Skip => "skipped: ",
        };
        let _ = writeln!(text, "{:16} {mark}{}", check.id, check.finding);
    };
    let all = checks::machine_checks(facts).into_iter().chain(checks::whole_model_checks(
        model,
        &StopTokens::default(),
        None,
    ));
    for check in all.filter(|check| IN_BRIEF.contains(&check.id)) {
        brief(&mut text, &check);
    }
    data(&text)
}

/// A prompt, before its answer.
pub(crate) fn demo_prompt(prompt: &str, is_prose: bool) -> Result<()> {
    // Prose goes on where its beginning ends.
    data(&if is_prose { format!("> {prompt}|") } else { format!("> {prompt}\n  ") })
}

/// What a run came to.
pub(crate) fn demo_run(run: &DemoRun) -> Result<()> {
    data(&format!(
        "\n{} tokens at {} tokens/s; hit rate {} (expected {}), {} of it from pins; {} read\n",
        run.tokens,
        run.tokens_per_s.map_or_else(|| "-".to_owned(), speed),
        hit(run),
        percent(run.expected_hit_rate),
        percent(run.pinned_share),
        Bytes(run.read_bytes),
    ))
}

fn hit(run: &DemoRun) -> String {
    run.hit_rate.map_or_else(|| "-".to_owned(), percent)
}

/// All hit rates as they are, and where to go next.
pub(crate) fn demo_close(
    (first, second, without): (&DemoRun, &DemoRun, &DemoRun),
    (judgement, same_answers): (&str, bool),
    model: &Path,
) -> Result<()> {
    demo_heading("5. what pins did")?;
    let mut text = format!("the planner's judgement    {judgement}\n");
    if second.pins_evidence != judgement {
        let _ = writeln!(text, "the second run used        {}", second.pins_evidence);
    }
    text.push('\n');
    let mut row = |what: &str, run: &DemoRun| {
        let _ = writeln!(
            text,
            "{what:48} hit rate {:>7}, {:>9} read",
            hit(run),
            Bytes(run.read_bytes).to_string()
        );
    };
    row("first run, no pins", first);
    row(&format!("second run, other prompts, {} pins", second.pins), second);
    row("second run's prompts again, no pins", without);
    let _ = writeln!(
        text,
        "answers with and without pins: {}",
        if same_answers { "the same, token for token" } else { "DIFFERENT" }
    );
    data(&text)?;
    demo_heading("where to go next")?;
    let model = model.display();
    data(&format!(
        "tierkeep doctor {model}\n\
         tierkeep plan {model} --ram 30MB --ctx 512 -o plan.toml\n\
         tierkeep run plan.toml -p \"What is 7+8?\"\n\
         tierkeep verify {model}\n\
         tierkeep --help\n"
    ))
}

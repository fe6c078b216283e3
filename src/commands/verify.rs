//! `tierkeep verify MODEL`.

use anyhow::Result;
use tierkeep_engine::verify::{read_oracle, verify_case};
use tierkeep_plans::plan::Plan;

use super::{Context, model, shared};
use crate::args::VerifyArgs;
use crate::exit::Outcome;
use crate::render::{self, Bar};

pub(crate) fn run(args: &VerifyArgs, context: &Context) -> Result<Outcome> {
    let directory = model::folder_for(&args.model, "verify", context)?;
    let model = shared::open_model(context, &directory)?;
    let oracle = read_oracle(&model.directory)?;
    let facts = shared::facts(context, Some(&model), Some(&model.directory), false);
    let mut options = shared::options(&args.planning);
    let longest = oracle.iter().map(|c| c.prompt.len() + c.greedy.len()).max().unwrap_or(1);
    options.context = Some(options.context.unwrap_or(longest as u64));
    let usage = shared::usage(context, &model, args.planning.usage.as_deref());
    let mut plan = match shared::plan(&model, &facts, &options, usage.as_ref()) {
        Ok(plan) => plan,
        Err(error) => return shared::verdict(context, args.model.path(), error),
    };
    if let Some(cap) = args.cap {
        lower_caps(&mut plan, cap);
        plan.settle(&model);
    }
    let mut engine = shared::load(&plan, &model)?;
    let bar = Bar::count("verifying");
    let mut reports = Vec::with_capacity(oracle.len());
    for (at, case) in oracle.iter().enumerate() {
        bar.set(at as u64, oracle.len() as u64);
        reports.push(verify_case(&mut engine, case, args.layers)?);
    }
    drop(bar);
    let holds = reports.iter().all(tierkeep_engine::verify::CaseReport::holds);
    if context.json {
        render::json(&serde_json::json!({
            "schema_version": 1, "holds": holds, "numerics": plan.engine.numerics,
            "cases": reports,
        }))?;
    } else {
        let verified = render::Verified {
            model: args.model.path(),
            threads: plan.engine.threads,
            isa: &plan.engine.isa,
            oracle: &oracle,
            reports: &reports,
            holds,
        };
        render::data(&render::verification(&verified, context.style))?;
    }
    Ok(if holds { Outcome::Fine } else { Outcome::Verdict })
}

/// Holds every layer to at most `cap` slots; pins beyond them are given up.
fn lower_caps(plan: &mut Plan, cap: u32) {
    let slots = &mut plan.placement.slots;
    for (slots_of_layer, pins) in slots.caps.iter_mut().zip(&mut slots.pins) {
        *slots_of_layer = cap.min(*slots_of_layer);
        pins.truncate(*slots_of_layer as usize);
    }
}

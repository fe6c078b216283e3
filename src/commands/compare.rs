//! `tierkeep compare A B`. `texts` owns what they are compared over.

mod texts;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::Result;
use tierkeep_engine::EngineError;
use tierkeep_engine::compare::{self, CompareError, Compared, Sequence, Side, Windows};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options, PairRefusal};

use self::texts::Group;
use super::{Context, model, shared};
use crate::args::{CompareArgs, IsaName, ModelArg, PairArgs};
use crate::exit::Outcome;
use crate::render::{self, Bar, ComparedView, LimitsView, ModelView};

/// Longest window where none is asked for, tokens: what other verbs plan with.
const DEFAULT_CONTEXT: u64 = 4096;

pub(crate) fn run(args: &CompareArgs, context: &Context) -> Result<Outcome> {
    let a = open(&args.reference, context)?;
    let b = open(&args.other, context)?;
    let unlike = compare::differences(&a.spec, &b.spec);
    if !unlike.is_empty() {
        return Err(CompareError::NotOneModel(unlike).into());
    }
    tierkeep_engine::supports(&a)?;
    tierkeep_engine::supports(&b)?;
    let groups = texts::read(args, [&a, &b])?;
    check(&groups, &a)?;
    let facts = shared::facts(context, Some(&a), Some(&a.directory), false);
    let longest = groups.iter().flat_map(Group::lengths).max().unwrap_or(1);
    let options = options(&args.planning, longest, [&a, &b]);
    let of_other = Options { numerics: args.planning.numerics.map(|n| n.0[1]), ..options.clone() };
    let vocab_size = a.spec.vocab_size;
    let planned = planner::budget(&facts, &options).map_err(PairRefusal::from).and_then(|budget| {
        let kept = compare::kept_positions(vocab_size, budget.0).min(longest);
        let held = compare::kept_bytes(vocab_size, kept);
        Ok((kept, planner::plan_pair([&a, &b], &facts, [&options, &of_other], held)?))
    });
    let (kept, plans) = match planned {
        Ok(planned) => planned,
        Err(PairRefusal::Plan(error)) => {
            let model = args.reference.path();
            return shared::verdict(context, model, error.into());
        }
        Err(error) => return Err(error.into()),
    };
    let length = usize::try_from(plans[0].request.context).unwrap_or(usize::MAX);
    let windows = Windows { context: length, stride: args.stride.unwrap_or(length) };
    let compared = execute([(&plans[0], &a), (&plans[1], &b)], &groups, windows, kept, context)?;
    let limits = LimitsView::of(
        &compared,
        args.min_agreement.map(|share| share.0),
        args.max_kl.map(|nats| nats.0),
    );
    let view = ComparedView {
        models: [view(&args.reference, &a, &plans[0]), view(&args.other, &b, &plans[1])],
        names: groups.iter().map(|group| group.name.as_str()).collect(),
        texts: groups.iter().map(|group| group.sequences.len()).collect(),
        windows,
        compared: &compared,
        limits,
        spell: &|token| groups.iter().find_map(|group| group.spell(token)),
    };
    if context.json {
        render::json(&render::compared_json(&view))?;
    } else {
        render::data(&render::comparison(&view, context.style))?;
    }
    Ok(if compared.interrupted {
        Outcome::Interrupted
    } else if view.limits.holds() {
        Outcome::Fine
    } else {
        Outcome::Verdict
    })
}

fn open(argument: &ModelArg, context: &Context) -> Result<Catalogue> {
    let directory = model::folder_for(argument, "compare", context)?;
    shared::open_model(context, &directory)
}

fn view<'a>(argument: &'a ModelArg, model: &'a Catalogue, plan: &Plan) -> ModelView<'a> {
    ModelView { path: argument.path(), model, budget: plan.request.budget_bytes }
}

/// Refuses tokens that the model does not have, and texts without any.
fn check(groups: &[Group], model: &Catalogue) -> Result<()> {
    let vocab_size = model.spec.vocab_size;
    let mut tokens = groups.iter().flat_map(|group| group.sequences.iter().flatten()).peekable();
    if tokens.peek().is_none() {
        return Err(CompareError::Empty.into());
    }
    match tokens.find(|&&id| id as usize >= vocab_size) {
        Some(&token) => Err(EngineError::UnknownToken { token, vocab_size }.into()),
        None => Ok(()),
    }
}

fn options(args: &PairArgs, longest: usize, models: [&Catalogue; 2]) -> Options {
    let most = models.map(|model| model.spec.max_context as u64);
    let usual = DEFAULT_CONTEXT.min(longest as u64).min(most[0]).min(most[1]).max(1);
    Options {
        ram: args.ram,
        dense: args.dense.map(Into::into).unwrap_or_default(),
        context: Some(args.ctx.unwrap_or(usual)),
        threads: args.threads,
        numerics: args.numerics.map(|numerics| numerics.0[0]),
        kv: args.kv.map(Into::into),
        prefill_batch: args.batch,
        isa: args.isa.map(IsaName::name),
        io: args.io.map(Into::into),
        allow_overcommit: args.allow_overcommit,
        engine: tierkeep_engine::ABILITIES,
        ..Options::default()
    }
}

/// Loads both and goes through the texts.
fn execute(
    models: [(&Plan, &Catalogue); 2],
    groups: &[Group],
    windows: Windows,
    kept: usize,
    context: &Context,
) -> Result<Compared> {
    let [(plan_a, a), (plan_b, b)] = models;
    let mut first = shared::load(plan_a, a)?;
    let mut second = shared::load(plan_b, b)?;
    let sequences: Vec<Sequence<'_>> = groups
        .iter()
        .enumerate()
        .flat_map(|(group, texts)| {
            texts.sequences.iter().map(move |tokens| Sequence { group, tokens })
        })
        .collect();
    let _heeding = context.heeding();
    let bar = Bar::count("comparing");
    let n_layers = a.spec.n_layers;
    let engines = [&mut first, &mut second];
    let compared = compare::compare(engines, &sequences, windows, kept, &mut |at| {
        let side = match at.side {
            Side::A => "A",
            Side::B => "B",
        };
        bar.message(&format!("comparing, {side} layer {} of {n_layers}", at.layer + 1));
        bar.set(at.done, at.total);
        if context.interrupted.load(Ordering::SeqCst) {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    });
    compared.map_err(|error| named(error, groups, [&a.directory, &b.directory]))
}

/// An error with the names that the engine does not know.
fn named(error: CompareError, groups: &[Group], folders: [&Path; 2]) -> anyhow::Error {
    let side = match &error {
        CompareError::Engine { side, .. } | CompareError::NotFinite { side, .. } => *side,
        CompareError::NotOneModel(_) | CompareError::Stride { .. } | CompareError::Empty => {
            return error.into();
        }
    };
    let folder = match side {
        Side::A => folders[0],
        Side::B => folders[1],
    };
    let place = match &error {
        CompareError::NotFinite { place, .. } => groups.get(place.group),
        _ => None,
    };
    let over = place.map_or_else(String::new, |group| format!(", over {}", group.name));
    anyhow::Error::from(error).context(format!("{}{over}", folder.display()))
}

//! What a run is given to go on with: text through the tokenizer or token ids, and whether the plan has
//! room for it. All of it is known before anything is loaded.

use std::path::Path;

use anyhow::{Result, bail};
use tierkeep_engine::EngineError;
use tierkeep_engine::text::Text;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::again::{self, Options};

use super::PlanAgain;
use crate::args::{Ids, RunArgs};
use crate::commands::{input, shared};

/// The tokenizer; with token ids it is only for showing text and may be absent.
pub(super) fn text(args: &RunArgs, model: &Catalogue) -> Result<Option<Text>> {
    match Text::open(&model.directory) {
        Ok(text) => Ok(Some(text)),
        Err(_) if args.ids.is_some() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The prompt's tokens.
pub(super) fn tokens(args: &RunArgs, text: Option<&Text>) -> Result<Vec<u32>> {
    if let Some(ids) = &args.ids {
        return token_ids(ids);
    }
    let given = args.prompt.as_deref().unwrap_or_default();
    let from_input = if given == "-" { Some(read(None)?) } else { None };
    let given = from_input.as_deref().unwrap_or(given);
    let Some(text) = text else { bail!("there is no tokenizer: give token ids with --ids") };
    shared::encode(text, given, args.system.as_deref(), args.raw)
}

fn token_ids(ids: &Ids) -> Result<Vec<u32>> {
    let (text, name) = match ids {
        Ids::List(ids) => return Ok(ids.clone()),
        Ids::File(path) => (read(Some(path))?, input::name(Some(path))),
        Ids::Input => (read(None)?, input::name(None)),
    };
    input::token_ids(&text, &name)
}

fn read(path: Option<&Path>) -> Result<String> {
    input::contents(path, ", which no context holds")
}

/// Refuses a prompt that the plan or the model cannot take.
pub(super) fn check(
    prompt: &[u32],
    max_tokens: usize,
    (plan, model): (&Plan, &Catalogue),
    plan_file: &Path,
) -> Result<()> {
    let spec = &model.spec;
    if prompt.is_empty() {
        return Err(EngineError::Empty.into());
    }
    let vocab_size = spec.vocab_size;
    if let Some(&token) = prompt.iter().find(|&&id| id as usize >= vocab_size) {
        return Err(EngineError::UnknownToken { token, vocab_size }.into());
    }
    let (wanted, most) = (prompt.len(), spec.max_context);
    let context = usize::try_from(plan.request.context).unwrap_or(usize::MAX);
    if wanted > most {
        bail!("the prompt has {wanted} tokens, and the model's context is {most}: shorten it");
    }
    if wanted > context {
        let enough = wanted.saturating_add(max_tokens).min(most);
        let options = Options { context: Some(enough as u64), ..again::options_of(plan) };
        let command = again::command(&model.directory, &options, plan_file);
        return Err(PlanAgain::new(EngineError::ContextFull { wanted, context }, command).into());
    }
    Ok(())
}

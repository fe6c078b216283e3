//! What a run is given to go on with: text through the tokenizer or token ids, and whether the plan has
//! room for it. All of it is known before anything is loaded.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use tierkeep_engine::EngineError;
use tierkeep_engine::text::Text;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::again::{self, Options};

use super::PlanAgain;
use crate::args::{Ids, RunArgs};
use crate::commands::shared;

/// Longest text of a prompt that is read from a file or from standard input, bytes: no context holds
/// more.
const MAX_TEXT_BYTES: u64 = 64 << 20;

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
        Ids::File(path) => (read(Some(path))?, path.display().to_string()),
        Ids::Input => (read(None)?, "standard input".to_owned()),
    };
    let words = text.split([',', ' ', '\t', '\r', '\n']).filter(|word| !word.is_empty());
    words
        .enumerate()
        .map(|(at, word)| {
            word.parse().with_context(|| {
                let word: String = word.chars().take(40).collect();
                format!("{name}: {word:?}, the token id number {}, is no number", at + 1)
            })
        })
        .collect()
}

/// All of a file, or of standard input.
fn read(path: Option<&Path>) -> Result<String> {
    let mut text = String::new();
    let name = path.map_or("standard input".to_owned(), |path| path.display().to_string());
    let cap = MAX_TEXT_BYTES + 1;
    let n = match path {
        Some(path) => File::open(path).and_then(|file| file.take(cap).read_to_string(&mut text)),
        None => std::io::stdin().take(cap).read_to_string(&mut text),
    };
    let n = n.with_context(|| name.clone())?;
    if n as u64 > MAX_TEXT_BYTES {
        bail!("{name} is longer than {MAX_TEXT_BYTES} bytes, which no context holds");
    }
    Ok(text)
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

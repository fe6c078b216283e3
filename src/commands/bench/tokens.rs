//! The token ids that are run, the same ones for every configuration.

use std::path::Path;

use anyhow::{Context as _, Result};
use tierkeep_engine::EngineError;
use tierkeep_engine::bench::stream::{Stream, trace_tokens};
use tierkeep_engine::text::Text;

use super::settings::Configuration;
use crate::args::StreamArg;
use crate::commands::input;

/// What is said of a file whose tokens would not be held.
const TOO_LONG: &str = ": measure on a part of it";

/// The stream that was asked for.
pub(super) fn stream(argument: &StreamArg, configurations: &[Configuration]) -> Result<Stream> {
    let ids = match argument {
        StreamArg::Uniform(seed) => return Ok(Stream::Uniform { seed: *seed }),
        StreamArg::Zipf(skew, seed) => return Ok(Stream::Zipf { skew: *skew, seed: *seed }),
        StreamArg::Text(path) => {
            let text = contents(path)?;
            let first = configurations.first().context("nothing is to be measured")?;
            Text::open(&first.model.directory)?.encode_raw(&text)?
        }
        StreamArg::Ids(path) => input::token_ids(&contents(path)?, &input::name(Some(path)))?,
        StreamArg::Trace(path) => trace_tokens(&contents(path)?)
            .with_context(|| format!("--stream trace:{}", path.display()))?,
    };
    if ids.is_empty() {
        return Err(EngineError::Empty).context("--stream has no token");
    }
    let vocab_size = vocab_size(configurations);
    if let Some(&token) = ids.iter().find(|&&id| id as usize >= vocab_size) {
        return Err(EngineError::UnknownToken { token, vocab_size }.into());
    }
    Ok(Stream::Given { ids })
}

/// Ids that every model has.
pub(super) fn vocab_size(configurations: &[Configuration]) -> usize {
    configurations.iter().map(|c| c.model.spec.vocab_size).min().unwrap_or(1)
}

fn contents(path: &Path) -> Result<String> {
    input::contents(Some(path), TOO_LONG)
}

//! Whether a model's text side works: the tokenizer is loaded and used, the chat template is rendered.
//! That a file is there says little; `{}` is a file too.

use tierkeep_plans::checks::Check;

use super::{Message, Text, TextError};

/// What the tokenizer is tried on: words, figures, code, accents, another script, a line's end.
const SAMPLE: &str = "Hello, world! 3.14 { x += 1 }\nNaïve café, 你好.";
/// What the chat template is tried on.
const MESSAGE: &str = "Hello";
/// Stop tokens that are named.
const NAMED_CAP: usize = 6;

/// What the checks need of the model itself.
#[derive(Clone, Copy, Debug)]
pub struct ModelTokens<'a> {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Tokens that end generation.
    pub stop_tokens: &'a [u32],
}

/// Checks `model.tokenizer`, `model.chat_template` and `model.vocabulary` of what [`Text::open`] gave;
/// the last only where the model's own figures are known.
#[must_use]
pub fn checks(text: &Result<Text, TextError>, model: Option<ModelTokens<'_>>) -> Vec<Check> {
    match text {
        Err(error) => {
            let (id, other) = match error {
                // The tokenizer itself was loaded before the files beside it were looked at.
                TextError::Config { .. }
                | TextError::NoChatTemplate { .. }
                | TextError::Template { .. } => ("model.chat_template", "model.tokenizer"),
                TextError::NoTokenizer { .. }
                | TextError::Tokenizer { .. }
                | TextError::Convert { .. } => ("model.tokenizer", "model.chat_template"),
            };
            let why = format!("{id} comes first");
            vec![
                Check::warn(id, finding(error), remedy(error)),
                Check::skip_because(other, &why),
                Check::skip_because("model.vocabulary", &why),
            ]
        }
        Ok(text) => {
            let vocabulary = match model {
                Some(model) => vocabulary(text, model),
                None => Check::skip_because("model.vocabulary", "config.json comes first"),
            };
            vec![tokenizer(text), chat_template(text), vocabulary]
        }
    }
}

/// The message without its remedy, which has a line of its own here.
fn finding(error: &TextError) -> String {
    let message = error.to_string();
    [": give token ids", ": fetch it again", ": give raw text"]
        .iter()
        .find_map(|remedy| message.find(remedy))
        .and_then(|at| message.get(..at))
        .unwrap_or(&message)
        .to_owned()
}

fn remedy(error: &TextError) -> &'static str {
    match error {
        TextError::NoTokenizer { .. } => "fetch tokenizer.json, or give token ids with --ids",
        TextError::Tokenizer { .. } | TextError::Config { .. } | TextError::Convert { .. } => {
            "fetch it again, or give token ids with --ids"
        }
        TextError::NoChatTemplate { .. } | TextError::Template { .. } => {
            "give prompts as they are with --raw"
        }
    }
}

fn tokenizer(text: &Text) -> Check {
    let id = "model.tokenizer";
    let again = "fetch tokenizer.json again, or give token ids with --ids";
    match text.encode_raw(SAMPLE) {
        Err(error) => Check::warn(id, finding(&error), again),
        Ok(tokens) if tokens.is_empty() => {
            Check::warn(id, "tokenizer.json loads and turns text into no tokens at all", again)
        }
        Ok(tokens) => {
            let back = match text.decode(&tokens) {
                Ok(back) if back == SAMPLE => "and back without loss",
                Ok(_) => "and back with changes, as some tokenizers do",
                Err(error) => return Check::warn(id, finding(&error), again),
            };
            let n_bytes = SAMPLE.len();
            Check::ok(
                id,
                format!(
                    "{} tokens known; a sample of {n_bytes} bytes becomes {} tokens {back}",
                    text.vocab_size(),
                    tokens.len()
                ),
            )
        }
    }
}

fn chat_template(text: &Text) -> Check {
    let id = "model.chat_template";
    if !text.has_chat_template() {
        return Check::warn(
            id,
            "there is none, neither chat_template.jinja nor in tokenizer_config.json",
            "fetch it if the model has one; without it, prompts are given as they are",
        );
    }
    let rendered = text.render_chat(&[Message::user(MESSAGE)]);
    match rendered {
        Err(error) => Check::warn(id, finding(&error), remedy(&error)),
        Ok(rendered) if !rendered.contains(MESSAGE) => Check::warn(
            id,
            "it renders a conversation without what was said in it",
            "fetch it again, or give prompts as they are with --raw",
        ),
        Ok(rendered) => match text.encode_raw(&rendered) {
            Err(error) => Check::warn(id, finding(&error), remedy(&error)),
            Ok(tokens) => Check::ok(
                id,
                format!("renders; a message of one word becomes {} tokens", tokens.len()),
            ),
        },
    }
}

/// Whether the ids that the tokenizer makes have a row of the embedding, and what the stop tokens are
/// called.
fn vocabulary(text: &Text, model: ModelTokens<'_>) -> Check {
    let id = "model.vocabulary";
    let rows = model.vocab_size;
    let highest = text.highest_token();
    if let Some(highest) = highest.filter(|&token| token as usize >= rows) {
        return Check::fail(
            id,
            format!("the tokenizer makes ids up to {highest}, the embedding has {rows} rows"),
            "fetch tokenizer.json and the weights from one place again",
        );
    }
    let named: Vec<String> = model
        .stop_tokens
        .iter()
        .take(NAMED_CAP)
        .map(|&stop| match text.token(stop) {
            Some(name) => format!("{stop} is {name}"),
            None => format!("{stop} is no token of the tokenizer"),
        })
        .collect();
    let ids = highest.map_or_else(|| "no ids".to_owned(), |highest| format!("ids up to {highest}"));
    let named = if named.is_empty() { String::new() } else { format!("; {}", named.join(", ")) };
    if model.stop_tokens.iter().any(|&stop| text.token(stop).is_none()) {
        return Check::warn(
            id,
            format!("{ids} for {rows} rows of the embedding{named}"),
            "fetch tokenizer.json, config.json and generation_config.json from one place again",
        );
    }
    Check::ok(id, format!("{ids} for {rows} rows of the embedding{named}"))
}

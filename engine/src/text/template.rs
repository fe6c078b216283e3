//! The chat template: Jinja as the Hugging Face client runs it. Owns where a template is found and
//! what it may call; tokens are `Text`'s.
//!
//! `strftime_now` is left undefined where a template asks whether it is defined: such a template can do
//! without the date and then writes a fixed one, so that the same conversation gives the same tokens every
//! day. A template that takes it for granted (gpt-oss) gets the date.

use std::collections::BTreeMap;
use std::io::{ErrorKind as IoErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::Value as Json;
use tierkeep_plans::catalogue::open_file;

use super::date::formatted;
use super::to_json::to_json;
use super::{Message, TextError};

const CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";
/// Variables that templates are given where the config sets them.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The date and time in a format of `strftime`.
const DATE_FUNCTION: &str = "strftime_now";

/// A template and the variables that it is given.
pub(super) struct ChatTemplate {
    path: PathBuf,
    source: String,
    special_tokens: BTreeMap<&'static str, String>,
}

impl ChatTemplate {
    /// Finds the template of a model; a file of its own wins over the config's.
    pub(super) fn open(directory: &Path) -> Result<Option<Self>, TextError> {
        let config_path = directory.join(CONFIG);
        let config: Json = match read(&config_path)? {
            Some(text) => serde_json::from_str(&text).map_err(|e| TextError::Config {
                path: config_path.clone(),
                reason: e.to_string(),
            })?,
            None => Json::Null,
        };
        let template_path = directory.join(TEMPLATE);
        let found = match read(&template_path)? {
            Some(source) => Some((template_path, source)),
            None => template_of(&config).map(|source| (config_path, source)),
        };
        let special_tokens = SPECIAL_TOKENS
            .into_iter()
            .filter_map(|name| Some((name, token(config.get(name)?)?)))
            .collect();
        Ok(found.map(|(path, source)| Self {
            path,
            source: without_training_marks(&source),
            special_tokens,
        }))
    }

    /// The text of a conversation whose next turn is the model's.
    pub(super) fn render(&self, messages: &[Message]) -> Result<String, TextError> {
        let mut variables: BTreeMap<&str, Value> = self
            .special_tokens
            .iter()
            .map(|(name, token)| (*name, Value::from(token.as_str())))
            .collect();
        variables.insert("messages", Value::from_serialize(messages));
        variables.insert("add_generation_prompt", Value::from(true));
        // The client always sets these, so templates may test them against none without asking
        // whether they are defined.
        variables.insert("tools", Value::from(()));
        variables.insert("documents", Value::from(()));
        let mut environment = environment();
        if !asks_for(&self.source, DATE_FUNCTION) {
            let now = SystemTime::now();
            environment.add_function(DATE_FUNCTION, move |format: String| formatted(&format, now));
        }
        environment
            .template_from_named_str("chat_template", &self.source)
            .and_then(|template| template.render(&variables))
            .map_err(|error| TextError::Template {
                path: self.path.clone(),
                line: error.line().unwrap_or(0),
                reason: reason(&error),
            })
    }
}

/// Jinja as `transformers` sets it up for chat templates.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", to_json);
    environment
}

/// Whether a template tests if it is given `name`, as in `name is defined`.
fn asks_for(source: &str, name: &str) -> bool {
    source.match_indices(name).any(|(at, _)| {
        let mut words = source[at + name.len()..].split_whitespace();
        words.next() == Some("is")
    })
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// What is wrong, with the cause that templates' own exceptions carry.
fn reason(error: &Error) -> String {
    match error.detail() {
        Some(detail) if error.kind() == ErrorKind::InvalidOperation => detail.to_owned(),
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

fn read(path: &Path) -> Result<Option<String>, TextError> {
    let mut text = String::new();
    match open_file(path).and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => Ok(Some(text)),
        Err(e) if e.kind() == IoErrorKind::NotFound => Ok(None),
        Err(e) => Err(TextError::Config { path: path.to_owned(), reason: e.to_string() }),
    }
}

/// `chat_template`: a string, or a list of `{name, template}` of which `default` is taken.
fn template_of(config: &Json) -> Option<String> {
    let field = config.get("chat_template")?;
    let template = match field {
        Json::Array(list) => list
            .iter()
            .find(|entry| entry.get("name").and_then(Json::as_str) == Some("default"))?
            .get("template")?,
        other => other,
    };
    template.as_str().map(str::to_owned)
}

/// A special token: a string, or an object with its `content`.
fn token(value: &Json) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

/// `{% generation %}` marks what is trained on and renders its body; here it is a block that is
/// always taken. Lines stay where they are.
fn without_training_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let body = &tag[..end];
        let name = body.trim_matches(['-', '+']).trim();
        let replacement = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&body.replacen(name, replacement, 1));
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_for_a_name_is_told_from_its_use() {
        for (source, expect) in [
            ("{% if strftime_now is defined %}", true),
            ("{% if strftime_now\n is not defined %}", true),
            ("{{ strftime_now('%Y') }} is a year", false),
            ("{{ strftime_now", false),
            ("", false),
        ] {
            assert_eq!(asks_for(source, DATE_FUNCTION), expect, "{source}");
        }
    }

    #[test]
    fn training_marks_become_blocks_that_are_always_taken() {
        for (source, expect) in [
            ("a{% generation %}b{% endgeneration %}c", "a{% if true %}b{% endif %}c"),
            ("{%- generation -%}\nx{%- endgeneration -%}", "{%- if true -%}\nx{%- endif -%}"),
            ("{% if generation %}y{% endif %}", "{% if generation %}y{% endif %}"),
            ("{% generation", "{% generation"),
            ("plain", "plain"),
        ] {
            assert_eq!(without_training_marks(source), expect);
        }
    }
}

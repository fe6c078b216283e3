//! What two models are compared over: files of text through the tokenizers, files of token ids. All of
//! it is read before anything is loaded.

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use tierkeep_engine::compare::{CompareError, Difference};
use tierkeep_engine::text::Text;
use tierkeep_plans::catalogue::Catalogue;

use crate::args::{CompareArgs, Input};
use crate::commands::input;

/// What is said of a file whose tokens would not be held.
const TOO_LONG: &str = ": compare over a part of it";

/// A file with its sequences.
pub(super) struct Group {
    /// What it is called.
    pub(super) name: String,
    /// Tokens of each text in it.
    pub(super) sequences: Vec<Vec<u32>>,
    /// Spells tokens, where there is a tokenizer.
    tokenizer: Option<std::rc::Rc<Text>>,
}

impl Group {
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> {
        self.sequences.iter().map(Vec::len)
    }

    /// A token as text, if there is a tokenizer that knows it.
    pub(super) fn spell(&self, token: u32) -> Option<String> {
        let text = self.tokenizer.as_ref()?;
        text.decode(&[token])
            .ok()
            .filter(|spelled| !spelled.is_empty())
            .or_else(|| text.token(token))
    }
}

/// A JSON file of token ids.
#[derive(Deserialize)]
#[serde(untagged)]
enum IdLists {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

/// Every file that was named, texts first.
pub(super) fn read(args: &CompareArgs, models: [&Catalogue; 2]) -> Result<Vec<Group>> {
    let inputs = args.text.iter().chain(&args.ids);
    if inputs.filter(|input| **input == Input::Standard).count() > 1 {
        bail!("standard input can be read once: name it once");
    }
    let tokenizers = if args.text.is_empty() { None } else { Some(Tokenizers::open(models)?) };
    let mut groups = Vec::new();
    for given in &args.text {
        let Some(tokenizers) = &tokenizers else { break };
        let (name, text) = (input::name(given.path()), input::contents(given.path(), TOO_LONG)?);
        let texts: Vec<String> = if given.is_json() {
            serde_json::from_str(&text).with_context(|| {
                format!("{name}: a .json file given with --text must be a list of strings")
            })?
        } else {
            vec![text]
        };
        let sequences: Vec<Vec<u32>> =
            texts.iter().map(|text| tokenizers.encode(text, &name)).collect::<Result<_>>()?;
        groups.push(Group { name, sequences, tokenizer: Some(tokenizers.a.clone()) });
    }
    // Only to spell tokens: ids need none.
    let spelling = match &tokenizers {
        Some(tokenizers) => Some(tokenizers.a.clone()),
        None => Text::open(&models[0].directory).ok().map(std::rc::Rc::new),
    };
    for given in &args.ids {
        let (name, text) = (input::name(given.path()), input::contents(given.path(), TOO_LONG)?);
        let sequences = if given.is_json() {
            id_lists(&text, &name)?
        } else {
            vec![input::token_ids(&text, &name)?]
        };
        groups.push(Group { name, sequences, tokenizer: spelling.clone() });
    }
    Ok(groups)
}

/// The tokenizers of both models; the second may have none.
struct Tokenizers {
    a: std::rc::Rc<Text>,
    b: Option<Text>,
}

impl Tokenizers {
    fn open(models: [&Catalogue; 2]) -> Result<Self> {
        let a = Text::open(&models[0].directory)?;
        // A container without a tokenizer is one model with A; a broken one is a fault.
        let b = match Text::open(&models[1].directory) {
            Ok(text) => Some(text),
            Err(tierkeep_engine::text::TextError::NoTokenizer { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        if let Some((id, a, b)) = b.as_ref().and_then(|b| a.first_unlike(b)) {
            let spelled = |token: Option<String>| {
                token.map_or_else(|| "absent".to_owned(), |token| format!("{token:?}"))
            };
            let what = format!("tokenizer: token {id}");
            let unlike = Difference { what, a: spelled(a), b: spelled(b) };
            return Err(CompareError::NotOneModel(vec![unlike]).into());
        }
        Ok(Self { a: std::rc::Rc::new(a), b })
    }

    fn encode(&self, text: &str, name: &str) -> Result<Vec<u32>> {
        let tokens = self.a.encode_raw(text)?;
        if let Some(b) = &self.b {
            let others = b.encode_raw(text)?;
            if let Some(at) = first_difference(&tokens, &others) {
                let shown = |tokens: &[u32]| {
                    tokens.get(at).map_or_else(|| "absent".to_owned(), u32::to_string)
                };
                let what = format!("tokenizer: token number {at} of {name}");
                let unlike = Difference { what, a: shown(&tokens), b: shown(&others) };
                return Err(CompareError::NotOneModel(vec![unlike]).into());
            }
        }
        Ok(tokens)
    }
}

/// Where two lists begin to differ.
fn first_difference(a: &[u32], b: &[u32]) -> Option<usize> {
    let equal = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (equal < a.len().max(b.len())).then_some(equal)
}

fn id_lists(text: &str, name: &str) -> Result<Vec<Vec<u32>>> {
    let lists = serde_json::from_str(text).with_context(|| {
        format!(
            "{name}: a .json file given with --ids must be a list of token ids, or of such lists"
        )
    })?;
    Ok(match lists {
        IdLists::One(ids) => vec![ids],
        IdLists::Many(lists) => lists,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_in_lists_of_either_kind() {
        assert_eq!(input::token_ids("1, 2\n3", "f").unwrap(), [1, 2, 3]);
        assert_eq!(id_lists("[1,2]", "f").unwrap(), [vec![1, 2]]);
        assert_eq!(id_lists("[[1],[2,3]]", "f").unwrap(), [vec![1], vec![2, 3]]);
        let error = format!("{:#}", input::token_ids("1 x", "f").unwrap_err());
        assert!(error.contains("\"x\"") && error.contains("number 2"), "{error}");
        assert!(id_lists("[\"a\"]", "f").is_err());
    }

    #[test]
    fn lists_differ_where_one_ends() {
        assert_eq!(first_difference(&[1, 2], &[1, 2]), None);
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
        assert_eq!(first_difference(&[1, 5], &[1, 2]), Some(1));
    }
}

//! Tokens from and to text, and a conversation to the text that a model was trained on.
//!
//! Owns tokenizer.json, tokenizer_config.json and chat_template.jinja of a model's folder. It adds
//! no special tokens of its own: a BOS is there only if the chat template or the text says so.
//! Stop tokens are the catalogue's.

pub mod check;
mod date;
mod stream;
mod template;
mod to_json;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tierkeep_plans::catalogue::open_file;
use tokenizers::Tokenizer;

pub use self::stream::TextStream;
use self::template::ChatTemplate;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A turn of the user.
    #[must_use]
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".to_owned(), content: content.into() }
    }
}

/// Why text could not become tokens or tokens text.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// There is no tokenizer.
    #[error("{} is missing: give token ids with --ids", path.display())]
    NoTokenizer {
        /// Where it should be.
        path: PathBuf,
    },
    /// The tokenizer cannot be used.
    #[error("{} is not a tokenizer that this build reads ({reason}): give token ids with --ids", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// A file beside the tokenizer cannot be read or understood.
    #[error("{} cannot be used ({reason}): fetch it again, or give token ids with --ids", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The model has no chat template.
    #[error(
        "{} has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json): give raw text", directory.display()
    )]
    NoChatTemplate {
        /// The model's folder.
        directory: PathBuf,
    },
    /// The chat template is wrong, or refuses this conversation.
    #[error("chat template of {}, line {line}: {reason}", path.display())]
    Template {
        /// The file that it comes from.
        path: PathBuf,
        /// Line in the template, from 1; 0 where the fault has no line.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The tokenizer failed on a text or a sequence of tokens.
    #[error("{}: cannot {doing}: {reason}", path.display())]
    Convert {
        /// The tokenizer's file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the tokenizer said.
        reason: String,
    },
}

/// The tokenizer and the chat template of a model.
pub struct Text {
    directory: PathBuf,
    path: PathBuf,
    tokenizer: Tokenizer,
    special: HashSet<u32>,
    template: Option<ChatTemplate>,
}

impl Text {
    /// Reads the tokenizer of the model in `directory`, and its chat template if it has one.
    ///
    /// # Errors
    /// [`TextError`] where the tokenizer is missing or broken, or a file beside it is broken. A
    /// fault in the template itself shows when a conversation is encoded: raw text needs none.
    pub fn open(directory: &Path) -> Result<Self, TextError> {
        let path = directory.join("tokenizer.json");
        let mut bytes = Vec::new();
        let read = open_file(&path).and_then(|mut file| file.read_to_end(&mut bytes));
        read.map_err(|e| match e.kind() {
            ErrorKind::NotFound => TextError::NoTokenizer { path: path.clone() },
            _ => TextError::Tokenizer { path: path.clone(), reason: e.to_string() },
        })?;
        let broken = |reason: String| TextError::Tokenizer { path: path.clone(), reason };
        let mut tokenizer = Tokenizer::from_bytes(&bytes).map_err(|e| broken(e.to_string()))?;
        // Settings of a training pipeline, which would cut or lengthen prompts.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| broken(e.to_string()))?;
        let special = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .filter_map(|(id, token)| token.special.then_some(id))
            .collect();
        let template = ChatTemplate::open(directory)?;
        Ok(Self { directory: directory.to_owned(), path, tokenizer, special, template })
    }

    /// Whether the model says how a conversation is written.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Tokens that the tokenizer knows, added ones included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// The highest id that the tokenizer makes; `None` where it makes none.
    #[must_use]
    pub fn highest_token(&self) -> Option<u32> {
        self.tokenizer.get_vocab(true).into_values().max()
    }

    /// How the tokenizer spells a token.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// The lowest token that another tokenizer spells otherwise or lacks, as each spells it.
    #[must_use]
    pub fn first_unlike(&self, other: &Self) -> Option<(u32, Option<String>, Option<String>)> {
        let by_id = |text: &Self| -> BTreeMap<u32, String> {
            let spelled = text.tokenizer.get_vocab(true).into_iter();
            spelled.map(|(token, id)| (id, token)).collect()
        };
        let (mine, others) = (by_id(self), by_id(other));
        let ids: BTreeSet<u32> = mine.keys().chain(others.keys()).copied().collect();
        ids.into_iter().find_map(|id| {
            let (a, b) = (mine.get(&id), others.get(&id));
            (a != b).then(|| (id, a.cloned(), b.cloned()))
        })
    }

    /// The text that the model is given for a conversation whose next turn is the model's.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`] and [`TextError::Template`].
    pub fn render_chat(&self, messages: &[Message]) -> Result<String, TextError> {
        match &self.template {
            Some(template) => template.render(messages),
            None => Err(TextError::NoChatTemplate { directory: self.directory.clone() }),
        }
    }

    /// The tokens of a conversation whose next turn is the model's.
    ///
    /// # Errors
    /// As [`Text::render_chat`] and [`Text::encode_raw`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, TextError> {
        self.encode_raw(&self.render_chat(messages)?)
    }

    /// The tokens of a text as it is: special tokens that it spells are found, none is added.
    ///
    /// # Errors
    /// [`TextError::Convert`].
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|e| TextError::Convert {
            path: self.path.clone(),
            doing: "encode the text",
            reason: e.to_string(),
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens. Special tokens and ids that the tokenizer does not know give nothing;
    /// bytes that are no UTF-8 give U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Convert`].
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.tokenizer.decode(ids, true).map_err(|e| TextError::Convert {
            path: self.path.clone(),
            doing: "decode tokens",
            reason: e.to_string(),
        })
    }

    /// The text of tokens that come one by one.
    #[must_use]
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// Whether a token is left out of text: a special one, or none of the tokenizer's.
    fn is_skipped(&self, id: u32) -> bool {
        self.special.contains(&id) || self.tokenizer.id_to_token(id).is_none()
    }

    /// Whether a token is spelled `<0x..>`: one byte, which some decoders join with its neighbours.
    fn is_byte(&self, id: u32) -> bool {
        self.tokenizer.id_to_token(id).is_some_and(|token| {
            token.len() == 6 && token.starts_with("<0x") && token.ends_with('>')
        })
    }
}

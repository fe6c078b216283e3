//! The generated text, shown while it comes.

use anyhow::Result;
use tierkeep_engine::text::{Text, TextStream};

use super::data;

/// Turns tokens into text as they come; without a tokenizer, into their numbers.
pub(crate) struct Answer<'a> {
    stream: Option<TextStream<'a>>,
    stop_tokens: &'a [u32],
    is_shown: bool,
    has_text: bool,
    text: String,
}

impl<'a> Answer<'a> {
    pub(crate) fn new(text: Option<&'a Text>, stop_tokens: &'a [u32], is_shown: bool) -> Self {
        Self {
            stream: text.map(Text::stream),
            stop_tokens,
            is_shown,
            has_text: text.is_some(),
            text: String::new(),
        }
    }

    fn show(&mut self, piece: &str) -> Result<()> {
        self.text.push_str(piece);
        if self.is_shown { data(piece) } else { Ok(()) }
    }

    /// Adds a token; a stop token is not shown.
    pub(crate) fn push(&mut self, token: u32) -> Result<()> {
        if self.stop_tokens.contains(&token) {
            return Ok(());
        }
        match &mut self.stream {
            Some(stream) => match stream.push(token)? {
                Some(piece) => self.show(&piece),
                None => Ok(()),
            },
            None if self.text.is_empty() => self.show(&token.to_string()),
            None => self.show(&format!(",{token}")),
        }
    }

    /// Shows what was held back and ends the line; returns the text, where there is a tokenizer.
    pub(crate) fn finish(mut self) -> Result<Option<String>> {
        if let Some(stream) = self.stream.take()
            && let Some(piece) = stream.finish()?
        {
            self.show(&piece)?;
        }
        if self.is_shown {
            data("\n")?;
        }
        Ok(self.has_text.then_some(self.text))
    }
}

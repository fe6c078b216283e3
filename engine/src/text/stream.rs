//! Text of tokens as they come. Owns what is held back and what was given out; decoding is
//! `Text`'s.
//!
//! Tokens cut characters, and decoders look at neighbours (a leading space, runs of bytes), so the
//! text of a token is the difference that it makes: the window of the last tokens is decoded with
//! and without it. What ends in U+FFFD may be the beginning of a character and waits.

use super::{Text, TextError};

/// Text of tokens that come one by one; what it gives out adds up to [`Text::decode`] of them all.
pub struct TextStream<'a> {
    text: &'a Text,
    /// The tokens of the last piece given out, then those held back.
    window: Vec<u32>,
    /// How many of the window were given out.
    n_given: usize,
    /// The text of these.
    given: String,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(text: &'a Text) -> Self {
        Self { text, window: Vec::new(), n_given: 0, given: String::new() }
    }

    /// Takes the next token; gives the text that is now certain, if any.
    ///
    /// # Errors
    /// [`TextError::Convert`].
    pub fn push(&mut self, id: u32) -> Result<Option<String>, TextError> {
        if self.text.is_skipped(id) {
            return Ok(None);
        }
        self.window.push(id);
        // Decoders that spell bytes as tokens judge a run of them as a whole.
        if self.text.is_byte(id) {
            return Ok(None);
        }
        let text = self.text.decode(&self.window)?;
        if text.ends_with('\u{fffd}') {
            return Ok(None);
        }
        // A decoder that changes text it had already given (joining a contraction) makes the rest
        // wait until both agree again.
        let Some(new) = text.strip_prefix(&self.given).filter(|new| !new.is_empty()) else {
            return Ok(None);
        };
        let new = new.to_owned();
        self.window.drain(..self.n_given);
        self.n_given = self.window.len();
        self.given = self.text.decode(&self.window)?;
        Ok(Some(new))
    }

    /// Ends the stream; gives what was held back, if anything.
    ///
    /// # Errors
    /// [`TextError::Convert`].
    pub fn finish(self) -> Result<Option<String>, TextError> {
        let text = self.text.decode(&self.window)?;
        let new = match text.strip_prefix(&self.given) {
            Some(new) => new.to_owned(),
            None => self.text.decode(&self.window[self.n_given..])?,
        };
        Ok(Some(new).filter(|new| !new.is_empty()))
    }
}

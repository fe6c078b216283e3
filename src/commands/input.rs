//! Text and token ids that a user gives in files or on standard input, read with a limit. What they are for is
//! the verbs' own.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

/// Longest text that is read, bytes: no context holds more.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// What a file, or standard input, is called in messages.
pub(crate) fn name(path: Option<&Path>) -> String {
    path.map_or("standard input".to_owned(), |path| path.display().to_string())
}

/// All of a file, or of standard input. What is longer than [`MAX_BYTES`] is refused in words that end with
/// `remedy`.
pub(crate) fn contents(path: Option<&Path>, remedy: &str) -> Result<String> {
    let mut text = String::new();
    let cap = MAX_BYTES + 1;
    let n = match path {
        Some(path) => File::open(path).and_then(|file| file.take(cap).read_to_string(&mut text)),
        None => std::io::stdin().take(cap).read_to_string(&mut text),
    };
    let n = n.with_context(|| name(path))?;
    if n as u64 > MAX_BYTES {
        bail!("{} is longer than {MAX_BYTES} bytes{remedy}", name(path));
    }
    Ok(text)
}

/// Token ids between commas, blanks or line breaks.
pub(crate) fn token_ids(text: &str, name: &str) -> Result<Vec<u32>> {
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

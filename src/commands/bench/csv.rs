//! Rows at the end of a CSV file: the header first where the file is new, and never below another one.

use std::fs::OpenOptions;
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Appends `rows`, each a line, to a file whose first line is `header`.
pub(super) fn append(path: &Path, header: &str, rows: &str) -> Result<()> {
    let said = || format!("--csv {}", path.display());
    let mut file =
        OpenOptions::new().read(true).append(true).create(true).open(path).with_context(said)?;
    let mut first = String::new();
    // A device or a pipe has no first line to be compared.
    if file.metadata().with_context(said)?.is_file() {
        file.seek(SeekFrom::Start(0)).with_context(said)?;
        BufReader::new(&file).read_line(&mut first).with_context(said)?;
    }
    let text = match first.trim_end() {
        "" => format!("{header}\n{rows}"),
        found if found == header => rows.to_owned(),
        found => {
            let found: String = found.chars().take(60).collect();
            bail!(
                "--csv {}: its first line is {found:?}, not the header of these rows: name another file",
                path.display()
            );
        }
    };
    file.write_all(text.as_bytes()).with_context(said)
}

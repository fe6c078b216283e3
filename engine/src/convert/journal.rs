//! What a conversion has done so far, kept in its folder so that the same command goes on after a kill.
//! Owns the lines of the journal, what of an earlier one holds, and the lock of the folder.
//!
//! One JSON object a line: what is converted into what, then each file that is finished, then each
//! source file that is given up. A line is written after what it says has been brought to the disk, and
//! before anything rests on it. The last line may be torn by a kill; it then counts as not written.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::units::Bytes;

use super::ConvertError;
use super::layout::OutputPlan;
use super::options::ConvertOptions;
use super::output::{MARKER, failed};
use super::report::ErrorSums;

/// Raised when what is written of one conversion changes without its headers changing.
const WRITER: u32 = 1;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// The first one.
    Begun(Begun),
    /// A file is whole, on the disk, and about to get its name.
    Finished(Finished),
    /// A source file that nothing more is needed of is about to be deleted.
    Consumed(String),
}

/// What is converted into what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Begun {
    writer: u32,
    version: String,
    /// Of the source's headers.
    source: String,
    /// Of the weights that were published.
    pub(super) published: String,
    options: String,
    /// Of all headers of the output.
    layout: String,
    sources: Vec<SourceFile>,
}

/// A source file as it was when the conversion began.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SourceFile {
    name: String,
    bytes: u64,
    modified_ns: u64,
}

/// A file of the output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Finished {
    pub(super) file: String,
    pub(super) bytes: u64,
    pub(super) blake3: String,
    /// It was read back from the disk and compared.
    pub(super) read_back: bool,
    pub(super) errors: Vec<ErrorSums>,
}

/// An open journal; its lock is held.
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    needed: Bytes,
    pub(super) finished: Vec<Finished>,
    pub(super) consumed: Vec<String>,
}

/// Whole lines of a journal, and how many bytes they are.
fn lines(text: &[u8]) -> (Vec<Line>, u64) {
    let (mut lines, mut bytes) = (Vec::new(), 0);
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        if line.last() != Some(&b'\n') {
            break;
        }
        let Ok(read) = serde_json::from_slice(line) else { break };
        lines.push(read);
        bytes += line.len() as u64;
    }
    (lines, bytes)
}

/// What the journal of a folder says, if there is one: what was begun, and which source files are given
/// up.
pub(super) fn peek(out: &Path) -> Option<(Begun, Vec<String>)> {
    let text = std::fs::read(out.join(MARKER)).ok()?;
    let mut begun = None;
    let mut consumed = Vec::new();
    for line in lines(&text).0 {
        match line {
            Line::Begun(line) => begun = Some(line),
            Line::Consumed(name) => consumed.push(name),
            Line::Finished(_) => {}
        }
    }
    Some((begun?, consumed))
}

impl Begun {
    pub(super) fn of(
        catalogue: &Catalogue,
        options: &ConvertOptions,
        plan: &OutputPlan,
        published: &str,
    ) -> Self {
        let sources = catalogue.shards.iter().map(|shard| SourceFile {
            name: file_name(&shard.path),
            bytes: shard.bytes,
            modified_ns: modified_ns(&shard.path).unwrap_or(0),
        });
        Self {
            writer: WRITER,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            source: catalogue.fingerprint.clone(),
            published: published.to_owned(),
            options: options.in_words(),
            layout: plan.fingerprint(),
            sources: sources.collect(),
        }
    }

    /// Whether it was begun of the weights of this fingerprint.
    pub(super) fn is_of(&self, fingerprint: &str) -> bool {
        self.source == fingerprint
    }

    /// Why a conversion that was begun so cannot go on as another one.
    fn differs(&self, now: &Self, consumed: &[String]) -> Option<String> {
        if self.options != now.options {
            return Some(format!("was begun with {}, and not with {}", self.options, now.options));
        }
        if self.source != now.source {
            return Some("was begun of another model, or of other files of it".to_owned());
        }
        if (self.writer, &self.version) != (now.writer, &now.version) {
            return Some(format!(
                "was begun by tierkeep {}, this is {}",
                self.version, now.version
            ));
        }
        if self.layout != now.layout {
            return Some("would be laid out otherwise by this build".to_owned());
        }
        let changed = self
            .sources
            .iter()
            .zip(&now.sources)
            .find(|(before, now)| !consumed.contains(&before.name) && before != now);
        changed.map(|(before, _)| {
            format!("was begun before its source file {} was last written", before.name)
        })
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn modified_ns(path: &Path) -> Option<u64> {
    let modified = std::fs::metadata(path).ok()?.modified().ok()?;
    let since = modified.duration_since(std::time::UNIX_EPOCH).ok()?;
    u64::try_from(since.as_nanos()).ok()
}

impl Journal {
    /// Opens the journal of a folder and takes its lock. One that was begun by the same conversion goes
    /// on; one that has finished nothing, or with `restart`, begins anew.
    pub(super) fn open(
        out: &Path,
        needed: Bytes,
        now: Begun,
        restart: bool,
    ) -> Result<Self, ConvertError> {
        let path = out.join(MARKER);
        let io = |doing| {
            let path = path.clone();
            move |e| failed(&path, doing, needed, e)
        };
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(io("create"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(ConvertError::OutputBusy { directory: out.to_owned() });
            }
            // Some network file systems have no locks; the conversion itself needs none.
            Err(TryLockError::Error(_)) => {}
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(io("read"))?;
        let (lines, bytes) = lines(&text);
        let mut journal =
            Self { file, path: path.clone(), needed, finished: Vec::new(), consumed: Vec::new() };
        let mut before = None;
        for line in lines {
            match line {
                Line::Begun(begun) => before = Some(begun),
                Line::Finished(finished) => journal.finished.push(finished),
                Line::Consumed(name) => journal.consumed.push(name),
            }
        }
        let differs = before.as_ref().and_then(|b| b.differs(&now, &journal.consumed));
        let goes_on = before.is_some() && differs.is_none() && !restart;
        // Where nothing was finished nothing is lost by beginning anew.
        let has_some = !journal.finished.is_empty() || !journal.consumed.is_empty();
        match differs {
            Some(how) if !restart && has_some => {
                return Err(ConvertError::OtherConversion {
                    directory: out.to_owned(),
                    how,
                    remedy: journal.remedy(),
                });
            }
            _ if restart && !journal.consumed.is_empty() => {
                return Err(ConvertError::OtherConversion {
                    directory: out.to_owned(),
                    how: "cannot begin anew".to_owned(),
                    remedy: journal.remedy(),
                });
            }
            _ => {}
        }
        if goes_on {
            journal.file.set_len(bytes).map_err(io("shorten"))?;
            journal.file.seek(SeekFrom::End(0)).map_err(io("seek"))?;
        } else {
            (journal.finished, journal.consumed) = (Vec::new(), Vec::new());
            journal.file.set_len(0).map_err(io("shorten"))?;
            journal.file.rewind().map_err(io("seek"))?;
            journal.append(&Line::Begun(now))?;
        }
        Ok(journal)
    }

    fn remedy(&self) -> String {
        match self.consumed.first() {
            None => "repeat that command, or add --restart to begin anew".to_owned(),
            Some(name) => format!(
                "repeat that command: {name} and {} more of its source are deleted already, so that \
                 it cannot begin anew from here",
                self.consumed.len() - 1
            ),
        }
    }

    fn append(&mut self, line: &Line) -> Result<(), ConvertError> {
        let mut text = serde_json::to_vec(line)
            .map_err(|e| failed(&self.path, "write", self.needed, e.into()))?;
        text.push(b'\n');
        self.file
            .write_all(&text)
            .and_then(|()| self.file.sync_all())
            .map_err(|e| failed(&self.path, "write", self.needed, e))
    }

    /// Notes a file that is on the disk and has not got its name yet.
    pub(super) fn note_finished(&mut self, finished: Finished) -> Result<(), ConvertError> {
        self.append(&Line::Finished(finished.clone()))?;
        self.finished.retain(|earlier| earlier.file != finished.file);
        self.finished.push(finished);
        Ok(())
    }

    /// Notes a source file that is about to be deleted.
    pub(super) fn note_consumed(&mut self, name: &str) -> Result<(), ConvertError> {
        self.append(&Line::Consumed(name.to_owned()))?;
        self.consumed.push(name.to_owned());
        Ok(())
    }

    /// What is said of a file, the last time that it was finished.
    pub(super) fn of(&self, file: &str) -> Option<&Finished> {
        self.finished.iter().rev().find(|finished| finished.file == file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_line_counts_as_not_written() {
        let line = |name: &str| {
            let mut text = serde_json::to_vec(&Line::Consumed(name.to_owned())).unwrap_or_default();
            text.push(b'\n');
            text
        };
        let whole = [line("a"), line("b")].concat();
        let (read, bytes) = lines(&whole);
        assert_eq!((read.len(), bytes), (2, whole.len() as u64));
        for cut in 1..=line("b").len() {
            let (read, bytes) = lines(&whole[..whole.len() - cut]);
            assert_eq!((read.len(), bytes), (1, line("a").len() as u64), "{cut} bytes cut off");
        }
        assert_eq!(lines(b"").0, []);
        assert_eq!(lines(b"{}\n").0, []);
    }
}

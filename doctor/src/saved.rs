//! Facts as a file: TOML that a person can read, edit and write by hand.
//!
//! Owns the reading and writing of `doctor --save` and `plan --machine` files. Refuses files that are
//! too large, of another version, misspelt, or impossible (a speed of zero); names the line where the
//! text goes wrong. Writing replaces a regular file whole or not at all, and writes into anything else
//! (a pipe, a terminal, a device) as it is.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;
use toml::{Table, Value};

use crate::fact::Fact;
use crate::facts::{Facts, GpuVendor, SCHEMA_VERSION};

/// Largest file of facts that is read. Facts of a machine with 256 NUMA nodes and 16 GPUs take about
/// 60 kB.
pub const MAX_FILE_BYTES: u64 = 4 << 20;

/// The first lines of a saved file.
const HEAD: &str = "\
# Facts about one machine, by `tierkeep doctor --save`. `tierkeep plan MODEL --machine FILE` plans for
# it anywhere. Each fact is { source, detail, value }, or { source = \"unknown\", reason }; sources are
# measured, read, estimated, assumed, unknown. Bytes are bytes, rates are bytes per second. The file may
# be edited: what you change is \"assumed\", and what is left out is unknown.
";

/// Saved facts that cannot be read or written.
#[derive(Debug, Error)]
pub enum SavedFactsError {
    /// The file cannot be read.
    #[error("cannot read machine facts from {}: {error}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// The file is too large to be facts.
    #[error("{}: more than {limit} bytes, which no facts about a machine are; is this the right file?", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The largest that is read.
        limit: u64,
    },
    /// The file says no version.
    #[error(
        "{}: no schema_version; a file of machine facts begins with schema_version = {SCHEMA_VERSION}",
        .path.display()
    )]
    NoVersion {
        /// The file.
        path: PathBuf,
    },
    /// The file is of another version.
    #[error(
        "{}: schema_version is {found}, this program reads {SCHEMA_VERSION}; save the facts again with \
         `tierkeep doctor --save`",
        .path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version found.
        found: i64,
    },
    /// The text is no TOML, or not the facts that are known here.
    #[error("{}{}: {message}", .path.display(), line_suffix(.line))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The line where it goes wrong, from 1, if known.
        line: Option<usize>,
        /// What is wrong, with the name of the field.
        message: String,
    },
    /// A value that no machine can have.
    #[error("{}: {field}: expected {expected}, found {found}", .path.display())]
    Impossible {
        /// The file.
        path: PathBuf,
        /// The field, such as `memory.read_bandwidth_bytes_per_s`.
        field: String,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// A fact that the format cannot hold, such as a number beyond 2^63.
    #[error("cannot write machine facts as TOML: {message}")]
    Unsupported {
        /// What cannot be written.
        message: String,
    },
    /// The file cannot be written.
    #[error("cannot write machine facts to {}: {error}", .path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
}

fn line_suffix(line: &Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(":{line}"))
}

impl Facts {
    /// The text of a file of facts, with a comment on top that says what it is.
    ///
    /// # Errors
    ///
    /// [`SavedFactsError::Unsupported`] for a number beyond 2^63, which TOML cannot hold.
    pub fn to_toml(&self) -> Result<String, SavedFactsError> {
        let unsupported =
            |error: toml::ser::Error| SavedFactsError::Unsupported { message: error.to_string() };
        let table = Table::try_from(self).map_err(unsupported)?;
        let mut text = format!("{HEAD}\nschema_version = {}\n", self.schema_version);
        for (name, part) in &table {
            let Value::Table(facts) = part else { continue };
            text.push_str(&format!("\n[{name}]\n"));
            for (name, fact) in facts {
                text.push_str(&format!("{name} = {}\n", inline(fact)));
            }
        }
        Ok(text)
    }

    /// Facts from the text of a file; `path` is only named in errors.
    ///
    /// # Errors
    ///
    /// Text that is too long, no TOML, of another version, with a field that is not known, or with a
    /// value that no machine can have.
    pub fn from_toml(text: &str, path: &Path) -> Result<Self, SavedFactsError> {
        #[derive(Deserialize)]
        struct Head {
            schema_version: Option<i64>,
        }
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(SavedFactsError::TooLarge { path: path.into(), limit: MAX_FILE_BYTES });
        }
        let invalid = |error: &toml::de::Error| SavedFactsError::Invalid {
            path: path.into(),
            line: error.span().map(|span| line_of(text, span.start)),
            message: error.message().split_whitespace().collect::<Vec<_>>().join(" "),
        };
        // The version is looked at first: of another one, unknown fields are no typing errors.
        let head: Head = toml::from_str(text).map_err(|error| invalid(&error))?;
        match head.schema_version {
            None => return Err(SavedFactsError::NoVersion { path: path.into() }),
            Some(version) if version == i64::from(SCHEMA_VERSION) => {}
            Some(found) => return Err(SavedFactsError::Version { path: path.into(), found }),
        }
        let facts: Self = toml::from_str(text).map_err(|error| invalid(&error))?;
        match impossible(&facts) {
            None => Ok(facts),
            Some((field, expected, found)) => {
                Err(SavedFactsError::Impossible { path: path.into(), field, expected, found })
            }
        }
    }

    /// Reads a file of facts.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, and what [`Facts::from_toml`] refuses.
    pub fn read(path: &Path) -> Result<Self, SavedFactsError> {
        let unreadable = |error| SavedFactsError::Unreadable { path: path.into(), error };
        let mut text = String::new();
        // One byte more than is allowed tells a file of just that size from a larger one; an endless
        // device ends there too.
        File::open(path)
            .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text))
            .map_err(unreadable)?;
        Self::from_toml(&text, path)
    }

    /// Writes a file of facts. A regular file is replaced whole or not at all, where a link points to
    /// it too; anything else that exists is written into.
    ///
    /// # Errors
    ///
    /// What cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), SavedFactsError> {
        let text = self.to_toml()?;
        write(path, text.as_bytes())
            .map_err(|error| SavedFactsError::Unwritable { path: path.into(), error })
    }
}

/// The line, from 1, that a byte lies in.
fn line_of(text: &str, byte: usize) -> usize {
    text.bytes().take(byte).filter(|&byte| byte == b'\n').count() + 1
}

/// A value on one line, but for lists of tables, which take a line for each. TOML allows line breaks
/// inside a list even where the list is part of an inline table.
fn inline(value: &Value) -> String {
    match value {
        Value::Table(table) => {
            let fields: Vec<String> =
                table.iter().map(|(name, value)| format!("{name} = {}", inline(value))).collect();
            if fields.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", fields.join(", ")) }
        }
        Value::Array(all) if all.iter().any(Value::is_table) => {
            let all: String = all.iter().map(|one| format!("    {},\n", inline(one))).collect();
            format!("[\n{all}]")
        }
        Value::String(_)
        | Value::Integer(_)
        | Value::Float(_)
        | Value::Boolean(_)
        | Value::Datetime(_)
        | Value::Array(_) => value.to_string(),
    }
}

/// A value that no machine can have: its field, what was expected, what was found.
fn impossible(facts: &Facts) -> Option<(String, &'static str, String)> {
    let gpus = |list: &'static str, gpus: &Fact<Vec<crate::GpuFact>>| {
        gpus.value().into_iter().flatten().enumerate().find_map(|(place, gpu)| {
            let field = |name: &str| format!("gpus.{list}, number {place}: {name}");
            let is_nvidia = gpu.vendor == GpuVendor::Nvidia;
            if is_nvidia != (list == "nvidia") {
                let expected = if is_nvidia { "amd or intel" } else { "nvidia" };
                return Some((field("vendor"), expected, format!("{:?}", gpu.vendor)));
            }
            let (total, free) = (gpu.memory_total_bytes.value(), gpu.memory_free_bytes.value());
            if let (Some(total), Some(free)) = (total, free)
                && free > total
            {
                let expected = "no more than memory_total_bytes";
                return Some((field("memory_free_bytes"), expected, format!("{free} of {total}")));
            }
            rate(&field("memory_bandwidth_bytes_per_s"), &gpu.memory_bandwidth_bytes_per_s)
                .or_else(|| rate(&field("link_bytes_per_s"), &gpu.link_bytes_per_s))
        })
    };
    let memory = &facts.memory;
    let all = "memory.read_bandwidth_bytes_per_s";
    let one = "memory.read_bandwidth_one_thread_bytes_per_s";
    let reads = facts.disk.reads.value().into_iter().flatten();
    let read = |field: &str, speed: &crate::DiskReadSpeed| {
        rate(field, &Fact::assumed(speed.bytes_per_s, ""))
            .or_else(|| (speed.read_bytes == 0).then(|| nothing(field, "read_bytes")))
            .or_else(|| (speed.queue_depth == 0).then(|| nothing(field, "queue_depth")))
    };
    rate(all, &memory.read_bandwidth_bytes_per_s)
        .or_else(|| rate(one, &memory.read_bandwidth_one_thread_bytes_per_s))
        .or_else(|| {
            rate("cpu.quota_cores", &facts.cpu.quota_cores.clone().map(|n| n.unwrap_or(1.0)))
        })
        .or_else(|| {
            (facts.cpu.usable_threads.value() == Some(&0))
                .then(|| ("cpu.usable_threads".to_owned(), "at least 1", "0".to_owned()))
        })
        .or_else(|| facts.disk.read.value().and_then(|speed| read("disk.read", speed)))
        .or_else(|| reads.into_iter().find_map(|speed| read("disk.reads", speed)))
        .or_else(|| gpus("nvidia", &facts.gpus.nvidia))
        .or_else(|| gpus("others", &facts.gpus.others))
}

fn nothing(field: &str, name: &str) -> (String, &'static str, String) {
    (format!("{field}.{name}"), "at least 1", "0".to_owned())
}

fn rate(field: &str, fact: &Fact<f64>) -> Option<(String, &'static str, String)> {
    let value = *fact.value()?;
    let is_possible = value.is_finite() && value > 0.0;
    (!is_possible).then(|| (field.to_owned(), "a number above 0", value.to_string()))
}

/// Links that are followed before they are taken for a circle, as the kernel does.
const MAX_LINKS: usize = 40;

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => replace(&path.canonicalize()?, bytes),
        Ok(metadata) if metadata.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        // A pipe or a device: replacing its name by a file would take it from everybody else.
        Ok(_) => {
            let mut file = OpenOptions::new().write(true).open(path)?;
            file.write_all(bytes)?;
            file.flush()
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            replace(&end_of_links(path)?, bytes)
        }
        Err(error) => Err(error),
    }
}

/// Where a link that points to nothing yet would have its file.
fn end_of_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("")).join(target),
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::other("too many links"))
}

/// Writes beside the file, brings it to disk, and renames it over the file.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) | None => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".machine-facts-");
    // Otherwise temporary files are for their owner alone; what the user forbids is taken off.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    if let Ok(metadata) = fs::metadata(path) {
        file.as_file().set_permissions(metadata.permissions())?;
    }
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

//! A machine that does not exist: changes to facts, as a user writes them for `--what-if`. Pure; what
//! is changed is `assumed` afterwards and says so, everything else stays as it was found.

use std::str::FromStr;

use serde::Serialize;
use tierkeep_doctor::{DiskReadSpeed, Fact, Facts, GpuFact};

use crate::units::{Bytes, Rate, SizeRequest};

/// Detail of every fact that is changed here.
const DETAIL: &str = "what if";
/// Size of the reads that a disk's rate is for where none was measured.
const READ_BYTES: u64 = 1 << 20;
/// Reads in flight at once, likewise.
const QUEUE_DEPTH: u32 = 8;
/// Most cards that may be asked for.
const CARD_CAP: usize = 64;
/// Most threads that may be asked for.
const THREAD_CAP: u64 = 4096;

/// What can be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Ram,
    Vram,
    Disk,
    Memory,
    CardMemory,
    Link,
    Threads,
}

impl Key {
    const ALL: [Self; 7] = [
        Self::Ram,
        Self::Vram,
        Self::Disk,
        Self::Memory,
        Self::CardMemory,
        Self::Link,
        Self::Threads,
    ];

    /// Its names, the first one being shown.
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Ram => &["ram"],
            Self::Vram => &["vram"],
            Self::Disk => &["disk"],
            Self::Memory => &["mem"],
            Self::CardMemory => &["vmem"],
            Self::Link => &["link"],
            Self::Threads => &["cores", "threads"],
        }
    }

    /// What is expected of its value.
    fn expected(self) -> &'static str {
        match self {
            Self::Ram => "a size such as 64GB",
            Self::Vram => {
                "the memory of a card such as 24GB, of several such as 4x48GB, or 0 for none"
            }
            Self::Disk => "the rate of reads such as 7GB/s",
            Self::Memory => "the rate at which memory is read, such as 60GB/s",
            Self::CardMemory => "the rate at which a card reads its memory, such as 900GB/s",
            Self::Link => "the rate between memory and cards, such as 25GB/s",
            Self::Threads => "a number of cores from 1 to 4096",
        }
    }

    fn name(self) -> &'static str {
        self.names().first().copied().unwrap_or("")
    }
}

/// All keys, for messages.
fn known_keys() -> String {
    Key::ALL.iter().flat_map(|key| key.names()).copied().collect::<Vec<_>>().join(", ")
}

/// Why changes could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhatIfError {
    /// Something without a value.
    #[error(
        "cannot read {part:?} as a change: write KEY=VALUE, such as ram=64GB,vram=4x48GB,disk=7GB/s; the keys are {}",
        known_keys()
    )]
    NoValue {
        /// What was given.
        part: String,
    },
    /// A key that does not exist.
    #[error(
        "{key:?} cannot be changed: the keys are {}, as in ram=64GB,vram=4x48GB,disk=7GB/s",
        known_keys()
    )]
    UnknownKey {
        /// What was given.
        key: String,
    },
    /// A value that is not one.
    #[error("{key}={value}: expected {expected}")]
    BadValue {
        /// The key.
        key: &'static str,
        /// What was given.
        value: String,
        /// What would do.
        expected: &'static str,
    },
    /// A key that is given twice, under one name or two.
    #[error("{key} is given twice: which one is meant?")]
    Twice {
        /// The key.
        key: &'static str,
    },
}

/// One change.
#[derive(Clone, Debug, PartialEq)]
enum Change {
    /// Memory that may be used, bytes.
    Ram(u64),
    /// Memory of each card, bytes.
    Vram(Vec<u64>),
    /// Bytes a second.
    Disk(f64),
    /// Bytes a second.
    Memory(f64),
    /// Bytes a second of each card.
    CardMemory(f64),
    /// Bytes a second of each card.
    Link(f64),
    /// Threads that compute.
    Threads(u64),
}

impl Change {
    fn key(&self) -> Key {
        match self {
            Self::Ram(_) => Key::Ram,
            Self::Vram(_) => Key::Vram,
            Self::Disk(_) => Key::Disk,
            Self::Memory(_) => Key::Memory,
            Self::CardMemory(_) => Key::CardMemory,
            Self::Link(_) => Key::Link,
            Self::Threads(_) => Key::Threads,
        }
    }

    fn read(key: Key, value: &str) -> Option<Self> {
        let rate = |value: &str| value.parse::<Rate>().ok().map(|rate| rate.0);
        match key {
            Key::Ram => size(value).filter(|&bytes| bytes > 0).map(Self::Ram),
            Key::Vram => cards(value).map(Self::Vram),
            Key::Disk => rate(value).map(Self::Disk),
            Key::Memory => rate(value).map(Self::Memory),
            Key::CardMemory => rate(value).map(Self::CardMemory),
            Key::Link => rate(value).map(Self::Link),
            Key::Threads => {
                let threads = value.parse().ok();
                threads.filter(|n| (1..=THREAD_CAP).contains(n)).map(Self::Threads)
            }
        }
    }
}

/// A size; a share would be of a machine that does not exist.
fn size(text: &str) -> Option<u64> {
    match text.parse() {
        Ok(SizeRequest::Absolute(bytes)) => Some(bytes.0),
        Ok(SizeRequest::Percent(_)) | Err(_) => None,
    }
}

/// `24GB`, `4x48GB`, `24GB+8GB`, or `0`.
fn cards(text: &str) -> Option<Vec<u64>> {
    let mut cards = Vec::new();
    for part in text.split('+') {
        let (n, one) = match part.split_once(['x', 'X']) {
            Some((n, one)) => (n.trim().parse::<usize>().ok()?, one),
            None => (1, part),
        };
        if n == 0 || n > CARD_CAP - cards.len() {
            return None;
        }
        cards.extend(std::iter::repeat_n(size(one)?, n));
    }
    if cards == [0] {
        return Some(Vec::new());
    }
    (!cards.contains(&0)).then_some(cards)
}

/// Changes to a machine, in the order in which they are made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WhatIf(Vec<Change>);

impl FromStr for WhatIf {
    type Err = WhatIfError;

    /// Reads `ram=64GB,vram=4x48GB,disk=7GB/s`.
    fn from_str(text: &str) -> Result<Self, WhatIfError> {
        let mut changes: Vec<Change> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let no_value = || WhatIfError::NoValue { part: part.to_owned() };
            let (name, value) = part.split_once('=').ok_or_else(no_value)?;
            let (name, value) = (name.trim(), value.trim());
            let key = Key::ALL
                .into_iter()
                .find(|key| key.names().iter().any(|known| known.eq_ignore_ascii_case(name)))
                .ok_or_else(|| WhatIfError::UnknownKey { key: name.to_owned() })?;
            let change = Change::read(key, value).ok_or_else(|| WhatIfError::BadValue {
                key: key.name(),
                value: value.to_owned(),
                expected: key.expected(),
            })?;
            if changes.iter().any(|before| before.key() == key) {
                return Err(WhatIfError::Twice { key: key.name() });
            }
            changes.push(change);
        }
        // Cards come before what is said of them, wherever the user wrote them.
        changes.sort_by_key(|change| !matches!(change, Change::Vram(_)));
        Ok(Self(changes))
    }
}

/// What a change replaced, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replaced {
    /// What was changed.
    pub key: &'static str,
    /// What the facts say; `unknown` where they do not.
    pub was: String,
    /// What is assumed instead.
    pub is: String,
}

impl WhatIf {
    /// Whether graphics cards are among what is changed.
    #[must_use]
    pub fn is_of_cards(&self) -> bool {
        self.0.iter().any(|change| match change {
            Change::Vram(_) | Change::CardMemory(_) | Change::Link(_) => true,
            Change::Ram(_) | Change::Disk(_) | Change::Memory(_) | Change::Threads(_) => false,
        })
    }

    /// Whether what a measurement of the disk finds is replaced.
    #[must_use]
    pub fn replaces_disk(&self) -> bool {
        self.0.iter().any(|change| matches!(change, Change::Disk(_)))
    }

    /// Whether what a measurement of main memory finds is replaced.
    #[must_use]
    pub fn replaces_memory_speed(&self) -> bool {
        self.0.iter().any(|change| matches!(change, Change::Memory(_)))
    }

    /// Changes facts, and says what it replaced. Changed facts are [`Fact::Assumed`].
    ///
    /// - `ram` is all that there is and all that may be used; no group limits it.
    /// - `vram` replaces all cards. The first ones keep the link of the card that was there.
    /// - `disk` and `mem` replace what was measured.
    /// - `vmem` and `link` are of every card.
    #[must_use]
    pub fn apply(&self, facts: &mut Facts) -> Vec<Replaced> {
        let mut replaced = Vec::with_capacity(self.0.len());
        for change in &self.0 {
            let (was, is) = apply(change, facts);
            replaced.push(Replaced { key: change.key().name(), was, is });
        }
        replaced
    }
}

/// Makes one change; what was and what is, in words.
fn apply(change: &Change, facts: &mut Facts) -> (String, String) {
    match change {
        Change::Ram(bytes) => {
            let memory = &mut facts.memory;
            let was = shown(&memory.usable_bytes, |&bytes| Bytes(bytes).to_string());
            memory.total_bytes = Fact::assumed(*bytes, DETAIL);
            memory.available_bytes = Fact::assumed(*bytes, DETAIL);
            memory.usable_bytes = Fact::assumed(*bytes, DETAIL);
            memory.limit = Fact::assumed(None, DETAIL);
            (was, Bytes(*bytes).to_string())
        }
        Change::Vram(cards) => {
            let gpus = &mut facts.gpus;
            let was = shown(&gpus.nvidia, |cards| cards_in_words(&totals(cards)));
            let present = gpus.nvidia.value().cloned().unwrap_or_default();
            let new = cards.iter().enumerate().map(|(at, &bytes)| card(at, bytes, present.get(at)));
            gpus.nvidia = Fact::assumed(new.collect(), DETAIL);
            gpus.others = Fact::assumed(Vec::new(), DETAIL);
            (was, cards_in_words(cards))
        }
        Change::Disk(rate) => {
            let disk = &mut facts.disk;
            let was = shown(&disk.read, |read| Rate(read.bytes_per_s).to_string());
            let (read_bytes, queue_depth) = disk
                .read
                .value()
                .map_or((READ_BYTES, QUEUE_DEPTH), |read| (read.read_bytes, read.queue_depth));
            let read = DiskReadSpeed { bytes_per_s: *rate, read_bytes, queue_depth };
            disk.reads = Fact::assumed(vec![read.clone()], DETAIL);
            disk.read = Fact::assumed(read, DETAIL);
            (was, Rate(*rate).to_string())
        }
        Change::Memory(rate) => {
            let memory = &mut facts.memory;
            let was = shown(&memory.read_bandwidth_bytes_per_s, |&rate| Rate(rate).to_string());
            memory.read_bandwidth_bytes_per_s = Fact::assumed(*rate, DETAIL);
            (was, Rate(*rate).to_string())
        }
        Change::CardMemory(rate) => {
            of_cards(facts, *rate, |card| &mut card.memory_bandwidth_bytes_per_s)
        }
        Change::Link(rate) => of_cards(facts, *rate, |card| &mut card.link_bytes_per_s),
        Change::Threads(threads) => {
            let cpu = &mut facts.cpu;
            let was = shown(&cpu.usable_threads, u64::to_string);
            cpu.usable_threads = Fact::assumed(*threads, DETAIL);
            cpu.physical_cores = Fact::assumed(*threads, DETAIL);
            (was, threads.to_string())
        }
    }
}

/// A rate of every card.
fn of_cards(
    facts: &mut Facts,
    rate: f64,
    field: impl Fn(&mut GpuFact) -> &mut Fact<f64>,
) -> (String, String) {
    let mut was = None;
    for list in [&mut facts.gpus.nvidia, &mut facts.gpus.others] {
        *list = std::mem::take(list).map(|mut cards| {
            for card in &mut cards {
                let fact = field(card);
                was.get_or_insert_with(|| shown(fact, |&rate| Rate(rate).to_string()));
                *fact = Fact::assumed(rate, DETAIL);
            }
            cards
        });
    }
    (was.unwrap_or_else(|| "no card".to_owned()), Rate(rate).to_string())
}

/// A card with all of its memory free, in the place of one that is there or of none.
fn card(at: usize, bytes: u64, present: Option<&GpuFact>) -> GpuFact {
    let link = present.map_or_else(Fact::default, |card| card.link_bytes_per_s.clone());
    GpuFact {
        index: at as u32,
        name: Fact::assumed(format!("a card of {}", Bytes(bytes)), DETAIL),
        memory_total_bytes: Fact::assumed(bytes, DETAIL),
        memory_free_bytes: Fact::assumed(bytes, DETAIL),
        link_bytes_per_s: link,
        ..GpuFact::default()
    }
}

fn totals(cards: &[GpuFact]) -> Vec<u64> {
    cards.iter().map(|card| card.memory_total_bytes.value().copied().unwrap_or(0)).collect()
}

/// `none`, `24.00 GB`, `4 x 48.00 GB`, or each one where they differ.
fn cards_in_words(cards: &[u64]) -> String {
    match cards {
        [] => "none".to_owned(),
        [first, rest @ ..] if rest.iter().all(|card| card == first) => match rest.len() {
            0 => Bytes(*first).to_string(),
            n => format!("{} x {}", n + 1, Bytes(*first)),
        },
        _ => cards.iter().map(|&card| Bytes(card).to_string()).collect::<Vec<_>>().join(" + "),
    }
}

fn shown<T>(fact: &Fact<T>, show: impl Fn(&T) -> String) -> String {
    fact.value().map_or_else(|| "unknown".to_owned(), show)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierkeep_doctor::Source;

    fn read(text: &str) -> Result<WhatIf, WhatIfError> {
        text.parse()
    }

    #[test]
    fn changes_are_assumed_and_nothing_else_is_touched() {
        let mut facts = Facts::default();
        facts.memory.usable_bytes = Fact::read(24_000_000_000, "MemAvailable");
        facts.memory.swap_total_bytes = Fact::read(7, "SwapTotal");
        let before = facts.clone();
        let replaced = read("ram=64GB, disk=7GB/s,mem=60GB/s,cores=16").unwrap().apply(&mut facts);
        let shown: Vec<_> =
            replaced.iter().map(|r| (r.key, r.was.as_str(), r.is.as_str())).collect();
        assert_eq!(
            shown,
            [
                ("ram", "24.00 GB", "64.00 GB"),
                ("disk", "unknown", "7.0 GB/s"),
                ("mem", "unknown", "60.0 GB/s"),
                ("cores", "unknown", "16"),
            ]
        );
        assert_eq!(facts.memory.usable_bytes, Fact::assumed(64_000_000_000, "what if"));
        assert_eq!(facts.memory.limit, Fact::assumed(None, "what if"));
        assert_eq!(facts.disk.read.value().map(|r| r.bytes_per_s), Some(7e9));
        assert_eq!(facts.disk.read.source(), Source::Assumed);
        assert_eq!(facts.cpu.usable_threads.value(), Some(&16));
        assert_eq!(facts.memory.swap_total_bytes, before.memory.swap_total_bytes);
        assert_eq!((facts.gpus, facts.platform), (before.gpus, before.platform));
    }

    #[test]
    fn what_is_replaced_need_not_be_measured() {
        for (text, disk, memory) in [
            ("ram=64GB,cores=16,vram=24GB,vmem=900GB/s,link=25GB/s", false, false),
            ("disk=7GB/s", true, false),
            ("ram=64GB,mem=60GB/s", false, true),
            ("mem=60GB/s,disk=7GB/s", true, true),
        ] {
            let changes = read(text).unwrap();
            let replaces = (changes.replaces_disk(), changes.replaces_memory_speed());
            assert_eq!(replaces, (disk, memory), "{text}");
        }
    }

    #[test]
    fn cards_are_replaced_and_rates_reach_every_one() {
        let mut facts = Facts::default();
        facts.gpus.nvidia = Fact::read(
            vec![GpuFact {
                name: Fact::read("small".to_owned(), ""),
                memory_total_bytes: Fact::read(8_000_000_000, ""),
                link_bytes_per_s: Fact::estimated(16e9, ""),
                ..GpuFact::default()
            }],
            "",
        );
        // The rate is written before the cards that it is of.
        let replaced = read("vmem=900GB/s,vram=2x48GB").unwrap().apply(&mut facts);
        assert_eq!(replaced[0].was, "8.00 GB");
        assert_eq!(replaced[0].is, "2 x 48.00 GB");
        let cards = facts.gpus.nvidia.value().unwrap();
        assert_eq!(cards.len(), 2);
        assert_eq!(cards[1].memory_free_bytes.value(), Some(&48_000_000_000));
        assert_eq!(cards[1].memory_bandwidth_bytes_per_s.value(), Some(&900e9));
        assert_eq!(cards[0].link_bytes_per_s.value(), Some(&16e9), "the slot is the machine's");
        assert!(cards[1].link_bytes_per_s.is_unknown());
        let _ = read("vram=0").unwrap().apply(&mut facts);
        assert_eq!(facts.gpus.nvidia.value().map(Vec::len), Some(0));
    }

    #[test]
    fn cards_are_read_as_users_write_them() {
        const GB: u64 = 1_000_000_000;
        assert_eq!(cards("24GB"), Some(vec![24 * GB]));
        assert_eq!(cards("4x48GB"), Some(vec![48 * GB; 4]));
        assert_eq!(cards("24GB+2x8GB"), Some(vec![24 * GB, 8 * GB, 8 * GB]));
        assert_eq!(cards("0"), Some(Vec::new()));
        for bad in ["", "x", "0x48GB", "4x", "4x0", "90%", "65x1GB", "8GB+0", "-1x8GB"] {
            assert_eq!(cards(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_cannot_be_read_names_the_keys_and_an_example() {
        for (text, parts) in [
            ("rma=64GB", ["\"rma\"", "ram, vram, disk, mem, vmem, link, cores, threads", "4x48GB"]),
            ("ram", ["\"ram\"", "KEY=VALUE", "disk=7GB/s"]),
            ("", ["\"\"", "KEY=VALUE", "threads"]),
            ("disk=7GB", ["disk=7GB", "expected", "7GB/s"]),
            ("ram=90%", ["ram=90%", "expected", "64GB"]),
            ("cores=0", ["cores=0", "1 to 4096", "expected"]),
            ("cores=8,threads=4", ["cores", "twice", "which"]),
        ] {
            let error = read(text).unwrap_err().to_string();
            for part in parts {
                assert!(error.contains(part), "{text}: {error}");
            }
        }
    }
}

//! Snapshots of what a person sees: every view at 80 and 120 columns, with and without colour.
//! Owns the fixtures too: figures come from them, never from the machine that runs the test.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test stops where something is wrong")]

use std::path::{Path, PathBuf};

use tierkeep_doctor::{DiskReadSpeed, Fact, Facts, GpuFact};
use tierkeep_plans::catalogue::Catalogue;

use super::Style;

/// The styles that every view is looked at in.
const STYLES: [(&str, Style); 4] = [
    ("80 columns", Style { width: 80, colour: false }),
    ("120 columns", Style { width: 120, colour: false }),
    ("80 columns, colour", Style { width: 80, colour: true }),
    ("120 columns, colour", Style { width: 120, colour: true }),
];

/// Compares a view in every style with `snapshots/NAME.snap`, and checks what must hold of any view:
/// no line is wider than the style but for a long path, none ends in blanks, and colour changes no character.
pub(crate) fn snapshot(name: &str, view: impl Fn(Style) -> String) {
    let mut all = String::new();
    for (title, style) in STYLES {
        let text = view(style);
        let plain = without_colour(&text);
        for line in plain.lines() {
            let width = textwrap::core::display_width(line);
            let fits = width <= usize::from(style.width) || ends_in_a_long_path(line, style);
            assert!(fits, "{name}, {title}: {width} wide: {line:?}");
            assert_eq!(line.trim_end(), line, "{name}, {title}");
        }
        if style.colour {
            assert_eq!(plain, view(Style { colour: false, ..style }), "{name}, {title}");
        } else {
            assert_eq!(plain, text, "{name}, {title}: escapes without colour");
        }
        all += &format!("==== {title}\n{}\n", text.replace('\u{1b}', "␛"));
    }
    insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true }, {
        insta::assert_snapshot!(name, all);
    });
}

/// Whether a line is wide only because it ends in a path that cannot be broken.
fn ends_in_a_long_path(line: &str, style: Style) -> bool {
    let width = textwrap::core::display_width;
    let half = usize::from(style.width) / 2;
    let last = line.rsplit(' ').next().unwrap_or_default();
    last.contains('/') && width(last) > half && width(line) - width(last) <= half
}

/// Text without its escapes for colour.
fn without_colour(text: &str) -> String {
    let mut plain = String::new();
    let mut parts = text.split("\u{1b}[");
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        match part.split_once('m') {
            Some((_, rest)) => plain.push_str(rest),
            None => panic!("an escape that is no colour: {part:?}"),
        }
    }
    plain
}

/// The small model of `examples/`, as if it were elsewhere.
pub(crate) fn nano() -> Catalogue {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/glm-nano");
    let mut model = Catalogue::open(&folder).unwrap();
    model.directory = PathBuf::from("/models/glm-nano");
    model
}

/// A machine without graphics cards.
pub(crate) fn machine() -> Facts {
    let mut facts = Facts::default();
    facts.cpu.model_name = Fact::read("A Processor of 8 Cores".to_owned(), "/proc/cpuinfo");
    facts.cpu.usable_threads = Fact::read(8, "one for each physical core");
    let sets = ["avx2", "f16c"].map(str::to_owned);
    facts.cpu.instruction_sets = Fact::read(sets.into(), "tried");
    facts.memory.usable_bytes = Fact::read(24_000_000_000, "MemAvailable of /proc/meminfo");
    facts.memory.limit = Fact::read(None, "no control group has a limit");
    facts.memory.read_bandwidth_bytes_per_s = Fact::measured(40e9, "median sum over 1 GiB");
    let read = DiskReadSpeed { bytes_per_s: 2.5e9, read_bytes: 1 << 20, queue_depth: 8 };
    facts.disk.read = Fact::measured(read.clone(), "past the page cache");
    facts.disk.reads = Fact::measured(vec![read], "past the page cache");
    facts.disk.device = Fact::read("nvme0n1".to_owned(), "");
    facts.disk.filesystem = Fact::read("ext4".to_owned(), "");
    facts
}

/// The same with a card, and another one that is busy.
pub(crate) fn workstation() -> Facts {
    let card = |index: u32, free: u64| GpuFact {
        index,
        name: Fact::read("A Card of 8 GB".to_owned(), ""),
        memory_total_bytes: Fact::read(8_000_000_000, ""),
        memory_free_bytes: Fact::read(free, ""),
        memory_bandwidth_bytes_per_s: Fact::estimated(300e9, "clock times width"),
        link_bytes_per_s: Fact::estimated(12e9, "PCIe 3.0 x16"),
        driver_version: Fact::read("550.54".to_owned(), ""),
        ..GpuFact::default()
    };
    let mut facts = machine();
    let cards = vec![card(0, 7_500_000_000), card(1, 100_000_000)];
    facts.gpus.nvidia = Fact::read(cards, "NVIDIA management library");
    facts.gpus.others = Fact::read(Vec::new(), "");
    facts
}

//! Saved facts: what is written is read back, what is wrong is refused by name and line, and what a
//! path leads to is respected.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;
use tierkeep_doctor::{
    CoreKind, CoreSpeed, Fact, Facts, GpuFact, GpuVendor, MAX_FILE_BYTES, NumaNode, Probe,
    SavedFactsError, parse as parsers,
};

fn parse(text: &str) -> Result<Facts, SavedFactsError> {
    Facts::from_toml(text, Path::new("machine.toml"))
}

fn refusal(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

fn sample() -> Facts {
    let mut facts = Facts::default();
    facts.cpu.model_name = Fact::read("Some \"CPU\"\nof two lines".to_owned(), "x");
    facts.cpu.core_kinds = Fact::read(
        vec![
            CoreKind { kind: CoreSpeed::Fast, cores: 8, threads: 16, cpus: "0-15".to_owned() },
            CoreKind { kind: CoreSpeed::Slow, cores: 12, threads: 12, cpus: "16-27".to_owned() },
        ],
        "x",
    );
    facts.cpu.numa_nodes =
        Fact::read(vec![NumaNode { id: 0, cpus: "0-27".to_owned(), memory_bytes: None }], "x");
    facts.cpu.quota_cores = Fact::read(Some(2.5), "x");
    facts.memory.read_bandwidth_bytes_per_s = Fact::measured(2e10, "x");
    facts.memory.locked_limit_bytes = Fact::read(None, "unlimited");
    let card = |index| GpuFact {
        index,
        name: Fact::read("L40S".to_owned(), "x"),
        memory_total_bytes: Fact::read(48_000_000_000, "x"),
        memory_free_bytes: Fact::read(46_250_000_000, "x"),
        link_generation: Fact::read(4, "x"),
        ..GpuFact::default()
    };
    facts.gpus.nvidia = Fact::read(vec![card(0), card(1)], "x");
    facts
}

#[test]
fn a_file_is_readable_and_round_trips() {
    let facts = sample();
    let text = facts.to_toml().unwrap();
    assert!(text.starts_with("# Facts about one machine"), "{text}");
    assert!(text.contains("\n[cpu]\n") && text.contains("\n[gpus]\n"), "{text}");
    let one = "locked_limit_bytes = { source = \"read\", detail = \"unlimited\" }";
    assert!(text.contains(one), "{text}");
    // Each card is a line of its own.
    assert_eq!(text.lines().filter(|line| line.contains("L40S")).count(), 2, "{text}");
    assert_eq!(parse(&text).unwrap(), facts);
    assert_eq!(parse(&Facts::default().to_toml().unwrap()).unwrap(), Facts::default());
    let live = Probe::new().measure(false).run(&mut |_| {});
    assert_eq!(parse(&live.to_toml().unwrap()).unwrap(), live);
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    let of = |rest: &str| format!("schema_version = 1\n\n[memory]\n{rest}\n");
    let message =
        refusal(&of("total_bytes = { source = \"read\", value = 3 }\nuseable_bytes = { }"));
    assert!(message.starts_with("machine.toml:5: "), "{message}");
    assert!(message.contains("useable_bytes") && message.contains("usable_bytes"), "{message}");
    let message = refusal(&of("total_bytes = { source = \"guessed\", value = 3 }"));
    assert!(message.starts_with("machine.toml:4: ") && message.contains("guessed"), "{message}");
    let message = refusal(&of("total_bytes = { source = \"read\", detial = \"x\", value = 3 }"));
    assert!(message.starts_with("machine.toml:4: ") && message.contains("detial"), "{message}");
    let message = refusal(&of("total_bytes = { source = \"read\", value = \"3 GB\" }"));
    assert!(message.starts_with("machine.toml:4: ") && message.contains("3 GB"), "{message}");
    assert!(refusal(&of("total_bytes = 3")).starts_with("machine.toml:4: "));
    assert!(refusal(&of("total_bytes = ")).starts_with("machine.toml:4: "));
    assert!(refusal("[memory]\n").contains("schema_version = 1"));
    // Another version is that, not a list of unknown fields.
    let message = refusal("schema_version = 7\n[memory]\nnew = 1\n");
    assert!(message.contains("schema_version is 7") && message.contains("reads 1"), "{message}");
    assert!(matches!(parse("schema_version = \"1\"\n"), Err(SavedFactsError::Invalid { .. })));
}

#[test]
fn impossible_values_are_refused() {
    let fact = |value: &str| format!("{{ source = \"assumed\", value = {value} }}");
    for (part, field, value) in [
        ("memory", "read_bandwidth_bytes_per_s", "0.0"),
        ("memory", "read_bandwidth_one_thread_bytes_per_s", "nan"),
        ("cpu", "quota_cores", "-1.0"),
        ("cpu", "usable_threads", "0"),
        ("disk", "read", "{ bytes_per_s = inf, read_bytes = 1, queue_depth = 1 }"),
        ("disk", "read", "{ bytes_per_s = 1e9, read_bytes = 1, queue_depth = 0 }"),
        ("disk", "reads", "[{ bytes_per_s = 1e9, read_bytes = 0, queue_depth = 1 }]"),
        ("gpus", "others", "[{ vendor = \"nvidia\" }]"),
        ("gpus", "nvidia", "[{ vendor = \"amd\" }]"),
        (
            "gpus",
            "nvidia",
            "[{ memory_total_bytes = { source = \"read\", value = 3 }, \
             memory_free_bytes = { source = \"read\", value = 4 } }]",
        ),
    ] {
        let text = format!("schema_version = 1\n[{part}]\n{field} = {}\n", fact(value));
        let error = parse(&text).unwrap_err();
        assert!(matches!(error, SavedFactsError::Impossible { .. }), "{field} {value}: {error}");
        assert!(error.to_string().contains(&format!("{part}.{field}")), "{error}");
    }
    let text = format!("schema_version = 1\n[cpu]\nusable_threads = {}\n", fact("1"));
    assert_eq!(parse(&text).unwrap().cpu.usable_threads, Fact::assumed(1, ""));
    let other = "schema_version = 1\n[gpus]\nothers = { source = \"read\", value = [{ vendor = \"amd\" }] }";
    assert_eq!(parse(other).unwrap().gpus.others.value().unwrap()[0].vendor, GpuVendor::Amd);
}

#[test]
fn numbers_beyond_toml_are_an_error() {
    let mut facts = Facts::default();
    facts.memory.total_bytes = Fact::read(u64::MAX, "x");
    assert!(matches!(facts.to_toml(), Err(SavedFactsError::Unsupported { .. })));
}

#[test]
fn files_that_are_too_large_or_endless_are_refused() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("large");
    fs::File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
    assert!(matches!(Facts::read(&path), Err(SavedFactsError::TooLarge { .. })));
    assert!(matches!(Facts::read(Path::new("/dev/zero")), Err(SavedFactsError::TooLarge { .. })));
    let error = Facts::read(&folder.path().join("none")).unwrap_err();
    assert!(error.to_string().contains("cannot read machine facts from"), "{error}");
}

#[test]
fn a_regular_file_is_replaced_and_links_stay_links() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    sample().write(&at("new")).unwrap();
    assert_eq!(Facts::read(&at("new")).unwrap(), sample());
    fs::set_permissions(at("new"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("new", at("link")).unwrap();
    Facts::default().write(&at("link")).unwrap();
    assert!(at("link").is_symlink());
    assert_eq!(Facts::read(&at("new")).unwrap(), Facts::default());
    assert_eq!(fs::metadata(at("new")).unwrap().permissions().mode() & 0o777, 0o640);
    // A link to what is not there yet, and a circle.
    fs::create_dir(at("sub")).unwrap();
    symlink("sub/later", at("dangling")).unwrap();
    sample().write(&at("dangling")).unwrap();
    assert!(at("dangling").is_symlink() && !at("sub/later").is_symlink());
    assert_eq!(Facts::read(&at("sub/later")).unwrap(), sample());
    symlink("circle", at("circle")).unwrap();
    assert!(sample().write(&at("circle")).is_err());
    assert!(sample().write(&at("sub")).is_err());
    assert!(sample().write(&at("none/x")).is_err());
    // Nothing is left behind, whatever happened.
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["circle", "dangling", "link", "new", "sub"]);
}

#[test]
fn devices_are_written_into_and_stay_devices() {
    sample().write(Path::new("/dev/null")).unwrap();
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    let full = Path::new("/dev/full");
    if full.exists() {
        let error = sample().write(full).unwrap_err();
        assert!(error.to_string().contains("/dev/full"), "{error}");
        assert!(fs::metadata(full).unwrap().file_type().is_char_device());
    }
    let folder = TempDir::new().unwrap();
    let link = folder.path().join("link");
    symlink("/dev/null", &link).unwrap();
    sample().write(&link).unwrap();
    assert!(link.is_symlink());
}

proptest! {
    #[test]
    fn any_text_and_number_round_trips(
        text in "\\PC*|(.|\n|\"|'|\\\\){0,12}", bytes in 0_u64..=i64::MAX as u64,
        rate in 1_u64..1 << 52,
    ) {
        let mut facts = sample();
        facts.cpu.model_name = Fact::read(text.clone(), text.clone());
        facts.disk.path = Fact::unknown(text);
        facts.memory.total_bytes = Fact::read(bytes, "x");
        facts.memory.read_bandwidth_bytes_per_s = Fact::measured(rate as f64, "x");
        prop_assert_eq!(parse(&facts.to_toml().unwrap()).unwrap(), facts);
    }

    #[test]
    fn no_text_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn a_changed_file_is_facts_or_a_refusal(place in any::<prop::sample::Index>(), byte in 32_u8..127) {
        let mut bytes = sample().to_toml().unwrap().into_bytes();
        let place = place.index(bytes.len());
        bytes[place] = byte;
        let _ = parse(&String::from_utf8_lossy(&bytes));
    }
}

fn tree(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

#[test]
fn the_machines_in_examples_are_what_they_say() {
    let mut count = 0;
    for entry in fs::read_dir(tree("examples/machines")).unwrap() {
        let facts = Facts::read(&entry.unwrap().path()).unwrap();
        // Nobody measured them.
        let text = facts.to_toml().unwrap();
        for source in ["measured", "read", "estimated"] {
            assert!(!text.contains(&format!("source = \"{source}\"")), "{source}");
        }
        count += 1;
    }
    assert_eq!(count, 2);
    let server = Facts::read(&tree("examples/machines/epyc-200gb-4xl40s.toml")).unwrap();
    assert_eq!(server.memory.usable_bytes.value(), Some(&200_000_000_000));
    let cards = server.gpus.nvidia.value().unwrap();
    let free = cards.iter().filter_map(|card| card.memory_free_bytes.value()).sum::<u64>();
    assert_eq!((cards.len(), free), (4, 185_000_000_000));
    let link = parsers::link_bytes_per_s(4, 16);
    assert!(cards.iter().all(|card| card.link_bytes_per_s.value().copied() == link));
    assert!(cards.iter().enumerate().all(|(place, card)| card.index as usize == place));
}

/// The names of a table's first column, in backticks.
fn documented(page: &str) -> Vec<&str> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.filter_map(|row| row.split(" | ").next());
    cells.flat_map(|cell| cell.split(", ")).map(|name| name.trim_matches('`')).collect()
}

#[test]
fn the_page_names_every_field_and_its_sample_is_read() {
    let page = fs::read_to_string(tree("docs/machine-facts.md")).unwrap();
    let sample = page.rsplit("```toml\n").next().unwrap().split("```").next().unwrap();
    let facts = parse(sample).unwrap();
    assert_eq!(facts.gpus.nvidia.value().map(Vec::len), Some(4));
    let named = documented(&page);
    let json = serde_json::to_value(sample_of_all()).unwrap();
    for part in ["cpu", "memory", "disk", "platform"] {
        for field in json[part].as_object().unwrap().keys() {
            assert!(named.contains(&field.as_str()), "{part}.{field} is not in the page");
        }
    }
    for field in json["gpus"]["nvidia"]["value"][0].as_object().unwrap().keys() {
        assert!(named.contains(&field.as_str()), "{field} of a GPU is not in the page");
    }
}

fn sample_of_all() -> Facts {
    let mut facts = Facts::default();
    facts.gpus.nvidia = Fact::read(vec![GpuFact::default()], "x");
    facts
}

//! The tree against its own rules: who may depend on whom, who may print, exit or read the
//! environment, what every file and manifest begins with. Each rule is a function over text, and
//! each is shown to fail on text that breaks it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use std::fs;
use std::path::{Path, PathBuf};

/// Our crates and which of them each may depend on.
const EDGES: &[(&str, &[&str])] = &[
    ("tierkeep", &["tierkeep-engine", "tierkeep-plans", "tierkeep-doctor", "tierkeep-hub"]),
    (
        "tierkeep-engine",
        &["tierkeep-plans", "tierkeep-kernels", "tierkeep-mapping", "tierkeep-cuda"],
    ),
    ("tierkeep-plans", &["tierkeep-doctor"]),
    ("tierkeep-doctor", &[]),
    ("tierkeep-hub", &[]),
    ("tierkeep-kernels", &[]),
    ("tierkeep-mapping", &[]),
    ("tierkeep-cuda", &[]),
    // A workspace of its own: nothing depends on it.
    ("tierkeep-fuzz", &["tierkeep-plans", "tierkeep-doctor", "tierkeep-hub"]),
];

/// The same for tests alone: the engine's tests make machine facts.
const TEST_EDGES: &[(&str, &[&str])] = &[("tierkeep-engine", &["tierkeep-doctor"])];

/// Longest source file, lines.
const LINE_CAP: usize = 700;

/// Crate roots in which no unsafe code may ever be.
const SAFE_ROOTS: [&str; 5] =
    ["src/main.rs", "doctor/src/lib.rs", "plans/src/lib.rs", "hub/src/lib.rs", "engine/src/lib.rs"];

/// What of doctor the plans crate may name: types of facts.
const FACT_TYPES: [&str; 20] = [
    "Fact",
    "Facts",
    "Source",
    "Cache",
    "CacheKind",
    "CgroupLimit",
    "CgroupVersion",
    "CoreKind",
    "CoreSpeed",
    "CpuFacts",
    "DiskFacts",
    "DiskReadSpeed",
    "FilesystemKind",
    "GpuFact",
    "GpuFacts",
    "GpuVendor",
    "HugePagePool",
    "MemoryFacts",
    "NumaNode",
    "PlatformFacts",
];

/// Calls that belong to `main` and the render layer, as they are written.
const OUTER_CALLS: [&str; 11] = [
    "println!",
    "print!",
    "dbg!",
    "stdout()",
    "stderr()",
    "process::exit",
    "env::var",
    "env::vars",
    "env::var_os",
    "env::set_var",
    "env::remove_var",
];

/// Folders on developers' machines, written so that this file does not name them itself.
const PRIVATE_FOLDERS: [&str; 2] = [concat!("/wo", "rk/"), concat!("/ro", "ot/")];

// ---- rules over text -----------------------------------------------------------------------------

/// A dependency line of a manifest.
#[derive(Debug, PartialEq)]
struct Dependency {
    name: String,
    is_for_tests: bool,
    has_reason: bool,
}

/// The name of a manifest's package.
fn package_name(manifest: &str) -> Option<&str> {
    let package = manifest.split("[package]").nth(1)?;
    let line = package.lines().find(|line| line.starts_with("name"))?;
    line.split('"').nth(1)
}

/// Every dependency of a manifest. A reason is a comment on the line or above it; one comment may
/// stand above two lines.
fn dependencies(manifest: &str) -> Vec<Dependency> {
    let mut found = Vec::new();
    let mut section = "";
    let mut covered = 0;
    for line in manifest.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.split(']').next().unwrap_or("");
            covered = 0;
        }
        if line.starts_with('#') {
            covered = 2;
            continue;
        }
        let (kind, table) = dependency_kind(section);
        let Some(kind) = kind else { continue };
        let key: &str = match table {
            Some(name) if line.starts_with('[') => name,
            Some(_) => continue,
            None => line.split(['.', '=', ' ']).next().unwrap_or(""),
        };
        if key.is_empty() || key.starts_with(['[', '"', ']', '}']) {
            continue;
        }
        // A dependency may go by another name here than its package has.
        let renamed = line.split_once("package").and_then(|(_, rest)| rest.split('"').nth(1));
        found.push(Dependency {
            name: renamed.unwrap_or(key).to_owned(),
            is_for_tests: kind == "dev-dependencies",
            has_reason: covered > 0 || line.contains(" # "),
        });
        covered = i32::max(covered - 1, 0);
    }
    found
}

/// Of a section's name: which kind of dependencies it lists, and the one that it is about if it is
/// about one.
fn dependency_kind(section: &str) -> (Option<&str>, Option<&str>) {
    let kinds = ["dependencies", "dev-dependencies", "build-dependencies"];
    let parts: Vec<&str> = section.rsplit('.').collect();
    let is_kind = |part: &&str| kinds.contains(part);
    if section.starts_with("workspace") {
        return (None, None);
    }
    match parts.as_slice() {
        [kind, ..] if is_kind(kind) => (Some(kind), None),
        [name, kind, ..] if is_kind(kind) => (Some(kind), Some(name)),
        _ => (None, None),
    }
}

fn is_ours(name: &str) -> bool {
    name == "tierkeep" || name.starts_with("tierkeep-")
}

/// Edges of a manifest that DESIGN.md does not have.
fn forbidden_edges(manifest: &str) -> Vec<String> {
    let name = package_name(manifest).unwrap_or("a package without a name");
    let of = |edges: &[(&str, &'static [&'static str])]| {
        edges.iter().find(|(from, _)| *from == name).map(|(_, to)| *to)
    };
    let Some(allowed) = of(EDGES) else {
        return vec![format!("{name} is not in the table of crates")];
    };
    let in_tests = of(TEST_EDGES).unwrap_or(&[]);
    dependencies(manifest)
        .iter()
        .filter(|d| is_ours(&d.name))
        .filter(|d| {
            let name = d.name.as_str();
            !(allowed.contains(&name) || d.is_for_tests && in_tests.contains(&name))
        })
        .map(|d| format!("{name} -> {}", d.name))
        .collect()
}

/// Outside dependencies that do not say why they are there.
fn unexplained(manifest: &str) -> Vec<String> {
    dependencies(manifest)
        .into_iter()
        .filter(|d| !d.has_reason && !is_ours(&d.name))
        .map(|d| d.name)
        .collect()
}

/// Source without comments, and without the test module that ends a file.
fn code(source: &str) -> String {
    let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let mut kept = String::new();
    let mut pending = false;
    for line in lines {
        // Only a module with a body ends the code; one in a file of its own is one line.
        if pending && line.starts_with("mod ") && line.ends_with('{') {
            break;
        }
        pending = line == "#[cfg(test)]" || pending && line.starts_with("#[");
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}

/// Lines of a source that call what only `main` and the render layer may.
fn outer_calls(source: &str) -> Vec<String> {
    code(source)
        .lines()
        .filter(|line| {
            OUTER_CALLS.iter().any(|call| {
                line.match_indices(call).any(|(at, _)| {
                    let before = line[..at].chars().next_back();
                    // `eprint!` and `eprintln!` print as well; `my_print!` does not.
                    let before = if before == Some('e') { None } else { before };
                    before.is_none_or(|c| !c.is_alphanumeric() && c != '_')
                })
            })
        })
        .map(|line| line.trim().to_owned())
        .collect()
}

/// Names of doctor that are not types of facts.
fn beyond_facts(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let code = code(source);
    for (at, path) in code.match_indices("tierkeep_doctor") {
        let rest = &code[at + path.len()..];
        let names = match rest.strip_prefix("::") {
            Some(rest) => match rest.strip_prefix('{') {
                Some(list) => list.split('}').next().unwrap_or(""),
                None if rest.starts_with('*') => "*",
                None => rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(""),
            },
            // The crate under another name, or as a whole.
            None => "the crate itself",
        };
        found.extend(
            names
                .split(',')
                .map(str::trim)
                .filter(|name| !name.is_empty() && !FACT_TYPES.contains(name))
                .map(str::to_owned),
        );
    }
    found
}

fn has_head_comment(source: &str) -> bool {
    source.starts_with("//!")
}

fn forbids_unsafe(source: &str) -> bool {
    source.lines().any(|line| line == "#![forbid(unsafe_code)]")
}

/// Lines that name a folder of a developer's machine.
fn private_paths(text: &str) -> Vec<String> {
    let names_one = |line: &str| {
        PRIVATE_FOLDERS.iter().any(|folder| {
            line.match_indices(folder).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                before.is_none_or(|c| !c.is_alphanumeric() && !"_-./".contains(c))
            })
        })
    };
    text.lines().filter(|line| names_one(line)).map(|line| line.trim().to_owned()).collect()
}

// ---- the tree ------------------------------------------------------------------------------------

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Files of the tree whose names end so, by path from the root, with their text. Build output and
/// hidden folders are left out, `.ci` apart.
fn files(ends: &[&str]) -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_left_out = name == "target" || name.starts_with('.') && name != ".ci";
            if is_left_out || path.is_symlink() {
                continue;
            }
            if path.is_dir() { walk(&path, found) } else { found.push(path) }
        }
    }
    let root = root();
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    paths.sort();
    let relative = |path: &Path| {
        path.strip_prefix(&root).unwrap().to_string_lossy().replace(std::path::MAIN_SEPARATOR, "/")
    };
    paths
        .iter()
        .map(|path| (relative(path), path))
        .filter(|(name, _)| ends.is_empty() || ends.iter().any(|end| name.ends_with(end)))
        .filter_map(|(name, path)| Some((name, fs::read_to_string(path).ok()?)))
        .collect()
}

fn sources() -> Vec<(String, String)> {
    let sources = files(&[".rs"]);
    assert!(sources.len() > 50, "the tree was not found: {} sources", sources.len());
    sources
}

fn manifests() -> Vec<(String, String)> {
    let manifests = files(&["Cargo.toml"]);
    assert!(manifests.len() >= 5, "{} manifests", manifests.len());
    manifests
}

/// Whether a source is no part of what is shipped.
fn is_aside(path: &str) -> bool {
    let in_folder = |folder: &str| {
        path.starts_with(&format!("{folder}/")) || path.contains(&format!("/{folder}/"))
    };
    in_folder("tests")
        || in_folder("examples")
        || in_folder("benches")
        || path.ends_with("_tests.rs")
}

fn may_call_outside(path: &str) -> bool {
    path == "src/main.rs" || path == "src/render.rs" || path.starts_with("src/render/")
}

/// Fails with everything that a rule found.
fn nothing(rule: &str, found: impl IntoIterator<Item = (String, Vec<String>)>) {
    let found: Vec<String> = found
        .into_iter()
        .flat_map(|(path, what)| what.into_iter().map(move |what| format!("{path}: {what}")))
        .collect();
    assert!(found.is_empty(), "{rule}:\n{}", found.join("\n"));
}

#[test]
fn dependencies_point_one_way() {
    let found = manifests().into_iter().map(|(path, text)| (path, forbidden_edges(&text)));
    nothing("edges that DESIGN.md does not have", found);
}

#[test]
fn every_dependency_says_why() {
    let found = manifests().into_iter().map(|(path, text)| (path, unexplained(&text)));
    nothing("dependencies without a reason beside them", found);
}

#[test]
fn plans_knows_machines_by_their_facts_alone() {
    let of_plans = sources().into_iter().filter(|(path, _)| path.starts_with("plans/src/"));
    nothing(
        "names of doctor that are not types of facts",
        of_plans.map(|(path, text)| (path, beyond_facts(&text))),
    );
}

#[test]
fn only_main_and_render_print_exit_and_read_the_environment() {
    let inner =
        sources().into_iter().filter(|(path, _)| !is_aside(path) && !may_call_outside(path));
    nothing(
        "calls that belong to src/main.rs or src/render",
        inner.map(|(path, text)| (path, outer_calls(&text))),
    );
}

#[test]
fn unsafe_code_stays_forbidden() {
    let sources = sources();
    for root in SAFE_ROOTS {
        let source = sources.iter().find(|(path, _)| path == root);
        assert!(source.is_some_and(|(_, text)| forbids_unsafe(text)), "{root}");
    }
}

#[test]
fn every_source_says_what_it_owns_and_is_short() {
    let found = sources().into_iter().map(|(path, text)| {
        let mut what = Vec::new();
        if !has_head_comment(&text) {
            what.push("does not begin with a //! comment".to_owned());
        }
        let n_lines = text.lines().count();
        if n_lines > LINE_CAP {
            what.push(format!("{n_lines} lines, more than {LINE_CAP}"));
        }
        (path, what)
    });
    nothing("sources", found);
}

#[test]
fn no_file_names_a_folder_of_a_developer() {
    let found = files(&[]).into_iter().map(|(path, text)| (path, private_paths(&text)));
    nothing("paths of a developer's machine", found);
}

// ---- the rules can fail --------------------------------------------------------------------------

#[test]
fn a_wrong_edge_is_found_however_it_is_written() {
    let manifest = |name: &str, rest: &str| format!("[package]\nname = \"{name}\"\n\n{rest}\n");
    let wrong = [
        ("tierkeep-doctor", "[dependencies]\ntierkeep-plans.workspace = true", "tierkeep-plans"),
        (
            "tierkeep-plans",
            "[dependencies]\ntierkeep-engine = { path = \"../engine\" }",
            "tierkeep-engine",
        ),
        ("tierkeep-engine", "[dependencies]\ntierkeep-doctor.workspace = true", "tierkeep-doctor"),
        (
            "tierkeep-kernels",
            "[dev-dependencies]\ntierkeep-plans.workspace = true",
            "tierkeep-plans",
        ),
        ("tierkeep-plans", "[build-dependencies]\ntierkeep-kernels = \"1\"", "tierkeep-kernels"),
        ("tierkeep-plans", "[target.'cfg(unix)'.dependencies]\ntierkeep = \"1\"", "tierkeep"),
        (
            "tierkeep-doctor",
            "[dependencies.tierkeep-engine]\npath = \"../engine\"",
            "tierkeep-engine",
        ),
        (
            "tierkeep",
            "[dependencies]\nk = { package = \"tierkeep-kernels\", path = \"k\" }",
            "tierkeep-kernels",
        ),
        ("tierkeep-server", "", "table of crates"),
    ];
    for (name, rest, expected) in wrong {
        let found = forbidden_edges(&manifest(name, rest));
        assert!(found.len() == 1 && found[0].contains(expected), "{name} {rest}: {found:?}");
    }
    let right = [
        ("tierkeep-engine", "[dev-dependencies]\ntierkeep-doctor.workspace = true"),
        ("tierkeep-engine", "[dependencies]\ntierkeep-plans.workspace = true\nserde = \"1\""),
        ("tierkeep", "[workspace.dependencies]\ntierkeep-kernels = { path = \"k\" }"),
    ];
    for (name, rest) in right {
        assert_eq!(forbidden_edges(&manifest(name, rest)), Vec::<String>::new(), "{rest}");
    }
}

#[test]
fn a_dependency_without_a_reason_is_found() {
    let manifest = "[dependencies]\na = \"1\" # why\nb = { version = \"1\", features = [\"x\"] }\n\
        # why\nc = \"1\"\nd = \"1\"\ne = \"1\"\ntierkeep-plans.workspace = true\n\
        [dependencies.f]\nversion = \"1\"\n[lints]\nworkspace = true\n";
    assert_eq!(unexplained(manifest), ["b", "e", "f"]);
}

#[test]
fn a_call_from_the_inside_is_found() {
    let wrong = [
        "println!(\"x\");",
        "    eprintln!();",
        "eprint!(\"x\")",
        "std::print!(\"x\")",
        "dbg!(x)",
        "std::process::exit(1)",
        "let x = std::env::var(\"X\");",
        "for (k, v) in env::vars() {}",
        "std::env::var_os(\"X\")",
        "writeln!(io::stdout(), \"x\")",
        "#[cfg(test)]\nmod tests;\nprintln!()",
        "#[cfg(test)]\nfn f() {}\nprintln!()",
    ];
    for source in wrong {
        assert_eq!(outer_calls(source).len(), 1, "{source}");
    }
    let right = [
        "/// Use println! for that.",
        "writeln!(f, \"x\")",
        "fingerprint!(x)",
        "std::process::id()",
        "env!(\"CARGO_PKG_VERSION\")",
        "std::env::consts::OS",
        "fn f() {}\n\n#[cfg(test)]\nmod tests {\n    println!();\n}",
    ];
    for source in right {
        assert_eq!(outer_calls(source), Vec::<String>::new(), "{source}");
    }
    assert!(!is_aside("engine/src/store.rs") && !is_aside("src/latests.rs"));
    assert!(is_aside("engine/src/store_tests.rs") && is_aside("plans/tests/support/mod.rs"));
    assert!(may_call_outside("src/render/plan.rs") && !may_call_outside("src/commands/render.rs"));
}

#[test]
fn a_use_of_doctor_beyond_facts_is_found() {
    let wrong = [
        ("use tierkeep_doctor::Probe;", "Probe"),
        ("use tierkeep_doctor::{Facts, process};", "process"),
        ("use tierkeep_doctor::{\n    Fact,\n    Probe,\n};", "Probe"),
        ("let m = tierkeep_doctor::process::memory();", "process"),
        ("use tierkeep_doctor::*;", "*"),
        ("use tierkeep_doctor as machine;", "the crate itself"),
    ];
    for (source, expected) in wrong {
        assert_eq!(beyond_facts(source), [expected], "{source}");
    }
    assert!(
        beyond_facts("use tierkeep_doctor::{Fact, Facts};\nfn f(g: &tierkeep_doctor::GpuFact) {}")
            .is_empty()
    );
}

#[test]
fn a_private_folder_is_found() {
    for folder in PRIVATE_FOLDERS {
        assert_eq!(private_paths(&format!("a\nsee {folder}main/x\n")).len(), 1);
        assert_eq!(private_paths(&format!("\"{folder}\"")).len(), 1);
        assert_eq!(private_paths(&format!("patch{folder} net.{folder} a/b{folder}")).len(), 0);
    }
}

#[test]
fn a_file_without_its_head_or_its_promise_is_found() {
    assert!(!has_head_comment("use std::fs;\n//! Late."));
    assert!(has_head_comment("//! Early.\n"));
    assert!(!forbids_unsafe("// #![forbid(unsafe_code)]"));
    assert!(!forbids_unsafe("#![deny(unsafe_code)]"));
}

//! Instruction sets.
//!
//! Owns which sets are looked for, what the processor advertises, and what a trial makes of that.
//! Refuses to promise a set that the operating system has not enabled: on the running machine the
//! standard library's detection decides, and only for what that does not know, and for recorded trees,
//! the flags of `/proc/cpuinfo`.

use crate::fact::Fact;
use crate::facts::FailedSet;
use crate::parse::CpuInfo;
use crate::tree::Tree;
use crate::trial::{self, TrialCommand, Verdict};

/// Instruction sets that kernels of this product use or will: Rust's name and Linux's flag.
const INSTRUCTION_SETS: &[(&str, &str)] = &[
    ("sse4.1", "sse4_1"),
    ("avx2", "avx2"),
    ("fma", "fma"),
    ("f16c", "f16c"),
    ("avx512f", "avx512f"),
    ("avx512bw", "avx512bw"),
    ("avx512dq", "avx512dq"),
    ("avx512vl", "avx512vl"),
    ("avx512vnni", "avx512_vnni"),
    ("avx512bf16", "avx512_bf16"),
    ("avxvnni", "avx_vnni"),
    ("amx-tile", "amx_tile"),
    ("amx-int8", "amx_int8"),
    ("amx-bf16", "amx_bf16"),
    ("neon", "asimd"),
    ("dotprod", "asimddp"),
    ("i8mm", "i8mm"),
];

/// What is known of instruction sets.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct InstructionSets {
    /// Those that work, or, without a command to try them with, that are advertised.
    pub(crate) usable: Fact<Vec<String>>,
    /// Those that are advertised and do not work.
    pub(crate) failed: Fact<Vec<FailedSet>>,
}

/// Tries what is advertised, if there is a command for it.
pub(crate) fn probe(
    tree: &Tree,
    info: &Result<CpuInfo, String>,
    command: Option<&TrialCommand>,
) -> InstructionSets {
    let (advertised, by) = match advertised(tree, info) {
        Ok(found) => found,
        Err(reason) => {
            let failed = Fact::unknown(reason.clone());
            return InstructionSets { usable: Fact::unknown(reason), failed };
        }
    };
    match command {
        Some(command) if tree.is_live() => {
            let verdicts = trial::run(command, &advertised);
            InstructionSets { usable: tried(&verdicts, by), failed: failed(&verdicts) }
        }
        Some(_) => {
            as_advertised(&advertised, by, "a recorded tree has no processor to try them on")
        }
        None => as_advertised(&advertised, by, "not tried"),
    }
}

fn as_advertised(sets: &[&'static str], by: &str, why: &str) -> InstructionSets {
    let sets = sets.iter().map(|set| (*set).to_owned()).collect();
    let usable = Fact::read(sets, format!("advertised by {by}, {why}"));
    InstructionSets { usable, failed: Fact::unknown(why) }
}

/// The sets that failed; unknown where none could be tried.
fn failed(verdicts: &[(&'static str, Verdict)]) -> Fact<Vec<FailedSet>> {
    let mut sets = Vec::new();
    let mut is_any_tried = false;
    for (set, verdict) in verdicts {
        match verdict {
            Verdict::Works => is_any_tried = true,
            Verdict::Fails(how) => {
                is_any_tried = true;
                sets.push(FailedSet { name: (*set).to_owned(), how: how.clone() });
            }
            Verdict::Untried(_) => {}
        }
    }
    if is_any_tried {
        Fact::measured(sets, "run in a child process")
    } else {
        Fact::unknown("no set could be tried")
    }
}

/// What is left of the advertised sets after their trial. A set that could not be tried stays, and is
/// named: it is as good as without a trial.
fn tried(verdicts: &[(&'static str, Verdict)], by: &str) -> Fact<Vec<String>> {
    let mut sets = Vec::new();
    let mut notes = Vec::new();
    let mut untried: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut is_any_tried = false;
    for (set, verdict) in verdicts {
        match verdict {
            Verdict::Works => {
                is_any_tried = true;
                sets.push((*set).to_owned());
            }
            Verdict::Fails(how) => {
                is_any_tried = true;
                notes.push(format!("{set} is advertised but {how}"));
            }
            Verdict::Untried(why) => {
                sets.push((*set).to_owned());
                // One reason is mostly that of all.
                match untried.last_mut().filter(|(reason, _)| reason == why) {
                    Some((_, sets)) => sets.push(set),
                    None => untried.push((why, vec![*set])),
                }
            }
        }
    }
    let mut detail = format!("advertised by {by}");
    if is_any_tried {
        detail = format!("run in a child process; {detail}");
    }
    notes.extend(untried.iter().map(|(why, sets)| format!("{} not tried: {why}", sets.join(", "))));
    for note in notes {
        detail.push_str(&format!("; {note}"));
    }
    if is_any_tried { Fact::measured(sets, detail) } else { Fact::read(sets, detail) }
}

/// What the processor and its operating system say that they support, and where.
fn advertised(
    tree: &Tree,
    info: &Result<CpuInfo, String>,
) -> Result<(Vec<&'static str>, &'static str), String> {
    let has =
        |flag: &str| info.as_ref().is_ok_and(|info| info.flags.iter().any(|found| found == flag));
    if tree.is_live()
        && let Some((detected, by)) = detected()
    {
        // The stable standard library cannot tell AMX yet; Linux lists it when it has enabled it.
        let is_there = |name: &str, flag: &str| {
            detected.iter().any(|(known, is_there)| *known == name && *is_there)
                || name.starts_with("amx") && has(flag)
        };
        let sets = INSTRUCTION_SETS.iter().filter(|(name, flag)| is_there(name, flag));
        return Ok((sets.map(|(name, _)| *name).collect(), by));
    }
    match info {
        Ok(info) if !info.flags.is_empty() => {
            let sets = INSTRUCTION_SETS.iter().filter(|(_, flag)| has(flag));
            Ok((sets.map(|(name, _)| *name).collect(), "flags of /proc/cpuinfo"))
        }
        Ok(_) => Err("/proc/cpuinfo lists no flags".to_owned()),
        Err(reason) => Err(reason.clone()),
    }
}

/// What the standard library finds on the running processor, and how.
#[cfg(target_arch = "x86_64")]
fn detected() -> Option<(Vec<(&'static str, bool)>, &'static str)> {
    macro_rules! detect {
        ($($name:tt),*) => {
            vec![$(($name, std::arch::is_x86_feature_detected!($name))),*]
        };
    }
    let all = detect!(
        "sse4.1",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512vnni",
        "avx512bf16",
        "avxvnni"
    );
    Some((all, "CPUID and XGETBV"))
}

/// What the standard library finds on the running processor, and how.
#[cfg(target_arch = "aarch64")]
fn detected() -> Option<(Vec<(&'static str, bool)>, &'static str)> {
    macro_rules! detect {
        ($($name:tt),*) => {
            vec![$(($name, std::arch::is_aarch64_feature_detected!($name))),*]
        };
    }
    Some((detect!("neon", "dotprod", "i8mm"), "the operating system's report"))
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detected() -> Option<(Vec<(&'static str, bool)>, &'static str)> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fact::Source;

    #[test]
    fn a_set_that_fails_does_not_count_and_is_named() {
        let how = "ends a process with signal 4".to_owned();
        let verdicts = [
            ("avx2", Verdict::Works),
            ("amx-tile", Verdict::Fails(how.clone())),
            ("amx-int8", Verdict::Untried("no trial".to_owned())),
            ("amx-bf16", Verdict::Untried("no trial".to_owned())),
        ];
        let failed = failed(&verdicts);
        assert_eq!(failed.value().unwrap(), &[FailedSet { name: "amx-tile".to_owned(), how }]);
        let fact = tried(&verdicts, "CPUID");
        assert_eq!(fact.value().unwrap(), &["avx2", "amx-int8", "amx-bf16"]);
        assert_eq!(fact.source(), Source::Measured);
        let detail = fact.detail();
        assert!(detail.starts_with("run in a child process; "), "{detail}");
        assert!(detail.contains("amx-tile is advertised but ends a process"), "{detail}");
        assert!(detail.ends_with("amx-int8, amx-bf16 not tried: no trial"), "{detail}");
    }

    #[test]
    fn without_a_trial_sets_are_advertised() {
        let untried = Verdict::Untried("cannot start it".to_owned());
        assert!(failed(&[("avx2", untried.clone())]).is_unknown());
        let fact = tried(&[("avx2", untried)], "CPUID");
        assert_eq!(fact.source(), Source::Read);
        assert_eq!(fact.detail(), "advertised by CPUID; avx2 not tried: cannot start it");
    }
}

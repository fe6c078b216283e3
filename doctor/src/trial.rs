//! Instruction sets put to the test in a child process.
//!
//! Owns the running of the command that the caller names, and what its lines and its death mean.
//! Refuses to execute anything in this process, to wait for ever, and to believe a child that says
//! nothing.

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::parse::{self, TrialReport};

/// One child may take this long; a trial takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often a child is looked at.
const GLANCE: Duration = Duration::from_micros(300);

/// A child prints a few hundred bytes.
const MAX_OUTPUT_BYTES: u64 = 64 << 10;

/// The command that executes instructions.
///
/// It is given the names of instruction sets as further arguments. For each it prints the line
/// `NAME begins`, executes instructions of it, and prints `NAME right`, `NAME wrong` or
/// `NAME refused`; anything else after the name means that it was not tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrialCommand {
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<OsString>,
}

/// What became of one set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Its instructions compute what they should.
    Works,
    /// They do not, and how.
    Fails(String),
    /// They were not executed, and why.
    Untried(String),
}

/// Tries sets in order. A child that dies is followed by another that goes on after the set at fault.
pub(crate) fn run(command: &TrialCommand, sets: &[&'static str]) -> Vec<(&'static str, Verdict)> {
    let mut verdicts: Vec<(&'static str, Verdict)> = Vec::new();
    while let Some(rest) = sets.get(verdicts.len()..).filter(|rest| !rest.is_empty()) {
        let before = verdicts.len();
        match run_child(command, rest) {
            Ok((report, end)) => judge(rest, &report, &end, &mut verdicts),
            Err(reason) => untried(rest, &reason, &mut verdicts),
        }
        debug_assert!(verdicts.len() > before, "each child settles one set at least");
    }
    verdicts
}

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// By itself.
    Exited,
    /// By a signal, or with an exit code other than 0; as words.
    Died(String),
    /// It did not, and was ended.
    Ended,
}

/// Turns what one child said into verdicts on the first of `rest`; at least one.
fn judge(
    rest: &[&'static str],
    report: &TrialReport,
    end: &End,
    verdicts: &mut Vec<(&'static str, Verdict)>,
) {
    let answers = rest.iter().zip(&report.answers).take_while(|(set, (name, _))| *set == name);
    let answered = answers.map(|(set, (_, word))| (*set, verdict(word)));
    let before = verdicts.len();
    verdicts.extend(answered);
    let settled = verdicts.len() - before;
    let untaken = rest.get(settled..).unwrap_or_default();
    let Some((&next, _)) = untaken.split_first() else { return };
    match end {
        End::Died(how) if report.begun.as_deref() == Some(next) => {
            verdicts.push((next, Verdict::Fails(format!("ends a process with {how}"))));
        }
        // The next child goes on with it.
        End::Died(_) if settled > 0 => {}
        End::Died(how) => untried(untaken, &format!("the trial ended with {how}"), verdicts),
        End::Exited => untried(untaken, "the trial said nothing of it", verdicts),
        End::Ended => {
            let reason = format!("the trial gave no answer in {} s", PATIENCE.as_secs());
            untried(untaken, &reason, verdicts);
        }
    }
}

/// What a child's word for a set means.
fn verdict(word: &str) -> Verdict {
    match word {
        "right" => Verdict::Works,
        "wrong" => Verdict::Fails("computes wrong results".to_owned()),
        "refused" => Verdict::Fails("needs registers that the kernel does not grant".to_owned()),
        _ => Verdict::Untried("this build has no trial of it".to_owned()),
    }
}

fn untried(sets: &[&'static str], reason: &str, verdicts: &mut Vec<(&'static str, Verdict)>) {
    verdicts.extend(sets.iter().map(|set| (*set, Verdict::Untried(reason.to_owned()))));
}

/// Runs one child to its end and returns what it said.
fn run_child(command: &TrialCommand, sets: &[&str]) -> Result<(TrialReport, End), String> {
    let program = command.program.display();
    let mut child = Command::new(&command.program)
        .args(&command.arguments)
        .args(sets)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot start {program}: {error}"))?;
    let end = match wait(&mut child) {
        Ok(Some(status)) => end_of(status),
        Ok(None) => {
            // It is ours and beyond its time; an error means that it has just ended.
            let _ = child.kill();
            let _ = child.wait();
            End::Ended
        }
        Err(error) => return Err(format!("cannot wait for {program}: {error}")),
    };
    let mut bytes = Vec::new();
    if let Some(output) = child.stdout.take() {
        output
            .take(MAX_OUTPUT_BYTES)
            .read_to_end(&mut bytes)
            .map_err(|error| format!("cannot read what {program} says: {error}"))?;
    }
    Ok((parse::parse_trial(&String::from_utf8_lossy(&bytes)), end))
}

fn wait(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(GLANCE);
    }
}

fn end_of(status: ExitStatus) -> End {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        let name = match signal {
            4 => " (illegal instruction)",
            7 => " (bus error)",
            9 => " (killed)",
            11 => " (segmentation fault)",
            31 => " (bad system call)",
            _ => "",
        };
        return End::Died(format!("signal {signal}{name}"));
    }
    match status.code() {
        Some(0) => End::Exited,
        Some(code) => End::Died(format!("exit code {code}")),
        None => End::Died(status.to_string()),
    }
}

#[cfg(all(test, unix))]
#[allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]
mod tests {
    use super::*;

    const SETS: [&str; 4] = ["sse4.1", "avx2", "fma", "f16c"];

    /// A shell that answers for the sets, as `script` says.
    fn by(script: &str) -> Vec<(&'static str, Verdict)> {
        let command = TrialCommand {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into(), "trial".into()],
        };
        run(&command, &SETS)
    }

    fn verdict_of(verdicts: &[(&'static str, Verdict)], set: &str) -> Verdict {
        assert_eq!(verdicts.iter().map(|(set, _)| *set).collect::<Vec<_>>(), SETS);
        verdicts.iter().find(|(name, _)| *name == set).unwrap().1.clone()
    }

    #[test]
    fn a_death_is_laid_at_the_door_of_its_set_and_the_rest_goes_on() {
        let verdicts =
            by("for s; do echo $s begins; [ $s = avx2 ] && kill -ILL $$; echo $s right; done");
        let Verdict::Fails(how) = verdict_of(&verdicts, "avx2") else { panic!("{verdicts:?}") };
        assert_eq!(how, "ends a process with signal 4 (illegal instruction)");
        for set in ["sse4.1", "fma", "f16c"] {
            assert_eq!(verdict_of(&verdicts, set), Verdict::Works, "{set}");
        }
    }

    #[test]
    fn every_set_may_die() {
        let verdicts = by("echo $1 begins; kill -SEGV $$");
        assert!(verdicts.iter().all(|(_, verdict)| matches!(verdict, Verdict::Fails(_))));
        assert_eq!(verdicts.len(), SETS.len());
    }

    #[test]
    fn answers_are_told_apart() {
        let verdicts =
            by("echo sse4.1 begins; echo sse4.1 wrong; echo avx2 begins; echo avx2 refused; \
             echo fma begins; echo fma unfamiliar; echo f16c begins; echo f16c right");
        assert!(
            matches!(verdict_of(&verdicts, "sse4.1"), Verdict::Fails(how) if how.contains("wrong"))
        );
        assert!(
            matches!(verdict_of(&verdicts, "avx2"), Verdict::Fails(how) if how.contains("kernel"))
        );
        assert!(matches!(verdict_of(&verdicts, "fma"), Verdict::Untried(_)));
        assert_eq!(verdict_of(&verdicts, "f16c"), Verdict::Works);
    }

    #[test]
    fn a_command_that_is_none_or_says_nothing_tries_nothing() {
        for script in ["exit 0", "exit 2", "echo nonsense", "echo avx2 right", "kill -ILL $$"] {
            let verdicts = by(script);
            assert_eq!(verdicts.len(), SETS.len(), "{script}");
            assert!(
                verdicts.iter().all(|(_, verdict)| matches!(verdict, Verdict::Untried(_))),
                "{script}: {verdicts:?}"
            );
        }
        let command = TrialCommand { program: "/nonexistent/program".into(), arguments: vec![] };
        let verdicts = run(&command, &SETS);
        assert!(
            matches!(verdict_of(&verdicts, "avx2"), Verdict::Untried(why) if why.contains("cannot start"))
        );
    }
}

//! What a trial of instruction sets prints.
//!
//! Refuses to guess: a line that is not one of ours is skipped.

/// The lines of a trial, as far as it came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrialReport {
    /// Name of a set and the word that the trial has for it, in the order of the lines.
    pub answers: Vec<(String, String)>,
    /// The set that was begun and not finished.
    pub begun: Option<String>,
}

/// Reads `NAME begins` and `NAME WORD` lines. A word counts only for the set that was begun last.
pub fn parse_trial(text: &str) -> TrialReport {
    let mut report = TrialReport::default();
    for line in text.lines() {
        match line.split_once(' ') {
            Some((set, "begins")) => report.begun = Some(set.to_owned()),
            Some((set, word)) if report.begun.as_deref() == Some(set) => {
                report.answers.push((set.to_owned(), word.to_owned()));
                report.begun = None;
            }
            Some(_) | None => {}
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_ends_early_names_the_set() {
        let report = parse_trial("avx2 begins\navx2 right\nfma wrong\namx-int8 begins\n");
        assert_eq!(report.answers, [("avx2".to_owned(), "right".to_owned())]);
        assert_eq!(report.begun.as_deref(), Some("amx-int8"));
    }
}

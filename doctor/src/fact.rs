//! A value together with where it came from.
//!
//! Owns [`Fact`], the only way in which this crate states anything about a machine. Refuses to let
//! a missing value pass for a number: what could not be learnt is [`Fact::Unknown`] with a reason.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a value was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Timed or counted here by this program.
    Measured,
    /// Reported by the kernel, a driver or the processor.
    Read,
    /// Computed from other facts by a rule that can be wrong.
    Estimated,
    /// Taken for granted, or given by a person.
    Assumed,
    /// Not known.
    Unknown,
}

impl Source {
    /// The word shown to people and used in saved facts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Read => "read",
            Self::Estimated => "estimated",
            Self::Assumed => "assumed",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// A value and where it came from, or the reason why there is none.
///
/// Saved as a table whose `source` names the variant: `{ source = "read", detail = "...", value = 8 }`
/// or `{ source = "unknown", reason = "..." }`. Unknown fields are refused, so that a typing error in
/// hand-written facts does not silently become an unknown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "source", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fact<T> {
    /// Timed or counted here by this program.
    Measured {
        /// How it was measured, for people.
        #[serde(default)]
        detail: String,
        /// The value.
        value: T,
    },
    /// Reported by the kernel, a driver or the processor.
    Read {
        /// What was read, for people.
        #[serde(default)]
        detail: String,
        /// The value.
        value: T,
    },
    /// Computed from other facts by a rule that can be wrong.
    Estimated {
        /// The rule and what it rests on, for people.
        #[serde(default)]
        detail: String,
        /// The value.
        value: T,
    },
    /// Taken for granted, or given by a person.
    Assumed {
        /// Who says so, for people.
        #[serde(default)]
        detail: String,
        /// The value.
        value: T,
    },
    /// Not known.
    Unknown {
        /// Why not, for people.
        reason: String,
    },
}

impl<T> Fact<T> {
    /// A value that was timed or counted here.
    pub fn measured(value: T, detail: impl Into<String>) -> Self {
        Self::Measured { value, detail: detail.into() }
    }

    /// A value that the kernel, a driver or the processor reports.
    pub fn read(value: T, detail: impl Into<String>) -> Self {
        Self::Read { value, detail: detail.into() }
    }

    /// A value computed by a rule that can be wrong.
    pub fn estimated(value: T, detail: impl Into<String>) -> Self {
        Self::Estimated { value, detail: detail.into() }
    }

    /// A value taken for granted or given by a person.
    pub fn assumed(value: T, detail: impl Into<String>) -> Self {
        Self::Assumed { value, detail: detail.into() }
    }

    /// No value, and why.
    pub fn unknown(reason: impl Into<String>) -> Self {
        Self::Unknown { reason: reason.into() }
    }

    /// A value that was read, or the error as the reason for having none.
    pub fn from_read<E: fmt::Display>(result: Result<T, E>, detail: impl Into<String>) -> Self {
        match result {
            Ok(value) => Self::read(value, detail),
            Err(error) => Self::unknown(error.to_string()),
        }
    }

    /// The value, if there is one.
    pub fn value(&self) -> Option<&T> {
        match self {
            Self::Measured { value, .. }
            | Self::Read { value, .. }
            | Self::Estimated { value, .. }
            | Self::Assumed { value, .. } => Some(value),
            Self::Unknown { .. } => None,
        }
    }

    /// The value by itself, if there is one.
    pub fn into_value(self) -> Option<T> {
        match self {
            Self::Measured { value, .. }
            | Self::Read { value, .. }
            | Self::Estimated { value, .. }
            | Self::Assumed { value, .. } => Some(value),
            Self::Unknown { .. } => None,
        }
    }

    /// Where the value came from.
    pub fn source(&self) -> Source {
        match self {
            Self::Measured { .. } => Source::Measured,
            Self::Read { .. } => Source::Read,
            Self::Estimated { .. } => Source::Estimated,
            Self::Assumed { .. } => Source::Assumed,
            Self::Unknown { .. } => Source::Unknown,
        }
    }

    /// How the value was obtained, or why there is none.
    pub fn detail(&self) -> &str {
        match self {
            Self::Measured { detail, .. }
            | Self::Read { detail, .. }
            | Self::Estimated { detail, .. }
            | Self::Assumed { detail, .. } => detail,
            Self::Unknown { reason } => reason,
        }
    }

    /// The same fact with more said about it.
    #[must_use]
    pub fn with_note(mut self, note: &str) -> Self {
        match &mut self {
            Self::Measured { detail, .. }
            | Self::Read { detail, .. }
            | Self::Estimated { detail, .. }
            | Self::Assumed { detail, .. }
            | Self::Unknown { reason: detail } => {
                if !detail.is_empty() && !note.is_empty() {
                    detail.push_str("; ");
                }
                detail.push_str(note);
            }
        }
        self
    }

    /// Whether there is no value.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown { .. })
    }

    /// The same fact about a value computed from this one; source and detail stay.
    pub fn map<U>(self, compute: impl FnOnce(T) -> U) -> Fact<U> {
        match self {
            Self::Measured { value, detail } => Fact::Measured { value: compute(value), detail },
            Self::Read { value, detail } => Fact::Read { value: compute(value), detail },
            Self::Estimated { value, detail } => Fact::Estimated { value: compute(value), detail },
            Self::Assumed { value, detail } => Fact::Assumed { value: compute(value), detail },
            Self::Unknown { reason } => Fact::Unknown { reason },
        }
    }
}

/// A fact absent from saved facts is unknown, so that facts written by hand may be partial.
impl<T> Default for Fact<T> {
    fn default() -> Self {
        Self::unknown("not recorded")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accessors_agree_with_the_variant() {
        let fact = Fact::read(8_u64, "eight");
        assert_eq!(fact.value(), Some(&8));
        assert_eq!(fact.source(), Source::Read);
        assert_eq!(fact.detail(), "eight");
        assert_eq!(fact.map(|value| value * 2), Fact::read(16, "eight"));
        assert_eq!(Fact::read(8, "eight").with_note("or so"), Fact::read(8, "eight; or so"));
        assert_eq!(Fact::read(8, "").with_note("or so"), Fact::read(8, "or so"));
        let none = Fact::<u64>::unknown("no file");
        assert_eq!(none.value(), None);
        assert_eq!(none.detail(), "no file");
        assert_eq!(none.source().to_string(), "unknown");
    }

    #[test]
    fn json_reads_well_and_refuses_typing_errors() {
        let text = serde_json::to_string(&Fact::read(8_u64, "eight")).unwrap();
        assert_eq!(text, r#"{"source":"read","detail":"eight","value":8}"#);
        assert!(
            serde_json::from_str::<Fact<u64>>(r#"{"source":"read","detial":"x","value":8}"#)
                .is_err()
        );
        let short: Fact<u64> = serde_json::from_str(r#"{"source":"assumed","value":8}"#).unwrap();
        assert_eq!(short, Fact::assumed(8, ""));
    }
}

//! How fast a download goes: as a user gives it, or as it was measured while headers were fetched.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Least bytes over which a rate is called measured: a few short requests measure waiting alone.
const LEAST_MEASURED_BYTES: u64 = 4_000_000;

/// Bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rate {
    /// Bytes a second, above zero.
    pub bytes_per_s: f64,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.bytes_per_s;
        if rate >= 1e9 {
            write!(f, "{:.2} GB/s", rate / 1e9)
        } else if rate >= 1e6 {
            write!(f, "{:.1} MB/s", rate / 1e6)
        } else if rate >= 1e3 {
            write!(f, "{:.0} kB/s", rate / 1e3)
        } else {
            // Three digits, however slow: never "0".
            let digits = (2.0 - rate.log10().floor()).clamp(0.0, 12.0) as usize;
            write!(f, "{rate:.digits$} B/s")
        }
    }
}

/// A text that is no rate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no bandwidth: write 100MB/s, 12.5MiB/s, 1Gbit/s or 500Mbps")]
pub struct BadRate {
    /// What was given.
    pub text: String,
}

impl FromStr for Rate {
    type Err = BadRate;

    /// `100MB/s` and `100 MiB/s` are bytes, `1Gbit/s`, `1Gb/s` and `500Mbps` are bits.
    fn from_str(text: &str) -> Result<Self, BadRate> {
        let bad = || BadRate { text: text.to_owned() };
        let compact: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let end = compact.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let (number, unit) = compact.split_at(end);
        let number: f64 = number.parse().map_err(|_| bad())?;
        let mut letters = unit.chars();
        let (decimal, binary, rest): (f64, f64, &str) =
            match letters.next().map(|c| c.to_ascii_uppercase()) {
                Some('K') => (1e3, 1024.0, letters.as_str()),
                Some('M') => (1e6, 1024.0 * 1024.0, letters.as_str()),
                Some('G') => (1e9, 1024.0 * 1024.0 * 1024.0, letters.as_str()),
                _ => (1.0, 1.0, unit),
            };
        let (scale, rest) = match rest.strip_prefix('i') {
            Some(rest) if binary > 1.0 => (binary, rest),
            _ => (decimal, rest),
        };
        let bits = match rest {
            "B/s" | "Bps" | "B" => 8.0,
            "bit/s" | "bits/s" | "bps" | "b/s" | "bit" => 1.0,
            _ => return Err(bad()),
        };
        let bytes_per_s = number * scale * bits / 8.0;
        if bytes_per_s.is_finite() && bytes_per_s > 0.0 {
            Ok(Self { bytes_per_s })
        } else {
            Err(bad())
        }
    }
}

/// A rate with what it was measured over.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredRate {
    /// The rate: a lower bound, for short requests wait more than a download does.
    pub rate: Rate,
    /// Over how many bytes.
    pub bytes: u64,
    /// When, in seconds since 1970.
    pub at_unix_s: u64,
}

impl MeasuredRate {
    /// The rate of a transfer; `None` where it is too small to tell.
    pub(crate) fn of(bytes: u64, seconds: f64, at_unix_s: u64) -> Option<Self> {
        let bytes_per_s = bytes as f64 / seconds;
        (bytes >= LEAST_MEASURED_BYTES && bytes_per_s.is_finite()).then_some(Self {
            rate: Rate { bytes_per_s },
            bytes,
            at_unix_s,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_and_bits_are_told_apart() {
        for (text, expected) in [
            ("100MB/s", 1e8),
            ("12.5 MiB/s", 12.5 * 1_048_576.0),
            ("1Gbit/s", 1.25e8),
            ("1Gb/s", 1.25e8),
            ("500Mbps", 6.25e7),
            ("800kbit/s", 1e5),
            ("7GB/s", 7e9),
            ("9B/s", 9.0),
        ] {
            assert_eq!(text.parse::<Rate>().unwrap().bytes_per_s, expected, "{text}");
        }
        for text in ["", "100", "MB/s", "0MB/s", "-1MB/s", "1XB/s", "1..2MB/s", "1MB/h", "1iB/s"] {
            let error = text.parse::<Rate>().unwrap_err().to_string();
            assert!(error.contains("Gbit/s"), "{text}");
        }
    }

    #[test]
    fn little_is_not_called_measured() {
        assert_eq!(MeasuredRate::of(3_999_999, 1.0, 0), None);
        assert_eq!(MeasuredRate::of(8_000_000, 0.0, 0), None);
        let measured = MeasuredRate::of(8_000_000, 2.0, 5).unwrap();
        assert_eq!(measured.rate.to_string(), "4.0 MB/s");
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,20}") {
            let _ = text.parse::<Rate>();
        }
    }
}

//! Units and identifiers. Owns how sizes are written, parsed and shown; knows no model.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A number of bytes. Written as a plain integer in files; GB and GiB exist only in display.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// The count as floating point, for rates.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        self.0 as f64
    }

    /// `self - other`, zero when `other` is larger.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl std::ops::Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self(0), |a, b| a + b)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scale, unit) = match self.0 {
            0..1_000 => return f.pad(&format!("{} B", self.0)),
            1_000..1_000_000 => (1e3, "kB"),
            1_000_000..1_000_000_000 => (1e6, "MB"),
            1_000_000_000..1_000_000_000_000 => (1e9, "GB"),
            _ => (1e12, "TB"),
        };
        let value = self.0 as f64 / scale;
        let digits = if value < 100.0 { 2 } else { 1 };
        f.pad(&format!("{value:.digits$} {unit}"))
    }
}

/// A decoder layer, counted from 0; multi-token-prediction layers follow the last decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerId(pub u32);

/// A routed expert within its layer, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExpertId(pub u32);

/// One routed expert of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertKey {
    /// The layer that routes to it.
    pub layer: LayerId,
    /// The expert within the layer.
    pub expert: ExpertId,
}

impl fmt::Display for ExpertKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.layer.0, self.expert.0)
    }
}

/// A size as a user writes it: absolute, or a share of what is available.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SizeRequest {
    /// An absolute number of bytes.
    Absolute(Bytes),
    /// A share of the available memory, in per cent (0 to 100).
    Percent(f64),
}

impl SizeRequest {
    /// The request in bytes, given what is available.
    #[must_use]
    pub fn resolve(self, available: Bytes) -> Bytes {
        match self {
            Self::Absolute(bytes) => bytes,
            Self::Percent(share) => Bytes((available.as_f64() * share / 100.0) as u64),
        }
    }
}

/// Why a size could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as a size: write 20GB, 20GiB, 512MB, 20G, 90% or a number of bytes")]
pub struct SizeError {
    /// What was given.
    pub text: String,
}

impl FromStr for SizeRequest {
    type Err = SizeError;

    /// Reads `20GB`, `20G` (1e9), `20GiB` (2^30), `512MB`, `1.5TB`, `90%` or plain bytes.
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError { text: text.to_owned() };
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let value: f64 = number.parse().map_err(|_| error())?;
        if !value.is_finite() || value < 0.0 {
            return Err(error());
        }
        let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
            "%" if value <= 100.0 => return Ok(Self::Percent(value)),
            "" | "b" => 1.0,
            "k" | "kb" => 1e3,
            "m" | "mb" => 1e6,
            "g" | "gb" => 1e9,
            "t" | "tb" => 1e12,
            "kib" => 1024.0,
            "mib" => 1024.0 * 1024.0,
            "gib" => 1024.0 * 1024.0 * 1024.0,
            "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            _ => return Err(error()),
        };
        let bytes = value * factor;
        if bytes > i64::MAX as f64 {
            return Err(error());
        }
        Ok(Self::Absolute(Bytes(bytes.round() as u64)))
    }
}

/// Bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rate(pub f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scale, unit) = match self.0 {
            v if v < 1e6 => (1e3, "kB/s"),
            v if v < 1e9 => (1e6, "MB/s"),
            v if v < 1e12 => (1e9, "GB/s"),
            _ => (1e12, "TB/s"),
        };
        let value = self.0 / scale;
        let digits = if value < 100.0 { 1 } else { 0 };
        f.pad(&format!("{value:.digits$} {unit}"))
    }
}

/// Why a rate could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as a rate: write 7GB/s, 500MB/s or 10Gbit/s")]
pub struct RateError {
    /// What was given.
    pub text: String,
}

impl FromStr for Rate {
    type Err = RateError;

    /// Reads `7GB/s`, `7GiB/s`, `500MB/s`, and in bits `10Gbit/s`, `10Gbps` or `10Gb/s`; more than
    /// nothing. A unit is needed: a bare number would leave bits and bytes to be guessed.
    fn from_str(text: &str) -> Result<Self, RateError> {
        let error = || RateError { text: text.to_owned() };
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let value: f64 = number.parse().map_err(|_| error())?;
        let unit = unit.trim();
        let (amount, is_bits) = match unit.strip_suffix("/s") {
            Some(amount) if amount.ends_with("bit") => (amount.trim_end_matches("bit"), true),
            // The field writes a small b for bits and a large one for bytes.
            Some(amount) if amount.ends_with('b') => (amount.trim_end_matches('b'), true),
            Some(amount) => (amount.trim_end_matches('B'), false),
            None => (unit.strip_suffix("bps").ok_or_else(error)?, true),
        };
        let factor: f64 = match amount {
            "" => 1.0,
            "k" | "K" => 1e3,
            "M" | "m" => 1e6,
            "G" | "g" => 1e9,
            "T" | "t" => 1e12,
            "Ki" => 1024.0,
            "Mi" => 1024.0 * 1024.0,
            "Gi" => 1024.0 * 1024.0 * 1024.0,
            "Ti" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            _ => return Err(error()),
        };
        let rate = value * factor / if is_bits { 8.0 } else { 1.0 };
        if rate > 0.0 && rate <= 1e18 { Ok(Self(rate)) } else { Err(error()) }
    }
}

/// `bytes` rounded up to the next multiple of `step` (a power of two), saturating.
#[must_use]
pub fn round_up(bytes: u64, step: u64) -> u64 {
    bytes.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

/// How many of something whose plural takes an s: `1 token`, `2 tokens`.
#[must_use]
pub fn counted(n: u64, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") }
}

/// Ascending numbers as runs: `3-77`, `0, 2-5`; `none` where there are none.
#[must_use]
pub fn runs(numbers: impl IntoIterator<Item = usize>) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == number => *end = number,
            _ => runs.push((number, number)),
        }
    }
    if runs.is_empty() {
        return "none".to_owned();
    }
    let run = |&(start, end): &(usize, usize)| {
        if start == end { start.to_string() } else { format!("{start}-{end}") }
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_users_write_them() {
        let cases = [
            ("20GB", 20_000_000_000),
            ("20G", 20_000_000_000),
            ("20gib", 20 << 30),
            ("512MB", 512_000_000),
            ("1.5 GiB", 3 << 29),
            ("1048576", 1_048_576),
            ("0", 0),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(SizeRequest::Absolute(Bytes(bytes))), "{text}");
        }
        assert_eq!("90%".parse(), Ok(SizeRequest::Percent(90.0)));
        for bad in ["", "GB", "-1GB", "1..2", "20XB", "101%", "1e9", "99999999TB", "nan"] {
            assert!(bad.parse::<SizeRequest>().is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_are_read_as_users_write_them() {
        let cases = [
            ("7GB/s", 7e9),
            ("7 GB/s", 7e9),
            ("7G/s", 7e9),
            ("1.5GiB/s", 1.5 * 1024.0 * 1024.0 * 1024.0),
            ("500MB/s", 5e8),
            ("10Gbit/s", 1.25e9),
            ("10Gbps", 1.25e9),
            ("100Mb/s", 1.25e7),
        ];
        for (text, rate) in cases {
            assert_eq!(text.parse(), Ok(Rate(rate)), "{text}");
        }
        for bad in
            ["", "7", "7GB", "0GB/s", "-1GB/s", "7XB/s", "nanGB/s", "7GB/h", "/s", "1e99GB/s"]
        {
            assert!(bad.parse::<Rate>().is_err(), "{bad}");
        }
    }

    #[test]
    fn neighbours_are_one_run() {
        assert_eq!(runs([0, 2, 3, 4, 9]), "0, 2-4, 9");
        assert_eq!(runs([7]), "7");
        assert_eq!(runs([]), "none");
    }

    #[test]
    fn rates_are_shown_with_few_digits() {
        let shown: Vec<String> =
            [450e3, 93.4e6, 1.31e9, 152.6e9, 3.35e12].map(|r| Rate(r).to_string()).into();
        assert_eq!(shown, ["450 kB/s", "93.4 MB/s", "1.3 GB/s", "153 GB/s", "3.4 TB/s"]);
    }

    #[test]
    fn bytes_are_shown_in_decimal_units() {
        let shown: Vec<String> = [0, 999, 18_915_328, 384_100_000_000, 1_029_400_000_000]
            .map(|b| Bytes(b).to_string())
            .into();
        assert_eq!(shown, ["0 B", "999 B", "18.92 MB", "384.1 GB", "1.03 TB"]);
    }
}

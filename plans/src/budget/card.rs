//! What a graphics card holds, and the ledger of its memory. Owns the types of that ledger and the
//! form in which experts of a layer are listed; which experts go there is `place`'s.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::units::Bytes;

/// A named line of a card's ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CardLine {
    /// What the driver's context and the kernels' images take once a process uses the card.
    DriverReserve,
    /// Weights that every token touches, of the layers that are there.
    DenseWeights,
    /// Keys and values, or latents and rotary keys, of the same layers.
    KvCache,
    /// Keys of the sparse-attention indexer of the same layers.
    IndexerKeys,
    /// Buffers of the forward pass.
    Activations,
    /// Buffers through which states come and go.
    TransferBuffers,
    /// Routed experts that stay there.
    Experts,
}

impl CardLine {
    /// Every line, in the order in which it is shown.
    pub const ALL: [Self; 7] = [
        Self::DriverReserve,
        Self::DenseWeights,
        Self::KvCache,
        Self::IndexerKeys,
        Self::Activations,
        Self::TransferBuffers,
        Self::Experts,
    ];

    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DriverReserve => "driver reserve",
            Self::DenseWeights => "dense weights",
            Self::KvCache => "KV cache",
            Self::IndexerKeys => "indexer keys",
            Self::Activations => "activations",
            Self::TransferBuffers => "transfer buffers",
            Self::Experts => "experts",
        }
    }
}

impl fmt::Display for CardLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One line with its bytes and, in words, what it is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardLedgerLine {
    /// Which line.
    pub line: CardLine,
    /// How much it holds.
    pub bytes: Bytes,
    /// What that is made of.
    pub note: String,
}

/// Every line of one card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CardLedger(pub Vec<CardLedgerLine>);

impl CardLedger {
    /// Bytes of a line, 0 where it is absent.
    #[must_use]
    pub fn bytes(&self, line: CardLine) -> Bytes {
        self.0.iter().filter(|l| l.line == line).map(|l| l.bytes).sum()
    }

    /// Sum of all lines.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.0.iter().map(|l| l.bytes).sum()
    }
}

/// Experts of one layer that stay on a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerExperts {
    /// The layer.
    pub layer: u32,
    /// Its experts there, ascending.
    pub experts: ExpertList,
}

/// Expert ids, ascending; written as ranges such as `0-118,130`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertList(pub Vec<u32>);

/// Most experts that a written list may name: far more than any layer has, and little memory.
const LIST_CAP: usize = 1 << 16;

/// Why a list of experts could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {text:?} as experts: write ascending ids and ranges such as 0-118,130")]
pub struct ExpertListError {
    /// What was given.
    pub text: String,
}

impl fmt::Display for ExpertList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ids = self.0.iter().copied().peekable();
        let mut separator = "";
        while let Some(first) = ids.next() {
            let mut last = first;
            while let Some(next) = ids.next_if(|&next| last.checked_add(1) == Some(next)) {
                last = next;
            }
            write!(f, "{separator}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl FromStr for ExpertList {
    type Err = ExpertListError;

    fn from_str(text: &str) -> Result<Self, ExpertListError> {
        let error = || ExpertListError { text: text.chars().take(80).collect() };
        let mut ids: Vec<u32> = Vec::new();
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: u32 = first.parse().map_err(|_| error())?;
            let last: u32 = last.parse().map_err(|_| error())?;
            let follows = ids.last().is_none_or(|&before| before < first);
            if !follows || last < first || (last - first) as usize >= LIST_CAP - ids.len() {
                return Err(error());
            }
            ids.extend(first..=last);
        }
        Ok(Self(ids))
    }
}

impl Serialize for ExpertList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ExpertList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What one card is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardPlacement {
    /// Its place among the cards of the machine's facts: NVIDIA's first, then the others.
    pub card: u32,
    /// The maker's name for it.
    pub name: String,
    /// What of its memory the plan may use.
    pub budget_bytes: Bytes,
    /// What no line takes.
    pub unused_bytes: Bytes,
    /// First decoder layer whose dense weights and caches are there.
    pub first_layer: u32,
    /// The layer after the last; `first_layer` where there is none.
    pub end_layer: u32,
    /// Whether the head and the final norm are there.
    pub head: bool,
    /// Every byte of its budget that is used.
    pub ledger: CardLedger,
    /// Experts that stay there, by layer.
    pub experts: Vec<LayerExperts>,
}

impl CardPlacement {
    /// Decoder layers whose dense weights and caches are there.
    #[must_use]
    pub fn layers(&self) -> std::ops::Range<usize> {
        self.first_layer as usize..self.end_layer as usize
    }

    /// Number of experts that stay there.
    #[must_use]
    pub fn n_experts(&self) -> u64 {
        self.experts.iter().map(|l| l.experts.0.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_experts_round_trip() {
        let cases: [(&[u32], &str); 4] = [
            (&[], ""),
            (&[3], "3"),
            (&[0, 1, 2, 5, 7, 8], "0-2,5,7-8"),
            (&[u32::MAX], "4294967295"),
        ];
        for (ids, text) in cases {
            let list = ExpertList(ids.to_vec());
            assert_eq!(list.to_string(), text);
            assert_eq!(text.parse(), Ok(list));
        }
        for bad in ["-", "1-", "a", "3,2", "2-1", "1,,2", "1,1", "0-4294967295", " 1"] {
            assert!(bad.parse::<ExpertList>().is_err(), "{bad}");
        }
    }
}

//! What a plan asks of an engine beyond main memory and recency, and whether an engine has it.

use std::fmt;

use serde::Serialize;

use super::{Plan, Policy, Prefetch};
use crate::budget::DenseResidency;

/// What an engine can execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Layers and experts on graphics cards.
    pub vram: bool,
    /// Dense weights as pages of the files, mapped.
    pub mapped_dense: bool,
    /// Dense weights that are read for every token.
    pub streamed_dense: bool,
    /// More than one sequence at once.
    pub sessions: bool,
    /// The least often used expert gives way.
    pub frequency: bool,
    /// Experts that are known early are read while others compute.
    pub prefetch: bool,
}

impl Abilities {
    /// Whatever a plan can ask for.
    pub const ALL: Self = Self {
        vram: true,
        mapped_dense: true,
        streamed_dense: true,
        sessions: true,
        frequency: true,
        prefetch: true,
    };

    /// Whether an engine has what is needed.
    #[must_use]
    pub fn has(self, need: Need) -> bool {
        match need {
            Need::Vram => self.vram,
            Need::MappedDense => self.mapped_dense,
            Need::StreamedDense => self.streamed_dense,
            Need::Sessions(n) => self.sessions || n <= 1,
            // Slots that are all pinned are executed by any engine that has pins.
            Need::Policy(Policy::Recency | Policy::Static) => true,
            Need::Policy(Policy::Frequency) => self.frequency,
            Need::Prefetch => self.prefetch,
        }
    }
}

impl Default for Abilities {
    fn default() -> Self {
        Self::ALL
    }
}

/// Something that not every engine can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Need {
    /// Layers or experts on graphics cards.
    Vram,
    /// Dense weights as pages of the files, mapped.
    MappedDense,
    /// Dense weights that are read for every token.
    StreamedDense,
    /// More than one sequence at once.
    Sessions(u64),
    /// A replacement policy.
    Policy(Policy),
    /// Reads of experts while others compute.
    Prefetch,
}

impl Need {
    /// What makes a plan without it.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Vram => "plan without graphics cards: --vram 0",
            Self::MappedDense => "plan with --dense resident",
            Self::StreamedDense => "plan with a larger --ram",
            Self::Sessions(_) => "plan with --sessions 1",
            Self::Policy(_) => "plan with --policy recency",
            Self::Prefetch => "plan with --prefetch off",
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vram => f.write_str("weights on graphics cards"),
            Self::MappedDense => f.write_str("dense weights mapped from their files"),
            Self::StreamedDense => f.write_str("dense weights streamed for every token"),
            Self::Sessions(n) => write!(f, "{n} sequences at once"),
            Self::Policy(policy) => write!(f, "the policy {}", policy.name()),
            Self::Prefetch => f.write_str("experts read while others compute"),
        }
    }
}

impl Plan {
    /// What the plan asks for that `engine` cannot do, if anything.
    #[must_use]
    pub fn needs_beyond(&self, engine: &Abilities) -> Vec<Need> {
        let placement = &self.placement;
        let needs = [
            (!placement.cards.is_empty()).then_some(Need::Vram),
            (placement.dense == DenseResidency::Mapped).then_some(Need::MappedDense),
            (!placement.streamed.layers.is_empty()).then_some(Need::StreamedDense),
            Some(Need::Sessions(self.request.sessions)),
            Some(Need::Policy(placement.policy)),
            (self.engine.prefetch == Prefetch::Exact).then_some(Need::Prefetch),
        ];
        needs.into_iter().flatten().filter(|need| !engine.has(*need)).collect()
    }
}

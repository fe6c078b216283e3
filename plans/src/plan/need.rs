//! What a plan asks of an engine beyond main memory and recency, and whether an engine has it.

use std::fmt;

use super::{Plan, Policy};

/// What an engine can execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Layers and experts on graphics cards.
    pub vram: bool,
    /// Dense weights that are read for every token.
    pub streamed_dense: bool,
    /// More than one sequence at once.
    pub sessions: bool,
    /// The least often used expert gives way.
    pub frequency: bool,
}

impl Abilities {
    /// Whatever a plan can ask for.
    pub const ALL: Self =
        Self { vram: true, streamed_dense: true, sessions: true, frequency: true };
}

impl Default for Abilities {
    fn default() -> Self {
        Self::ALL
    }
}

/// Something that not every engine can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Layers or experts on graphics cards.
    Vram,
    /// Dense weights that are read for every token.
    StreamedDense,
    /// More than one sequence at once.
    Sessions(u64),
    /// A replacement policy.
    Policy(Policy),
}

impl Need {
    /// What makes a plan without it.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Vram => "plan without graphics cards: --vram 0",
            Self::StreamedDense => "plan with a larger --ram",
            Self::Sessions(_) => "plan with --sessions 1",
            Self::Policy(_) => "plan with --policy recency",
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vram => f.write_str("weights on graphics cards"),
            Self::StreamedDense => f.write_str("dense weights streamed for every token"),
            Self::Sessions(n) => write!(f, "{n} sequences at once"),
            Self::Policy(policy) => write!(f, "the policy {}", policy.name()),
        }
    }
}

impl Plan {
    /// What the plan asks for that `engine` cannot do, if anything.
    #[must_use]
    pub fn needs_beyond(&self, engine: &Abilities) -> Vec<Need> {
        let has_policy = match self.placement.policy {
            // Slots that are all pinned are executed by any engine that has pins.
            Policy::Recency | Policy::Static => true,
            Policy::Frequency => engine.frequency,
        };
        let needs = [
            (Need::Vram, engine.vram || self.placement.cards.is_empty()),
            (
                Need::StreamedDense,
                engine.streamed_dense || self.placement.streamed.layers.is_empty(),
            ),
            (Need::Sessions(self.request.sessions), engine.sessions || self.request.sessions == 1),
            (Need::Policy(self.placement.policy), has_policy),
        ];
        needs.into_iter().filter(|(_, has)| !has).map(|(need, _)| need).collect()
    }
}

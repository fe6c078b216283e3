//! Replay of recorded routing against planned caches. Owns the cache rule as arithmetic, the
//! choice of pins and the expected hit rate; pure functions without files, clocks or chance.
//!
//! The rule is the engine's: per token and layer the experts are accessed in descending router
//! weight; a resident expert is a hit; a miss takes a free slot, else the least recently used slot
//! that is neither pinned nor leased to this token; where there is none it bypasses the cache.

mod hit_rate;
mod pins;
mod prior;
mod replay;

#[cfg(test)]
mod judgement_tests;
#[cfg(test)]
mod replay_tests;

pub use self::hit_rate::{HitRate, PlannedCache, expected_hit_rate};
pub use self::pins::{PinChoice, choose_pins, most_used, pins_of_share};
pub use self::replay::{Hits, LayerCache, RoutingSample, replay, replay_optimum};

/// Fewest sampled tokens that anything is concluded from.
pub const MIN_SAMPLE_TOKENS: usize = 64;

//! When a session is saved while it goes on: the rule alone, of tokens and time. Reads no clock and
//! saves nothing.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// Tokens between two savings: a few hundred are little to lose.
const EVERY_TOKENS: u64 = 256;

/// Time between two savings, for models that decode few tokens in an hour.
const EVERY: Duration = Duration::from_secs(60);

/// A saving may take a hundredth of the time: with a fast model on a slow disk fewer are made.
const LEAST_TIME_OVER_SAVING: u32 = 100;

/// How often a session is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interval {
    /// Every 256 tokens or every minute, whichever comes first; but no saving begins before a
    /// hundred times as long has passed as the last one took.
    Usual,
    /// Every so many tokens, whatever it costs.
    Tokens(NonZeroU64),
}

/// Counts tokens and says when to save.
#[derive(Clone, Debug)]
pub struct Pace {
    interval: Interval,
    tokens: u64,
    /// When it was saved last, or began.
    last: Instant,
    took: Duration,
}

impl Pace {
    /// Begins now.
    #[must_use]
    pub fn new(interval: Interval, now: Instant) -> Self {
        Self { interval, tokens: 0, last: now, took: Duration::ZERO }
    }

    /// A token was recorded: whether the session is to be saved now.
    #[must_use]
    pub fn is_due(&mut self, now: Instant) -> bool {
        self.tokens += 1;
        let passed = now.saturating_duration_since(self.last);
        match self.interval {
            Interval::Tokens(every) => self.tokens >= every.get(),
            Interval::Usual => {
                (self.tokens >= EVERY_TOKENS || passed >= EVERY)
                    && passed >= self.took.saturating_mul(LEAST_TIME_OVER_SAVING)
            }
        }
    }

    /// It was saved, or could not be: the next interval begins.
    pub fn set_done(&mut self, began: Instant, now: Instant) {
        self.tokens = 0;
        self.took = now.saturating_duration_since(began);
        self.last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At which tokens of `n` it is due, where each token takes `token` and each saving `saving`.
    fn due(interval: Interval, n: u64, token: Duration, saving: Duration) -> Vec<u64> {
        let mut now = Instant::now();
        let mut pace = Pace::new(interval, now);
        let mut due = Vec::new();
        for at in 1..=n {
            now += token;
            if pace.is_due(now) {
                due.push(at);
                pace.set_done(now, now + saving);
                now += saving;
            }
        }
        due
    }

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn it_is_every_256_tokens_or_every_minute() {
        assert_eq!(due(Interval::Usual, 800, 100 * MS, 20 * MS), [256, 512, 768]);
        assert_eq!(due(Interval::Usual, 9, Duration::from_secs(20), 20 * MS), [3, 6, 9]);
        assert_eq!(due(Interval::Usual, 3, Duration::from_secs(200), 20 * MS), [1, 2, 3]);
    }

    #[test]
    fn saving_takes_no_more_than_a_hundredth_unless_it_is_asked_for() {
        // 256 tokens take 0.256 s; a saving of 20 ms is worth 2 s, of 2000 tokens.
        assert_eq!(due(Interval::Usual, 5000, MS, 20 * MS), [256, 2256, 4256]);
        let every = Interval::Tokens(NonZeroU64::new(2).unwrap());
        assert_eq!(due(every, 7, MS, Duration::from_secs(9)), [2, 4, 6]);
        assert_eq!(due(every, 1, Duration::from_secs(900), MS), [0u64; 0]);
    }
}

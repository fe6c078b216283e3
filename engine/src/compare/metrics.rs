//! From two rows of logits to what tells them apart, and its sums over a text. Pure: knows no engine
//! and no file.

use serde::Serialize;

/// What one position says of two models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Position {
    /// `sum over tokens of p_a * (ln p_a - ln p_b)`, nats; never negative, and 0 for equal logits.
    pub kl: f64,
    /// The most probable token after this position: of the first model, of the second. Ties go to the
    /// lower token.
    pub best: [u32; 2],
    /// `-ln p` of the token that the text goes on with; `None` at the end of a text.
    pub loss: Option<[f64; 2]>,
}

/// A row of logits that no probabilities follow from: an infinity or what is not a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFinite {
    /// Of the first model's or the second's.
    pub side: Side,
    /// The first such token.
    pub token: usize,
}

/// One of the two that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The reference.
    A,
    /// What is compared with it.
    B,
}

/// Compares the logits `(vocab)` of one position. `next` is the token that follows in the text.
///
/// With `m` the largest logit, `ln p[i] = x[i] - m - ln sum exp(x[j] - m)`, all of it in f64: exact
/// differences, and no power overflows.
///
/// # Errors
/// [`NotFinite`].
pub fn position(a: &[f32], b: &[f32], next: Option<u32>) -> Result<Position, NotFinite> {
    let (a_row, b_row) = (Row::of(a, Side::A)?, Row::of(b, Side::B)?);
    let mut kl = 0.0;
    for (&a, &b) in a.iter().zip(b) {
        let ln_a = a_row.ln_p(a);
        kl += ln_a.exp() * (ln_a - b_row.ln_p(b));
    }
    let loss = next.and_then(|next| {
        let at = next as usize;
        Some([-a_row.ln_p(*a.get(at)?), -b_row.ln_p(*b.get(at)?)])
    });
    // Rounding can leave a sum of nothing just below zero.
    Ok(Position { kl: kl.max(0.0), best: [a_row.best, b_row.best], loss })
}

/// What turns logits into logarithms of probabilities.
struct Row {
    best: u32,
    largest: f64,
    ln_sum: f64,
}

impl Row {
    fn of(logits: &[f32], side: Side) -> Result<Self, NotFinite> {
        if let Some(token) = logits.iter().position(|x| !x.is_finite()) {
            return Err(NotFinite { side, token });
        }
        let mut best = 0;
        let mut largest = f32::NEG_INFINITY;
        for (token, &logit) in logits.iter().enumerate() {
            if logit > largest {
                (best, largest) = (token as u32, logit);
            }
        }
        let largest = f64::from(largest);
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
        Ok(Self { best, largest, ln_sum: sum.ln() })
    }

    fn ln_p(&self, logit: f32) -> f64 {
        f64::from(logit) - self.largest - self.ln_sum
    }
}

/// Where something was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The group of the text, from 0.
    pub group: usize,
    /// The text, from 0, in the order in which those of the group were given.
    pub text: usize,
    /// The position in the text, from 0: after this token.
    pub position: usize,
}

/// The best tokens of a position at which they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Disagreement {
    /// Where.
    #[serde(flatten)]
    pub place: Place,
    /// The reference's best token.
    pub a: u32,
    /// The other's.
    pub b: u32,
}

/// Sums over positions, in memory that does not grow with them.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    n: u64,
    n_equal: u64,
    n_losses: u64,
    kl: f64,
    kl_squares: f64,
    losses: [f64; 2],
    largest: Option<(f64, Place)>,
    first: Option<Disagreement>,
    spread: Spread,
}

impl Tally {
    /// Takes in a position.
    pub fn add(&mut self, place: Place, position: &Position) {
        self.n += 1;
        let [a, b] = position.best;
        if a == b {
            self.n_equal += 1;
        } else if self.first.is_none() {
            self.first = Some(Disagreement { place, a, b });
        }
        self.kl += position.kl;
        self.kl_squares += position.kl * position.kl;
        if self.largest.is_none_or(|(largest, _)| position.kl > largest) {
            self.largest = Some((position.kl, place));
        }
        self.spread.add(position.kl);
        if let Some(losses) = position.loss {
            self.n_losses += 1;
            self.losses[0] += losses[0];
            self.losses[1] += losses[1];
        }
    }

    /// Positions taken in.
    #[must_use]
    pub fn positions(&self) -> u64 {
        self.n
    }

    /// What they come to; `None` without a position.
    #[must_use]
    pub fn summary(&self) -> Option<Summary> {
        let (largest, largest_at) = self.largest?;
        let n = self.n as f64;
        let mean = self.kl / n;
        let variance = (self.kl_squares / n - mean * mean).max(0.0);
        let perplexity =
            |loss: f64| (self.n_losses > 0).then(|| (loss / self.n_losses as f64).exp());
        Some(Summary {
            positions: self.n,
            equal: self.n_equal,
            agreement: self.n_equal as f64 / n,
            kl: KlSummary {
                mean,
                standard_error: (variance / n).sqrt(),
                p50: self.spread.quantile(0.5).min(largest),
                p95: self.spread.quantile(0.95).min(largest),
                p99: self.spread.quantile(0.99).min(largest),
                max: largest,
                max_at: largest_at,
            },
            predicted: self.n_losses,
            perplexity: [perplexity(self.losses[0]), perplexity(self.losses[1])],
            first_disagreement: self.first,
        })
    }
}

/// How two models differ over a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Positions compared.
    pub positions: u64,
    /// Positions at which both have the same best token.
    pub equal: u64,
    /// Their share, 0 to 1.
    pub agreement: f64,
    /// Divergence of the second from the first, nats.
    pub kl: KlSummary,
    /// Positions whose next token is known: those that perplexity is of.
    pub predicted: u64,
    /// `exp(mean of -ln p of the next token)` of each; `None` where no position has a next token.
    pub perplexity: [Option<f64>; 2],
    /// The first position at which the best tokens differ.
    pub first_disagreement: Option<Disagreement>,
}

/// `KL(A || B)` over positions, nats.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KlSummary {
    /// Its mean.
    pub mean: f64,
    /// Standard deviation over the root of the number of positions; positions of one text are not
    /// independent, so that the truth is wider.
    pub standard_error: f64,
    /// Half of the positions have at most this; to 0.4 %, as the next two.
    pub p50: f64,
    /// 95 % have at most this.
    pub p95: f64,
    /// 99 % have at most this.
    pub p99: f64,
    /// The largest, exactly.
    pub max: f64,
    /// Where that is.
    pub max_at: Place,
}

/// Bits of the mantissa that tell bins apart: a bin is 1/128 wide, its middle 0.4 % off at most.
const MANTISSA_BITS: u32 = 7;
/// Values below are counted with 0: no sum of f32 logits has a meaning there.
const LEAST_EXPONENT: i32 = -60;
/// Values from there on are counted together.
const TOP_EXPONENT: i32 = 10;
/// Bins, that of 0 and that of the largest included.
const BINS: usize = ((TOP_EXPONENT - LEAST_EXPONENT) as usize) << MANTISSA_BITS;

/// Counts of values by size: quantiles in memory that does not grow.
#[derive(Clone, Debug)]
struct Spread {
    n: u64,
    zeros: u64,
    bins: Vec<u64>,
}

impl Default for Spread {
    fn default() -> Self {
        Self { n: 0, zeros: 0, bins: vec![0; BINS] }
    }
}

impl Spread {
    /// A value that is not negative.
    fn add(&mut self, value: f64) {
        self.n += 1;
        if value < 2.0_f64.powi(LEAST_EXPONENT) {
            self.zeros += 1;
            return;
        }
        let bin = (value.to_bits() >> (52 - MANTISSA_BITS)) - first_bin();
        let bin = usize::try_from(bin).unwrap_or(usize::MAX).min(BINS - 1);
        if let Some(count) = self.bins.get_mut(bin) {
            *count += 1;
        }
    }

    /// The middle of the bin of the value that `share` (0 to 1) of all do not exceed.
    fn quantile(&self, share: f64) -> f64 {
        let rank = ((share * self.n as f64).ceil() as u64).max(1);
        let mut seen = self.zeros;
        if seen >= rank {
            return 0.0;
        }
        for (bin, count) in self.bins.iter().enumerate() {
            seen += count;
            if seen >= rank {
                let half = 1 << (51 - MANTISSA_BITS);
                return f64::from_bits(((first_bin() + bin as u64) << (52 - MANTISSA_BITS)) + half);
            }
        }
        f64::INFINITY
    }
}

/// The leading bits of the least value that has a bin.
fn first_bin() -> u64 {
    2.0_f64.powi(LEAST_EXPONENT).to_bits() >> (52 - MANTISSA_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Place = Place { group: 0, text: 0, position: 0 };

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-12 * expected.abs().max(1.0), "{found} {expected}");
    }

    /// Logits of given probabilities, moved by a constant, which changes nothing.
    fn logits(p: &[f64], by: f64) -> Vec<f32> {
        p.iter().map(|p| (p.ln() + by) as f32).collect()
    }

    #[test]
    fn two_tokens_by_hand() {
        // ln 3 and 0: probabilities 3/4 and 1/4; 0 and 0: a half each.
        let (a, b) = ([2.0_f32, 0.0], [5.0_f32, 5.0]);
        let found = position(&a, &b, Some(1)).unwrap();
        let p = 1.0 / (1.0 + (-2.0_f64).exp());
        near(found.kl, p * (p * 2.0).ln() + (1.0 - p) * ((1.0 - p) * 2.0).ln());
        assert_eq!(found.best, [0, 0], "a tie goes to the lower token");
        let [loss_a, loss_b] = found.loss.unwrap();
        near(loss_a, -(1.0 - p).ln());
        near(loss_b, 2.0_f64.ln());
    }

    #[test]
    fn divergence_is_of_the_second_from_the_first() {
        let (a, b) = (logits(&[0.5, 0.25, 0.25], 3.0), logits(&[0.25, 0.25, 0.5], -7.0));
        // 0.5 ln 2 + 0 + 0.25 ln 0.5
        let forth = position(&a, &b, None).unwrap();
        assert!((forth.kl - 0.25 * 2.0_f64.ln()).abs() < 1e-6, "{forth:?}");
        assert_eq!((forth.best, forth.loss), ([0, 2], None));
        let c = logits(&[0.8, 0.1, 0.1], 0.0);
        let (ac, ca) = (position(&a, &c, None).unwrap().kl, position(&c, &a, None).unwrap().kl);
        // 0.5 ln(0.5/0.8) + 0.5 ln 2.5, and 0.8 ln 1.6 + 0.2 ln 0.4.
        assert!((ac - (0.5 * 0.625_f64.ln() + 0.5 * 2.5_f64.ln())).abs() < 1e-6, "{ac}");
        assert!((ca - (0.8 * 1.6_f64.ln() + 0.2 * 0.4_f64.ln())).abs() < 1e-6, "{ca}");
    }

    #[test]
    fn equal_logits_diverge_by_exactly_nothing_however_large() {
        let a = [1e30_f32, -1e30, 3.0, 0.1];
        let found = position(&a, &a, Some(0)).unwrap();
        assert_eq!((found.kl, found.loss), (0.0, Some([0.0, 0.0])));
    }

    #[test]
    fn what_is_not_finite_is_named() {
        let fault = position(&[0.0, 1.0], &[0.0, f32::NAN], None).unwrap_err();
        assert_eq!(fault, NotFinite { side: Side::B, token: 1 });
        let fault = position(&[f32::INFINITY, 1.0], &[0.0, f32::NAN], None).unwrap_err();
        assert_eq!(fault, NotFinite { side: Side::A, token: 0 });
    }

    #[test]
    fn sums_over_positions() {
        let mut tally = Tally::default();
        assert!(tally.summary().is_none());
        let of = |kl, best, loss| Position { kl, best, loss };
        let at = |position| Place { group: 0, text: 1, position };
        tally.add(at(0), &of(0.0, [3, 3], Some([1.0, 2.0])));
        tally.add(at(1), &of(0.5, [3, 4], Some([3.0, 2.0])));
        tally.add(at(2), &of(0.25, [5, 3], None));
        tally.add(at(3), &of(0.25, [3, 3], None));
        let summary = tally.summary().unwrap();
        assert_eq!((summary.positions, summary.equal, summary.predicted), (4, 2, 2));
        assert_eq!(summary.agreement, 0.5);
        near(summary.kl.mean, 0.25);
        // Deviations of a quarter, a quarter, 0 and 0.
        near(summary.kl.standard_error, (0.125_f64 / 4.0).sqrt() / 2.0);
        assert_eq!((summary.kl.max, summary.kl.max_at), (0.5, at(1)));
        let [a, b] = summary.perplexity.map(Option::unwrap);
        near(a, 2.0_f64.exp());
        near(b, 2.0_f64.exp());
        let first = summary.first_disagreement.unwrap();
        assert_eq!((first.place, first.a, first.b), (at(1), 3, 4));
    }

    #[test]
    fn quantiles_are_within_their_promise() {
        let mut tally = Tally::default();
        for i in 1..=1000_u32 {
            let kl = f64::from(i) * 1e-5;
            tally.add(HERE, &Position { kl, best: [0, 0], loss: None });
        }
        let kl = tally.summary().unwrap().kl;
        for (found, exact) in [(kl.p50, 0.005), (kl.p95, 0.0095), (kl.p99, 0.0099)] {
            assert!((found / exact - 1.0).abs() <= 0.004, "{found} {exact}");
        }
        assert_eq!(kl.max, 0.01);
    }

    #[test]
    fn quantiles_of_zeros_and_of_the_largest() {
        let mut spread = Spread::default();
        spread.add(0.0);
        spread.add(1e300);
        assert_eq!(spread.quantile(0.5), 0.0);
        assert!(spread.quantile(0.99) > 500.0);
        let mut one = Tally::default();
        one.add(HERE, &Position { kl: 1e300, best: [0, 0], loss: None });
        assert!(one.summary().unwrap().kl.p50 > 500.0);
    }
}

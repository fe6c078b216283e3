//! Which scale a group of weights gets. Owns the two rules and what is tried; the arithmetic is the
//! kernels', and gives the same on every machine.

use half::f16;
use tierkeep_kernels::{Kernels, ScaleSearch};
use tierkeep_plans::catalogue::{Group, Packed, PackedBits, ScaleType};

/// How a scale is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleMethod {
    /// `absmax / (2^(b-1) - 1)`: what other writers do.
    Absmax,
    /// The one of some candidates that leaves the least error.
    Search,
}

impl ScaleMethod {
    /// The method of a packed form. The plain form (a row, F32) is absmax's, so that bytes equal other
    /// writers'; of 8 bits a search gains nothing that can be measured (docs/numerics.md).
    pub(super) fn of(target: Packed) -> Self {
        match (target.bits, target.group, target.scale) {
            (PackedBits::Eight, _, _) | (_, Group::Row, ScaleType::F32) => Self::Absmax,
            (
                PackedBits::Four | PackedBits::Two,
                Group::Row | Group::Of128 | Group::Of64 | Group::Of32,
                ScaleType::F32 | ScaleType::F16,
            ) => Self::Search,
        }
    }
}

/// The scale that a group would need is beyond the largest of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLarge;

/// The scale of a group by a method, rounded to its type. 1 where no scale of the type holds anything:
/// for zeros, and for what is as good as zeros.
pub(super) fn scale_of(
    kernels: &Kernels,
    method: ScaleMethod,
    (bits, stored): (PackedBits, ScaleType),
    group: &[f32],
) -> Result<f32, TooLarge> {
    let extreme = kernels.extreme(group);
    match method {
        ScaleMethod::Absmax => absmax(bits, stored, extreme),
        ScaleMethod::Search => match kernels.search_scale(&search(bits, stored), group, extreme) {
            Some(scale) => Ok(scale),
            None => absmax(bits, stored, extreme),
        },
    }
}

fn absmax(bits: PackedBits, stored: ScaleType, extreme: f32) -> Result<f32, TooLarge> {
    let scale = rounded(stored, extreme.abs() / largest(bits));
    if scale.is_infinite() {
        return Err(TooLarge);
    }
    Ok(if scale == 0.0 { 1.0 } else { scale })
}

/// The largest integer of so many bits; the least is one below its negative.
pub(super) fn largest(bits: PackedBits) -> f32 {
    match bits {
        PackedBits::Eight => 127.0,
        PackedBits::Four => 7.0,
        PackedBits::Two => 1.0,
    }
}

/// A scale as its type holds it.
fn rounded(stored: ScaleType, scale: f32) -> f32 {
    match stored {
        ScaleType::F32 => scale,
        ScaleType::F16 => f16::from_f32(scale).to_f32(),
    }
}

/// Where the search begins: `scale = -extreme / divisor`, so that the extreme element is stored as
/// `-divisor` before it is clamped. The grid reaches one further down than up (-8 to 7), and a scale may
/// be negative: with a positive divisor the extreme is put on the longer side, with a negative one on
/// the shorter. Beyond the grid the extreme is clamped and the others are stored finer.
fn divisors(bits: PackedBits) -> &'static [f32] {
    match bits {
        // The search is not for 8 bits; this is what it would begin with.
        PackedBits::Eight => &[128.0, -127.0],
        PackedBits::Four => &[8.0, 7.25, 8.75, 6.5, -7.25, -6.5],
        PackedBits::Two => {
            &[1.0, 1.2, 0.86, 1.45, 0.72, 1.75, 0.6, 2.1, 0.5, -1.0, -0.86, -1.2, -0.72, -0.6, -0.5]
        }
    }
}

/// Of 4 bits every element counts alike: the squared error. Of 2 bits it counts by its size, since then
/// what matters is that the large ones keep theirs (measured: docs/numerics.md). More rounds than two gain
/// less than 0.1 % of the error.
fn search(bits: PackedBits, stored: ScaleType) -> ScaleSearch<'static> {
    ScaleSearch {
        largest: largest(bits),
        divisors: divisors(bits),
        rounds: 2,
        is_weighted: match bits {
            PackedBits::Two => true,
            PackedBits::Four | PackedBits::Eight => false,
        },
        is_f16: match stored {
            ScaleType::F16 => true,
            ScaleType::F32 => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierkeep_kernels::Isa;

    /// By absmax or by a search, on the fastest instruction set there is.
    fn scale_of(
        method: ScaleMethod,
        bits: PackedBits,
        stored: ScaleType,
        group: &[f32],
    ) -> Result<f32, TooLarge> {
        super::scale_of(&Kernels::new(Isa::best()).unwrap(), method, (bits, stored), group)
    }

    /// Numbers that look drawn, from a generator of 32 bits; roughly normal as sums of four.
    fn drawn(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from((state >> 16) as u16) / 65_536.0 - 0.5
        };
        (0..n).map(|_| next() + next() + next() + next()).collect()
    }

    fn error_of(bits: PackedBits, group: &[f32], scale: f32) -> f64 {
        let high = largest(bits);
        let one = |x: &f32| {
            let q = (x / scale).round_ties_even().clamp(-high - 1.0, high);
            (f64::from(*x) - f64::from(q) * f64::from(scale)).powi(2)
        };
        group.iter().map(one).sum()
    }

    #[test]
    fn the_longer_side_of_the_grid_is_used() {
        // A scale of -1 stores all of this exactly; 8 / 7 does not.
        let group = [8.0, -7.0, 1.0, 2.0, 3.0];
        let scale = scale_of(ScaleMethod::Search, PackedBits::Four, ScaleType::F16, &group);
        assert_eq!(scale, Ok(-1.0));
        assert_eq!(error_of(PackedBits::Four, &group, -1.0), 0.0);
    }

    #[test]
    fn a_search_errs_less_than_absmax_and_nearly_as_little_as_a_fine_grid() {
        for (bits, least_gain, most_above) in
            [(PackedBits::Four, 0.22, 1.03), (PackedBits::Two, 0.5, 1.35)]
        {
            let (mut by_absmax, mut by_search, mut by_grid) = (0.0, 0.0, 0.0);
            for seed in 0..200 {
                let group = drawn(64, seed);
                let of = |method| scale_of(method, bits, ScaleType::F16, &group).unwrap();
                by_absmax += error_of(bits, &group, of(ScaleMethod::Absmax));
                by_search += error_of(bits, &group, of(ScaleMethod::Search));
                let top = Kernels::new(Isa::Scalar).unwrap().extreme(&group) / largest(bits);
                let grid = (-150..=150).filter(|i| i % 150 != 0 && *i != 0);
                let errors = grid.map(|i| error_of(bits, &group, top * i as f32 / 100.0));
                by_grid += errors.fold(f64::INFINITY, f64::min);
            }
            let gain = 1.0 - by_search / by_absmax;
            assert!(gain >= least_gain, "{bits:?}: {gain}");
            assert!(by_search <= by_grid * most_above, "{bits:?}: {}", by_search / by_grid);
        }
    }

    #[test]
    fn what_no_scale_holds_has_the_scale_one() {
        for bits in [PackedBits::Four, PackedBits::Two] {
            for group in [[0.0, -0.0], [2.0_f32.powi(-26), 0.0]] {
                let scale = scale_of(ScaleMethod::Search, bits, ScaleType::F16, &group);
                assert_eq!(scale, Ok(1.0), "{bits:?} {group:?}");
            }
            let least = f32::from_bits(1);
            let scale = scale_of(ScaleMethod::Search, bits, ScaleType::F32, &[least]);
            assert!(scale.unwrap().is_finite());
        }
    }

    #[test]
    fn the_largest_that_f16_takes_are_clamped_and_what_is_beyond_is_refused() {
        let of = |x| scale_of(ScaleMethod::Search, PackedBits::Four, ScaleType::F16, &[x, 0.0]);
        assert!(of(65504.0 * 8.0).unwrap().is_finite());
        assert_eq!(of(65520.0 * 9.0), Err(TooLarge));
        // Squares of these are infinite; so none is least, and it is as with absmax.
        let large = scale_of(ScaleMethod::Search, PackedBits::Four, ScaleType::F32, &[3e38, 1e38]);
        assert!(large.unwrap().is_finite());
    }

    #[test]
    fn what_is_not_the_plain_form_is_searched() {
        let plain = Packed::plain(PackedBits::Four);
        let method = |group, scale, bits| ScaleMethod::of(Packed { bits, group, scale });
        assert_eq!(ScaleMethod::of(plain), ScaleMethod::Absmax);
        for group in [Group::Of128, Group::Of64, Group::Of32] {
            for scale in ScaleType::ALL {
                assert_eq!(method(group, scale, PackedBits::Four), ScaleMethod::Search);
                assert_eq!(method(group, scale, PackedBits::Two), ScaleMethod::Search);
                assert_eq!(method(group, scale, PackedBits::Eight), ScaleMethod::Absmax);
            }
        }
        assert_eq!(method(Group::Row, ScaleType::F16, PackedBits::Four), ScaleMethod::Search);
    }
}

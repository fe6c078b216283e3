//! Activations as integers of 8 bits, for products with packed integers.
//!
//! Owns: how a vector is rounded, how its bytes lie, and how many there are. Refuses: products (see `arch`)
//! and who holds the bytes (see the pool).
//!
//! A vector is cut into groups of 64. With `top` the largest magnitude of a group, its scale is `top / 127`,
//! and an element becomes `round(x * (127 / top))`, ties to even, each operation rounded to f32. A group whose
//! `top` is below 2^-119 (so that both quotients are normal numbers) counts as zeros with a scale of 0.
//! One that holds what is not finite has NaN for a scale and zeros for elements, so that it cannot
//! become a number.

use crate::element::{Group, Packed, PackedBits};

/// Elements that share a scale.
const GROUP: usize = 64;
/// Vectors are continued with zeros to a multiple of this: what kernels take in one step.
const PADDED: usize = 256;
/// Columns begin at multiples of this, which is a line of a cache.
const LINE: usize = 64;
/// The smallest `top` that counts: 2^-119.
const LEAST: u32 = (127 - 119) << 23;
/// The bits of infinity.
const INFINITE: u32 = 0x7f80_0000;
/// Adding this leaves the nearest integer, ties to even, in the low bits of the mantissa.
const SHIFT: f32 = 12_582_912.0;

/// The order of the bytes of a quantised vector, and what of it is summed in integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    /// Bits of the weights that it meets: their fields are to meet their partners without shuffles.
    pub(crate) bits: PackedBits,
    /// Elements whose products are summed as integers: 64, or 32 where weights have a scale for every 32.
    pub(crate) unit: usize,
}

impl Form {
    pub(crate) const fn of(packed: Packed) -> Self {
        let unit = match packed.group {
            Group::Row | Group::Of128 | Group::Of64 => 64,
            Group::Of32 => 32,
        };
        Self { bits: packed.bits, unit }
    }

    /// Fields of a byte of weights.
    const fn fields(self) -> usize {
        match self.bits {
            PackedBits::Eight => 1,
            PackedBits::Four => 2,
            PackedBits::Two => 4,
        }
    }

    /// Where element `index` lies among the bytes: in its unit first what meets the first fields of bytes of
    /// weights, then what meets the second ones. Of four fields in a unit of 32, which do not fill
    /// 128 bits, the third come second.
    #[inline(always)]
    pub(crate) const fn place(self, index: usize) -> usize {
        let (unit, at, fields) = (index / self.unit, index % self.unit, self.fields());
        let field = match (fields, self.unit) {
            (4, 32) => [0, 2, 1, 3][at % 4],
            _ => at % fields,
        };
        unit * self.unit + field * (self.unit / fields) + at / fields
    }

    /// What kernels add to a stored element to have no sign.
    const fn offset(self) -> i32 {
        match self.bits {
            PackedBits::Eight => 128,
            PackedBits::Four => 8,
            PackedBits::Two => 2,
        }
    }

    /// Bytes of a quantised vector of `cols` elements: a multiple of 64, and not 0.
    pub(crate) const fn column_bytes(self, cols: usize) -> usize {
        let padded = cols.next_multiple_of(PADDED);
        let bytes = (padded + padded / self.unit * 8).next_multiple_of(LINE);
        if bytes == 0 { LINE } else { bytes }
    }
}

/// The most bytes that a quantised vector of `cols` elements takes, for whatever weights.
#[must_use]
pub const fn quantised_bytes(cols: usize) -> usize {
    Form { bits: PackedBits::Eight, unit: 32 }.column_bytes(cols)
}

/// A quantised vector.
#[derive(Clone, Copy)]
pub(crate) struct Column<'a> {
    /// Elements, without those added.
    pub(crate) cols: usize,
    /// Integers of 8 bits in the order of [`Form::place`], zeros past the last.
    pub(crate) bytes: &'a [u8],
    /// The scale of each unit, f32.
    pub(crate) scales: &'a [u8],
    /// For each unit what takes the offset of the weights out of its sum, i32.
    pub(crate) corrections: &'a [u8],
}

impl<'a> Column<'a> {
    /// What [`quantise`] left in `bytes`.
    pub(crate) fn new(cols: usize, form: Form, bytes: &'a [u8]) -> Self {
        let padded = cols.next_multiple_of(PADDED);
        let per_unit = padded / form.unit * 4;
        let (bytes, rest) = bytes.split_at(padded);
        let (scales, rest) = rest.split_at(per_unit);
        Self { cols, bytes, scales, corrections: &rest[..per_unit] }
    }

    /// The scale of a unit.
    pub(crate) fn scale(&self, unit: usize) -> f32 {
        f32::from_le_bytes(self.scales.as_chunks().0[unit])
    }
}

/// Quantised vectors, one after another.
#[derive(Clone, Copy)]
pub(crate) struct Batch<'a> {
    /// Elements of each.
    pub(crate) cols: usize,
    /// How many.
    pub(crate) len: usize,
    form: Form,
    bytes: &'a [u8],
}

impl<'a> Batch<'a> {
    /// The first `len` of those in `bytes`.
    pub(crate) fn new(cols: usize, len: usize, form: Form, bytes: &'a [u8]) -> Self {
        Self { cols, len, form, bytes: &bytes[..len * form.column_bytes(cols)] }
    }

    /// The bytes of a vector: its integers, the scales of units, their corrections.
    pub(crate) fn column(&self, index: usize) -> &'a [u8] {
        let bytes = self.form.column_bytes(self.cols);
        &self.bytes[index * bytes..(index + 1) * bytes]
    }

    /// A vector.
    pub(crate) fn get(&self, index: usize) -> Column<'a> {
        Column::new(self.cols, self.form, self.column(index))
    }
}

/// Fills `out`, `form.column_bytes(x.len())` long. To be inlined where processor features are known.
#[inline(always)]
pub(crate) fn quantise(x: &[f32], form: Form, out: &mut [u8]) {
    let padded = x.len().next_multiple_of(PADDED);
    let (bytes, rest) = out.split_at_mut(padded);
    let (scales, corrections) = rest.split_at_mut(padded / form.unit * 4);
    let groups = bytes.as_chunks_mut::<GROUP>().0;
    let scales = scales.as_chunks_mut::<4>().0;
    let corrections = corrections.as_chunks_mut::<4>().0;
    let (whole, rest) = x.as_chunks::<GROUP>();
    let mut last = [0.0; GROUP];
    last[..rest.len()].copy_from_slice(rest);
    let per_group = GROUP / form.unit;
    for (group, out) in groups.iter_mut().enumerate() {
        let (integers, scale) = match whole.get(group) {
            Some(x) => round(x),
            None if group == whole.len() => round(&last),
            None => ([0; GROUP], 0.0),
        };
        put(&integers, form, out);
        for (part, integers) in integers.chunks_exact(form.unit).enumerate() {
            let unit = group * per_group + part;
            let sum: i32 = integers.iter().map(|&q| i32::from(q)).sum();
            scales[unit] = scale.to_le_bytes();
            corrections[unit] = (-form.offset() * sum).to_le_bytes();
        }
    }
}

/// A group and its scale.
#[inline(always)]
fn round(x: &[f32; GROUP]) -> ([i8; GROUP], f32) {
    let mut top = 0;
    for x in x {
        top = top.max(x.to_bits() & 0x7fff_ffff);
    }
    let mut out = [0; GROUP];
    if top >= INFINITE {
        return (out, f32::NAN);
    }
    if top < LEAST {
        return (out, 0.0);
    }
    let top = f32::from_bits(top);
    let inverse = 127.0 / top;
    for (out, x) in out.iter_mut().zip(x) {
        *out = (x * inverse + SHIFT).to_bits() as i8;
    }
    (out, top / 127.0)
}

/// Puts the integers of a group where [`Form::place`] says.
#[inline(always)]
fn put(integers: &[i8; GROUP], form: Form, out: &mut [u8; GROUP]) {
    match (form.bits, form.unit) {
        (PackedBits::Eight, _) => {
            for (byte, q) in out.iter_mut().zip(integers) {
                *byte = q.cast_unsigned();
            }
        }
        (PackedBits::Four, 64) => {
            let (even, odd) = out.split_at_mut(GROUP / 2);
            let pairs = integers.as_chunks::<2>().0;
            for ((even, odd), pair) in even.iter_mut().zip(odd).zip(pairs) {
                (*even, *odd) = (pair[0].cast_unsigned(), pair[1].cast_unsigned());
            }
        }
        (PackedBits::Four | PackedBits::Two, _) => {
            for (index, q) in integers.iter().enumerate() {
                out[form.place(index)] = q.cast_unsigned();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forms() -> impl Iterator<Item = Form> {
        PackedBits::ALL.into_iter().flat_map(|bits| [32, 64].map(|unit| Form { bits, unit }))
    }

    #[test]
    fn every_element_has_a_place_of_its_own() {
        for form in forms() {
            let mut seen = [false; 512];
            for index in 0..512 {
                assert!(!std::mem::replace(&mut seen[form.place(index)], true), "{form:?}");
            }
        }
    }

    #[test]
    fn elements_are_rounded_as_the_head_says() {
        for form in forms() {
            for cols in [0, 1, 63, 64, 65, 256, 300] {
                let x: Vec<f32> = (0..cols).map(|i| (i as f32 * 0.7).sin() * i as f32).collect();
                let mut out = vec![0xee; form.column_bytes(cols)];
                quantise(&x, form, &mut out);
                let column = Column::new(cols, form, &out);
                for (index, x) in x.iter().enumerate() {
                    let group = &x_group(&x_of(&column, form), index);
                    assert_eq!(group.0, column.scale(index / form.unit));
                    // Half a step, and what f32 adds to it.
                    assert!((f64::from(*x) - group.1).abs() <= 0.500_001 * f64::from(group.0));
                }
                let sums = x_of(&column, form);
                for (unit, correction) in column.corrections.as_chunks().0.iter().enumerate() {
                    let sum: i32 = sums
                        .iter()
                        .skip(unit * form.unit)
                        .take(form.unit)
                        .map(|(q, _)| i32::from(*q))
                        .sum();
                    assert_eq!(i32::from_le_bytes(*correction), -form.offset() * sum);
                }
            }
        }
        fn x_of(column: &Column<'_>, form: Form) -> Vec<(i8, f32)> {
            let of = |index| {
                (column.bytes[form.place(index)].cast_signed(), column.scale(index / form.unit))
            };
            (0..column.cols).map(of).collect()
        }
        fn x_group(all: &[(i8, f32)], index: usize) -> (f32, f64) {
            let (q, scale) = all[index];
            (scale, f64::from(q) * f64::from(scale))
        }
    }

    #[test]
    fn what_is_not_finite_has_no_scale_and_what_is_tiny_is_zero() {
        let form = Form { bits: PackedBits::Four, unit: 64 };
        let mut x = [1.0_f32; 256];
        x[3] = f32::NAN;
        x[70] = f32::NEG_INFINITY;
        x[128..192].fill(1e-37);
        x[192..].copy_from_slice(&[-0.0; 64]);
        let mut out = vec![0xee; form.column_bytes(256)];
        quantise(&x, form, &mut out);
        let column = Column::new(256, form, &out);
        assert!(column.scale(0).is_nan() && column.scale(1).is_nan());
        assert_eq!((column.scale(2), column.scale(3)), (0.0, 0.0));
        assert!(column.bytes.iter().all(|&q| q == 0));
        // Halves go to the even neighbour, and the largest is 127.
        let mut x = [0.0_f32; 64];
        x[..5].copy_from_slice(&[-127.0, 0.5, 1.5, -2.5, 126.5]);
        quantise(&x, form, &mut out);
        let column = Column::new(64, form, &out);
        let found = [0, 1, 2, 3, 4].map(|i| column.bytes[form.place(i)].cast_signed());
        assert_eq!((found, column.scale(0)), ([-127, 0, 2, -2, 126], 1.0));
    }
}

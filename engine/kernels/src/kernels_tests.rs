//! The products against a naive oracle, and every instruction set against scalar, bit for bit.

use proptest::{collection::vec, prelude::*, sample::select};

use super::*;
use crate::{BlockScale, Group, Packed, PackedBits, ScaleType};

/// Where the values of a matrix come from, and the f32 that they stand for.
struct Sample {
    element: ElementType,
    /// Row of a larger matrix that the first row is.
    first: usize,
    rows: usize,
    cols: usize,
    /// Data and scales begin at odd offsets.
    offset: usize,
    data: Vec<u8>,
    scales: Vec<u8>,
    /// As the order of sums takes them: scaled where groups have scales.
    values: Vec<f32>,
    /// Of each row what is left to scale by.
    row_scales: Vec<f32>,
}

/// Scales as good as any, and some that trained weights never have.
fn a_scale(at: usize, is_extreme: bool) -> f32 {
    const EXTREME: [f32; 8] =
        [0.0, f32::INFINITY, f32::NAN, 1e-40, -0.0, 3e38, f32::NEG_INFINITY, -1e-8];
    if is_extreme { EXTREME[at % 8] } else { 0.013 * (at as f32 + 0.7) }
}

/// Puts a scale behind others, in its type; returns what it stands for.
fn put_scale(element: ElementType, at: usize, is_extreme: bool, scales: &mut Vec<u8>) -> f32 {
    let scale = a_scale(at, is_extreme);
    let (bits, value) = match element {
        ElementType::F32 | ElementType::F16 | ElementType::Bf16 => unreachable!("no scales"),
        ElementType::Packed(Packed { scale: ScaleType::F32, .. })
        | ElementType::Fp8(BlockScale::F32) => {
            scales.extend(scale.to_le_bytes());
            return scale;
        }
        ElementType::Packed(Packed { scale: ScaleType::F16, .. })
        | ElementType::Fp8(BlockScale::F16) => {
            let half = half::f16::from_f32(scale);
            (half.to_bits(), half.to_f32())
        }
        ElementType::Fp8(BlockScale::Bf16) => {
            let half = half::bf16::from_f32(scale);
            (half.to_bits(), half.to_f32())
        }
        ElementType::MxFp4 => {
            let byte = if is_extreme { at * 85 % 256 } else { 118 + at % 13 };
            scales.push(byte as u8);
            let power = 2_f64.powi(byte as i32 - 127) as f32;
            return if byte == 255 { f32::NAN } else { power };
        }
    };
    scales.extend(bits.to_le_bytes());
    value
}

/// Rows and columns that share a scale; no columns where all of a row do.
fn sharing(element: ElementType) -> (usize, Option<usize>) {
    match element {
        ElementType::F32 | ElementType::F16 | ElementType::Bf16 => (1, None),
        ElementType::Packed(packed) => (1, packed.group.cols()),
        ElementType::Fp8(_) => (128, Some(128)),
        ElementType::MxFp4 => (1, Some(32)),
    }
}

impl Sample {
    /// Reduces arbitrary bytes to finite values; floats of all magnitudes, denormals included. What is
    /// no number stays so only in e4m3 with extreme scales. The rows are those of a larger matrix from
    /// row `first` on.
    fn part(
        element: ElementType,
        first: usize,
        (rows, cols): (usize, usize),
        offset: usize,
        noise: &[u8],
        has_extreme_scales: bool,
    ) -> Self {
        let row_bytes = element.row_bytes(cols);
        let mut data: Vec<u8> =
            noise.iter().copied().cycle().take(offset + rows * row_bytes).collect();
        let mut scales = vec![0; offset];
        let (mut values, mut row_scales) = (Vec::new(), Vec::new());
        let (rows_per_scale, group) = sharing(element);
        let mut of_row = Vec::new();
        for row in 0..rows {
            let bytes = &mut data[offset + row * row_bytes..][..row_bytes];
            let stored = stored_values(element, bytes, cols, has_extreme_scales);
            if !element.has_scales() {
                values.extend(stored);
                row_scales.push(1.0);
                continue;
            }
            if row == 0 || (first + row).is_multiple_of(rows_per_scale) {
                let n_scales = group.map_or(1, |group| cols.div_ceil(group));
                let begin = (first + row) / rows_per_scale * n_scales;
                of_row = (begin..begin + n_scales)
                    .map(|at| put_scale(element, at, has_extreme_scales, &mut scales))
                    .collect();
            }
            match group {
                None => {
                    values.extend(stored);
                    row_scales.push(of_row[0]);
                }
                Some(group) => {
                    values.extend(stored.iter().enumerate().map(|(c, q)| q * of_row[c / group]));
                    row_scales.push(1.0);
                }
            }
        }
        Self { element, first, rows, cols, offset, data, scales, values, row_scales }
    }

    fn matrix(&self) -> Matrix<'_> {
        let (data, scales) = (&self.data[self.offset..], &self.scales[self.offset..]);
        Matrix::part(self.element, self.first, self.rows, self.cols, data, scales).unwrap()
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }
}

/// The values of a row before any scale.
fn stored_values(element: ElementType, bytes: &mut [u8], cols: usize, keeps_nan: bool) -> Vec<f32> {
    let of = |c: usize| match element {
        ElementType::F32 => {
            let cell: &mut [u8; 4] = (&mut bytes[4 * c..4 * c + 4]).try_into().unwrap();
            if !f32::from_le_bytes(*cell).is_finite() {
                *cell = f32::MIN_POSITIVE.to_le_bytes();
            }
            f32::from_le_bytes(*cell)
        }
        ElementType::F16 | ElementType::Bf16 => {
            let cell: &mut [u8; 2] = (&mut bytes[2 * c..2 * c + 2]).try_into().unwrap();
            let to_f32 = |cell: [u8; 2]| match element {
                ElementType::F16 => half::f16::from_le_bytes(cell).to_f32(),
                _ => half::bf16::from_le_bytes(cell).to_f32(),
            };
            if !to_f32(*cell).is_finite() {
                *cell = [1, 0x80];
            }
            to_f32(*cell)
        }
        ElementType::Packed(packed) => match packed.bits {
            PackedBits::Eight => f32::from(bytes[c] as i8),
            PackedBits::Four => f32::from((bytes[c / 2] >> (c % 2 * 4) & 15) as i8 - 8),
            PackedBits::Two => f32::from((bytes[c / 4] >> (c % 4 * 2) & 3) as i8 - 2),
        },
        ElementType::Fp8(_) => {
            if bytes[c] & 0x7f == 0x7f && !keeps_nan {
                bytes[c] -= 1;
            }
            e4m3(bytes[c])
        }
        ElementType::MxFp4 => e2m1(bytes[c / 2] >> (c % 2 * 4) & 15),
    };
    (0..cols).map(of).collect()
}

/// By the definition: sign, exponent with bias 7, three bits of mantissa.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2_f32.powi(-6),
        _ => (1.0 + mantissa) * 2_f32.powi(exponent - 7),
    };
    if byte < 0x80 { magnitude } else { -magnitude }
}

/// By the definition: sign, exponent with bias 1, one bit of mantissa.
fn e2m1(nibble: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(nibble >> 1 & 3), f32::from(nibble & 1) / 2.0);
    let magnitude =
        if exponent == 0 { mantissa } else { (1.0 + mantissa) * 2_f32.powi(exponent - 1) };
    if nibble < 8 { magnitude } else { -magnitude }
}

/// The order of sums as the crate's documentation states it.
fn naive_dot(w: &[f32], x: &[f32], scale: f32) -> f32 {
    let mut lanes = [0.0_f32; 32];
    for i in 0..w.len() {
        lanes[i % 32] += w[i] * x[i];
    }
    for half in [16, 8, 4, 2, 1] {
        for j in 0..half {
            lanes[j] += lanes[j + half];
        }
    }
    lanes[0] * scale
}

/// Equal bits, or both NaN (from infinities of opposite sign): which NaN is not promised.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        assert!(same(found, expected), "{what} at {i}: {found:e} against {expected:e}");
    }
}

fn extreme() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -3.0_f32..3.0,
        1 => Just(0.0),
        1 => Just(-0.0),
        1 => Just(f32::from_bits(1)),
        1 => Just(-1e-41),
        1 => Just(1e30),
        1 => Just(-3e38),
        1 => any::<f32>().prop_filter("finite", |x| x.is_finite()),
    ]
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![0_usize..140, Just(256), Just(512), 500_usize..600]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(600) })]

    #[test]
    fn every_instruction_set_follows_the_order_of_sums(
        element in select(ElementType::all().collect::<Vec<_>>()),
        first in prop_oneof![Just(0_usize), 118_usize..138],
        rows in 1_usize..11,
        cols in lengths(),
        batch in 1_usize..=9,
        offset in 0_usize..5,
        noise in vec(any::<u8>(), 997),
        xs in vec(extreme(), 1009),
        has_extreme_scales in prop::bool::weighted(0.2),
    ) {
        let sample =
            Sample::part(element, first, (rows, cols), offset, &noise, has_extreme_scales);
        let w = sample.matrix();
        // One more in front, so that x is not aligned to a register.
        let x: Vec<f32> = xs.iter().copied().cycle().take(batch * cols + 1).collect();
        let x = &x[1..];
        let mut expected = vec![0.0; batch * rows];
        for b in 0..batch {
            for row in 0..rows {
                let x = &x[b * cols..(b + 1) * cols];
                expected[b * rows + row] = naive_dot(sample.row(row), x, sample.row_scales[row]);
            }
        }
        let coefficients = &xs[..rows];
        let start: Vec<f32> = xs.iter().rev().copied().cycle().take(cols).collect();
        let mut accumulated = start.clone();
        for (row, coefficient) in coefficients.iter().enumerate() {
            let coefficient = coefficient * sample.row_scales[row];
            for (out, value) in accumulated.iter_mut().zip(sample.row(row)) {
                *out += coefficient * value;
            }
        }
        for isa in Isa::supported() {
            let kernels = Kernels::new(isa).unwrap();
            let what = format!("{isa} {element} {rows} x {cols} from {first}");

            let mut found = vec![f32::NAN; batch * rows];
            kernels.matmul_rows(&w, 0..rows, x, batch, |row, b, value| {
                assert!(found[b * rows + row].is_nan() || value.is_nan(), "put twice");
                found[b * rows + row] = value;
            });
            assert_same(&found, &expected, &what);

            let single = kernels.dot(&w, rows - 1, &x[..cols]);
            assert_same(&[single], &expected[rows - 1..rows], &what);
            let third = rows / 3;
            let mut scores = vec![0.0; rows - third];
            kernels.dot_rows(&w, third..rows, &x[..cols], &mut scores);
            assert_same(&scores, &expected[third..rows], &what);

            let mut out = start.clone();
            kernels.accumulate_rows(&w, 0..rows, coefficients, &mut out);
            assert_same(&out, &accumulated, &what);

            let mut out = vec![f32::NAN; cols];
            kernels.decode_row(&w, rows - 1, &mut out);
            let scale = sample.row_scales[rows - 1];
            let decoded: Vec<f32> = sample.row(rows - 1).iter().map(|value| value * scale).collect();
            assert_same(&out, &decoded, &what);
        }
    }

    /// Shapes and lengths that do not go together are errors, whatever they are; what is taken can be
    /// computed on.
    #[test]
    fn no_shape_and_no_length_panics(
        element in select(ElementType::all().collect::<Vec<_>>()),
        first in prop_oneof![0_usize..300, Just(usize::MAX)],
        rows in prop_oneof![4 => 0_usize..4, 1 => any::<usize>()],
        cols in prop_oneof![4 => 0_usize..140, 1 => any::<usize>()],
        lengths in prop_oneof![
            4 => Just(None),
            1 => (0_usize..600, 0_usize..40).prop_map(Some),
        ],
    ) {
        let bytes = [0x7f; 4096];
        let is_small = rows < 4 && cols < 140;
        let (data, scales) = lengths.unwrap_or(if is_small {
            (rows * element.row_bytes(cols), element.scale_rows(first, rows) * element.row_scale_bytes(cols))
        } else {
            (0, 0)
        });
        let matrix = Matrix::part(element, first, rows, cols, &bytes[..data], &bytes[..scales]);
        prop_assert!(!is_small || lengths.is_some() || matrix.is_ok());
        if let Ok(w) = matrix && is_small {
            let x = vec![1.0; cols];
            let mut out = vec![0.0; rows];
            for isa in Isa::supported() {
                Kernels::new(isa).unwrap().dot_rows(&w, 0..rows, &x, &mut out);
            }
        }
    }

    #[test]
    fn encoded_rows_decode_to_the_nearest(xs in vec(extreme(), 0..80)) {
        for isa in Isa::supported() {
            let kernels = Kernels::new(isa).unwrap();
            for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
                let mut bytes = vec![0; element.row_bytes(xs.len())];
                kernels.encode_row(element, &xs, &mut bytes);
                let w = Matrix::new(element, 1, xs.len(), &bytes, &[]).unwrap();
                let mut out = vec![0.0; xs.len()];
                kernels.decode_row(&w, 0, &mut out);
                let expected: Vec<f32> = xs.iter().map(|&x| match element {
                    ElementType::F16 => half::f16::from_f32(x).to_f32(),
                    ElementType::Bf16 => half::bf16::from_f32(x).to_f32(),
                    _ => x,
                }).collect();
                assert_same(&out, &expected, "encode");
            }
        }
    }
}

#[test]
fn every_stored_element_decodes_alike() {
    let shorts: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let mut expected = vec![0.0; 1 << 19];
    let mut found = expected.clone();
    for element in ElementType::all() {
        let cols = shorts.len() / element.row_bytes(64) * 64;
        let mut scales = Vec::new();
        for at in 0..sharing(element).1.map_or(1, |group| cols.div_ceil(group)) {
            if element.has_scales() {
                put_scale(element, at, false, &mut scales);
            }
        }
        let w = Matrix::new(element, 1, cols, &shorts, &scales).unwrap();
        Kernels::new(Isa::Scalar).unwrap().decode_row(&w, 0, &mut expected[..cols]);
        for isa in Isa::supported() {
            Kernels::new(isa).unwrap().decode_row(&w, 0, &mut found[..cols]);
            assert_same(&found[..cols], &expected[..cols], &format!("{isa} {element}"));
        }
    }
}

/// Every half as the scale of a group, in every instruction set.
#[test]
fn scales_of_16_bits_decode_exactly() {
    let scales: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let cols = 32 << 16;
    // Ones: of each group the first element is looked at.
    let data = vec![0b_1111_1111; cols / 4];
    let element = ElementType::Packed(Packed {
        bits: PackedBits::Two,
        group: Group::Of32,
        scale: ScaleType::F16,
    });
    let w = Matrix::new(element, 1, cols, &data, &scales).unwrap();
    let mut out = vec![0.0; cols];
    for isa in Isa::supported() {
        Kernels::new(isa).unwrap().decode_row(&w, 0, &mut out);
        for (bits, values) in out.chunks_exact(32).enumerate() {
            let expected = half::f16::from_bits(bits as u16).to_f32();
            assert!(values.iter().all(|value| same(*value, expected)), "{isa} {bits:#06x}");
        }
    }
}

/// A matrix with scales for groups or blocks and an f32 matrix of its decoded values are one and the same, and so are integers of
/// fewer bits and the same integers in bytes.
#[test]
fn what_stands_for_the_same_values_gives_the_same_bits() {
    let noise: Vec<u8> =
        (0..9000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 21) as u8).collect();
    let (rows, cols, batch) = (7, 333, 5);
    let x: Vec<f32> = (0..batch * cols).map(|i| (i as f32).sin()).collect();
    for element in ElementType::all().filter(|element| element.has_scales()) {
        // From the last rows of one block into the next.
        let sample = Sample::part(element, 125, (rows, cols), 1, &noise, false);
        let decoded: Vec<u8> = sample.values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let bytes: Vec<u8> = sample.values.iter().map(|v| *v as i8 as u8).collect();
        let scales: Vec<u8> = sample.row_scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let same = match sharing(element).1 {
            None => Matrix::new(ElementType::INT8, rows, cols, &bytes, &scales),
            Some(_) => Matrix::new(ElementType::F32, rows, cols, &decoded, &[]),
        };
        for isa in Isa::supported() {
            let kernels = Kernels::new(isa).unwrap();
            let product = |w: &Matrix<'_>| {
                let mut out = vec![0.0; batch * rows + cols];
                let (products, sums) = out.split_at_mut(batch * rows);
                kernels.matmul_rows(w, 0..rows, &x, batch, |row, b, value| {
                    products[b * rows + row] = value;
                });
                kernels.accumulate_rows(w, 0..rows, &x[..rows], sums);
                out
            };
            assert_same(
                &product(&sample.matrix()),
                &product(&same.unwrap()),
                &format!("{isa} {element}"),
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    /// A part of the columns gives, in every instruction set, what those columns of the whole product are:
    /// the part begins anywhere in a row, which is no multiple of a register.
    #[test]
    fn columns_are_those_of_the_whole_product(
        element in select(ElementType::all().filter(|e| !e.has_scales()).collect::<Vec<_>>()),
        rows in 0_usize..20,
        cols in lengths(),
        offset in 0_usize..5,
        noise in vec(any::<u8>(), 997),
        xs in vec(extreme(), 1009),
        ends in any::<[prop::sample::Index; 2]>(),
    ) {
        let sample = Sample::part(element, 0, (rows, cols), offset, &noise, false);
        let w = sample.matrix();
        let ends = ends.map(|end| end.index(cols + 1));
        let columns = ends[0].min(ends[1])..ends[0].max(ends[1]);
        let coefficients = &xs[..rows];
        let start: Vec<f32> = xs.iter().rev().copied().cycle().take(columns.len()).collect();
        let mut expected = start.clone();
        for (row, coefficient) in coefficients.iter().enumerate() {
            for (out, value) in expected.iter_mut().zip(&sample.row(row)[columns.clone()]) {
                *out += coefficient * value;
            }
        }
        for isa in Isa::supported() {
            let kernels = Kernels::new(isa).unwrap();
            let mut out = start.clone();
            kernels.accumulate_columns(&w, columns.clone(), coefficients, &mut out);
            assert_same(&out, &expected, &format!("{isa} {element} {rows} x {cols}, {columns:?}"));
        }
    }
}

#[test]
#[should_panic(expected = "columns of")]
fn columns_of_a_type_with_scales_are_refused() {
    let w = Matrix::new(ElementType::INT8, 1, 4, &[0; 4], &[0; 4]).unwrap();
    Kernels::new(Isa::Scalar).unwrap().accumulate_columns(&w, 1..3, &[1.0], &mut [0.0; 2]);
}

#[test]
#[should_panic(expected = "columns 3..5 of a matrix of 4")]
fn columns_beyond_the_matrix_are_refused() {
    let w = Matrix::new(ElementType::F32, 1, 4, &[0; 16], &[]).unwrap();
    Kernels::new(Isa::Scalar).unwrap().accumulate_columns(&w, 3..5, &[1.0], &mut [0.0; 2]);
}

#[test]
fn strided_rows_give_what_gathered_rows_give() {
    let noise: Vec<u8> =
        (0..4000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 21) as u8).collect();
    let (rows, cols, stride) = (9, 37, 101);
    let scales: Vec<u8> = (1..=rows).flat_map(|row| (row as f32).to_le_bytes()).collect();
    let span = (rows - 1) * stride + cols;
    let strided =
        Matrix::with_row_stride(ElementType::INT8, rows, cols, stride, &noise[..span], &scales)
            .unwrap();
    let gathered: Vec<u8> = (0..rows).flat_map(|row| strided.row(row)).copied().collect();
    let plain = Matrix::new(ElementType::INT8, rows, cols, &gathered, &scales).unwrap();
    let x: Vec<f32> = (0..5 * cols).map(|i| (i as f32).cos()).collect();
    for isa in Isa::supported() {
        let kernels = Kernels::new(isa).unwrap();
        let product = |w: &Matrix<'_>| {
            let mut out = vec![0.0; 5 * rows];
            kernels.matmul_rows(w, 0..rows, &x, 5, |row, b, value| out[b * rows + row] = value);
            kernels.accumulate_rows(w, 0..rows, &x[..rows], &mut out[..cols]);
            out
        };
        assert_eq!(product(&strided), product(&plain), "{isa}");
    }
}

#[test]
fn names_of_instruction_sets_round_trip() {
    for isa in Isa::ALL {
        assert_eq!(isa.to_string().parse(), Ok(isa));
    }
    assert_eq!("avx3".parse::<Isa>(), Err(IsaError::Unknown("avx3".to_owned())));
    let supported = Isa::supported();
    assert_eq!(supported[0], Isa::Scalar);
    assert_eq!(supported.last(), Some(&Isa::best()));
    for isa in Isa::ALL {
        assert_eq!(Kernels::new(isa).is_ok(), supported.contains(&isa));
    }
}

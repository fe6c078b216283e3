//! `fast` products against a model of their definition, over instruction sets, batches and threads.

use proptest::{collection::vec, prelude::*, sample::select};

use crate::{
    Arithmetic, ElementType, Group, Isa, Kernels, MatmulJob, Matrix, Packed, PackedBits, Pool,
    ScaleType,
};

/// A packed matrix and what its bytes stand for.
struct Sample {
    packed: Packed,
    rows: usize,
    cols: usize,
    offset: usize,
    data: Vec<u8>,
    scales: Vec<u8>,
    integers: Vec<i64>,
    /// `(rows, scales of a row)`.
    factors: Vec<f32>,
}

impl Sample {
    fn new(
        packed: Packed,
        (rows, cols): (usize, usize),
        offset: usize,
        noise: &[u8],
        has_extreme_scales: bool,
    ) -> Self {
        const EXTREME: [f32; 8] =
            [0.0, f32::INFINITY, f32::NAN, 1e-40, -0.0, 3e38, f32::NEG_INFINITY, -1e-8];
        let element = ElementType::Packed(packed);
        let row_bytes = element.row_bytes(cols);
        let data: Vec<u8> = noise.iter().copied().cycle().take(offset + rows * row_bytes).collect();
        let integer = |row: usize, c: usize| {
            let bytes = &data[offset + row * row_bytes..];
            match packed.bits {
                PackedBits::Eight => i64::from(bytes[c] as i8),
                PackedBits::Four => i64::from(bytes[c / 2] >> (c % 2 * 4) & 15) - 8,
                PackedBits::Two => i64::from(bytes[c / 4] >> (c % 4 * 2) & 3) - 2,
            }
        };
        let integers =
            (0..rows).flat_map(|row| (0..cols).map(move |c| (row, c))).map(|(r, c)| integer(r, c));
        let integers = integers.collect();
        let mut scales = vec![0; offset];
        let mut factors = Vec::new();
        for at in 0..rows * packed.group.per_row(cols) {
            let scale =
                if has_extreme_scales { EXTREME[at % 8] } else { 0.013 * (at as f32 + 0.7) };
            match packed.scale {
                ScaleType::F32 => {
                    scales.extend(scale.to_le_bytes());
                    factors.push(scale);
                }
                ScaleType::F16 => {
                    let half = half::f16::from_f32(scale);
                    scales.extend(half.to_bits().to_le_bytes());
                    factors.push(half.to_f32());
                }
            }
        }
        Self { packed, rows, cols, offset, data, scales, integers, factors }
    }

    fn matrix(&self) -> Matrix<'_> {
        let element = ElementType::Packed(self.packed);
        let (data, scales) = (&self.data[self.offset..], &self.scales[self.offset..]);
        Matrix::new(element, self.rows, self.cols, data, scales).unwrap()
    }

    /// A row times `x`, as the documentation states it, in plain steps.
    fn dot(&self, row: usize, x: &[f32]) -> f32 {
        let per_row = self.packed.group.per_row(self.cols);
        let factors = &self.factors[row * per_row..(row + 1) * per_row];
        let unit_len = if self.packed.group == Group::Of32 { 32 } else { 64 };
        let (quantised, scales) = quantise(x);
        let mut lanes = [0.0_f32; 4];
        let integers = &self.integers[row * self.cols..(row + 1) * self.cols];
        let units = integers.chunks(unit_len).zip(quantised.chunks(unit_len));
        for (unit, (w, x)) in units.enumerate() {
            let sum: i64 = w.iter().zip(x).map(|(w, x)| w * x).sum();
            let x_scale = scales[unit * unit_len / 64];
            let scale = match self.packed.group.cols() {
                None => x_scale,
                Some(group) => factors[unit * unit_len / group] * x_scale,
            };
            assert_eq!(sum as f32 as i64, sum, "integers are exact");
            lanes[unit % 4] += sum as f32 * scale;
        }
        let sum = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
        if self.packed.group == Group::Row { sum * factors[0] } else { sum }
    }
}

/// The integers of a vector, and the scale of each 64.
fn quantise(x: &[f32]) -> (Vec<i64>, Vec<f32>) {
    let (mut integers, mut scales) = (Vec::new(), Vec::new());
    for group in x.chunks(64) {
        let top = group.iter().fold(0.0_f32, |top, x| top.max(x.abs()));
        if group.iter().any(|x| !x.is_finite()) {
            scales.push(f32::NAN);
            integers.extend(group.iter().map(|_| 0));
        } else if top < 2_f32.powi(-119) {
            scales.push(0.0);
            integers.extend(group.iter().map(|_| 0));
        } else {
            scales.push(top / 127.0);
            let inverse = 127.0 / top;
            integers.extend(group.iter().map(|x| (x * inverse).round_ties_even() as i64));
        }
    }
    assert!(integers.iter().all(|q| (-127..=127).contains(q)));
    (integers, scales)
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn activation() -> impl Strategy<Value = f32> {
    prop_oneof![
        20 => -3.0_f32..3.0,
        4 => select(vec![0.0, -0.0, 127.0, -127.0, 0.5, 1.5]),
        1 => select(vec![1e-41, 1e-37, 2e-36, 1e30, -3e38]),
    ]
}

fn packed_types() -> Vec<Packed> {
    ElementType::all()
        .filter_map(|element| match element {
            ElementType::Packed(packed) => Some(packed),
            _ => None,
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn every_instruction_set_computes_what_is_defined(
        packed in select(packed_types()),
        rows in prop_oneof![1_usize..11, 14_usize..70],
        cols in prop_oneof![0_usize..140, 250_usize..270, Just(512), 500_usize..800],
        batch in prop_oneof![1_usize..=4, 5_usize..=40],
        offset in 0_usize..5,
        noise in prop_oneof![
            3 => vec(any::<u8>(), 997),
            1 => select(vec![vec![0_u8], vec![0xff], vec![0x80], vec![0x88], vec![0x7f]]),
        ],
        xs in prop_oneof![
            3 => vec(activation(), 1009),
            1 => select(vec![vec![1.0_f32], vec![-1.0], vec![0.0], vec![-1.0, 1.0, 1.0]]),
        ],
        not_finite in prop_oneof![
            5 => Just(None),
            1 => (0_usize..4000, select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY])).prop_map(Some),
        ],
        has_extreme_scales in prop::bool::weighted(0.2),
        threads in 1_usize..=4,
    ) {
        let sample = Sample::new(packed, (rows, cols), offset, &noise, has_extreme_scales);
        let w = sample.matrix();
        let mut x: Vec<f32> = xs.iter().copied().cycle().take(batch * cols).collect();
        if let Some((at, value)) = not_finite && !x.is_empty() {
            let len = x.len();
            x[at % len] = value;
        }
        let mut expected = Vec::new();
        for b in 0..batch {
            expected.extend((0..rows).map(|row| sample.dot(row, &x[b * cols..(b + 1) * cols])));
        }
        let pool = Pool::new(threads, &[]).unwrap();
        for isa in Isa::supported() {
            let kernels = Kernels::new(isa).unwrap().with(Arithmetic::Fast);
            let mut found = vec![7.0; batch * rows];
            pool.matmul(kernels, &w, &x, batch, &mut found);
            for (i, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
                prop_assert!(
                    same(found, expected),
                    "{isa} {packed:?} {rows} x {cols} of {batch} at {i}: {found:e}, not {expected:e}"
                );
            }
        }
    }
}

/// More jobs than share a wake-up, of vectors that are shared, new and none.
#[test]
fn many_products_are_those_of_one_at_a_time() {
    let noise: Vec<u8> =
        (0..200_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let x: Vec<f32> = (0..4000).map(|i| (i as f32 * 0.1).sin()).collect();
    let types = packed_types();
    let samples: Vec<Sample> =
        types.iter().map(|&packed| Sample::new(packed, (37, 300), 1, &noise, false)).collect();
    let floats: Vec<u8> = (0..37 * 300).flat_map(|i| (i as f32).cos().to_le_bytes()).collect();
    let mut jobs = Vec::new();
    for at in 0..300 {
        let batch = [1, 0, 3, 2][at % 4];
        let first = [0, 300, 7][at % 3];
        let x = &x[first..first + batch * 300];
        let w = samples[at * 7 % samples.len()].matrix();
        jobs.push(MatmulJob { w, x, batch });
        if at % 5 == 0 {
            let w = Matrix::new(ElementType::F32, 37, 300, &floats, &[]).unwrap();
            jobs.push(MatmulJob { w, x, batch });
        }
    }
    for isa in Isa::supported() {
        let kernels = Kernels::new(isa).unwrap().with(Arithmetic::Fast);
        assert_eq!((kernels.isa(), kernels.arithmetic()), (isa, Arithmetic::Fast));
        let pool = Pool::new(1, &[]).unwrap();
        let mut expected = Vec::new();
        for job in &jobs {
            for x in job.x.chunks_exact(300) {
                let mut out = vec![0.0; 37];
                pool.matmul(kernels, &job.w, x, 1, &mut out);
                expected.extend(out);
            }
        }
        for threads in 1..=4 {
            let pool = Pool::new(threads, &[]).unwrap();
            let mut found = vec![f32::NAN; expected.len()];
            pool.matmul_many(kernels, &jobs, &mut found);
            assert_eq!(found, expected);
        }
    }
}

/// Gate, up and what is between them under one wake-up: the bits of the three after one another.
#[test]
fn gated_products_are_those_of_steps() {
    let noise: Vec<u8> =
        (0..200_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let x: Vec<f32> = (0..4000).map(|i| (i as f32 * 0.1).sin()).collect();
    let packed = packed_types()[10];
    let samples: Vec<Sample> =
        (0..4).map(|at| Sample::new(packed, (200, 300), at, &noise[at * 100..], false)).collect();
    for arithmetic in [Arithmetic::Exact, Arithmetic::Fast] {
        let kernels = Kernels::new(Isa::best()).unwrap().with(arithmetic);
        let jobs: Vec<MatmulJob<'_>> = (0..140)
            .map(|at| {
                let batch = [1, 5, 0][at / 2 % 3];
                MatmulJob { w: samples[at % 4].matrix(), x: &x[..batch * 300], batch }
            })
            .collect();
        let len = jobs.iter().map(MatmulJob::out_len).sum();
        let mut expected = vec![0.0; len];
        Pool::new(1, &[]).unwrap().matmul_many(kernels, &jobs, &mut expected);
        let mut rest = &mut expected[..];
        for pair in jobs.chunks(2) {
            let (both, next) = rest.split_at_mut(2 * pair[0].out_len());
            let (gate, up) = both.split_at_mut(pair[0].out_len());
            kernels.silu_multiply(gate, up);
            rest = next;
        }
        for threads in 1..=4 {
            let pool = Pool::new(threads, &[]).unwrap();
            let mut found = vec![f32::NAN; len];
            let between = |gate: &mut [f32], up: &[f32]| kernels.silu_multiply(gate, up);
            pool.matmul_gated(kernels, &jobs, between, &mut found);
            assert_eq!(found, expected);
        }
    }
}

/// What `fast` costs: the error of a product against that of exact activations.
#[test]
fn fast_is_close_to_exact() {
    let noise: Vec<u8> =
        (0..300_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let x: Vec<f32> = (0..2048).map(|i| (i as f32 * 0.37).sin()).collect();
    for packed in packed_types() {
        let sample = Sample::new(packed, (16, 2048), 0, &noise, false);
        let pool = Pool::new(1, &[]).unwrap();
        let exact = Kernels::new(Isa::best()).unwrap();
        let [mut expected, mut found] = [[0.0; 16]; 2];
        pool.matmul(exact, &sample.matrix(), &x, 1, &mut expected);
        pool.matmul(exact.with(Arithmetic::Fast), &sample.matrix(), &x, 1, &mut found);
        let norm = expected.iter().map(|x| x * x).sum::<f32>().sqrt();
        let error = expected.iter().zip(&found).map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
        assert!(error.sqrt() < 0.01 * norm, "{packed:?}: {} of {norm}", error.sqrt());
    }
}

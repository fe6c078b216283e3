//! The loops of the kernels, written once for all vector widths.
//!
//! Owns: the walk over blocks of 32 elements, in the order of sums that the crate promises.
//! Refuses: intrinsics; a module that expands this macro has `Vector`, `WIDTH`, `REGISTERS`,
//! `splat`, `add`, `multiply`, `load`, `store`, `prefetch` and `half_scale`, and one function for each
//! stored type that decodes a block into registers.

/// Defines a module with the kernels for one stored type.
///
/// `tall` is the number of rows that share one vector, `wide` the rows and vectors of the tile for
/// batches: as many sums as registers can hold beside what is decoded.
macro_rules! element_kernels {
    (
        $module:ident, $features:literal, $element:ident, $block_bytes:literal, $decode:ident,
        tall: $tall:literal, wide: $wide_rows:literal x $wide_columns:literal
    ) => {
        mod $module {
            use std::array;

            use super::{
                Block, REGISTERS, Vector, WIDTH, add, half_scale, load, multiply, prefetch, splat,
                store,
            };
            use crate::arch::{
                ACCUMULATE_ROWS, ElementKernels, LANES, MAX_TILE, Tile,
                scalar::{Scale, Tail, $element},
            };
            use crate::matrix::Rows;

            const _: () = assert!(WIDTH * REGISTERS == LANES);
            const _: () = assert!($tall <= MAX_TILE && $wide_rows * $wide_columns <= MAX_TILE);

            /// The whole blocks of `count` rows, each cut to the same length so that the compiler
            /// sees that indices below it need no check.
            #[inline(always)]
            fn rows<'a, const R: usize>(
                w: &Rows<'a>,
                blocks: usize,
            ) -> [&'a [[u8; $block_bytes]]; R] {
                array::from_fn(|row| &w.bytes[row * w.stride..].as_chunks().0[..blocks])
            }

            /// The scales of each of `R` rows, where groups have them.
            #[inline(always)]
            fn scales<'a, S: Scale, const R: usize>(w: &Rows<'a>) -> [&'a [u8]; R] {
                array::from_fn(|row| if S::IS_GROUPED { w.scales_of(row) } else { &[][..] })
            }

            /// A block as f32, scaled where groups have scales.
            #[inline]
            #[target_feature(enable = $features)]
            fn decoded<S: Scale>(block: &[u8; $block_bytes], scales: &[u8], group: usize) -> Block {
                let mut decoded = super::$decode(block);
                if S::IS_GROUPED {
                    let scale = if S::IS_F16 {
                        half_scale(scales.as_chunks().0[group])
                    } else {
                        S::at(scales, group)
                    };
                    for k in 0..REGISTERS {
                        decoded[k] = multiply(decoded[k], splat(scale));
                    }
                }
                decoded
            }

            #[target_feature(enable = $features)]
            fn tile<S: Scale, const R: usize, const C: usize>(
                w: &Rows<'_>,
                x: &[f32],
                out: &mut [f32],
            ) {
                let cols = x.len() / C;
                let blocks = cols / LANES;
                let weights = rows::<R>(w, blocks);
                let scales = scales::<S, R>(w);
                let vectors: [&[[f32; LANES]]; C] =
                    array::from_fn(|c| &x[c * cols..].as_chunks().0[..blocks]);
                let mut sums: [[[Vector; REGISTERS]; C]; R] = [[[splat(0.0); REGISTERS]; C]; R];
                // Said once more, because the compiler forgets it on the way through the arrays.
                for r in 0..R {
                    assert!(weights[r].len() == blocks);
                }
                for c in 0..C {
                    assert!(vectors[c].len() == blocks);
                }
                for block in 0..blocks {
                    for r in 0..R {
                        // The same place in the next tile: rows lie one after another, but the
                        // processor's own prefetch stops at pages and starts late on short rows.
                        prefetch(&weights[r][block], R * w.stride);
                        let group = block >> w.blocks_shift;
                        let decoded = decoded::<S>(&weights[r][block], scales[r], group);
                        for c in 0..C {
                            let x = vectors[c][block].as_chunks::<WIDTH>().0;
                            for k in 0..REGISTERS {
                                let product = multiply(decoded[k], load(&x[k]));
                                sums[r][c][k] = add(sums[r][c][k], product);
                            }
                        }
                    }
                }
                for r in 0..R {
                    let tail = Tail::of::<$element, S>(w, r, blocks, cols % LANES);
                    for c in 0..C {
                        let mut lanes = [0.0; LANES];
                        for (k, lanes) in lanes.as_chunks_mut().0.iter_mut().enumerate() {
                            store(lanes, sums[r][c][k]);
                        }
                        let x = &x[c * cols + blocks * LANES..(c + 1) * cols];
                        out[r * C + c] = tail.finish::<$element, S>(lanes, x);
                    }
                }
            }

            #[target_feature(enable = $features)]
            fn accumulate<S: Scale, const R: usize>(w: &Rows<'_>, a: &[f32; R], out: &mut [f32]) {
                let (whole, rest) = out.as_chunks_mut::<LANES>();
                let blocks = whole.len();
                let weights = rows::<R>(w, blocks);
                let scales = scales::<S, R>(w);
                for (block, out) in whole.iter_mut().enumerate() {
                    let out = out.as_chunks_mut::<WIDTH>().0;
                    let mut sums = [splat(0.0); REGISTERS];
                    for k in 0..REGISTERS {
                        sums[k] = load(&out[k]);
                    }
                    for r in 0..R {
                        prefetch(&weights[r][block], R * w.stride);
                        let group = block >> w.blocks_shift;
                        let decoded = decoded::<S>(&weights[r][block], scales[r], group);
                        for k in 0..REGISTERS {
                            sums[k] = add(sums[k], multiply(splat(a[r]), decoded[k]));
                        }
                    }
                    for k in 0..REGISTERS {
                        store(&mut out[k], sums[k]);
                    }
                }
                for r in 0..R {
                    let tail = Tail::of::<$element, S>(w, r, blocks, rest.len());
                    tail.accumulate::<$element, S>(a[r], rest);
                }
            }

            #[target_feature(enable = $features)]
            fn decode<S: Scale>(w: &Rows<'_>, out: &mut [f32]) {
                let (whole, rest) = out.as_chunks_mut::<LANES>();
                let [weights] = rows::<1>(w, whole.len());
                let [scales] = scales::<S, 1>(w);
                for (index, (out, block)) in whole.iter_mut().zip(weights).enumerate() {
                    let decoded = decoded::<S>(block, scales, index >> w.blocks_shift);
                    for (k, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                        store(out, decoded[k]);
                    }
                }
                let tail = Tail::of::<$element, S>(w, 0, weights.len(), rest.len());
                tail.decode::<$element, S>(rest);
            }

            // The functions below are reached only through the parent's table, which it hands out
            // after it has found the features.

            fn run_tile<S: Scale, const R: usize, const C: usize>(
                w: &Rows<'_>,
                x: &[f32],
                out: &mut [f32],
            ) {
                // SAFETY: the parent's `table` has found the features.
                unsafe { tile::<S, R, C>(w, x, out) }
            }

            fn run_accumulate<S: Scale>(w: &Rows<'_>, a: f32, out: &mut [f32]) {
                // SAFETY: the parent's `table` has found the features.
                unsafe { accumulate::<S, 1>(w, &[a], out) }
            }

            fn run_accumulate_tile<S: Scale>(
                w: &Rows<'_>,
                a: &[f32; ACCUMULATE_ROWS],
                out: &mut [f32],
            ) {
                // SAFETY: the parent's `table` has found the features.
                unsafe { accumulate::<S, ACCUMULATE_ROWS>(w, a, out) }
            }

            fn run_decode<S: Scale>(w: &Rows<'_>, out: &mut [f32]) {
                // SAFETY: the parent's `table` has found the features.
                unsafe { decode::<S>(w, out) }
            }

            pub(super) const fn kernels<S: Scale>() -> ElementKernels {
                ElementKernels {
                    single: Tile { rows: 1, columns: 1, run: run_tile::<S, 1, 1> },
                    tall: Tile { rows: $tall, columns: 1, run: run_tile::<S, $tall, 1> },
                    wide: Tile {
                        rows: $wide_rows,
                        columns: $wide_columns,
                        run: run_tile::<S, $wide_rows, $wide_columns>,
                    },
                    accumulate: run_accumulate::<S>,
                    accumulate_tile: run_accumulate_tile::<S>,
                    decode: run_decode::<S>,
                }
            }
        }
    };
}
pub(super) use element_kernels;

/// The kernels of a module of integers, for each kind of scales.
macro_rules! packed_kernels {
    ($module:ident) => {
        $crate::arch::PackedKernels {
            by_row: $module::kernels::<$crate::arch::scalar::ByRow>(),
            by_f32: $module::kernels::<$crate::arch::scalar::ByF32>(),
            by_f16: $module::kernels::<$crate::arch::scalar::ByF16>(),
        }
    };
}
pub(super) use packed_kernels;

/// The kernels of the module of e4m3 elements, for each kind of scales.
macro_rules! fp8_kernels {
    ($module:ident) => {
        $crate::arch::Fp8Kernels {
            by_f32: $module::kernels::<$crate::arch::scalar::ByF32>(),
            by_f16: $module::kernels::<$crate::arch::scalar::ByF16>(),
            by_bf16: $module::kernels::<$crate::arch::scalar::ByBf16>(),
        }
    };
}
pub(super) use fp8_kernels;

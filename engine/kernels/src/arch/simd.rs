//! The loops of the kernels, written once for all vector widths.
//!
//! Owns: the walk over blocks of 32 elements, in the order of sums that the crate promises.
//! Refuses: intrinsics; a module that expands this macro has `Vector`, `WIDTH`, `REGISTERS`,
//! `splat`, `add`, `multiply`, `load`, `store` and `prefetch`, and one function for each stored type that
//! decodes a block into registers.

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

            use super::{REGISTERS, Vector, WIDTH, add, load, multiply, prefetch, splat, store};
            use crate::arch::{
                ACCUMULATE_ROWS, ElementKernels, LANES, MAX_TILE, Tile,
                scalar::{accumulate_tail, decode_tail, finish, $element},
            };

            const _: () = assert!(WIDTH * REGISTERS == LANES);
            const _: () = assert!($tall <= MAX_TILE && $wide_rows * $wide_columns <= MAX_TILE);

            /// The whole blocks of `count` rows, each cut to the same length so that the compiler
            /// sees that indices below it need no check.
            #[inline(always)]
            fn rows<const R: usize>(
                w: &[u8],
                row_stride: usize,
                blocks: usize,
            ) -> [&[[u8; $block_bytes]]; R] {
                array::from_fn(|row| &w[row * row_stride..].as_chunks().0[..blocks])
            }

            #[target_feature(enable = $features)]
            fn tile<const R: usize, const C: usize>(
                w: &[u8],
                row_stride: usize,
                x: &[f32],
                out: &mut [f32],
            ) {
                let cols = x.len() / C;
                let blocks = cols / LANES;
                let weights = rows::<R>(w, row_stride, blocks);
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
                        prefetch(&weights[r][block], R * row_stride);
                        let decoded = super::$decode(&weights[r][block]);
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
                    let tail = &w[r * row_stride + blocks * $block_bytes..];
                    for c in 0..C {
                        let mut lanes = [0.0; LANES];
                        for (k, lanes) in lanes.as_chunks_mut().0.iter_mut().enumerate() {
                            store(lanes, sums[r][c][k]);
                        }
                        let x = &x[c * cols + blocks * LANES..(c + 1) * cols];
                        out[r * C + c] = finish::<$element>(lanes, tail, x);
                    }
                }
            }

            #[target_feature(enable = $features)]
            fn accumulate<const R: usize>(
                w: &[u8],
                row_stride: usize,
                a: &[f32; R],
                out: &mut [f32],
            ) {
                let (whole, rest) = out.as_chunks_mut::<LANES>();
                let blocks = whole.len();
                let weights = rows::<R>(w, row_stride, blocks);
                for (block, out) in whole.iter_mut().enumerate() {
                    let out = out.as_chunks_mut::<WIDTH>().0;
                    let mut sums = [splat(0.0); REGISTERS];
                    for k in 0..REGISTERS {
                        sums[k] = load(&out[k]);
                    }
                    for r in 0..R {
                        prefetch(&weights[r][block], R * row_stride);
                        let decoded = super::$decode(&weights[r][block]);
                        for k in 0..REGISTERS {
                            sums[k] = add(sums[k], multiply(splat(a[r]), decoded[k]));
                        }
                    }
                    for k in 0..REGISTERS {
                        store(&mut out[k], sums[k]);
                    }
                }
                for r in 0..R {
                    let tail = &w[r * row_stride + blocks * $block_bytes..];
                    accumulate_tail::<$element>(tail, a[r], rest);
                }
            }

            #[target_feature(enable = $features)]
            fn decode(w: &[u8], out: &mut [f32]) {
                let (whole, rest) = out.as_chunks_mut::<LANES>();
                let [weights] = rows::<1>(w, 0, whole.len());
                for (out, block) in whole.iter_mut().zip(weights) {
                    let decoded = super::$decode(block);
                    for (k, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                        store(out, decoded[k]);
                    }
                }
                decode_tail::<$element>(&w[weights.len() * $block_bytes..], rest);
            }

            // The functions below are reached only through the parent's table, which it hands out
            // after it has found the features.

            fn run_tile<const R: usize, const C: usize>(
                w: &[u8],
                row_stride: usize,
                x: &[f32],
                out: &mut [f32],
            ) {
                // SAFETY: the parent's `table` has found the features.
                unsafe { tile::<R, C>(w, row_stride, x, out) }
            }

            fn run_accumulate(w: &[u8], a: f32, out: &mut [f32]) {
                // SAFETY: the parent's `table` has found the features.
                unsafe { accumulate(w, 0, &[a], out) }
            }

            fn run_accumulate_tile(
                w: &[u8],
                row_stride: usize,
                a: &[f32; ACCUMULATE_ROWS],
                out: &mut [f32],
            ) {
                // SAFETY: the parent's `table` has found the features.
                unsafe { accumulate(w, row_stride, a, out) }
            }

            fn run_decode(w: &[u8], out: &mut [f32]) {
                // SAFETY: the parent's `table` has found the features.
                unsafe { decode(w, out) }
            }

            pub(super) const KERNELS: ElementKernels = ElementKernels {
                single: Tile { rows: 1, columns: 1, run: run_tile::<1, 1> },
                tall: Tile { rows: $tall, columns: 1, run: run_tile::<$tall, 1> },
                wide: Tile {
                    rows: $wide_rows,
                    columns: $wide_columns,
                    run: run_tile::<$wide_rows, $wide_columns>,
                },
                accumulate: run_accumulate,
                accumulate_tile: run_accumulate_tile,
                decode: run_decode,
            };
        }
    };
}
pub(super) use element_kernels;

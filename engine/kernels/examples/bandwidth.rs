//! Prints how many GB of weights a second each instruction set multiplies, for each stored type.
//!
//! `bandwidth [ROWS COLS [MIB]]`: products of (ROWS, COLS) matrices with one vector and with eight,
//! on one thread and on all, over a buffer of MIB MiB of weights that is walked through matrix by
//! matrix. Rounds are interleaved; the median is printed, and the best, which is what a busy machine
//! could do. Compare with the machine's bandwidth only where the buffer is well past the last cache.

use std::{error::Error, hint::black_box, time::Instant};

use tierkeep_kernels::{ElementType, Isa, Kernels, Matrix, Pool};

const ROUNDS: usize = 15;
/// Weight bytes times columns of one round: some milliseconds.
const ROUND_BYTES: usize = 32 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<usize> =
        std::env::args().skip(1).map(|a| a.parse()).collect::<Result<_, _>>()?;
    let rows = arguments.first().copied().unwrap_or(2048);
    let cols = arguments.get(1).copied().unwrap_or(6144);
    let bytes = arguments.get(2).copied().unwrap_or(384) << 20;
    let processors = std::thread::available_parallelism()?.get();
    let pools = [Pool::new(1, &[])?, Pool::new(processors, &[])?];
    // Small floats in every 16-bit half, so that no type meets NaN or denormals.
    let data: Vec<u8> = (0..bytes as u32)
        .map(|i| if i % 2 == 1 { 0x3c } else { (i.wrapping_mul(2_654_435_761) >> 24) as u8 })
        .collect();
    let scales = vec![0_u8; rows * 4];
    let x: Vec<f32> = (0..8 * cols).map(|i| (i as f32 * 0.1).sin()).collect();
    let mut out = vec![0.0; 8 * rows];
    for element in ElementType::ALL {
        let size = rows * element.row_bytes(cols);
        let scales = if element.has_scales() { &scales[..] } else { &[] };
        let mut cases = Vec::new();
        for isa in Isa::supported() {
            for pool in &pools {
                for batch in [1, 8] {
                    cases.push((Kernels::new(isa)?, pool, batch, Vec::new()));
                }
            }
        }
        let matrices = (bytes / size).max(1);
        let mut next = 0;
        for _ in 0..ROUNDS {
            for (kernels, pool, batch, seconds) in &mut cases {
                let count = (ROUND_BYTES / size / *batch).max(1);
                let start = Instant::now();
                for _ in 0..count {
                    let data = &data[next * size..(next + 1) * size];
                    next = (next + 1) % matrices;
                    let w = Matrix::new(element, rows, cols, data, scales)?;
                    let out = &mut out[..*batch * rows];
                    pool.matmul(*kernels, &w, &x[..*batch * cols], *batch, out);
                    black_box(out);
                }
                seconds.push(start.elapsed().as_secs_f64() / count as f64);
            }
        }
        for (kernels, pool, batch, mut seconds) in cases {
            seconds.sort_by(f64::total_cmp);
            let speed = |seconds: f64| size as f64 / seconds / 1e9;
            let (median, best) = (seconds[ROUNDS / 2], seconds[0]);
            #[expect(clippy::print_stdout, reason = "an example that prints figures")]
            {
                println!(
                    "{element:5} {:6} threads {} batch {batch}: {:5.1} GB/s of weights (best {:5.1}), \
                     {:6.1} GFLOP/s (best {:6.1})",
                    kernels.isa(),
                    pool.threads(),
                    speed(median),
                    speed(best),
                    2.0 * (rows * cols * batch) as f64 / median / 1e9,
                    2.0 * (rows * cols * batch) as f64 / best / 1e9,
                );
            }
        }
    }
    Ok(())
}

//! How fast products are, against a loop that only reads: `products [TYPE ...] [--batch N,N] [--threads N]`.
//!
//! Owns: one table, for those who change kernels. Every figure is the best of many short interleaved
//! repetitions in this process, which walk over more weights than caches hold: what else the machine does
//! disturbs the best least.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a program for those who change this crate"
)]

use std::{hint::black_box, time::Instant};

use tierkeep_kernels::{Arithmetic, ElementType, Isa, Kernels, MatmulJob, Matrix, Pool};

/// Matrices of this shape, as many as make `BYTES`, are multiplied under one wake-up.
const ROWS: usize = 2048;
const COLS: usize = 2048;
const BYTES: usize = 400 << 20;
const ROUNDS: usize = 2;
/// Weight bytes of a repetition, for one vector.
const SLICE: usize = 40 << 20;

fn main() {
    let (mut types, mut batches, mut threads) = (Vec::new(), vec![1, 4, 16, 32, 128], 2);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--batch" => {
                let list = arguments.next().expect("numbers after --batch");
                batches = list.split(',').map(|n| n.parse().expect("a number")).collect();
            }
            "--threads" => threads = arguments.next().and_then(|n| n.parse().ok()).unwrap(),
            name => types
                .push(ElementType::all().find(|e| e.to_string() == name).expect("a stored type")),
        }
    }
    if types.is_empty() {
        types = ElementType::all().collect();
    }
    let pool = Pool::new(threads, &[]).unwrap();
    let noise = noise(BYTES);
    empty_tasks(&pool);
    println!(
        "type            isa     batch     read    exact     fast GB/s    exact     fast G MAC/s"
    );
    for element in types {
        for &batch in &batches {
            for isa in Isa::supported().into_iter().filter(|&isa| isa != Isa::Scalar) {
                line(&pool, element, isa, batch, &noise);
            }
        }
    }
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        out.extend((state ^ state >> 29).to_le_bytes());
    }
    out
}

fn empty_tasks(pool: &Pool) {
    let start = Instant::now();
    for _ in 0..20_000 {
        pool.run(|worker| {
            black_box(worker);
        });
    }
    println!("an empty task: {:.2} us", start.elapsed().as_secs_f64() * 1e6 / 20_000.0);
}

fn line(pool: &Pool, element: ElementType, isa: Isa, batch: usize, noise: &[u8]) {
    let (data, scales) = (
        ROWS * element.row_bytes(COLS),
        element.scale_rows(0, ROWS) * element.row_scale_bytes(COLS),
    );
    let count = BYTES / (data + scales);
    // Fewer matrices at a time where there is more to compute on each.
    let slice = (SLICE / (data + scales) / batch.div_ceil(8)).clamp(1, 100);
    // Scales that are numbers: 1 in every type but that of powers of two.
    let one: &[u8] = match element.row_scale_bytes(128) * element.rows_per_scale() {
        0 => &[],
        _ if element == ElementType::MxFp4 => &[120],
        _ if element.to_string().ends_with("-f16") => &[0, 0x3c],
        _ if element.to_string().ends_with("-bf16") => &[0x80, 0x3f],
        _ => &[0, 0, 0x80, 0x3f],
    };
    let all_scales: Vec<u8> = one.iter().copied().cycle().take(count * scales).collect();
    let x: Vec<f32> = (0..batch * COLS).map(|i| (i as f32 * 0.1).sin()).collect();
    let jobs: Vec<MatmulJob<'_>> = (0..count)
        .map(|at| {
            let w = Matrix::new(
                element,
                ROWS,
                COLS,
                &noise[at * data..(at + 1) * data],
                &all_scales[at * scales..(at + 1) * scales],
            );
            MatmulJob { w: w.unwrap(), x: &x, batch }
        })
        .collect();
    let mut out = vec![0.0; slice * batch * ROWS];
    let exact = Kernels::new(isa).unwrap();
    let mut best = [f64::INFINITY; 3];
    let slices = jobs.chunks_exact(slice).zip(noise.chunks_exact(slice * data));
    // More than two seconds say nothing new.
    let begin = Instant::now();
    for (jobs, bytes) in slices.cycle().take(ROUNDS * count / slice) {
        let mut time = |at: usize, work: &mut dyn FnMut()| {
            let start = Instant::now();
            work();
            best[at] = best[at].min(start.elapsed().as_secs_f64());
        };
        time(0, &mut || read(pool, bytes));
        time(1, &mut || pool.matmul_many(exact, jobs, &mut out));
        time(2, &mut || pool.matmul_many(exact.with(Arithmetic::Fast), jobs, &mut out));
        if begin.elapsed().as_secs() >= 2 {
            break;
        }
    }
    let [read, exact, fast] = best;
    let bytes = (slice * (data + scales)) as f64 / 1e9;
    let products = (slice * ROWS * COLS * batch) as f64 / 1e9;
    println!(
        "{element:<15} {isa:<8} {batch:>4} {:>8.1} {:>8.1} {:>8.1} {:>13.1} {:>8.1}",
        (slice * data) as f64 / 1e9 / read,
        bytes / exact,
        bytes / fast,
        products / exact,
        products / fast
    );
}

/// Sums eight bytes of each line of a cache.
fn read(pool: &Pool, bytes: &[u8]) {
    let lines = bytes.as_chunks::<64>().0;
    let threads = pool.threads();
    pool.run(|worker| {
        let own = &lines[lines.len() * worker / threads..lines.len() * (worker + 1) / threads];
        let mut sums = [0_u64; 8];
        for eight in own.as_chunks::<8>().0 {
            for (sum, line) in sums.iter_mut().zip(eight) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*line.as_chunks().0.first().unwrap()));
            }
        }
        black_box(sums);
    });
}

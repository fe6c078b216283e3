//! The pool under many small tasks, several callers, panics and drops.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::*;
use crate::{ElementType, Isa, Kernels, MatmulJob, Matrix};

#[test]
fn every_worker_runs_once_in_thousands_of_tasks() {
    for threads in 1..=8 {
        let pool = Pool::new(threads, &[]).unwrap();
        assert_eq!(pool.threads(), threads);
        let counts: Vec<_> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..1000 {
            pool.run(|worker| {
                counts[worker].fetch_add(1, Relaxed);
            });
        }
        assert!(counts.iter().all(|count| count.load(Relaxed) == 1000));
    }
}

#[test]
fn workers_that_sleep_are_woken() {
    let pool = Pool::new(4, &[]).unwrap();
    let count = AtomicUsize::new(0);
    for pause in [0, 20, 60, 100, 200, 1000, 5000].repeat(5) {
        thread::sleep(Duration::from_micros(pause));
        pool.run(|worker| {
            // Uneven work lets the caller fall asleep too.
            thread::sleep(Duration::from_micros(pause / 4 * worker as u64));
            count.fetch_add(1, Relaxed);
        });
    }
    assert_eq!(count.load(Relaxed), 35 * 4);
}

#[test]
fn chunks_cover_the_slice_once_and_scratch_is_the_workers_own() {
    for threads in 1..=5 {
        let pool = Pool::new(threads, &[]).unwrap();
        for len in [0, 1, 2, 7, 64, 1001] {
            for chunk_len in [1, 3, 64, 2000] {
                let mut out = vec![0_usize; len];
                pool.for_each_chunk(&mut out, chunk_len, |index, chunk| {
                    for (i, value) in chunk.iter_mut().enumerate() {
                        *value += index * chunk_len + i + 1;
                    }
                });
                assert!(out.iter().enumerate().all(|(i, &value)| value == i + 1));

                let mut out = vec![0.0; len];
                let mut scratch = vec![0.0; threads * 2];
                pool.for_each_chunk_with_scratch(
                    &mut out,
                    chunk_len,
                    &mut scratch,
                    2,
                    |i, c, s| {
                        assert_eq!(s.len(), 2);
                        s[0] += c.len() as f32;
                        c.fill(i as f32);
                    },
                );
                assert_eq!(scratch.iter().sum::<f32>(), len as f32);
            }
        }
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    for threads in [1, 2, 4] {
        let pool = Pool::new(threads, &[]).unwrap();
        for failing in 0..threads {
            for _ in 0..20 {
                let ran = AtomicUsize::new(0);
                let result = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(|worker| {
                        ran.fetch_add(1, Relaxed);
                        assert!(worker != failing, "worker {worker} fails");
                    });
                }));
                let payload = result.unwrap_err();
                let message = payload.downcast_ref::<String>().unwrap();
                assert_eq!(*message, format!("worker {failing} fails"));
            }
        }
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(|_| panic!("all fail"))));
        assert!(result.is_err());
        let count = AtomicUsize::new(0);
        pool.run(|_| {
            count.fetch_add(1, Relaxed);
        });
        assert_eq!(count.load(Relaxed), threads);
    }
}

#[test]
fn nested_calls_run_on_the_thread_that_makes_them() {
    let pool = Pool::new(3, &[]).unwrap();
    let count = AtomicUsize::new(0);
    pool.run(|_| {
        let outer = thread::current().id();
        pool.run(|_| {
            assert_eq!(thread::current().id(), outer);
            count.fetch_add(1, Relaxed);
        });
    });
    assert_eq!(count.load(Relaxed), 9);
}

#[test]
fn several_callers_take_turns() {
    let pool = Pool::new(3, &[]).unwrap();
    let count = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let mut out = [0_u8; 10];
                    pool.for_each_chunk(&mut out, 1, |_, chunk| chunk[0] += 1);
                    assert_eq!(out, [1; 10]);
                    count.fetch_add(1, Relaxed);
                }
            });
        }
    });
    assert_eq!(count.load(Relaxed), 800);
}

#[test]
fn dropping_ends_workers_awake_or_asleep() {
    for i in 0..100 {
        let pool = Pool::new(1 + i % 8, &[]).unwrap();
        if i % 3 == 0 {
            pool.run(|_| {});
        }
        if i % 10 == 0 {
            thread::sleep(Duration::from_micros(300));
        }
        drop(pool);
    }
}

#[test]
fn what_cannot_be_is_refused() {
    assert!(Pool::new(0, &[]).is_err());
    assert!(Pool::new(2, &[0]).is_err());
    assert!(Pool::new(2, &[0, usize::MAX]).is_err());
}

#[test]
fn products_do_not_depend_on_threads_or_on_being_grouped() {
    let kernels = Kernels::new(Isa::Scalar).unwrap();
    let noise: Vec<u8> =
        (0..400_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let scales: Vec<u8> = (0..4096).flat_map(|i| (0.01 + i as f32).to_le_bytes()).collect();
    let (rows, cols) = (301, 515);
    let int8 =
        Matrix::new(ElementType::INT8, rows, cols, &noise[..rows * cols], &scales[..rows * 4]);
    let int8 = int8.unwrap();
    let int4 = Matrix::new(ElementType::INT4, 77, 1031, &noise[1..1 + 77 * 516], &scales[..77 * 4]);
    let int4 = int4.unwrap();
    let empty = Matrix::new(ElementType::INT8, 0, 5, &[], &[]).unwrap();
    let x: Vec<f32> = (0..3 * 1031).map(|i| (i as f32 * 0.1).sin()).collect();
    let jobs = [
        MatmulJob { w: int8, x: &x[..3 * cols], batch: 3 },
        MatmulJob { w: empty, x: &x[..10], batch: 2 },
        MatmulJob { w: int4, x: &x[..1031], batch: 1 },
        MatmulJob { w: int8, x: &[], batch: 0 },
        MatmulJob { w: int8, x: &x[7..7 + cols], batch: 1 },
    ];
    let len: usize = jobs.iter().map(MatmulJob::out_len).sum();
    let mut expected = Vec::new();
    for job in &jobs {
        for x in job.x.chunks_exact(job.w.cols()) {
            expected.extend((0..job.w.rows()).map(|row| kernels.dot(&job.w, row, x)));
        }
    }
    for threads in 1..=6 {
        let pool = Pool::new(threads, &[]).unwrap();
        for _ in 0..5 {
            let mut out = vec![f32::NAN; len];
            pool.matmul_many(kernels, &jobs, &mut out);
            assert_eq!(out, expected);
        }
        let mut out = vec![f32::NAN; 3 * rows];
        pool.matmul(kernels, &int8, &x[..3 * cols], 3, &mut out);
        assert_eq!(out, expected[..3 * rows]);
        pool.matmul_many(kernels, &[], &mut []);
    }
}

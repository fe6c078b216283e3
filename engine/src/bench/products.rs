//! Single products, timed: a stored type, a shape, a batch, an instruction set and a number of threads at
//! a time. Owns the bytes that stand for weights, which no model is read for.

use std::ops::ControlFlow;
use std::time::Instant;

use serde::Serialize;
use tierkeep_kernels::{Arithmetic, ElementType, Isa, Kernels, Matrix, MatrixError, Pool};

use super::statistics::Repeats;
use crate::error::EngineError;

/// Most bytes that stand for weights, and most elements of vectors and results.
const MOST_BYTES: usize = 1 << 36;

/// Where weights and scales of a copy begin: at multiples of this.
const ALIGN: usize = 64;

/// What activations are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProductNumerics {
    /// Floats.
    Exact,
    /// Integers of 8 bits, against packed integers; quantising them is part of the time.
    Fast,
}

impl ProductNumerics {
    /// Its name in plans and options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Fast => "fast",
        }
    }

    fn arithmetic(self) -> Arithmetic {
        match self {
            Self::Exact => Arithmetic::Exact,
            Self::Fast => Arithmetic::Fast,
        }
    }
}

/// One product.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Product {
    /// Stored type of the weights, as [`element_names`] has it.
    pub element: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Vectors.
    pub batch: usize,
    /// What activations are.
    pub numerics: ProductNumerics,
    /// Instruction set.
    pub isa: String,
    /// Threads.
    pub threads: usize,
}

/// How fast it was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProductSpeed {
    /// Which.
    pub product: Product,
    /// Copies of the matrix that were gone through, one after another, in a pass.
    pub copies: usize,
    /// Their bytes, scales included.
    pub bytes: u64,
    /// Seconds of one product, over passes.
    pub seconds: Repeats,
}

impl ProductSpeed {
    /// Weights times vectors a second, at the median.
    #[must_use]
    pub fn weights_per_s(&self) -> f64 {
        let p = &self.product;
        p.rows as f64 * p.cols as f64 * p.batch as f64 / self.seconds.median
    }

    /// Bytes of weights and scales that were read a second, at the median.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.copies.max(1) as f64 / self.seconds.median
    }
}

/// Why products cannot be timed.
#[derive(Debug, thiserror::Error)]
pub enum ProductError {
    /// No such stored type.
    #[error("there is no stored type {found:?}: the types are {}", known.join(", "))]
    Element {
        /// What was asked for.
        found: String,
        /// What there is.
        known: Vec<String>,
    },
    /// A shape, a batch or a size that no memory has.
    #[error("a product of {rows} x {cols} by {batch} is empty or too large to be timed")]
    Shape {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// Vectors.
        batch: usize,
    },
    /// No memory for the weights.
    #[error("there is no memory for {bytes} bytes of weights: ask for fewer with --bytes")]
    Memory {
        /// What was asked for.
        bytes: usize,
    },
    /// What the engine refuses: an instruction set, threads.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl From<MatrixError> for ProductError {
    fn from(error: MatrixError) -> Self {
        EngineError::from(error).into()
    }
}

/// Names of all stored types.
#[must_use]
pub fn element_names() -> Vec<String> {
    ElementType::all().map(|element| element.to_string()).collect()
}

/// Whether products of a stored type are other ones with fast numerics. A name that is none has no others.
#[must_use]
pub fn has_fast(name: &str) -> bool {
    match element(name) {
        Ok(ElementType::Packed(_)) => true,
        Ok(
            ElementType::F32
            | ElementType::F16
            | ElementType::Bf16
            | ElementType::Fp8(_)
            | ElementType::MxFp4,
        )
        | Err(_) => false,
    }
}

fn element(name: &str) -> Result<ElementType, ProductError> {
    ElementType::all()
        .find(|element| element.to_string() == name)
        .ok_or_else(|| ProductError::Element { found: name.to_owned(), known: element_names() })
}

/// A product with all that it is computed with.
struct Ready {
    product: Product,
    element: ElementType,
    kernels: Kernels,
    /// Bytes of one matrix and of its scales.
    sizes: (usize, usize),
    copies: usize,
    times: Vec<f64>,
}

impl Ready {
    fn new(product: Product, working_bytes: usize) -> Result<Self, ProductError> {
        let Product { rows, cols, batch, .. } = product;
        let shape = || ProductError::Shape { rows, cols, batch };
        let most = [rows.checked_mul(cols), rows.checked_mul(batch), cols.checked_mul(batch)];
        if most.into_iter().any(|n| n.is_none_or(|n| n == 0 || n > MOST_BYTES / 8)) {
            return Err(shape());
        }
        let element = element(&product.element)?;
        let isa = product.isa.parse::<Isa>().map_err(EngineError::from)?;
        let kernels = Kernels::new(isa).map_err(EngineError::from)?;
        let kernels = kernels.with(product.numerics.arithmetic());
        let data = element.row_bytes(cols) * rows;
        let scales = element.scale_rows(0, rows) * element.row_scale_bytes(cols);
        let copies = (working_bytes / (data + scales)).max(1);
        Ok(Self { product, element, kernels, sizes: (data, scales), copies, times: Vec::new() })
    }

    /// Bytes of weights and scales in all copies.
    fn bytes(&self) -> usize {
        self.copies * (self.sizes.0 + self.sizes.1)
    }

    /// From one copy to the next: both parts begin at a cache line, as they do in a container.
    fn stride(&self) -> usize {
        self.sizes.0.next_multiple_of(ALIGN) + self.sizes.1.next_multiple_of(ALIGN)
    }

    /// Goes through all copies once.
    fn pass(
        &mut self,
        pool: &Pool,
        weights: &[u8],
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), ProductError> {
        let Product { rows, cols, batch, .. } = self.product;
        let (data, scales) = self.sizes;
        let (x, out) = (&x[..cols * batch], &mut out[..rows * batch]);
        let start = Instant::now();
        let scales_at = data.next_multiple_of(ALIGN);
        for copy in weights.chunks_exact(self.stride()).take(self.copies) {
            let scales = &copy[scales_at..scales_at + scales];
            let matrix = Matrix::new(self.element, rows, cols, &copy[..data], scales)?;
            pool.matmul(self.kernels, &matrix, x, batch, out);
        }
        std::hint::black_box(&mut *out);
        self.times.push(start.elapsed().as_secs_f64() / self.copies as f64);
        Ok(())
    }
}

/// Times every product over `working_bytes` of weights, or over one matrix where that is more: in
/// `passes` rounds of all of them, so that what slows the machine down for a while slows all of them. One
/// round before is not counted.
///
/// The weights of all are the same bytes, finite in every type. `watch(done, rounds)` may end it after a
/// round; what has been timed by then is returned, nothing of it without a whole round.
///
/// # Errors
/// [`ProductError`].
pub fn time_products(
    products: &[Product],
    working_bytes: usize,
    passes: usize,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<ProductSpeed>, ProductError> {
    let mut ready: Vec<Ready> = products
        .iter()
        .map(|product| Ready::new(product.clone(), working_bytes.min(MOST_BYTES)))
        .collect::<Result<_, _>>()?;
    let longest = |size: fn(&Product) -> usize| products.iter().map(size).max().unwrap_or(0);
    let weights = weights(ready.iter().map(|r| r.copies * r.stride()).max().unwrap_or(0))?;
    // Of both signs, so that sums stay small.
    let x: Vec<f32> = (0..longest(|p| p.cols * p.batch))
        .map(|at| ((at * 37) % 101) as f32 / 50.0 - 1.0)
        .collect();
    let mut out = vec![0.0; longest(|p| p.rows * p.batch)];
    let mut pools: Vec<Pool> = Vec::new();
    for product in products {
        if !pools.iter().any(|pool| pool.threads() == product.threads) {
            pools.push(Pool::new(product.threads, &[]).map_err(EngineError::Threads)?);
        }
    }
    for round in 0..=passes.max(1) {
        if watch(round, passes.max(1)).is_break() {
            break;
        }
        for ready in &mut ready {
            let threads = ready.product.threads;
            let Some(pool) = pools.iter().find(|pool| pool.threads() == threads) else { continue };
            ready.pass(pool, &weights, &x, &mut out)?;
            if round == 0 {
                ready.times.clear();
            }
        }
    }
    Ok(ready
        .into_iter()
        .filter_map(|ready| {
            Some(ProductSpeed {
                bytes: ready.bytes() as u64,
                copies: ready.copies,
                seconds: Repeats::of(ready.times)?,
                product: ready.product,
            })
        })
        .collect())
}

/// Bytes that are finite as weights and scales of every type: each second byte is `0x3c` or `0xbc` but for
/// its lowest bit, the exponent of a 16-bit or 32-bit float between 0.007 and 2; no byte is the NaN of e4m3,
/// and as an exponent (E8M0) none is above 2^62.
fn weights(bytes: usize) -> Result<Vec<u8>, ProductError> {
    let mut weights = Vec::new();
    weights.try_reserve_exact(bytes).map_err(|_| ProductError::Memory { bytes })?;
    let mut state = 1_u64;
    while weights.len() < bytes {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (state >> 11) ^ (state >> 43);
        let block = mixed.to_le_bytes();
        let word = [0, 1, 2, 3, 4, 5, 6, 7].map(|at: usize| {
            if at % 2 == 1 { 0x3c | (block[at] & 0x81) } else { block[at] & 0x77 }
        });
        weights.extend_from_slice(&word[..word.len().min(bytes - weights.len())]);
    }
    Ok(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(element: &str) -> Product {
        let (isa, numerics) = ("scalar".to_owned(), ProductNumerics::Exact);
        Product {
            element: element.to_owned(),
            rows: 5,
            cols: 131,
            batch: 2,
            numerics,
            isa,
            threads: 1,
        }
    }

    #[test]
    fn every_type_is_timed_on_finite_numbers() {
        let mut products: Vec<Product> = element_names().iter().map(|name| product(name)).collect();
        assert!(products.len() > 10);
        let packed = products.iter().filter(|product| has_fast(&product.element));
        let fast = packed.map(|p| Product { numerics: ProductNumerics::Fast, ..p.clone() });
        products.extend(fast.collect::<Vec<_>>());
        assert!(
            products.iter().any(|p| p.numerics == ProductNumerics::Fast && p.element == "int8")
        );
        let speeds =
            time_products(&products, 4096, 2, &mut |_, _| ControlFlow::Continue(())).unwrap();
        assert_eq!(speeds.len(), products.len());
        for speed in &speeds {
            assert_eq!(speed.seconds.count, 2, "{speed:?}");
            assert!(speed.bytes <= 4096 || speed.copies == 1, "{speed:?}");
            assert!(speed.weights_per_s() > 0.0 && speed.bytes_per_s() > 0.0);
        }
        let weights = weights(1 << 12).unwrap();
        for name in element_names() {
            let ready = Ready::new(product(&name), 1).unwrap();
            let (data, scales) = weights.split_at(ready.sizes.0.next_multiple_of(ALIGN));
            let (data, scales) = (&data[..ready.sizes.0], &scales[..ready.sizes.1]);
            let matrix = Matrix::new(ready.element, 5, 131, data, scales).unwrap();
            let mut row = vec![0.0; 131];
            ready.kernels.decode_row(&matrix, 4, &mut row);
            // The sum of any row is finite too.
            assert!(row.iter().all(|x| x.abs() < 1e30), "{name}: {row:?}");
        }
    }

    #[test]
    fn figures_by_hand() {
        // 2 x 8 weights of 10 bytes in all, three vectors, in a quarter of a second.
        let speed = ProductSpeed {
            product: Product { rows: 2, cols: 8, batch: 3, ..product("f32") },
            copies: 4,
            bytes: 40,
            seconds: Repeats::of([0.25]).unwrap(),
        };
        assert_eq!((speed.weights_per_s(), speed.bytes_per_s()), (192.0, 40.0));
    }

    #[test]
    fn what_cannot_be_timed_is_refused_by_name() {
        let refused = |product: Product| {
            let all = [product];
            time_products(&all, 1, 1, &mut |_, _| ControlFlow::Continue(())).unwrap_err()
        };
        let text = refused(product("int3")).to_string();
        assert!(text.contains("int3") && text.contains("bf16"), "{text}");
        for (rows, cols) in [(0, 4), (usize::MAX, 2), (1 << 35, 1)] {
            let error = refused(Product { rows, cols, ..product("f32") });
            assert!(matches!(error, ProductError::Shape { .. }), "{error}");
        }
        let isa = "mmx".to_owned();
        assert!(matches!(refused(Product { isa, ..product("f32") }), ProductError::Engine(_)));
        let mut rounds = Vec::new();
        let stopped = time_products(&[product("f32")], 1, 5, &mut |done, of| {
            rounds.push((done, of));
            if done == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!((stopped.unwrap()[0].seconds.count, rounds.len()), (2, 4));
    }
}

//! Products of packed integers with quantised activations: which kernel computes what.
//!
//! Owns: tiles and panels over the rows of a matrix. Refuses: their arithmetic (see `arch`), threads.

use std::{array, ops::Range};

use crate::{
    Arithmetic, ElementType, Kernels, Matrix,
    arch::{Panel, TILE_ROWS, panel_bytes},
    element::Packed,
    kernels::{ROW_BLOCK_BYTES, check_rows},
    quantised::{Batch, Form},
};

/// From how many vectors on panels are faster than rows, measured.
const PANEL_FROM: usize = 3;

/// Rows that panels take together, at most.
pub(crate) const PANEL_ROWS: usize = 32;

/// Bytes that panels of a matrix of `cols` columns take, at most.
pub(crate) const fn panel_scratch(cols: usize) -> usize {
    PANEL_ROWS * panel_bytes(cols, 32)
}

impl Kernels {
    /// How a vector is quantised for weights of this type; `None` where it stays as it is.
    pub(crate) const fn form(&self, element: ElementType) -> Option<Form> {
        match (self.arithmetic(), element) {
            (Arithmetic::Fast, ElementType::Packed(packed)) => Some(Form::of(packed)),
            _ => None,
        }
    }

    /// Quantises `x` into `out`, `form.column_bytes(x.len())` long.
    pub(crate) fn quantise(&self, x: &[f32], form: Form, out: &mut [u8]) {
        (self.fast.quantise)(x, form, out);
    }

    /// Bytes of scratch for [`Kernels::matmul_rows_quantised`].
    pub(crate) fn panel_scratch(&self, w: &Matrix<'_>, batch: usize) -> usize {
        match w.element() {
            ElementType::Packed(packed) if self.form(w.element()).is_some() => {
                self.panel(packed, w.cols(), batch).map_or(0, |_| panel_scratch(w.cols()))
            }
            _ => 0,
        }
    }

    fn panel(&self, packed: Packed, cols: usize, batch: usize) -> Option<&'static Panel> {
        self.fast.of(packed).panel.as_ref().filter(|_| batch >= PANEL_FROM && cols > 0)
    }

    /// As [`Kernels::matmul_rows`] for vectors that are quantised; `scratch` is as long as
    /// [`Kernels::panel_scratch`] says.
    pub(crate) fn matmul_rows_quantised(
        &self,
        (w, packed): (&Matrix<'_>, Packed),
        rows: Range<usize>,
        x: &Batch<'_>,
        scratch: &mut [u8],
        mut put: impl FnMut(usize, usize, f32),
    ) {
        check_rows(w, &rows);
        if let Some(panel) = self.panel(packed, w.cols(), x.len) {
            return by_panels(panel, (w, packed), rows, x, scratch, &mut put);
        }
        let tile = self.fast.of(packed).tile;
        let block = (ROW_BLOCK_BYTES / w.row_bytes().max(1)).max(1).next_multiple_of(TILE_ROWS);
        let mut out = [0.0; TILE_ROWS];
        for start in rows.clone().step_by(block) {
            let end = rows.end.min(start + block);
            for column in 0..x.len {
                let x = x.get(column);
                for row in (start..end).step_by(TILE_ROWS) {
                    let count = TILE_ROWS.min(end - row);
                    tile(&w.rows_from(row, count), count, &x, &mut out);
                    for (index, sum) in out.iter().enumerate().take(count) {
                        put(row + index, column, sum * w.scale(row + index));
                    }
                }
            }
        }
    }
}

/// Panels of some rows, times all vectors.
fn by_panels(
    panel: &Panel,
    (w, packed): (&Matrix<'_>, Packed),
    rows: Range<usize>,
    x: &Batch<'_>,
    scratch: &mut [u8],
    put: &mut impl FnMut(usize, usize, f32),
) {
    let bytes = panel.rows * panel_bytes(w.cols(), Form::of(packed).unit);
    let mut out = [[[0.0; 16]; 12]; 2];
    // As many vectors in each tile, or one fewer in some.
    let tiles = x.len.div_ceil(panel.columns);
    for start in rows.clone().step_by(panel.rows * panel.panels) {
        let end = rows.end.min(start + panel.rows * panel.panels);
        let count = (end - start).div_ceil(panel.rows);
        for (index, scratch) in scratch.chunks_exact_mut(bytes).enumerate().take(count) {
            let first = start + index * panel.rows;
            let n = panel.rows.min(end - first);
            (panel.pack)(&w.rows_from(first, n), n, w.cols(), scratch);
        }
        let panels: [&[u8]; 2] = array::from_fn(|index| {
            scratch.get(index * bytes..(index + 1) * bytes).unwrap_or_default()
        });
        for tile in 0..tiles {
            let columns = x.len * tile / tiles..x.len * (tile + 1) / tiles;
            (panel.multiply)(&panels[..count], x, columns.start, columns.len(), &mut out);
            for row in start..end {
                let scale = w.scale(row);
                let (index, row_of) = ((row - start) / panel.rows, (row - start) % panel.rows);
                for (column, of) in columns.clone().zip(&out[index]) {
                    put(row, column, of[row_of] * scale);
                }
            }
        }
    }
}

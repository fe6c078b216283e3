//! Memory by ledger line. Owns every large allocation of the engine: each is counted where it is
//! made and refused where it would exceed its line. Knows no tensor and no layer.

use memmap2::MmapMut;
use tierkeep_mapping::Arena;
use tierkeep_plans::budget::{Ledger, Line, MAP_PAGE_BYTES};
use tierkeep_plans::catalogue::TENSOR_ALIGN;
use tierkeep_plans::units::{Bytes, round_up};

/// Why memory could not be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The line has less left than is asked for: the plan and the model disagree.
    #[error(
        "the plan's line \"{line}\" holds {planned} bytes, {bound} are bound and {wanted} more are needed: make the plan again with `tierkeep plan`"
    )]
    LineExceeded {
        /// The line.
        line: Line,
        /// What the plan gives it.
        planned: u64,
        /// What is bound already.
        bound: u64,
        /// What was asked for.
        wanted: u64,
    },
    /// The system refused.
    #[error(
        "the system refused {wanted} bytes for \"{line}\": {source}; plan with a smaller --ram"
    )]
    Refused {
        /// The line.
        line: Line,
        /// What was asked for.
        wanted: u64,
        /// Why.
        source: std::io::Error,
    },
}

/// Page-aligned memory, zero until written.
#[derive(Debug, Default)]
pub(crate) struct Buffer(Option<MmapMut>);

impl Buffer {
    /// Its bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or(&[])
    }

    /// Brings every page into memory.
    fn commit(&mut self) -> std::io::Result<()> {
        let Some(map) = self.0.as_mut() else { return Ok(()) };
        #[cfg(target_os = "linux")]
        match map.advise(memmap2::Advice::PopulateWrite) {
            // Kernels before 5.14 do not know the advice.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {}
            answer => return answer,
        }
        // No page of a system that we run on is smaller.
        map.iter_mut().step_by(MAP_PAGE_BYTES as usize).for_each(|byte| *byte = 0);
        Ok(())
    }

    /// Its bytes, to be written.
    #[must_use]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or(&mut [])
    }
}

/// Least memory for which large pages are asked: that of one.
#[cfg(target_os = "linux")]
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Asks for large pages. Weights are read once for each token, far more of them than the processor knows
/// the small pages of: looking those up costs a third of the bandwidth under a hypervisor. What is resident
/// for a part of a large page is inside the buffer all the same, and so inside its line.
fn advise_huge(map: &MmapMut) {
    #[cfg(target_os = "linux")]
    if map.len() >= HUGE_PAGE_BYTES {
        // A system without them, or whose owner switched them off, goes on with small ones.
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = map;
}

/// What each line was given and what has been bound against it.
///
/// Bound bytes are counted at each allocation from the size asked for, never from the ledger.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    planned: [u64; Line::ALL.len()],
    bound: [u64; Line::ALL.len()],
}

fn position(line: Line) -> usize {
    Line::ALL.iter().position(|l| *l == line).unwrap_or(0)
}

impl Account {
    /// An account with nothing bound.
    #[must_use]
    pub(crate) fn new(ledger: &Ledger) -> Self {
        Self { planned: Line::ALL.map(|l| ledger.bytes(l).0), bound: [0; Line::ALL.len()] }
    }

    /// Bytes bound against a line.
    #[must_use]
    pub(crate) fn bound(&self, line: Line) -> Bytes {
        Bytes(self.bound[position(line)])
    }

    fn bind(&mut self, line: Line, wanted: u64) -> Result<(), MemoryError> {
        let at = position(line);
        let (planned, bound) = (self.planned[at], self.bound[at]);
        match bound.checked_add(wanted) {
            Some(sum) if sum <= planned => {
                self.bound[at] = sum;
                Ok(())
            }
            _ => Err(MemoryError::LineExceeded { line, planned, bound, wanted }),
        }
    }

    /// Counts memory of this process that no buffer here holds: pages of a file that are mapped, what the
    /// kernels keep.
    ///
    /// # Errors
    /// [`MemoryError::LineExceeded`].
    pub(crate) fn bind_elsewhere(&mut self, line: Line, bytes: u64) -> Result<(), MemoryError> {
        self.bind(line, bytes)
    }

    /// `bytes` rounded up to [`TENSOR_ALIGN`], page-aligned; untouched pages cost nothing yet.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub(crate) fn buffer(&mut self, line: Line, bytes: u64) -> Result<Buffer, MemoryError> {
        let bytes = round_up(bytes, TENSOR_ALIGN);
        self.bind(line, bytes)?;
        if bytes == 0 {
            return Ok(Buffer(None));
        }
        let refused = |source| MemoryError::Refused { line, wanted: bytes, source };
        let length = usize::try_from(bytes)
            .map_err(|_| refused(std::io::Error::from(std::io::ErrorKind::OutOfMemory)))?;
        let map = MmapMut::map_anon(length).map_err(refused)?;
        advise_huge(&map);
        Ok(Buffer(Some(map)))
    }

    /// A buffer whose pages are in memory when this returns. What a run will write to sooner or later is
    /// taken at the start: a machine that cannot give it says so before the first token, and what the
    /// process holds is what the plan says.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub(crate) fn committed(&mut self, line: Line, bytes: u64) -> Result<Buffer, MemoryError> {
        let mut buffer = self.buffer(line, bytes)?;
        buffer.commit().map_err(|source| MemoryError::Refused { line, wanted: bytes, source })?;
        Ok(buffer)
    }

    /// Slots of one size in one buffer; `is_committed` as [`Account::committed`].
    ///
    /// # Errors
    /// [`MemoryError`].
    pub(crate) fn arena(
        &mut self,
        line: Line,
        (slot_bytes, n_slots): (u64, u64),
        is_committed: bool,
    ) -> Result<Arena, MemoryError> {
        let bytes = slot_bytes.saturating_mul(n_slots);
        let buffer =
            if is_committed { self.committed(line, bytes)? } else { self.buffer(line, bytes)? };
        Arena::new(buffer.0, slot_bytes as usize, n_slots as usize).ok_or_else(|| {
            let source = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
            MemoryError::Refused { line, wanted: bytes, source }
        })
    }

    /// `count` elements of 4 bytes, zeroed.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub(crate) fn elements<T: Copy + Default>(
        &mut self,
        line: Line,
        count: usize,
    ) -> Result<Vec<T>, MemoryError> {
        let wanted = (count as u64).saturating_mul(size_of::<T>() as u64);
        self.bind(line, wanted)?;
        let mut elements = Vec::new();
        elements.try_reserve_exact(count).map_err(|_| MemoryError::Refused {
            line,
            wanted,
            source: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
        })?;
        elements.resize(count, T::default());
        Ok(elements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierkeep_plans::budget::LedgerLine;

    #[test]
    fn a_line_is_never_exceeded() {
        let ledger = Ledger(vec![LedgerLine {
            line: Line::KvCache,
            bytes: Bytes(192),
            note: String::new(),
        }]);
        let mut account = Account::new(&ledger);
        assert_eq!(account.buffer(Line::KvCache, 100).unwrap().bytes().len(), 128);
        assert_eq!(account.elements::<f32>(Line::KvCache, 16).unwrap(), [0.0; 16]);
        let error = account.buffer(Line::KvCache, 1).unwrap_err().to_string();
        assert!(error.contains("\"KV cache\" holds 192 bytes, 192 are bound"), "{error}");
        assert!(account.buffer(Line::ExpertCache, 1).is_err());
        assert_eq!(account.bound(Line::KvCache), Bytes(192));
        assert!(account.buffer(Line::ExpertCache, 0).unwrap().bytes().is_empty());
    }
}

//! The same interface where there are no mappings: none can be made.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::ops::Range;

use crate::MapError;

/// A mapped range of a file; none exists on this platform.
#[derive(Debug)]
pub struct Mapping(Infallible);

impl Mapping {
    /// Refuses.
    ///
    /// # Errors
    /// [`MapError::Unavailable`], always.
    pub fn new(_file: &File, _offset: u64, _bytes: u64) -> Result<Self, MapError> {
        Err(MapError::Unavailable)
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self.0 {}
    }

    /// Asks for pages ahead of their use.
    pub fn will_need(&self, _range: Range<usize>) {
        match self.0 {}
    }

    /// Brings pages in.
    ///
    /// # Errors
    /// None: there is no mapping to ask.
    pub fn populate(&self, _range: Range<usize>) -> io::Result<()> {
        match self.0 {}
    }

    /// The first byte that was lost.
    #[must_use]
    pub fn lost(&self) -> Option<u64> {
        match self.0 {}
    }
}

/// Pages of this process that could not be brought in: none.
#[must_use]
pub fn faults() -> u64 {
    0
}

/// The size of a page; not known here, and asked for by nobody who maps.
#[must_use]
pub fn page_bytes() -> u64 {
    0
}

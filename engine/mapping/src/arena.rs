//! Memory in slots of one size, each of which can be lent to another thread while the others are read.
//!
//! Owns the rule by which that is sound: a slot is lent by whoever has the arena to themselves, and is no
//! one else's until it is given back. Refuses: what is in a slot, which of them is lent, and when.
//!
//! Whoever borrows bytes borrows the arena, and to lend a slot the arena must be borrowed mutably; so
//! nothing is lent that is looked at. That nothing is looked at that is lent is a flag for each slot.
#![expect(unsafe_code, reason = "slots of one allocation are lent to threads, each to one")]

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};

use memmap2::MmapMut;

/// What the arena and its lent slots share.
#[derive(Debug)]
struct Memory {
    /// Never touched but through `start`; unmapped when the last that shares it goes.
    _map: Option<MmapMut>,
    start: *mut u8,
    slot_bytes: usize,
    /// Whether each slot is lent.
    is_lent: Box<[AtomicBool]>,
}

// SAFETY: the memory belongs to this value (`_map` is never handed out), and is not tied to a thread.
unsafe impl Send for Memory {}
// SAFETY: bytes are reached only through `Arena` and `Lent`, which keep to the rule of the module: either
// one thread has a slot lent, or those that share the arena read it.
unsafe impl Sync for Memory {}

impl Memory {
    fn n_slots(&self) -> usize {
        self.is_lent.len()
    }

    /// Where a slot begins.
    fn slot(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.n_slots(), "slot {slot} of {}", self.n_slots());
        // SAFETY: `Arena::new` made no more slots than the map holds whole, so that this is inside it, or
        // one past its end where slots have no bytes; without a map there is no slot that has any.
        unsafe { self.start.add(slot * self.slot_bytes) }
    }
}

/// Slots of one size in memory of our own.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<Memory>,
}

impl Arena {
    /// `n_slots` slots of `slot_bytes` at the beginning of `map`. `None` where it is too small for them.
    #[must_use]
    pub fn new(map: Option<MmapMut>, slot_bytes: usize, n_slots: usize) -> Option<Self> {
        let mut map = map;
        let (start, length) = match map.as_mut() {
            Some(map) => (map.as_mut_ptr(), map.len()),
            None => (std::ptr::NonNull::dangling().as_ptr(), 0),
        };
        let needed = slot_bytes.checked_mul(n_slots)?;
        if needed > length {
            return None;
        }
        let is_lent = (0..n_slots).map(|_| AtomicBool::new(false)).collect();
        Some(Self { memory: Arc::new(Memory { _map: map, start, slot_bytes, is_lent }) })
    }

    /// Number of slots.
    #[must_use]
    pub fn n_slots(&self) -> usize {
        self.memory.n_slots()
    }

    /// Bytes of a slot; `None` while it is lent.
    ///
    /// # Panics
    /// When there is no such slot.
    #[must_use]
    pub fn bytes(&self, slot: usize) -> Option<&[u8]> {
        let start = self.memory.slot(slot);
        // What its borrower wrote is seen once the flag is.
        if self.memory.is_lent[slot].load(Acquire) {
            return None;
        }
        // SAFETY: the slot's bytes are inside the map, which `self` keeps. The slot is not lent, and nobody
        // can lend it or write to it while this borrow of `self` lives: both take `&mut self`.
        Some(unsafe { std::slice::from_raw_parts(start, self.memory.slot_bytes) })
    }

    /// Bytes of a slot, to be written; `None` while it is lent.
    ///
    /// # Panics
    /// When there is no such slot.
    #[must_use]
    pub fn bytes_mut(&mut self, slot: usize) -> Option<&mut [u8]> {
        let start = self.memory.slot(slot);
        if self.memory.is_lent[slot].load(Acquire) {
            return None;
        }
        // SAFETY: as in `bytes`, and `self` is borrowed mutably, so that nobody else reads a slot of it.
        Some(unsafe { std::slice::from_raw_parts_mut(start, self.memory.slot_bytes) })
    }

    /// Lends a slot, until what is returned is dropped, on whatever thread; `None` if it is lent already.
    /// Allocates nothing.
    ///
    /// # Panics
    /// When there is no such slot.
    #[must_use]
    pub fn lend(&mut self, slot: usize) -> Option<Lent> {
        let flag = &self.memory.is_lent[slot];
        // Only `&mut self` sets it, so that nobody else does between the two.
        if flag.load(Acquire) {
            return None;
        }
        flag.store(true, Release);
        Some(Lent { memory: Arc::clone(&self.memory), slot })
    }
}

/// A slot that is lent: its borrower's alone, and memory that lives as long as this.
#[derive(Debug)]
pub struct Lent {
    memory: Arc<Memory>,
    slot: usize,
}

impl Lent {
    /// Which slot.
    #[must_use]
    pub fn slot(&self) -> usize {
        self.slot
    }
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are inside the map, which `self` keeps. The flag of the slot is set from before
        // this value was made until it is dropped, so that the arena gives them to no one, and there is one
        // such value for a slot: whoever made it found the flag unset.
        unsafe { std::slice::from_raw_parts(self.memory.slot(self.slot), self.memory.slot_bytes) }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.slot(self.slot), self.memory.slot_bytes)
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Whoever sees this sees what was written.
        self.memory.is_lent[self.slot].store(false, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    fn arena(slot_bytes: usize, n_slots: usize) -> Arena {
        let map = MmapMut::map_anon((slot_bytes * n_slots).max(1)).unwrap();
        Arena::new(Some(map), slot_bytes, n_slots).unwrap()
    }

    #[test]
    fn slots_are_apart_and_inside_their_memory() {
        let mut arena = arena(64, 5);
        for slot in 0..5 {
            arena.bytes_mut(slot).unwrap().fill(slot as u8 + 1);
        }
        for slot in 0..5 {
            assert_eq!(arena.bytes(slot).unwrap(), [slot as u8 + 1; 64]);
        }
        let map = || Some(MmapMut::map_anon(100).unwrap());
        assert!(Arena::new(map(), 50, 2).is_some());
        assert!(Arena::new(map(), 50, 3).is_none(), "more slots than memory");
        assert!(Arena::new(map(), usize::MAX, 2).is_none(), "a size that no memory has");
        assert!(Arena::new(None, 1, 1).is_none());
        assert_eq!(Arena::new(None, 0, 3).unwrap().bytes(2), Some(&[][..]));
        assert_eq!(Arena::new(None, 64, 0).unwrap().n_slots(), 0);
    }

    #[test]
    #[should_panic(expected = "slot 5 of 5")]
    fn a_slot_that_there_is_not_is_a_bug() {
        let _ = arena(64, 5).bytes(5);
    }

    #[test]
    fn what_is_lent_is_no_one_elses_until_it_comes_back() {
        let mut arena = arena(8, 2);
        let mut lent = arena.lend(1).unwrap();
        assert_eq!((lent.slot(), lent.len()), (1, 8));
        assert!(arena.lend(1).is_none() && arena.bytes(1).is_none());
        assert!(arena.bytes_mut(1).is_none());
        lent.copy_from_slice(&[7; 8]);
        assert_eq!(*lent, [7; 8]);
        assert_eq!(arena.bytes(0).unwrap(), [0; 8], "the others are read meanwhile");
        drop(lent);
        assert_eq!(arena.bytes(1).unwrap(), [7; 8]);
        assert!(arena.lend(1).is_some());
    }

    #[test]
    fn memory_lives_as_long_as_anything_that_is_lent() {
        let mut lent = {
            let mut arena = arena(4096, 3);
            arena.lend(2).unwrap()
        };
        lent.fill(9);
        assert_eq!(lent[4095], 9);
    }

    /// Threads fill what they are lent while the others are read: every byte is the filler's.
    #[test]
    fn threads_write_and_read_side_by_side() {
        const N: usize = 4;
        let rounds = if cfg!(miri) { 20 } else { 3000 };
        let mut arena = arena(257, N);
        let (to_fill, jobs) = mpsc::channel::<(Lent, u8)>();
        let jobs = std::sync::Mutex::new(jobs);
        let (to_reader, filled) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..2 {
                let (jobs, to_reader) = (&jobs, to_reader.clone());
                scope.spawn(move || {
                    loop {
                        let job = jobs.lock().unwrap().recv();
                        let Ok((mut lent, value)) = job else { return };
                        lent.fill(value);
                        let slot = lent.slot();
                        drop(lent);
                        to_reader.send(slot).unwrap();
                    }
                });
            }
            let mut expected = [0_u8; N];
            let mut out = [false; N];
            for round in 0..rounds {
                let slot = round * 7 % N;
                if !out[slot] {
                    expected[slot] = round as u8;
                    out[slot] = true;
                    to_fill.send((arena.lend(slot).unwrap(), round as u8)).unwrap();
                }
                for slot in (0..N).filter(|&slot| !out[slot]) {
                    let bytes = arena.bytes(slot).unwrap();
                    assert!(bytes.iter().all(|byte| *byte == expected[slot]));
                }
                if round % 2 == 1 {
                    out[filled.recv().unwrap()] = false;
                }
                while let Ok(slot) = filled.try_recv() {
                    out[slot] = false;
                }
            }
            drop(to_fill);
        });
    }
}

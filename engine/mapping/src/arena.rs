//! Memory in slots of one size, each of which can be lent to other threads while the others are read.
//!
//! Owns the rule by which that is sound: a slot is lent by whoever has the arena to themselves, and is no
//! one else's until it is given back. Refuses: what is in a slot, which of them is lent, and when.
//!
//! Whoever borrows bytes borrows the arena, and to lend a slot the arena must be borrowed mutably; so
//! nothing is lent that is looked at. That nothing is looked at that is lent is a count for each slot: of the
//! parts that it was split into, which are apart.
#![expect(unsafe_code, reason = "slots of one allocation are lent to threads, each to one")]

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use memmap2::MmapMut;

/// What the arena and its lent slots share.
#[derive(Debug)]
struct Memory {
    /// Never touched but through `start`; unmapped when the last that shares it goes.
    _map: Option<MmapMut>,
    start: *mut u8,
    slot_bytes: usize,
    /// In how many parts each slot is lent; 0 where it is not.
    lent: Box<[AtomicU32]>,
}

// SAFETY: the memory belongs to this value (`_map` is never handed out), and is not tied to a thread.
unsafe impl Send for Memory {}
// SAFETY: bytes are reached only through `Arena` and `Lent`, which keep to the rule of the module: either
// one thread has a slot lent, or those that share the arena read it.
unsafe impl Sync for Memory {}

impl Memory {
    fn n_slots(&self) -> usize {
        self.lent.len()
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
        let lent = (0..n_slots).map(|_| AtomicU32::new(0)).collect();
        Some(Self { memory: Arc::new(Memory { _map: map, start, slot_bytes, lent }) })
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
        // What its borrowers wrote is seen once the count is.
        if self.memory.lent[slot].load(Acquire) > 0 {
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
        if self.memory.lent[slot].load(Acquire) > 0 {
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
        let count = &self.memory.lent[slot];
        // Only `&mut self` raises it from 0, so that nobody else does between the two.
        if count.load(Acquire) > 0 {
            return None;
        }
        count.store(1, Release);
        let range = 0..self.memory.slot_bytes;
        Some(Lent { memory: Arc::clone(&self.memory), slot, range })
    }
}

/// A slot that is lent, or a part of one: its borrower's alone, and memory that lives as long as this.
#[derive(Debug)]
pub struct Lent {
    memory: Arc<Memory>,
    slot: usize,
    /// Bytes of the slot; those of two parts of a slot are apart.
    range: Range<usize>,
}

impl Lent {
    /// Which slot.
    #[must_use]
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Keeps the bytes before `at`, counted from its own beginning, and gives those from there on away.
    /// The slot is back when both are dropped. Allocates nothing.
    ///
    /// # Panics
    /// When it has no `at` bytes.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.range.len(), "byte {at} of {}", self.range.len());
        // Its own part keeps the count above 0, so that nobody finds the slot free meanwhile.
        self.memory.lent[self.slot].fetch_add(1, Relaxed);
        let middle = self.range.start + at;
        let rest = middle..self.range.end;
        self.range.end = middle;
        Self { memory: Arc::clone(&self.memory), slot: self.slot, range: rest }
    }
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is inside the slot (`lend` made it the whole, `split_off` only cuts), the slot inside
        // the map, which `self` keeps. The count of the slot is above 0 from before this value was made until
        // it is dropped, so that the arena gives its bytes to no one. Whoever made the first such value found
        // the count 0, and others come from `split_off` alone, which leaves no byte in two ranges.
        unsafe {
            let start = self.memory.slot(self.slot).add(self.range.start);
            std::slice::from_raw_parts(start, self.range.len())
        }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe {
            let start = self.memory.slot(self.slot).add(self.range.start);
            std::slice::from_raw_parts_mut(start, self.range.len())
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Whoever sees that the last part is back sees what was written to all of them.
        self.memory.lent[self.slot].fetch_sub(1, Release);
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
    fn parts_of_a_slot_are_apart_and_the_slot_is_back_with_the_last_of_them() {
        let mut arena = arena(10, 2);
        let mut first = arena.lend(0).unwrap();
        let mut second = first.split_off(3);
        let mut third = second.split_off(7);
        assert_eq!((first.len(), second.len(), third.len()), (3, 7, 0));
        thread::scope(|scope| {
            scope.spawn(|| first.fill(1));
            scope.spawn(|| second.fill(2));
        });
        third.fill(3);
        for part in [second, third, first] {
            assert!(arena.bytes(0).is_none() && arena.lend(0).is_none());
            drop(part);
        }
        assert_eq!(arena.bytes(0).unwrap(), [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]);
    }

    #[test]
    #[should_panic(expected = "byte 9 of 8")]
    fn a_part_that_there_is_not_is_a_bug() {
        let _ = arena(8, 1).lend(0).unwrap().split_off(9);
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

//! One buffer filled by as many reads as it takes. Owns what is done about short, interrupted and
//! failing ones; knows no file.

use std::io::{self, ErrorKind};

use super::failure::{Failure, Why};
use crate::disk::has_no_direct_reads;

/// How often a place that the disk fails to give back is asked for again: a device that recovers does
/// so at once, and one that does not has made us wait for its own retries already.
const RETRIES: u32 = 2;

/// Calls `read(position, rest)` until at least `needed` bytes of `into` are there; returns how many are.
///
/// Interrupted and short reads go on, from the last whole `block`. A place that fails, or that brings
/// nothing new, is asked for [`RETRIES`] times more; `retries` counts those that failed.
pub(super) fn fill(
    mut read: impl FnMut(usize, &mut [u8]) -> io::Result<usize>,
    into: &mut [u8],
    needed: usize,
    block: usize,
    retries: &mut u32,
) -> Result<usize, Failure> {
    let mut got = 0;
    let mut left = RETRIES;
    while got < needed {
        let from = got - got % block;
        match read(from, &mut into[from..]) {
            Ok(0) => return Err(Failure { got, why: Why::Ended }),
            Ok(n) if from + n > got => {
                got = from + n;
                left = RETRIES;
            }
            // A part of a block again: the file ends in it, unless the disk is very slow to come.
            Ok(_) if left > 0 => left -= 1,
            Ok(_) => return Err(Failure { got, why: Why::Ended }),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if block > 1 && has_no_direct_reads(&e) => {
                return Err(Failure { got, why: Why::NotDirect });
            }
            Err(_) if left > 0 => {
                left -= 1;
                *retries += 1;
            }
            Err(e) => return Err(Failure { got, why: Why::Disk(e) }),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_fill(
        read: impl FnMut(usize, &mut [u8]) -> io::Result<usize>,
        into: &mut [u8],
    ) -> (Result<(), (usize, String)>, u32) {
        let mut retries = 0;
        let needed = into.len();
        let filled = fill(read, into, needed, 1, &mut retries).map(|_| ());
        (filled.map_err(|failure| (failure.got, format!("{:?}", failure.why))), retries)
    }

    #[test]
    fn short_and_interrupted_reads_go_on() {
        let data: Vec<u8> = (0..100).collect();
        let mut calls = 0;
        let mut into = vec![0; 100];
        let read = |at: usize, rest: &mut [u8]| {
            calls += 1;
            if calls % 2 == 0 {
                return Err(io::Error::from(ErrorKind::Interrupted));
            }
            let n = rest.len().min(7);
            rest[..n].copy_from_slice(&data[at..at + n]);
            Ok(n)
        };
        assert_eq!(check_fill(read, &mut into), (Ok(()), 0));
        assert_eq!(into, data);
    }

    #[test]
    fn a_disk_that_recovers_is_asked_again_and_one_that_does_not_is_given_up() {
        let mut into = [0; 10];
        let mut calls = 0;
        // Every place fails twice.
        let read = |_: usize, rest: &mut [u8]| {
            calls += 1;
            if calls % 3 == 0 { Ok(rest.len().min(5)) } else { Err(io::Error::other("EIO")) }
        };
        assert_eq!(check_fill(read, &mut into), (Ok(()), 4));
        let mut calls = 0;
        let (failed, retries) = check_fill(
            |_, _| {
                calls += 1;
                Err(io::Error::other("EIO"))
            },
            &mut into,
        );
        let (got, why) = failed.unwrap_err();
        assert_eq!((got, retries, calls), (0, RETRIES, RETRIES + 1));
        assert!(why.contains("EIO"));
    }

    #[test]
    fn the_end_of_a_file_says_how_far_it_got_and_is_not_tried_again() {
        let mut into = [0; 10];
        let (ended, retries) = check_fill(|at, _| Ok(if at == 0 { 4 } else { 0 }), &mut into);
        assert_eq!((ended, retries), (Err((4, "Ended".to_owned())), 0));
    }

    /// A file of 10,000 bytes by blocks of 4096: its end may come short, and what is behind it is not
    /// asked for where it is not needed.
    #[test]
    fn whole_blocks_reach_past_the_end_of_a_file() {
        let file: Vec<u8> = (0..10_000_u32).map(|at| (at % 251) as u8).collect();
        let mut asked = Vec::new();
        let mut by_blocks = |needed: usize, most: usize| {
            let mut into = vec![0; 12_288];
            asked.clear();
            let read = |at: usize, rest: &mut [u8]| {
                asked.push(at);
                let n = rest.len().min(most).min(file.len() - at);
                rest[..n].copy_from_slice(&file[at..at + n]);
                Ok(n)
            };
            let filled = fill(read, &mut into, needed, 4096, &mut 0);
            let got = *filled.as_ref().unwrap_or_else(|failure| &failure.got);
            assert_eq!(into[..got], file[..got]);
            (filled.map_err(|failure| failure.got), asked.clone())
        };
        assert_eq!(by_blocks(10_000, 20_000), (Ok(10_000), vec![0]));
        assert_eq!(by_blocks(9000, 5120), (Ok(9216), vec![0, 4096]));
        assert_eq!(by_blocks(10_001, 20_000), (Err(10_000), vec![0, 8192, 8192, 8192]));
    }

    #[test]
    fn direct_reads_that_are_refused_are_told_from_a_disk_that_fails() {
        let refuse = |_: usize, _: &mut [u8]| Err(io::Error::from(ErrorKind::InvalidInput));
        let why = |block| fill(refuse, &mut [0; 4096], 4096, block, &mut 0).unwrap_err().why;
        assert!(matches!(why(4096), Why::NotDirect));
        assert!(matches!(why(1), Why::Disk(_)));
    }
}

//! How the sessions of a history share its bounded sample. Owns that rule alone.

use super::session::MAX_SAMPLE_ACCESSES;

/// Sample segments kept.
pub const MAX_SEGMENTS: usize = 64;

/// Most tokens of a sample whose tokens have so many accesses.
fn room_tokens(accesses_per_token: usize) -> usize {
    MAX_SAMPLE_ACCESSES.checked_div(accesses_per_token).unwrap_or(0)
}

/// Tokens that each session keeps of those that it has; both oldest first.
///
/// First each session, from the newest on, gets up to a quarter of the room, so that a full sample
/// speaks of four sessions or more; then what is free is handed out in the same order. So what a
/// session keeps never grows when others grow, when others come, or when others become newer than
/// it: whichever savings lie between, the sample is the same as if each session had been saved
/// once, at its last saving.
pub(super) fn shares(has: &[usize], accesses_per_token: usize) -> Vec<usize> {
    let room = room_tokens(accesses_per_token);
    let mut keeps = vec![0; has.len()];
    let newest_first =
        || (0..has.len()).rev().filter(|&session| has[session] > 0).take(MAX_SEGMENTS);
    let mut left = room;
    for session in newest_first() {
        keeps[session] = has[session].min(room / 4).min(left);
        left -= keeps[session];
    }
    for session in newest_first() {
        let more = (has[session] - keeps[session]).min(left);
        keeps[session] += more;
        left -= more;
    }
    keeps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Of one access a token, so that the room is `MAX_SAMPLE_ACCESSES` tokens.
    const ROOM: usize = MAX_SAMPLE_ACCESSES;

    #[test]
    fn the_newest_come_first_and_four_share_a_full_sample() {
        assert_eq!(shares(&[ROOM], 1), [ROOM]);
        assert_eq!(shares(&[ROOM; 2], 1), [ROOM / 4, ROOM / 4 * 3]);
        assert_eq!(shares(&[ROOM; 5], 1), [0, ROOM / 4, ROOM / 4, ROOM / 4, ROOM / 4]);
        assert_eq!(shares(&[ROOM, 10, 20], 1), [ROOM - 30, 10, 20]);
        assert_eq!(shares(&[1; 65], 1)[..2], [0, 1]);
        assert_eq!(shares(&[5], 0), [0]);
    }

    proptest! {
        /// What the rule promises: nobody's share grows by what others do, and cutting to a share
        /// changes no later one.
        #[test]
        fn a_share_never_grows_by_others(
            mut has in prop::collection::vec(0..ROOM, 1..8),
            who in any::<prop::sample::Index>(),
            more in 0..ROOM,
        ) {
            let before = shares(&has, 1);
            prop_assert!(before.iter().sum::<usize>() <= ROOM);
            prop_assert!(shares(&before, 1) == before, "cutting again changes nothing");
            let who = who.index(has.len());
            has[who] += more;
            let grown = shares(&has, 1);
            for other in (0..has.len()).filter(|&other| other != who) {
                prop_assert!(grown[other] <= before[other]);
            }
            // It becomes the newest.
            let newest = has.remove(who);
            has.push(newest);
            let moved = shares(&has, 1);
            for other in (0..has.len() - 1).map(|at| at + usize::from(at >= who)) {
                let at = other - usize::from(other > who);
                prop_assert!(moved[at] <= before[other]);
            }
            let mut cut = before;
            let length = has[has.len() - 1];
            cut.remove(who);
            cut.push(length);
            prop_assert_eq!(shares(&cut, 1), moved);
        }
    }
}

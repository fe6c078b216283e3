//! Sessions that are saved more than once, by one process or by several at the same time: whichever
//! savings lie between, the history is the same as if each had been saved once, at its last saving.

use proptest::prelude::*;

use super::file::save_with;
use super::operations::System;
use super::*;
use crate::units::LayerId;

const LAYERS: [LayerId; 2] = [LayerId(3), LayerId(4)];
const N_EXPERTS: u32 = 8;
/// Accesses of a token.
const PER_TOKEN: u64 = 4;

fn empty() -> Session {
    Session::new("model", &LAYERS, N_EXPERTS, 2)
}

fn new_history() -> History {
    History::new(empty().shape().clone())
}

/// Records `n` tokens that differ by `seed` and by how many there are already.
fn work(session: &mut Session, seed: u16, n: usize) {
    for _ in 0..n {
        let a = (seed + session.n_tokens() as u16 % 3) % 8;
        session.record_token(&[a, (a + 1) % 8, (a + 2) % 8, (a + 4) % 8]);
    }
}

/// Saves as a file is saved: what is remembered of the saving is there for the next one.
fn save_in(history: &mut History, session: &mut Session) {
    let part = history.take_in(session).unwrap();
    session.set_saved(history.id, part.id, part.origin);
    // Through bytes, as it would be, where that is not a matter of seconds.
    if history.n_sample_tokens() < 5_000 {
        *history = parse(&render(history).unwrap(), "model").unwrap();
    }
}

/// What a history says, its name and those of its sessions apart.
fn told(history: &History) -> (u64, Vec<f64>, Vec<f64>, Vec<Segment>, Vec<RunRecord>) {
    (
        history.n_sessions(),
        history.counts().to_vec(),
        history.older_counts().to_vec(),
        history.segments().cloned().collect(),
        history.runs().cloned().collect(),
    )
}

fn run(n: u64) -> RunRecord {
    RunRecord { decoded_tokens: Some(n), ..RunRecord::default() }
}

#[test]
fn a_session_that_is_saved_again_counts_once_and_does_not_fade_itself() {
    let mut history = new_history();
    let mut session = empty();
    for _ in 0..10 {
        work(&mut session, 0, 300);
        save_in(&mut history, &mut session);
    }
    assert_eq!(history.n_sessions(), 1);
    assert_eq!(history.counts().iter().sum::<f64>(), (3000 * PER_TOKEN) as f64);
    assert_eq!(history.older_counts(), vec![0.0; 16]);
    assert_eq!((history.n_sample_tokens(), history.segments().len()), (3000, 1));
    session.set_run(run(3000));
    save_in(&mut history, &mut session);
    save_in(&mut history, &mut session);
    assert_eq!(history.runs().collect::<Vec<_>>(), [&run(3000)]);
}

/// The sessions are ordered by their last saving.
#[test]
fn the_newest_session_is_the_one_that_was_saved_last() {
    let mut history = new_history();
    let (mut a, mut b) = (empty(), empty());
    work(&mut a, 0, 10);
    save_in(&mut history, &mut a);
    work(&mut b, 5, 20);
    save_in(&mut history, &mut b);
    assert_eq!(history.accesses_of_newest_sessions(), [10 * PER_TOKEN, 20 * PER_TOKEN]);
    work(&mut a, 0, 1);
    save_in(&mut history, &mut a);
    assert_eq!(history.accesses_of_newest_sessions(), [20 * PER_TOKEN, 11 * PER_TOKEN]);
    let newest = history.segments().next_back().unwrap();
    assert_eq!((newest.session, newest.experts.len()), (2, 44));
}

/// What a session left before has become part of the base: only what is new is added, once.
#[test]
fn a_session_that_was_folded_away_goes_on_as_a_further_one() {
    let mut history = new_history();
    let mut slow = empty();
    work(&mut slow, 0, 100);
    slow.set_run(run(100));
    save_in(&mut history, &mut slow);
    for seed in 0..MAX_SESSIONS_APART as u16 {
        let mut other = empty();
        work(&mut other, seed, 1);
        save_in(&mut history, &mut other);
    }
    assert_eq!(history.accesses_of_newest_sessions(), [PER_TOKEN; MAX_SESSIONS_APART]);
    let n_before = history.n_sessions();
    work(&mut slow, 0, 7);
    save_in(&mut history, &mut slow);
    work(&mut slow, 0, 2);
    save_in(&mut history, &mut slow);
    assert_eq!(history.n_sessions(), n_before + 1);
    assert_eq!(history.accesses_of_newest_sessions().last(), Some(&(9 * PER_TOKEN)));
    assert_eq!(history.segments().next_back().unwrap().experts.len() as u64, 9 * PER_TOKEN);
    assert_eq!(history.n_sample_tokens(), 100 + MAX_SESSIONS_APART + 9);
    assert_eq!(history.runs().collect::<Vec<_>>(), [&run(100)], "its run was there already");
    // Nothing new is nothing to take in.
    let other = new_history();
    assert_ne!(other.id, history.id);
}

#[test]
fn a_history_that_is_begun_anew_takes_the_whole_session() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    let mut session = empty();
    work(&mut session, 0, 10);
    save(&path, &mut session).unwrap();
    reset(&path, "model", true).unwrap();
    work(&mut session, 0, 1);
    let saved = checkpoint(&path, &mut session).unwrap().history;
    assert_eq!(saved.accesses_of_newest_sessions(), [11 * PER_TOKEN]);
    assert_eq!(saved.n_sessions(), 1);
}

#[test]
fn a_file_of_version_1_becomes_version_2_at_the_next_save_and_not_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    let bytes = include_bytes!("testdata/v1.usage");
    std::fs::write(&path, bytes).unwrap();
    assert!(matches!(load(&path, "blake3-of-headers"), LoadOutcome::Loaded(_)));
    assert!(look(&path, "blake3-of-headers").unwrap().is_some());
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let mut session = Session::new("blake3-of-headers", &[LayerId(1), LayerId(2)], 8, 2);
    session.record_token(&[1, 2, 3, 4]);
    let saved = save(&path, &mut session).unwrap();
    assert_eq!((saved.history.n_sessions(), saved.set_aside), (3, None));
    assert!(std::fs::read(&path).unwrap().starts_with(b"tierkeep-usage 2 "));
}

/// How many bytes a file of GLM-5.2's shape has, and how long a checkpoint of it takes. Run it by
/// hand in a release build: it prints, and asserts nothing of time.
#[test]
#[ignore = "a measurement"]
#[allow(clippy::print_stdout, reason = "a measurement")]
fn the_time_of_a_checkpoint_of_76_layers_of_256_experts() {
    let folder = std::env::var_os("TIERKEEP_TEST_FOLDER").map(std::path::PathBuf::from);
    let folder = tempfile::tempdir_in(folder.unwrap_or_else(std::env::temp_dir)).unwrap();
    let path = folder.path().join(".usage");
    let layers: Vec<LayerId> = (3..79).map(LayerId).collect();
    let mut random = 1u64;
    for session in 0..10 {
        let mut now = Session::new("model", &layers, 256, 8);
        for _ in 0..600 {
            let token: Vec<u16> = (0..layers.len() * 8)
                .map(|_| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (random >> 56) as u16
                })
                .collect();
            now.record_token(&token);
        }
        for _ in 0..5 {
            let from = std::time::Instant::now();
            save(&path, &mut now).unwrap();
            let bytes = std::fs::metadata(&path).unwrap().len();
            println!("session {session}: {:?}, {bytes} bytes", from.elapsed());
        }
    }
}

/// A step of one of some sessions: whose, how many tokens first, whether it is saved then.
type Step = (usize, usize, bool);

/// Takes the steps, saving where they say so, and each session once more at its end, in `order`.
fn taken(steps: &[Step], order: &[usize], base: &History, saves: bool) -> History {
    let mut history = base.clone();
    let mut sessions: Vec<Session> = order.iter().map(|_| empty()).collect();
    for &(whose, tokens, is_saved) in steps {
        let whose = whose % order.len();
        work(&mut sessions[whose], whose as u16, tokens);
        if is_saved && saves {
            save_in(&mut history, &mut sessions[whose]);
        }
    }
    for &whose in order {
        let tokens = sessions[whose].n_tokens();
        sessions[whose].set_run(run(tokens));
        save_in(&mut history, &mut sessions[whose]);
    }
    history
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any interleaving of checkpoints of up to eight sessions is each saved once, bit for bit,
    /// samples that are too small for all included.
    #[test]
    fn checkpoints_change_nothing(
        steps in prop::collection::vec(
            (0..8usize, prop_oneof![0..400usize, 9_000..70_000usize], any::<bool>()),
            0..12,
        ),
        n in 1..=MAX_SESSIONS_APART,
        order in Just([0, 1, 2, 3, 4, 5, 6, 7]).prop_shuffle(),
        older in prop::collection::vec(0..30_000usize, 0..12),
    ) {
        let mut base = new_history();
        for tokens in older {
            let mut session = empty();
            work(&mut session, 3, tokens);
            session.set_run(run(tokens as u64));
            save_in(&mut base, &mut session);
        }
        let order: Vec<usize> = order.into_iter().filter(|&whose| whose < n).collect();
        let once = taken(&steps, &order, &base, false);
        let often = taken(&steps, &order, &base, true);
        prop_assert_eq!(told(&once), told(&often));
    }

    /// With more sessions at a time than are kept apart, nothing is lost or counted twice: nothing
    /// fades in sessions without weight, so that the accesses add up.
    #[test]
    fn however_many_sessions_there_are_each_token_is_sampled_once(
        steps in prop::collection::vec((0..20usize, 1..4usize), 0..80),
    ) {
        let mut history = new_history();
        let mut sessions: Vec<Session> = (0..20).map(|_| empty()).collect();
        for &(whose, tokens) in &steps {
            work(&mut sessions[whose], whose as u16, tokens);
            save_in(&mut history, &mut sessions[whose]);
        }
        let tokens: u64 = sessions.iter().map(Session::n_tokens).sum();
        if history.segments().len() < MAX_SEGMENTS {
            prop_assert_eq!(history.n_sample_tokens() as u64, tokens);
        }
        let accesses = history.counts().iter().sum::<f64>();
        prop_assert!(accesses <= (tokens * PER_TOKEN) as f64);
        // No session fades more than its tokens say: 0.5^(1/256) a token, and the rounding.
        let least = (tokens * PER_TOKEN) as f64 * 0.5f64.powf(tokens as f64 / 256.0) - 1.0;
        prop_assert!(accesses >= least, "{} of {}", accesses, tokens);
    }
}

/// Two writers of one file whose checkpoints interleave, in threads of their own.
#[test]
fn two_writers_at_the_same_time_are_two_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".usage");
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let path = &path;
            scope.spawn(move || {
                let mut session = empty();
                for _ in 0..25 {
                    work(&mut session, seed, 4);
                    save_with(&System, path, &mut session, std::time::Duration::from_secs(60))
                        .unwrap();
                }
            });
        }
    });
    let history = look(&path, "model").unwrap().unwrap().history;
    assert_eq!(history.accesses_of_newest_sessions(), [100 * PER_TOKEN; 2]);
    assert_eq!((history.n_sessions(), history.n_sample_tokens()), (2, 200));
}

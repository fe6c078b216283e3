//! Sessions, merging, and the format as bytes.

use proptest::prelude::*;

use super::*;
use crate::units::{Bytes, LayerId};

const LAYERS: [LayerId; 2] = [LayerId(3), LayerId(4)];

fn session(tokens: &[[u16; 4]]) -> Session {
    let mut session = Session::new("model", &LAYERS, 8, 2);
    for token in tokens {
        session.record_token(token);
    }
    session
}

fn history(sessions: &[Session]) -> History {
    let mut history = History::new(session(&[]).shape().clone());
    for session in sessions {
        history.merge(session).unwrap();
    }
    history
}

/// `n` tokens of experts that differ by `seed`.
fn work(seed: u16, n: usize) -> Session {
    let token = |i: usize| {
        let a = (seed + (i as u16 % 3)) % 8;
        [a, (a + 1) % 8, (a + 2) % 8, (a + 4) % 8]
    };
    session(&(0..n).map(token).collect::<Vec<_>>())
}

#[test]
fn a_session_counts_by_layer_and_keeps_the_order_of_weights() {
    let got = session(&[[5, 1, 0, 7], [5, 2, 7, 0]]);
    assert_eq!(got.counts()[..8], [0, 1, 1, 0, 0, 2, 0, 0]);
    assert_eq!(got.counts()[8..], [2, 0, 0, 0, 0, 0, 0, 2]);
    assert_eq!(got.sample(), [5, 1, 0, 7, 5, 2, 7, 0]);
    assert_eq!(got.n_tokens(), 2);
}

#[test]
fn choices_without_weights_are_in_the_sample_and_in_no_count() {
    let chosen = [5, NO_ACCESS, NO_ACCESS, NO_ACCESS];
    let session = session(&[chosen, [5, 2, 7, NO_ACCESS]]);
    assert_eq!(session.counts().iter().sum::<u64>(), 4);
    let saved = history(&[session]);
    let read = parse(&render(&saved).unwrap(), "model").unwrap();
    assert_eq!(read, saved);
    let sample: Vec<u16> = read.segments().flat_map(|s| s.experts.iter().copied()).collect();
    assert_eq!(sample, [chosen, [5, 2, 7, NO_ACCESS]].concat());
}

#[test]
fn a_full_sample_is_the_newest_window_in_order_and_never_grows() {
    let mut session = Session::new("model", &[LayerId(0)], 1 << 16, 1);
    let n = MAX_SAMPLE_ACCESSES + 12_345;
    for token in 0..n {
        session.record_token(&[(token % 65_521) as u16]);
    }
    let sample = session.sample();
    let expected = (n - MAX_SAMPLE_ACCESSES..n).map(|token| (token % 65_521) as u16);
    assert!(sample.iter().copied().eq(expected));
    assert_eq!(session.counts().iter().sum::<u64>(), n as u64);
}

#[test]
fn a_model_without_routed_experts_has_an_empty_session() {
    let mut session = Session::new("dense", &[], 0, 0);
    session.record_token(&[]);
    let mut history = History::new(session.shape().clone());
    history.merge(&session).unwrap();
    assert_eq!((history.n_sessions(), history.n_sample_tokens()), (0, 0));
    assert_eq!(parse(&render(&history).unwrap(), "dense").unwrap(), history);
}

#[test]
fn imported_counts_reach_their_layers_and_the_rest_is_reported() {
    let mut session = session(&[]);
    let counts = import_counts("3 1 10\n4 0 5\n0 2 7\n", 5, 8).unwrap();
    session.record_counts(&counts);
    let taken = counts.taken(session.shape());
    assert_eq!((taken.layers, taken.experts, taken.accesses), (2, 2, 15));
    assert_eq!(taken.left_out, [LeftOut { layer: LayerId(0), experts: 1, accesses: 7 }]);
    assert_eq!((session.counts()[1], session.counts()[8]), (10, 5));
}

#[test]
fn a_count_of_any_size_can_be_saved() {
    let mut session = session(&[]);
    let text = format!("3 1 {0}\n3 1 {0}\n4 2 {0}\n", u64::MAX);
    session.record_counts(&import_counts(&text, 5, 8).unwrap());
    let history = history(&[session]);
    assert_eq!(parse(&render(&history).unwrap(), "model").unwrap(), history);
}

#[test]
fn a_session_halves_what_is_older_and_a_short_one_fades_it_less() {
    let mut got = history(&[session(&[[0, 1, 0, 1]; 100])]);
    got.merge(&session(&[[2, 3, 2, 3]; 256])).unwrap();
    assert_eq!(got.counts()[..4], [50.0, 50.0, 256.0, 256.0]);
    assert_eq!(got.older_counts()[..4], [50.0, 50.0, 0.0, 0.0]);
    let mut got = history(&[session(&[[0, 1, 0, 1]; 100])]);
    got.merge(&session(&[[2, 3, 2, 3]; 1])).unwrap();
    assert_eq!(got.counts()[0], 99.73);
}

/// R5: 18 million selections of last month's work against new work of 500 tokens a session.
#[test]
fn a_month_of_old_work_fades_within_a_few_sessions() {
    let mut month = session(&[]);
    month.record_counts(
        &import_counts("3 0 4500000\n3 1 4500000\n4 0 4500000\n4 1 4500000\n", 5, 8).unwrap(),
    );
    let mut got = history(&[month]);
    let mut n_sessions = 0;
    while got.counts()[0] >= got.counts()[2] {
        got.merge(&session(&[[2, 3, 2, 3]; 500])).unwrap();
        n_sessions += 1;
    }
    assert_eq!(n_sessions, 3);
}

#[test]
fn a_session_without_accesses_leaves_its_run_only() {
    let mut got = history(&[work(0, 10)]);
    let before = got.clone();
    let mut empty = session(&[]);
    empty.set_run(RunRecord { actual_tok_per_s: Some(f64::NAN), ..RunRecord::default() });
    got.merge(&empty).unwrap();
    assert_eq!((got.n_sessions(), got.counts()), (1, before.counts()));
    assert_eq!(got.runs().collect::<Vec<_>>(), [&RunRecord::default()], "NaN is unknown");
}

#[test]
fn a_session_of_another_model_is_refused() {
    let mut got = history(&[work(0, 10)]);
    let before = got.clone();
    let error = got.merge(&Session::new("other", &LAYERS, 8, 2)).unwrap_err();
    assert_eq!((error.expected.as_str(), error.found.as_str()), ("model", "other"));
    assert_eq!(got, before);
}

#[test]
fn bounds_hold_and_the_newest_is_kept() {
    let mut got = history(&[]);
    for index in 0..200u16 {
        let mut session = work(index % 8, if index % 50 == 7 { 70_000 } else { 20 });
        session.set_run(RunRecord { decoded_tokens: Some(u64::from(index)), ..Default::default() });
        got.merge(&session).unwrap();
        let n_accesses: usize = got.segments().map(|s| s.experts.len()).sum();
        assert!(n_accesses <= MAX_SAMPLE_ACCESSES && got.segments().len() <= MAX_SEGMENTS);
        assert!(got.segments().all(|s| !s.experts.is_empty() && s.experts.len() % 4 == 0));
        let newest = got.segments().next_back().unwrap();
        assert_eq!(newest.session, got.n_sessions());
        let sample = session.sample();
        assert_eq!(newest.experts, sample[sample.len() - newest.experts.len()..]);
        assert!(newest.experts.len() >= sample.len().min(MAX_SAMPLE_ACCESSES / 4));
        if index == 7 {
            assert!(newest.experts.len() > MAX_SAMPLE_ACCESSES * 9 / 10, "free room is used");
        }
    }
    assert_eq!((got.n_sessions(), got.runs().len()), (200, MAX_RUNS));
    assert_eq!(got.runs().next_back().unwrap().decoded_tokens, Some(199));
}

#[test]
fn four_long_sessions_share_a_full_sample() {
    let got = history(&[
        work(0, 70_000),
        work(1, 70_000),
        work(2, 70_000),
        work(3, 70_000),
        work(4, 70_000),
    ]);
    let lengths: Vec<usize> = got.segments().map(|s| s.experts.len()).collect();
    assert_eq!(lengths, [MAX_SAMPLE_ACCESSES / 4; 4]);
}

fn any_run() -> impl Strategy<Value = RunRecord> {
    let rate = || prop::option::of(0.0..1e6f64);
    (rate(), rate(), rate(), prop::option::of(any::<u64>()), prop::option::of(any::<u32>()))
        .prop_map(|(p10, p50, actual, bytes, n_threads)| RunRecord {
            predicted_tok_per_s_p10: p10,
            predicted_tok_per_s_p50: p50,
            actual_tok_per_s: actual,
            budget_bytes: bytes.map(Bytes),
            n_threads,
            ..RunRecord::default()
        })
}

fn any_session() -> impl Strategy<Value = Session> {
    let token = prop::array::uniform4(0u16..8);
    (prop::collection::vec(token, 0..300), prop::option::of(any_run())).prop_map(|(tokens, run)| {
        let mut got = session(&tokens);
        if let Some(run) = run {
            got.set_run(run);
        }
        got
    })
}

proptest! {
    #[test]
    fn a_history_round_trips(sessions in prop::collection::vec(any_session(), 0..5)) {
        let history = history(&sessions);
        let bytes = render(&history).unwrap();
        prop_assert_eq!(parse(&bytes, "model").unwrap(), history);
    }

    /// Two writers merge in either order: the same is remembered, and no count differs by more
    /// than the one halving that being older costs.
    #[test]
    fn the_order_of_two_merges_hardly_matters(a in any_session(), b in any_session()) {
        let base = work(0, 100);
        let mut one = history(&[base]);
        let mut other = one.clone();
        for session in [&a, &b] {
            one.merge(session).unwrap();
        }
        for session in [&b, &a] {
            other.merge(session).unwrap();
        }
        prop_assert_eq!(one.n_sessions(), other.n_sessions());
        prop_assert_eq!(one.n_sample_tokens(), other.n_sample_tokens());
        let sorted = |history: &History| {
            let mut segments: Vec<_> = history.segments().map(|s| s.experts.clone()).collect();
            segments.sort();
            let mut runs: Vec<_> = history.runs().map(|run| format!("{run:?}")).collect();
            runs.sort();
            (segments, runs)
        };
        prop_assert_eq!(sorted(&one), sorted(&other));
        for (x, y) in one.counts().iter().zip(other.counts()) {
            prop_assert!(*x <= 2.0 * y + 0.01 && *y <= 2.0 * x + 0.01, "{} {}", x, y);
        }
    }

    #[test]
    fn any_bytes_are_refused_and_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(parse(&bytes, "model").is_err());
    }

    /// A body with a right checksum can still be anything.
    #[test]
    fn any_json_body_is_read_or_refused(text in "[\\[\\]{}\",:0-9a-z_.e-]{0,80}") {
        prop_assert!(parse(&sealed(text.as_bytes()), "model").is_err());
    }

    /// One changed value in a true body: a history that is loaded is one that can be worked with.
    #[test]
    fn a_changed_body_is_refused_or_consistent(
        place in any::<prop::sample::Index>(),
        byte in prop::sample::select(b"0123456789.e-,[]".to_vec()),
    ) {
        let bytes = render(&history(&[work(0, 20), work(3, 30)])).unwrap();
        let body_start = bytes.iter().position(|&b| b == b'\n').unwrap() + 1;
        let mut body = bytes[body_start..].to_vec();
        let place = place.index(body.len());
        body[place] = byte;
        if let Ok(mut loaded) = parse(&sealed(&body), "model") {
            loaded.merge(&session(&[[1, 2, 3, 4]; 300])).ok();
            let again = render(&loaded).unwrap();
            prop_assert_eq!(parse(&again, "model").unwrap(), loaded);
        }
    }

    #[test]
    fn any_import_text_is_read_or_refused(text in "[0-9 #\\n\\t-]{0,60}") {
        let _ = import_counts(&text, 3, 4);
    }
}

/// A first line that is right for this body.
fn sealed(body: &[u8]) -> Vec<u8> {
    let mut bytes =
        format!("tierkeep-usage 2 blake3={} bytes={}\n", blake3::hash(body).to_hex(), body.len())
            .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn a_file_cut_at_any_byte_or_with_any_bit_changed_is_refused() {
    let bytes = render(&history(&[work(0, 5), work(3, 6)])).unwrap();
    for end in 0..bytes.len() {
        assert!(parse(&bytes[..end], "model").is_err(), "cut at {end}");
    }
    for place in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[place] ^= 1 << bit;
            assert!(parse(&changed, "model").is_err(), "bit {bit} of byte {place}");
        }
    }
    let mut longer = bytes;
    longer.push(b'\n');
    assert!(matches!(parse(&longer, "model"), Err(FormatError::Length { .. })));
}

#[test]
fn each_defect_has_its_name() {
    let bytes = render(&history(&[work(0, 5)])).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (_, body) = text.split_once('\n').unwrap();
    let resealed = |from: &str, to: &str| {
        assert!(body.contains(from), "{from}");
        parse(&sealed(body.replacen(from, to, 1).as_bytes()), "model").unwrap_err().to_string()
    };
    assert_eq!(
        resealed("\"n_experts\":8", "\"n_experts\":9"),
        "contradicts itself: counts are not layers x experts"
    );
    assert_eq!(
        resealed("\"segments\":[", "\"segments\":[{\"session\":1,\"experts\":[0,1,2,3]}"),
        "contradicts itself: sample segments are not in the order of sessions"
    );
    assert_eq!(
        resealed("\"sample\":[0", "\"sample\":[8"),
        "contradicts itself: a sampled expert does not exist"
    );
    assert_eq!(
        resealed("\"sample\":[0,", "\"sample\":["),
        "contradicts itself: a sample segment does not hold whole tokens"
    );
    assert_eq!(
        resealed("\"counts\":[[0.0", "\"counts\":[[-2"),
        "contradicts itself: a count is below 0 or too large"
    );
    assert_eq!(
        resealed("\"id\":\"", "\"id\":\"x"),
        "contradicts itself: a session has no name of its own"
    );
    assert_eq!(
        resealed("\"history_id\":\"", "\"history_id\":\"0"),
        "contradicts itself: the history has no name"
    );
    assert!(resealed("\"runs\":", "\"more\":1,\"runs\":").contains("unknown field `more`"));
    let defect = |bytes: &str| parse(bytes.as_bytes(), "model").unwrap_err().to_string();
    assert_eq!(defect(""), "has a damaged first line");
    assert_eq!(defect("hello"), "does not begin with \"tierkeep-usage\"");
    assert_eq!(
        defect(&text.replacen(" 2 ", " 3 ", 1)),
        "is of format version 3, this build reads versions 1 to 2"
    );
    assert_eq!(
        defect(&text.replacen("[0,", "[1,", 1)),
        "has a body that does not match its checksum"
    );
    let error = parse(text.as_bytes(), "other").unwrap_err();
    assert_eq!(error.to_string(), "is the history of another model (model, expected other)");
}

/// The format is a promise: these files were written by versions 1 and 2 and stay readable.
#[test]
fn a_recorded_file_of_version_1_is_read_and_becomes_version_2() {
    let loaded = parse(include_bytes!("testdata/v1.usage"), "blake3-of-headers").unwrap();
    assert_eq!(loaded.n_sessions(), 2);
    assert_eq!(loaded.shape().layers, [LayerId(1), LayerId(2)]);
    assert_eq!(loaded.segments().map(|s| s.session).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(loaded.runs().next().unwrap().actual_hit_rate, Some(0.5));
    // As they stand in the file.
    let counts = [2.984, 0.995, 0.995, 0.995, 2.0, 1.0, 1.0, 0.0];
    assert_eq!(loaded.counts()[..8], counts);
    assert_eq!(loaded.older_counts()[..8], [2.984, 0.995, 0.995, 0.995, 0.0, 0.0, 0.0, 0.0]);
    let again = parse(&render(&loaded).unwrap(), "blake3-of-headers").unwrap();
    assert_eq!(again, loaded);
}

#[test]
fn a_recorded_file_of_version_2_is_read() {
    let bytes = include_bytes!("testdata/v2.usage");
    let loaded = parse(bytes, "blake3-of-headers").unwrap();
    assert_eq!(loaded.n_sessions(), 10);
    assert_eq!(loaded.accesses_of_newest_sessions(), [4, 8, 12, 16, 20, 24, 28, 32]);
    assert_eq!(
        loaded.segments().map(|s| s.session).collect::<Vec<_>>(),
        (1..=10).collect::<Vec<_>>()
    );
    assert_eq!(loaded.runs().next_back().unwrap().actual_hit_rate, Some(0.5));
    assert_eq!(render(&loaded).unwrap(), bytes, "and writing it again changes nothing");
}

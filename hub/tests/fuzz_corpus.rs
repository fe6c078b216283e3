//! The corpus of the fuzz targets, replayed as it is and damaged: nothing leads to a panic.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail as tests do")]

#[path = "../../fuzz/targets/replay.rs"]
mod replay;

use tierkeep_hub::fuzzing;

/// Damaged copies of each file.
const N_COPIES: usize = 300;

#[test]
fn no_damage_leads_to_a_panic() {
    let targets: [(&str, replay::Target<'_>); 4] = [
        ("listing", &mut fuzzing::listing),
        ("hub-index", &mut fuzzing::index),
        ("reference", &mut fuzzing::reference),
        ("answer", &mut fuzzing::answer),
    ];
    for (name, target) in targets {
        replay::with_damage(name, N_COPIES, target);
    }
}

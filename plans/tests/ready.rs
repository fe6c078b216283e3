//! What stands against a plan on a machine as it is today, and that the command beside it plans without
//! it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use std::path::Path;

use tierkeep_doctor::{CgroupLimit, CgroupVersion, Fact, Facts};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::{Abilities, Plan, Policy};
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::ready::{Obstacle, Offer, Standing, obstacles};
use tierkeep_plans::units::{Bytes, SizeRequest};

/// A machine with 8 threads, 24 GB and AVX2.
fn machine() -> Facts {
    let mut facts = Facts::default();
    facts.cpu.usable_threads = Fact::read(8, "one for each physical core");
    let sets = ["avx2", "f16c"].map(str::to_owned);
    facts.cpu.instruction_sets = Fact::read(sets.into(), "");
    facts.memory.usable_bytes = Fact::read(24_000_000_000, "MemAvailable");
    facts
}

fn planned(options: Options) -> Plan {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/glm-nano");
    let model = Catalogue::open(&folder).unwrap();
    let ram = Some(SizeRequest::Absolute(Bytes(28_000_000)));
    let options = Options { ram, context: Some(512), ..options };
    planner::plan(&model, &machine(), &options, None).unwrap()
}

fn found(plan: &Plan, today: &Facts, change: impl FnOnce(&mut Offer<'_>)) -> Vec<Obstacle> {
    let isas = ["scalar", "avx2"].map(str::to_owned);
    let mut offer = Offer {
        abilities: Abilities::ALL,
        isas: &isas,
        allow_overcommit: false,
        model: Path::new("/models/glm-nano"),
        plan_file: Path::new("my plan.toml"),
    };
    change(&mut offer);
    obstacles(plan, today, &offer)
}

fn only(found: Vec<Obstacle>) -> Obstacle {
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().next().unwrap()
}

#[test]
fn nothing_stands_against_a_plan_where_it_was_made() {
    assert_eq!(found(&planned(Options::default()), &machine(), |_| {}), []);
    // What is not known stands against nothing.
    assert_eq!(found(&planned(Options::default()), &Facts::default(), |_| {}), []);
}

#[test]
fn an_instruction_set_of_another_processor_is_refused_with_the_best_one_here() {
    let plan = planned(Options { isa: Some("avx512".to_owned()), ..Options::default() });
    let obstacle = only(found(&plan, &machine(), |_| {}));
    assert_eq!((obstacle.standing, obstacle.standing.is_refusal()), (Standing::Isa, true));
    assert!(obstacle.finding.contains("avx512") && obstacle.finding.ends_with("here is avx2"));
    assert_eq!(
        obstacle.command,
        "tierkeep plan /models/glm-nano --ram 28MB --ctx 512 --isa avx2 -o 'my plan.toml'"
    );
    // Kernels that the processor advertises and that fail when they are tried are none.
    let mut today = machine();
    today.cpu.instruction_sets = Fact::read(Vec::new(), "tried");
    let plan = planned(Options::default());
    let obstacle = only(found(&plan, &today, |_| {}));
    assert!(obstacle.command.contains("--isa scalar"), "{obstacle}");
}

#[test]
fn memory_that_is_not_there_now_is_refused_with_who_limits_it() {
    let plan = planned(Options::default());
    let mut today = machine();
    today.memory.usable_bytes = Fact::read(20_000_000, "the group /jobs/7 binds");
    today.memory.limit = Fact::read(
        Some(CgroupLimit {
            group: "/jobs/7".to_owned(),
            version: CgroupVersion::V2,
            file: "memory.max".to_owned(),
            limit_bytes: 64_000_000,
            used_bytes: 44_000_000,
            reclaimable_bytes: 0,
            headroom_bytes: 20_000_000,
        }),
        "",
    );
    let obstacle = only(found(&plan, &today, |_| {}));
    assert_eq!((obstacle.standing, obstacle.standing.is_refusal()), (Standing::Memory, true));
    for part in ["20.00 MB is available now", "group /jobs/7", "64.00 MB", "--allow-overcommit"] {
        assert!(obstacle.finding.contains(part), "{part}: {obstacle}");
    }
    assert_eq!(obstacle.finding.matches("/jobs/7").count(), 1, "named once: {obstacle}");
    assert!(obstacle.command.contains("--ram 18MB "), "{obstacle}");
    assert_eq!(found(&plan, &today, |offer| offer.allow_overcommit = true), []);
    // A group that has more room than the host is not what stands in the way.
    let mut hosts = today.clone();
    hosts.memory.usable_bytes = Fact::read(12_000_000, "MemAvailable");
    let obstacle = only(found(&plan, &hosts, |_| {}));
    assert!(obstacle.finding.contains("available now (MemAvailable)"), "{obstacle}");
    assert!(!obstacle.finding.contains("/jobs/7"), "{obstacle}");
    let insists = planned(Options { allow_overcommit: true, ..Options::default() });
    assert_eq!(found(&insists, &today, |_| {}), []);
    // As much as it holds is enough: the page cache makes do with less than its reserve.
    today.memory.usable_bytes = Fact::read(plan.ledger.footprint().0, "");
    assert_eq!(found(&plan, &today, |_| {}), []);
    // The smaller plan is for what a plan without --ram would be given.
    let mut today = machine();
    today.memory.usable_bytes = Fact::read(10_000_000_000, "MemAvailable");
    let mut large = planned(Options::default());
    let line = large.ledger.0.iter_mut().find(|line| line.bytes > Bytes(0)).unwrap();
    line.bytes = Bytes(11_000_000_000);
    let obstacle = only(found(&large, &today, |_| {}));
    assert!(obstacle.command.contains("--ram 9GB"), "{obstacle}");
}

#[test]
fn more_threads_than_may_run_are_a_warning() {
    let plan = planned(Options::default());
    let mut today = machine();
    today.cpu.usable_threads = Fact::read(2, "quota of the control group /jobs/7");
    let obstacle = only(found(&plan, &today, |_| {}));
    assert_eq!((obstacle.standing, obstacle.standing.is_refusal()), (Standing::Threads, false));
    assert!(obstacle.finding.contains("8 threads") && obstacle.finding.contains("/jobs/7"));
    assert!(obstacle.command.contains("--threads 2 "), "{obstacle}");
}

#[test]
fn what_an_engine_lacks_is_planned_without() {
    let options =
        Options { policy: Some(Policy::Frequency), sessions: Some(2), ..Options::default() };
    let plan = planned(options);
    let none = Abilities {
        vram: false,
        mapped_dense: false,
        streamed_dense: false,
        sessions: false,
        frequency: false,
        prefetch: false,
    };
    let found = found(&plan, &machine(), |offer| offer.abilities = none);
    let commands: Vec<&str> = found.iter().map(|obstacle| obstacle.command.as_str()).collect();
    assert_eq!(found.iter().filter(|o| o.standing == Standing::Lacking).count(), 2, "{found:?}");
    assert!(commands[0].contains("--sessions 1"), "{commands:?}");
    assert!(commands[1].contains("--policy recency"), "{commands:?}");
}

//! Where threads may run while engines come and go, as the kernel says.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::path::Path;

use tierkeep_doctor::Facts;
use tierkeep_engine::{Engine, Phase, Unobserved};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

/// The name of a thread and the processors that it is allowed, from its status.
fn of(status: &Path) -> (String, String) {
    let text = std::fs::read_to_string(status).unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    (field("Name:"), field("Cpus_allowed_list:"))
}

/// The processors that the calling thread is allowed.
fn own() -> String {
    of(Path::new("/proc/thread-self/status")).1
}

/// The same of the `n` threads whose names begin so: one that has just started may not have its name yet.
fn of_threads(name: &str, n: usize) -> Vec<String> {
    let mut found = Vec::new();
    for _ in 0..10_000 {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let each = tasks.map(|task| of(&task.unwrap().path().join("status")));
        let of_name = each.filter(|(found, _)| found.starts_with(name));
        found = of_name.map(|(_, allowed)| allowed).collect();
        if found.len() >= n {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    found
}

/// A plan whose only computing thread is held to `cpu`, and that reads by two threads.
fn plan(model: &Catalogue, cpu: u32) -> Plan {
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(1 << 30))),
        context: Some(64),
        threads: Some(1),
        slots: Some(1),
        io_depth: Some(2),
        ..Options::default()
    };
    let mut plan = planner::plan(model, &Facts::default(), &options, None).unwrap();
    plan.engine.cpus = vec![cpu];
    plan
}

/// One test, so that no other starts threads meanwhile.
#[test]
fn a_thread_is_lent_to_an_engine_and_given_back() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles/olmoe");
    let model = Catalogue::open(&directory).unwrap();
    let before = own();
    let cpu: u32 = before.split([',', '-']).next().unwrap().parse().unwrap();
    let plan = plan(&model, cpu);
    let open = || Engine::open(&plan, &model, &mut |_, _, _| {}).unwrap();
    let run = |engine: &mut Engine| {
        engine.clear();
        engine.run(&[1, 2, 3], Phase::Prefill, &mut Unobserved).unwrap();
    };
    let mut first = open();
    assert_eq!(own(), before, "it is held when it computes");
    run(&mut first);
    assert_eq!(own(), cpu.to_string());
    // Threads that read are those of the first engine and of the second, which a held thread opens.
    let mut second = open();
    let readers = of_threads("expert-reads", 4);
    assert_eq!(readers, vec![before.clone(); 4]);
    run(&mut second);
    run(&mut first);
    assert_eq!(own(), cpu.to_string());
    drop(first);
    assert_eq!(own(), cpu.to_string(), "the second still has it");
    drop(second);
    assert_eq!(own(), before);
    // An engine goes back and forth between threads.
    let mut engine = open();
    run(&mut engine);
    let mut engine = std::thread::scope(|scope| {
        let elsewhere = scope.spawn(move || {
            run(&mut engine);
            (own(), engine)
        });
        let (allowed, engine) = elsewhere.join().unwrap();
        assert_eq!(allowed, cpu.to_string());
        engine
    });
    assert_eq!(own(), before, "the thread that ran it before is free");
    run(&mut engine);
    assert_eq!(own(), cpu.to_string());
    std::thread::spawn(move || drop(engine)).join().unwrap();
    assert_eq!(own(), before, "whoever drops it");
}

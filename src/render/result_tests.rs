//! What a person sees of the doctor, and of what verbs come to: runs, verifications, conversions, the
//! demo, warnings and errors. Every figure is written here.
#![allow(clippy::unwrap_used, reason = "a test stops where something is wrong")]

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use tierkeep_doctor::{
    Cache, CacheKind, CgroupLimit, CgroupVersion, CoreKind, CoreSpeed, DiskReadSpeed, Fact, Facts,
    FilesystemKind, HugePagePool, NumaNode,
};
use tierkeep_engine::convert::{
    Bits, Choices, ClassReport, ConvertOptions, ConvertReport, Forecast, TensorClass,
};
use tierkeep_engine::generate::Ended;
use tierkeep_engine::report::{
    Comparison, ExpertsReport, Figure, FootprintReport, LayerReport, LineReport, LoadReport,
    PhaseReport, ReadReport, ReadsReport, RunReport, TrafficReport, Verdict, Warning, WindowReport,
};
use tierkeep_engine::verify::{CaseReport, OracleCase};
use tierkeep_engine::{AccessCounts, PhaseProfile, ProfileReport, Stage, StageProfile};
use tierkeep_plans::budget::Line;
use tierkeep_plans::catalogue::StopTokens;
use tierkeep_plans::catalogue::{CatalogueError, PackedBits};
use tierkeep_plans::checks::{self, Check};
use tierkeep_plans::plan::Range;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

use super::testing::{machine, nano, snapshot, workstation};
use super::{
    Cost, DoctorReport, DryRun, PlanAfter, Verified, causes, conversion, demo_close, demo_machine,
    demo_run, demo_title, error_text, plan_in_brief, run_report, verification, warning_text,
};
use crate::commands::demo::DemoRun;
use crate::commands::memory::Memory;

/// A workstation of which nearly everything is known.
fn well_known() -> Facts {
    let mut facts = workstation();
    let cpu = &mut facts.cpu;
    cpu.sockets = Fact::read(1, "packages of the online CPUs");
    cpu.physical_cores = Fact::read(8, "siblings counted once");
    cpu.logical_cores = Fact::read(16, "/sys/devices/system/cpu/online");
    cpu.smt = Fact::read(true, "two threads on a core");
    let kind =
        |kind, cores, threads, cpus: &str| CoreKind { kind, cores, threads, cpus: cpus.into() };
    cpu.core_kinds = Fact::read(
        vec![kind(CoreSpeed::Fast, 6, 12, "0-11"), kind(CoreSpeed::Slow, 2, 4, "12-15")],
        "cpu_capacity",
    );
    let node = NumaNode { id: 0, cpus: "0-15".to_owned(), memory_bytes: Some(32_000_000_000) };
    cpu.numa_nodes = Fact::read(vec![node], "/sys/devices/system/node");
    let cache = |level, kind, bytes, instances| Cache {
        level,
        kind,
        bytes,
        shared_by_threads: 2,
        instances,
    };
    cpu.caches = Fact::read(
        vec![
            cache(1, CacheKind::Data, 32 << 10, 8),
            cache(2, CacheKind::Unified, 1 << 20, 8),
            cache(3, CacheKind::Unified, 32 << 20, 1),
        ],
        "/sys/devices/system/cpu",
    );
    cpu.allowed_cpus = Fact::read("0-15".to_owned(), "affinity of this process");
    cpu.quota_cores = Fact::read(None, "no control group has a quota");
    let memory = &mut facts.memory;
    memory.total_bytes = Fact::read(32_000_000_000, "MemTotal of /proc/meminfo");
    memory.available_bytes = Fact::read(24_000_000_000, "MemAvailable of /proc/meminfo");
    memory.swap_total_bytes = Fact::read(2_000_000_000, "SwapTotal of /proc/meminfo");
    memory.swap_free_bytes = Fact::read(1_500_000_000, "SwapFree of /proc/meminfo");
    memory.limit = Fact::read(
        Some(CgroupLimit {
            group: "/user.slice/user-1000.slice/session-3.scope".to_owned(),
            version: CgroupVersion::V2,
            file: "memory.max".to_owned(),
            limit_bytes: 16_000_000_000,
            used_bytes: 5_000_000_000,
            reclaimable_bytes: 1_000_000_000,
            headroom_bytes: 12_000_000_000,
        }),
        "the tightest of 3 groups",
    );
    memory.usable_bytes = Fact::read(12_000_000_000, "the group binds");
    memory.read_bandwidth_one_thread_bytes_per_s = Fact::measured(14e9, "median sum over 1 GiB");
    let pool = HugePagePool { page_bytes: 2 << 20, total: 512, free: 500 };
    memory.huge_pages = Fact::read(vec![pool], "/sys/kernel/mm/hugepages");
    memory.transparent_huge_pages = Fact::read("madvise".to_owned(), "/sys/kernel/mm");
    memory.locked_limit_bytes = Fact::read(Some(8 << 20), "/proc/self/limits");
    let disk = &mut facts.disk;
    let path =
        "/srv/models/published/zai-org/GLM-5.2-FP8/snapshots/0123456789abcdef0123456789abcdef";
    disk.path = Fact::read(path.to_owned(), "links resolved");
    disk.kind = Fact::read(FilesystemKind::Local, "");
    disk.mount_point = Fact::read("/srv".to_owned(), "/proc/self/mountinfo");
    disk.link = Fact::read("PCIe 4.0 x4".to_owned(), "/sys/block/nvme0n1");
    disk.rotational = Fact::read(false, "queue/rotational of nvme0n1");
    disk.total_bytes = Fact::read(2_000_000_000_000, "statvfs");
    disk.free_bytes = Fact::read(900_000_000_000, "statvfs");
    let read = |bytes_per_s, read_bytes, queue_depth| DiskReadSpeed {
        bytes_per_s,
        read_bytes,
        queue_depth,
    };
    disk.reads = Fact::measured(
        vec![read(0.4e9, 64 << 10, 1), read(2.1e9, 1 << 20, 4), read(2.5e9, 1 << 20, 8)],
        "past the page cache",
    );
    facts.platform.os = Fact::read("Linux".to_owned(), "");
    facts.platform.kernel = Fact::read("6.8.0".to_owned(), "/proc/sys/kernel/osrelease");
    facts.platform.container = Fact::read("none".to_owned(), "no sign of one");
    facts.platform.virtual_machine = Fact::read("none".to_owned(), "no hypervisor flag");
    facts.platform.wsl = Fact::read(false, "release of the kernel");
    facts
}

fn report<'a>(model: Option<&'a Path>, facts: &'a Facts, checks: &'a [Check]) -> DoctorReport<'a> {
    DoctorReport { model, facts, checks, download: None }
}

#[test]
fn a_machine() {
    let facts = well_known();
    let checks = checks::machine_checks(&facts);
    snapshot("doctor", |style| report(None, &facts, &checks).text(style));
    // Of this one hardly anything is known.
    let facts = machine();
    let checks = checks::machine_checks(&facts);
    snapshot("doctor-unknown", |style| report(None, &facts, &checks).text(style));
}

#[test]
fn a_machine_and_a_model() {
    let facts = machine();
    let model = nano();
    let stop_tokens = StopTokens::default();
    let mut checks = checks::machine_checks(&facts);
    checks.extend(checks::whole_model_checks(&model, &stop_tokens, None));
    checks.push(checks::disk_check(&model, &facts));
    checks.extend(checks::plan_checks(&model, &facts, &Options::default()));
    checks::sort(&mut checks);
    let path = Some(model.directory.as_path());
    snapshot("doctor-model", |style| report(path, &facts, &checks).text(style));
}

#[test]
fn a_model_that_is_damaged() {
    let facts = machine();
    let shard = |at: usize| format!("model-{at:05}-of-00144.safetensors: a file that is not there");
    let checks = [
        Check::ok("model.config", "config.json of glm_moe_dsa"),
        Check::warn(
            "model.container",
            "int4 with one scale a row, a container known to be poor",
            "convert the published weights instead: tierkeep convert MODEL OUT --experts 4",
        ),
        Check::fail(
            "model.shards",
            "14 of 144 shards are not whole, the first of them \
             /srv/models/published/zai-org/GLM-5.2-FP8/snapshots/0123456789abcdef/model-00017-of-00144.safetensors",
            "download these files again; the others are whole",
        )
        .with_details((17..31).map(shard).collect()),
        Check::skip_because("model.budget", "the model is not whole"),
    ];
    let path = Some(Path::new("/models/glm"));
    snapshot("doctor-damaged", |style| report(path, &facts, &checks).text(style));
}

fn read(bytes: u64, size: u64, bytes_per_s: f64) -> ReadReport {
    ReadReport {
        bytes: Bytes(bytes),
        reads: bytes / size,
        seconds: bytes as f64 / bytes_per_s,
        busy_seconds: bytes as f64 / bytes_per_s,
        bytes_per_s: (bytes > 0).then_some(bytes_per_s),
    }
}

fn phase(tokens: usize, seconds: f64, counts: [u64; 3], read_bytes: u64) -> PhaseReport {
    let [pinned_hits, cache_hits, misses] = counts;
    let accesses = AccessCounts { pinned_hits, cache_hits, misses };
    let experts = read(read_bytes, 18_900_000, 2.25e9);
    PhaseReport {
        tokens,
        seconds,
        tokens_per_s: (tokens > 0).then(|| tokens as f64 / seconds),
        accesses,
        hit_rate: accesses.hit_rate(),
        read: ReadsReport { total: experts, experts, ..ReadsReport::default() },
        window: None,
    }
}

fn layer(layer: usize, misses: u64) -> LayerReport {
    let decode = AccessCounts { pinned_hits: 32, cache_hits: 480 - misses, misses };
    LayerReport {
        layer,
        experts: 256,
        slots: 24,
        pinned: 2,
        prefill: AccessCounts::default(),
        decode,
        decode_hit_rate: decode.hit_rate(),
        distinct: 190,
        distinct_in_decode: 120,
    }
}

fn compared(figure: Figure, predicted: [f64; 3], actual: f64, verdict: Verdict) -> Comparison {
    let [p10, p50, p90] = predicted;
    Comparison { figure, predicted: Range { p10, p50, p90 }, actual: Some(actual), verdict }
}

/// A large model in 20 GB.
fn ran() -> (RunReport, Memory) {
    let line = |line, planned, actual: Option<u64>, source: &str| LineReport {
        line,
        planned_bytes: Bytes(planned),
        actual_bytes: actual.map(Bytes),
        source: source.to_owned(),
    };
    let bound = |l, bytes| line(l, bytes, Some(bytes), "bound, counted at allocation");
    let loading = read(11_000_000_000, 40_000_000, 2.1e9);
    let fine = Verdict::AsPredicted;
    let report = RunReport {
        schema_version: 2,
        tokens: vec![7; 65],
        ended: Ended::Length,
        load: LoadReport {
            seconds: 5.25,
            read: ReadsReport { total: loading, dense: loading, ..ReadsReport::default() },
        },
        prefill: phase(128, 3.2, [120, 8_000, 11_280], 213_000_000_000),
        decode: phase(64, 40.0, [1_200, 20_000, 17_200], 325_000_000_000),
        first_token_seconds: Some(3.21),
        decode_ms_p50: Some(612.5),
        decode_ms_p95: Some(845.25),
        experts: ExpertsReport {
            total: 19_200,
            slots: 1_800,
            pinned: 150,
            distinct: 9_120,
            distinct_in_decode: 6_010,
            cold_misses_in_decode: 12,
            empty_slots: 3,
        },
        layers: vec![layer(3, 400), layer(4, 220), layer(5, 31)],
        traffic: TrafficReport {
            touched_bytes_per_token: Bytes(16_400_000_000),
            touched_bytes_per_s: Some(26.24e9),
            memory_bytes_per_s: Some(40e9),
            memory_source: "measured: median sum over 1 GiB".to_owned(),
            share: Some(0.656),
            disk_bytes_per_s: Some(2.5e9),
            disk_source: "measured: past the page cache".to_owned(),
            read_depth: 8,
            read_bytes: Some(Bytes(4 << 20)),
        },
        context: 4096,
        budget_bytes: Bytes(20_000_000_000),
        footprint: FootprintReport::new(
            Bytes(17_480_000_000),
            Some(Bytes(17_460_000_000)),
            Bytes(600_000_000),
        ),
        ledger: vec![
            line(
                Line::Runtime,
                300_000_000,
                Some(280_000_000),
                "resident before loading, or the peak less what is bound where that is more",
            ),
            bound(Line::DenseWeights, 10_960_000_000),
            bound(Line::KvCache, 700_000_000),
            bound(Line::IndexerKeys, 0),
            line(Line::PageCacheReserve, 2_500_000_000, None, "the kernel's"),
            bound(Line::ExpertCache, 5_500_000_000),
        ],
        read_retries: 0,
        replaced_shards: Vec::new(),
        comparisons: vec![
            compared(Figure::DecodeTokensPerS, [1.41, 1.62, 1.83], 1.6, fine),
            compared(Figure::HitRate, [0.48, 0.55, 0.61], 0.552, fine),
            compared(Figure::ReadBytesPerToken, [4.4e9, 5.1e9, 5.9e9], 5.078e9, fine),
            compared(Figure::StreamedBytesPerToken, [0.0; 3], 0.0, fine),
        ],
        not_judged: None,
        profile: None,
        warnings: Vec::new(),
    };
    let memory = Memory {
        before_loading_bytes: Fact::read(280_000_000, ""),
        footprint_bytes: Fact::read(17_460_000_000, ""),
        mapped_bytes: Fact::read(0, ""),
        peak_rss_bytes: Fact::read(17_490_000_000, ""),
        group_peak_bytes: Fact::unknown("no control group of this process has a limit"),
        fetched_bytes: Fact::read(512_000_000_000, ""),
    };
    (report, memory)
}

#[test]
fn a_run() {
    let (good, memory) = ran();
    snapshot("run", |style| run_report(&good, &memory, true, style));
}

#[test]
fn a_run_that_computed_while_experts_were_read() {
    let (mut report, memory) = ran();
    report.decode.window = Some(WindowReport {
        seconds: 24.0,
        waited_seconds: 9.6,
        hidden_seconds: 14.4,
        hidden_seconds_per_token: Some(0.225),
        hidden_share: 0.6,
    });
    snapshot("run-under-compute", |style| run_report(&report, &memory, false, style));
}

#[test]
fn a_run_with_its_profile() {
    let (mut report, memory) = ran();
    // Ten stages of a tenth each, of which some go over weights; what no pass has is left out.
    let phase = |tokens: u64, seconds: f64| PhaseProfile {
        tokens,
        seconds,
        stages: Stage::ALL
            .iter()
            .enumerate()
            .map(|(at, &stage)| {
                let own = if stage == Stage::Outside { 0.0 } else { seconds / 10.0 };
                let bytes = if at % 2 == 0 { 400_000_000 * at as u64 } else { 0 };
                let bytes_per_s = (bytes > 0 && own > 0.0).then(|| bytes as f64 / own);
                let share = own / seconds;
                StageProfile { stage, seconds: own, share, bytes, bytes_per_s }
            })
            .collect(),
    };
    report.profile = Some(ProfileReport { prefill: phase(128, 0.5), decode: phase(64, 2.0) });
    snapshot("run-profile", |style| run_report(&report, &memory, false, style));
}

#[test]
fn a_run_of_one_token() {
    let (mut report, mut memory) = ran();
    report.decode = phase(0, 0.0, [0; 3], 0);
    report.prefill = phase(1, 1.0, [0, 0, 12], 9_000_000);
    (report.decode_ms_p50, report.decode_ms_p95) = (None, None);
    report.ended = Ended::ContextFull;
    report.layers.iter_mut().for_each(|layer| layer.decode_hit_rate = None);
    for comparison in &mut report.comparisons {
        (comparison.actual, comparison.verdict) = (None, Verdict::Unknown);
    }
    report.not_judged = Some("too short to judge: 0 decode steps, fewer than 16".to_owned());
    report.traffic.touched_bytes_per_s = None;
    report.footprint = FootprintReport::new(Bytes(17_480_000_000), None, Bytes(0));
    memory.footprint_bytes = Fact::unknown("/proc/self/status cannot be read");
    memory.group_peak_bytes = Fact::read(20_100_000_000, "");
    snapshot("run-of-one-token", |style| run_report(&report, &memory, false, style));
}

#[test]
fn a_run_that_was_not_as_planned() {
    let (mut report, memory) = ran();
    report.ended = Ended::Interrupted;
    report.comparisons[0] =
        compared(Figure::DecodeTokensPerS, [1.41, 1.62, 1.83], 0.8, Verdict::Below);
    report.comparisons[1] = compared(Figure::HitRate, [0.48, 0.55, 0.61], 0.71, Verdict::Above);
    report.footprint =
        FootprintReport::new(Bytes(17_480_000_000), Some(Bytes(19_900_000_000)), Bytes(0));
    (report.traffic.memory_bytes_per_s, report.traffic.share) = (None, None);
    report.traffic.memory_source = "not measured: --no-measure".to_owned();
    let warning = Warning {
        id: "speed.decode".to_owned(),
        finding: "0.800 tokens/s is outside the predicted 1.410 to 1.830".to_owned(),
        meaning: "reads of experts came at 500.0 MB/s, the plan reckons with 2.5 GB/s".to_owned(),
        remedy: "see whether something else uses the disk, and plan again".to_owned(),
    };
    snapshot("run-warnings", |style| {
        run_report(&report, &memory, false, style) + &warning_text(&warning.to_string(), style)
    });
}

#[test]
fn a_plan_in_brief() {
    let ram = Some(SizeRequest::Absolute(Bytes(28_000_000)));
    let options = Options { ram, context: Some(512), ..Options::default() };
    let plan = planner::plan(&nano(), &machine(), &options, None).unwrap();
    snapshot("run-plan", |style| plan_in_brief(&plan, style));
}

#[test]
fn a_verification() {
    let case =
        |text: Option<&str>| OracleCase { text: text.map(str::to_owned), ..OracleCase::default() };
    let oracle =
        [case(Some("What is 2+2? Say it in one word, and say no more than that.")), case(None)];
    let equal = CaseReport {
        positions: 24,
        positions_equal: 24,
        positions_under_margin: 1,
        under_margin_equal: 1,
        greedy: 32,
        greedy_equal: 32,
        generated: vec![1; 32],
        streamed_equal: 32,
        selection_ties: 0,
        logit_difference: Some(3.2e-6),
        layer_differences: Vec::new(),
    };
    let mut unequal = CaseReport { greedy_equal: 5, selection_ties: 3, ..equal.clone() };
    (unequal.streamed_equal, unequal.logit_difference) = (4, None);
    unequal.layer_differences = vec![1.1e-7, 2.5e-7, 0.031];
    let of = |reports: &[CaseReport], holds, style| {
        let model = Path::new("examples/glm-nano");
        let oracle = &oracle;
        verification(&Verified { model, threads: 8, isa: "avx2", oracle, reports, holds }, style)
    };
    snapshot("verify", |style| of(&[equal.clone(), equal.clone()], true, style));
    snapshot("verify-unequal", |style| of(&[equal.clone(), unequal.clone()], false, style));
}

#[test]
fn a_conversion() {
    let class = |class, n_weights, bytes_in, bytes_out, error: Option<f64>| ClassReport {
        class,
        n_weights,
        bytes_in: Bytes(bytes_in),
        bytes_out: Bytes(bytes_out),
        worst_relative_error: error.map(|e| e * 2.5),
        worst_weight: error.map(|_| "model.layers.3.mlp.gate_proj.weight".to_owned()),
        mean_relative_error: error,
    };
    let report = ConvertReport {
        was_finished: false,
        files: (0..78).map(|at| PathBuf::from(format!("{at}"))).collect(),
        files_of_earlier: 0,
        consumed: Vec::new(),
        copied: Vec::new(),
        classes: vec![
            class(TensorClass::Experts, 57_600, 724_775_731_200, 363_000_000_000, Some(0.0712)),
            class(TensorClass::Dense, 702, 18_000_000_000, 9_000_000_000, Some(0.0046)),
            class(TensorClass::Kept, 1_200, 90_000_000, 90_000_000, None),
        ],
        bytes_in: Bytes(742_865_731_200),
        bytes_out: Bytes(372_090_000_000),
        padding_bytes: Bytes(70_000_000),
        header_bytes: Bytes(16_000_000),
        unrecognised_bytes: Bytes(0),
    };
    let long = Path::new(
        "/srv/models/converted/zai-org/GLM-5.2-FP8/int4-groups-of-64-scales-of-16-bits-mtp-at-8-bits/checked",
    );
    let elapsed = std::time::Duration::from_secs(742);
    let cost = Cost::of(&ConvertOptions {
        experts: Choices::from(Bits::Packed(PackedBits::Four)),
        ..ConvertOptions::default()
    });
    let cost = cost.as_ref();
    snapshot("convert", |style| {
        conversion((Path::new("/models/glm-int4"), &report, cost), elapsed, style)
    });
    let resumed = ConvertReport {
        files_of_earlier: 41,
        consumed: vec![PathBuf::from("a"), PathBuf::from("b")],
        ..report.clone()
    };
    snapshot("convert-long-path", |style| conversion((long, &resumed, None), elapsed, style));
    let forecast = Forecast {
        classes: report.classes,
        bytes_in: report.bytes_in,
        bytes_out: report.bytes_out,
        peak_consuming: Bytes(9_000_000_000),
        n_files: 78,
        unrecognised_bytes: Bytes(1_000_000),
        catalogue: Err(CatalogueError::NotAModel { directory: PathBuf::new() }),
    };
    let refused = PlanAfter::Refused { why: "does not fit".to_owned(), read: Some(2e9) };
    let unreadable = PlanAfter::Unreadable("no header".to_owned());
    snapshot("convert-dry-run", |style| {
        let view = |out, free, consumes, after| {
            let forecast = &forecast;
            DryRun { out, forecast, cost: None, free, consumes, after, lacking: None }.text(style)
        };
        view(Path::new("/models/glm-int4"), Some(Bytes(400_000_000_000)), false, &refused)
            + &view(long, Some(Bytes(8_000_000_000)), true, &refused)
            + &view(long, None, true, &unreadable)
    });
}

#[test]
fn a_demo() {
    let run = |pins: usize, hit_rate, read_bytes| DemoRun {
        tokens: 320,
        tokens_per_s: Some(412.5),
        hit_rate: Some(hit_rate),
        pinned_share: if pins > 0 { 0.31 } else { 0.0 },
        read_bytes,
        pins,
        pins_evidence: match pins {
            0 => "no pins were asked for".to_owned(),
            n => format!("{n} pins: the most used of every layer, as asked for"),
        },
        expected_hit_rate: 0.44,
        answers: Vec::new(),
    };
    let (first, second) = (run(0, 0.461, 41_000_000), run(48, 0.522, 17_100_000));
    let without = run(0, 0.498, 18_000_000);
    let judgement = "no pins: on held-out history they would lose 0.4 % of accesses";
    snapshot("demo", |style| {
        [
            demo_machine(&machine(), &nano(), style),
            demo_title("3. run it: an answer, a count, a person as JSON, some prose", style),
            demo_run(&first, style),
            demo_close(
                (&first, &second, &without),
                (judgement, true),
                Path::new("examples/glm-nano"),
                style,
            ),
        ]
        .concat()
    });
}

#[test]
fn warnings_and_errors() {
    let error = anyhow!("offset 4096: wanted 18915328 bytes, got 12288: the file is cut off")
        .context("/srv/models/published/zai-org/GLM-5.2-FP8/snapshots/0123456789abcdef0123456789abcdef/model-00017-of-00144.safetensors")
        .context("cannot load /models/glm");
    snapshot("messages", |style| {
        [
            warning_text("the model has no chat template: the prompt is given as it is", style),
            error_text(&causes(&error), style),
            error_text(
                "--vram asks for 90.00 GB, above the 7.50 GB that the graphics cards have free: ask \
                 for less, or insist with --allow-overcommit",
                style,
            ),
        ]
        .concat()
    });
}

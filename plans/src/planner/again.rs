//! The command that plans again: from options to `tierkeep plan ...` as it can be copied, and from a
//! plan to the options that it was made with, as far as it keeps them.

use std::path::Path;

pub use super::Options;
use super::{PinRule, io, machine};
use crate::budget::{DenseResidency, KvElement};
use crate::place::DenseRule;
use crate::plan::{IoMode, Need, Numerics, Plan, Policy, Prefetch};
use crate::spec::Family;
use crate::units::{Bytes, SizeRequest};

/// The options of a plan's request.
///
/// What is chosen where nothing is asked for (slots, pins, policy, the batch of a prompt) is left to be
/// chosen again: a plan does not keep who chose it. Threads and instruction set are kept where they
/// are not what the machine of the plan would have been given.
#[must_use]
pub fn options_of(plan: &Plan) -> Options {
    let usable = plan.machine.cpu.usable_threads.value().copied();
    let takes_direct = plan.machine.disk.direct_reads.value() == Some(&true);
    let engine = &plan.engine;
    let isa = machine::isa(&plan.machine, &Options::default());
    let has_window = plan.model.family == Family::LongcatFlash.model_type();
    Options {
        ram: Some(SizeRequest::Absolute(plan.request.budget_bytes)),
        vram: (plan.request.vram_bytes > Bytes(0))
            .then_some(SizeRequest::Absolute(plan.request.vram_bytes)),
        sessions: Some(plan.request.sessions).filter(|&n| n > 1),
        dense: match plan.placement.dense {
            DenseResidency::Resident => DenseRule::Auto,
            DenseResidency::Mapped => DenseRule::Mapped,
        },
        context: Some(plan.request.context),
        threads: Some(engine.threads).filter(|&n| usable != Some(n)),
        numerics: Some(engine.numerics).filter(|&n| n != Numerics::default()),
        kv: Some(engine.kv).filter(|&kv| kv != engine.numerics.usual_kv()),
        isa: Some(engine.isa.clone()).filter(|name| *name != isa),
        io: match engine.io {
            // What the facts of the machine lead to need not be asked for.
            IoMode::Direct => Some(engine.io).filter(|_| !takes_direct),
            IoMode::Dropped => Some(engine.io).filter(|_| takes_direct),
            IoMode::Buffered => Some(engine.io),
        },
        io_depth: Some(engine.read_depth).filter(|_| engine.io_evidence.contains(io::DEPTH_GIVEN)),
        read_size: engine
            .read_bytes
            .filter(|_| engine.io_evidence.contains(io::SIZE_GIVEN))
            .map(SizeRequest::Absolute),
        // Where a model has a window it is used unless that is not wanted.
        prefetch: Some(engine.prefetch).filter(|&p| has_window && p == Prefetch::Off),
        allow_overcommit: plan.request.allow_overcommit,
        ..Options::default()
    }
}

/// The same for a plan without what an engine lacks.
#[must_use]
pub fn options_without(plan: &Plan, need: Need) -> Options {
    let options = options_of(plan);
    match need {
        Need::Vram => Options { vram: Some(SizeRequest::Absolute(Bytes(0))), ..options },
        Need::MappedDense | Need::StreamedDense => {
            Options { dense: DenseRule::Resident, ..options }
        }
        Need::Sessions(_) => Options { sessions: Some(1), ..options },
        Need::Policy(_) => Options { policy: Some(Policy::Recency), ..options },
        Need::Prefetch => Options { prefetch: Some(Prefetch::Off), ..options },
    }
}

/// `tierkeep plan MODEL ... -o OUTPUT` with every option that is set, quoted for a shell.
#[must_use]
pub fn command(model: &Path, options: &Options, output: &Path) -> String {
    // Every field is named, so that a new option cannot be left out.
    let Options {
        ram,
        vram,
        slots,
        policy,
        sessions,
        dense,
        context,
        threads,
        numerics,
        kv,
        prefill_batch,
        isa,
        io,
        io_depth,
        read_size,
        prefetch,
        pins,
        allow_overcommit,
        engine: _,
    } = options;
    let flags = [
        ram.map(|size| format!("--ram {}", size_text(size))),
        vram.map(|size| format!("--vram {}", size_text(size))),
        context.map(|tokens| format!("--ctx {tokens}")),
        sessions.map(|n| format!("--sessions {n}")),
        slots.map(|n| format!("--slots {n}")),
        policy.map(|policy| format!("--policy {}", policy.name())),
        pins_text(*pins).map(|rule| format!("--pins {rule}")),
        dense_name(*dense).map(|rule| format!("--dense {rule}")),
        threads.map(|n| format!("--threads {n}")),
        numerics.map(|numerics| format!("--numerics {}", numerics.name())),
        kv.map(|kv| format!("--kv {}", kv_name(kv))),
        prefill_batch.map(|tokens| format!("--batch {tokens}")),
        isa.as_ref().map(|isa| format!("--isa {}", quoted(isa))),
        io.map(|mode| format!("--io {}", mode.name())),
        io_depth.map(|n| format!("--io-depth {n}")),
        read_size.map(|size| format!("--read-size {}", size_text(size))),
        prefetch.map(|which| format!("--prefetch {}", which.name())),
        allow_overcommit.then(|| "--allow-overcommit".to_owned()),
    ];
    let flags: Vec<String> = flags.into_iter().flatten().collect();
    let model = quoted(&model.to_string_lossy());
    let output = quoted(&output.to_string_lossy());
    format!("tierkeep plan {model} {} -o {output}", flags.join(" ")).replace("  ", " ")
}

/// A size as it is read back, in the largest unit that is exact.
fn size_text(size: SizeRequest) -> String {
    match size {
        SizeRequest::Percent(percent) => format!("{percent}%"),
        SizeRequest::Absolute(Bytes(bytes)) => {
            let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
            let exact = units.into_iter().find(|(unit, _)| bytes > 0 && bytes % unit == 0);
            match exact {
                Some((unit, name)) => format!("{}{name}", bytes / unit),
                None => bytes.to_string(),
            }
        }
    }
}

fn pins_text(pins: PinRule) -> Option<String> {
    match pins {
        PinRule::Judged => None,
        PinRule::None => Some("none".to_owned()),
        PinRule::Share(share) => Some(format!("{}%", share * 100.0)),
    }
}

fn dense_name(rule: DenseRule) -> Option<&'static str> {
    match rule {
        DenseRule::Auto => None,
        DenseRule::Resident => Some("resident"),
        DenseRule::Mapped => Some("mapped"),
        DenseRule::Streamed => Some("streamed"),
    }
}

fn kv_name(kv: KvElement) -> &'static str {
    match kv {
        KvElement::F32 => "f32",
        KvElement::F16 => "f16",
        KvElement::Bf16 => "bf16",
    }
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_in_the_command() {
        let all = Options {
            ram: Some(SizeRequest::Absolute(Bytes(18_000_000_000))),
            vram: Some(SizeRequest::Percent(90.0)),
            slots: Some(4),
            io_depth: Some(6),
            read_size: Some(SizeRequest::Absolute(Bytes(1 << 20))),
            policy: Some(Policy::Static),
            sessions: Some(2),
            dense: DenseRule::Mapped,
            context: Some(4096),
            threads: Some(8),
            numerics: Some(Numerics::Fast),
            kv: Some(KvElement::F16),
            prefill_batch: Some(64),
            isa: Some("avx2".to_owned()),
            io: Some(IoMode::Buffered),
            pins: PinRule::Share(0.5),
            allow_overcommit: true,
            ..Options::default()
        };
        assert_eq!(
            command(Path::new("/models/glm"), &all, Path::new("plan.toml")),
            "tierkeep plan /models/glm --ram 18GB --vram 90% --ctx 4096 --sessions 2 --slots 4 \
             --policy static --pins 50% --dense mapped --threads 8 --numerics fast --kv f16 --batch 64 \
             --isa avx2 --io buffered --io-depth 6 --read-size 1048576 --allow-overcommit -o plan.toml"
        );
        let none = command(Path::new("m"), &Options::default(), Path::new("p"));
        assert_eq!(none, "tierkeep plan m -o p");
    }

    #[test]
    fn words_and_sizes_are_read_back_as_they_were() {
        assert_eq!(quoted("/models/a b's"), "'/models/a b'\\''s'");
        assert_eq!(quoted(""), "''");
        for bytes in [0, 1, 999, 24_000_000, 20_000_000_000, 19_999_999_999, 1_048_576] {
            let size = SizeRequest::Absolute(Bytes(bytes));
            assert_eq!(size_text(size).parse(), Ok(size), "{bytes}");
        }
    }
}

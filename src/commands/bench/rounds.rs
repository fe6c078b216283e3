//! The measuring: in every round each configuration once, loaded afresh where there are several, with the
//! memory's bandwidth timed between them. What an interrupt leaves unfinished is left out.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use anyhow::Result;
use tierkeep_doctor::{Fact, process};
use tierkeep_engine::bench::stream::Stream;
use tierkeep_engine::bench::summary::Held;
use tierkeep_engine::bench::{Sample, TouchedBytes, Work, measure};
use tierkeep_engine::generate::Recorder;
use tierkeep_engine::{Engine, EngineError};
use tierkeep_plans::units::Bytes;
use tierkeep_plans::usage::Interval;

use super::settings::Configuration;
use super::{memory, tokens};
use crate::args::BenchModelArgs;
use crate::commands::memory::{Before, Memory, resident};
use crate::commands::saving::Saving;
use crate::commands::{Context, run, shared};
use crate::render::{self, Bandwidth, Bar};

/// What one configuration came to.
#[derive(Default)]
pub(super) struct Results {
    /// Samples and what a token touches, by context.
    pub(super) by_context: Vec<(Vec<Sample>, TouchedBytes)>,
    pub(super) held: Held,
}

/// Everything that was measured.
#[derive(Default)]
pub(super) struct Measured {
    /// By configuration.
    pub(super) results: Vec<Results>,
    pub(super) bandwidth: Bandwidth,
    pub(super) interrupted: bool,
}

/// What is done, and how far it is.
struct Rounds<'a> {
    args: &'a BenchModelArgs,
    configurations: &'a [Configuration],
    work: &'a [Work],
    stream: &'a Stream,
    context: &'a Context,
    /// Tokens run of all.
    done: u64,
    total: u64,
}

pub(super) fn measure_all(
    args: &BenchModelArgs,
    configurations: &[Configuration],
    work: &[Work],
    stream: &Stream,
    context: &Context,
) -> Result<Measured> {
    let of_round: usize = work.iter().map(|work| work.tokens()).sum();
    let total = of_round as u64 * configurations.len() as u64 * u64::from(args.repeat);
    let mut rounds = Rounds { args, configurations, work, stream, context, done: 0, total };
    let empty = |_: &Configuration| Results {
        by_context: vec![(Vec::new(), TouchedBytes::default()); work.len()],
        held: Held::default(),
    };
    let results = configurations.iter().map(empty).collect();
    let mut measured = Measured { results, ..Measured::default() };
    let _heeding = context.heeding();
    match rounds.all(&mut measured) {
        Err(error) => match error.downcast_ref() {
            Some(EngineError::Interrupted) => measured.interrupted = true,
            _ => return Err(error),
        },
        Ok(()) => rounds.time_memory(&mut measured.bandwidth),
    }
    Ok(measured)
}

impl Rounds<'_> {
    fn all(&mut self, measured: &mut Measured) -> Result<()> {
        let mut kept: Option<Engine> = None;
        let is_kept = self.configurations.len() == 1;
        for round in 0..self.args.repeat {
            for (at, configuration) in self.configurations.iter().enumerate() {
                self.time_memory(&mut measured.bandwidth);
                let before =
                    Before { loading: resident(), fetched: Fact::unknown("not asked for") };
                let (mut engine, is_peak_own) = match kept.take() {
                    Some(engine) => {
                        (engine, measured.results.get(at).is_some_and(|r| r.held.is_peak_own))
                    }
                    None => {
                        // Of what came before, the mark of the peak is set back.
                        let is_own = process::restart_peak() || (round == 0 && at == 0);
                        (self.load(configuration, u64::from(round))?, is_own)
                    }
                };
                let Some(results) = measured.results.get_mut(at) else { continue };
                results.held.is_peak_own = is_peak_own;
                self.contexts(configuration, &mut engine, u64::from(round), results)?;
                let memory = Memory::now(&configuration.model, before).seen();
                let held = &mut results.held;
                held.budget_bytes = configuration.plan.request.budget_bytes;
                held.footprint_bytes = most(held.footprint_bytes, memory.footprint);
                held.peak_bytes = most(held.peak_bytes, memory.peak);
                if is_kept {
                    kept = Some(engine);
                }
            }
        }
        Ok(())
    }

    fn time_memory(&self, bandwidth: &mut Bandwidth) {
        if !self.args.no_measure && !self.is_interrupted() {
            memory::measure(bandwidth, self.context);
        }
    }

    fn is_interrupted(&self) -> bool {
        self.context.interrupted.load(Ordering::SeqCst)
    }

    /// Loads, and warms up on tokens of their own: a prompt and some steps that are not counted.
    fn load(&self, configuration: &Configuration, round: u64) -> Result<Engine> {
        if self.is_interrupted() {
            return Err(EngineError::Interrupted.into());
        }
        let mut engine = shared::load(&configuration.plan, &configuration.model)?;
        if round == 0 {
            run::ready::check_threads(&configuration.plan);
        }
        let decode = self.args.warm_up;
        let room = engine.context().saturating_sub(decode);
        let context = self.args.prompt.min(room);
        if context == 0 {
            return Ok(engine);
        }
        let work = Work { context, prompt: context, decode };
        let bar = Bar::count("warming up");
        let tokens = self.tokens(u64::MAX - round, work);
        measure(&mut engine, work, &tokens, None, &mut |at| {
            bar.set(at.done as u64, at.total as u64);
            self.flow()
        })?;
        Ok(engine)
    }

    /// Tokens of a round: the same for every configuration.
    fn tokens(&self, round: u64, work: Work) -> Vec<u32> {
        self.stream.tokens(round, work.tokens(), tokens::vocab_size(self.configurations))
    }

    fn flow(&self) -> ControlFlow<()> {
        if self.is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Every context once.
    fn contexts(
        &mut self,
        configuration: &Configuration,
        engine: &mut Engine,
        round: u64,
        results: &mut Results,
    ) -> Result<()> {
        let usage = self.args.planning.usage.as_deref();
        let session = shared::session(&configuration.model);
        let mut saving = Saving::new(session, usage, Interval::Usual);
        let bar = Bar::count("measuring");
        for (&work, (samples, touched)) in self.work.iter().zip(&mut results.by_context) {
            let tokens = self.tokens(round, work);
            bar.message(&render::progress_of_bench(
                (round + 1, u64::from(self.args.repeat)),
                &configuration.name,
                work.context,
            ));
            *touched = TouchedBytes::of(&configuration.plan, engine, work);
            let recorder = usage.is_some().then_some(&mut saving as &mut dyn Recorder);
            let sample = measure(engine, work, &tokens, recorder, &mut |at| {
                bar.set(self.done + at.done as u64, self.total);
                self.flow()
            });
            self.done += work.tokens() as u64;
            match sample {
                Ok(sample) => samples.push(sample),
                Err(error) => {
                    saving.finish(None);
                    return Err(error.into());
                }
            }
        }
        saving.finish(None);
        Ok(())
    }
}

fn most(a: Option<Bytes>, b: Option<Bytes>) -> Option<Bytes> {
    a.max(b)
}

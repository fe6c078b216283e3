//! `tierkeep doctor [MODEL]`: facts of the machine, and checks of it and of a model.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Context as _, Result, anyhow};
use tierkeep_doctor::Facts;
use tierkeep_engine::convert;
use tierkeep_engine::payload::{self, FileSource, PayloadFile, PayloadReport};
use tierkeep_engine::text::check::{self as text, ModelTokens};
use tierkeep_engine::text::{Text, TextError};
use tierkeep_plans::catalogue::header::read_header;
use tierkeep_plans::catalogue::{
    self, Catalogue, CatalogueError, ConfigError, Folder, Outline, ShardState, Source, StopTokens,
};
use tierkeep_plans::checks::{self, Check, Status};
use tierkeep_plans::planner::Options;

use super::model::{self, DownloadAnswer, Place, There};
use super::{Context, shared};
use crate::args::DoctorArgs;
use crate::exit::Outcome;
use crate::render::{self, Bar, DoctorReport};

pub(crate) fn run(args: &DoctorArgs, context: &Context) -> Result<Outcome> {
    let looked = look(args, context)?;
    let facts = match &looked {
        Some(looked) => looked.facts(context, !args.no_measure),
        // Without a model, the disk that is looked at is that of the current folder.
        None => shared::facts(context, None, context.work_dir.as_deref(), !args.no_measure),
    };
    let mut checks = checks::machine_checks(&facts);
    let mut is_interrupted = false;
    let mut download = None;
    if let Some(looked) = looked {
        checks.extend(plan_checks(&looked, &facts));
        checks.extend(looked.checks);
        if args.deep {
            let report = read_everything(&looked.files, context);
            is_interrupted = report.interrupted;
            checks.extend(payload::payload_checks(&report));
            if !is_interrupted && looked.download.is_none() {
                checks.push(checksums(&looked.directory, context));
                is_interrupted = context.interrupted.load(Ordering::SeqCst);
            }
        }
        download = looked.download;
    }
    checks::sort(&mut checks);
    if let Some(path) = &args.save {
        facts.write(path).with_context(|| format!("--save {}", path.display()))?;
    }
    let report = DoctorReport {
        model: args.model.as_ref().map(|model| model.path()),
        facts: &facts,
        checks: &checks,
        download: download.as_ref(),
    };
    if context.json {
        render::json(&report.json())?;
    } else {
        render::data(&report.text(context.style))?;
        if let Some(path) = &args.save {
            render::note(&format!("facts saved to {}", path.display()));
        }
    }
    if is_interrupted {
        return Ok(Outcome::Interrupted);
    }
    Ok(match checks::worst(&checks) {
        Status::Fail => Outcome::Verdict,
        Status::Warn => Outcome::Warnings,
        Status::Ok | Status::Skip => Outcome::Fine,
    })
}

/// A model as it was looked at, whole or not.
struct Looked {
    /// The folder that it is in, or that a download would go to.
    directory: PathBuf,
    catalogue: Option<Catalogue>,
    /// Rows of its embedding, by config.json.
    vocab_size: Option<usize>,
    checks: Vec<Check>,
    /// What there is to read, whole or not.
    files: Vec<PathBuf>,
    /// Of one that is not here: what a download would be.
    download: Option<DownloadAnswer>,
}

impl Looked {
    fn facts(&self, context: &Context, measure: bool) -> Facts {
        match (&self.download, &self.catalogue) {
            (Some(_), Some(model)) => {
                shared::facts_elsewhere(context, model, &self.directory, measure)
            }
            (Some(_), None) => shared::facts(context, None, Some(&self.directory), measure),
            (None, model) => shared::facts(context, model.as_ref(), Some(&self.directory), measure),
        }
    }
}

/// Checks of the model that need no facts of the machine.
///
/// # Errors
/// There is no model, or it is not here and its bytes are asked for: nothing can be said about either.
fn look(args: &DoctorArgs, context: &Context) -> Result<Option<Looked>> {
    let Some(model) = &args.model else { return Ok(None) };
    if args.deep {
        model::folder_for(model, "doctor", context)?;
    }
    match model::locate(model, &context.hub)? {
        Place::Here(directory) => look_here(&directory).map(Some),
        Place::There(reference) => {
            let there = There::look(&reference, context)?;
            let answer = there.download(args.remote.bandwidth, context);
            look_there(&there, answer).map(Some)
        }
    }
}

fn look_here(directory: &Path) -> Result<Looked> {
    let source = Folder::new(directory);
    let stop_tokens = catalogue::stop_tokens(&source);
    let (looked, text) = std::thread::scope(|scope| {
        // A tokenizer of 20 MB takes as long as all the headers.
        let text = scope.spawn(|| Text::open(directory));
        (look_at_files(&source, &stop_tokens), text.join())
    });
    let text = text.map_err(|_| anyhow!("the thread that reads the tokenizer failed"))?;
    let mut looked = looked?;
    looked.directory = directory.to_owned();
    looked.checks.extend(text_checks(&text, looked.vocab_size, &stop_tokens));
    let holes = payload::holes(looked.files.iter().map(PathBuf::as_path));
    looked.checks.push(payload::hole_check(&holes));
    Ok(looked)
}

fn look_there(source: &dyn Source, answer: DownloadAnswer) -> Result<Looked> {
    let mut looked = look_at_files(source, &catalogue::stop_tokens(source))?;
    let absent = ["model.tokenizer", "model.chat_template", "model.vocabulary", "model.holes"];
    looked.checks.extend(absent.map(|id| Check::skip_because(id, "the model is not here yet")));
    looked.directory = answer.target.clone();
    looked.download = Some(answer);
    Ok(looked)
}

/// The files of a model, whole or not, wherever they are.
fn look_at_files(source: &dyn Source, stop_tokens: &StopTokens) -> Result<Looked> {
    match Catalogue::open_from(source) {
        Ok(model) => {
            let lacking = tierkeep_engine::supports(&model).err().map(|lacking| lacking.what);
            Ok(Looked {
                directory: PathBuf::new(),
                vocab_size: Some(model.spec.vocab_size),
                checks: checks::whole_model_checks(&model, stop_tokens, lacking.as_deref()),
                files: model.shards.iter().map(|shard| shard.path.clone()).collect(),
                catalogue: Some(model),
                download: None,
            })
        }
        Err(error @ CatalogueError::NotAModel { .. }) => Err(error.into()),
        Err(error) => damaged(source, error, stop_tokens),
    }
}

/// A model that cannot be catalogued: what is wrong with it, and what of it can be read all the same.
fn damaged(source: &dyn Source, error: CatalogueError, stop_tokens: &StopTokens) -> Result<Looked> {
    let survey = catalogue::survey(source);
    if survey.list_error.is_some() {
        return Err(error.into());
    }
    let mut checks = checks::damaged_model_checks(&error, &survey, stop_tokens);
    if let CatalogueError::Config { source: ConfigError::UnknownFamily { .. }, .. } = &error
        && let Ok(outline) = Outline::open_from(source)
        && let Some(check) = checks.iter_mut().find(|check| check.id == "model.family")
    {
        *check = checks::outlined(check.clone(), &outline);
    }
    let there = survey.shards.iter().filter(|shard| match shard.state {
        ShardState::Missing { .. } => false,
        ShardState::Whole { .. }
        | ShardState::Damaged { .. }
        | ShardState::UnknownContainer { .. } => true,
    });
    Ok(Looked {
        directory: PathBuf::new(),
        catalogue: None,
        vocab_size: survey.spec.as_ref().ok().map(|spec| spec.vocab_size),
        checks,
        files: there.map(|shard| shard.path.clone()).collect(),
        download: None,
    })
}

fn text_checks(
    text: &Result<Text, TextError>,
    vocab_size: Option<usize>,
    stop_tokens: &StopTokens,
) -> Vec<Check> {
    let stop_tokens = stop_tokens.union();
    let model = vocab_size.map(|vocab_size| ModelTokens { vocab_size, stop_tokens: &stop_tokens });
    text::checks(text, model)
}

/// Whether the machine can run the model, and whether there is room for it.
fn plan_checks(looked: &Looked, facts: &Facts) -> Vec<Check> {
    let mut all = Vec::new();
    if let Some(answer) = &looked.download {
        let bytes = answer.download.remaining_bytes();
        all.push(checks::download_check(bytes, &answer.free_bytes, &answer.target));
    }
    match &looked.catalogue {
        Some(model) => {
            let options = Options { engine: tierkeep_engine::ABILITIES, ..Options::default() };
            if looked.download.is_none() {
                all.push(checks::disk_check(model, facts));
            }
            all.extend(checks::plan_checks(model, facts, &options));
        }
        None => all.extend(
            ["model.budget", "model.placement"]
                .map(|id| Check::skip_because(id, "the model is not whole")),
        ),
    }
    all
}

/// Compares a container's files with the checksums of their writing, with a progress bar.
fn checksums(directory: &Path, context: &Context) -> Check {
    let _heeding = context.heeding();
    let total = convert::checksummed_bytes(directory).0;
    let bar = Bar::bytes("comparing checksums");
    let mut done = 0;
    convert::checksums(directory, &mut |bytes| {
        done += bytes;
        bar.set(done, total);
        if context.interrupted.load(Ordering::SeqCst) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })
}

/// Reads every byte, with a progress bar, until an interrupt.
fn read_everything(files: &[PathBuf], context: &Context) -> PayloadReport {
    let files: Vec<PayloadFile> = files
        .iter()
        .filter_map(|path| {
            let bytes = std::fs::metadata(path).ok()?.len();
            Some(PayloadFile { path: path.clone(), bytes, header: read_header(path).ok() })
        })
        .collect();
    let _heeding = context.heeding();
    let bar = Bar::bytes("reading every byte");
    payload::read_all(&files, &FileSource::new(&files), &mut |done, total| {
        bar.set(done, total);
        if context.interrupted.load(Ordering::SeqCst) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })
}

//! Checks of a model's files: of one that could be catalogued, and of one that could not. A damaged file
//! is blamed once; what could not be checked because of it is skipped, and says so.

use std::collections::BTreeMap;

use super::text::{count, first_few, ranges};
use super::{Check, Status};
use crate::catalogue::{
    Catalogue, CatalogueError, ConfigError, Group, HeaderError, Missing, Outline, OutlineLine,
    PackedBits, Role, RoleClass, ShardState, StopTokens, StoredType, Survey, SurveyedShard,
};
use crate::units::Bytes;

/// Things that a finding names before it only counts.
const NAMED_CAP: usize = 3;
/// Things that details list before they only count.
const DETAIL_CAP: usize = 1000;
/// Layers that are named in one line.
const LAYER_CAP: usize = 12;

/// Checks of the files of a model that was catalogued; `lacking` is the first mechanism of it that this
/// build does not run, if any.
#[must_use]
pub fn whole_model_checks(
    model: &Catalogue,
    stop_tokens: &StopTokens,
    lacking: Option<&str>,
) -> Vec<Check> {
    let spec = &model.spec;
    let config = format!(
        "config.json: {} layers of width {}, vocabulary of {}, context of {} tokens",
        spec.n_layers, spec.hidden_size, spec.vocab_size, spec.max_context
    );
    let shards = format!(
        "{}, {}, each as long as its header says",
        count(model.shards.len(), "file"),
        model.total_bytes()
    );
    let headers = format!("all valid, {} in them", count(model.n_tensors, "tensor"));
    let tensors = format!("each of {} layers has every tensor that it needs", spec.n_layers);
    let mut checks = vec![
        Check::ok("model.config", config),
        family(model, lacking),
        Check::ok("model.shards", shards),
        Check::ok("model.headers", headers),
        Check::ok("model.index", "says what the headers say, or is not needed"),
        Check::ok("model.tensors", tensors),
        mtp(model),
        Check::ok("model.types", stored_types(model)),
        container(model),
        stop_tokens_check(stop_tokens, Some(spec.vocab_size)),
    ];
    for check in checks.iter_mut().filter(|check| check.status == Status::Ok) {
        let of_check = |warning: &&crate::catalogue::Warning| warning.check == check.id;
        let warnings: Vec<_> = model.warnings.iter().filter(of_check).collect();
        if let Some(first) = warnings.first() {
            let rest = warnings.iter().skip(1).map(|warning| warning.finding.clone()).collect();
            *check = Check::warn(check.id, first.finding.clone(), first.remedy.clone())
                .with_details(rest);
        }
    }
    checks
}

fn family(model: &Catalogue, lacking: Option<&str>) -> Check {
    let id = "model.family";
    let spec = &model.spec;
    let router = &spec.router;
    let said = format!(
        "{}: {} of {} layers route, each token to {} of {} experts",
        spec.family.model_type(),
        spec.expert_layers().count(),
        spec.n_layers,
        router.n_experts_active,
        router.n_experts,
    );
    match lacking {
        None => Check::ok(id, format!("{said}; this build runs it")),
        Some(lacking) => Check::warn(
            id,
            format!("{said}; this build plans it and does not run it yet: {lacking}"),
            "`tierkeep plan` and `tierkeep inspect` work on it; to run it takes a newer tierkeep",
        ),
    }
}

/// Multi-token-prediction layers: what is present counts, whatever the config says.
fn mtp(model: &Catalogue) -> Check {
    let id = "model.mtp";
    let present = model.n_mtp_layers_present;
    // Configs that do not say how many there are promise what is present.
    let promised = model.spec.n_mtp_layers.unwrap_or(present);
    let dense = model.tensors.iter().filter(|t| model.is_mtp(t.role)).map(|t| t.bytes());
    let first = model.spec.n_layers;
    let experts = (first..first + present).flat_map(|layer| model.layer_experts(layer));
    let bytes: Bytes = dense.chain(experts.map(|e| Bytes(e.read_bytes()))).sum();
    let layers = count(present, "multi-token-prediction layer");
    match (promised, present) {
        (0, 0) => Check::ok(id, "none, and config.json promises none"),
        (promised, present) if promised == present => {
            Check::ok(id, format!("{layers}, {bytes}; what is not used is not loaded"))
        }
        (promised, 0) => Check::warn(
            id,
            format!(
                "config.json declares {}, the shards hold 0 that are whole",
                count(promised, "multi-token-prediction layer")
            ),
            "nothing for answers: what is present is counted; fetch the files that hold it to have it",
        ),
        (promised, _) => Check::warn(
            id,
            format!("config.json declares {promised}, the shards hold {layers} of {bytes}"),
            "nothing: what is present is counted",
        ),
    }
}

/// Bytes by stored type, of dense weights and of routed experts.
fn stored_types(model: &Catalogue) -> String {
    let mut by_type: BTreeMap<StoredType, (Bytes, Bytes)> = BTreeMap::new();
    for line in model.bytes_by_class() {
        let entry = by_type.entry(line.stored).or_default();
        match line.class {
            RoleClass::RoutedExperts => entry.1 = entry.1 + line.bytes,
            RoleClass::Embedding
            | RoleClass::Attention
            | RoleClass::Indexer
            | RoleClass::Norm
            | RoleClass::Router
            | RoleClass::DenseFeedForward
            | RoleClass::SharedExperts
            | RoleClass::Head
            | RoleClass::Mtp
            | RoleClass::Other => entry.0 = entry.0 + line.bytes,
        }
    }
    let one = |(stored, (dense, experts)): (StoredType, (Bytes, Bytes))| {
        let parts = [(dense, "dense"), (experts, "routed experts")];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(bytes, _)| bytes.0 > 0)
            .map(|(bytes, what)| format!("{bytes} {what}"))
            .collect();
        format!("{}: {}", stored.name(), parts.join(" and "))
    };
    by_type.into_iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Whether the way that experts are packed is known to cost quality.
fn container(model: &Catalogue) -> Check {
    let id = "model.container";
    let decoder_experts =
        || model.spec.expert_layers().flat_map(|layer| model.layer_experts(layer));
    let poor = || decoder_experts().filter_map(|expert| Poor::of(expert.gate.stored));
    let Some(worst) = poor().max() else {
        return Check::ok(id, "no packing that is known to be poor");
    };
    let (n_poor, n_all) = (poor().filter(|poor| *poor == worst).count(), decoder_experts().count());
    let which =
        if n_poor == n_all { format!("all {n_all}") } else { format!("{n_poor} of {n_all}") };
    match worst {
        Poor::FourBitRows => Check::warn(
            id,
            format!(
                "{which} routed experts are stored at 4 bits with one scale a row, which is known \
                 to be poor: 48.8 instead of 57.0 on a suite of tasks for OLMoE-1B-7B, 54.0 with \
                 groups of 128 (published for another engine that packs so; not measured here)"
            ),
            "expect worse answers; a container with a scale for every 32 to 128 weights, or 8 bits, \
             keeps quality",
        ),
        Poor::TwoBits => Check::warn(
            id,
            format!(
                "{which} routed experts are stored at 2 bits, which is known to be poor where it was \
                 done by rounding: on glm-nano the likeliest next token of a novel is that of the \
                 published weights at 57 to 64 % of the positions, at 4 bits at 91 to 92 % (measured, \
                 docs/numerics.md)"
            ),
            "expect worse answers; 4 bits with a scale for every 32 to 128 weights keep quality",
        ),
    }
}

/// Ways of packing experts that are known to cost quality, from the less to the more harmful.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Poor {
    /// 4 bits with one scale a row.
    FourBitRows,
    /// 2 bits of any grouping.
    TwoBits,
}

impl Poor {
    fn of(stored: StoredType) -> Option<Self> {
        let packed = stored.packed()?;
        match (packed.bits, packed.group) {
            (PackedBits::Two, _) => Some(Self::TwoBits),
            (PackedBits::Four, Group::Row) => Some(Self::FourBitRows),
            (PackedBits::Four, Group::Of128 | Group::Of64 | Group::Of32)
            | (PackedBits::Eight, _) => None,
        }
    }
}

/// The union of both configs, and whether the model can ever say one of them.
fn stop_tokens_check(tokens: &StopTokens, vocab_size: Option<usize>) -> Check {
    let id = "model.stop_tokens";
    let all = tokens.union();
    if all.is_empty() {
        return Check::warn(
            id,
            "neither config.json nor generation_config.json names a stop token",
            "limit the answer with -n, or fetch generation_config.json",
        );
    }
    let list = |tokens: &[u32]| {
        let tokens: Vec<String> = tokens.iter().map(u32::to_string).collect();
        if tokens.is_empty() { "none".to_owned() } else { first_few(&tokens, 12) }
    };
    let generation = match &tokens.generation {
        Some(generation) => format!("generation_config.json: {}", list(generation)),
        None => "there is no generation_config.json".to_owned(),
    };
    let finding = format!("{} (config.json: {}; {generation})", list(&all), list(&tokens.config));
    let beyond: Vec<u32> = match vocab_size {
        Some(size) => all.iter().copied().filter(|&token| token as usize >= size).collect(),
        None => Vec::new(),
    };
    if beyond.is_empty() {
        return Check::ok(id, finding);
    }
    Check::warn(
        id,
        format!("{finding}; the vocabulary ends before {}", list(&beyond)),
        "fetch config.json and generation_config.json from where the weights are from",
    )
}

/// Checks of a model that could not be catalogued, because of `error`: everything that is wrong with its
/// files, and not only what stopped the catalogue.
#[must_use]
pub fn damaged_model_checks(
    error: &CatalogueError,
    survey: &Survey,
    stop_tokens: &StopTokens,
) -> Vec<Check> {
    let vocab_size = survey.spec.as_ref().ok().map(|spec| spec.vocab_size);
    let mut checks = config_checks(survey);
    let (shards, are_whole) = shards_check(survey);
    checks.push(shards);
    checks.push(headers_check(survey));
    checks.push(tensors_check(error, survey, are_whole));
    checks.push(match error {
        CatalogueError::UnsupportedType { .. } => Check::fail(
            "model.types",
            error.to_string(),
            "fetch the model in a type that this build computes on, or convert it",
        ),
        CatalogueError::Packing { tensor, found, expected, remedy } => Check::fail(
            "model.types",
            format!("tensor {tensor} holds {found}, expected {expected}"),
            *remedy,
        ),
        _ => Check::skip_because("model.types", "the failures come first"),
    });
    checks.push(container_form(survey));
    checks.push(if tokens_are_known(survey) {
        stop_tokens_check(stop_tokens, vocab_size)
    } else {
        Check::skip_because("model.stop_tokens", "config.json cannot be read")
    });
    for id in ["model.index", "model.mtp"] {
        checks.push(Check::skip_because(id, "the failures come first"));
    }
    // Whatever stopped the catalogue is said, also where no check was made for it.
    if super::worst(&checks) != Status::Fail
        && let Some(check) = checks.iter_mut().find(|check| check.id == "model.tensors")
    {
        *check = Check::fail("model.tensors", error.to_string(), "fetch the model again");
    }
    checks
}

fn tokens_are_known(survey: &Survey) -> bool {
    match &survey.spec {
        Ok(_) => true,
        Err(CatalogueError::Config { source, .. }) => {
            !matches!(source, ConfigError::NotJson { .. })
        }
        Err(_) => false,
    }
}

fn config_checks(survey: &Survey) -> Vec<Check> {
    let (config, family) = ("model.config", "model.family");
    match &survey.spec {
        Ok(spec) => vec![
            Check::ok(
                config,
                format!(
                    "config.json: {} layers of width {}, {} experts of which {} a token",
                    spec.n_layers,
                    spec.hidden_size,
                    spec.router.n_experts,
                    spec.router.n_experts_active
                ),
            ),
            Check::ok(family, spec.family.model_type()),
        ],
        Err(CatalogueError::Config {
            source: source @ ConfigError::UnknownFamily { .. }, ..
        }) => {
            vec![
                Check::ok(config, "config.json can be read"),
                Check::fail(
                    family,
                    source.to_string(),
                    "this build cannot run it; see README for the families that it runs",
                ),
            ]
        }
        Err(CatalogueError::Config {
            source: source @ ConfigError::Unsupported { .. }, ..
        }) => {
            vec![
                Check::ok(config, "config.json can be read"),
                Check::fail(family, source.to_string(), "see README for what this build runs"),
            ]
        }
        Err(other) => vec![
            Check::fail(config, other.to_string(), "fetch config.json again"),
            Check::skip_because(family, "config.json cannot be used"),
        ],
    }
}

/// The check of a family that nobody knows, with what can be said of its bytes all the same.
#[must_use]
pub fn outlined(check: Check, outline: &Outline) -> Check {
    let line = |line: &OutlineLine| {
        format!(
            "{} in {}: {} in {}",
            line.class.name(),
            line.dtype,
            line.bytes,
            count(line.n_tensors as usize, "tensor")
        )
    };
    let finding = format!("{}; {}", check.finding, outline.caveat());
    let mut details: Vec<String> = outline.lines.iter().map(line).collect();
    details.push("guessed from the words in the names of tensors".to_owned());
    Check { finding, ..check }.with_details(details)
}

/// What is wrong with the length or the presence of a file; `None` for what is not about that.
fn shard_problem(shard: &SurveyedShard) -> Option<String> {
    match &shard.state {
        ShardState::Whole { .. } | ShardState::UnknownContainer { .. } => None,
        ShardState::Missing { named_by } => Some(format!("{} is missing ({named_by})", shard.name)),
        ShardState::Damaged { error } => {
            is_about_length(error).then(|| format!("{} {error}", shard.name))
        }
    }
}

fn is_about_length(error: &HeaderError) -> bool {
    match error {
        HeaderError::Io(_)
        | HeaderError::TooShort { .. }
        | HeaderError::HeaderPastEnd { .. }
        | HeaderError::WrongLength { .. } => true,
        HeaderError::HeaderTooLarge { .. }
        | HeaderError::NotJson { .. }
        | HeaderError::Duplicate { .. }
        | HeaderError::ZeroLength { .. }
        | HeaderError::ShapeMismatch { .. }
        | HeaderError::Reversed { .. }
        | HeaderError::NotContiguous { .. } => false,
    }
}

/// The files: all of them there and as long as they should be. Also says whether they are.
fn shards_check(survey: &Survey) -> (Check, bool) {
    let id = "model.shards";
    if survey.shards.is_empty() {
        let finding = "there are no model*.safetensors files, and no index that names any";
        return (Check::fail(id, finding, "fetch the weights"), false);
    }
    let problems: Vec<String> = survey.shards.iter().filter_map(shard_problem).collect();
    let n_files = survey.shards.len();
    if problems.is_empty() {
        let bytes: Bytes = survey.shards.iter().filter_map(whole_bytes).sum();
        let finding = format!("{}, {bytes}, none missing or cut off", count(n_files, "file"));
        return (Check::ok(id, finding), true);
    }
    let is_read_failure = survey
        .shards
        .iter()
        .any(|shard| matches!(&shard.state, ShardState::Damaged { error: HeaderError::Io(_) }));
    let n_whole = n_files - problems.len();
    let whole = match n_whole {
        0 => String::new(),
        n => format!(
            "; {} whole",
            if n == 1 { "1 other is".to_owned() } else { format!("{n} others are") }
        ),
    };
    let them = if problems.len() == 1 { "it" } else { "them" };
    let remedy = if is_read_failure {
        format!("check the disk and the permissions first, then fetch {them} again{whole}")
    } else {
        format!("fetch {them} again{whole}")
    };
    let missing_bytes = match survey.unaccounted_bytes {
        Some(bytes) if bytes.0 > 0 && survey.shards.iter().any(is_missing) => {
            format!("; by the index, {bytes} of tensors are in what is missing")
        }
        _ => String::new(),
    };
    (damaged(id, "file", n_files, problems, &missing_bytes, &remedy), false)
}

fn whole_bytes(shard: &SurveyedShard) -> Option<Bytes> {
    match shard.state {
        ShardState::Whole { bytes } => Some(Bytes(bytes)),
        ShardState::Missing { .. }
        | ShardState::Damaged { .. }
        | ShardState::UnknownContainer { .. } => None,
    }
}

fn is_missing(shard: &SurveyedShard) -> bool {
    matches!(shard.state, ShardState::Missing { .. })
}

/// A failure for each of several things: named while they are few, counted in any case.
fn damaged(
    id: &'static str,
    what: &str,
    n_all: usize,
    mut problems: Vec<String>,
    note: &str,
    remedy: &str,
) -> Check {
    let n = problems.len();
    let finding = if n <= NAMED_CAP {
        format!("{}{note}", problems.join("; "))
    } else {
        format!("{n} of {}: {}{note}", count(n_all, what), first_few(&problems, NAMED_CAP))
    };
    if n <= NAMED_CAP {
        problems.clear();
    } else if n > DETAIL_CAP {
        problems.truncate(DETAIL_CAP);
        problems.push(format!("and {} more", n - DETAIL_CAP));
    }
    Check::fail(id, finding, remedy).with_details(problems)
}

fn headers_check(survey: &Survey) -> Check {
    let id = "model.headers";
    let problems: Vec<String> = survey
        .shards
        .iter()
        .filter_map(|shard| match &shard.state {
            ShardState::Damaged { error } if !is_about_length(error) => {
                Some(format!("{} {error}", shard.name))
            }
            ShardState::Damaged { .. }
            | ShardState::Whole { .. }
            | ShardState::Missing { .. }
            | ShardState::UnknownContainer { .. } => None,
        })
        .collect();
    let n_files = survey.shards.len();
    if problems.is_empty() {
        let n_valid = survey.shards.iter().filter(|shard| shard_problem(shard).is_none()).count();
        return match n_valid {
            0 => Check::skip_because(id, "no file is whole"),
            n if n == n_files => Check::ok(id, "all valid"),
            n => Check::ok(
                id,
                format!("{} valid, those of the other files unknown", count(n, "header")),
            ),
        };
    }
    let them = if problems.len() == 1 { "it" } else { "them" };
    let remedy = format!("fetch {them} again");
    damaged(id, "header", n_files, problems, "", &remedy)
}

fn container_form(survey: &Survey) -> Check {
    let id = "model.container";
    let forms: Vec<String> = survey
        .shards
        .iter()
        .filter_map(|shard| match &shard.state {
            ShardState::UnknownContainer { found } => Some(format!(
                "{} is packed in a form that this build does not read ({found})",
                shard.name
            )),
            ShardState::Whole { .. } | ShardState::Missing { .. } | ShardState::Damaged { .. } => {
                None
            }
        })
        .collect();
    if forms.is_empty() {
        return Check::skip_because(id, "the failures come first");
    }
    let remedy = "use a newer tierkeep, or convert the model again";
    damaged(id, "file", survey.shards.len(), forms, "", remedy)
}

/// Whether every layer has what it needs. Tensors of a damaged file are that file's matter.
fn tensors_check(error: &CatalogueError, survey: &Survey, are_whole: bool) -> Check {
    let id = "model.tensors";
    if survey.spec.is_err() {
        return Check::skip_because(id, "without config.json nobody knows what is needed");
    }
    let n_twice = survey.twice.len();
    if n_twice > 0 {
        let twice = |(tensor, first, second): &(String, String, String)| {
            format!("tensor {tensor} is in both {first} and {second}")
        };
        let problems = survey.twice.iter().map(twice).collect();
        return damaged(id, "tensor", n_twice, problems, "", "remove the stale file");
    }
    let (explained, unexplained): (Vec<&Missing>, Vec<&Missing>) =
        survey.missing.iter().partition(|missing| missing.explained_by.is_some());
    if !unexplained.is_empty() {
        let layers = by_layer(&unexplained);
        let remedy = "the download is incomplete or config.json belongs to another model: fetch both \
                      from one place again";
        let what = count(unexplained.len(), "tensor");
        let finding = format!("{what} in none of the files: {}", first_few(&layers, NAMED_CAP));
        let details = if layers.len() > NAMED_CAP { layers } else { Vec::new() };
        return Check::fail(id, finding, remedy).with_details(details);
    }
    if !explained.is_empty() {
        let layers = layers_of(&explained);
        return Check::skip_because(
            id,
            format!("{} are in the files named above ({layers})", count(explained.len(), "tensor")),
        );
    }
    match error {
        CatalogueError::WrongShape { .. } => Check::fail(
            id,
            error.to_string(),
            "fetch config.json and the weights from one place again",
        ),
        CatalogueError::MissingTensor { .. } | CatalogueError::TensorTwice { .. } => {
            Check::fail(id, error.to_string(), "fetch the model again")
        }
        _ if are_whole => Check::ok(id, "each layer has every tensor that it needs"),
        _ => Check::ok(id, "each layer has every tensor that it needs, by the headers"),
    }
}

/// What each layer lacks: `layer 12: experts 5-17; self_attn.o_proj.weight`.
fn by_layer(missing: &[&Missing]) -> Vec<String> {
    let mut layers: BTreeMap<Option<u32>, (Vec<u32>, Vec<String>)> = BTreeMap::new();
    for missing in missing {
        match missing.role {
            Role::Expert { layer, expert, .. } => {
                layers.entry(Some(layer)).or_default().0.push(expert);
            }
            Role::Layer { layer, .. }
            | Role::SubBlock { layer, .. }
            | Role::FusedExperts { layer, .. } => {
                let prefix = format!("model.layers.{layer}.");
                let name = missing.name.strip_prefix(&prefix).unwrap_or(&missing.name);
                layers.entry(Some(layer)).or_default().1.push(name.to_owned());
            }
            Role::Embedding | Role::Head | Role::FinalNorm | Role::Padding => {
                layers.entry(None).or_default().1.push(missing.name.clone());
            }
        }
    }
    layers
        .into_iter()
        .map(|(layer, (mut experts, dense))| {
            experts.dedup();
            let mut parts = Vec::new();
            if !experts.is_empty() {
                let one = if experts.len() == 1 { "expert" } else { "experts" };
                parts.push(format!("{one} {}", ranges(experts)));
            }
            if !dense.is_empty() {
                parts.push(first_few(&dense, LAYER_CAP));
            }
            match layer {
                Some(layer) => format!("layer {layer}: {}", parts.join("; ")),
                None => parts.join("; "),
            }
        })
        .collect()
}

/// Which layers lack something, in a few words.
fn layers_of(missing: &[&Missing]) -> String {
    let layers = missing.iter().filter_map(|missing| match missing.role {
        Role::Layer { layer, .. }
        | Role::SubBlock { layer, .. }
        | Role::Expert { layer, .. }
        | Role::FusedExperts { layer, .. } => Some(layer),
        Role::Embedding | Role::Head | Role::FinalNorm | Role::Padding => None,
    });
    let layers: std::collections::BTreeSet<u32> = layers.collect();
    match layers.len() {
        0 => "embedding, head or final norm".to_owned(),
        1 => format!("layer {}", ranges(layers)),
        _ => format!("layers {}", ranges(layers)),
    }
}

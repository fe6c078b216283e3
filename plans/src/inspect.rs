//! What a model is made of, from its headers alone: bytes by role and stored type, what a token
//! touches, what a sequence needs, how large experts are. Pure; nothing here says what fits.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

use crate::budget::{self, CachePerToken, IoMode, KvElement, ModelBytes};
use crate::catalogue::{Catalogue, Outline, RoleClass, StoredType};
use crate::spec::{ArchSpec, AttentionSpec};
use crate::units::Bytes;

/// Everything about a model that its headers tell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// Where it is.
    #[serde(serialize_with = "as_text")]
    pub directory: PathBuf,
    /// The `model_type` of its config.
    pub family: String,
    /// What is to be known of an unknown family; `None` for a known one.
    pub caveat: Option<String>,
    /// Hash of its headers and sizes; `None` for an unknown family.
    pub fingerprint: Option<String>,
    /// Bytes of its files.
    pub total_bytes: Bytes,
    /// Number of its files.
    pub n_shards: usize,
    /// Number of tensors in all headers.
    pub n_tensors: usize,
    /// Its shape; `None` for an unknown family.
    pub shape: Option<Shape>,
    /// Bytes by role and stored type. With `header_bytes` they sum to `total_bytes`.
    pub weights: Vec<Weights>,
    /// Bytes of headers.
    pub header_bytes: Bytes,
    /// Routed experts of one size.
    pub experts: Vec<ExpertKind>,
    /// What the weights come to; `None` for an unknown family.
    pub sums: Option<Sums>,
    /// What a token touches; `None` for an unknown family.
    pub touched: Option<Touched>,
    /// What a sequence needs besides weights, by bits of an element; empty for an unknown family.
    pub caches: Vec<CacheBytes>,
    /// What a user should know.
    pub warnings: Vec<Note>,
}

/// Layers, widths, experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shape {
    /// Decoder layers.
    pub n_layers: usize,
    /// Decoder layers that route to experts.
    pub n_expert_layers: usize,
    /// Multi-token-prediction layers that are present and whole.
    pub n_mtp_layers: usize,
    /// Routed experts of a layer.
    pub n_experts: usize,
    /// Experts of a layer that have no weights.
    pub n_zero_experts: usize,
    /// Experts that a token is sent to in a layer.
    pub n_experts_active: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// The attention mechanism, in words.
    pub attention: String,
    /// Longest context, tokens.
    pub max_context: usize,
}

/// What a weight is for, multi-token prediction in two parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Token embedding.
    Embedding,
    /// Attention.
    Attention,
    /// The sparse-attention indexer.
    Indexer,
    /// Norms.
    Norm,
    /// Routers and their biases.
    Router,
    /// Dense feed-forward.
    DenseFeedForward,
    /// Shared experts.
    SharedExperts,
    /// Routed experts of decoder layers.
    RoutedExperts,
    /// Output head.
    Head,
    /// Multi-token prediction, routed experts left out.
    MtpDense,
    /// Routed experts of multi-token-prediction layers.
    MtpExperts,
    /// Known to serve nothing: alignment filler, weights of experts that return their input.
    Ignored,
    /// Names that no table knows.
    Unrecognised,
}

impl Part {
    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => RoleClass::Embedding.name(),
            Self::Attention => RoleClass::Attention.name(),
            Self::Indexer => RoleClass::Indexer.name(),
            Self::Norm => RoleClass::Norm.name(),
            Self::Router => RoleClass::Router.name(),
            Self::DenseFeedForward => RoleClass::DenseFeedForward.name(),
            Self::SharedExperts => RoleClass::SharedExperts.name(),
            Self::RoutedExperts => RoleClass::RoutedExperts.name(),
            Self::Head => RoleClass::Head.name(),
            Self::MtpDense => "MTP, dense",
            Self::MtpExperts => "MTP, routed experts",
            Self::Ignored => "ignored",
            Self::Unrecognised => "unrecognised",
        }
    }

    fn of(class: RoleClass) -> Self {
        match class {
            RoleClass::Embedding => Self::Embedding,
            RoleClass::Attention => Self::Attention,
            RoleClass::Indexer => Self::Indexer,
            RoleClass::Norm => Self::Norm,
            RoleClass::Router => Self::Router,
            RoleClass::DenseFeedForward => Self::DenseFeedForward,
            RoleClass::SharedExperts => Self::SharedExperts,
            RoleClass::RoutedExperts => Self::RoutedExperts,
            RoleClass::Head => Self::Head,
            RoleClass::Mtp => Self::MtpDense,
            RoleClass::Other => Self::Unrecognised,
        }
    }
}

/// Bytes of one role in one stored type, scales included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Weights {
    /// What they are for.
    pub part: Part,
    /// How they are stored; empty where nobody looked.
    pub stored: String,
    /// Matrices and vectors; 0 where nobody counted.
    pub n_weights: u64,
    /// Their bytes on disk.
    pub bytes: Bytes,
}

/// Weights by what becomes of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    /// Everything but routed experts, multi-token prediction left out.
    pub dense_bytes: Bytes,
    /// The same with what multi-token prediction has besides routed experts.
    pub dense_with_mtp_bytes: Bytes,
    /// Routed experts, those of multi-token prediction included.
    pub routed_bytes: Bytes,
    /// How many those are.
    pub n_routed_experts: u64,
}

/// How many experts take how many reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Reads {
    /// Reads that bring one.
    pub n_reads: usize,
    /// How many experts take so many.
    pub n_experts: u64,
}

/// Routed experts of one size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExpertKind {
    /// How many.
    pub n_experts: u64,
    /// Bytes of one on disk: what a miss reads.
    pub bytes: Bytes,
    /// Reads that bring one, the commonest number first: an expert whose tensors lie in two files
    /// takes more than others.
    pub reads: Vec<Reads>,
    /// How its matrices are stored.
    pub stored: String,
    /// Layers that have some, ascending.
    pub layers: Vec<usize>,
    /// Whether the layers are multi-token-prediction layers, which are not loaded.
    pub is_mtp: bool,
}

/// Weight bytes that one token touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Touched {
    /// Weights that every token uses.
    pub dense_bytes: Bytes,
    /// The routed experts that it is sent to.
    pub routed_bytes: Bytes,
}

/// What one sequence needs besides weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CacheBytes {
    /// Bits of an element.
    pub bits: u64,
    /// KV cache of one more token, layers with a sliding window left out.
    pub kv_bytes_per_token: Bytes,
    /// The same of layers with a sliding window, until the window is full.
    pub window_bytes_per_token: Bytes,
    /// Keys of the sparse-attention indexer of one more token.
    pub indexer_bytes_per_token: Bytes,
    /// The longest context, tokens.
    pub context: u64,
    /// KV cache at that context.
    pub kv_bytes: Bytes,
    /// Indexer keys at that context.
    pub indexer_bytes: Bytes,
}

/// Something to know and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Note {
    /// What was found.
    pub finding: String,
    /// What to do.
    pub remedy: String,
}

/// A path that is no text is shown as near to it as can be, as on a terminal.
fn as_text<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&path.display())
}

impl Inspection {
    /// Of a model whose family is known.
    #[must_use]
    pub fn of(model: &Catalogue) -> Self {
        let spec = &model.spec;
        let weights = weights(model);
        let experts = expert_kinds(model);
        let tensors: Bytes = weights.iter().map(|line| line.bytes).sum();
        let (dense_bytes, routed_bytes) =
            budget::touched_bytes_per_token(&ModelBytes::of(model, IoMode::Dropped));
        Self {
            directory: model.directory.clone(),
            family: spec.family.model_type().to_owned(),
            caveat: None,
            fingerprint: Some(model.fingerprint.clone()),
            total_bytes: model.total_bytes(),
            n_shards: model.shards.len(),
            n_tensors: model.n_tensors,
            shape: Some(shape(model)),
            header_bytes: model.total_bytes().saturating_sub(tensors),
            sums: Some(sums(&weights, &experts)),
            weights,
            experts,
            touched: Some(Touched { dense_bytes, routed_bytes }),
            caches: [KvElement::F16, KvElement::F32].map(|kv| caches(spec, kv)).into(),
            warnings: notes(&model.warnings),
        }
    }

    /// Of a model whose family is not: sizes by what names of tensors suggest.
    #[must_use]
    pub fn outline(directory: &Path, outline: &Outline) -> Self {
        let weights: Vec<Weights> = outline
            .lines
            .iter()
            .map(|line| Weights {
                part: Part::of(line.class),
                stored: line.dtype.to_string().to_lowercase(),
                n_weights: line.n_tensors,
                bytes: line.bytes,
            })
            .collect();
        let tensors: Bytes = weights.iter().map(|line| line.bytes).sum();
        Self {
            directory: directory.to_owned(),
            family: outline.model_type.clone(),
            caveat: Some(outline.caveat()),
            fingerprint: None,
            total_bytes: outline.total_bytes,
            n_shards: outline.n_shards,
            n_tensors: outline.n_tensors,
            shape: None,
            header_bytes: outline.total_bytes.saturating_sub(tensors),
            weights,
            experts: Vec::new(),
            sums: None,
            touched: None,
            caches: Vec::new(),
            warnings: notes(&outline.warnings),
        }
    }
}

fn sums(weights: &[Weights], experts: &[ExpertKind]) -> Sums {
    let mut sums = Sums {
        n_routed_experts: experts.iter().map(|kind| kind.n_experts).sum(),
        ..Sums::default()
    };
    for line in weights {
        match line.part {
            Part::Embedding
            | Part::Attention
            | Part::Indexer
            | Part::Norm
            | Part::Router
            | Part::DenseFeedForward
            | Part::SharedExperts
            | Part::Head => {
                sums.dense_bytes = sums.dense_bytes + line.bytes;
                sums.dense_with_mtp_bytes = sums.dense_with_mtp_bytes + line.bytes;
            }
            Part::MtpDense => sums.dense_with_mtp_bytes = sums.dense_with_mtp_bytes + line.bytes,
            Part::RoutedExperts | Part::MtpExperts => {
                sums.routed_bytes = sums.routed_bytes + line.bytes;
            }
            Part::Ignored | Part::Unrecognised => {}
        }
    }
    sums
}

fn notes(warnings: &[crate::catalogue::Warning]) -> Vec<Note> {
    let note = |w: &crate::catalogue::Warning| Note {
        finding: w.finding.clone(),
        remedy: w.remedy.clone(),
    };
    warnings.iter().map(note).collect()
}

fn shape(model: &Catalogue) -> Shape {
    let spec = &model.spec;
    Shape {
        n_layers: spec.n_layers,
        n_expert_layers: spec.expert_layers().count(),
        n_mtp_layers: model.n_mtp_layers_present,
        n_experts: spec.router.n_experts,
        n_zero_experts: spec.router.n_zero_experts,
        n_experts_active: spec.router.n_experts_active,
        hidden_size: spec.hidden_size,
        vocab_size: spec.vocab_size,
        attention: attention(spec),
        max_context: spec.max_context,
    }
}

fn attention(spec: &ArchSpec) -> String {
    let n_windows = spec.layers.iter().filter(|layer| layer.window.is_some()).count();
    let mut text = match &spec.attention {
        AttentionSpec::Latent(a) => format!(
            "latent, {} heads, {} + {} cached a token and layer",
            a.n_heads, a.kv_lora_rank, a.qk_rope_head_dim
        ),
        AttentionSpec::Grouped(a) => format!(
            "grouped, {} heads over {} of keys and values, {} wide",
            a.n_heads, a.n_kv_heads, a.head_dim
        ),
    };
    if let Some(indexer) = spec.indexer() {
        text += &format!(", an indexer that selects {}", indexer.top_k);
    }
    if let Some(window) = spec.layers.iter().find_map(|layer| layer.window) {
        text += &format!(", a window of {window} in {n_windows} layers");
    }
    text
}

/// Every byte of every tensor, by part and stored type.
fn weights(model: &Catalogue) -> Vec<Weights> {
    let mut sums: BTreeMap<(Part, StoredType), (u64, u64)> = BTreeMap::new();
    let mut add = |part, stored, n, bytes: u64| {
        let sum = sums.entry((part, stored)).or_default();
        *sum = (sum.0.saturating_add(n), sum.1.saturating_add(bytes));
    };
    for tensor in &model.tensors {
        let is_mtp = model.is_mtp(tensor.role);
        let part = if is_mtp { Part::MtpDense } else { Part::of(tensor.role.class()) };
        add(part, tensor.stored, 1, tensor.bytes().0);
    }
    let n_decoder = model.spec.n_layers;
    for layer in 0..n_decoder.saturating_add(model.n_mtp_layers_present) {
        let part = if layer < n_decoder { Part::RoutedExperts } else { Part::MtpExperts };
        for expert in model.layer_experts(layer) {
            for (stored, n, bytes) in expert.bytes_by_type() {
                add(part, stored, n, bytes);
            }
        }
    }
    let line = |((part, stored), (n_weights, bytes)): ((Part, StoredType), (u64, u64))| Weights {
        part,
        stored: stored.name().to_owned(),
        n_weights,
        bytes: Bytes(bytes),
    };
    let mut lines: Vec<Weights> = sums.into_iter().map(line).collect();
    let rest =
        [(Part::Ignored, model.ignored_bytes), (Part::Unrecognised, model.unrecognised_bytes)];
    lines.extend(rest.into_iter().filter(|(_, bytes)| bytes.0 > 0).map(|(part, bytes)| Weights {
        part,
        stored: String::new(),
        n_weights: 0,
        bytes,
    }));
    lines
}

/// Experts by size and types, multi-token prediction apart.
fn expert_kinds(model: &Catalogue) -> Vec<ExpertKind> {
    let n_decoder = model.spec.n_layers;
    let mut kinds: Vec<([StoredType; 3], ExpertKind)> = Vec::new();
    for layer in 0..n_decoder.saturating_add(model.n_mtp_layers_present) {
        let is_mtp = layer >= n_decoder;
        for expert in model.layer_experts(layer) {
            let types = [expert.gate.stored, expert.up.stored, expert.down.stored];
            let key = (types, Bytes(expert.read_bytes()), is_mtp);
            // Neighbours are alike, so that the last kind is nearly always the one.
            let same = |(types, kind): &([StoredType; 3], ExpertKind)| {
                (*types, kind.bytes, kind.is_mtp) == key
            };
            let at = kinds.iter().rposition(same).unwrap_or_else(|| {
                let kind = ExpertKind {
                    n_experts: 0,
                    bytes: key.1,
                    reads: Vec::new(),
                    stored: types_in_words(types),
                    layers: Vec::new(),
                    is_mtp,
                };
                kinds.push((types, kind));
                kinds.len() - 1
            });
            if let Some((_, kind)) = kinds.get_mut(at) {
                kind.add(layer, expert.extents().len());
            }
        }
    }
    let sorted = |(_, mut kind): ([StoredType; 3], ExpertKind)| {
        kind.reads.sort_by_key(|reads| (std::cmp::Reverse(reads.n_experts), reads.n_reads));
        kind
    };
    kinds.into_iter().map(sorted).collect()
}

impl ExpertKind {
    /// One more, in this layer, that so many reads bring.
    fn add(&mut self, layer: usize, n_reads: usize) {
        self.n_experts += 1;
        if self.layers.last() != Some(&layer) {
            self.layers.push(layer);
        }
        match self.reads.iter_mut().find(|reads| reads.n_reads == n_reads) {
            Some(reads) => reads.n_experts += 1,
            None => self.reads.push(Reads { n_reads, n_experts: 1 }),
        }
    }
}

/// `int4`, or `int4, int8` where an expert's matrices differ.
fn types_in_words(types: [StoredType; 3]) -> String {
    let mut named: Vec<&str> = Vec::new();
    for stored in types {
        if !named.contains(&stored.name()) {
            named.push(stored.name());
        }
    }
    named.join(", ")
}

fn caches(spec: &ArchSpec, kv: KvElement) -> CacheBytes {
    let CachePerToken { kv: plain, kv_in_windows, indexer_keys } =
        budget::cache_per_token(spec, kv);
    let context = spec.max_context as u64;
    CacheBytes {
        bits: kv.bytes() * 8,
        kv_bytes_per_token: plain,
        window_bytes_per_token: kv_in_windows,
        indexer_bytes_per_token: indexer_keys,
        context,
        kv_bytes: Bytes(budget::kv_cache_bytes(spec, context, kv)),
        indexer_bytes: Bytes(budget::indexer_key_bytes(spec, context, kv)),
    }
}

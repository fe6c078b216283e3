//! Where one weight lives in a plan, why there, how often it was asked for, and what it costs when it
//! is not there. Pure: the model, the plan and the history are given.

mod subject;

use std::path::PathBuf;

use serde::Serialize;

pub use self::subject::{ExplainError, Subject};
use crate::budget::{CardPlacement, DenseResidency, EmbeddingResidency, ModelBytes};
use crate::catalogue::{
    Catalogue, ExpertForm, Extent, FusedTensor, Projection, Role, Span, Tensor,
};
use crate::estimate::{Compute, Rates};
use crate::plan::{EngineSettings, Plan, Policy};
use crate::units::{Bytes, ExpertKey, LayerId};
use crate::usage::History;

/// Where a weight is while the model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// On a graphics card.
    Vram,
    /// In main memory, always.
    Resident,
    /// In main memory, in a slot that is never given up.
    Pinned,
    /// In main memory while it is among those that are used, else on disk.
    Cache,
    /// In the kernel's page cache while the kernel keeps it, else on disk.
    PageCache,
    /// On disk; read each time that it is asked for.
    Disk,
    /// Nowhere: nothing uses it.
    NotLoaded,
}

impl Tier {
    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Vram => "vram",
            Self::Resident => "resident",
            Self::Pinned => "pinned",
            Self::Cache => "cache",
            Self::PageCache => "page-cache",
            Self::Disk => "disk",
            Self::NotLoaded => "not loaded",
        }
    }
}

/// A range of bytes of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// First byte.
    pub offset: u64,
    /// Length.
    pub bytes: Bytes,
}

/// How often an expert was asked for, by the history.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Usage {
    /// Accesses, older sessions faded.
    pub accesses: f64,
    /// Of all accesses of its layer, 0 to 1.
    pub share_of_layer: f64,
    /// Its rank in the layer, 1 for the most used.
    pub rank: usize,
    /// Experts of the layer.
    pub n_experts: usize,
    /// Sessions in the history.
    pub n_sessions: u64,
}

/// What a read of it costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Bytes read.
    pub bytes: Bytes,
    /// Reads that bring them.
    pub n_reads: usize,
    /// How long it takes at the disk's rate.
    pub seconds: f64,
    /// When it is paid, in words.
    pub when: String,
    /// What the rate rests on.
    pub evidence: String,
}

/// Everything about one weight.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// What it is, in words.
    pub subject: String,
    /// Its published names.
    pub names: Vec<String>,
    /// How it is stored.
    pub stored: String,
    /// Its bytes on disk.
    pub bytes: Bytes,
    /// Where it is while the model runs.
    pub tier: Tier,
    /// The same in words.
    pub lives: String,
    /// Why there.
    pub why: Vec<String>,
    /// Where it lies on disk, one entry a read.
    pub places: Vec<Place>,
    /// How often it was asked for; `None` without a history, and for what no history counts.
    pub usage: Option<Usage>,
    /// What a read of it costs; `None` where none is made while the model runs.
    pub cost: Option<Cost>,
}

/// Explains `subject`, which [`Subject::find`] found in `model`.
#[must_use]
pub fn explain(
    subject: Subject,
    model: &Catalogue,
    plan: &Plan,
    history: Option<&History>,
) -> Explanation {
    let view = View { model, plan, sums: ModelBytes::of(model, plan.engine.io) };
    match subject {
        Subject::Expert(key) => view.expert(key, history),
        Subject::Tensor(index) => view.tensor(index),
    }
}

struct View<'a> {
    model: &'a Catalogue,
    plan: &'a Plan,
    sums: ModelBytes<'a>,
}

/// Where something lives and why.
struct Home {
    tier: Tier,
    lives: String,
    why: Vec<String>,
}

impl Home {
    fn new(tier: Tier, lives: impl Into<String>, why: impl Into<String>) -> Self {
        Self { tier, lives: lives.into(), why: vec![why.into()] }
    }
}

impl View<'_> {
    fn expert(&self, key: ExpertKey, history: Option<&History>) -> Explanation {
        let ExpertKey { layer, expert } = key;
        let (at, id) = (layer.0 as usize, expert.0 as usize);
        let layout = self.model.expert(at, id);
        let extents: &[Extent] = layout.map_or(&[], |layout| layout.extents());
        let mut types: Vec<&str> = Vec::new();
        for (stored, ..) in layout.into_iter().flat_map(|layout| layout.bytes_by_type()) {
            if !types.contains(&stored.name()) {
                types.push(stored.name());
            }
        }
        let bytes = Bytes(extents.iter().map(|e| e.bytes).sum());
        let mut home = self.expert_home(key);
        let usage = history.and_then(|history| usage(history, key));
        let is_missed = matches!(home.tier, Tier::Cache | Tier::PageCache | Tier::Disk);
        if is_missed && history.is_none() {
            home.why.push("no usage history says how often it is asked for".to_owned());
        }
        let cost = is_missed.then(|| {
            let rates = self.rates(bytes.0 / extents.len().max(1) as u64);
            Cost {
                bytes,
                n_reads: extents.len(),
                seconds: bytes.as_f64() / rates.experts.per_s,
                when: if home.tier == Tier::Disk {
                    "each time that it is asked for".to_owned()
                } else {
                    "each time that it is asked for and is not there".to_owned()
                },
                evidence: rates.experts.evidence,
            }
        });
        Explanation {
            subject: format!("expert {} of layer {}", expert.0, layer.0),
            names: self.expert_names(key),
            stored: types.join(", "),
            bytes,
            tier: home.tier,
            lives: home.lives,
            why: home.why,
            places: extents.iter().map(|e| self.place(e.shard, e.offset, e.bytes)).collect(),
            usage,
            cost,
        }
    }

    /// The tensors that hold the expert.
    fn expert_names(&self, ExpertKey { layer, expert }: ExpertKey) -> Vec<String> {
        let (layer, expert) = (layer.0, expert.0);
        let form = self.model.expert(layer as usize, expert as usize).map(|layout| layout.form);
        let roles: Vec<Role> = match form {
            Some(ExpertForm::Separate) => [Projection::Gate, Projection::Up, Projection::Down]
                .map(|projection| Role::Expert { layer, expert, projection })
                .into(),
            Some(ExpertForm::Interleaved | ExpertForm::InterleavedTransposed) => {
                [FusedTensor::GateUp, FusedTensor::Down]
                    .map(|tensor| Role::FusedExperts { layer, tensor })
                    .into()
            }
            None => Vec::new(),
        };
        roles.into_iter().map(|role| self.model.name_of(role)).collect()
    }

    fn expert_home(&self, ExpertKey { layer, expert }: ExpertKey) -> Home {
        let at = layer.0 as usize;
        if at >= self.model.spec.n_layers {
            return mtp();
        }
        let placement = &self.plan.placement;
        let holds = |card: &&CardPlacement| {
            let mut layers = card.experts.iter();
            layers.any(|l| l.layer == layer.0 && l.experts.0.binary_search(&expert.0).is_ok())
        };
        if let Some(card) = placement.cards.iter().find(holds) {
            let why = format!(
                "{} experts stay on that card, the ones that are expected to be asked for most",
                card.n_experts()
            );
            return Home::new(Tier::Vram, on_card(card), why);
        }
        let slots = placement.slots.caps.get(at).copied().unwrap_or(0);
        let pins = placement.slots.pins.get(at).map_or(&[][..], Vec::as_slice);
        let n_experts = self.model.layer_experts(at).len();
        if pins.binary_search(&expert.0).is_ok() {
            let lives =
                format!("in main memory, one of {} pins of layer {at}; never evicted", pins.len());
            return Home::new(Tier::Pinned, lives, placement.pins_evidence.clone());
        }
        let others = slots as usize - pins.len().min(slots as usize);
        if slots as usize >= n_experts && n_experts > 0 {
            let lives =
                format!("in main memory: all {n_experts} experts of layer {at} have a slot");
            return Home::new(Tier::Resident, lives, "read once, when it is first asked for");
        }
        if others > 0 {
            let lives = format!(
                "in one of {others} slots of layer {at} while it is in use, else on disk; {n_experts} \
                 experts share them"
            );
            let rule = match placement.policy {
                Policy::Recency => "the least recently used expert gives way",
                Policy::Frequency => "the least often used expert gives way",
                Policy::Static => "slots that no pin takes stay as they are first filled",
            };
            return Home::new(Tier::Cache, lives, rule);
        }
        if placement.page_cache_bytes.0 > 0 {
            let lives = "in the kernel's page cache while the kernel keeps it, else on disk";
            return Home::new(Tier::PageCache, lives, placement.cache_evidence.clone());
        }
        let why = format!(
            "layer {at} has {slots} slots, {} of them for pins, which this expert is not among",
            pins.len()
        );
        Home::new(Tier::Disk, "on disk; it passes through the flight buffer", why)
    }

    fn tensor(&self, index: usize) -> Explanation {
        // `Subject::find` gave the index; an empty explanation is better than a panic.
        let Some(tensor) = self.model.tensors.get(index) else {
            return Explanation {
                subject: "nothing".to_owned(),
                names: Vec::new(),
                stored: String::new(),
                bytes: Bytes(0),
                tier: Tier::NotLoaded,
                lives: String::new(),
                why: Vec::new(),
                places: Vec::new(),
                usage: None,
                cost: None,
            };
        };
        let home = self.tensor_home(tensor);
        let spans: Vec<Span> = [Some(tensor.weight), tensor.scales].into_iter().flatten().collect();
        let rates = self.rates(tensor.weight.bytes);
        let read = match home.tier {
            Tier::Disk if tensor.role == Role::Embedding => Some(Bytes(self.sums.embedding_row)),
            Tier::Disk => Some(tensor.bytes()),
            Tier::Vram
            | Tier::Resident
            | Tier::Pinned
            | Tier::Cache
            | Tier::PageCache
            | Tier::NotLoaded => None,
        };
        let cost = read.map(|bytes| Cost {
            bytes,
            n_reads: spans.len(),
            seconds: bytes.as_f64() / rates.layers.per_s,
            when: "for every token".to_owned(),
            evidence: rates.layers.evidence.clone(),
        });
        Explanation {
            subject: self.what(tensor),
            names: vec![self.model.name_of(tensor.role)],
            stored: tensor.stored.name().to_owned(),
            bytes: tensor.bytes(),
            tier: home.tier,
            lives: home.lives,
            why: home.why,
            places: spans.iter().map(|s| self.place(s.shard, s.offset, s.bytes)).collect(),
            usage: None,
            cost,
        }
    }

    fn what(&self, tensor: &Tensor) -> String {
        let class = if self.model.is_mtp(tensor.role) {
            "multi-token prediction"
        } else {
            tensor.role.class().name()
        };
        let of_layer =
            layer_of(tensor.role).map_or_else(String::new, |layer| format!(" of layer {layer}"));
        format!("{class}{of_layer}, {} x {}", tensor.rows, tensor.cols)
    }

    fn tensor_home(&self, tensor: &Tensor) -> Home {
        if self.model.is_mtp(tensor.role) {
            return mtp();
        }
        let placement = &self.plan.placement;
        let every = "every token touches it";
        let held = match placement.dense {
            DenseResidency::Resident => "in main memory, with the dense weights",
            DenseResidency::Mapped => "in the page cache, as pages of its file that are mapped",
        };
        match tensor.role {
            Role::Embedding => match self.plan.engine.embedding {
                EmbeddingResidency::RowRead => Home::new(
                    Tier::Disk,
                    "on disk; the row of each token is read when it is needed",
                    "a row is a few kilobytes, and the table takes the place of experts",
                ),
                EmbeddingResidency::Resident if self.model.spec.tied_embeddings => Home::new(
                    Tier::Resident,
                    held,
                    "it is the head as well, which every token touches whole",
                ),
                EmbeddingResidency::Resident => Home::new(
                    Tier::Resident,
                    held,
                    "the budget has room for it, so that no row is read",
                ),
            },
            Role::Head | Role::FinalNorm => match placement.cards.iter().find(|card| card.head) {
                Some(card) => Home::new(Tier::Vram, on_card(card), every),
                None if placement.streamed.head && tensor.role == Role::Head => streamed(),
                None => Home::new(Tier::Resident, held, every),
            },
            role => {
                let layer = layer_of(role).unwrap_or(u32::MAX);
                let card = placement.cards.iter().find(|c| c.layers().contains(&(layer as usize)));
                match card {
                    Some(card) => Home::new(Tier::Vram, on_card(card), every),
                    None if placement.streamed.layers.binary_search(&layer).is_ok() => streamed(),
                    None => Home::new(Tier::Resident, held, every),
                }
            }
        }
    }

    fn place(&self, shard: u32, offset: u64, bytes: u64) -> Place {
        let file = self.model.shards.get(shard as usize).map(|shard| shard.path.clone());
        Place { file: file.unwrap_or_default(), offset, bytes: Bytes(bytes) }
    }

    fn rates(&self, read_bytes: u64) -> Rates {
        let engine = &self.plan.engine;
        let layer = self.sums.layers.iter().map(|l| l.dense.stored).max().unwrap_or(0);
        let reads = self.plan.reads();
        let EngineSettings { isa, threads, numerics, .. } = engine;
        let compute = Compute { isa, threads: *threads, numerics: *numerics };
        Rates::of(&self.plan.machine, compute, (read_bytes, reads), layer)
    }
}

/// The layer of a role; none for the embedding, the head and the final norm.
fn layer_of(role: Role) -> Option<u32> {
    match role {
        Role::Layer { layer, .. }
        | Role::SubBlock { layer, .. }
        | Role::Expert { layer, .. }
        | Role::FusedExperts { layer, .. } => Some(layer),
        Role::Embedding | Role::Head | Role::FinalNorm | Role::Padding => None,
    }
}

fn mtp() -> Home {
    Home::new(
        Tier::NotLoaded,
        "on disk; it is not loaded",
        "it belongs to a multi-token-prediction layer, which this build does not use",
    )
}

fn streamed() -> Home {
    Home::new(
        Tier::Disk,
        "on disk; it passes through the stream buffers",
        "every token touches it, and the budget does not hold all dense weights",
    )
}

fn on_card(card: &CardPlacement) -> String {
    format!("on graphics card {} ({})", card.card, card.name)
}

/// How often an expert was asked for; `None` where its layer is not in the history.
fn usage(history: &History, ExpertKey { layer, expert }: ExpertKey) -> Option<Usage> {
    let shape = history.shape();
    let at = shape.layers.iter().position(|&LayerId(l)| l == layer.0)?;
    let n_experts = shape.n_experts as usize;
    let start = at.checked_mul(n_experts)?;
    let counts = history.counts().get(start..start.checked_add(n_experts)?)?;
    let accesses = *counts.get(expert.0 as usize)?;
    let all: f64 = counts.iter().sum();
    Some(Usage {
        accesses,
        share_of_layer: if all > 0.0 { accesses / all } else { 0.0 },
        rank: counts.iter().filter(|&&count| count > accesses).count() + 1,
        n_experts,
        n_sessions: history.n_sessions(),
    })
}

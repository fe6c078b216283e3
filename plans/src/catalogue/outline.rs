//! What can be said of a model whose family nobody knows: how many bytes serve which end, guessed from
//! the words in the names of its tensors. Plans nothing, for nothing here says how it computes.

use std::collections::BTreeMap;
use std::path::Path;

use super::header::{DType, RawTensor};
use super::roles::PADDING_PREFIX;
use super::shards::{self, Files};
use super::{CatalogueError, Folder, RoleClass, Source, Warning, config};
use crate::units::Bytes;

/// A model by the bytes of its tensors alone.
#[derive(Clone, Debug)]
pub struct Outline {
    /// The `model_type` of its config; empty where it declares none.
    pub model_type: String,
    /// Number of shards.
    pub n_shards: usize,
    /// Bytes of all shards.
    pub total_bytes: Bytes,
    /// Number of tensors in all headers.
    pub n_tensors: usize,
    /// Bytes by guessed role and type, in the order of [`RoleClass::ALL`].
    pub lines: Vec<OutlineLine>,
    /// One more than the highest number of a layer in any name; `None` where names have none.
    pub n_layers: Option<u64>,
    /// The same of experts.
    pub n_experts: Option<u64>,
    /// What a user should know of the files.
    pub warnings: Vec<Warning>,
}

/// Bytes of one guessed role in one type of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutlineLine {
    /// What the tensors are likely for.
    pub class: RoleClass,
    /// The type in the header, which for packed weights is not what they mean.
    pub dtype: DType,
    /// How many tensors.
    pub n_tensors: u64,
    /// Their bytes.
    pub bytes: Bytes,
}

impl Outline {
    /// Reads the headers of the model in the folder `directory`.
    ///
    /// # Errors
    /// As of [`super::Catalogue::open`], where files are absent or damaged; never for what the config
    /// says or the tensors are.
    pub fn open(directory: &Path) -> Result<Self, CatalogueError> {
        Self::open_from(&Folder::new(directory))
    }

    /// Reads the headers of a model from wherever it is.
    ///
    /// # Errors
    /// As of [`Outline::open`].
    pub fn open_from(source: &dyn Source) -> Result<Self, CatalogueError> {
        let files = Files::list(source)?;
        let model_type = config::declared_family(&files.config()?);
        let reads_index = source.index_is_cheap() || files.needs_index();
        let index = if reads_index { files.index() } else { files.index_unread() };
        let read = shards::read_shards(&files, &index)?;
        let mut sums = Sums::default();
        for tensor in read.headers.iter().flat_map(|header| header.tensors()) {
            sums.add(tensor);
        }
        Ok(Self {
            model_type,
            n_shards: read.headers.len(),
            total_bytes: read.headers.iter().map(|header| Bytes(header.file_bytes)).sum(),
            n_tensors: read.headers.iter().map(|header| header.n_tensors()).sum(),
            lines: sums.lines(),
            n_layers: sums.last_layer.map(|last| last + 1),
            n_experts: sums.last_expert.map(|last| last + 1),
            warnings: read.into_warnings(),
        })
    }

    /// The sentence that says what this is and is not.
    #[must_use]
    pub fn caveat(&self) -> String {
        if self.model_type.is_empty() {
            "config.json names no family: sizes by tensor role only".to_owned()
        } else {
            format!("unknown family {}: sizes by tensor role only", self.model_type)
        }
    }

    /// Bytes of a guessed role.
    #[must_use]
    pub fn bytes_of(&self, class: RoleClass) -> Bytes {
        self.lines.iter().filter(|line| line.class == class).map(|line| line.bytes).sum()
    }
}

#[derive(Default)]
struct Sums {
    /// Tensors and bytes; types in the order in which they are met.
    by_class: BTreeMap<RoleClass, Vec<(DType, u64, u64)>>,
    last_layer: Option<u64>,
    last_expert: Option<u64>,
}

impl Sums {
    fn add(&mut self, tensor: RawTensor<'_>) {
        let class = guess(tensor.name);
        let bytes = tensor.end - tensor.start;
        let types = self.by_class.entry(class).or_default();
        match types.iter_mut().find(|(dtype, ..)| *dtype == tensor.dtype) {
            Some((_, n_tensors, sum)) => (*n_tensors, *sum) = (*n_tensors + 1, *sum + bytes),
            None => types.push((tensor.dtype, 1, bytes)),
        }
        let number = |words: &[&str]| number_after(tensor.name, words);
        self.last_layer = self.last_layer.max(number(&["layers", "h", "blocks", "block"]));
        self.last_expert = self.last_expert.max(number(&["experts", "expert"]));
    }

    fn lines(&self) -> Vec<OutlineLine> {
        self.by_class
            .iter()
            .flat_map(|(class, types)| {
                types.iter().map(|(dtype, n_tensors, bytes)| OutlineLine {
                    class: *class,
                    dtype: *dtype,
                    n_tensors: *n_tensors,
                    bytes: Bytes(*bytes),
                })
            })
            .collect()
    }
}

/// The number that follows one of these words in a dotted name: 7 in `model.layers.7.mlp`. Numbers so
/// large that no model has as many are not believed.
fn number_after(name: &str, words: &[&str]) -> Option<u64> {
    let mut parts = name.split('.').peekable();
    while let Some(part) = parts.next() {
        if words.contains(&part)
            && let Some(number) = parts.peek().and_then(|next| next.parse::<u64>().ok())
            && number < 1 << 20
        {
            return Some(number);
        }
    }
    None
}

/// What a tensor is likely for. The words are looked for in this order, for names hold several: an
/// indexer has attention's words, a shared expert those of experts, all of them those of norms.
fn guess(name: &str) -> RoleClass {
    const WORDS: &[(&[&str], RoleClass)] = &[
        (&["mtp", "nextn", "eh_proj", "enorm", "hnorm", "shared_head"], RoleClass::Mtp),
        (&["shared_expert"], RoleClass::SharedExperts),
        (&["expert"], RoleClass::RoutedExperts),
        (&["norm", ".ln_", "ln_f"], RoleClass::Norm),
        (&["indexer"], RoleClass::Indexer),
        (&["embed", ".wte.", ".wpe."], RoleClass::Embedding),
        (&["lm_head", "output.weight", "unembed"], RoleClass::Head),
        (
            &["attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv"],
            RoleClass::Attention,
        ),
        (&["router", ".gate.", "gate_inp"], RoleClass::Router),
        (
            &["mlp", "ffn", "feed_forward", "_proj", ".w1.", ".w2.", ".w3."],
            RoleClass::DenseFeedForward,
        ),
    ];
    if name.starts_with(PADDING_PREFIX) {
        return RoleClass::Other;
    }
    WORDS
        .iter()
        .find(|(words, _)| words.iter().any(|word| name.contains(word)))
        .map_or(RoleClass::Other, |(_, class)| *class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_in_names_say_what_tensors_are_likely_for() {
        let cases = [
            ("model.embed_tokens.weight", RoleClass::Embedding),
            ("transformer.wte.weight", RoleClass::Embedding),
            ("lm_head.weight", RoleClass::Head),
            ("model.layers.0.self_attn.q_proj.weight", RoleClass::Attention),
            ("model.layers.0.linear_attn.in_proj_qkv.weight", RoleClass::Attention),
            ("model.layers.0.self_attn.q_norm.weight", RoleClass::Norm),
            ("model.layers.0.mlp.gate.weight", RoleClass::Router),
            ("model.layers.0.block_sparse_moe.gate.weight", RoleClass::Router),
            ("model.layers.0.mlp.experts.12.up_proj.weight", RoleClass::RoutedExperts),
            ("model.layers.0.mlp.shared_expert.up_proj.weight", RoleClass::SharedExperts),
            ("model.layers.0.mlp.shared_expert_gate.weight", RoleClass::SharedExperts),
            ("model.layers.0.mlp.gate_proj.weight", RoleClass::DenseFeedForward),
            ("model.layers.0.feed_forward.w1.weight", RoleClass::DenseFeedForward),
            ("model.mtp.layers.0.self_attn.q_proj.weight", RoleClass::Mtp),
            ("backbone.layers.3.mixer.A_log", RoleClass::Other),
            ("", RoleClass::Other),
        ];
        for (name, class) in cases {
            assert_eq!(guess(name), class, "{name}");
        }
    }

    #[test]
    fn layers_and_experts_are_counted_by_their_highest_number() {
        let numbers = |name| (number_after(name, &["layers"]), number_after(name, &["experts"]));
        assert_eq!(
            numbers("model.layers.47.mlp.experts.127.up_proj.weight"),
            (Some(47), Some(127))
        );
        assert_eq!(numbers("model.layers.x.mlp.experts.gate_up_proj"), (None, None));
        assert_eq!(numbers("model.layers.18446744073709551615.a"), (None, None));
    }
}

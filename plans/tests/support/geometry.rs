//! Checkpoints of every family by names and shapes alone, small or of full size: headers in memory
//! and no data. Owns the names as published checkpoints have them, written down apart from the
//! catalogue's own tables, so that each checks the other.

use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tierkeep_plans::catalogue::header::{HeaderBytes, HeaderError};
use tierkeep_plans::catalogue::{Catalogue, CatalogueError, Entry as Listed, Source};

use super::uint;

/// Data bytes of one shard of a published checkpoint.
const SHARD_BYTES: u64 = 5_000_000_000;

/// One tensor of a header.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
}

impl Entry {
    pub(crate) fn new(name: impl Into<String>, dtype: &'static str, shape: &[u64]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        let bits = match self.dtype {
            "F64" | "I64" | "C64" => 64,
            "F32" | "I32" => 32,
            "BF16" | "F16" | "I16" => 16,
            "F6_E2M3" | "F6_E3M2" => 6,
            "F4" => 4,
            _ => 8,
        };
        self.shape.iter().product::<u64>() * bits / 8
    }
}

/// How a checkpoint is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// bf16 throughout.
    Bf16,
    /// e4m3 with block scales, but for what publishers keep at 16 bits.
    Fp8,
    /// Packed rows of 4 bits with `.qs`; embedding, head and multi-token prediction at 8.
    Int4,
    /// bf16, with the experts of gpt-oss in MXFP4.
    MxFp4,
}

/// A checkpoint of names and shapes.
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    pub(crate) config: Value,
    pub(crate) entries: Vec<Entry>,
    /// What it is called.
    pub(crate) label: PathBuf,
}

impl Geometry {
    /// What a config asks for, with `n_mtp` multi-token-prediction layers.
    pub(crate) fn new(config: Value, storage: Storage, n_mtp: u64) -> Self {
        let mut entries = Vec::new();
        for (name, shape) in weights(&config, n_mtp, storage) {
            store(&config, &name, &shape, storage, &mut entries);
        }
        Self { config, entries, label: PathBuf::from("a-model") }
    }

    /// The same without one tensor.
    pub(crate) fn without(&self, index: usize) -> Self {
        let mut less = self.clone();
        less.entries.remove(index);
        less
    }

    pub(crate) fn data_bytes(&self) -> u64 {
        self.entries.iter().map(Entry::bytes).sum()
    }

    pub(crate) fn memory(&self) -> Memory {
        let mut shards = vec![(String::new(), 0)];
        for entry in &self.entries {
            let bytes = entry.bytes();
            if shards.last().is_some_and(|(_, at)| *at > 0 && at + bytes > SHARD_BYTES) {
                shards.push((String::new(), 0));
            }
            let (json, at) = shards.last_mut().unwrap();
            let comma = if json.is_empty() { '{' } else { ',' };
            let Entry { name, dtype, shape } = entry;
            let end = *at + bytes;
            write!(
                json,
                r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{end}]}}"#
            )
            .unwrap();
            *at = end;
        }
        let n = shards.len();
        let header = |(index, (json, bytes)): (usize, (String, u64))| {
            let json = (json + "}").into_bytes();
            let file_bytes = 8 + json.len() as u64 + bytes;
            let name = format!("model-{:05}-of-{n:05}.safetensors", index + 1);
            (name, HeaderBytes { json, file_bytes })
        };
        let config = self.config.to_string().into_bytes();
        let shards = shards.into_iter().enumerate().map(header).collect();
        Memory { label: self.label.clone(), config, shards }
    }

    pub(crate) fn open(&self) -> Result<Catalogue, CatalogueError> {
        Catalogue::open_from(&self.memory())
    }
}

/// Headers in memory.
pub(crate) struct Memory {
    label: PathBuf,
    config: Vec<u8>,
    shards: Vec<(String, HeaderBytes)>,
}

impl Source for Memory {
    fn label(&self) -> &Path {
        &self.label
    }

    fn list(&self) -> io::Result<Option<Vec<Listed>>> {
        let entry = |name: &str, bytes| Listed {
            name: name.to_owned(),
            bytes: Some(bytes),
            broken_link: None,
        };
        let config = entry("config.json", self.config.len() as u64);
        let shards = self.shards.iter().map(|(name, header)| entry(name, header.file_bytes));
        // It is listed, so that nobody misses it, and says nothing that the headers do not.
        let index = entry("model.safetensors.index.json", 2);
        Ok(Some(shards.chain([config, index]).collect()))
    }

    fn small_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok((name == "config.json").then(|| self.config.clone()))
    }

    fn file_bytes(&self, _name: &str) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn header(&self, name: &str) -> Result<HeaderBytes, HeaderError> {
        let found = self.shards.iter().find(|(shard, _)| shard == name);
        found.map(|(_, header)| header.clone()).ok_or_else(|| io::ErrorKind::NotFound.into_io())
    }

    fn index_is_cheap(&self) -> bool {
        false
    }
}

trait IntoIo {
    fn into_io(self) -> HeaderError;
}

impl IntoIo for io::ErrorKind {
    fn into_io(self) -> HeaderError {
        HeaderError::Io(self.into())
    }
}

/// The tensors that one weight becomes.
fn store(config: &Value, name: &str, shape: &[u64], storage: Storage, entries: &mut Vec<Entry>) {
    let is_f32 = name.ends_with("e_score_correction_bias") || name.ends_with("classifier.weight");
    let float = if is_f32 { "F32" } else { "BF16" };
    let [rows, cols] = shape else {
        let dtype = match name {
            _ if name.ends_with("_blocks") || name.ends_with("_scales") => "U8",
            _ if storage == Storage::Int4 => "F32",
            _ => float,
        };
        return entries.push(Entry::new(name, dtype, shape));
    };
    let is_kept = name.ends_with("weights_proj.weight") || name.ends_with("eh_proj.weight");
    let is_longcat_attention =
        config["model_type"] == "longcat_flash" && name.contains(".self_attn");
    match storage {
        Storage::Fp8 if name.ends_with("proj.weight") && !is_kept && !is_longcat_attention => {
            entries.push(Entry::new(name, "F8_E4M3", shape));
            let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
            entries.push(Entry::new(format!("{name}_scale_inv"), "F32", &blocks));
        }
        Storage::Int4 if is_f32 || name.ends_with("mlp.gate.weight") => {
            entries.push(Entry::new(name, "F32", shape));
        }
        Storage::Int4 => {
            let mtp = format!("layers.{}.", config["num_hidden_layers"]);
            let is_8_bit = name.contains(&mtp) || !name.contains(".layers.");
            let row = if is_8_bit { *cols } else { cols.div_ceil(2) };
            entries.push(Entry::new(name, "U8", &[rows * row]));
            entries.push(Entry::new(format!("{name}.qs"), "F32", &[*rows]));
        }
        Storage::Bf16 | Storage::Fp8 | Storage::MxFp4 => {
            let dtype = if name.ends_with("_scales") { "U8" } else { float };
            entries.push(Entry::new(name, dtype, shape));
        }
    }
}

/// Names and shapes as they are put together.
struct Weights<'a> {
    config: &'a Value,
    list: Vec<(String, Vec<u64>)>,
}

/// Every weight of a config, in layer order, by its published name.
fn weights(config: &Value, n_mtp: u64, storage: Storage) -> Vec<(String, Vec<u64>)> {
    let mut weights = Weights { config, list: Vec::new() };
    let (vocab, hidden) = (uint(config, "vocab_size"), uint(config, "hidden_size"));
    weights.add("model.embed_tokens.weight", &[vocab, hidden]);
    let is_longcat = config["model_type"] == "longcat_flash";
    let n_layers = uint(config, if is_longcat { "num_layers" } else { "num_hidden_layers" });
    for layer in 0..n_layers {
        let prefix = format!("model.layers.{layer}");
        match config["model_type"].as_str().unwrap() {
            "longcat_flash" => weights.longcat(&prefix),
            "glm_moe_dsa" | "deepseek_v3" | "deepseek_v2" | "kimi_k2" => {
                weights.latent(&prefix, layer);
            }
            "gpt_oss" => weights.gpt_oss(&prefix, storage),
            _ => weights.grouped(&prefix, layer),
        }
    }
    for n in 0..n_mtp {
        if is_longcat {
            weights.longcat_mtp();
        } else {
            weights.mtp(n_layers + n);
        }
    }
    weights.add("model.norm.weight", &[hidden]);
    weights.add("lm_head.weight", &[vocab, hidden]);
    weights.list
}

impl Weights<'_> {
    fn get(&self, field: &str) -> u64 {
        uint(self.config, field)
    }

    fn or(&self, field: &str, default: u64) -> u64 {
        self.config[field].as_u64().unwrap_or(default)
    }

    fn flag(&self, field: &str) -> bool {
        self.config[field] == json!(true)
    }

    fn add(&mut self, name: &str, shape: &[u64]) {
        self.list.push((name.to_owned(), shape.to_vec()));
    }

    fn swiglu(&mut self, prefix: &str, ff: u64) {
        let hidden = self.get("hidden_size");
        self.add(&format!("{prefix}.gate_proj.weight"), &[ff, hidden]);
        self.add(&format!("{prefix}.up_proj.weight"), &[ff, hidden]);
        self.add(&format!("{prefix}.down_proj.weight"), &[hidden, ff]);
    }

    fn norms(&mut self, prefix: &str, suffix: &str) {
        let hidden = self.get("hidden_size");
        self.add(&format!("{prefix}.input_layernorm{suffix}.weight"), &[hidden]);
        self.add(&format!("{prefix}.post_attention_layernorm{suffix}.weight"), &[hidden]);
    }

    fn latent_attention(&mut self, prefix: &str) {
        let get = |field| self.get(field);
        let (hidden, heads) = (get("hidden_size"), get("num_attention_heads"));
        let (nope, rope, v) = (get("qk_nope_head_dim"), get("qk_rope_head_dim"), get("v_head_dim"));
        let (q, kv) = (self.or("q_lora_rank", 0), get("kv_lora_rank"));
        if q == 0 {
            self.add(&format!("{prefix}.q_proj.weight"), &[heads * (nope + rope), hidden]);
        } else {
            self.add(&format!("{prefix}.q_a_proj.weight"), &[q, hidden]);
            self.add(&format!("{prefix}.q_a_layernorm.weight"), &[q]);
            self.add(&format!("{prefix}.q_b_proj.weight"), &[heads * (nope + rope), q]);
        }
        self.add(&format!("{prefix}.kv_a_proj_with_mqa.weight"), &[kv + rope, hidden]);
        self.add(&format!("{prefix}.kv_a_layernorm.weight"), &[kv]);
        self.add(&format!("{prefix}.kv_b_proj.weight"), &[heads * (nope + v), kv]);
        self.add(&format!("{prefix}.o_proj.weight"), &[hidden, heads * v]);
    }

    /// A layer of GLM-5 or DeepSeek.
    fn latent(&mut self, prefix: &str, layer: u64) {
        self.norms(prefix, "");
        self.latent_attention(&format!("{prefix}.self_attn"));
        if self.config["model_type"] == "glm_moe_dsa" {
            let (n, dim) = (self.get("index_n_heads"), self.get("index_head_dim"));
            let (q, hidden) = (self.get("q_lora_rank"), self.get("hidden_size"));
            let indexer = format!("{prefix}.self_attn.indexer");
            self.add(&format!("{indexer}.wq_b.weight"), &[n * dim, q]);
            self.add(&format!("{indexer}.wk.weight"), &[dim, hidden]);
            self.add(&format!("{indexer}.k_norm.weight"), &[dim]);
            self.add(&format!("{indexer}.k_norm.bias"), &[dim]);
            self.add(&format!("{indexer}.weights_proj.weight"), &[n, hidden]);
        }
        let has_bias = self.config["model_type"] != "deepseek_v2";
        self.dense_or_experts(prefix, layer, has_bias);
    }

    fn dense_or_experts(&mut self, prefix: &str, layer: u64, has_bias: bool) {
        if layer < self.get("first_k_dense_replace") {
            return self.swiglu(&format!("{prefix}.mlp"), self.get("intermediate_size"));
        }
        let (n, ff) = (self.get("n_routed_experts"), self.get("moe_intermediate_size"));
        self.add(&format!("{prefix}.mlp.gate.weight"), &[n, self.get("hidden_size")]);
        if has_bias {
            self.add(&format!("{prefix}.mlp.gate.e_score_correction_bias"), &[n]);
        }
        for expert in 0..n {
            self.swiglu(&format!("{prefix}.mlp.experts.{expert}"), ff);
        }
        self.swiglu(&format!("{prefix}.mlp.shared_experts"), ff * self.get("n_shared_experts"));
    }

    fn mtp(&mut self, layer: u64) {
        let (prefix, hidden) = (format!("model.layers.{layer}"), self.get("hidden_size"));
        if self.config["model_type"] == "glm4_moe" {
            self.grouped(&prefix, layer);
        } else {
            self.latent(&prefix, layer);
        }
        for norm in ["enorm", "hnorm", "shared_head.norm"] {
            self.add(&format!("{prefix}.{norm}.weight"), &[hidden]);
        }
        self.add(&format!("{prefix}.eh_proj.weight"), &[hidden, 2 * hidden]);
    }

    fn longcat(&mut self, prefix: &str) {
        for block in ["0", "1"] {
            self.norms(prefix, &format!(".{block}"));
            self.latent_attention(&format!("{prefix}.self_attn.{block}"));
            self.swiglu(&format!("{prefix}.mlps.{block}"), self.get("ffn_hidden_size"));
        }
        let n_routed = self.get("n_routed_experts");
        let n = n_routed + self.get("zero_expert_num");
        self.add(&format!("{prefix}.mlp.router.classifier.weight"), &[n, self.get("hidden_size")]);
        self.add(&format!("{prefix}.mlp.router.e_score_correction_bias"), &[n]);
        for expert in 0..n_routed {
            let ff = self.get("expert_ffn_hidden_size");
            self.swiglu(&format!("{prefix}.mlp.experts.{expert}"), ff);
        }
    }

    fn longcat_mtp(&mut self) {
        let (prefix, hidden) = ("model.mtp.layers.0", self.get("hidden_size"));
        self.norms(prefix, "");
        self.latent_attention(&format!("{prefix}.self_attn"));
        self.swiglu(&format!("{prefix}.transformer_layer.mlp"), self.get("ffn_hidden_size"));
        self.add(&format!("{prefix}.enorm.m.weight"), &[hidden]);
        self.add(&format!("{prefix}.hnorm.m.weight"), &[hidden]);
        self.add(&format!("{prefix}.eh_proj.weight"), &[hidden, 2 * hidden]);
        self.add("model.mtp.norm.weight", &[hidden]);
        self.add("model.mtp.embed_tokens.weight", &[self.get("vocab_size"), hidden]);
    }

    /// Attention of OLMoE, Qwen3, GLM-4.5, Mixtral and gpt-oss.
    fn grouped_attention(&mut self, prefix: &str) {
        let (hidden, heads) = (self.get("hidden_size"), self.get("num_attention_heads"));
        let dim = self.or("head_dim", hidden / heads);
        let (q, kv) = (heads * dim, self.or("num_key_value_heads", heads) * dim);
        let kind = self.config["model_type"].as_str().unwrap();
        let has_bias = kind == "gpt_oss" || self.flag("attention_bias");
        for (name, width) in [("q", q), ("k", kv), ("v", kv)] {
            self.add(&format!("{prefix}.{name}_proj.weight"), &[width, hidden]);
            if has_bias {
                self.add(&format!("{prefix}.{name}_proj.bias"), &[width]);
            }
        }
        self.add(&format!("{prefix}.o_proj.weight"), &[hidden, q]);
        if has_bias && kind != "glm4_moe" {
            self.add(&format!("{prefix}.o_proj.bias"), &[hidden]);
        }
        let norms = match kind {
            "olmoe" => Some((q, kv)),
            "qwen3_moe" => Some((dim, dim)),
            "glm4_moe" if self.flag("use_qk_norm") => Some((dim, dim)),
            _ => None,
        };
        if let Some((q, k)) = norms {
            self.add(&format!("{prefix}.q_norm.weight"), &[q]);
            self.add(&format!("{prefix}.k_norm.weight"), &[k]);
        }
        if kind == "gpt_oss" {
            self.add(&format!("{prefix}.sinks"), &[heads]);
        }
    }

    /// A layer of OLMoE, Qwen3, GLM-4.5 or Mixtral.
    fn grouped(&mut self, prefix: &str, layer: u64) {
        self.norms(prefix, "");
        self.grouped_attention(&format!("{prefix}.self_attn"));
        let hidden = self.get("hidden_size");
        match self.config["model_type"].as_str().unwrap() {
            "glm4_moe" => self.dense_or_experts(prefix, layer, true),
            "mixtral" => {
                let (n, ff) = (self.get("num_local_experts"), self.get("intermediate_size"));
                let moe = format!("{prefix}.block_sparse_moe");
                self.add(&format!("{moe}.gate.weight"), &[n, hidden]);
                for expert in 0..n {
                    for (name, shape) in
                        [("w1", [ff, hidden]), ("w2", [hidden, ff]), ("w3", [ff, hidden])]
                    {
                        self.add(&format!("{moe}.experts.{expert}.{name}.weight"), &shape);
                    }
                }
            }
            _ => {
                let n = self.get("num_experts");
                let ff = self.or("moe_intermediate_size", self.get("intermediate_size"));
                self.add(&format!("{prefix}.mlp.gate.weight"), &[n, hidden]);
                for expert in 0..n {
                    self.swiglu(&format!("{prefix}.mlp.experts.{expert}"), ff);
                }
            }
        }
    }

    fn gpt_oss(&mut self, prefix: &str, storage: Storage) {
        self.norms(prefix, "");
        self.grouped_attention(&format!("{prefix}.self_attn"));
        let (hidden, ff) = (self.get("hidden_size"), self.get("intermediate_size"));
        let n = self.get("num_local_experts");
        self.add(&format!("{prefix}.mlp.router.weight"), &[n, hidden]);
        self.add(&format!("{prefix}.mlp.router.bias"), &[n]);
        let experts = format!("{prefix}.mlp.experts");
        for (name, outputs, inputs) in [("gate_up_proj", 2 * ff, hidden), ("down_proj", hidden, ff)]
        {
            if storage == Storage::MxFp4 {
                let runs = inputs.div_ceil(32);
                self.add(&format!("{experts}.{name}_blocks"), &[n, outputs, runs, 16]);
                self.add(&format!("{experts}.{name}_scales"), &[n, outputs, runs]);
            } else {
                self.add(&format!("{experts}.{name}"), &[n, inputs, outputs]);
            }
            self.add(&format!("{experts}.{name}_bias"), &[n, outputs]);
        }
    }
}

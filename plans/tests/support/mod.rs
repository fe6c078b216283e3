//! Small checkpoints written by tests: a config, a list of tensors with bytes of their own, in one
//! shard or several. Owns the writing of safetensors as it should be; tests bend it afterwards.
#![allow(dead_code, reason = "each test uses some of it")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

pub(crate) mod geometry;
pub(crate) mod hollow;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tierkeep_plans::catalogue::{Group, Packed, PackedBits, ScaleType};

/// One tensor of a shard.
#[derive(Clone, Debug)]
pub(crate) struct TestTensor {
    /// Its published name.
    pub(crate) name: String,
    /// Its safetensors type.
    pub(crate) dtype: &'static str,
    /// Its dimensions.
    pub(crate) shape: Vec<u64>,
    /// Its data.
    pub(crate) bytes: Vec<u8>,
}

impl TestTensor {
    /// A tensor whose bytes follow from its name, so that no two are the same.
    pub(crate) fn new(name: &str, dtype: &'static str, shape: &[u64]) -> Self {
        let bits = match dtype {
            "F64" | "I64" | "C64" => 64,
            "F32" | "I32" => 32,
            "BF16" | "F16" => 16,
            "F4" => 4,
            _ => 8,
        };
        let n_bytes = shape.iter().product::<u64>() * bits / 8;
        let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let bytes = (0..n_bytes)
            .map(|_| {
                state =
                    state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                (state >> 56) as u8
            })
            .collect();
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
    }
}

/// How matrices are stored; vectors are always F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// F32.
    F32,
    /// BF16.
    Bf16,
    /// U8 `(rows, row bytes)` with scales `(rows)`, or `(rows, groups)` where rows have several.
    Packed(Packed),
    /// The same with both flat.
    Flat(Packed),
}

impl Form {
    /// 8 bits, one F32 scale a row.
    pub(crate) const INT8: Self = Self::Packed(Packed::plain(PackedBits::Eight));
    /// 4 bits, one F32 scale a row.
    pub(crate) const INT4: Self = Self::Packed(Packed::plain(PackedBits::Four));
    /// The first with flat tensors.
    pub(crate) const FLAT_INT8: Self = Self::Flat(Packed::plain(PackedBits::Eight));
    /// The second with flat tensors.
    pub(crate) const FLAT_INT4: Self = Self::Flat(Packed::plain(PackedBits::Four));
}

/// A checkpoint that is not written yet.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoint {
    /// config.json.
    pub(crate) config: Value,
    /// Every tensor, in file order.
    pub(crate) tensors: Vec<TestTensor>,
}

/// A whole number of a config.
pub(crate) fn uint(config: &Value, field: &str) -> u64 {
    config[field].as_u64().unwrap_or_else(|| panic!("the test's config lacks {field}"))
}

impl Checkpoint {
    /// An olmoe of 2 layers with 6 experts each, 2 active.
    pub(crate) fn olmoe(form: Form) -> Self {
        Self::from_config(
            json!({
                "model_type": "olmoe", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8,
                "num_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 512,
                "eos_token_id": 3,
            }),
            form,
        )
    }

    /// A glm_moe_dsa of 3 layers, the first dense, the last sharing its selection; 6 experts, 2
    /// active; no multi-token-prediction layer.
    pub(crate) fn glm(form: Form) -> Self {
        Self::from_config(
            json!({
                "model_type": "glm_moe_dsa", "vocab_size": 40, "hidden_size": 16,
                "num_hidden_layers": 3, "num_attention_heads": 2, "q_lora_rank": 12,
                "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
                "index_n_heads": 2, "index_head_dim": 8, "index_topk": 5,
                "indexer_types": ["full", "full", "shared"], "first_k_dense_replace": 1,
                "intermediate_size": 24, "moe_intermediate_size": 8, "n_routed_experts": 6,
                "num_experts_per_tok": 2, "n_shared_experts": 1, "max_position_embeddings": 512,
                "eos_token_id": [3, 4],
            }),
            form,
        )
    }

    /// The tensors that a config asks for, in one form.
    pub(crate) fn from_config(config: Value, form: Form) -> Self {
        let mut checkpoint = Self { config, tensors: Vec::new() };
        let config = checkpoint.config.clone();
        let (vocab, hidden) = (uint(&config, "vocab_size"), uint(&config, "hidden_size"));
        checkpoint.matrix("model.embed_tokens.weight", vocab, hidden, form);
        for layer in 0..uint(&config, "num_hidden_layers") {
            checkpoint.layer(layer, form);
        }
        checkpoint.vector("model.norm.weight", hidden);
        if config["tie_word_embeddings"] != json!(true) {
            checkpoint.matrix("lm_head.weight", vocab, hidden, form);
        }
        checkpoint
    }

    /// Adds a multi-token-prediction layer after the last.
    pub(crate) fn add_mtp_layer(&mut self, form: Form) {
        let layer = uint(&self.config, "num_hidden_layers");
        let hidden = uint(&self.config, "hidden_size");
        self.layer(layer, form);
        for norm in ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"] {
            self.vector(&format!("model.layers.{layer}.{norm}"), hidden);
        }
        self.matrix(&format!("model.layers.{layer}.eh_proj.weight"), hidden, 2 * hidden, form);
    }

    /// Adds a vector.
    pub(crate) fn vector(&mut self, name: &str, len: u64) {
        self.tensors.push(TestTensor::new(name, "F32", &[len]));
    }

    /// Adds a matrix, with scales where its form has them.
    pub(crate) fn matrix(&mut self, name: &str, rows: u64, cols: u64, form: Form) {
        let (packed, is_flat) = match form {
            Form::F32 => return self.tensors.push(TestTensor::new(name, "F32", &[rows, cols])),
            Form::Bf16 => return self.tensors.push(TestTensor::new(name, "BF16", &[rows, cols])),
            Form::Packed(packed) => (packed, false),
            Form::Flat(packed) => (packed, true),
        };
        let row_bytes = match packed.bits {
            PackedBits::Eight => cols,
            PackedBits::Four => cols.div_ceil(2),
            PackedBits::Two => cols.div_ceil(4),
        };
        let groups = match packed.group {
            Group::Row => 1,
            Group::Of128 => cols.div_ceil(128),
            Group::Of64 => cols.div_ceil(64),
            Group::Of32 => cols.div_ceil(32),
        };
        let shape = if is_flat { vec![rows * row_bytes] } else { vec![rows, row_bytes] };
        self.tensors.push(TestTensor::new(name, "U8", &shape));
        let dtype = match packed.scale {
            ScaleType::F32 => "F32",
            ScaleType::F16 => "F16",
        };
        let is_one = packed.group == Group::Row;
        let shape = match (is_flat, is_one) {
            (true, _) => vec![rows * groups],
            (false, true) => vec![rows],
            (false, false) => vec![rows, groups],
        };
        self.tensors.push(TestTensor::new(&format!("{name}.qs"), dtype, &shape));
    }

    fn layer(&mut self, layer: u64, form: Form) {
        let config = self.config.clone();
        let get = |field| uint(&config, field);
        let hidden = get("hidden_size");
        let prefix = format!("model.layers.{layer}");
        self.vector(&format!("{prefix}.input_layernorm.weight"), hidden);
        self.vector(&format!("{prefix}.post_attention_layernorm.weight"), hidden);
        let is_glm = config["model_type"] == "glm_moe_dsa";
        let attention = format!("{prefix}.self_attn");
        let mut matrix = |name: &str, rows, cols| {
            self.matrix(&format!("{attention}.{name}.weight"), rows, cols, form);
        };
        let heads = get("num_attention_heads");
        if is_glm {
            let (q, kv, rope) = (get("q_lora_rank"), get("kv_lora_rank"), get("qk_rope_head_dim"));
            let (nope, v) = (get("qk_nope_head_dim"), get("v_head_dim"));
            matrix("q_a_proj", q, hidden);
            matrix("q_b_proj", heads * (nope + rope), q);
            matrix("kv_a_proj_with_mqa", kv + rope, hidden);
            matrix("kv_b_proj", heads * (nope + v), kv);
            matrix("o_proj", hidden, heads * v);
            self.vector(&format!("{attention}.q_a_layernorm.weight"), q);
            self.vector(&format!("{attention}.kv_a_layernorm.weight"), kv);
            if config["indexer_types"][layer as usize] != "shared" {
                let (n, dim) = (get("index_n_heads"), get("index_head_dim"));
                self.matrix(&format!("{attention}.indexer.wq_b.weight"), n * dim, q, form);
                self.matrix(&format!("{attention}.indexer.wk.weight"), dim, hidden, form);
                self.vector(&format!("{attention}.indexer.k_norm.weight"), dim);
                self.vector(&format!("{attention}.indexer.k_norm.bias"), dim);
                self.matrix(&format!("{attention}.indexer.weights_proj.weight"), n, hidden, form);
            }
        } else {
            let dim = hidden / heads;
            let kv = get("num_key_value_heads") * dim;
            matrix("q_proj", hidden, hidden);
            matrix("k_proj", kv, hidden);
            matrix("v_proj", kv, hidden);
            matrix("o_proj", hidden, hidden);
            self.vector(&format!("{attention}.q_norm.weight"), hidden);
            self.vector(&format!("{attention}.k_norm.weight"), kv);
        }
        if is_glm && layer < get("first_k_dense_replace") {
            self.swiglu(&format!("{prefix}.mlp"), get("intermediate_size"), form);
            return;
        }
        let (n_experts, ff_size) = if is_glm {
            (get("n_routed_experts"), get("moe_intermediate_size"))
        } else {
            (get("num_experts"), get("intermediate_size"))
        };
        // Routers are stored as floats also where all else is packed.
        let router = if form == Form::Bf16 { Form::Bf16 } else { Form::F32 };
        self.matrix(&format!("{prefix}.mlp.gate.weight"), n_experts, hidden, router);
        if is_glm {
            self.vector(&format!("{prefix}.mlp.gate.e_score_correction_bias"), n_experts);
            self.swiglu(&format!("{prefix}.mlp.shared_experts"), ff_size, form);
        }
        for expert in 0..n_experts {
            self.swiglu(&format!("{prefix}.mlp.experts.{expert}"), ff_size, form);
        }
    }

    fn swiglu(&mut self, prefix: &str, ff_size: u64, form: Form) {
        let hidden = uint(&self.config, "hidden_size");
        self.matrix(&format!("{prefix}.gate_proj.weight"), ff_size, hidden, form);
        self.matrix(&format!("{prefix}.up_proj.weight"), ff_size, hidden, form);
        self.matrix(&format!("{prefix}.down_proj.weight"), hidden, ff_size, form);
    }

    /// The position of a tensor.
    pub(crate) fn position(&self, name: &str) -> usize {
        let at = self.tensors.iter().position(|t| t.name == name);
        at.unwrap_or_else(|| panic!("the test has no tensor {name}"))
    }

    /// Takes a tensor out.
    pub(crate) fn remove(&mut self, name: &str) -> TestTensor {
        self.tensors.remove(self.position(name))
    }

    /// Replaces a tensor by one of the same name.
    pub(crate) fn replace(&mut self, name: &str, dtype: &'static str, shape: &[u64]) {
        let at = self.position(name);
        self.tensors[at] = TestTensor::new(name, dtype, shape);
    }

    /// Writes everything into one shard, without an index.
    pub(crate) fn write(&self, directory: &Path) {
        self.write_config(directory);
        write_shard(&directory.join("model.safetensors"), &self.tensors);
    }

    /// Writes everything into one shard with these `__metadata__`.
    pub(crate) fn write_with_metadata(&self, directory: &Path, metadata: &[(&str, &str)]) {
        self.write_config(directory);
        let metadata: BTreeMap<&str, &str> = metadata.iter().copied().collect();
        write_shard_with(&directory.join("model.safetensors"), &self.tensors, json!(metadata));
    }

    /// Writes `n` numbered shards of about as many tensors each, and the index. Returns the paths.
    pub(crate) fn write_sharded(&self, directory: &Path, n: usize) -> Vec<PathBuf> {
        self.write_config(directory);
        let mut weight_map = BTreeMap::new();
        let per_shard = self.tensors.len().div_ceil(n);
        let mut paths = Vec::new();
        for (index, tensors) in self.tensors.chunks(per_shard).enumerate() {
            let name = format!("model-{:05}-of-{n:05}.safetensors", index + 1);
            for tensor in tensors {
                weight_map.insert(tensor.name.clone(), name.clone());
            }
            let path = directory.join(&name);
            write_shard(&path, tensors);
            paths.push(path);
        }
        assert_eq!(paths.len(), n, "the test's checkpoint is too small for its shards");
        write_index(directory, &json!({ "metadata": {}, "weight_map": weight_map }));
        paths
    }

    /// Writes config.json alone.
    pub(crate) fn write_config(&self, directory: &Path) {
        fs::write(directory.join("config.json"), self.config.to_string()).unwrap();
    }
}

/// Writes the index.
pub(crate) fn write_index(directory: &Path, index: &Value) {
    fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Reads the index back.
pub(crate) fn read_index(directory: &Path) -> Value {
    let bytes = fs::read(directory.join("model.safetensors.index.json")).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

/// Writes a valid safetensors file.
pub(crate) fn write_shard(path: &Path, tensors: &[TestTensor]) {
    write_shard_with(path, tensors, Value::Null);
}

/// Writes a valid safetensors file with these `__metadata__`, if they are any.
pub(crate) fn write_shard_with(path: &Path, tensors: &[TestTensor], metadata: Value) {
    let mut header = serde_json::Map::new();
    if !metadata.is_null() {
        header.insert("__metadata__".to_owned(), metadata);
    }
    let mut data = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.bytes);
        header.insert(
            tensor.name.clone(),
            json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()] }),
        );
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    fs::write(path, file).unwrap();
}

//! Full-size checkpoints without weights: true headers over files of holes, so that 384 GB take a few
//! megabytes of disk. Owns the geometry of GLM-5.2 in packed integers, as it is published.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use serde_json::json;

const HIDDEN: u64 = 6144;
const VOCAB: u64 = 154_880;
const N_LAYERS: u64 = 78;
const N_DENSE_LAYERS: u64 = 3;
const N_EXPERTS: u64 = 256;
const FF: u64 = 2048;
const HEADS: u64 = 64;

/// One file under way.
#[derive(Default)]
struct HollowShard {
    header: String,
    bytes: u64,
}

impl HollowShard {
    fn tensor(&mut self, name: &str, dtype: &str, len: u64, width: u64) {
        let end = self.bytes + len * width;
        let separator = if self.header.is_empty() { "" } else { "," };
        write!(
            self.header,
            "{separator}\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":[{len}],\"data_offsets\":[{},{end}]}}",
            self.bytes
        )
        .unwrap();
        self.bytes = end;
    }

    fn vector(&mut self, name: &str, len: u64) {
        self.tensor(name, "F32", len, 4);
    }

    /// Rows of whole bytes and a scale for each.
    fn packed(&mut self, name: &str, (rows, cols): (u64, u64), bits: u64) {
        self.tensor(name, "U8", rows * (cols * bits).div_ceil(8), 1);
        self.tensor(&format!("{name}.qs"), "F32", rows, 4);
    }

    /// An f32 matrix.
    fn matrix(&mut self, name: &str, rows: u64, cols: u64) {
        let end = self.bytes + rows * cols * 4;
        let separator = if self.header.is_empty() { "" } else { "," };
        write!(
            self.header,
            "{separator}\"{name}\":{{\"dtype\":\"F32\",\"shape\":[{rows},{cols}],\"data_offsets\":[{},{end}]}}",
            self.bytes
        )
        .unwrap();
        self.bytes = end;
    }

    fn swiglu(&mut self, prefix: &str, ff: u64, bits: u64) {
        self.packed(&format!("{prefix}.gate_proj.weight"), (ff, HIDDEN), bits);
        self.packed(&format!("{prefix}.up_proj.weight"), (ff, HIDDEN), bits);
        self.packed(&format!("{prefix}.down_proj.weight"), (HIDDEN, ff), bits);
    }

    fn layer(&mut self, layer: u64) {
        // The multi-token-prediction layer is kept at 8 bits.
        let bits = if layer == N_LAYERS { 8 } else { 4 };
        let prefix = format!("model.layers.{layer}");
        self.vector(&format!("{prefix}.input_layernorm.weight"), HIDDEN);
        self.vector(&format!("{prefix}.post_attention_layernorm.weight"), HIDDEN);
        let attention = format!("{prefix}.self_attn");
        let matrices = [
            ("q_a_proj", 2048, HIDDEN),
            ("q_b_proj", HEADS * 256, 2048),
            ("kv_a_proj_with_mqa", 576, HIDDEN),
            ("kv_b_proj", HEADS * 448, 512),
            ("o_proj", HIDDEN, HEADS * 256),
            ("indexer.wq_b", 32 * 128, 2048),
            ("indexer.wk", 128, HIDDEN),
            ("indexer.weights_proj", 32, HIDDEN),
        ];
        for (name, rows, cols) in matrices {
            self.packed(&format!("{attention}.{name}.weight"), (rows, cols), bits);
        }
        self.vector(&format!("{attention}.q_a_layernorm.weight"), 2048);
        self.vector(&format!("{attention}.kv_a_layernorm.weight"), 512);
        self.vector(&format!("{attention}.indexer.k_norm.weight"), 128);
        self.vector(&format!("{attention}.indexer.k_norm.bias"), 128);
        if layer < N_DENSE_LAYERS {
            return self.swiglu(&format!("{prefix}.mlp"), 12288, bits);
        }
        self.matrix(&format!("{prefix}.mlp.gate.weight"), N_EXPERTS, HIDDEN);
        self.vector(&format!("{prefix}.mlp.gate.e_score_correction_bias"), N_EXPERTS);
        for expert in 0..N_EXPERTS {
            self.swiglu(&format!("{prefix}.mlp.experts.{expert}"), FF, bits);
        }
        self.swiglu(&format!("{prefix}.mlp.shared_experts"), FF, bits);
        if layer == N_LAYERS {
            for norm in ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"] {
                self.vector(&format!("{prefix}.{norm}"), HIDDEN);
            }
            self.packed(&format!("{prefix}.eh_proj.weight"), (HIDDEN, 2 * HIDDEN), bits);
        }
    }

    fn write(self, path: &Path) {
        let header = format!("{{{}}}", self.header);
        let mut file = File::create(path).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(8 + header.len() as u64 + self.bytes).unwrap();
    }
}

/// Writes GLM-5.2 with experts at 4 bits, its multi-token-prediction layer, embedding and head at 8.
pub(crate) fn glm_5_2_int4(directory: &Path) {
    let config = json!({
        "model_type": "glm_moe_dsa", "hidden_size": HIDDEN, "num_hidden_layers": N_LAYERS,
        "first_k_dense_replace": N_DENSE_LAYERS, "num_attention_heads": HEADS,
        "n_routed_experts": N_EXPERTS, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": FF, "intermediate_size": 12288, "q_lora_rank": 2048,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
        "num_nextn_predict_layers": 1, "vocab_size": VOCAB, "scoring_func": "sigmoid",
        "norm_topk_prob": true, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752, "tie_word_embeddings": false,
        "rope_parameters": { "rope_type": "default", "rope_theta": 8_000_000.0 },
    });
    fs::write(directory.join("config.json"), config.to_string()).unwrap();
    let n_shards = N_LAYERS + 2;
    let path = |n: u64| directory.join(format!("model-{n:05}-of-{n_shards:05}.safetensors"));
    for layer in 0..=N_LAYERS {
        let mut shard = HollowShard::default();
        shard.layer(layer);
        shard.write(&path(layer + 1));
    }
    let mut last = HollowShard::default();
    last.packed("model.embed_tokens.weight", (VOCAB, HIDDEN), 8);
    last.vector("model.norm.weight", HIDDEN);
    last.packed("lm_head.weight", (VOCAB, HIDDEN), 8);
    last.write(&path(n_shards));
}

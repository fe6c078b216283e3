//! Small checkpoints for conversions, and their shards read back.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]
#![allow(dead_code, unreachable_pub, reason = "each test uses some of it")]

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use half::{bf16, f16};
use tempfile::TempDir;
use tierkeep_engine::convert::{
    Bits, ConvertError, ConvertOptions, ConvertReport, Execution, Packing, convert,
};
use tierkeep_plans::catalogue::header::{DType, read_header};
use tierkeep_plans::catalogue::{Catalogue, PackedBits};

pub const CONFIG: &str = r#"{"model_type":"glm_moe_dsa","vocab_size":13,"hidden_size":9,
    "num_hidden_layers":2,"first_k_dense_replace":1,"qk_nope_head_dim":4,"qk_rope_head_dim":4,
    "index_n_heads":2,"index_head_dim":4,"index_topk":2,"moe_intermediate_size":5,
    "num_attention_heads":1,"q_lora_rank":5,"kv_lora_rank":7,"v_head_dim":3,
    "intermediate_size":6,"n_routed_experts":3,"n_shared_experts":1,"num_experts_per_tok":2,
    "num_nextn_predict_layers":1,"rope_parameters":{"rope_theta":10000.0,"rope_type":"default"}}"#;
pub const HIDDEN: usize = 9;
pub const EIGHT: Bits = Bits::Packed(PackedBits::Eight);
pub const FOUR: Bits = Bits::Packed(PackedBits::Four);
pub const TWO: Bits = Bits::Packed(PackedBits::Two);
pub const N_EXPERTS: usize = 3;

/// A tensor of a source checkpoint, as the values that its stored bytes stand for.
#[derive(Clone)]
pub struct SourceTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: &'static str,
    pub values: Vec<f32>,
    pub bytes: Vec<u8>,
}

impl SourceTensor {
    pub fn new(name: &str, shape: &[usize], dtype: &'static str, seed: &mut u64) -> Self {
        let cols = shape[shape.len() - 1];
        let n: usize = shape.iter().product();
        let values = (0..n)
            .map(|i| {
                // Rows differ in size by powers of ten; the second row of every matrix is zero.
                let row = i / cols;
                if shape.len() == 2 && row == 1 {
                    return 0.0;
                }
                *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let unit = (*seed >> 40) as f32 / (1 << 24) as f32 - 0.5;
                unit * 10.0_f32.powi(row as i32 % 5 - 2)
            })
            .collect();
        Self::from_values(name, shape, dtype, values)
    }

    pub fn from_values(name: &str, shape: &[usize], dtype: &'static str, values: Vec<f32>) -> Self {
        let (mut stored, mut bytes) = (Vec::new(), Vec::new());
        for x in values {
            match dtype {
                "BF16" => {
                    let x = bf16::from_f32(x);
                    bytes.extend(x.to_le_bytes());
                    stored.push(x.to_f32());
                }
                "F16" => {
                    let x = f16::from_f32(x);
                    bytes.extend(x.to_le_bytes());
                    stored.push(x.to_f32());
                }
                _ => {
                    bytes.extend(x.to_le_bytes());
                    stored.push(x);
                }
            }
        }
        Self { name: name.to_owned(), shape: shape.to_vec(), dtype, values: stored, bytes }
    }
}

pub fn glm_tensors(matrix_type: &'static str) -> Vec<SourceTensor> {
    glm_tensors_of(matrix_type, HIDDEN)
}

pub fn glm_tensors_of(matrix_type: &'static str, hidden: usize) -> Vec<SourceTensor> {
    let mut tensors = Vec::new();
    let mut seed = 7;
    let mut add = |name: String, shape: &[usize], dtype: &'static str| {
        tensors.push(SourceTensor::new(&name, shape, dtype, &mut seed));
    };
    add("lm_head.weight".into(), &[13, hidden], matrix_type);
    add("model.embed_tokens.weight".into(), &[13, hidden], matrix_type);
    add("model.norm.weight".into(), &[hidden], "BF16");
    for layer in 0..3 {
        let name = |suffix: &str| format!("model.layers.{layer}.{suffix}");
        for (suffix, width) in [
            ("input_layernorm.weight", hidden),
            ("post_attention_layernorm.weight", hidden),
            ("self_attn.q_a_layernorm.weight", 5),
            ("self_attn.kv_a_layernorm.weight", 7),
            ("self_attn.indexer.k_norm.weight", 4),
            ("self_attn.indexer.k_norm.bias", 4),
        ] {
            add(name(suffix), &[width], "BF16");
        }
        for (suffix, shape) in [
            ("self_attn.q_a_proj.weight", [5, hidden]),
            ("self_attn.q_b_proj.weight", [8, 5]),
            ("self_attn.kv_a_proj_with_mqa.weight", [11, hidden]),
            ("self_attn.kv_b_proj.weight", [7, 7]),
            ("self_attn.o_proj.weight", [hidden, 3]),
            ("self_attn.indexer.wq_b.weight", [8, 5]),
            ("self_attn.indexer.wk.weight", [4, hidden]),
            ("self_attn.indexer.weights_proj.weight", [2, hidden]),
        ] {
            add(name(suffix), &shape, matrix_type);
        }
        let mut feed_forward = |prefix: &str, width: usize| {
            // Published shards often hold down first.
            add(name(&format!("{prefix}down_proj.weight")), &[hidden, width], matrix_type);
            add(name(&format!("{prefix}gate_proj.weight")), &[width, hidden], matrix_type);
            add(name(&format!("{prefix}up_proj.weight")), &[width, hidden], matrix_type);
        };
        if layer == 0 {
            feed_forward("mlp.", 6);
            continue;
        }
        for expert in 0..N_EXPERTS {
            feed_forward(&format!("mlp.experts.{expert}."), 5);
        }
        feed_forward("mlp.shared_experts.", 5);
        add(name("mlp.gate.weight"), &[N_EXPERTS, hidden], "F32");
        add(name("mlp.gate.e_score_correction_bias"), &[N_EXPERTS], "F32");
        if layer == 2 {
            for suffix in ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"] {
                add(name(suffix), &[hidden], "BF16");
            }
            add(name("eh_proj.weight"), &[hidden, 2 * hidden], matrix_type);
        }
    }
    tensors
}

pub fn write_model(directory: &Path, tensors: &[SourceTensor]) {
    let hidden = tensors.iter().find(|t| t.name == "model.norm.weight").unwrap().shape[0];
    let config = CONFIG.replace("\"hidden_size\":9", &format!("\"hidden_size\":{hidden}"));
    fs::write(directory.join("config.json"), config).unwrap();
    fs::write(directory.join("tokenizer.json"), "{}").unwrap();
    fs::write(directory.join("notes.txt"), "not copied").unwrap();
    // The cut lies within an expert.
    let cut = tensors.iter().position(|t| t.name.contains("layers.1.mlp.experts.1.gate")).unwrap();
    let (first, second) = tensors.split_at(cut);
    for (index, part) in [first, second].into_iter().enumerate() {
        let mut entries = Vec::new();
        let mut data: Vec<u8> = Vec::new();
        for tensor in part {
            let start = data.len();
            data.extend(&tensor.bytes);
            entries.push(format!(
                "{:?}:{{\"dtype\":{:?},\"shape\":{:?},\"data_offsets\":[{start},{}]}}",
                tensor.name,
                tensor.dtype,
                tensor.shape,
                data.len()
            ));
        }
        let json = format!("{{{}}}", entries.join(","));
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend(json.as_bytes());
        file.extend(data);
        fs::write(directory.join(format!("model-0000{}-of-00002.safetensors", index + 1)), file)
            .unwrap();
    }
}

pub fn model(tensors: &[SourceTensor]) -> TempDir {
    let directory = TempDir::new().unwrap();
    write_model(directory.path(), tensors);
    directory
}

pub fn run(
    source: &Path,
    out: &Path,
    options: &ConvertOptions,
) -> Result<ConvertReport, ConvertError> {
    let model = Catalogue::open(source).unwrap();
    convert(&model, out, options, &Execution::default(), &mut |_| ControlFlow::Continue(()))
}

pub fn options(expert_bits: Bits, other_bits: Bits) -> ConvertOptions {
    ConvertOptions {
        experts: expert_bits.into(),
        dense: other_bits.into(),
        embedding: other_bits.into(),
        mtp: other_bits.into(),
        packing: Packing::PLAIN,
        ..ConvertOptions::default()
    }
}

/// Name to (type, shape, bytes) of every tensor of a folder's shards, padding included.
pub fn read_tensors(directory: &Path) -> BTreeMap<String, (DType, Vec<u64>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for path in shards(directory) {
        let header = read_header(&path).unwrap();
        let file = fs::read(&path).unwrap();
        assert_eq!(header.metadata["tierkeep.format"], "1");
        for tensor in header.tensors() {
            let at = (header.data_start + tensor.start) as usize;
            let bytes = file[at..at + (tensor.end - tensor.start) as usize].to_vec();
            assert!(
                all.insert(tensor.name.to_owned(), (tensor.dtype, tensor.shape.to_vec(), bytes))
                    .is_none()
            );
        }
    }
    all
}

pub fn shards(directory: &Path) -> Vec<std::path::PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    paths.sort();
    paths
}

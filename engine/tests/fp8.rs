//! FP8 as published, whole models at a time: the oracle's values are stored anew in e4m3 with scales of
//! blocks, all or tensor by tensor in another type, and must give, bit for bit, what an f32 model of
//! the same values gives.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::fs;
use std::path::Path;

use half::{bf16, f16};
use serde_json::{Value, json};
use tempfile::TempDir;
use tierkeep_engine::verify::read_oracle;
use tierkeep_kernels::Isa;
use tierkeep_plans::budget::{DenseResidency, EmbeddingResidency, Streamed};
use tierkeep_plans::catalogue::{BlockScale, Catalogue, Projection, Role, StoredType};
use tierkeep_plans::plan::Plan;

#[path = "support/faults.rs"]
mod faults;
#[path = "support/models.rs"]
mod models;
use models::{Values, Written, e4m3, embedding, floats, logits, oracle, read, write};

const ORACLE: &str = "glm_moe_dsa-fp8";
/// So many tokens that the head passes through the stream in several pieces, the last not whole.
const VOCABULARY: usize = 2000;

/// The oracle's values, with rows of embedding and head repeated, each time a little smaller.
fn values() -> Vec<Values> {
    let mut all = read(&oracle(ORACLE));
    for tensor in &mut all {
        if !["lm_head.weight", "model.embed_tokens.weight"].contains(&tensor.name.as_str()) {
            continue;
        }
        let (rows, cols) = (tensor.shape[0] as usize, tensor.shape[1] as usize);
        let value = |at: usize| {
            let (row, col) = (at / cols, at % cols);
            tensor.values[row % rows * cols + col] * 0.9_f32.powi((row / rows) as i32)
        };
        tensor.values = (0..VOCABULARY * cols).map(value).collect();
        tensor.shape[0] = VOCABULARY as u64;
    }
    all
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    F32,
    F16,
    Bf16,
    Int8G64,
    Fp8(BlockScale),
}

/// The nearest e4m3: magnitudes ascend with their codes.
fn nearest(x: f32) -> u8 {
    let (mut below, mut above) = (0, 0x7e);
    while above - below > 1 {
        let middle = (below + above) / 2;
        *(if e4m3(middle) <= x.abs() { &mut below } else { &mut above }) = middle;
    }
    let magnitude = if x.abs() - e4m3(below) <= e4m3(above) - x.abs() { below } else { above };
    if x < 0.0 { magnitude | 0x80 } else { magnitude }
}

/// Stores a matrix in blocks, with what its bytes stand for.
fn fp8(tensor: &Values, scale: BlockScale) -> (Vec<Written>, Vec<f32>) {
    let (rows, cols) = (tensor.shape[0] as usize, tensor.shape[1] as usize);
    let (mut bytes, mut values) = (vec![0; rows * cols], vec![0.0; rows * cols]);
    let mut scales = Vec::new();
    for top in (0..rows).step_by(128) {
        for left in (0..cols).step_by(128) {
            let cells = || {
                let columns = left..cols.min(left + 128);
                (top..rows.min(top + 128))
                    .flat_map(move |row| columns.clone().map(move |col| row * cols + col))
            };
            let absmax = cells().fold(1e-9_f32, |max, at| max.max(tensor.values[at].abs()));
            let exact = absmax / 448.0;
            let scale = match scale {
                BlockScale::F32 => {
                    scales.extend(exact.to_le_bytes());
                    exact
                }
                BlockScale::F16 => {
                    scales.extend(f16::from_f32(exact).to_le_bytes());
                    f16::from_f32(exact).to_f32()
                }
                BlockScale::Bf16 => {
                    scales.extend(bf16::from_f32(exact).to_le_bytes());
                    bf16::from_f32(exact).to_f32()
                }
            };
            for at in cells() {
                bytes[at] = nearest(tensor.values[at] / scale);
                values[at] = e4m3(bytes[at]) * scale;
            }
        }
    }
    let dtype = match scale {
        BlockScale::F32 => "F32",
        BlockScale::F16 => "F16",
        BlockScale::Bf16 => "BF16",
    };
    let name = tensor.name.clone();
    let shape = vec![rows.div_ceil(128), cols.div_ceil(128)];
    let scales = Written { name: format!("{name}_scale_inv"), dtype, shape, bytes: scales };
    let weights = Written { name, dtype: "F8_E4M3", shape: vec![rows, cols], bytes };
    (vec![weights, scales], values)
}

/// Stores a matrix as bytes with f32 scales for groups of 64, which are `f32` to its twin.
fn int8(tensor: &Values) -> (Vec<Written>, Vec<f32>) {
    let (rows, cols) = (tensor.shape[0] as usize, tensor.shape[1] as usize);
    let (mut bytes, mut scales, mut values) = (Vec::new(), Vec::new(), Vec::new());
    for row in tensor.values.chunks(cols) {
        for group in row.chunks(64) {
            let scale = group.iter().fold(1e-9_f32, |max, x| max.max(x.abs())) / 127.0;
            scales.extend(scale.to_le_bytes());
            for x in group {
                let q = (x / scale).round() as i8;
                bytes.push(q as u8);
                values.push(f32::from(q) * scale);
            }
        }
    }
    let name = tensor.name.clone();
    let shape = vec![rows, cols.div_ceil(64)];
    let scales = Written { name: format!("{name}.qs"), dtype: "F32", shape, bytes: scales };
    (vec![Written { name, dtype: "U8", shape: vec![rows, cols], bytes }, scales], values)
}

fn store(tensor: &Values, form: Form) -> (Vec<Written>, Vec<f32>) {
    let halves = |dtype, halves: Vec<(u16, f32)>| {
        let written = Written {
            name: tensor.name.clone(),
            dtype,
            shape: tensor.shape.iter().map(|d| *d as usize).collect(),
            bytes: halves.iter().flat_map(|(bits, _)| bits.to_le_bytes()).collect(),
        };
        (vec![written], halves.into_iter().map(|(_, value)| value).collect())
    };
    match form {
        Form::F32 => (vec![floats(tensor, &tensor.values)], tensor.values.clone()),
        Form::F16 => {
            let of = |x: &f32| (f16::from_f32(*x).to_bits(), f16::from_f32(*x).to_f32());
            halves("F16", tensor.values.iter().map(of).collect())
        }
        Form::Bf16 => {
            let of = |x: &f32| (bf16::from_f32(*x).to_bits(), bf16::from_f32(*x).to_f32());
            halves("BF16", tensor.values.iter().map(of).collect())
        }
        Form::Int8G64 => int8(tensor),
        Form::Fp8(scale) => fp8(tensor, scale),
    }
}

/// A model whose matrices are stored as `form` says, and one of the same values in f32.
fn model_and_twin(form: impl Fn(&Values) -> Form) -> [(TempDir, Catalogue); 2] {
    let mut out = [Vec::new(), Vec::new()];
    for tensor in values() {
        let form = if tensor.shape.len() == 2 { form(&tensor) } else { Form::F32 };
        let (written, values) = store(&tensor, form);
        out[0].extend(written);
        out[1].push(floats(&tensor, &values));
    }
    out.map(|tensors| {
        let directory = write(&oracle(ORACLE), &tensors);
        change_config(directory.path(), "vocab_size", &json!(VOCABULARY));
        let model = Catalogue::open(directory.path()).unwrap();
        (directory, model)
    })
}

fn change_config(directory: &Path, field: &str, value: &Value) {
    let path = directory.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config[field] = value.clone();
    fs::write(path, config.to_string()).unwrap();
}

/// Tokens of every block of rows of the embedding, its edges first.
fn tokens() -> Vec<u32> {
    let mut tokens = vec![0, 127, 128, 255, 256, VOCABULARY as u32 - 1];
    tokens.extend((0..10).map(|i| (i * 211 + 3) % VOCABULARY as u32));
    tokens
}

/// Streams every layer and the head.
fn streamed(plan: &mut Plan) {
    let layers = (0..plan.placement.slots.caps.len() as u32).collect();
    plan.placement.streamed = Streamed { layers, head: true };
}

fn assert_equal(form: impl Fn(&Values) -> Form, what: &str) -> Catalogue {
    use EmbeddingResidency::{Resident, RowRead};
    let [(_model_files, model), (_twin_files, twin)] = model_and_twin(form);
    let expected = logits(&twin, &tokens(), Isa::Scalar, embedding(Resident));
    assert_eq!(expected.len(), tokens().len() * VOCABULARY);
    for isa in Isa::supported() {
        let found = logits(&model, &tokens(), isa, embedding(Resident));
        assert!(found == expected, "{what} {isa}");
    }
    let best = Isa::best();
    assert!(logits(&model, &tokens(), best, embedding(RowRead)) == expected, "{what} by rows");
    assert!(logits(&model, &tokens(), best, streamed) == expected, "{what} streamed");
    if faults::maps_files() {
        let mapped = |plan: &mut Plan| plan.placement.dense = DenseResidency::Mapped;
        assert!(logits(&model, &tokens(), best, mapped) == expected, "{what} mapped");
    }
    model
}

#[test]
fn an_fp8_model_and_the_same_values_in_f32_give_the_same_bits() {
    for scale in BlockScale::ALL {
        let model = assert_equal(|_| Form::Fp8(scale), &format!("{scale:?}"));
        let stored = StoredType::Fp8(scale);
        assert_eq!(model.by_role()[&Role::Head].stored, stored);
        assert!(model.experts.iter().all(|e| e.gate.stored == stored && e.down.stored == stored));
    }
}

/// Any type beside any other: in a layer, and in an expert.
#[test]
fn types_can_be_mixed_by_tensor() {
    const FORMS: [Form; 7] = [
        Form::Fp8(BlockScale::F32),
        Form::Bf16,
        Form::Fp8(BlockScale::Bf16),
        Form::F16,
        Form::Int8G64,
        Form::F32,
        Form::Fp8(BlockScale::F16),
    ];
    let by_name = |tensor: &Values| {
        let sum: usize = tensor.name.bytes().map(usize::from).sum();
        let form = FORMS[sum % FORMS.len()];
        // Groups of 64 that hold a whole row are rows, whose order of sums is another.
        if form == Form::Int8G64 && tensor.shape[1] <= 64 { Form::Bf16 } else { form }
    };
    let model = assert_equal(by_name, "mixed");
    let types = |projection| {
        let mut types: Vec<StoredType> =
            model.experts.iter().map(|e| e.matrix(projection).stored).collect();
        types.sort_unstable();
        types.dedup();
        types
    };
    assert!(types(Projection::Gate).len() >= 5 && types(Projection::Down).len() >= 5);
    let mixed = model.experts.iter().filter(|e| e.gate.stored != e.down.stored).count();
    assert!(mixed > model.experts.len() / 2);
}

/// LongCat's index names no scales: they are where the headers say.
#[test]
fn scales_that_the_index_lacks_are_found_in_the_shards() {
    let original = Catalogue::open(&oracle(ORACLE)).unwrap();
    let directory = TempDir::new().unwrap();
    for entry in fs::read_dir(oracle(ORACLE)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = directory.path().join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let names = index["weight_map"].as_object_mut().unwrap();
    let before = names.len();
    names.retain(|name, _| !name.ends_with("_scale_inv"));
    assert!(names.len() < before);
    fs::write(&path, index.to_string()).unwrap();
    let model = Catalogue::open(directory.path()).unwrap();
    assert_eq!((&model.tensors, &model.experts), (&original.tensors, &original.experts));
    assert!(
        model.warnings.iter().any(|w| w.finding.contains("lacks 180 tensors")),
        "{:?}",
        model.warnings
    );
    let tokens = read_oracle(&oracle(ORACLE)).unwrap().remove(0).prompt;
    let resident = || embedding(EmbeddingResidency::Resident);
    let found = logits(&model, &tokens, Isa::best(), resident());
    assert!(found == logits(&original, &tokens, Isa::best(), resident()));
}

//! Models that tests make of an oracle's values, and what an engine computes on them.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test uses its part, and stops where something is wrong"
)]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use tempfile::TempDir;
use tierkeep_doctor::Facts;
use tierkeep_engine::{Engine, Observer, Phase};
use tierkeep_kernels::Isa;
use tierkeep_plans::budget::EmbeddingResidency;
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::catalogue::header::{DType, read_header};
use tierkeep_plans::plan::Plan;
use tierkeep_plans::planner::{self, Options};
use tierkeep_plans::units::{Bytes, SizeRequest};

/// A tensor as values.
pub struct Values {
    pub name: String,
    pub shape: Vec<u64>,
    pub values: Vec<f32>,
}

/// A tensor as it is written.
pub struct Written {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// The folder of an oracle.
pub fn oracle(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles").join(family)
}

/// Every tensor of a model as values; e4m3 with its scales.
pub fn read(directory: &Path) -> Vec<Values> {
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if !name.starts_with("model-") {
            continue;
        }
        let header = read_header(&path).unwrap();
        let file = fs::read(&path).unwrap();
        for tensor in header.tensors() {
            let at = header.data_start as usize;
            let bytes = &file[at + tensor.start as usize..at + tensor.end as usize];
            let values = match tensor.dtype {
                DType::Bf16 => {
                    bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
                }
                DType::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
                DType::F8E4M3 => bytes.iter().map(|b| e4m3(*b)).collect(),
                other => panic!("{}: {other}", tensor.name),
            };
            all.push(Values { name: tensor.name.to_owned(), shape: tensor.shape.to_vec(), values });
        }
    }
    scaled(all)
}

/// Multiplies each tensor by the scales of its blocks, where it has any, and leaves those out.
fn scaled(all: Vec<Values>) -> Vec<Values> {
    let (scales, mut weights): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|tensor| tensor.name.ends_with("_scale_inv"));
    let scales: HashMap<_, _> = scales.into_iter().map(|s| (s.name.clone(), s)).collect();
    for weight in &mut weights {
        let Some(scales) = scales.get(&format!("{}_scale_inv", weight.name)) else { continue };
        let (cols, scale_cols) = (weight.shape[1] as usize, scales.shape[1] as usize);
        for (at, value) in weight.values.iter_mut().enumerate() {
            let (row, col) = (at / cols, at % cols);
            *value *= scales.values[row / 128 * scale_cols + col / 128];
        }
    }
    weights
}

/// An e4m3 byte by its definition.
pub fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2_f32.powi(-6),
        _ => (1.0 + mantissa) * 2_f32.powi(exponent - 7),
    };
    if byte < 0x80 { magnitude } else { -magnitude }
}

/// A model of one shard with the config of another.
pub fn write(like: &Path, tensors: &[Written]) -> TempDir {
    let directory = TempDir::new().unwrap();
    fs::copy(like.join("config.json"), directory.path().join("config.json")).unwrap();
    let (mut entries, mut data) = (Vec::new(), Vec::<u8>::new());
    for Written { name, dtype, shape, bytes } in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        entries.push(format!(
            "{name:?}:{{\"dtype\":{dtype:?},\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}"
        ));
        data.extend(bytes);
    }
    let json = format!("{{{}}}", entries.join(","));
    let file = [&(json.len() as u64).to_le_bytes(), json.as_bytes(), &data].concat();
    fs::write(directory.path().join("model.safetensors"), file).unwrap();
    directory
}

/// As f32.
pub fn floats(tensor: &Values, values: &[f32]) -> Written {
    Written {
        name: tensor.name.clone(),
        dtype: "F32",
        shape: tensor.shape.iter().map(|d| *d as usize).collect(),
        bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// Bits of the logits after each token of a prompt and of a few more, under a plan that `adjust` may change.
pub fn logits(
    model: &Catalogue,
    tokens: &[u32],
    isa: Isa,
    adjust: impl FnOnce(&mut Plan),
) -> Vec<u32> {
    struct Keep(Vec<u32>);
    impl Observer for Keep {
        fn wants_all_logits(&self) -> bool {
            true
        }
        fn logits(&mut self, _: usize, logits: &[f32]) {
            assert!(logits.iter().all(|l| l.is_finite()));
            self.0.extend(logits.iter().map(|l| l.to_bits()));
        }
    }
    let options = Options {
        ram: Some(SizeRequest::Absolute(Bytes(1 << 30))),
        context: Some(64),
        threads: Some(2),
        prefill_batch: Some(7),
        isa: Some(isa.to_string()),
        ..Options::default()
    };
    let mut plan = planner::plan(model, &Facts::default(), &options, None).unwrap();
    plan.placement.slots.caps.iter_mut().for_each(|cap| *cap = (*cap).min(3));
    adjust(&mut plan);
    plan.settle(model);
    let mut engine = Engine::open(&plan, model, &mut |_, _, _| {}).unwrap();
    let mut keep = Keep(Vec::new());
    let (prompt, rest) = tokens.split_at(tokens.len() - 2);
    engine.run(prompt, Phase::Prefill, &mut keep).unwrap();
    for token in rest {
        engine.run(&[*token], Phase::Decode, &mut keep).unwrap();
    }
    keep.0
}

/// Has the embedding held in a way.
pub fn embedding(held: EmbeddingResidency) -> impl FnOnce(&mut Plan) {
    move |plan| plan.engine.embedding = held
}

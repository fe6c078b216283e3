//! Every family that the catalogue knows: small checkpoints of each, tensor by tensor, and published
//! ones at their true sizes, from headers in memory. Cases by their names in the list of the field's.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use std::path::PathBuf;

use serde_json::{Value, json};
use support::geometry::{Entry, Geometry, Storage};
use support::uint;
use tierkeep_plans::budget::{self, IoMode, KvElement, ModelBytes};
use tierkeep_plans::catalogue::{
    BlockScale, Catalogue, CatalogueError, ClassBytes, ExpertForm, LayerTensor, Outline, Role,
    RoleClass, Span, StoredType, config,
};
use tierkeep_plans::spec::{ArchSpec, Family};
use tierkeep_plans::units::Bytes;

/// A config with some fields replaced.
#[expect(clippy::needless_pass_by_value, reason = "it is written in place")]
fn with(config: &Value, fields: Value) -> Value {
    let mut both = config.as_object().unwrap().clone();
    both.extend(fields.as_object().unwrap().clone());
    both.into()
}

fn latent(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 40, "hidden_size": 192, "num_attention_heads": 2,
        "q_lora_rank": 144, "kv_lora_rank": 24, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "intermediate_size": 320, "moe_intermediate_size": 160, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1,
    })
}

fn grouped(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 40, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "num_hidden_layers": 2, "intermediate_size": 96,
        "num_experts_per_tok": 2,
    })
}

/// A small config of each family.
fn small(family: Family) -> Value {
    let glm4 = json!({
        "head_dim": 16, "attention_bias": true, "use_qk_norm": true, "first_k_dense_replace": 1,
        "n_routed_experts": 4, "moe_intermediate_size": 48, "n_shared_experts": 1,
    });
    match family {
        Family::GlmMoeDsa => with(
            &latent("glm_moe_dsa"),
            json!({ "index_n_heads": 4, "index_head_dim": 32, "index_topk": 12 }),
        ),
        Family::DeepseekV2 => {
            with(&latent("deepseek_v2"), json!({ "q_lora_rank": null, "n_shared_experts": 2 }))
        }
        Family::DeepseekV3 => latent("deepseek_v3"),
        Family::KimiK2 => latent("kimi_k2"),
        Family::LongcatFlash => json!({
            "model_type": "longcat_flash", "vocab_size": 40, "hidden_size": 192, "num_layers": 2,
            "num_attention_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16, "v_head_dim": 24, "ffn_hidden_size": 320, "moe_topk": 3,
            "expert_ffn_hidden_size": 160, "n_routed_experts": 4, "zero_expert_num": 2,
        }),
        Family::Olmoe => with(&grouped("olmoe"), json!({ "num_experts": 4, "head_dim": 16 })),
        Family::Qwen3Moe => with(
            &grouped("qwen3_moe"),
            json!({ "num_experts": 4, "moe_intermediate_size": 48, "attention_bias": true }),
        ),
        Family::Glm4Moe => with(&grouped("glm4_moe"), glm4),
        Family::Mixtral => with(&grouped("mixtral"), json!({ "num_local_experts": 4 })),
        Family::GptOss => with(
            &grouped("gpt_oss"),
            json!({ "num_local_experts": 4, "sliding_window": 8, "attention_bias": true }),
        ),
    }
}

/// How a family's checkpoints are stored.
fn storages(family: Family) -> &'static [Storage] {
    match family {
        Family::GptOss => &[Storage::Bf16, Storage::MxFp4],
        Family::GlmMoeDsa
        | Family::Olmoe
        | Family::DeepseekV2
        | Family::DeepseekV3
        | Family::KimiK2
        | Family::LongcatFlash
        | Family::Qwen3Moe
        | Family::Glm4Moe
        | Family::Mixtral => &[Storage::Bf16, Storage::Fp8, Storage::Int4],
    }
}

/// Every family in every form, without multi-token prediction.
fn all() -> impl Iterator<Item = (Family, Storage, Geometry)> {
    Family::ALL.into_iter().flat_map(|family| {
        storages(family)
            .iter()
            .map(move |&storage| (family, storage, Geometry::new(small(family), storage, 0)))
    })
}

fn warnings(model: &Catalogue) -> String {
    let all: Vec<_> = model.warnings.iter().map(|w| w.finding.as_str()).collect();
    all.join("\n")
}

fn sum(classes: &[ClassBytes]) -> u64 {
    classes.iter().map(|c| c.bytes.0).sum()
}

#[test]
fn every_family_opens_with_every_byte_accounted_for() {
    for (family, storage, geometry) in all() {
        let model = geometry.open().unwrap_or_else(|e| panic!("{family:?} {storage:?}: {e}"));
        assert_eq!(warnings(&model), "", "{family:?} {storage:?}");
        assert_eq!(model.spec.family, family);
        assert_eq!((model.unrecognised_bytes, model.ignored_bytes), (Bytes(0), Bytes(0)));
        assert_eq!(sum(&model.bytes_by_class()), geometry.data_bytes(), "{family:?} {storage:?}");
        let experts: u64 = model.experts.iter().map(|e| e.read_bytes()).sum();
        let dense: u64 = model.tensors.iter().map(|t| t.bytes().0).sum();
        assert_eq!(dense + experts, geometry.data_bytes(), "{family:?} {storage:?}");
        assert_eq!(model.n_tensors, geometry.entries.len());
    }
}

/// A tensor of any kind that is absent is noticed: no weight, scale or bias is optional.
#[test]
fn a_tensor_dropped_from_any_family_is_noticed() {
    for (family, storage, geometry) in all() {
        for (index, dropped) in geometry.entries.iter().enumerate() {
            let error = geometry.without(index).open();
            let error = error.expect_err(&format!("{family:?} {storage:?} {}", dropped.name));
            let base = dropped.name.trim_end_matches(".qs").trim_end_matches("_scale_inv");
            let base = base.trim_end_matches("_scales").trim_end_matches("_blocks");
            assert!(error.to_string().contains(base), "{}: {error}", dropped.name);
        }
    }
}

/// A tensor of another shape is noticed, also where its bytes would do.
#[test]
fn a_tensor_of_another_shape_in_any_family_is_noticed() {
    for (family, storage, geometry) in all() {
        for index in 0..geometry.entries.len() {
            let mut other = geometry.clone();
            let entry = &mut other.entries[index];
            *entry.shape.last_mut().unwrap() += 1;
            let name = entry.name.clone();
            let error = other.open().expect_err(&format!("{family:?} {storage:?} {name}"));
            assert!(error.to_string().contains(&name), "{name}: {error}");
        }
    }
}

#[test]
fn f2_a_promised_layer_that_is_absent_and_the_reverse_in_every_family_that_has_one() {
    let families = [
        Family::GlmMoeDsa,
        Family::DeepseekV3,
        Family::KimiK2,
        Family::Glm4Moe,
        Family::LongcatFlash,
    ];
    for family in families {
        let promised = with(&small(family), json!({ "num_nextn_predict_layers": 1 }));
        let absent = Geometry::new(promised.clone(), Storage::Bf16, 0).open().unwrap();
        assert_eq!(absent.n_mtp_layers_present, 0);
        assert!(warnings(&absent).contains("declares 1"), "{family:?}: {}", warnings(&absent));

        let geometry = Geometry::new(promised, Storage::Bf16, 1);
        let both = geometry.open().unwrap();
        assert_eq!((both.n_mtp_layers_present, warnings(&both).as_str()), (1, ""), "{family:?}");
        assert_eq!(sum(&both.bytes_by_class()), geometry.data_bytes(), "{family:?}");
        let mtp: Vec<_> =
            both.bytes_by_class().into_iter().filter(|c| c.class == RoleClass::Mtp).collect();
        assert_eq!(
            sum(&mtp),
            geometry.data_bytes() - { Geometry::new(small(family), Storage::Bf16, 0).data_bytes() }
        );
        // LongCat-Flash never declares its layer, so that its presence is no news.
        let unpromised = Geometry::new(small(family), Storage::Bf16, 1).open().unwrap();
        assert_eq!(unpromised.n_mtp_layers_present, 1, "{family:?}");
        let is_news = warnings(&unpromised).contains("declares 0");
        assert_eq!(is_news, family != Family::LongcatFlash, "{family:?}");
        // What is not whole is not counted, whichever of its tensors is lacking.
        let is_copy = |e: &&(usize, &Entry)| e.1.name.ends_with("embed_tokens.weight");
        let first = Geometry::new(small(family), Storage::Bf16, 0).entries.len() - 2;
        let mtp = geometry.entries.iter().enumerate().skip(first);
        for (index, entry) in
            mtp.filter(|e| !is_copy(&e)).take_while(|e| e.1.name != "model.norm.weight")
        {
            let less = geometry.without(index).open().unwrap();
            assert_eq!(less.n_mtp_layers_present, 0, "{family:?} {}", entry.name);
            assert!(less.unrecognised_bytes > Bytes(0));
        }
    }
}

/// Copies of embedding and head that some checkpoints carry are counted with the layer and not missed
/// where they are not there.
#[test]
fn f2_copies_of_embedding_and_head_belong_to_the_layer() {
    for family in [Family::DeepseekV3, Family::Glm4Moe] {
        let promised = with(&small(family), json!({ "num_nextn_predict_layers": 1 }));
        let mut geometry = Geometry::new(promised.clone(), Storage::Bf16, 1);
        let layer = uint(&promised, "num_hidden_layers");
        let shape = [uint(&promised, "vocab_size"), uint(&promised, "hidden_size")];
        for copy in ["embed_tokens", "shared_head.head"] {
            let name = format!("model.layers.{layer}.{copy}.weight");
            geometry.entries.push(Entry::new(name, "BF16", &shape));
        }
        let model = geometry.open().unwrap();
        assert_eq!((model.n_mtp_layers_present, warnings(&model).as_str()), (1, ""));
        assert!(
            model
                .by_role()
                .contains_key(&Role::Layer { layer: layer as u32, tensor: LayerTensor::MtpHead })
        );
        assert_eq!(sum(&model.bytes_by_class()), geometry.data_bytes());
    }
}

/// Zero experts have no weights; a checkpoint that carries some all the same is read without a word.
#[test]
fn weights_of_experts_that_return_their_input_are_ignored() {
    let mut geometry = Geometry::new(small(Family::LongcatFlash), Storage::Bf16, 0);
    let whole = geometry.data_bytes();
    for expert in [4, 5] {
        let name = format!("model.layers.1.mlp.experts.{expert}.up_proj.weight");
        geometry.entries.push(Entry::new(name, "BF16", &[160, 192]));
    }
    let model = geometry.open().unwrap();
    assert_eq!(warnings(&model), "");
    assert_eq!(model.ignored_bytes.0, 2 * 160 * 192 * 2);
    assert_eq!(sum(&model.bytes_by_class()), whole);
    // One beyond those is nothing that is known.
    geometry.entries.push(Entry::new(
        "model.layers.1.mlp.experts.6.up_proj.weight",
        "BF16",
        &[160, 192],
    ));
    assert!(warnings(&geometry.open().unwrap()).contains("1 tensors have no role"));
}

#[test]
fn types_that_nobody_reads_are_no_matter_where_nothing_needs_them() {
    let known = ["F64", "I64", "BOOL", "F8_E5M2", "F8_E8M0", "I16", "F4", "F6_E2M3", "C64"];
    for dtype in known {
        let mut geometry = Geometry::new(small(Family::Qwen3Moe), Storage::Bf16, 0);
        let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
        geometry.entries.push(Entry::new(name, dtype, &[8]));
        let model = geometry.open().unwrap();
        assert!(warnings(&model).contains(name), "{dtype}");
    }
}

/// A header of tomorrow has types that this build has never heard of.
#[test]
fn types_that_nobody_knows_are_named_where_nothing_needs_them() {
    let mut geometry = Geometry::new(small(Family::Qwen3Moe), Storage::Bf16, 0);
    geometry.entries.push(Entry::new("vision.tower.b", "F2_E1M0", &[8]));
    geometry.entries.push(Entry::new("vision.tower.a", "F2_E1M0", &[3, 3]));
    geometry.entries.push(Entry::new("vision.tower.c", "F128", &[2]));
    let model = geometry.open().unwrap();
    let warnings = warnings(&model);
    for expected in [
        "2 tensors are of the unknown type F2_E1M0, such as vision.tower.a",
        "tensor vision.tower.c is of the unknown type F128",
        "3 tensors have no role",
    ] {
        assert!(warnings.contains(expected), "{expected:?} is not in {warnings:?}");
    }
}

/// Multi-token prediction is not run: what of it cannot be read does not stop the model.
#[test]
fn a_prediction_layer_of_an_unknown_type_is_as_good_as_absent() {
    let mut geometry = Geometry::new(small(Family::GlmMoeDsa), Storage::Bf16, 1);
    assert_eq!(geometry.open().unwrap().n_mtp_layers_present, 1);
    let entry = geometry.entries.iter_mut().find(|e| e.name.ends_with("eh_proj.weight")).unwrap();
    entry.dtype = "F99";
    let model = geometry.open().unwrap();
    assert_eq!(model.n_mtp_layers_present, 0);
    assert!(warnings(&model).contains("unknown type F99"));
}

/// A row of an embedding in blocks has a scale for every 128 columns.
#[test]
fn a_row_buffer_has_room_for_the_scales_of_every_block() {
    let mut model = Geometry::new(small(Family::Qwen3Moe), Storage::Bf16, 0).open().unwrap();
    let table = model.tensors.iter_mut().find(|t| t.role == Role::Embedding).unwrap();
    (table.rows, table.cols) = (4096, 6144);
    let (block_rows, scales_of_a_row) = (4096 / 128, 6144 / 128);
    for (scale, expected) in
        [(BlockScale::F32, 192), (BlockScale::F16, 128), (BlockScale::Bf16, 128)]
    {
        let scale_bytes = scale.bytes();
        let bytes = block_rows * scales_of_a_row * scale_bytes;
        let table = model.tensors.iter_mut().find(|t| t.role == Role::Embedding).unwrap();
        table.stored = StoredType::Fp8(scale);
        table.scales = Some(Span { shard: 0, offset: 0, bytes });
        assert_eq!(table.row_scale_bytes(), scales_of_a_row * scale_bytes);
        // 96 bytes of 16-bit scales are padded to 128.
        assert_eq!(ModelBytes::of(&model, IoMode::Dropped).embedding_row, 6144 + expected);
    }
}

/// Scales of blocks come as F32 or in the 16 bits of the other tensors, and count as they are.
#[test]
fn block_scales_of_16_bits_are_read() {
    let mut geometry = Geometry::new(small(Family::Qwen3Moe), Storage::Fp8, 0);
    let wide = geometry.open().unwrap();
    assert_eq!(wide.experts[0].gate.stored, StoredType::FP8);
    // Bytes do not tell the two types of 16 bits apart; the header does.
    for (dtype, scale) in [("BF16", BlockScale::Bf16), ("F16", BlockScale::F16)] {
        for entry in geometry.entries.iter_mut().filter(|e| e.name.ends_with("_scale_inv")) {
            entry.dtype = dtype;
        }
        let narrow = geometry.open().unwrap();
        assert_eq!(narrow.experts[0].gate.stored, StoredType::Fp8(scale));
        // Three matrices of one block each: 2 bytes less a scale.
        assert_eq!(wide.experts[0].read_bytes() - narrow.experts[0].read_bytes(), 3 * 2);
    }
}

/// One tensor holds all experts of a layer; an expert is a slice of each.
#[test]
fn experts_of_gpt_oss_are_slices() {
    let config = small(Family::GptOss);
    let (hidden, ff) = (uint(&config, "hidden_size"), uint(&config, "intermediate_size"));
    let bf16 = Geometry::new(config.clone(), Storage::Bf16, 0).open().unwrap();
    let biases = 2 * (2 * ff + hidden);
    assert_eq!(bf16.experts[0].form, ExpertForm::InterleavedTransposed);
    assert_eq!(bf16.experts[0].read_bytes(), 2 * 3 * hidden * ff + biases);
    let packed = Geometry::new(config, Storage::MxFp4, 0).open().unwrap();
    let expert = packed.expert(1, 2).unwrap();
    assert_eq!((expert.form, expert.down.stored), (ExpertForm::Interleaved, StoredType::MxFp4));
    // 17 bytes for 32 weights: 64 and 96 are whole runs.
    assert_eq!(expert.read_bytes(), 3 * hidden * ff / 32 * 17 + biases);
    assert_eq!(expert.biases.map(|b| b.bytes), Some(biases));
    // Slices follow each other, and none overlaps another expert's.
    for (one, next) in packed.layer_experts(1).iter().zip(&packed.layer_experts(1)[1..]) {
        for (a, b) in one.extents().iter().zip(next.extents()) {
            assert_eq!((a.shard, a.offset + a.bytes), (b.shard, b.offset));
        }
    }
}

#[test]
fn a_config_of_an_unknown_family_is_outlined_by_the_roles_of_its_tensors() {
    let mut geometry = Geometry::new(small(Family::Qwen3Moe), Storage::Fp8, 0);
    geometry.config["model_type"] = json!("qwen9_moe");
    let error = geometry.open().unwrap_err();
    assert!(matches!(error, CatalogueError::Config { .. }), "{error}");
    assert!(error.to_string().contains("unknown family \"qwen9_moe\""), "{error}");
    let outline = Outline::open_from(&geometry.memory()).unwrap();
    assert_eq!(outline.caveat(), "unknown family qwen9_moe: sizes by tensor role only");
    assert_eq!((outline.n_layers, outline.n_experts), (Some(2), Some(4)));
    assert_eq!(outline.n_tensors, geometry.entries.len());
    let lines: u64 = outline.lines.iter().map(|l| l.bytes.0).sum();
    assert_eq!(lines, geometry.data_bytes());
    // The guess is right where the family is in fact one that is known.
    geometry.config["model_type"] = json!("qwen3_moe");
    let known = geometry.open().unwrap().bytes_by_class();
    for class in RoleClass::ALL {
        let of_class: Vec<_> = known.iter().filter(|c| c.class == class).copied().collect();
        assert_eq!(outline.bytes_of(class).0, sum(&of_class), "{class:?}");
    }
    geometry.config = json!({});
    assert!(Outline::open_from(&geometry.memory()).unwrap().caveat().contains("names no family"));
}

// ---- published checkpoints at their true sizes ---------------------------------------------------

fn glm_5_2() -> Value {
    json!({
        "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78,
        "first_k_dense_replace": 3, "num_attention_heads": 64, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "intermediate_size": 12288, "q_lora_rank": 2048, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_head_dim": 128,
        "index_n_heads": 32, "index_topk": 2048, "num_nextn_predict_layers": 1,
        "vocab_size": 154880, "max_position_embeddings": 202752,
    })
}

fn deepseek_v3_1() -> Value {
    json!({
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
        "first_k_dense_replace": 3, "num_attention_heads": 128, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "intermediate_size": 18432, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_nextn_predict_layers": 1, "vocab_size": 129280, "n_group": 8, "topk_group": 4,
        "max_position_embeddings": 163840,
    })
}

fn spec(config: &Value) -> ArchSpec {
    config::arch_spec(config.to_string().as_bytes()).unwrap()
}

fn gb(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e9)
}

fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

/// Bytes of dense weights (of the decoder, with those of multi-token prediction).
fn dense(model: &Catalogue) -> (u64, u64) {
    let bytes = |with_mtp: bool| {
        let counts = |role| with_mtp || !model.is_mtp(role);
        model.tensors.iter().filter(|t| counts(t.role)).map(|t| t.bytes().0).sum()
    };
    (bytes(false), bytes(true))
}

/// Case B3 with it: experts of 4 bits and, in the multi-token-prediction layer, of 8, each at its own
/// width.
#[test]
fn b3_glm_5_2_int4_has_its_published_sizes() {
    let geometry = Geometry::new(glm_5_2(), Storage::Int4, 1);
    let model = geometry.open().unwrap();
    assert_eq!(warnings(&model), "");
    assert_eq!((gb(model.total_bytes().0).as_str(), model.n_tensors), ("384.1", 119_110));
    assert_eq!((model.spec.n_layers, model.n_mtp_layers_present), (78, 1));
    let decoder: Vec<_> = (0..78).flat_map(|l| model.layer_experts(l)).collect();
    assert_eq!((decoder.len(), model.spec.expert_layers().count()), (19_200, 75));
    assert!(decoder.iter().all(|e| e.read_bytes() == 18_915_328 && e.slab_bytes == 18_915_328));
    let mtp = model.layer_experts(78);
    assert_eq!(mtp.len(), 256);
    assert!(mtp.iter().all(|e| e.read_bytes() == 37_789_696));
    assert_eq!(budget::slot_bytes(&model, 78, IoMode::Dropped).0, 37_789_696);
    let (without, with_mtp) = dense(&model);
    assert_eq!(
        (format!("{:.2}", without as f64 / 1e9), format!("{:.2}", with_mtp as f64 / 1e9)),
        ("10.96".to_owned(), "11.25".to_owned())
    );
}

/// (config, storage, multi-token-prediction layers, total GB, dense GB with them, experts)
fn published() -> Vec<(Value, Storage, u64, &'static str, &'static str, usize)> {
    let kimi = with(
        &deepseek_v3_1(),
        json!({
            "model_type": "kimi_k2", "first_k_dense_replace": 1, "num_attention_heads": 64,
            "n_routed_experts": 384, "num_nextn_predict_layers": 0, "vocab_size": 163840,
            "n_group": 1, "topk_group": 1,
        }),
    );
    let longcat = json!({
        "model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28,
        "num_attention_heads": 64, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048,
        "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 131072,
    });
    let qwen = json!({
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
        "vocab_size": 151936,
    });
    let olmoe = json!({
        "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "intermediate_size": 1024, "vocab_size": 50304,
    });
    vec![
        (glm_5_2(), Storage::Fp8, 1, "757.2", "22.5", 19_456),
        (longcat, Storage::Fp8, 0, "567.9", "26.6", 14_336),
        (deepseek_v3_1(), Storage::Fp8, 1, "685.1", "19.8", 15_104),
        (kimi, Storage::Fp8, 0, "1029.4", "14.5", 23_040),
        (qwen, Storage::Bf16, 0, "61.1", "3.1", 6_144),
        (olmoe, Storage::Bf16, 0, "13.8", "1.0", 1_024),
    ]
}

#[test]
fn published_checkpoints_have_their_published_sizes() {
    for (config, storage, n_mtp, total, dense_gb, n_experts) in published() {
        let name = config["model_type"].to_string();
        let geometry = Geometry::new(config, storage, n_mtp);
        let model = geometry.open().unwrap();
        assert_eq!(warnings(&model), "", "{name}");
        assert_eq!(gb(model.total_bytes().0), total, "{name}");
        assert_eq!(gb(dense(&model).1), dense_gb, "{name}");
        assert_eq!(model.experts.len(), n_experts, "{name}");
        assert_eq!(sum(&model.bytes_by_class()), geometry.data_bytes(), "{name}");
    }
}

/// Names and parameter counts play no part: what is counted are the bytes that lie there.
#[test]
fn f3_a_file_of_42_gb_is_42_gb_whatever_its_name_says() {
    let config = json!({
        "model_type": "qwen3_moe", "_name_or_path": "someone/Giant-72B-Instruct-FP16",
        "hidden_size": 4096, "num_hidden_layers": 33, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "intermediate_size": 12288, "vocab_size": 65536,
        "torch_dtype": "float16",
    });
    let mut geometry = Geometry::new(config, Storage::Int4, 0);
    geometry.label = PathBuf::from("Giant-72B-Instruct-FP16");
    let model = geometry.open().unwrap();
    assert_eq!(sum(&model.bytes_by_class()), geometry.data_bytes());
    assert_eq!(format!("{:.0}", model.total_bytes().0 as f64 / 1e9), "42");
    let packed = model.bytes_by_class().into_iter().find(|c| c.class == RoleClass::RoutedExperts);
    let packed = packed.unwrap();
    let scales = 33 * 128 * (2 * 1536 + 4096) * 4;
    assert_eq!(packed.stored, StoredType::INT4);
    assert_eq!(packed.bytes.0, 33 * 128 * 3 * 4096 * 1536 / 2 + scales);
}

#[test]
fn f7_the_cache_of_deepseek_v3_1_is_latent() {
    let kv = budget::kv_cache_bytes(&spec(&deepseek_v3_1()), 163_840, KvElement::Bf16);
    assert_eq!(kv, 61 * 163_840 * (512 + 64) * 2);
    assert_eq!(gib(kv), "10.72");
}

#[test]
fn f8_the_cache_of_glm_5_with_its_mtp_layer_and_the_indexer_apart() {
    let spec = spec(&glm_5_2());
    let kv = budget::kv_cache_bytes(&spec, 202_752, KvElement::F16);
    let mtp = budget::mtp_kv_cache_bytes(&spec, 1, 202_752, KvElement::F16);
    assert_eq!((gib(kv), gib(kv + mtp)), ("16.97".to_owned(), "17.18".to_owned()));
    let keys = budget::indexer_key_bytes(&spec, 202_752, KvElement::F16);
    assert_eq!(keys, 78 * 202_752 * 128 * 2);
    let per_token = budget::cache_per_token(&spec, KvElement::F16);
    assert_eq!(per_token.kv.0 * 202_752, kv);
    assert_eq!(per_token.indexer_keys.0 * 202_752, keys);
}

#[test]
fn f9_the_cache_of_deepseek_v2_lite_is_compressed() {
    let lite = spec(&json!({
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": null,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 1, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "vocab_size": 102400, "max_position_embeddings": 163840, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "scoring_func": "softmax",
        "rope_scaling": { "type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096 },
    }));
    let kv = budget::kv_cache_bytes(&lite, 32_768, KvElement::Bf16);
    assert_eq!(kv, 27 * 32_768 * (512 + 64) * 2);
    // Full keys and values of 192 + 128 for each of 16 heads would be 8,640 MiB.
    let full = 27 * 32_768 * 16 * (192 + 128) * 2_u64;
    assert_eq!((kv >> 20, full >> 20), (972, 8_640));
}

#[test]
fn layers_with_a_window_cache_no_more_than_it() {
    let oss = spec(&with(&small(Family::GptOss), json!({ "num_hidden_layers": 4 })));
    let width = 2 * 2 * 24 * 2;
    for context in [5, 8, 9, 1000] {
        let kv = budget::kv_cache_bytes(&oss, context, KvElement::Bf16);
        // Keys and values are aligned each, to 64 bytes.
        let aligned = |tokens: u64| 2 * (tokens * width / 2).next_multiple_of(64);
        assert_eq!(kv, 2 * aligned(context) + 2 * aligned(context.min(8)), "{context}");
    }
    let per_token = budget::cache_per_token(&oss, KvElement::Bf16);
    assert_eq!((per_token.kv.0, per_token.kv_in_windows.0), (2 * width, 2 * width));
}

#[test]
fn both_attentions_of_a_longcat_layer_have_a_cache() {
    let longcat = spec(&published()[1].0);
    let kv = budget::kv_cache_bytes(&longcat, 1024, KvElement::Bf16);
    assert_eq!(kv, 28 * 2 * 1024 * (512 + 64) * 2);
}

//! Configs of every family become the specs that their references imply; nonsense is named.

use super::*;
use crate::spec::{
    Activation, AttentionSpec, GroupScore, GroupedAttention, IndexerKind, LatentAttention, QkNorm,
    RopePairing, RopeScaling, RouterScoring,
};
use proptest::prelude::*;

const OLMOE: &str = r#"{"model_type":"olmoe","vocab_size":320,"hidden_size":64,
    "num_hidden_layers":4,"num_attention_heads":4,"intermediate_size":48,"num_experts":16,
    "num_experts_per_tok":4,"rope_parameters":{"rope_theta":10000.0,"rope_type":"default"},
    "eos_token_id":[5,6]}"#;

#[test]
fn a_config_becomes_a_spec() {
    let spec = arch_spec(OLMOE.as_bytes()).unwrap();
    assert_eq!((spec.n_layers, spec.rope.dim, spec.rope.theta), (4, 16, 10_000.0));
    assert_eq!(spec.stop_tokens, [5, 6]);
    assert!(spec.is_expert_layer(0));
}

#[test]
fn nonsense_is_named() {
    let cases = [
        ("[1]", "not a JSON object"),
        ("{", "not a JSON object"),
        (
            r#"{"model_type":"mamba"}"#,
            "unknown family \"mamba\": this build knows glm_moe_dsa, olmoe, deepseek_v2",
        ),
        (&OLMOE.replace("\"vocab_size\":320,", ""), "lacks vocab_size"),
        (&OLMOE.replace(":320", ":0"), "vocab_size = 0"),
        (&OLMOE.replace(":320", ":-3"), "vocab_size = -3"),
        (&OLMOE.replace(":320", ":18446744073709551615"), "vocab_size"),
        (&OLMOE.replace("\"num_experts\":16", "\"num_experts\":3"), "num_experts_per_tok = 4"),
        (
            &OLMOE.replace("\"num_attention_heads\":4", "\"num_attention_heads\":65"),
            "num_attention_heads",
        ),
    ];
    for (json, expect) in cases {
        let error = arch_spec(json.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    }
}

#[test]
fn sharing_patterns_follow_the_reference() {
    let glm = |extra: &str| {
        let json = format!(
            r#"{{"model_type":"glm_moe_dsa","vocab_size":9,"hidden_size":8,"num_hidden_layers":6,
            "qk_nope_head_dim":4,"qk_rope_head_dim":4,"index_n_heads":1,"index_head_dim":4,
            "index_topk":2,"moe_intermediate_size":4,"num_attention_heads":1,"q_lora_rank":4,
            "kv_lora_rank":4,"v_head_dim":4,"intermediate_size":4,"n_routed_experts":4,
            "num_experts_per_tok":2{extra}}}"#
        );
        arch_spec(json.as_bytes()).map(|s| {
            s.layers
                .iter()
                .map(|l| if l.indexer == IndexerKind::Full { 'F' } else { 'S' })
                .collect::<String>()
        })
    };
    assert_eq!(glm("").unwrap(), "FFFFFF");
    assert_eq!(glm(r#","index_topk_freq":2"#).unwrap(), "FFSFSF");
    assert_eq!(glm(r#","index_topk_pattern":"FFSSFS""#).unwrap(), "FFSSFS");
    assert!(glm(r#","index_topk_pattern":"SFSSFS""#).is_err());
    assert!(glm(r#","indexer_types":["full"]"#).is_err());
}

/// The parts of a config that families with latent attention have in common.
const LATENT: &str = r#""vocab_size":64,"hidden_size":64,"num_attention_heads":4,
    "qk_nope_head_dim":16,"qk_rope_head_dim":16,"kv_lora_rank":32,"v_head_dim":8"#;

/// The same of grouped attention.
const GROUPED: &str = r#""vocab_size":64,"hidden_size":64,"num_attention_heads":4,
    "num_key_value_heads":2,"num_hidden_layers":4,"num_experts_per_tok":2"#;

fn spec(model_type: &str, common: &str, more: &str) -> ArchSpec {
    let json = format!(r#"{{"model_type":"{model_type}",{common},{more}}}"#);
    arch_spec(json.as_bytes()).unwrap()
}

fn latent(spec: &ArchSpec) -> &LatentAttention {
    match &spec.attention {
        AttentionSpec::Latent(latent) => latent,
        AttentionSpec::Grouped(_) => panic!("grouped"),
    }
}

fn grouped(spec: &ArchSpec) -> &GroupedAttention {
    match &spec.attention {
        AttentionSpec::Grouped(grouped) => grouped,
        AttentionSpec::Latent(_) => panic!("latent"),
    }
}

const DEEPSEEK: &str = r#""num_hidden_layers":4,"first_k_dense_replace":1,"intermediate_size":128,
    "moe_intermediate_size":48,"n_routed_experts":16,"num_experts_per_tok":4,"n_group":4,
    "topk_group":2,"num_nextn_predict_layers":1"#;

#[test]
fn deepseek_v3_stretches_its_rotation_and_its_scores() {
    let yarn = r#""rope_theta":10000,"rope_scaling":{"type":"yarn","factor":40,"beta_fast":32,
        "original_max_position_embeddings":4096,"beta_slow":1,"mscale":1.0,"mscale_all_dim":1.0}"#;
    let v3 = spec("deepseek_v3", LATENT, &format!(r#"{DEEPSEEK},"q_lora_rank":24,{yarn}"#));
    assert_eq!(
        v3.rope.scaling,
        RopeScaling::Yarn {
            factor: 40.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.0,
        }
    );
    // 1 / sqrt(16 + 16), times the square of 0.1 ln 40 + 1.
    let temperature = 0.1 * 40.0_f64.ln() + 1.0;
    let expected = temperature * temperature / 32.0_f64.sqrt();
    assert!((f64::from(latent(&v3).score_scale) - expected).abs() < 1e-7);
    assert_eq!((v3.router.n_groups, v3.router.n_groups_active), (4, 2));
    assert_eq!(v3.router.group_score, GroupScore::BestTwo);
    assert_eq!((v3.n_mtp_layers, v3.router.scoring), (Some(1), RouterScoring::Sigmoid));
    let dense: Vec<bool> = (0..5).map(|layer| !v3.is_expert_layer(layer)).collect();
    assert_eq!(dense, [true, false, false, false, false]);
    // The newer form of the same field, without mscale: cosines and sines take the temperature.
    let newer = r#""rope_parameters":{"rope_type":"yarn","factor":4.0,"rope_theta":5000.0,
        "original_max_position_embeddings":64,"truncate":false}"#;
    let kimi = spec("kimi_k2", LATENT, &format!(r#"{DEEPSEEK},"q_lora_rank":24,{newer}"#));
    let RopeScaling::Yarn { truncate, attention_factor, .. } = kimi.rope.scaling else {
        panic!("{:?}", kimi.rope)
    };
    assert!(!truncate && (attention_factor - (0.1 * 4.0_f64.ln() + 1.0)).abs() < 1e-12);
    assert!((f64::from(latent(&kimi).score_scale) - 1.0 / 32.0_f64.sqrt()).abs() < 1e-7);
    assert!((kimi.rope.theta - 5000.0).abs() < 1e-9);
}

#[test]
fn deepseek_v2_takes_queries_from_the_state_and_groups_by_their_best() {
    let lite = spec("deepseek_v2", LATENT, &format!(r#"{DEEPSEEK},"q_lora_rank":null"#));
    assert_eq!((latent(&lite).q_lora_rank, lite.shared_ff_size), (0, 2 * 48));
    assert_eq!((lite.router.scoring, lite.router.n_groups), (RouterScoring::Softmax, 1));
    assert_eq!((lite.mtp_layer, lite.router.selection_bias), (None, false));
    let full = format!(r#"{DEEPSEEK},"topk_method":"group_limited_greedy","n_shared_experts":1"#);
    let full = spec("deepseek_v2", LATENT, &full);
    assert_eq!((full.router.n_groups, full.router.group_score), (4, GroupScore::Best));
}

#[test]
fn longcat_has_two_sub_blocks_and_experts_that_do_nothing() {
    let longcat = spec(
        "longcat_flash",
        LATENT,
        r#""num_layers":3,"q_lora_rank":16,"ffn_hidden_size":128,"expert_ffn_hidden_size":48,
        "n_routed_experts":16,"zero_expert_num":8,"moe_topk":6,"routed_scaling_factor":6.0"#,
    );
    assert_eq!((longcat.n_layers, longcat.layers[0].n_attentions()), (3, 2));
    assert_eq!((longcat.router.n_outputs(), longcat.router.expected_active()), (24, 4.0));
    assert_eq!(
        (latent(&longcat).query_scale, latent(&longcat).latent_scale),
        (2.0, 2.0_f32.sqrt())
    );
    assert_eq!((longcat.n_mtp_layers, longcat.router.renormalise), (None, false));
    assert!(longcat.is_expert_layer(2) && !longcat.is_expert_layer(3));
}

#[test]
fn qwen3_has_norms_per_head_and_dense_layers_where_it_says() {
    let more = r#""head_dim":24,"num_experts":16,"moe_intermediate_size":48,"norm_topk_prob":true,
        "intermediate_size":128,"decoder_sparse_step":2,"mlp_only_layers":[3]"#;
    let qwen = spec("qwen3_moe", GROUPED, more);
    assert_eq!((grouped(&qwen).qk_norm, grouped(&qwen).head_dim), (QkNorm::PerHead, 24));
    assert_eq!(qwen.expert_layers().collect::<Vec<_>>(), [1]);
    assert_eq!((qwen.dense_ff_size, qwen.router.renormalise), (128, true));
    // A window is declared by all and used by those that say so.
    let window = r#","sliding_window":32,"use_sliding_window":"#;
    assert_eq!(spec("qwen3_moe", GROUPED, &format!("{more}{window}false")).layers[0].window, None);
    let windowed = spec("qwen3_moe", GROUPED, &format!("{more}{window}true"));
    assert_eq!(windowed.layers[0].window, Some(32));
}

#[test]
fn glm4_rotates_half_of_each_head() {
    let more = r#""n_routed_experts":16,"moe_intermediate_size":48,"intermediate_size":128,
        "attention_bias":true,"use_qk_norm":true,"num_nextn_predict_layers":1"#;
    let glm = spec("glm4_moe", GROUPED, more);
    assert_eq!(
        (grouped(&glm).head_dim, glm.rope.dim, glm.rope.pairing),
        (16, 8, RopePairing::Halves)
    );
    assert_eq!((grouped(&glm).qkv_biases, grouped(&glm).output_bias), (true, false));
    assert_eq!((grouped(&glm).qk_norm, glm.shared_ff_size), (QkNorm::PerHead, 48));
    assert!(!glm.is_expert_layer(0) && glm.is_expert_layer(1) && glm.is_expert_layer(4));
    let nested = r#","rope_parameters":{"partial_rotary_factor":0.25,"rope_type":"default"}"#;
    assert_eq!(spec("glm4_moe", GROUPED, &format!("{more}{nested}")).rope.dim, 4);
}

#[test]
fn mixtral_divides_the_chosen_weights_by_their_sum() {
    let more = r#""num_local_experts":8,"intermediate_size":96,"sliding_window":null"#;
    let mixtral = spec("mixtral", GROUPED, more);
    assert_eq!((mixtral.router.n_experts, mixtral.router.renormalise), (8, true));
    assert_eq!((mixtral.rope.theta, mixtral.layers[0].window), (1_000_000.0, None));
}

#[test]
fn gpt_oss_slides_in_every_other_layer() {
    let more = r#""num_local_experts":8,"intermediate_size":48,"sliding_window":8"#;
    let by_default = spec("gpt_oss", GROUPED, more);
    let windows: Vec<_> = by_default.layers.iter().map(|l| l.window).collect();
    assert_eq!(windows, [Some(8), None, Some(8), None]);
    let listed = r#","layer_types":["full_attention","full_attention","sliding_attention",
        "full_attention"]"#;
    let listed = spec("gpt_oss", GROUPED, &format!("{more}{listed}"));
    assert_eq!(listed.layers.iter().filter(|l| l.window.is_some()).count(), 1);
    assert_eq!(listed.router.scoring, RouterScoring::SoftmaxOfChosen);
    assert_eq!(listed.activation, Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 });
    let attention = grouped(&listed);
    assert!(attention.sinks && attention.qkv_biases && attention.output_bias);
    assert!(listed.expert_biases && listed.router.logit_bias);
}

/// A value that changes the arithmetic and no size is noted, so that the model can be planned.
#[test]
fn what_sizes_do_not_depend_on_is_noted_and_not_refused() {
    let noted = |json: &str| {
        let notes = arch_spec(json.as_bytes()).unwrap().undescribed;
        notes.iter().map(|n| format!("{} = {}", n.field, n.value)).collect::<Vec<_>>()
    };
    assert_eq!(noted(OLMOE), [""; 0]);
    assert_eq!(noted(&OLMOE.replace("\"default\"", "\"longrope\"")), ["rope_type = longrope"]);
    let gelu = OLMOE.replace("\"vocab_size\"", "\"hidden_act\":\"gelu\",\"vocab_size\"");
    assert_eq!(noted(&gelu), ["hidden_act = gelu"]);
}

#[test]
fn the_declared_family_is_read_whether_known_or_not() {
    for (json, family) in [
        (OLMOE, "olmoe"),
        (r#"{"model_type":"mamba"}"#, "mamba"),
        (r#"{"model_type":7}"#, ""),
        ("[]", ""),
        ("", ""),
    ] {
        assert_eq!(declared_family(json.as_bytes()), family);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(json in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = arch_spec(&json);
    }

    #[test]
    fn mutated_configs_never_panic(at: prop::sample::Index, with in "[0-9a-z\"\\[\\]{}:,.-]{0,6}") {
        let at = at.index(OLMOE.len());
        let mut json = OLMOE.to_owned();
        json.replace_range(at..at + 1, &with);
        if let Ok(spec) = arch_spec(json.as_bytes()) {
            prop_assert!(spec.n_heads() > 0);
        }
    }
}

/// What cannot be read is never taken for what is absent: the model would run on other angles.
#[test]
fn rotary_values_of_another_kind_are_refused_by_name() {
    let olmoe = r#""rope_parameters":{"rope_theta":10000.0,"rope_type":"default"}"#;
    assert!(OLMOE.contains(olmoe));
    let yarn = |value: &str| {
        format!(r#""rope_parameters":{{"rope_type":"yarn","factor":4.0,"mscale":1.0,{value}}}"#)
    };
    let cases = [
        (r#""rope_parameters":"x""#.to_owned(), "rope_parameters"),
        (r#""rope_parameters":7"#.to_owned(), "rope_parameters"),
        (r#""rope_scaling":[1]"#.to_owned(), "rope_scaling"),
        (r#""rope_parameters":{"rope_type":7}"#.to_owned(), "rope_type"),
        (yarn(r#""mscale_all_dim":"x""#), "mscale_all_dim"),
        (yarn(r#""attention_factor":[1.0]"#), "attention_factor"),
    ];
    for (changed, field) in cases {
        let config = OLMOE.replace(olmoe, &changed);
        let message = arch_spec(config.as_bytes()).expect_err(field).to_string();
        assert!(message.contains(field), "{field}: {message}");
    }
    for absent in [r#""rope_scaling":null"#.to_owned(), yarn(r#""mscale_all_dim":0.0"#)] {
        assert!(arch_spec(OLMOE.replace(olmoe, &absent).as_bytes()).is_ok(), "{absent}");
    }
}

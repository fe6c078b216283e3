//! From a published config.json to an `ArchSpec`. Owns every name that published configs use;
//! those names appear nowhere else. Opens no file.

use serde_json::Value;

use crate::spec::{
    ArchSpec, AttentionSpec, Family, FeedForward, GroupedAttention, IndexerKind, IndexerSpec,
    LatentAttention, LayerSpec, RopePairing, RopeSpec, RouterScoring, RouterSpec,
};

/// Why a config cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not a JSON object.
    #[error("config.json is not a JSON object: {reason}")]
    NotJson {
        /// What the parser said.
        reason: String,
    },
    /// A family that the tables do not know.
    #[error("unknown family {model_type:?}: this build runs {}", known_families())]
    UnknownFamily {
        /// The `model_type` found.
        model_type: String,
    },
    /// A field is absent.
    #[error("config.json lacks {field}")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A field has a value that makes no sense.
    #[error("config.json has {field} = {found}, expected {expected}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// A mechanism that this build does not have.
    #[error("config.json asks for {field} = {found}, which this build does not run yet")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// What is there.
        found: String,
    },
}

fn known_families() -> String {
    Family::ALL.map(Family::model_type).join(", ")
}

/// Largest dimension believed, so that products of a few dimensions cannot overflow 64 bits.
const DIMENSION_CAP: u64 = 1 << 24;
/// Most experts of a layer believed: their ids are 16 bits wide in the usage history.
const EXPERT_CAP: u64 = u16::MAX as u64;
/// Most layers believed.
const LAYER_CAP: u64 = 10_000;

/// A config with typed access and errors that name the field.
struct Config<'a>(&'a serde_json::Map<String, Value>);

impl Config<'_> {
    fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }

    fn uint(&self, field: &'static str, min: u64, max: u64) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (min..=max).contains(&n) => Ok(Some(n as usize)),
            _ => Err(ConfigError::Invalid {
                field,
                found: value.to_string(),
                expected: format!("a whole number from {min} to {max}"),
            }),
        }
    }

    fn dimension(&self, field: &'static str) -> Result<usize, ConfigError> {
        self.uint(field, 1, DIMENSION_CAP)?.ok_or(ConfigError::Missing { field })
    }

    fn dimension_or(&self, field: &'static str, default: usize) -> Result<usize, ConfigError> {
        Ok(self.uint(field, 1, DIMENSION_CAP)?.unwrap_or(default))
    }

    fn n_experts(&self, field: &'static str) -> Result<usize, ConfigError> {
        self.uint(field, 1, EXPERT_CAP)?.ok_or(ConfigError::Missing { field })
    }

    fn float_or(&self, field: &'static str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        value.as_f64().filter(|x| x.is_finite() && *x > 0.0).ok_or_else(|| ConfigError::Invalid {
            field,
            found: value.to_string(),
            expected: "a positive number".to_owned(),
        })
    }

    fn flag_or(&self, field: &'static str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        value.as_bool().ok_or_else(|| ConfigError::Invalid {
            field,
            found: value.to_string(),
            expected: "true or false".to_owned(),
        })
    }

    /// Refuses a field whose value is not the one that this build implements.
    fn only(&self, field: &'static str, allowed: &str) -> Result<(), ConfigError> {
        match self.get(field) {
            None => Ok(()),
            Some(Value::String(found)) if found == allowed => Ok(()),
            Some(other) => Err(ConfigError::Unsupported { field, found: other.to_string() }),
        }
    }

    fn refuse_flag(&self, field: &'static str) -> Result<(), ConfigError> {
        if self.flag_or(field, false)? {
            return Err(ConfigError::Unsupported { field, found: "true".to_owned() });
        }
        Ok(())
    }

    /// A list of one string for each layer.
    fn per_layer(
        &self,
        field: &'static str,
        n_layers: usize,
    ) -> Result<Option<Vec<&str>>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let invalid = || ConfigError::Invalid {
            field,
            found: value.to_string().chars().take(80).collect(),
            expected: format!("a list of {n_layers} strings"),
        };
        let list = value.as_array().ok_or_else(invalid)?;
        // Checkpoints that carry multi-token-prediction layers may list those as well.
        if list.len() < n_layers {
            return Err(invalid());
        }
        list.iter()
            .take(n_layers)
            .map(|v| v.as_str().ok_or_else(invalid))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    fn rope(&self, dim: usize, pairing: RopePairing) -> Result<RopeSpec, ConfigError> {
        let nested = ["rope_parameters", "rope_scaling"]
            .iter()
            .find_map(|f| self.get(f).and_then(Value::as_object))
            .map(Config);
        if let Some(nested) = &nested {
            nested.only("rope_type", "default")?;
            nested.only("type", "default")?;
        }
        let outer = self.float_or("rope_theta", 10_000.0)?;
        let theta = match &nested {
            Some(nested) => nested.float_or("rope_theta", outer)?,
            None => outer,
        };
        if !dim.is_multiple_of(2) {
            return Err(ConfigError::Invalid {
                field: "head_dim",
                found: dim.to_string(),
                expected: "an even rotary width".to_owned(),
            });
        }
        Ok(RopeSpec { theta, dim, pairing })
    }
}

/// The tokens that end generation, as one config names them: a number or a list.
#[must_use]
pub fn stop_tokens(config: &Value) -> Vec<u32> {
    let as_token = |v: &Value| v.as_u64().and_then(|t| u32::try_from(t).ok());
    match config.get("eos_token_id") {
        Some(Value::Array(list)) => list.iter().filter_map(as_token).collect(),
        Some(one) => as_token(one).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Reads a config into an `ArchSpec`.
///
/// # Errors
/// [`ConfigError`], naming the field.
pub fn arch_spec(json: &[u8]) -> Result<ArchSpec, ConfigError> {
    let value: Value =
        serde_json::from_slice(json).map_err(|e| ConfigError::NotJson { reason: e.to_string() })?;
    let Value::Object(map) = &value else {
        return Err(ConfigError::NotJson { reason: "another JSON value".to_owned() });
    };
    let config = Config(map);
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("").to_owned();
    let family = Family::ALL.into_iter().find(|f| f.model_type() == model_type);
    let mut spec = match family {
        Some(Family::GlmMoeDsa) => glm_moe_dsa(&config)?,
        Some(Family::Olmoe) => olmoe(&config)?,
        None => return Err(ConfigError::UnknownFamily { model_type }),
    };
    spec.stop_tokens = stop_tokens(&value);
    check_router(&spec.router)?;
    Ok(spec)
}

fn check_router(router: &RouterSpec) -> Result<(), ConfigError> {
    let invalid = |field, found: usize, expected: String| {
        Err(ConfigError::Invalid { field, found: found.to_string(), expected })
    };
    let RouterSpec { n_experts, n_experts_active, n_groups, n_groups_active, .. } = *router;
    if n_experts_active > n_experts {
        return invalid("num_experts_per_tok", n_experts_active, format!("at most {n_experts}"));
    }
    if n_groups > n_experts || !n_experts.is_multiple_of(n_groups) {
        return invalid("n_group", n_groups, format!("a divisor of {n_experts}"));
    }
    if n_groups_active > n_groups {
        return invalid("topk_group", n_groups_active, format!("at most {n_groups}"));
    }
    if n_experts_active > n_experts / n_groups * n_groups_active {
        return invalid(
            "num_experts_per_tok",
            n_experts_active,
            format!(
                "at most the {} of the selected groups",
                n_experts / n_groups * n_groups_active
            ),
        );
    }
    Ok(())
}

fn n_layers(config: &Config<'_>) -> Result<usize, ConfigError> {
    config
        .uint("num_hidden_layers", 1, LAYER_CAP)?
        .ok_or(ConfigError::Missing { field: "num_hidden_layers" })
}

fn glm_moe_dsa(config: &Config<'_>) -> Result<ArchSpec, ConfigError> {
    config.only("hidden_act", "silu")?;
    config.only("scoring_func", "sigmoid")?;
    config.only("topk_method", "noaux_tc")?;
    config.refuse_flag("attention_bias")?;
    config.refuse_flag("mlp_bias")?;
    let n_layers = n_layers(config)?;
    let qk_nope_head_dim = config.dimension("qk_nope_head_dim")?;
    let qk_rope_head_dim = config.dimension("qk_rope_head_dim")?;
    let indexer = IndexerSpec {
        n_heads: config.dimension("index_n_heads")?,
        head_dim: config.dimension("index_head_dim")?,
        top_k: config.dimension("index_topk")?,
        key_norm_eps: 1e-6,
    };
    if indexer.head_dim < qk_rope_head_dim {
        return Err(ConfigError::Invalid {
            field: "index_head_dim",
            found: indexer.head_dim.to_string(),
            expected: format!("at least qk_rope_head_dim = {qk_rope_head_dim}"),
        });
    }
    let expert_ff_size = config.dimension("moe_intermediate_size")?;
    let n_shared = config.uint("n_shared_experts", 0, 1024)?.unwrap_or(1);
    Ok(ArchSpec {
        family: Family::GlmMoeDsa,
        vocab_size: config.dimension("vocab_size")?,
        hidden_size: config.dimension("hidden_size")?,
        n_layers,
        max_context: config.dimension_or("max_position_embeddings", 4096)?,
        norm_eps: config.float_or("rms_norm_eps", 1e-5)? as f32,
        attention: AttentionSpec::Latent(LatentAttention {
            n_heads: config.dimension("num_attention_heads")?,
            q_lora_rank: config.dimension("q_lora_rank")?,
            kv_lora_rank: config.dimension("kv_lora_rank")?,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim: config.dimension("v_head_dim")?,
            // The reference builds these norms without the config's epsilon.
            latent_norm_eps: 1e-6,
            score_scale: 1.0 / ((qk_nope_head_dim + qk_rope_head_dim) as f32).sqrt(),
            indexer: Some(indexer),
        }),
        rope: config.rope(qk_rope_head_dim, RopePairing::Interleaved)?,
        layers: glm_layers(config, n_layers)?,
        dense_ff_size: config.dimension("intermediate_size")?,
        expert_ff_size,
        shared_ff_size: expert_ff_size * n_shared,
        router: RouterSpec {
            n_experts: config.n_experts("n_routed_experts")?,
            n_experts_active: config.dimension("num_experts_per_tok")?,
            scoring: RouterScoring::Sigmoid,
            selection_bias: true,
            renormalise: config.flag_or("norm_topk_prob", true)?,
            scale: config.float_or("routed_scaling_factor", 1.0)? as f32,
            n_groups: config.dimension_or("n_group", 1)?,
            n_groups_active: config.dimension_or("topk_group", 1)?,
        },
        tied_embeddings: config.flag_or("tie_word_embeddings", false)?,
        n_mtp_layers: config.uint("num_nextn_predict_layers", 0, 64)?.unwrap_or(0),
        stop_tokens: Vec::new(),
    })
}

/// Which layers are dense and which have an indexer. Without explicit lists: the first
/// `first_k_dense_replace` are dense, and `index_topk_freq`, `index_skip_topk_offset` or
/// `index_topk_pattern` say which layers share a selection.
fn glm_layers(config: &Config<'_>, n_layers: usize) -> Result<Vec<LayerSpec>, ConfigError> {
    let dense = config.uint("first_k_dense_replace", 0, LAYER_CAP)?.unwrap_or(3);
    let feed_forward = match config.per_layer("mlp_layer_types", n_layers)? {
        None => (0..n_layers)
            .map(|l| if l < dense { FeedForward::Dense } else { FeedForward::Experts })
            .collect::<Vec<_>>(),
        Some(list) => list
            .iter()
            .map(|kind| match *kind {
                "dense" => Ok(FeedForward::Dense),
                "sparse" => Ok(FeedForward::Experts),
                other => Err(ConfigError::Unsupported {
                    field: "mlp_layer_types",
                    found: other.to_owned(),
                }),
            })
            .collect::<Result<_, _>>()?,
    };
    let indexers = match config.per_layer("indexer_types", n_layers)? {
        Some(list) => list.iter().map(|kind| indexer_kind(kind)).collect::<Result<Vec<_>, _>>()?,
        None => match config.get("index_topk_pattern").and_then(Value::as_str) {
            Some(pattern) if pattern.len() >= n_layers => pattern
                .chars()
                .take(n_layers)
                .map(|c| indexer_kind(if c == 'F' { "full" } else { "shared" }))
                .collect::<Result<_, _>>()?,
            Some(pattern) => {
                return Err(ConfigError::Invalid {
                    field: "index_topk_pattern",
                    found: pattern.to_owned(),
                    expected: format!("{n_layers} letters"),
                });
            }
            None => {
                let every = config.dimension_or("index_topk_freq", 1)?;
                let offset = config.uint("index_skip_topk_offset", 0, LAYER_CAP)?.unwrap_or(2);
                (0..n_layers)
                    .map(|l| {
                        let full = (l + 1).saturating_sub(offset).is_multiple_of(every);
                        if full { IndexerKind::Full } else { IndexerKind::Shared }
                    })
                    .collect()
            }
        },
    };
    if indexers.first() == Some(&IndexerKind::Shared) {
        return Err(ConfigError::Invalid {
            field: "indexer_types",
            found: "a first layer that shares".to_owned(),
            expected: "a first layer with an indexer of its own".to_owned(),
        });
    }
    Ok(feed_forward
        .into_iter()
        .zip(indexers)
        .map(|(feed_forward, indexer)| LayerSpec { feed_forward, indexer })
        .collect())
}

fn indexer_kind(kind: &str) -> Result<IndexerKind, ConfigError> {
    match kind {
        "full" => Ok(IndexerKind::Full),
        "shared" => Ok(IndexerKind::Shared),
        other => Err(ConfigError::Unsupported { field: "indexer_types", found: other.to_owned() }),
    }
}

fn olmoe(config: &Config<'_>) -> Result<ArchSpec, ConfigError> {
    config.only("hidden_act", "silu")?;
    config.refuse_flag("attention_bias")?;
    let n_layers = n_layers(config)?;
    let hidden_size = config.dimension("hidden_size")?;
    let n_heads = config.dimension("num_attention_heads")?;
    let n_kv_heads = config.dimension_or("num_key_value_heads", n_heads)?;
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(ConfigError::Invalid {
            field: "num_key_value_heads",
            found: n_kv_heads.to_string(),
            expected: format!("a divisor of num_attention_heads = {n_heads}"),
        });
    }
    let head_dim = config.dimension_or("head_dim", hidden_size / n_heads)?;
    if head_dim == 0 {
        return Err(ConfigError::Invalid {
            field: "num_attention_heads",
            found: n_heads.to_string(),
            expected: format!("at most hidden_size = {hidden_size}"),
        });
    }
    let clip = match config.get("clip_qkv") {
        Some(_) => Some(config.float_or("clip_qkv", 1.0)? as f32),
        None => None,
    };
    Ok(ArchSpec {
        family: Family::Olmoe,
        vocab_size: config.dimension("vocab_size")?,
        hidden_size,
        n_layers,
        max_context: config.dimension_or("max_position_embeddings", 4096)?,
        norm_eps: config.float_or("rms_norm_eps", 1e-5)? as f32,
        attention: AttentionSpec::Grouped(GroupedAttention {
            n_heads,
            n_kv_heads,
            head_dim,
            full_width_qk_norm: true,
            clip_qkv: clip,
        }),
        rope: config.rope(head_dim, RopePairing::Halves)?,
        layers: vec![
            LayerSpec { feed_forward: FeedForward::Experts, indexer: IndexerKind::None };
            n_layers
        ],
        dense_ff_size: 0,
        expert_ff_size: config.dimension("intermediate_size")?,
        shared_ff_size: 0,
        router: RouterSpec {
            n_experts: config.n_experts("num_experts")?,
            n_experts_active: config.dimension("num_experts_per_tok")?,
            scoring: RouterScoring::Softmax,
            selection_bias: false,
            renormalise: config.flag_or("norm_topk_prob", false)?,
            scale: 1.0,
            n_groups: 1,
            n_groups_active: 1,
        },
        tied_embeddings: config.flag_or("tie_word_embeddings", false)?,
        n_mtp_layers: 0,
        stop_tokens: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
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
                "unknown family \"mamba\": this build runs glm_moe_dsa, olmoe",
            ),
            (&OLMOE.replace("\"vocab_size\":320,", ""), "lacks vocab_size"),
            (&OLMOE.replace(":320", ":0"), "vocab_size = 0"),
            (&OLMOE.replace(":320", ":-3"), "vocab_size = -3"),
            (&OLMOE.replace(":320", ":18446744073709551615"), "vocab_size"),
            (&OLMOE.replace("\"num_experts\":16", "\"num_experts\":3"), "num_experts_per_tok = 4"),
            (&OLMOE.replace("\"default\"", "\"yarn\""), "rope_type"),
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
}

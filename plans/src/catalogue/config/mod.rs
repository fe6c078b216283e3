//! From a published config.json to an `ArchSpec`. Owns every name that published configs use;
//! those names appear nowhere else. Opens no file.
//!
//! What sizes depend on is read strictly: a value that makes no sense is an error that names the
//! field. A value that only changes the arithmetic, in a way that `ArchSpec` cannot say, is noted in
//! `ArchSpec::undescribed`: such a model is planned, and refused by whoever would run it.

mod grouped;
mod latent;
mod rope;
#[cfg(test)]
mod tests;

use std::cell::RefCell;

use serde_json::Value;

use crate::spec::{ArchSpec, Family, FeedForward, LayerSpec, RouterSpec, Undescribed};

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
    #[error("unknown family {model_type:?}: this build knows {}", known_families())]
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
    /// A value that tensors or sizes depend on in a way that this build does not know.
    #[error("config.json asks for {field} = {found}, which this build cannot size")]
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
struct Config<'a> {
    map: &'a serde_json::Map<String, Value>,
    /// Values that `ArchSpec` cannot say.
    undescribed: RefCell<Vec<Undescribed>>,
}

impl<'a> Config<'a> {
    fn new(map: &'a serde_json::Map<String, Value>) -> Self {
        Self { map, undescribed: RefCell::new(Vec::new()) }
    }

    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    /// Notes a value that `ArchSpec` cannot say.
    fn note(&self, field: &str, value: impl Into<String>) {
        let (field, value) = (field.to_owned(), value.into());
        self.undescribed.borrow_mut().push(Undescribed { field, value });
    }

    /// The first of some names of one field that the config has; the first of all if it has none.
    fn name_of(&self, names: &[&'static str; 2]) -> &'static str {
        if self.get(names[0]).is_none() && self.get(names[1]).is_some() {
            names[1]
        } else {
            names[0]
        }
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

    /// Routed experts of a layer, by the family's own name or by the common one.
    fn n_experts(&self, name: &'static str) -> Result<usize, ConfigError> {
        let field = self.name_of(&[name, "num_local_experts"]);
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

    /// Notes a field whose value is not the one that `ArchSpec` implies.
    fn expect(&self, field: &'static str, implied: &str) {
        match self.get(field) {
            None => {}
            Some(Value::String(found)) if found == implied => {}
            Some(Value::String(other)) => self.note(field, other.clone()),
            Some(other) => self.note(field, other.to_string()),
        }
    }

    /// Refuses a flag that asks for tensors which this build does not know.
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

    /// Layers of multi-token prediction that the config promises.
    fn n_mtp_layers(&self) -> Result<Option<usize>, ConfigError> {
        let field = self.name_of(&["num_nextn_predict_layers", "num_mtp_layers"]);
        self.uint(field, 0, 64)
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
    let config = Config::new(map);
    let model_type = model_type(map);
    let family = Family::ALL.into_iter().find(|f| f.model_type() == model_type);
    let mut spec = match family {
        Some(Family::GlmMoeDsa) => latent::glm_moe_dsa(&config)?,
        Some(family @ (Family::DeepseekV2 | Family::DeepseekV3 | Family::KimiK2)) => {
            latent::deepseek(&config, family)?
        }
        Some(Family::LongcatFlash) => latent::longcat_flash(&config)?,
        Some(Family::Olmoe) => grouped::olmoe(&config)?,
        Some(Family::Qwen3Moe) => grouped::qwen3_moe(&config)?,
        Some(Family::Glm4Moe) => grouped::glm4_moe(&config)?,
        Some(Family::Mixtral) => grouped::mixtral(&config)?,
        Some(Family::GptOss) => grouped::gpt_oss(&config)?,
        None => return Err(ConfigError::UnknownFamily { model_type: model_type.to_owned() }),
    };
    spec.stop_tokens = stop_tokens(&value);
    spec.undescribed = config.undescribed.into_inner();
    check_router(&spec.router)?;
    Ok(spec)
}

/// The family that a config declares; empty where it declares none.
fn model_type(map: &serde_json::Map<String, Value>) -> &str {
    map.get("model_type").and_then(Value::as_str).unwrap_or("")
}

/// The family that a config declares, known or not; empty where there is none to be read.
#[must_use]
pub fn declared_family(json: &[u8]) -> String {
    match serde_json::from_slice(json) {
        Ok(Value::Object(map)) => model_type(&map).to_owned(),
        _ => String::new(),
    }
}

fn check_router(router: &RouterSpec) -> Result<(), ConfigError> {
    let invalid = |field, found: usize, expected: String| {
        Err(ConfigError::Invalid { field, found: found.to_string(), expected })
    };
    let RouterSpec { n_experts, n_experts_active, n_groups, n_groups_active, .. } = *router;
    let n_outputs = router.n_outputs();
    if n_experts_active > n_outputs {
        return invalid("num_experts_per_tok", n_experts_active, format!("at most {n_outputs}"));
    }
    if n_groups > n_experts || !n_experts.is_multiple_of(n_groups) {
        return invalid("n_group", n_groups, format!("a divisor of {n_experts}"));
    }
    if n_groups_active > n_groups {
        return invalid("topk_group", n_groups_active, format!("at most {n_groups}"));
    }
    if n_groups > 1 && n_experts_active > n_experts / n_groups * n_groups_active {
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

fn n_layers(config: &Config<'_>, field: &'static str) -> Result<usize, ConfigError> {
    config.uint(field, 1, LAYER_CAP)?.ok_or(ConfigError::Missing { field })
}

/// Dense layers first, as many as `first_k_dense_replace`, then experts in every `moe_layer_freq`th.
fn dense_first(
    config: &Config<'_>,
    n_layers: usize,
    default: usize,
) -> Result<Vec<FeedForward>, ConfigError> {
    let dense = config.uint("first_k_dense_replace", 0, LAYER_CAP)?.unwrap_or(default);
    let every = config.dimension_or("moe_layer_freq", 1)?;
    let routes = |layer: usize| layer >= dense && layer.is_multiple_of(every);
    Ok((0..n_layers)
        .map(|layer| if routes(layer) { FeedForward::Experts } else { FeedForward::Dense })
        .collect())
}

fn plain_layers(feed_forward: Vec<FeedForward>) -> Vec<LayerSpec> {
    feed_forward.into_iter().map(LayerSpec::plain).collect()
}

/// The width of a dense feed-forward, which a config may leave out where no layer has one.
fn dense_ff_size(
    config: &Config<'_>,
    field: &'static str,
    layers: &[LayerSpec],
) -> Result<usize, ConfigError> {
    if layers.iter().all(|layer| layer.feed_forward == FeedForward::Experts) {
        return Ok(0);
    }
    config.dimension(field)
}

//! Rotary embeddings as configs write them: the older `rope_scaling` beside `rope_theta`, and the newer
//! `rope_parameters` that holds both.

use serde_json::Value;

use super::{Config, ConfigError};
use crate::spec::{RopePairing, RopeScaling, RopeSpec};

/// A rotary embedding and what it asks of the scores.
pub(super) struct Rope {
    pub(super) spec: RopeSpec,
    /// Factor on the scores of latent attention; 1 where there is none.
    pub(super) score_factor: f64,
}

impl Config<'_> {
    /// The share of a head that is rotated.
    pub(super) fn partial_rotary_factor(&self, default: f64) -> Result<f64, ConfigError> {
        let field = "partial_rotary_factor";
        let outer = self.float_or(field, default)?;
        let factor = match nested(self)? {
            Some(nested) => nested.float_or(field, outer)?,
            None => outer,
        };
        if factor > 1.0 {
            return Err(ConfigError::Invalid {
                field,
                found: factor.to_string(),
                expected: "at most 1".to_owned(),
            });
        }
        Ok(factor)
    }

    /// The rotary embedding of `dim` elements.
    pub(super) fn rope(
        &self,
        dim: usize,
        pairing: RopePairing,
        default_theta: f64,
    ) -> Result<Rope, ConfigError> {
        if dim == 0 || !dim.is_multiple_of(2) {
            return Err(ConfigError::Invalid {
                field: "head_dim",
                found: dim.to_string(),
                expected: "an even rotary width".to_owned(),
            });
        }
        let outer = self.float_or("rope_theta", default_theta)?;
        let Some(nested) = nested(self)? else {
            let spec = RopeSpec { theta: outer, dim, pairing, scaling: RopeScaling::None };
            return Ok(Rope { spec, score_factor: 1.0 });
        };
        let theta = nested.float_or("rope_theta", outer)?;
        let kind = ["rope_type", "type"].iter().find_map(|field| nested.get(field));
        let (scaling, score_factor) = match kind.map(|kind| kind.as_str().ok_or(kind)) {
            None | Some(Ok("default")) => (RopeScaling::None, 1.0),
            Some(Ok("yarn")) => self.yarn(&nested)?,
            Some(Ok(other)) => {
                self.note("rope_type", other);
                (RopeScaling::None, 1.0)
            }
            Some(Err(other)) => {
                return Err(ConfigError::Invalid {
                    field: "rope_type",
                    found: other.to_string(),
                    expected: "a name such as \"default\" or \"yarn\"".to_owned(),
                });
            }
        };
        Ok(Rope { spec: RopeSpec { theta, dim, pairing, scaling }, score_factor })
    }

    /// YaRN, and the square of its temperature where `mscale_all_dim` asks for it. As in the
    /// reference: the factor on cosines and sines is given, or the ratio of both temperatures, or
    /// `0.1 ln(factor) + 1`.
    fn yarn(&self, nested: &Config<'_>) -> Result<(RopeScaling, f64), ConfigError> {
        let max_context = self.dimension_or("max_position_embeddings", 4096)?;
        let original_context =
            nested.dimension_or("original_max_position_embeddings", max_context)?;
        let factor = nested.float_or("factor", max_context as f64 / original_context as f64)?;
        let temperature = |mscale: f64| {
            if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
        };
        let optional = |field| match nested.get(field).map(Value::as_f64) {
            // Zero stands for absent, as in the reference.
            None | Some(Some(0.0)) => Ok(None),
            Some(_) => nested.float_or(field, 1.0).map(Some),
        };
        let (mscale, mscale_all_dim) = (optional("mscale")?, optional("mscale_all_dim")?);
        let attention_factor = match (optional("attention_factor")?, mscale, mscale_all_dim) {
            (Some(given), ..) => given,
            (None, Some(mscale), Some(all)) => temperature(mscale) / temperature(all),
            (None, ..) => temperature(1.0),
        };
        let scaling = RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast: nested.float_or("beta_fast", 32.0)?,
            beta_slow: nested.float_or("beta_slow", 1.0)?,
            truncate: nested.flag_or("truncate", true)?,
            attention_factor,
        };
        Ok((scaling, mscale_all_dim.map_or(1.0, |all| temperature(all).powi(2))))
    }
}

/// The object that holds a rotary embedding's values; another kind of value would be another embedding than
/// the model was trained with.
fn nested<'a>(config: &Config<'a>) -> Result<Option<Config<'a>>, ConfigError> {
    let fields = ["rope_parameters", "rope_scaling"];
    let found = fields.into_iter().find_map(|field| Some((field, config.get(field)?)));
    let Some((field, value)) = found else { return Ok(None) };
    match value.as_object() {
        Some(object) => Ok(Some(Config::new(object))),
        None => Err(ConfigError::Invalid {
            field,
            found: value.to_string(),
            expected: "an object such as {\"rope_type\": \"default\"}".to_owned(),
        }),
    }
}

//! What a sidecar keeps, as bytes and back. Owns the check that all of it is possible for a model of
//! this config: roles and shapes are not kept but follow from it, and no place lies outside its file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::assemble;
use super::super::{Catalogue, ExpertLayout, Shard, Span, StoredType, Tensor, Warning};
use super::experts::{self, Placed};
use crate::checks;
use crate::spec::ArchSpec;
use crate::units::Bytes;

/// A catalogue but for what the config says.
#[derive(Serialize, Deserialize)]
struct Body {
    n_mtp_layers_present: u32,
    fingerprint: String,
    unrecognised_bytes: u64,
    ignored_bytes: u64,
    n_tensors: u32,
    /// Id of the check, finding, remedy.
    warnings: Vec<(String, String, String)>,
    /// File name and size.
    shards: Vec<(String, u64)>,
    /// In the order in which the architecture names them; `None` for one that may be absent and is.
    tensors: Vec<Option<(StoredType, KeptSpan, Option<KeptSpan>)>>,
    patterns: Vec<ExpertLayout>,
    /// Pattern, shard and offset of the first byte.
    experts: Vec<(u32, u32, u64)>,
}

/// Shard, offset, length.
type KeptSpan = (u32, u64, u64);

fn kept(span: Span) -> KeptSpan {
    (span.shard, span.offset, span.bytes)
}

/// A catalogue as the body of a sidecar; `None` if it cannot be kept.
#[must_use]
pub fn encode(catalogue: &Catalogue) -> Option<Vec<u8>> {
    let name = |shard: &Shard| Some((shard.path.file_name()?.to_str()?.to_owned(), shard.bytes));
    let mut left = catalogue.tensors.iter().peekable();
    let weights = assemble::weights(&catalogue.spec, catalogue.n_mtp_layers_present);
    let tensors = weights
        .iter()
        .map(|weight| {
            let tensor = left.next_if(|tensor| tensor.role == weight.role)?;
            Some((tensor.stored, kept(tensor.weight), tensor.scales.map(kept)))
        })
        .collect();
    if left.next().is_some() {
        return None;
    }
    let (patterns, placed) = experts::take_apart(&catalogue.experts);
    let body = Body {
        n_mtp_layers_present: u32::try_from(catalogue.n_mtp_layers_present).ok()?,
        fingerprint: catalogue.fingerprint.clone(),
        unrecognised_bytes: catalogue.unrecognised_bytes.0,
        ignored_bytes: catalogue.ignored_bytes.0,
        n_tensors: u32::try_from(catalogue.n_tensors).ok()?,
        warnings: catalogue
            .warnings
            .iter()
            .map(|w| (w.check.to_owned(), w.finding.clone(), w.remedy.clone()))
            .collect(),
        shards: catalogue.shards.iter().map(name).collect::<Option<_>>()?,
        tensors,
        patterns,
        experts: placed.iter().map(|p| (p.pattern, p.shard, p.offset)).collect(),
    };
    postcard::to_stdvec(&body).ok()
}

/// The catalogue of a model of this config in `directory`, from the body of a sidecar; `None` unless
/// all of it is possible. The size of the tokenizer is not kept.
#[must_use]
pub fn decode(body: &[u8], spec: &ArchSpec, directory: &Path) -> Option<Catalogue> {
    let (body, rest) = postcard::take_from_bytes::<Body>(body).ok()?;
    let n_mtp = body.n_mtp_layers_present as usize;
    let is_fingerprint =
        body.fingerprint.len() == 32 && body.fingerprint.bytes().all(|b| b.is_ascii_hexdigit());
    if !rest.is_empty() || !is_fingerprint || !assemble::may_have_mtp_layers(spec, n_mtp) {
        return None;
    }
    let is_file_name = |name: &str| !name.is_empty() && !name.contains(['/', '\\']) && name != "..";
    let shards: Vec<Shard> = body
        .shards
        .iter()
        .map(|(name, bytes)| {
            is_file_name(name).then(|| Shard { path: directory.join(name), bytes: *bytes })
        })
        .collect::<Option<_>>()?;
    let tensors = tensors(&body, spec, &shards)?;
    if !body.patterns.iter().all(|pattern| experts::is_sound(pattern, spec)) {
        return None;
    }
    let (expert_base, n_experts) = assemble::expert_base(spec, n_mtp);
    if body.experts.len() != n_experts {
        return None;
    }
    let experts = body
        .experts
        .iter()
        .map(|&(pattern, shard, offset)| {
            experts::put_together(&body.patterns, &Placed { pattern, shard, offset }, &shards)
        })
        .collect::<Option<_>>()?;
    let warning = |(check, finding, remedy): (String, String, String)| {
        let check = checks::IDS.iter().copied().find(|id| *id == check)?;
        Some(Warning { check, finding, remedy })
    };
    Some(Catalogue {
        directory: directory.to_owned(),
        spec: spec.clone(),
        shards,
        tensors,
        experts,
        n_mtp_layers_present: n_mtp,
        fingerprint: body.fingerprint,
        unrecognised_bytes: Bytes(body.unrecognised_bytes),
        ignored_bytes: Bytes(body.ignored_bytes),
        n_tensors: body.n_tensors as usize,
        tokenizer_bytes: Bytes(0),
        warnings: body.warnings.into_iter().map(warning).collect::<Option<_>>()?,
        expert_base,
    })
}

fn tensors(body: &Body, spec: &ArchSpec, shards: &[Shard]) -> Option<Vec<Tensor>> {
    let weights = assemble::weights(spec, body.n_mtp_layers_present as usize);
    if weights.len() != body.tensors.len() {
        return None;
    }
    let span = |(shard, offset, bytes): KeptSpan| {
        let end = offset.checked_add(bytes)?;
        let file = shards.get(shard as usize)?;
        (end <= file.bytes).then_some(Span { shard, offset, bytes })
    };
    let mut tensors = Vec::with_capacity(weights.len());
    for (weight, kept) in weights.iter().zip(&body.tensors) {
        let Some((stored, at, scales)) = *kept else {
            if weight.is_required {
                return None;
            }
            continue;
        };
        let (rows, cols) = weight.shape;
        let at = span(at)?;
        let scales = match scales {
            Some(scales) => Some(span(scales)?),
            None => None,
        };
        let scale_bytes = scales.map_or(0, |s| s.bytes);
        let is_whole = Some(at.bytes) == experts::weight_bytes(stored, rows, cols)
            && experts::has_scales(stored, (rows, cols), scale_bytes);
        if !is_whole {
            return None;
        }
        tensors.push(Tensor { role: weight.role, rows, cols, stored, weight: at, scales });
    }
    Some(tensors)
}

//! From headers to a catalogue: every tensor gets its role, its logical shape and its stored type,
//! and what the architecture needs is checked to be there.

mod found;
mod packed;
mod required;
mod stored;

use std::collections::BTreeMap;

use self::found::Found;
pub(super) use self::required::required_roles;
use self::required::{expected_shape, layer_roles, optional_roles};
use super::roles::{self, Role};
use super::shards::ReadShards;
use super::source::Source;
use super::{Catalogue, CatalogueError, ExpertLayout, Shard, Warning};
use crate::spec::ArchSpec;
use crate::units::Bytes;

/// Multi-token-prediction layers looked for after the last decoder layer.
const MTP_LAYER_CAP: usize = 64;

/// Builds the catalogue of a model from its headers.
pub(super) fn assemble(
    source: &dyn Source,
    spec: ArchSpec,
    read: &ReadShards<'_>,
) -> Result<Catalogue, CatalogueError> {
    let shards: Vec<Shard> = read
        .names
        .iter()
        .zip(&read.headers)
        .map(|(name, header)| Shard { path: source.locate(name), bytes: header.file_bytes })
        .collect();
    let mut found = Found::collect(&spec, read, &shards)?;
    let n_mtp_present = whole_mtp_layers(&spec, &found);
    let n_layers_present = spec.n_layers + n_mtp_present;
    let mut tensors = Vec::new();
    for role in required_roles(&spec, n_layers_present) {
        match found.take(&spec, role)? {
            Some(tensor) => tensors.push(tensor),
            None => return Err(missing(&spec, role, shards.len())),
        }
    }
    for role in optional_roles(&spec, n_layers_present) {
        // What cannot be read is left: nothing needs it.
        if found.is_whole(role) {
            tensors.extend(found.take(&spec, role)?);
        }
    }
    let (experts, expert_base) = take_experts(&mut found, &spec, n_layers_present)?;
    let left = found.leave(&spec);
    let mut warnings = unknown_types(read);
    warnings.extend(mtp_warning(&spec, n_mtp_present));
    warnings.extend(left.warning(&spec));
    Ok(Catalogue {
        directory: source.label().to_owned(),
        n_mtp_layers_present: n_mtp_present,
        spec,
        shards,
        tensors,
        experts,
        fingerprint: fingerprint(read),
        unrecognised_bytes: left.unrecognised,
        ignored_bytes: left.ignored,
        n_tensors: read.headers.iter().map(|h| h.n_tensors()).sum(),
        tokenizer_bytes: Bytes(0),
        warnings,
        expert_base,
    })
}

/// Types that this build does not know, of tensors that turned out not to be needed.
fn unknown_types(read: &ReadShards<'_>) -> Vec<Warning> {
    let mut types: BTreeMap<String, (usize, &str)> = BTreeMap::new();
    for tensor in read.headers.iter().flat_map(|header| header.tensors()) {
        if !tensor.dtype.is_known() {
            let (n, first) = types.entry(tensor.dtype.to_string()).or_insert((0, tensor.name));
            *n += 1;
            *first = tensor.name.min(first);
        }
    }
    let warning = |(name, (n, first)): (String, (usize, &str))| Warning {
        check: "model.types",
        finding: match n {
            1 => format!("tensor {first} is of the unknown type {name}"),
            n => format!("{n} tensors are of the unknown type {name}, such as {first}"),
        },
        remedy: "nothing: no part of the model needs them".to_owned(),
    };
    types.into_iter().map(warning).collect()
}

fn missing(spec: &ArchSpec, role: Role, n_shards: usize) -> CatalogueError {
    CatalogueError::MissingTensor {
        tensor: roles::name_of(spec.family, spec.n_layers, role),
        shards: n_shards,
    }
}

/// Hash of every header and file size in order of file name; names and places do not count.
fn fingerprint(read: &ReadShards<'_>) -> String {
    let mut hasher = blake3::Hasher::new();
    for header in &read.headers {
        hasher.update(&header.hash);
        hasher.update(&header.file_bytes.to_le_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// How many multi-token-prediction layers are present and whole.
fn whole_mtp_layers(spec: &ArchSpec, found: &Found<'_>) -> usize {
    if spec.mtp_layer.is_none() {
        return 0;
    }
    (0..MTP_LAYER_CAP)
        .take_while(|extra| {
            let layer = spec.n_layers + extra;
            layer_roles(spec, layer).into_iter().all(|role| found.is_whole(role))
                && (!spec.is_expert_layer(layer) || found.has_whole_experts(spec, layer))
        })
        .count()
}

/// The layouts of all experts, and where those of each layer start.
type Experts = (Vec<ExpertLayout>, Vec<Option<usize>>);

fn take_experts(
    found: &mut Found<'_>,
    spec: &ArchSpec,
    n_layers_present: usize,
) -> Result<Experts, CatalogueError> {
    let mut experts = Vec::new();
    let mut expert_base = vec![None; n_layers_present];
    for (layer, base) in expert_base.iter_mut().enumerate() {
        if spec.is_expert_layer(layer) {
            *base = Some(experts.len());
            found.take_experts(spec, layer, &mut experts)?;
        }
    }
    Ok((experts, expert_base))
}

/// A weight that is no expert's.
pub(super) struct Weight {
    pub(super) role: Role,
    /// `(rows, cols)`.
    pub(super) shape: (u64, u64),
    /// No model of the architecture is without it.
    pub(super) is_required: bool,
}

/// Every weight but the experts' of a model with so many multi-token-prediction layers, in the order
/// of [`Catalogue::tensors`].
pub(super) fn weights(spec: &ArchSpec, n_mtp_present: usize) -> Vec<Weight> {
    let n_layers_present = spec.n_layers + n_mtp_present;
    let weight =
        |is_required| move |role| Weight { role, shape: expected_shape(spec, role), is_required };
    let required = required_roles(spec, n_layers_present).into_iter().map(weight(true));
    required.chain(optional_roles(spec, n_layers_present).into_iter().map(weight(false))).collect()
}

/// Whether a model can have so many whole multi-token-prediction layers.
pub(super) fn may_have_mtp_layers(spec: &ArchSpec, n_mtp_present: usize) -> bool {
    n_mtp_present == 0 || spec.mtp_layer.is_some() && n_mtp_present <= MTP_LAYER_CAP
}

/// For each layer where its experts start in [`Catalogue::experts`], and how many there are.
pub(super) fn expert_base(spec: &ArchSpec, n_mtp_present: usize) -> (Vec<Option<usize>>, usize) {
    let mut n_experts = 0;
    let base = (0..spec.n_layers + n_mtp_present)
        .map(|layer| {
            spec.is_expert_layer(layer).then(|| {
                n_experts += spec.router.n_experts;
                n_experts - spec.router.n_experts
            })
        })
        .collect();
    (base, n_experts)
}

fn mtp_warning(spec: &ArchSpec, n_mtp_present: usize) -> Option<Warning> {
    let declared = spec.n_mtp_layers.filter(|declared| *declared != n_mtp_present);
    declared.map(|declared| Warning {
        check: "model.mtp",
        finding: format!(
            "config.json declares {declared} multi-token-prediction layers, the shards hold {n_mtp_present}"
        ),
        remedy: "nothing: what is present is counted".to_owned(),
    })
}

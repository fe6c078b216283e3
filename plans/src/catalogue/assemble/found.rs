//! All tensors of all shards by role: collected once, then taken out by whoever needs them. What is
//! left has no role in the model.

use std::collections::HashMap;

use super::missing;
use super::required::expected_shape;
use super::stored::{self, FusedForm};
use crate::catalogue::container::{Declared, SaidOf, Subject};
use crate::catalogue::header::RawTensor;
use crate::catalogue::layout::{self, ExpertForm, FoundMatrix};
use crate::catalogue::roles::{self, FusedTensor, Part, Projection, Role};
use crate::catalogue::shards::ReadShards;
use crate::catalogue::{CatalogueError, ExpertLayout, Shard, Span, StoredType, Tensor, Warning};
use crate::spec::ArchSpec;
use crate::units::Bytes;

/// A tensor as found, before its role gives it a logical shape.
#[derive(Clone, Copy)]
pub(super) struct FoundTensor<'a> {
    pub(super) raw: RawTensor<'a>,
    pub(super) span: Span,
}

/// The tensors that store one weight.
#[derive(Clone, Copy, Default)]
pub(super) struct Parts<'a> {
    pub(super) weight: Option<FoundTensor<'a>>,
    pub(super) row_scales: Option<FoundTensor<'a>>,
    pub(super) block_scales: Option<FoundTensor<'a>>,
}

impl<'a> Parts<'a> {
    fn part_mut(&mut self, part: Part) -> &mut Option<FoundTensor<'a>> {
        match part {
            Part::Weight => &mut self.weight,
            Part::RowScales => &mut self.row_scales,
            Part::BlockScales => &mut self.block_scales,
        }
    }

    fn iter(self) -> impl Iterator<Item = FoundTensor<'a>> {
        [self.weight, self.row_scales, self.block_scales].into_iter().flatten()
    }
}

/// One tensor of one expert. Sorted, those of an expert stand together, in a fixed order.
struct ExpertTensor<'a> {
    layer: u32,
    expert: u32,
    projection: Projection,
    part: Part,
    tensor: FoundTensor<'a>,
}

impl ExpertTensor<'_> {
    fn key(&self) -> (u32, u32, Projection, Part) {
        (self.layer, self.expert, self.projection, self.part)
    }
}

/// All tensors of all shards by role.
pub(super) struct Found<'a> {
    dense: HashMap<Role, Parts<'a>>,
    /// Tensors of experts in the order of their keys; a list rather than a table, for it is as long as
    /// the files make it and no longer, whatever numbers their names hold.
    experts: Vec<ExpertTensor<'a>>,
    /// Experts before this one have been taken or passed over.
    next_expert: usize,
    /// Tensors that were passed over.
    left: Vec<FoundTensor<'a>>,
    unrecognised: Vec<RawTensor<'a>>,
    padding_bytes: u64,
    /// Of each shard, what its metadata say.
    declared: Vec<Declared>,
}

impl<'a> Found<'a> {
    pub(super) fn collect(
        spec: &ArchSpec,
        read: &'a ReadShards<'_>,
        shards: &[Shard],
    ) -> Result<Self, CatalogueError> {
        let mut found = Self {
            dense: HashMap::new(),
            experts: Vec::new(),
            next_expert: 0,
            left: Vec::new(),
            unrecognised: Vec::new(),
            padding_bytes: 0,
            declared: read.headers.iter().map(|h| Declared::of(&h.metadata)).collect(),
        };
        let twice = |first: FoundTensor<'_>, second: FoundTensor<'_>| {
            let path = |t: FoundTensor<'_>| {
                shards.get(t.span.shard as usize).map(|s| s.path.clone()).unwrap_or_default()
            };
            CatalogueError::TensorTwice {
                tensor: second.raw.name.to_owned(),
                first: path(first),
                second: path(second),
            }
        };
        for (index, header) in read.headers.iter().enumerate() {
            for raw in header.tensors() {
                let bytes = raw.end - raw.start;
                let span =
                    Span { shard: index as u32, offset: header.data_start + raw.start, bytes };
                let tensor = FoundTensor { raw, span };
                match roles::role_of(spec.family, spec.n_layers, raw.name) {
                    Some((Role::Padding, _)) => found.padding_bytes += bytes,
                    Some((Role::Expert { layer, expert, projection }, part)) => {
                        found.experts.push(ExpertTensor {
                            layer,
                            expert,
                            projection,
                            part,
                            tensor,
                        });
                    }
                    Some((role, part)) => {
                        let slot = found.dense.entry(role).or_default().part_mut(part);
                        if let Some(first) = slot.replace(tensor) {
                            return Err(twice(first, tensor));
                        }
                    }
                    None => found.unrecognised.push(raw),
                }
            }
        }
        // Stable, so that of two tensors of one name the later file is blamed; files are nearly in
        // order already.
        found.experts.sort_by_key(ExpertTensor::key);
        let same = found.experts.windows(2).find(|pair| pair[0].key() == pair[1].key());
        match same {
            Some(pair) => Err(twice(pair[0].tensor, pair[1].tensor)),
            None => Ok(found),
        }
    }

    /// Whether a weight is there, with its scales.
    pub(super) fn is_whole(&self, role: Role) -> bool {
        self.dense.get(&role).is_some_and(stored::is_whole)
    }

    /// Whether every routed expert of a layer is there, with its scales.
    pub(super) fn has_whole_experts(&self, spec: &ArchSpec, layer: usize) -> bool {
        let layer = layer as u32;
        let mut at = self.experts.partition_point(|t| t.layer < layer);
        (0..spec.router.n_experts as u32).all(|expert| {
            let (parts, next) = self.expert_at(at, (layer, expert));
            at = next;
            parts.iter().all(stored::is_whole)
        })
    }

    /// Takes one weight out, with its logical shape and stored type.
    pub(super) fn take(
        &mut self,
        spec: &ArchSpec,
        role: Role,
    ) -> Result<Option<Tensor>, CatalogueError> {
        let Some(parts) = self.dense.remove(&role) else { return Ok(None) };
        let Some(weight) = parts.weight else {
            self.left.extend(parts.iter());
            return Ok(None);
        };
        let (rows, cols) = expected_shape(spec, role);
        let said = self.said(spec, role, weight);
        let (stored, scales) = stored::stored(weight, &parts, (rows, cols), said)?;
        self.leave_unused(&parts, scales);
        Ok(Some(Tensor { role, rows, cols, stored, weight: weight.span, scales }))
    }

    /// What the metadata of its file say of a weight.
    fn said(&self, spec: &ArchSpec, role: Role, weight: FoundTensor<'_>) -> Option<SaidOf> {
        let subject = Subject::of(role, spec.n_layers)?;
        Some(self.declared.get(weight.span.shard as usize)?.said(subject))
    }

    /// Scales that the weight's type has no use for are left over.
    fn leave_unused(&mut self, parts: &Parts<'a>, used: Option<Span>) {
        let scales = [parts.row_scales, parts.block_scales].into_iter().flatten();
        self.left.extend(scales.filter(|s| Some(s.span) != used));
    }

    /// Takes all routed experts of a layer out. Layers are to be asked for in ascending order.
    pub(super) fn take_experts(
        &mut self,
        spec: &ArchSpec,
        layer: usize,
        experts: &mut Vec<ExpertLayout>,
    ) -> Result<(), CatalogueError> {
        if roles::has_fused_experts(spec.family) {
            return self.take_fused(spec, layer, experts);
        }
        for expert in 0..spec.router.n_experts {
            let key = (layer as u32, expert as u32);
            while let Some(t) = self.experts.get(self.next_expert)
                && (t.layer, t.expert) < key
            {
                self.left.push(t.tensor);
                self.next_expert += 1;
            }
            let (parts, next) = self.expert_at(self.next_expert, key);
            self.next_expert = next;
            experts.push(self.lay_out(spec, key, &parts)?);
        }
        Ok(())
    }

    /// The tensors of an expert, gate, up and down, if they start at `at`, and where they end.
    fn expert_at(&self, at: usize, key: (u32, u32)) -> ([Parts<'a>; 3], usize) {
        let mut parts = [Parts::default(); 3];
        let tensors = self.experts.get(at..).unwrap_or(&[]);
        let n = tensors.iter().take_while(|t| (t.layer, t.expert) == key).count();
        for t in &tensors[..n] {
            let of = &mut parts[projection_index(t.projection)];
            *of.part_mut(t.part) = Some(t.tensor);
        }
        (parts, at + n)
    }

    fn lay_out(
        &mut self,
        spec: &ArchSpec,
        (layer, expert): (u32, u32),
        parts: &[Parts<'a>; 3],
    ) -> Result<ExpertLayout, CatalogueError> {
        let mut matrix = |projection| {
            let role = Role::Expert { layer, expert, projection };
            let parts = &parts[projection_index(projection)];
            let weight = parts.weight.ok_or_else(|| missing(spec, role, self.declared.len()))?;
            let said = self.said(spec, role, weight);
            let shape = expected_shape(spec, role);
            let (stored, scales) = stored::stored(weight, parts, shape, said)?;
            self.leave_unused(parts, scales);
            Ok(FoundMatrix { stored, weights: weight.span, scales })
        };
        Ok(layout::separate([
            matrix(Projection::Gate)?,
            matrix(Projection::Up)?,
            matrix(Projection::Down)?,
        ]))
    }

    /// Cuts the tensors that hold all experts of a layer into experts.
    fn take_fused(
        &mut self,
        spec: &ArchSpec,
        layer: usize,
        experts: &mut Vec<ExpertLayout>,
    ) -> Result<(), CatalogueError> {
        let (hidden, ff) = (spec.hidden_size as u64, spec.expert_ff_size as u64);
        let (gate_up, gate_up_form) =
            self.take_fused_matrix(spec, layer, FusedTensor::GateUp, (2 * ff, hidden))?;
        let (down, down_form) =
            self.take_fused_matrix(spec, layer, FusedTensor::Down, (hidden, ff))?;
        let form = match (gate_up_form, down_form) {
            (FusedForm::Blocks, FusedForm::Blocks) => ExpertForm::Interleaved,
            (FusedForm::Transposed(_), FusedForm::Transposed(_)) => {
                ExpertForm::InterleavedTransposed
            }
            (FusedForm::Blocks, FusedForm::Transposed(_))
            | (FusedForm::Transposed(_), FusedForm::Blocks) => return Err(stored::mixed(down.0)),
        };
        let biases = if spec.expert_biases {
            let gate_up = self.take_fused_bias(spec, layer, FusedTensor::GateUpBias, 2 * ff)?;
            let down = self.take_fused_bias(spec, layer, FusedTensor::DownBias, hidden)?;
            if gate_up.1 != down.1 {
                return Err(stored::mixed(down.0));
            }
            Some((gate_up.1, [gate_up.0.span, down.0.span]))
        } else {
            None
        };
        let n_experts = spec.router.n_experts as u64;
        experts.extend((0..n_experts).map(|expert| {
            let slice = |span: Span| {
                let bytes = span.bytes / n_experts;
                Span { shard: span.shard, offset: span.offset + expert * bytes, bytes }
            };
            let matrix = |(weight, scales): (FoundTensor<'_>, Option<Span>), form| FoundMatrix {
                stored: match form {
                    FusedForm::Transposed(stored) => stored,
                    FusedForm::Blocks => StoredType::MxFp4,
                },
                weights: slice(weight.span),
                scales: scales.map(slice),
            };
            layout::fused(
                form,
                [matrix(gate_up, gate_up_form), matrix(down, down_form)],
                biases.map(|(stored, spans)| (stored, spans.map(slice))),
            )
        }));
        Ok(())
    }

    /// A fused matrix with its scales and its form.
    fn take_fused_matrix(
        &mut self,
        spec: &ArchSpec,
        layer: usize,
        tensor: FusedTensor,
        shape: (u64, u64),
    ) -> Result<((FoundTensor<'a>, Option<Span>), FusedForm), CatalogueError> {
        let role = Role::FusedExperts { layer: layer as u32, tensor };
        let parts = self.dense.remove(&role).unwrap_or_default();
        let weight = parts.weight.ok_or_else(|| self.missing_fused(spec, role))?;
        let form = stored::fused(spec, weight, &parts, shape)?;
        let scales = match form {
            FusedForm::Transposed(_) => None,
            FusedForm::Blocks => parts.block_scales.map(|s| s.span),
        };
        self.leave_unused(&parts, scales);
        Ok(((weight, scales), form))
    }

    /// A missing matrix by the name that it would have in this checkpoint.
    fn missing_fused(&self, spec: &ArchSpec, role: Role) -> CatalogueError {
        let is_packed = self.dense.iter().any(|(role, parts)| {
            matches!(role, Role::FusedExperts { .. }) && parts.block_scales.is_some()
        });
        match missing(spec, role, self.declared.len()) {
            CatalogueError::MissingTensor { tensor, shards } if is_packed => {
                CatalogueError::MissingTensor { tensor: tensor + "_blocks", shards }
            }
            other => other,
        }
    }

    fn take_fused_bias(
        &mut self,
        spec: &ArchSpec,
        layer: usize,
        tensor: FusedTensor,
        width: u64,
    ) -> Result<(FoundTensor<'a>, StoredType), CatalogueError> {
        let role = Role::FusedExperts { layer: layer as u32, tensor };
        let parts = self.dense.remove(&role).unwrap_or_default();
        let bias = parts.weight.ok_or_else(|| missing(spec, role, self.declared.len()))?;
        let stored = stored::fused_bias(spec, bias, width)?;
        self.leave_unused(&parts, None);
        Ok((bias, stored))
    }

    /// What nobody took.
    pub(super) fn leave(self, spec: &ArchSpec) -> Left {
        let Self { dense, experts, next_expert, left, unrecognised, padding_bytes, .. } = self;
        // Experts that return their input have no weights that count; some checkpoints carry some.
        let router = &spec.router;
        let is_zero = |t: &FoundTensor<'_>| {
            let role = roles::role_of(spec.family, spec.n_layers, t.raw.name);
            matches!(role, Some((Role::Expert { layer, expert, .. }, _))
                if spec.is_expert_layer(layer as usize)
                    && (router.n_experts..router.n_outputs()).contains(&(expert as usize)))
        };
        let not_taken = experts.get(next_expert..).unwrap_or(&[]).iter().map(|t| t.tensor);
        let dense = dense.into_values().flat_map(Parts::iter);
        let (zero, rest): (Vec<_>, Vec<_>) =
            left.into_iter().chain(not_taken).chain(dense).partition(is_zero);
        let mut names: Vec<RawTensor<'_>> = rest.iter().map(|t| t.raw).collect();
        names.extend(unrecognised);
        let ignored = zero.iter().map(|t| t.span.bytes).sum::<u64>() + padding_bytes;
        Left {
            unrecognised: names.iter().map(|raw| Bytes(raw.end - raw.start)).sum(),
            ignored: Bytes(ignored),
            n_tensors: names.len(),
            first: names.iter().map(|raw| raw.name).min().map(str::to_owned),
        }
    }
}

/// The slot of a projection.
fn projection_index(projection: Projection) -> usize {
    match projection {
        Projection::Gate => 0,
        Projection::Up => 1,
        Projection::Down => 2,
    }
}

/// Tensors without a role in the model.
pub(super) struct Left {
    pub(super) unrecognised: Bytes,
    pub(super) ignored: Bytes,
    n_tensors: usize,
    /// The first by name.
    first: Option<String>,
}

impl Left {
    pub(super) fn warning(&self, spec: &ArchSpec) -> Option<Warning> {
        let first = self.first.as_ref()?;
        Some(Warning {
            check: "model.tensors",
            finding: format!(
                "{} tensors have no role in a {} of this config, such as {first}",
                self.n_tensors,
                spec.family.model_type()
            ),
            remedy: "nothing: they are not loaded".to_owned(),
        })
    }
}

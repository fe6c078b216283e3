//! Where everything goes in the output. Owns which weights become what, the order of tensors, the
//! cut into files, the alignment of experts and the headers; reads and writes nothing.
//!
//! All sizes follow from shapes, so the whole output is known to the byte before any of it is
//! written: headers can come first, and files carry their count in their names.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use tierkeep_plans::catalogue::container::{
    ContainerClass, ContainerPart, MIXED, SOURCE_KEY, WeightKind,
};
use tierkeep_plans::catalogue::header::HEADER_CAP_BYTES;
use tierkeep_plans::catalogue::{
    BlockScale, Catalogue, ExpertForm, ExpertLayout, FusedTensor, Group, Packed, PackedBits,
    Projection, Role, ScaleType, Span, StoredType,
};
use tierkeep_plans::units::{Bytes, round_up};

use super::{Bits, Choices, ConvertError, ConvertOptions, TensorClass};
use crate::support::supports_whole;

/// Where experts start: the page of the page cache and the unit of direct reads.
const EXPERT_ALIGN: u64 = 4096;

/// One weight: where it comes from and what it becomes.
pub(super) struct Job {
    /// Its published name.
    pub(super) name: String,
    pub(super) class: TensorClass,
    part: Option<ContainerPart>,
    pub(super) rows: u64,
    pub(super) cols: u64,
    /// Norms and biases have one dimension.
    is_vector: bool,
    /// How the source stores it.
    pub(super) stored: StoredType,
    /// How the output does; copied where it is the same.
    pub(super) target: StoredType,
    pub(super) weight: Span,
    pub(super) scales: Option<Span>,
}

impl Job {
    /// Source bytes, scales included.
    pub(super) fn bytes_in(&self) -> u64 {
        self.weight.bytes + self.scales.map_or(0, |s| s.bytes)
    }

    /// Whether the output has the bytes of the source.
    pub(super) fn is_copied(&self) -> bool {
        self.target == self.stored
    }

    /// Where its bytes lie in the source.
    pub(super) fn spans(&self) -> impl Iterator<Item = Span> {
        [Some(self.weight), self.scales].into_iter().flatten()
    }

    pub(super) fn weight_bytes_out(&self) -> u64 {
        self.rows * self.target.row_bytes(self.cols)
    }

    pub(super) fn scale_bytes_out(&self) -> u64 {
        self.target.scales().count(self.rows, self.cols) * self.target.scale_bytes()
    }

    /// Output bytes, scales included.
    pub(super) fn bytes_out(&self) -> u64 {
        self.weight_bytes_out() + self.scale_bytes_out()
    }

    fn dtype_and_shape(&self) -> (&'static str, Vec<u64>) {
        let logical = || if self.is_vector { vec![self.cols] } else { vec![self.rows, self.cols] };
        match self.target {
            StoredType::F32 => ("F32", logical()),
            StoredType::F16 => ("F16", logical()),
            StoredType::Bf16 => ("BF16", logical()),
            StoredType::Fp8(_) => ("F8_E4M3", logical()),
            StoredType::Packed(_) | StoredType::MxFp4 => {
                ("U8", vec![self.rows, self.target.row_bytes(self.cols)])
            }
        }
    }

    /// Ending of the name, type and shape of its scales: of packed integers `(rows)`, or `(rows, groups)`
    /// where a row has several; of blocks one for each.
    fn scales_out(&self) -> Option<(&'static str, &'static str, Vec<u64>)> {
        match self.target {
            StoredType::F32 | StoredType::F16 | StoredType::Bf16 | StoredType::MxFp4 => None,
            StoredType::Packed(packed) => {
                let dtype = match packed.scale {
                    ScaleType::F32 => "F32",
                    ScaleType::F16 => "F16",
                };
                let shape = match packed.group {
                    Group::Row => vec![self.rows],
                    Group::Of128 | Group::Of64 | Group::Of32 => {
                        vec![self.rows, packed.group.per_row(self.cols)]
                    }
                };
                Some((".qs", dtype, shape))
            }
            StoredType::Fp8(scale) => {
                let dtype = match scale {
                    BlockScale::F32 => "F32",
                    BlockScale::F16 => "F16",
                    BlockScale::Bf16 => "BF16",
                };
                let (rows, cols) = self.target.scales().shape(self.rows, self.cols)?;
                Some(("_scale_inv", dtype, vec![rows, cols]))
            }
        }
    }
}

/// What follows what in a file.
pub(super) enum Entry {
    /// So many zeros.
    Pad(u64),
    /// The weight of that job, then its scales.
    Job(usize),
}

/// One output file.
pub(super) struct ShardPlan {
    pub(super) file_name: String,
    /// The length field, the JSON and the spaces that align the data.
    pub(super) header: Vec<u8>,
    pub(super) entries: Vec<Entry>,
    data_bytes: u64,
}

impl ShardPlan {
    /// Its size.
    pub(super) fn file_bytes(&self) -> u64 {
        self.header.len() as u64 + self.data_bytes
    }
}

/// The whole output.
pub(super) struct OutputPlan {
    pub(super) jobs: Vec<Job>,
    pub(super) shards: Vec<ShardPlan>,
}

impl OutputPlan {
    pub(super) fn file_bytes(&self) -> Bytes {
        self.header_bytes() + self.shards.iter().map(|s| Bytes(s.data_bytes)).sum()
    }

    /// Of all headers: another one means another output.
    pub(super) fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for shard in &self.shards {
            hasher.update(&shard.header);
        }
        hasher.finalize().to_hex()[..32].to_owned()
    }

    pub(super) fn header_bytes(&self) -> Bytes {
        self.shards.iter().map(|s| Bytes(s.header.len() as u64)).sum()
    }

    /// The weights of a file.
    pub(super) fn jobs_of(&self, shard: &ShardPlan) -> impl Iterator<Item = &Job> {
        let job = |entry: &Entry| match entry {
            Entry::Pad(_) => None,
            Entry::Job(job) => self.jobs.get(*job),
        };
        shard.entries.iter().filter_map(job)
    }

    pub(super) fn padding_bytes(&self) -> Bytes {
        let entries = self.shards.iter().flat_map(|s| &s.entries);
        entries.map(|e| if let Entry::Pad(bytes) = e { Bytes(*bytes) } else { Bytes(0) }).sum()
    }

    /// The text of model.safetensors.index.json; padding is in no index, since no reader asks for
    /// it by name.
    pub(super) fn index(&self) -> String {
        let mut weight_map = BTreeMap::new();
        for shard in &self.shards {
            for entry in &shard.entries {
                if let Entry::Job(job) = entry {
                    let job = &self.jobs[*job];
                    weight_map.insert(job.name.clone(), &shard.file_name);
                    if let Some((ending, ..)) = job.scales_out() {
                        weight_map.insert(format!("{}{ending}", job.name), &shard.file_name);
                    }
                }
            }
        }
        let total: u64 = self.jobs.iter().map(Job::bytes_out).sum();
        let mut text =
            format!("{{\n \"metadata\": {{\"total_size\": {total}}},\n \"weight_map\": {{");
        for (index, (name, file)) in weight_map.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let _ = write!(text, "{comma}\n  {}: {}", quoted(name), quoted(file));
        }
        text.push_str("\n }\n}\n");
        text
    }
}

/// Plans the output of a conversion. `source` is the fingerprint of the weights that were published.
pub(super) fn plan(
    catalogue: &Catalogue,
    options: &ConvertOptions,
    source: &str,
) -> Result<OutputPlan, ConvertError> {
    let mut planner = Planner { catalogue, options, jobs: Vec::new(), units: Vec::new() };
    planner.add_all()?;
    // What this build cannot run is not made either; experts in one tensor have been refused before.
    supports_whole(catalogue)?;
    let Planner { jobs, units, .. } = planner;
    let metadata = metadata(&jobs, source);
    let files = cut_into_files(&jobs, &units, options.shard_bytes.0);
    let n_files = files.len();
    let mut n_pads = 0;
    let shards = files
        .into_iter()
        .enumerate()
        .map(|(index, (entries, data_bytes))| {
            let file_name = format!("model-{:05}-of-{n_files:05}.safetensors", index + 1);
            let header = header(&metadata, &entries, &jobs, &mut n_pads);
            let header_bytes = header.len() as u64 - 8;
            if header_bytes > HEADER_CAP_BYTES {
                return Err(ConvertError::HeaderTooLarge {
                    path: PathBuf::from(file_name),
                    header_bytes,
                });
            }
            Ok(ShardPlan { file_name, header, entries, data_bytes })
        })
        .collect::<Result<_, _>>()?;
    Ok(OutputPlan { jobs, shards })
}

/// Jobs that stay together in one file; an expert's start at a multiple of [`EXPERT_ALIGN`].
struct Unit {
    first_job: usize,
    n_jobs: usize,
    is_expert: bool,
}

struct Planner<'a> {
    catalogue: &'a Catalogue,
    options: &'a ConvertOptions,
    jobs: Vec<Job>,
    units: Vec<Unit>,
}

impl Planner<'_> {
    /// The catalogue's order, with the experts of a layer after the layer's other tensors.
    fn add_all(&mut self) -> Result<(), ConvertError> {
        let mut layer_in_work = None;
        for tensor in &self.catalogue.tensors {
            let layer = match tensor.role {
                Role::Layer { layer, .. }
                | Role::SubBlock { layer, .. }
                | Role::Expert { layer, .. }
                | Role::FusedExperts { layer, .. } => Some(layer),
                Role::Embedding | Role::Head | Role::FinalNorm | Role::Padding => None,
            };
            if layer != layer_in_work {
                self.add_experts(layer_in_work)?;
                layer_in_work = layer;
            }
            self.add_job(
                tensor.role,
                (tensor.rows, tensor.cols),
                tensor.stored,
                (tensor.weight, tensor.scales),
            )?;
            self.units.push(Unit { first_job: self.jobs.len() - 1, n_jobs: 1, is_expert: false });
        }
        self.add_experts(layer_in_work)
    }

    fn add_experts(&mut self, layer: Option<u32>) -> Result<(), ConvertError> {
        let Some(layer) = layer else { return Ok(()) };
        let catalogue = self.catalogue;
        let (hidden, ff) =
            (catalogue.spec.hidden_size as u64, catalogue.spec.expert_ff_size as u64);
        for (expert, layout) in catalogue.layer_experts(layer as usize).iter().enumerate() {
            let first_job = self.jobs.len();
            match layout.form {
                ExpertForm::Separate => {}
                ExpertForm::Interleaved | ExpertForm::InterleavedTransposed => {
                    let tensor = FusedTensor::GateUp;
                    let weight = catalogue.name_of(Role::FusedExperts { layer, tensor });
                    let stored = layout.gate.stored;
                    return Err(ConvertError::Fused { weight, stored });
                }
            }
            for projection in [Projection::Gate, Projection::Up, Projection::Down] {
                let shape = match projection {
                    Projection::Gate | Projection::Up => (ff, hidden),
                    Projection::Down => (hidden, ff),
                };
                let matrix = layout.matrix(projection);
                let weight_bytes = shape.0 * matrix.stored.row_bytes(shape.1);
                let role = Role::Expert { layer, expert: expert as u32, projection };
                let weight = self.file_span(role, layout, matrix.weight_offset, weight_bytes)?;
                // What is not weights is scales.
                let scales = match matrix.bytes.saturating_sub(weight_bytes) {
                    0 => None,
                    bytes => Some(self.file_span(role, layout, matrix.scales_offset, bytes)?),
                };
                self.add_job(role, shape, matrix.stored, (weight, scales))?;
            }
            let n_jobs = self.jobs.len() - first_job;
            self.units.push(Unit { first_job, n_jobs, is_expert: true });
        }
        Ok(())
    }

    /// Where in its shard a piece of an expert lies, from where it goes in the slab.
    fn file_span(
        &self,
        role: Role,
        layout: &ExpertLayout,
        slab_offset: u64,
        bytes: u64,
    ) -> Result<Span, ConvertError> {
        layout
            .extents()
            .iter()
            .find(|e| {
                e.slab_offset <= slab_offset && slab_offset + bytes <= e.slab_offset + e.bytes
            })
            .map(|e| {
                let offset = e.offset + (slab_offset - e.slab_offset);
                Span { shard: e.shard, offset, bytes }
            })
            .ok_or_else(|| ConvertError::Misplaced { weight: self.catalogue.name_of(role) })
    }

    fn add_job(
        &mut self,
        role: Role,
        (rows, cols): (u64, u64),
        stored: StoredType,
        (weight, scales): (Span, Option<Span>),
    ) -> Result<(), ConvertError> {
        let name = self.catalogue.name_of(role);
        let of_container = ContainerClass::of(role, self.catalogue.spec.n_layers);
        let class = of_container.map_or(TensorClass::Kept, TensorClass::from);
        let part = of_container.and_then(|_| ContainerPart::of(role));
        let choices =
            of_container.map_or(Choices::from(Bits::Keep), |class| self.options.class(class));
        let form = choices.of(part);
        let wanted = form.packed(self.options.packing).map(|packed| packed.for_cols(cols));
        let requantised =
            |wanted| Err(ConvertError::Requantise { weight: name.clone(), stored, wanted });
        let target = match (form.bits, wanted) {
            // Readers tell bits by bytes.
            (_, Some(wanted)) if !wanted.bits.is_told_by_bytes(cols) => stored,
            (_, Some(wanted)) => match stored.packed() {
                Some(packed) if packed != wanted => {
                    return requantised(StoredType::Packed(wanted));
                }
                Some(_) | None => StoredType::Packed(wanted),
            },
            (Bits::Sixteen, None) => match stored {
                StoredType::F16 | StoredType::Bf16 => stored,
                StoredType::F32 | StoredType::Fp8(_) | StoredType::MxFp4 => StoredType::Bf16,
                StoredType::Packed(_) => return requantised(StoredType::Bf16),
            },
            (Bits::Keep | Bits::Packed(_), None) => stored,
        };
        let is_vector = matches!(role, Role::FinalNorm)
            || matches!(role, Role::Layer { tensor, .. } if tensor.kind() == WeightKind::Vector);
        self.jobs.push(Job {
            name,
            class,
            part,
            rows,
            cols,
            is_vector,
            stored,
            target,
            weight,
            scales,
        });
        Ok(())
    }
}

/// The `__metadata__` strings: what each class is stored as, and each part of one that is mixed.
fn metadata(jobs: &[Job], source: &str) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::from([
        ("tierkeep.format".to_owned(), "1".to_owned()),
        (SOURCE_KEY.to_owned(), source.to_owned()),
    ]);
    for class in ContainerClass::ALL {
        let of_class: Vec<&Job> =
            jobs.iter().filter(|job| job.class == TensorClass::from(class)).collect();
        let fields = fields(&of_class);
        metadata.extend(fields.iter().map(|(f, value)| (class.key(f), (*value).to_owned())));
        let mixed: Vec<&str> =
            fields.iter().filter(|(_, value)| *value == MIXED).map(|(field, _)| *field).collect();
        for part in ContainerPart::ALL {
            let of_part: Vec<&Job> =
                of_class.iter().copied().filter(|job| job.part == Some(part)).collect();
            let said = self::fields(&of_part);
            let said = said.iter().filter(|(field, _)| mixed.contains(field));
            metadata.extend(said.map(|(f, value)| (class.part_key(part, f), (*value).to_owned())));
        }
    }
    metadata
}

/// What can be said of all of these weights together, field by field.
fn fields(jobs: &[&Job]) -> Vec<(&'static str, &'static str)> {
    if jobs.is_empty() {
        return Vec::new();
    }
    let bits = one(jobs.iter().map(|job| without_scales(job.target))).map(bits_in_words);
    let mut fields = vec![("bits", bits.unwrap_or(MIXED))];
    let packed = || jobs.iter().filter_map(|job| Some((job.target.packed()?, job.cols)));
    if packed().next().is_some() {
        // The widest group by which every row has as many scales as it has: rows that are no wider
        // than a group are of any.
        let fits = |group: &Group| {
            packed().all(|(packed, cols)| group.per_row(cols) == packed.group.per_row(cols))
        };
        let group = Group::ALL.iter().find(|group| fits(group)).map(|group| group.name());
        let scale = one(packed().map(|(packed, _)| packed.scale.name()));
        fields.extend([("group", group.unwrap_or(MIXED)), ("scale", scale.unwrap_or(MIXED))]);
    }
    fields
}

/// The value that all have; `None` where they differ.
fn one<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Option<T> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

/// A type with its scales left out of account.
fn without_scales(stored: StoredType) -> StoredType {
    match stored {
        StoredType::Packed(packed) => StoredType::Packed(Packed::plain(packed.bits)),
        StoredType::F32
        | StoredType::F16
        | StoredType::Bf16
        | StoredType::Fp8(_)
        | StoredType::MxFp4 => stored,
    }
}

fn bits_in_words(stored: StoredType) -> &'static str {
    match stored {
        StoredType::F32 => "32",
        StoredType::F16 | StoredType::Bf16 => "16",
        StoredType::Packed(packed) => match packed.bits {
            PackedBits::Eight => "8",
            PackedBits::Four => "4",
            PackedBits::Two => "2",
        },
        StoredType::Fp8(_) => "8",
        StoredType::MxFp4 => "4",
    }
}

/// Cuts units into files of at most `shard_bytes` data bytes each where no unit alone is larger.
fn cut_into_files(jobs: &[Job], units: &[Unit], shard_bytes: u64) -> Vec<(Vec<Entry>, u64)> {
    let mut files: Vec<(Vec<Entry>, u64)> = Vec::new();
    for unit in units {
        let members = unit.first_job..unit.first_job + unit.n_jobs;
        let bytes: u64 = jobs[members.clone()].iter().map(Job::bytes_out).sum();
        let start = |at: u64| if unit.is_expert { round_up(at, EXPERT_ALIGN) } else { at };
        let fits = files.last().is_some_and(|(_, end)| start(*end) + bytes <= shard_bytes);
        if !fits {
            files.push((Vec::new(), 0));
        }
        if let Some((entries, end)) = files.last_mut() {
            let pad = start(*end) - *end;
            if pad > 0 {
                entries.push(Entry::Pad(pad));
            }
            entries.extend(members.map(Entry::Job));
            *end += pad + bytes;
        }
    }
    files
}

/// The length field and the JSON of one file, with spaces up to a multiple of [`EXPERT_ALIGN`]:
/// the format allows no gap between header and data.
fn header(
    metadata: &BTreeMap<String, String>,
    entries: &[Entry],
    jobs: &[Job],
    n_pads: &mut usize,
) -> Vec<u8> {
    let mut json = String::from("{\"__metadata__\":{");
    for (index, (key, value)) in metadata.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let _ = write!(json, "{comma}{}:{}", quoted(key), quoted(value));
    }
    json.push('}');
    let mut at = 0;
    let mut add = |name: &str, dtype: &str, shape: &[u64], bytes: u64| {
        let end = at + bytes;
        let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
        let _ = write!(
            json,
            ",{}:{{\"dtype\":\"{dtype}\",\"shape\":[{}],\"data_offsets\":[{at},{end}]}}",
            quoted(name),
            shape.join(",")
        );
        at = end;
    };
    for entry in entries {
        match entry {
            Entry::Pad(bytes) => {
                add(&format!("__pad.{n_pads}"), "U8", &[*bytes], *bytes);
                *n_pads += 1;
            }
            Entry::Job(job) => {
                let job = &jobs[*job];
                let (dtype, shape) = job.dtype_and_shape();
                add(&job.name, dtype, &shape, job.weight_bytes_out());
                if let Some((ending, dtype, shape)) = job.scales_out() {
                    add(&format!("{}{ending}", job.name), dtype, &shape, job.scale_bytes_out());
                }
            }
        }
    }
    json.push('}');
    let bytes = round_up(8 + json.len() as u64, EXPERT_ALIGN);
    json.extend(std::iter::repeat_n(' ', bytes as usize - 8 - json.len()));
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(json.as_bytes());
    header
}

/// A JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

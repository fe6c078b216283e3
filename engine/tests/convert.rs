//! Conversions of small checkpoints made here, checked against an independent quantiser.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

#[path = "support/conversion.rs"]
mod support;

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::Path;

use half::f16;
use support::*;
use tempfile::TempDir;
use tierkeep_engine::convert::{
    Bits, ConvertOptions, ConvertProgress, Execution, Packing, TensorClass, convert,
    group_from_text, planned_bytes, scale_from_text,
};
use tierkeep_plans::catalogue::header::{DType, read_header};
use tierkeep_plans::catalogue::{Catalogue, Group, Packed, PackedBits, ScaleType, StoredType};
use tierkeep_plans::units::Bytes;

/// Half to even by comparing with the neighbours, in f64 where both are exact.
fn round_half_even(x: f32) -> i64 {
    let x = f64::from(x);
    let below = x.floor();
    let part = x - below;
    let below = below as i64;
    if part > 0.5 || (part == 0.5 && below % 2 != 0) { below + 1 } else { below }
}

/// The plain form as its definition reads: packed rows, and little-endian scales.
fn reference(values: &[f32], cols: usize, bits: u32) -> (Vec<u8>, Vec<u8>) {
    reference_of(values, (cols, cols), bits, ScaleType::F32)
}

/// The same in groups of columns, with scales of either type.
fn reference_of(
    values: &[f32],
    (cols, group): (usize, usize),
    bits: u32,
    scale_type: ScaleType,
) -> (Vec<u8>, Vec<u8>) {
    let high = (1_i64 << (bits - 1)) - 1;
    let mut scales = Vec::new();
    for row in values.chunks(cols) {
        for members in row.chunks(group) {
            let mut absmax = 0.0_f32;
            for x in members {
                if x.abs() > absmax {
                    absmax = x.abs();
                }
            }
            let scale = if absmax == 0.0 { 1.0 } else { absmax / high as f32 };
            match scale_type {
                ScaleType::F16 => scales.extend(f16::from_f32(scale).to_le_bytes()),
                ScaleType::F32 => scales.extend(scale.to_le_bytes()),
            }
        }
    }
    (packed_by(values, (cols, group), bits, (&scales, scale_type)).0, scales)
}

/// Packed rows by scales as they are stored, and the squared error.
fn packed_by(
    values: &[f32],
    (cols, group): (usize, usize),
    bits: u32,
    (scales, scale_type): (&[u8], ScaleType),
) -> (Vec<u8>, f64) {
    let (low, high) = (-(1_i64 << (bits - 1)), (1_i64 << (bits - 1)) - 1);
    let mut scales: Box<dyn Iterator<Item = f32>> = match scale_type {
        ScaleType::F16 => {
            Box::new(scales.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()))
        }
        ScaleType::F32 => Box::new(scales.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
    };
    let (mut packed, mut error) = (Vec::new(), 0.0);
    for row in values.chunks(cols) {
        let mut row_bytes = vec![0_u8; (cols * bits as usize).div_ceil(8)];
        for (first, members) in row.chunks(group).enumerate() {
            let scale = scales.next().unwrap();
            for (i, x) in members.iter().enumerate() {
                let q = round_half_even(x / scale).max(low).min(high);
                error += (f64::from(*x) - q as f64 * f64::from(scale)).powi(2);
                let at = (first * group + i) * bits as usize;
                if bits == 8 {
                    row_bytes[at / 8] = q.rem_euclid(256) as u8;
                } else {
                    row_bytes[at / 8] += ((q - low) as u8) << (at % 8);
                }
            }
        }
        packed.extend(row_bytes);
    }
    (packed, error)
}

fn stays_float(name: &str) -> bool {
    name.contains("norm") || name.contains("mlp.gate.") || name.contains("weights_proj")
}

fn class_bits(name: &str, experts: u32, other: u32) -> u32 {
    if name.contains(".experts.") && name.contains("layers.1.") { experts } else { other }
}

#[test]
fn bytes_equal_the_reference() {
    for matrix_type in ["BF16", "F16", "F32"] {
        let tensors = glm_tensors(matrix_type);
        let source = model(&tensors);
        for (expert_bits, other_bits) in [(8, 8), (4, 8), (8, 4), (4, 4)] {
            let bits = |n| if n == 4 { FOUR } else { EIGHT };
            let out = TempDir::new().unwrap();
            run(source.path(), out.path(), &options(bits(expert_bits), bits(other_bits))).unwrap();
            let written = read_tensors(out.path());
            for tensor in &tensors {
                let (dtype, shape, bytes) = &written[&tensor.name];
                if stays_float(&tensor.name) {
                    let logical: Vec<u64> = tensor.shape.iter().map(|d| *d as u64).collect();
                    assert_eq!((shape, bytes), (&logical, &tensor.bytes), "{}", tensor.name);
                    continue;
                }
                let n = class_bits(&tensor.name, expert_bits, other_bits);
                let (rows, cols) = (tensor.shape[0] as u64, tensor.shape[1]);
                let (packed, scales) = reference(&tensor.values, cols, n);
                assert_eq!(*dtype, DType::U8);
                assert_eq!(*shape, [rows, packed.len() as u64 / rows], "{}", tensor.name);
                assert_eq!(*bytes, packed, "{}", tensor.name);
                let (dtype, shape, bytes) = &written[&format!("{}.qs", tensor.name)];
                assert_eq!((*dtype, &shape[..]), (DType::F32, &[rows][..]));
                assert_eq!(*bytes, scales, "{}", tensor.name);
            }
            let pads = written.keys().filter(|name| name.starts_with("__pad.")).count();
            let quantised = tensors.iter().filter(|t| !stays_float(&t.name)).count();
            assert_eq!(written.len(), tensors.len() + quantised + pads);
        }
    }
}

/// Rows of 150 columns have partial last groups; those of 18 and fewer are one group, and so a row. Where
/// a scale is searched for, the integers are those of the scale, and the error is below absmax's.
#[test]
fn groups_and_scales_of_16_bits_equal_the_reference() {
    let tensors = glm_tensors_of("BF16", 150);
    let source = model(&tensors);
    for (group, width) in
        [(Group::Row, 1 << 20), (Group::Of128, 128), (Group::Of64, 64), (Group::Of32, 32)]
    {
        for scale in ScaleType::ALL {
            for bits in PackedBits::ALL {
                let options = ConvertOptions {
                    packing: Packing { group, scale },
                    ..options(Bits::Packed(bits), Bits::Packed(bits))
                };
                let out = TempDir::new().unwrap();
                run(source.path(), out.path(), &options).unwrap();
                let written = read_tensors(out.path());
                let scale_type = if scale == ScaleType::F32 { DType::F32 } else { DType::F16 };
                for tensor in tensors.iter().filter(|t| !stays_float(&t.name)) {
                    let (rows, cols) = (tensor.shape[0] as u64, tensor.shape[1]);
                    let by = (cols, width.min(cols));
                    let (packed, scales) =
                        reference_of(&tensor.values, by, bits.number() as u32, scale);
                    let (dtype, shape, bytes) = &written[&format!("{}.qs", tensor.name)];
                    let number = bits.number() as u32;
                    let (of_scales, error) = packed_by(&tensor.values, by, number, (bytes, scale));
                    assert_eq!(written[&tensor.name].2, of_scales, "{}", tensor.name);
                    let is_plain = cols <= width && scale == ScaleType::F32;
                    if is_plain || bits == PackedBits::Eight {
                        assert_eq!(of_scales, packed, "{}", tensor.name);
                        assert_eq!(*bytes, scales, "{}", tensor.name);
                    } else if bits == PackedBits::Four {
                        let absmax = packed_by(&tensor.values, by, number, (&scales, scale)).1;
                        assert!(error < absmax, "{}: {error} {absmax}", tensor.name);
                    }
                    let groups = cols.div_ceil(width) as u64;
                    let expected = if groups == 1 { vec![rows] } else { vec![rows, groups] };
                    assert_eq!((*dtype, shape), (scale_type, &expected), "{}", tensor.name);
                }
                let after = Catalogue::open(out.path()).unwrap();
                let stored = StoredType::Packed(Packed { bits, group, scale });
                assert_eq!(after.expert(1, 0).unwrap().gate.stored, stored);
                let of_5 = Packed { bits, group: Group::Row, scale };
                assert_eq!(after.expert(1, 0).unwrap().down.stored, StoredType::Packed(of_5));
                let metadata = read_header(&shards(out.path())[0]).unwrap().metadata;
                let said = ["bits", "group", "scale"]
                    .map(|field| metadata[&format!("tierkeep.experts.{field}")].clone());
                let number = bits.number().to_string();
                assert_eq!(said, [&number, group.name(), scale.name()]);
                // What is there already is copied, in the same words.
                let again = TempDir::new().unwrap();
                run(out.path(), again.path(), &options).unwrap();
                assert!(read_tensors(again.path()) == written);
                let keep = TempDir::new().unwrap();
                run(out.path(), keep.path(), &self::options(Bits::Keep, Bits::Keep)).unwrap();
                let read = |directory: &Path| fs::read(&shards(directory)[0]).unwrap();
                assert!(read(keep.path()) == read(out.path()));
            }
        }
    }
}

#[test]
fn what_is_packed_in_groups_is_not_packed_again() {
    let source = model(&glm_tensors_of("BF16", 150));
    let grouped = |group| ConvertOptions {
        packing: Packing { group, scale: ScaleType::F16 },
        ..options(FOUR, FOUR)
    };
    let (packed, out) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    run(source.path(), packed.path(), &grouped(Group::Of64)).unwrap();
    let error = run(packed.path(), out.path(), &grouped(Group::Of32)).unwrap_err().to_string();
    let parts = "is stored as int4-g64-f16 and cannot become int4-g32-f16: quantising twice";
    assert!(error.contains(parts), "{error}");
}

#[test]
fn weights_beyond_scales_of_16_bits_are_named() {
    let mut tensors = glm_tensors("F32");
    let last = tensors.last_mut().unwrap();
    let cols = last.shape[1];
    last.values[2 * cols] = 1e9;
    *last = SourceTensor::from_values(&last.name, &last.shape, "F32", last.values.clone());
    let source = model(&tensors);
    let with = |scale| ConvertOptions {
        packing: Packing { group: Group::Row, scale },
        ..ConvertOptions::default()
    };
    let out = TempDir::new().unwrap();
    let error = run(source.path(), out.path(), &with(ScaleType::F16)).unwrap_err().to_string();
    let parts = "model.layers.2.eh_proj.weight row 2 needs a scale beyond 65504";
    assert!(error.starts_with(parts) && error.contains("--scales f32"), "{error}");
    run(source.path(), out.path(), &with(ScaleType::F32)).unwrap();
}

#[test]
fn the_catalogue_reads_what_was_written() {
    let source = model(&glm_tensors("BF16"));
    let before = Catalogue::open(source.path()).unwrap();
    assert!(before.experts.iter().any(|e| e.extents().len() > 1), "the test's cut is of no use");
    // Files of a size that holds all, a few tensors, and not even one.
    for shard_bytes in [1 << 30, 5_000, 1] {
        let out = TempDir::new().unwrap();
        let options = ConvertOptions { shard_bytes: Bytes(shard_bytes), ..options(FOUR, EIGHT) };
        let mut last = None;
        let mut progress = |p| {
            last = Some(p);
            ControlFlow::Continue(())
        };
        let report =
            convert(&before, out.path(), &options, &Execution::default(), &mut progress).unwrap();
        let after = Catalogue::open(out.path()).unwrap();
        assert_eq!(after.spec, before.spec);
        assert_eq!(after.n_mtp_layers_present, 1);
        assert!(after.warnings.is_empty(), "{:?}", after.warnings);
        assert_eq!(after.unrecognised_bytes, Bytes(0));
        for (index, expert) in after.experts.iter().enumerate() {
            assert_eq!(expert.extents().len(), 1);
            assert_eq!(expert.extents()[0].offset % 4096, 0);
            let expected = if index < N_EXPERTS { StoredType::INT4 } else { StoredType::INT8 };
            for matrix in [expert.gate, expert.up, expert.down] {
                assert_eq!(matrix.stored, expected);
            }
            assert!(expert.gate.weight_offset < expert.gate.scales_offset);
            assert!(expert.gate.scales_offset < expert.up.weight_offset);
            assert!(expert.up.scales_offset < expert.down.weight_offset);
            assert!(expert.down.weight_offset < expert.down.scales_offset);
        }
        assert_eq!(after.total_bytes(), report.bytes_out);
        assert_eq!(planned_bytes(&before, &options).unwrap(), report.bytes_out);
        let files = report.files.len();
        assert_eq!(after.shards.len(), files);
        assert_eq!(files == 1, shard_bytes == 1 << 30);
        assert_eq!(
            last,
            Some(ConvertProgress {
                file: files,
                files,
                bytes_read: report.bytes_in,
                bytes_read_total: report.bytes_in,
                bytes_written: report.bytes_out,
                bytes_written_total: report.bytes_out,
            })
        );
    }
}

#[test]
fn the_report_accounts_for_every_byte() {
    let tensors = glm_tensors("BF16");
    let source = model(&tensors);
    let out = TempDir::new().unwrap();
    let report = run(source.path(), out.path(), &options(FOUR, EIGHT)).unwrap();
    let bytes_in: usize = tensors.iter().map(|t| t.bytes.len()).sum();
    assert_eq!(report.bytes_in, Bytes(bytes_in as u64));
    let parts: Bytes = report.classes.iter().map(|c| c.bytes_out).sum();
    assert_eq!(parts + report.padding_bytes + report.header_bytes, report.bytes_out);
    let classes: Vec<_> = report.classes.iter().map(|c| c.class).collect();
    assert_eq!(classes, TensorClass::ALL);
    let class = |class| report.classes.iter().find(|c| c.class == class).unwrap();
    assert_eq!(class(TensorClass::Experts).n_weights, 3 * N_EXPERTS);
    assert_eq!(class(TensorClass::Kept).worst_relative_error, None);
    let mean = |c| class(c).mean_relative_error.unwrap();
    let worst = |c| class(c).worst_relative_error.unwrap();
    assert!(mean(TensorClass::Experts) > 4.0 * mean(TensorClass::Dense));
    // Half a step of each element over the row's norm, which is at least its largest element.
    assert!(worst(TensorClass::Dense) <= 0.5 / 127.0 * 3.01);
    assert!(worst(TensorClass::Experts) >= mean(TensorClass::Experts));
    assert!(class(TensorClass::Mtp).worst_weight.as_ref().unwrap().contains("layers.2."));
    assert!(out.path().join("tokenizer.json").is_file());
    assert!(!out.path().join("notes.txt").exists());
    let mut names: Vec<_> =
        report.copied.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["config.json", "tokenizer.json"]);
}

#[test]
fn metadata_say_what_each_class_is_stored_as() {
    let source = model(&glm_tensors("BF16"));
    let out = TempDir::new().unwrap();
    let options = ConvertOptions { embedding: Bits::Keep.into(), ..options(FOUR, EIGHT) };
    run(source.path(), out.path(), &options).unwrap();
    let header = read_header(&shards(out.path())[0]).unwrap();
    let mut metadata = header.metadata;
    let fingerprint = Catalogue::open(source.path()).unwrap().fingerprint;
    assert_eq!(metadata.remove("tierkeep.source"), Some(fingerprint));
    let metadata: Vec<_> = metadata.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(
        metadata,
        [
            "tierkeep.dense.bits=8",
            "tierkeep.dense.group=row",
            "tierkeep.dense.scale=f32",
            "tierkeep.embedding.bits=16",
            "tierkeep.experts.bits=4",
            "tierkeep.experts.group=row",
            "tierkeep.experts.scale=f32",
            "tierkeep.format=1",
            "tierkeep.mtp.bits=8",
            "tierkeep.mtp.group=row",
            "tierkeep.mtp.scale=f32",
        ]
    );
}

#[test]
fn the_same_model_gives_the_same_bytes() {
    let source = model(&glm_tensors("BF16"));
    let (a, b) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    for out in [&a, &b] {
        run(source.path(), out.path(), &options(FOUR, EIGHT)).unwrap();
    }
    let names = |directory: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(a.path()), names(b.path()));
    for name in names(a.path()) {
        let read = |out: &TempDir| fs::read(out.path().join(&name)).unwrap();
        assert!(read(&a) == read(&b), "{name:?}");
    }
}

#[test]
fn packed_sources_are_copied_or_refused() {
    let source = model(&glm_tensors("BF16"));
    let (packed, again) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    run(source.path(), packed.path(), &options(FOUR, EIGHT)).unwrap();
    let report = run(packed.path(), again.path(), &options(Bits::Keep, Bits::Keep)).unwrap();
    assert!(report.classes.iter().all(|c| c.worst_relative_error.is_none()));
    assert!(read_tensors(packed.path()) == read_tensors(again.path()));
    // The bits that are there already ask for no change.
    let same = TempDir::new().unwrap();
    run(packed.path(), same.path(), &options(FOUR, EIGHT)).unwrap();
    assert!(read_tensors(packed.path()) == read_tensors(same.path()));

    let out = packed.path().join("out");
    let error = run(packed.path(), &out, &options(EIGHT, EIGHT)).unwrap_err();
    assert!(
        error.to_string().starts_with(
            "model.layers.1.mlp.experts.0.gate_proj.weight is stored as int4 and cannot become int8"
        ),
        "{error}"
    );
    assert!(!out.exists(), "refused before anything is written");
}

#[test]
fn a_source_that_was_cut_since_is_named() {
    let source = model(&glm_tensors("BF16"));
    let catalogue = Catalogue::open(source.path()).unwrap();
    let shard = source.path().join("model-00002-of-00002.safetensors");
    let bytes = fs::metadata(&shard).unwrap().len();
    File::options().write(true).open(&shard).unwrap().set_len(bytes - 1).unwrap();
    let out = TempDir::new().unwrap();
    let (options, execution) = (ConvertOptions::default(), Execution::default());
    let mut go_on = |_| ControlFlow::Continue(());
    let error = convert(&catalogue, out.path(), &options, &execution, &mut go_on).unwrap_err();
    assert!(error.to_string().contains("model-00002-of-00002.safetensors: ends before"));
}

#[test]
fn bits_are_read_as_users_write_them() {
    for (text, bits) in [("8", EIGHT), ("4", FOUR), ("2", TWO), ("keep", Bits::Keep)] {
        assert_eq!(text.parse(), Ok(bits));
    }
    for group in Group::ALL {
        assert_eq!(group_from_text(group.name()), Ok(group));
    }
    assert!(group_from_text("16").unwrap_err().to_string().ends_with("row, 128, 64 or 32"));
    assert_eq!(scale_from_text("f16"), Ok(ScaleType::F16));
    assert!(scale_from_text("bf16").unwrap_err().to_string().ends_with("f32 or f16"));
}

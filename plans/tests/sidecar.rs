//! The sidecar index: the second look is the same as the first, and nothing that has changed, was
//! damaged or was forged is believed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::json;
use support::{Checkpoint, Form, TestTensor, read_index, write_index, write_shard};
use tempfile::{TempDir, tempdir};
use tierkeep_plans::catalogue::{Catalogue, sidecar};

/// A model with as many tensors as make a sidecar worth it.
fn large() -> Checkpoint {
    let mut config = Checkpoint::olmoe(Form::INT8).config;
    config["num_hidden_layers"] = json!(2);
    config["num_experts"] = json!(180);
    Checkpoint::from_config(config, Form::INT8)
}

/// Written an hour ago, as far as anybody can tell.
fn settle(path: &Path) {
    let then = SystemTime::now() - Duration::from_secs(3600);
    File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
}

fn settle_all(directory: &Path) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if !path.ends_with(sidecar::FILE_NAME) {
            settle(&path);
        }
    }
}

fn written() -> TempDir {
    let dir = tempdir().unwrap();
    large().write_sharded(dir.path(), 3);
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    settle_all(dir.path());
    dir
}

fn sidecar_of(dir: &TempDir) -> PathBuf {
    dir.path().join(sidecar::FILE_NAME)
}

fn cached(directory: &Path) -> Catalogue {
    Catalogue::open_cached(directory, None).unwrap()
}

/// All of a catalogue, private parts included.
fn all(catalogue: &Catalogue) -> String {
    format!("{catalogue:?}")
}

#[test]
fn the_second_look_is_the_same_and_reads_no_header() {
    let dir = written();
    let fresh = all(&Catalogue::open(dir.path()).unwrap());
    assert_eq!(all(&cached(dir.path())), fresh);
    let bytes = fs::metadata(sidecar_of(&dir)).unwrap().len();
    assert!((1000..20_000).contains(&bytes), "{bytes} bytes for 2 x 180 experts");
    assert_eq!(all(&cached(dir.path())), fresh);

    // A header with its own length, time and identity is not looked at again: so this is what a
    // sidecar is for, and why its key must be right.
    let before = fs::read(sidecar_of(&dir)).unwrap();
    cached(dir.path());
    assert_eq!(fs::read(sidecar_of(&dir)).unwrap(), before);
    fs::remove_file(sidecar_of(&dir)).unwrap();
    assert_eq!(all(&cached(dir.path())), fresh);
    assert_eq!(fs::read(sidecar_of(&dir)).unwrap(), before);
}

/// What is in the sidecar is what is believed: the test of every test here.
#[test]
fn a_sidecar_is_really_read() {
    let dir = written();
    cached(dir.path());
    let mut bytes = fs::read(sidecar_of(&dir)).unwrap();
    let fingerprint = Catalogue::open(dir.path()).unwrap().fingerprint;
    let at = bytes.windows(32).position(|w| w == fingerprint.as_bytes()).unwrap();
    bytes[at..at + 32].copy_from_slice(&[b'a'; 32]);
    let hash = blake3::hash(&bytes[80..]);
    bytes[48..80].copy_from_slice(hash.as_bytes());
    fs::write(sidecar_of(&dir), &bytes).unwrap();
    assert_eq!(cached(dir.path()).fingerprint, "a".repeat(32));
    // The one who checks a model does not believe it.
    assert_eq!(Catalogue::open(dir.path()).unwrap().fingerprint, fingerprint);
}

#[test]
fn small_models_and_fresh_files_leave_none() {
    let dir = tempdir().unwrap();
    Checkpoint::glm(Form::INT8).write_sharded(dir.path(), 2);
    settle_all(dir.path());
    cached(dir.path());
    assert!(!sidecar_of(&dir).exists());

    let dir = written();
    let path = dir.path().join("model-00002-of-00003.safetensors");
    fs::write(&path, fs::read(&path).unwrap()).unwrap();
    cached(dir.path());
    assert!(!sidecar_of(&dir).exists(), "a file of this second may change without a trace");
}

#[test]
fn a_file_as_new_as_the_sidecar_makes_it_worthless() {
    let dir = written();
    cached(dir.path());
    let file = File::options().write(true).open(sidecar_of(&dir)).unwrap();
    let written = SystemTime::now() - Duration::from_secs(3599);
    file.set_modified(written).unwrap();
    let fresh = all(&Catalogue::open(dir.path()).unwrap());
    assert_eq!(all(&cached(dir.path())), fresh);
    // It was made again, later.
    let again = fs::metadata(sidecar_of(&dir)).unwrap().modified().unwrap();
    assert!(again > written + Duration::from_secs(60));
}

/// Applies a change to a model with a sidecar, and looks at it again.
fn after(change: impl Fn(&Path)) {
    let dir = written();
    let before = all(&cached(dir.path()));
    change(dir.path());
    for _ in 0..2 {
        let found = Catalogue::open_cached(dir.path(), None).map(|c| all(&c));
        let mut fresh = Catalogue::open(dir.path());
        // Only the full look compares the index.
        if let Ok(fresh) = &mut fresh {
            fresh.warnings.retain(|w| !w.finding.contains("lacks"));
        }
        match (found, fresh) {
            (Ok(found), Ok(fresh)) => {
                assert_eq!(found, all(&fresh));
                assert_ne!(found, before, "the change is none");
            }
            (Err(found), Err(fresh)) => assert_eq!(found.to_string(), fresh.to_string()),
            (found, fresh) => panic!("{found:?} {fresh:?}"),
        }
        settle_all(dir.path());
    }
}

const SHARD: &str = "model-00002-of-00003.safetensors";

#[test]
fn whatever_changes_is_seen() {
    // Another shard of the same length, with the time of the old one.
    after(|dir| {
        let path = dir.join(SHARD);
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.windows(6).position(|w| w == b"experts".get(..6).unwrap()).unwrap();
        let name = bytes[..at].iter().rposition(|b| *b == b'"').unwrap() + 1;
        bytes[name] = b'x';
        let time = fs::metadata(&path).unwrap().modified().unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    });
    after(|dir| {
        let path = dir.join(SHARD);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 5]).unwrap();
        settle(&path);
    });
    after(|dir| fs::remove_file(dir.join(SHARD)).unwrap());
    after(|dir| {
        let path = dir.join("model-more.safetensors");
        write_shard(&path, &[TestTensor::new("more", "U8", &[3])]);
        settle(&path);
    });
    after(|dir| {
        let path = dir.join("config.json");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("\"eos_token_id\":3", "\"eos_token_id\":4")).unwrap();
        settle(&path);
    });
    after(|dir| {
        let path = dir.join("generation_config.json");
        fs::write(&path, r#"{"eos_token_id": 9}"#).unwrap();
        settle(&path);
    });
    after(|dir| {
        fs::write(dir.join("tokenizer.json"), "{ }").unwrap();
    });
    // A file that now belongs to the model because the index says so.
    after(|dir| {
        write_shard(&dir.join("other.safetensors"), &[TestTensor::new("more", "U8", &[3])]);
        let mut index = read_index(dir);
        index["weight_map"]["more"] = json!("other.safetensors");
        write_index(dir, &index);
        settle_all(dir);
    });
}

#[test]
fn a_damaged_sidecar_is_ignored_and_replaced() {
    let dir = written();
    let fresh = all(&Catalogue::open(dir.path()).unwrap());
    cached(dir.path());
    let good = fs::read(sidecar_of(&dir)).unwrap();
    let mut damaged: Vec<Vec<u8>> =
        [0, 1, 15, 16, 47, 79, 80, 81, good.len() - 1].map(|n| good[..n].to_vec()).into();
    damaged.extend([0, 14, 20, 50, 80, 100, good.len() - 1].map(|at| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    }));
    damaged.push([&good[..], b"x"].concat());
    for bytes in damaged {
        fs::write(sidecar_of(&dir), &bytes).unwrap();
        assert_eq!(all(&cached(dir.path())), fresh);
        assert!(fs::read(sidecar_of(&dir)).unwrap() == good, "{} bytes", bytes.len());
    }
    // One that cannot even be a file stops nobody.
    fs::remove_file(sidecar_of(&dir)).unwrap();
    fs::create_dir(sidecar_of(&dir)).unwrap();
    assert_eq!(all(&cached(dir.path())), fresh);
    let left = fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 3 + 4, "a temporary file was left");
}

#[test]
fn beside_what_belongs_to_a_hub_client_nothing_is_written() {
    let outer = tempdir().unwrap();
    let folder = outer.path().join("hub/models--a--b/snapshots/c");
    fs::create_dir_all(&folder).unwrap();
    large().write_sharded(&folder, 2);
    settle_all(&folder);
    let data = tempdir().unwrap();
    let n_files = || fs::read_dir(&folder).unwrap().count();
    let before = n_files();
    cached(&folder);
    assert_eq!(n_files(), before);
    let fresh = all(&Catalogue::open(&folder).unwrap());
    for _ in 0..2 {
        let found = Catalogue::open_cached(&folder, Some(data.path())).unwrap();
        assert_eq!(all(&found), fresh);
    }
    assert_eq!(n_files(), before);
    let kept = data.path().join("tierkeep/index");
    assert_eq!(fs::read_dir(kept).unwrap().count(), 1);
}

/// Every byte of a body is changed in several ways, under a right checksum. What is accepted lies
/// within its files and fits its shapes; nothing panics.
#[test]
fn a_forged_sidecar_is_as_harmless_as_a_forged_header() {
    let mut accepted = 0;
    for (checkpoint, n_shards) in [(Checkpoint::olmoe(Form::INT8), 3), (mtp_model(), 2)] {
        let dir = tempdir().unwrap();
        checkpoint.write_sharded(dir.path(), n_shards);
        let model = Catalogue::open(dir.path()).unwrap();
        let body = sidecar::encode(&model).unwrap();
        let decode = |body: &[u8]| sidecar::decode(body, &model.spec, dir.path());
        let mut again = decode(&body).unwrap();
        again.tokenizer_bytes = model.tokenizer_bytes;
        assert_eq!(all(&again), all(&model));
        for at in 0..body.len() {
            for with in [body[at] ^ 1, body[at].wrapping_add(1), 0, 0x7f, 0x80, 0xff] {
                let mut forged = body.clone();
                forged[at] = with;
                if let Some(found) = decode(&forged) {
                    accepted += 1;
                    check_sound(&found, &model);
                }
                assert!(decode(&forged[..at]).is_none());
            }
        }
    }
    assert!(accepted > 100, "{accepted}: no forgery came near");
}

fn mtp_model() -> Checkpoint {
    let mut checkpoint = Checkpoint::glm(Form::Bf16);
    checkpoint.config["num_nextn_predict_layers"] = json!(1);
    checkpoint.add_mtp_layer(Form::Bf16);
    checkpoint
}

fn check_sound(found: &Catalogue, model: &Catalogue) {
    let size = |shard: u32| found.shards[shard as usize].bytes;
    assert_eq!(found.experts.len(), model.experts.len());
    for expert in &found.experts {
        for extent in expert.extents() {
            assert!(extent.offset + extent.bytes <= size(extent.shard));
            assert!(extent.slab_offset + extent.bytes <= expert.slab_bytes);
        }
        for matrix in [expert.gate, expert.up, expert.down] {
            assert!(matrix.weight_offset + matrix.bytes <= expert.slab_bytes + 64 * 8);
        }
        assert_eq!(expert.slab_bytes % 64, 0);
    }
    for tensor in &found.tensors {
        assert_eq!(tensor.weight.bytes, tensor.stored.row_bytes(tensor.cols) * tensor.rows);
        for span in [Some(tensor.weight), tensor.scales].into_iter().flatten() {
            assert!(span.offset + span.bytes <= size(span.shard));
        }
    }
}

//! The same model from different sources: a folder, a folder of links, and one that is only asked
//! over a narrow line. What is found must not depend on which; what is asked for must.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

mod support;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::json;
use support::{Checkpoint, Form, TestTensor, read_index, write_index, write_shard};
use tempfile::{TempDir, tempdir};
use tierkeep_plans::catalogue::header::{HeaderBytes, HeaderError};
use tierkeep_plans::catalogue::{Catalogue, CatalogueError, Entry, Folder, Source};

const INDEX: &str = "model.safetensors.index.json";

/// A folder spoken to as if it were far away: it records what was asked for.
struct Far {
    folder: Folder,
    lists: bool,
    label: PathBuf,
    asked: Mutex<Vec<String>>,
}

impl Far {
    fn new(directory: &Path, lists: bool) -> Self {
        let asked = Mutex::new(Vec::new());
        Self { folder: Folder::new(directory), lists, label: PathBuf::from("hf:a/b"), asked }
    }

    fn asked_for(&self, name: &str) -> bool {
        self.asked.lock().unwrap().iter().any(|asked| asked == name)
    }

    fn note(&self, name: &str) {
        self.asked.lock().unwrap().push(name.to_owned());
    }
}

impl Source for Far {
    fn label(&self) -> &Path {
        &self.label
    }

    fn list(&self) -> io::Result<Option<Vec<Entry>>> {
        let listed = self.folder.list()?;
        Ok(if self.lists { listed } else { None })
    }

    fn small_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.note(name);
        self.folder.small_file(name)
    }

    fn file_bytes(&self, name: &str) -> io::Result<Option<u64>> {
        self.folder.file_bytes(name)
    }

    fn header(&self, name: &str) -> Result<HeaderBytes, HeaderError> {
        self.note(name);
        self.folder.header(name)
    }

    fn index_is_cheap(&self) -> bool {
        false
    }

    fn parallel_reads(&self) -> Option<usize> {
        Some(3)
    }
}

fn sharded(checkpoint: &Checkpoint, n_shards: usize) -> TempDir {
    let dir = tempdir().unwrap();
    checkpoint.write_sharded(dir.path(), n_shards);
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 30}"#).unwrap();
    dir
}

/// Two catalogues are of one model, whatever its files are called.
fn assert_same(a: &Catalogue, b: &Catalogue) {
    assert_eq!(a.fingerprint, b.fingerprint);
    assert_eq!(a.spec, b.spec);
    assert_eq!(a.tensors, b.tensors);
    assert_eq!(a.experts, b.experts);
    assert_eq!(a.tokenizer_bytes, b.tokenizer_bytes);
    assert_eq!(a.n_tensors, b.n_tensors);
    assert_eq!(a.unrecognised_bytes, b.unrecognised_bytes);
    let names = |c: &Catalogue| -> Vec<_> {
        c.shards.iter().map(|s| (s.path.file_name().unwrap().to_owned(), s.bytes)).collect()
    };
    assert_eq!(names(a), names(b));
}

#[test]
fn a_model_is_the_same_from_whichever_source() {
    for checkpoint in [Checkpoint::olmoe(Form::INT8), Checkpoint::glm(Form::Bf16)] {
        let dir = sharded(&checkpoint, 5);
        let near = Catalogue::open(dir.path()).unwrap();
        assert!(near.warnings.is_empty());
        for lists in [true, false] {
            let source = Far::new(dir.path(), lists);
            let far = Catalogue::open_from(&source).unwrap();
            assert_same(&near, &far);
            assert!(far.warnings.is_empty(), "{:?}", far.warnings);
            assert!(far.shards[0].path.starts_with("hf:a/b"));
        }
    }
}

#[test]
fn the_index_is_asked_for_only_where_the_files_are_not_known_without_it() {
    let dir = sharded(&Checkpoint::olmoe(Form::Bf16), 3);
    let listing = Far::new(dir.path(), true);
    Catalogue::open_from(&listing).unwrap();
    assert!(!listing.asked_for(INDEX));
    let silent = Far::new(dir.path(), false);
    Catalogue::open_from(&silent).unwrap();
    assert!(silent.asked_for(INDEX));

    // Of a file with another name only the index can tell whether it belongs to the model.
    let checkpoint = Checkpoint::olmoe(Form::Bf16);
    let dir = tempdir().unwrap();
    checkpoint.write_config(dir.path());
    let (first, rest) = checkpoint.tensors.split_at(4);
    write_shard(&dir.path().join("model-a.safetensors"), first);
    write_shard(&dir.path().join("out-b.safetensors"), rest);
    let weight_map: serde_json::Map<_, _> =
        rest.iter().map(|t| (t.name.clone(), json!("out-b.safetensors"))).collect();
    write_index(dir.path(), &json!({ "weight_map": weight_map }));
    let near = Catalogue::open(dir.path()).unwrap();
    assert_eq!(near.shards.len(), 2);
    let far = Far::new(dir.path(), true);
    assert_same(&near, &Catalogue::open_from(&far).unwrap());
    assert!(far.asked_for(INDEX));
}

#[test]
fn a_missing_shard_is_blamed_alike_and_the_index_is_asked_only_then() {
    let dir = sharded(&Checkpoint::olmoe(Form::Bf16), 4);
    let mut index = read_index(dir.path());
    index["weight_map"]["visual.patch.weight"] = json!("a-visual.safetensors");
    write_index(dir.path(), &index);
    fs::remove_file(dir.path().join("model-00003-of-00004.safetensors")).unwrap();
    for lists in [true, false] {
        let source = Far::new(dir.path(), lists);
        let error = Catalogue::open_from(&source).unwrap_err();
        let CatalogueError::MissingShard { path, .. } = &error else { panic!("{error}") };
        assert_eq!(path, &source.locate("model-00003-of-00004.safetensors"));
        assert!(source.asked_for(INDEX));
    }
}

#[test]
fn a_model_of_one_file_needs_neither_list_nor_index() {
    let dir = tempdir().unwrap();
    let checkpoint = Checkpoint::glm(Form::INT4);
    checkpoint.write(dir.path());
    let near = Catalogue::open(dir.path()).unwrap();
    let far = Catalogue::open_from(&Far::new(dir.path(), false)).unwrap();
    assert_same(&near, &far);
    assert!(far.warnings.is_empty(), "{:?}", far.warnings);
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    for lists in [true, false] {
        let error = Catalogue::open_from(&Far::new(dir.path(), lists)).unwrap_err();
        assert!(matches!(error, CatalogueError::NoShards { .. }), "{error}");
    }
}

#[test]
fn lies_are_the_same_from_afar() {
    let dir = sharded(&Checkpoint::olmoe(Form::Bf16), 2);
    let path = dir.path().join("model-00002-of-00002.safetensors");
    let whole = fs::read(&path).unwrap();
    let mut longer = whole.clone();
    longer.push(0);
    let past_end = (whole.len() as u64).to_le_bytes().to_vec();
    let huge = [&(1_u64 << 60).to_le_bytes()[..], &whole[8..]].concat();
    for bytes in [&whole[..whole.len() - 1], &longer, &past_end, &huge, &whole[..5], b""] {
        fs::write(&path, bytes).unwrap();
        let near = Catalogue::open(dir.path()).unwrap_err().to_string();
        let far = Catalogue::open_from(&Far::new(dir.path(), true)).unwrap_err().to_string();
        let path = path.to_str().unwrap();
        assert!(near.starts_with(path), "{near}");
        assert_eq!(near.replace(path, "hf:a/b/model-00002-of-00002.safetensors"), far);
    }
}

#[cfg(unix)]
mod links {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A hub's snapshot: every file a relative link into a store of blobs.
    fn snapshot(checkpoint: &Checkpoint) -> (TempDir, PathBuf) {
        let outer = tempdir().unwrap();
        let (blobs, folder) = (outer.path().join("blobs"), outer.path().join("snapshots/abc"));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(&folder).unwrap();
        let plain = sharded(checkpoint, 3);
        for (n, entry) in fs::read_dir(plain.path()).unwrap().enumerate() {
            let entry = entry.unwrap();
            let blob = format!("blob{n}");
            fs::copy(entry.path(), blobs.join(&blob)).unwrap();
            symlink(Path::new("../../blobs").join(blob), folder.join(entry.file_name())).unwrap();
        }
        (outer, folder)
    }

    #[test]
    fn a_folder_of_links_is_the_model_that_they_lead_to() {
        let checkpoint = Checkpoint::glm(Form::INT8);
        let (_outer, folder) = snapshot(&checkpoint);
        let plain = sharded(&checkpoint, 3);
        let linked = Catalogue::open(&folder).unwrap();
        assert_same(&Catalogue::open(plain.path()).unwrap(), &linked);
        assert!(linked.warnings.is_empty(), "{:?}", linked.warnings);
        assert_eq!(linked.tokenizer_bytes.0, 2);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_a_missing_file_and_named() {
        let (_outer, folder) = snapshot(&Checkpoint::olmoe(Form::Bf16));
        let name = "model-00002-of-00003.safetensors";
        let target = fs::read_link(folder.join(name)).unwrap();
        fs::remove_file(folder.join(&target)).unwrap();
        let error = Catalogue::open(&folder).unwrap_err();
        let CatalogueError::MissingShard { path, .. } = &error else { panic!("{error}") };
        assert_eq!(path, &folder.join(name));
        let message = error.to_string();
        let expected = format!("a link to {}, where nothing is", target.display());
        assert!(message.contains(&expected), "{message}");

        fs::remove_file(folder.join(name)).unwrap();
        fs::remove_file(folder.join("config.json")).unwrap();
        symlink("../../blobs/gone", folder.join("config.json")).unwrap();
        let message = Catalogue::open(&folder).unwrap_err().to_string();
        assert!(
            message.contains("config.json is missing (a link to ../../blobs/gone"),
            "{message}"
        );
    }

    #[test]
    fn a_broken_link_to_what_no_model_needs_is_a_warning() {
        let (_outer, folder) = snapshot(&Checkpoint::olmoe(Form::Bf16));
        write_shard(&folder.join("model-z.safetensors"), &[TestTensor::new("x", "U8", &[3])]);
        symlink("../../blobs/gone", folder.join("model-zz.safetensors")).unwrap();
        let model = Catalogue::open(&folder).unwrap();
        let warnings: String = model.warnings.iter().map(|w| w.finding.clone()).collect();
        assert!(
            warnings.contains("model-zz.safetensors (a link to ../../blobs/gone"),
            "{warnings}"
        );
    }
}

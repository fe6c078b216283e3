//! What is fuzzed of the plans crate: one function for each kind of file, used by the fuzz targets and
//! by the test that replays their corpus. Besides not panicking, each holds what its callers rely on.

use std::io;
use std::path::Path;
use std::sync::OnceLock;

use tierkeep_plans::catalogue::config::{self, ConfigError};
use tierkeep_plans::catalogue::header::{self, HeaderBytes, HeaderError, ShardHeader};
use tierkeep_plans::catalogue::{Catalogue, CatalogueError, Entry, Source, sidecar};
use tierkeep_plans::plan::{Plan, PlanError};
use tierkeep_plans::spec::ArchSpec;
use tierkeep_plans::usage::{self, FormatError, History, ImportError, ImportedCounts, Session};

/// A safetensors file from its first byte. What is accepted accounts for the file exactly.
pub(crate) fn header(file: &[u8]) -> Result<ShardHeader, HeaderError> {
    let file_bytes = file.len() as u64;
    let mut length_field = [0; 8];
    let n = file.len().min(8);
    length_field[..n].copy_from_slice(&file[..n]);
    let header_bytes = header::declared_bytes(length_field, file_bytes)? as usize;
    let header = header::parse_header(&file[8..8 + header_bytes], file_bytes)?;
    let mut at = 0;
    for tensor in header.tensors() {
        assert_eq!(tensor.start, at, "{tensor:?}");
        if let Some(bits) = tensor.dtype.bits() {
            let elements: u64 = tensor.shape.iter().product();
            assert_eq!(elements * bits, (tensor.end - tensor.start) * 8, "{tensor:?}");
        }
        at = tensor.end;
    }
    assert_eq!(header.data_start + at, file_bytes);
    assert_eq!(header.tensors().len(), header.n_tensors());
    Ok(header)
}

/// A config.json. What is accepted has sizes that the ledger can multiply.
pub(crate) fn config(json: &[u8]) -> Result<ArchSpec, ConfigError> {
    let _ = serde_json::from_slice(json).map(|value| config::stop_tokens(&value));
    let spec = config::arch_spec(json)?;
    assert!(spec.n_heads() > 0 && spec.layers.len() == spec.n_layers);
    Ok(spec)
}

/// An index, of a model whose files are only known through it.
pub(crate) fn index(json: &[u8]) -> Result<Catalogue, CatalogueError> {
    let by_index = Catalogue::open_from(&Tiny { index: json, lists: false });
    let listed = Catalogue::open_from(&Tiny { index: json, lists: true });
    // Where the files can be listed, an index may mislead nobody.
    let listed = listed.map(|model| (model.fingerprint, model.experts.len()));
    match &listed {
        Ok((_, n_experts)) => assert_eq!(*n_experts, 4),
        Err(error) => panic!("{error}"),
    }
    by_index
}

/// The JSON of a header, as that of the only file of a small packed model. What is accepted has the bytes
/// that its types ask for, and is kept and read back as it is.
pub(crate) fn container(json: &[u8]) -> Result<Catalogue, CatalogueError> {
    let model = Catalogue::open_from(&OneFile { json })?;
    for tensor in &model.tensors {
        assert_eq!(tensor.weight.bytes, tensor.stored.row_bytes(tensor.cols) * tensor.rows);
        let scales = tensor.scales.map_or(0, |span| span.bytes);
        let expected = tensor.stored.packed().map(|p| p.row_scale_bytes(tensor.cols) * tensor.rows);
        assert!(expected.is_none_or(|expected| expected == scales), "{tensor:?}");
    }
    let kept =
        sidecar::encode(&model).map(|kept| sidecar::decode(&kept, &model.spec, Path::new("")));
    let again = kept.flatten().unwrap_or_else(|| panic!("{model:?}"));
    assert_eq!((&again.tensors, &again.experts), (&model.tensors, &model.experts));
    Ok(model)
}

/// A plan file. What is read can be written, and reads back the same; no plan stops the check.
pub(crate) fn plan(bytes: &[u8]) -> Result<Plan, PlanError> {
    let text = String::from_utf8_lossy(bytes);
    let path = Path::new("plan.toml");
    let plan = Plan::from_toml(&text, path)?;
    let again = Plan::from_toml(&plan.to_toml()?, path)?;
    assert_eq!(plan.to_toml()?, again.to_toml()?);
    if let Ok(model) = Catalogue::open_from(&Tiny { index: b"", lists: true }) {
        let mut plan = plan.clone();
        let _ = plan.check(&model);
        // Past the first gate.
        plan.model.fingerprint.clone_from(&model.fingerprint);
        let _ = plan.check(&model);
    }
    Ok(plan)
}

/// The fingerprint that a fuzzed history is expected to have.
pub(crate) const FINGERPRINT: &str = "f";

/// A usage file as it is, and then as the body of one whose first line is right, of each version that
/// is read. What is read can be written, and reads back the same; a session that is taken in leaves
/// what can be read.
pub(crate) fn usage(bytes: &[u8]) -> Result<History, FormatError> {
    let hash = blake3::hash(bytes).to_hex();
    let framed = |version: u32| {
        let head = format!("tierkeep-usage {version} blake3={hash} bytes={}\n", bytes.len());
        usage::parse(&[head.as_bytes(), bytes].concat(), FINGERPRINT)
    };
    let mut read = usage::parse(bytes, FINGERPRINT);
    for version in usage::OLDEST_VERSION..=usage::FORMAT_VERSION {
        read = read.or_else(|_| framed(version));
    }
    let history = read?;
    let written = usage::render(&history)?;
    assert_eq!(usage::render(&usage::parse(&written, FINGERPRINT)?)?, written);
    let shape = history.shape();
    if shape.accesses_per_token() <= 64 && shape.n_experts <= 64 {
        let (n_experts, n_active) = (shape.n_experts, shape.n_experts_active);
        let mut session = Session::new(FINGERPRINT, &shape.layers, n_experts, n_active);
        if n_experts > 0 {
            session.record_token(&vec![0; shape.accesses_per_token()]);
        }
        let mut more = history.clone();
        more.merge(&session).expect("it is of the same shape");
        assert_eq!(usage::parse(&usage::render(&more)?, FINGERPRINT)?, more);
    }
    Ok(history)
}

/// Counts of another engine.
pub(crate) fn counts(bytes: &[u8]) -> Result<ImportedCounts, ImportError> {
    usage::import_counts(&String::from_utf8_lossy(bytes), 3, 5)
}

/// An olmoe of one layer and four experts in two files that exist in no folder.
struct Tiny<'a> {
    index: &'a [u8],
    lists: bool,
}

const TINY_CONFIG: &str = r#"{"model_type":"olmoe","vocab_size":8,"hidden_size":4,
    "num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,"intermediate_size":2,
    "num_experts":4,"num_experts_per_tok":2,"eos_token_id":1}"#;
const TINY_FILES: [&str; 2] =
    ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Names and shapes of the two files.
fn tiny_tensors() -> [Vec<(String, Vec<u64>)>; 2] {
    let matrix = |name: &str, rows, cols| (format!("{name}.weight"), vec![rows, cols]);
    let vector = |name: &str, len| (format!("{name}.weight"), vec![len]);
    let mut first = vec![matrix("model.embed_tokens", 8, 4), matrix("lm_head", 8, 4)];
    first.push(vector("model.norm", 4));
    let layer = "model.layers.0";
    for (name, rows) in [("q_proj", 4), ("k_proj", 2), ("v_proj", 2), ("o_proj", 4)] {
        first.push(matrix(&format!("{layer}.self_attn.{name}"), rows, 4));
    }
    first.push(vector(&format!("{layer}.self_attn.q_norm"), 4));
    first.push(vector(&format!("{layer}.self_attn.k_norm"), 2));
    first.push(vector(&format!("{layer}.input_layernorm"), 4));
    first.push(vector(&format!("{layer}.post_attention_layernorm"), 4));
    let mut second = vec![matrix(&format!("{layer}.mlp.gate"), 4, 4)];
    for expert in 0..4 {
        let prefix = format!("{layer}.mlp.experts.{expert}");
        second.push(matrix(&format!("{prefix}.gate_proj"), 2, 4));
        second.push(matrix(&format!("{prefix}.up_proj"), 2, 4));
        second.push(matrix(&format!("{prefix}.down_proj"), 4, 2));
    }
    [first, second]
}

/// The headers of the two files.
fn tiny_headers() -> &'static [HeaderBytes; 2] {
    static HEADERS: OnceLock<[HeaderBytes; 2]> = OnceLock::new();
    HEADERS.get_or_init(|| {
        tiny_tensors().map(|tensors| {
            let mut json = serde_json::Map::new();
            let mut at = 0;
            for (name, shape) in tensors {
                let end = at + 2 * shape.iter().product::<u64>();
                let entry = serde_json::json!({
                    "dtype": "BF16", "shape": shape, "data_offsets": [at, end],
                });
                json.insert(name, entry);
                at = end;
            }
            let json = serde_json::Value::Object(json).to_string().into_bytes();
            let file_bytes = 8 + json.len() as u64 + at;
            HeaderBytes { json, file_bytes }
        })
    })
}

/// An olmoe of one layer and one expert in one file, whose header is any text. Its rows have 72 columns,
/// those of the expert's down 3.
struct OneFile<'a> {
    json: &'a [u8],
}

const PACKED_CONFIG: &str = r#"{"model_type":"olmoe","vocab_size":3,"hidden_size":72,
    "num_hidden_layers":1,"num_attention_heads":1,"num_key_value_heads":1,"intermediate_size":3,
    "num_experts":1,"num_experts_per_tok":1,"eos_token_id":1}"#;

impl Source for OneFile<'_> {
    fn label(&self) -> &Path {
        Path::new("one")
    }

    fn list(&self) -> io::Result<Option<Vec<Entry>>> {
        let entry = |name: &str| Entry { name: name.to_owned(), bytes: None, broken_link: None };
        Ok(Some(vec![entry("config.json"), entry("model.safetensors")]))
    }

    fn small_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok((name == "config.json").then(|| PACKED_CONFIG.as_bytes().to_vec()))
    }

    fn file_bytes(&self, _: &str) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn header(&self, _: &str) -> Result<HeaderBytes, HeaderError> {
        let ends = |entry: &serde_json::Value| entry["data_offsets"][1].as_u64();
        let parsed = serde_json::from_slice::<serde_json::Map<_, _>>(self.json);
        let end = parsed.ok().and_then(|map| map.values().filter_map(ends).max()).unwrap_or(0);
        let file_bytes = (8 + self.json.len() as u64).saturating_add(end);
        Ok(HeaderBytes { json: self.json.to_vec(), file_bytes })
    }

    fn index_is_cheap(&self) -> bool {
        true
    }
}

impl Source for Tiny<'_> {
    fn label(&self) -> &Path {
        Path::new("tiny")
    }

    fn list(&self) -> io::Result<Option<Vec<Entry>>> {
        let entry = |name: &str| Entry { name: name.to_owned(), bytes: None, broken_link: None };
        let names = ["config.json", INDEX_FILE].into_iter().chain(TINY_FILES);
        Ok(self.lists.then(|| names.map(entry).collect()))
    }

    fn small_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(match name {
            "config.json" => Some(TINY_CONFIG.as_bytes().to_vec()),
            INDEX_FILE => Some(self.index.to_vec()),
            _ => None,
        })
    }

    fn file_bytes(&self, _: &str) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn header(&self, name: &str) -> Result<HeaderBytes, HeaderError> {
        let at = TINY_FILES.iter().position(|file| *file == name);
        let header = at.and_then(|at| tiny_headers().get(at));
        header.cloned().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound).into())
    }

    fn index_is_cheap(&self) -> bool {
        true
    }
}

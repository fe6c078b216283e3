//! The binary on models that are not here: the same plan as from disk, few bytes, what a download
//! would be, and plain refusals. Servers are local; no test uses a network.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

#[path = "support/binary.rs"]
mod binary;
#[path = "../hub/tests/support/mod.rs"]
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use binary::{OLMOE, Ran, root};
use serde_json::Value;
use support::{COMMIT, Response, Server, folder_server, hub_answer, hub_server, listing};

impl Ran {
    #[track_caller]
    fn says(&self, code: i32, parts: &[&str]) {
        // Lines are broken where the width says.
        let said = format!("{}{}", self.out, self.err);
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(self.code, code, "{said}");
        for part in parts {
            assert!(said.contains(part), "it does not say {part:?}: {said}");
        }
        assert!(!said.contains("panicked"), "{said}");
    }
}

/// Runs the binary with the hub at `endpoint`, in `folder`, where its data, caches and home are too.
fn tierkeep(folder: &Path, endpoint: &str, args: &[&str], env: &[(&str, &str)]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tierkeep"));
    command
        .args(args)
        .current_dir(folder)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", folder)
        .env("XDG_DATA_HOME", folder.join("data"))
        .env("XDG_CACHE_HOME", folder.join("cache"))
        .env("HF_ENDPOINT", endpoint)
        .envs(env.iter().copied())
        .stdin(Stdio::null());
    Ran::of(&mut command)
}

/// A copy of a tiny model as it would be published: without the reference's answers beside it.
fn published(model: &str, into: &Path) -> PathBuf {
    let to = into.join("model");
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(root().join(model)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.starts_with("oracle") {
            fs::copy(&path, to.join(name)).unwrap();
        }
    }
    to
}

/// The reference's tiny models: four or five files each.
const GLM: &str = "tests/oracles/glm_moe_dsa";

const NOWHERE: &str = "http://127.0.0.1:9";

/// Bytes of the headers of a model, length fields included.
fn head_bytes(model: &Path) -> u64 {
    let files = fs::read_dir(model).unwrap().map(|entry| entry.unwrap().path());
    files
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with("model") && name.ends_with(".safetensors")
        })
        .map(|path| 8 + u64::from_le_bytes(fs::read(path).unwrap()[..8].try_into().unwrap()))
        .sum()
}

fn plan_args<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let base = ["plan", model, "--ram", "100MB", "--ctx", "64", "--no-measure", "--json"];
    [&base[..], more].concat()
}

/// A plan without what cannot be the same: where the model lies, the disk it would be on, and what a
/// machine has available from one moment to the next.
fn comparable(mut plan: Value) -> Value {
    let object = plan.as_object_mut().unwrap();
    object.remove("download");
    object.remove("machine");
    object.remove("facts");
    let model = object["model"].as_object_mut().unwrap();
    assert!(model.remove("directory").is_some());
    plan
}

#[test]
fn the_plan_is_the_same_as_from_disk_and_costs_the_headers() {
    for model in [OLMOE, GLM] {
        let folder = tempfile::tempdir().unwrap();
        let model = published(model, folder.path());
        let here = model.to_str().unwrap();
        let from_disk = tierkeep(folder.path(), NOWHERE, &plan_args(here, &[]), &[]);
        assert_eq!(from_disk.code, 0, "{from_disk:?}");
        let hub = hub_server(&model);
        let server = folder_server(&model);
        let url = server.url("/config.json");
        for (text, name) in [("hf:o/n", format!("hf:o/n@{COMMIT}")), (url.as_str(), server.url(""))]
        {
            let ran = tierkeep(folder.path(), &hub.url(""), &plan_args(text, &[]), &[]);
            assert_eq!(ran.code, from_disk.code, "{ran:?}");
            let plan = ran.json();
            assert_eq!(plan["model"]["directory"], name.as_str());
            assert_eq!(comparable(plan.clone()), comparable(from_disk.json()), "{text}");
            let transfer = &plan["download"]["transfer"];
            assert_eq!(transfer["head_bytes"], head_bytes(&model));
        }
        // Beside the headers: config, listing or index, and a byte for each size that is asked.
        let small = |name: &str| model.join(name).metadata().map_or(0, |m| m.len());
        let config = small("config.json") + small("generation_config.json");
        let most = head_bytes(&model) as f64 * 1.1;
        let of_hub = hub.sent() - config - listing(&model, COMMIT).len() as u64;
        assert!(of_hub as f64 <= most, "{of_hub} {most}");
        assert!(!hub.requests().iter().any(|request| request.path().ends_with(".index.json")));
        let of_server = server.sent() - config - small("model.safetensors.index.json");
        assert!(of_server as f64 <= most, "{of_server} {most}");
    }
}

#[test]
fn a_second_plan_asks_once_and_none_needs_a_network_after_the_first() {
    let model = root().join(OLMOE);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let hub = hub_server(&model);
    let args = plan_args("hf:o/n", &[]);
    let first = tierkeep(folder, &hub.url(""), &args, &[]);
    assert_eq!(first.code, 0, "{first:?}");
    let n_requests = hub.n_requests();
    let second = tierkeep(folder, &hub.url(""), &args, &[]);
    assert_eq!(hub.n_requests(), n_requests + 1);
    assert_eq!(comparable(second.json()), comparable(first.json()));
    let offline = tierkeep(folder, &hub.url(""), &args, &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(hub.n_requests(), n_requests + 1);
    assert_eq!(comparable(offline.json()), comparable(first.json()));
    assert!(offline.err.contains("from the cache: HF_HUB_OFFLINE is set"), "{offline:?}");
    assert!(offline.json()["download"]["as_of_unix_s"].is_u64());
    // Kept files may be deleted at any time.
    fs::remove_dir_all(folder.join("cache")).unwrap();
    let gone = tierkeep(folder, &hub.url(""), &args, &[("HF_HUB_OFFLINE", "1")]);
    gone.says(2, &["HF_HUB_OFFLINE is set", "not in the cache"]);
}

#[test]
fn the_download_is_part_of_the_answer() {
    let model = root().join(OLMOE);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let hub = hub_server(&model);
    let args = ["plan", "hf:o/n", "--ram", "100MB", "--no-measure", "--bandwidth", "1kB/s"];
    let ran = tierkeep(folder, &hub.url(""), &args, &[]);
    let how = format!("hf download o/n --revision {COMMIT} --local-dir DIR");
    ran.says(0, &["before the download", "1 kB/s (as given)", "(by the listing)", &how, "enough"]);
    let json = tierkeep(folder, &hub.url(""), &plan_args("hf:o/n", &[]), &[]).json();
    let download = &json["download"];
    let all: u64 =
        fs::read_dir(&model).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert_eq!(download["download"]["all"]["bytes"], all);
    let needed = download["download"]["needed"]["bytes"].as_u64().unwrap();
    assert!(needed <= all && needed > all / 2, "the oracle's own answers are not needed: {needed}");
    assert_eq!(download["rate_source"], "unknown", "so little measures nothing");
    assert_eq!(download["short_bytes"], 0);
    // A model that does not fit is not worth the download: both are told.
    let ram = ["plan", "hf:o/n", "--ram", "9MB", "--no-measure"];
    let ran = tierkeep(folder, &hub.url(""), &ram, &[]);
    ran.says(1, &["does not fit in 9.00 MB", "before the download", &how]);
    let ran = tierkeep(folder, &hub.url(""), &[&ram[..], &["--json"]].concat(), &[]);
    assert_eq!((ran.code, &ran.json()["download"]["repo"]), (1, &Value::from("o/n")));
    for bad in ["1", "fast"] {
        let args = ["plan", "hf:o/n", "--bandwidth", bad];
        tierkeep(folder, &hub.url(""), &args, &[]).says(2, &["--bandwidth", "1Gbit/s"]);
    }
}

#[test]
fn inspect_looks_at_it_too() {
    let folder = tempfile::tempdir().unwrap();
    let model = published(GLM, folder.path());
    let hub = hub_server(&model);
    let here = model.to_str().unwrap();
    let look = |model: &str| {
        let ran = tierkeep(folder.path(), &hub.url(""), &["inspect", model, "--json"], &[]);
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.json()
    };
    let (from_disk, from_hub) = (look(here), look("hf:o/n"));
    assert_eq!(from_hub["download"]["commit"], COMMIT);
    let without_place = |mut json: Value| {
        json["inspection"].as_object_mut().unwrap().remove("directory").unwrap();
        json["inspection"].clone()
    };
    assert_eq!(without_place(from_hub), without_place(from_disk));
}

#[test]
fn doctor_looks_at_it_before_the_download() {
    let folder = tempfile::tempdir().unwrap();
    let model = published(GLM, folder.path());
    let hub = hub_server(&model);
    let doctor = |more: &[&str]| {
        let args = [&["doctor", "hf:o/n", "--no-measure"], more].concat();
        tierkeep(folder.path(), &hub.url(""), &args, &[])
    };
    let ran = doctor(&["--bandwidth", "100MB/s"]);
    ran.says(
        0,
        &[
            "each as long as its header says",
            "model.disk",
            "before the download",
            "(as given)",
            "hf download o/n",
            "next: tierkeep plan hf:o/n",
        ],
    );
    let json = doctor(&["--json"]).json();
    assert_eq!(json["download"]["commit"], COMMIT);
    let check = |id: &str| {
        let checks = json["checks"].as_array().unwrap();
        checks.iter().find(|check| check["id"] == id).unwrap_or_else(|| panic!("{id}: {json}"))
    };
    for id in ["model.config", "model.shards", "model.headers", "model.tensors", "model.disk"] {
        assert_eq!(check(id)["status"], "ok", "{json}");
    }
    // What needs the files themselves is skipped, and says why.
    for id in ["model.tokenizer", "model.chat_template", "model.holes"] {
        assert_eq!(check(id)["status"], "skip");
        let finding = check(id)["finding"].as_str().unwrap();
        assert!(finding.contains("the model is not here yet"), "{finding}");
    }
    // Every byte cannot be read before it is here; nothing of it is fetched for that.
    let n_requests = hub.n_requests();
    let ran = doctor(&["--deep"]);
    ran.says(1, &["is not downloaded", "hf download o/n --revision", "`tierkeep doctor DIR`"]);
    assert!(hub.n_requests() - n_requests <= n_requests, "more was fetched than to look");
}

#[test]
fn verbs_that_need_the_weights_say_how_to_get_them() {
    let model = root().join(OLMOE);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let hub = hub_server(&model);
    let verbs: [&[&str]; 3] =
        [&["run", "hf:o/n", "--ids", "1,2"], &["verify", "hf:o/n"], &["convert", "hf:o/n", "out"]];
    for verb in verbs {
        let ran = tierkeep(folder, &hub.url(""), verb, &[]);
        let then = format!("then `tierkeep {} DIR`", verb[0]);
        ran.says(1, &["is not downloaded", "hf download o/n --revision", "MB in", &then]);
    }
    assert!(!folder.join("out").exists());
    // A plan from before the download is run on the downloaded folder.
    let args = plan_args("hf:o/n", &["-o", "plan.toml"]);
    assert_eq!(tierkeep(folder, &hub.url(""), &args, &[]).code, 0);
    let run = ["run", "plan.toml", "--ids", "1,2", "-n", "2", "--no-usage"];
    let n_requests = hub.n_requests();
    tierkeep(folder, &hub.url(""), &run, &[])
        .says(1, &["is not downloaded", "hf download o/n", "tierkeep run plan.toml --model DIR"]);
    assert_eq!(hub.n_requests(), n_requests, "what is to be done needs no network");
    let there = model.to_str().unwrap();
    let ran = tierkeep(folder, NOWHERE, &[&run[..], &["--model", there]].concat(), &[]);
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[cfg(unix)]
#[test]
fn the_hub_clients_cache_is_a_place_of_models() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let repo = folder.join("cache/huggingface/hub/models--o--n");
    let snapshot = repo.join("snapshots").join(COMMIT);
    for part in ["blobs", "refs"] {
        fs::create_dir_all(repo.join(part)).unwrap();
    }
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(repo.join("refs/main"), COMMIT).unwrap();
    for (i, entry) in fs::read_dir(root().join(OLMOE)).unwrap().enumerate() {
        let path = entry.unwrap().path();
        fs::copy(&path, repo.join(format!("blobs/{i}"))).unwrap();
        let link = snapshot.join(path.file_name().unwrap());
        std::os::unix::fs::symlink(format!("../../blobs/{i}"), link).unwrap();
    }
    let ran = tierkeep(folder, NOWHERE, &plan_args("o/n", &[]), &[]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let canonical = snapshot.canonicalize().unwrap();
    assert_eq!(ran.json()["model"]["directory"], canonical.to_str().unwrap());
    assert_eq!(ran.json()["download"], Value::Null);
    let run = ["run", "o/n", "--ids", "1,2", "-n", "2", "--ram", "100MB", "--no-measure"];
    assert_eq!(tierkeep(folder, NOWHERE, &run, &[]).code, 0);
    // A folder of that name comes first.
    fs::create_dir_all(folder.join("o/n")).unwrap();
    tierkeep(folder, NOWHERE, &plan_args("o/n", &[]), &[]).says(2, &["no config.json"]);
    fs::remove_dir_all(folder.join("o")).unwrap();
    fs::remove_file(repo.join("blobs/2")).unwrap();
    tierkeep(folder, NOWHERE, &plan_args("o/n", &[]), &[])
        .says(1, &["blobs/2, which is missing", "hf download o/n"]);
    tierkeep(folder, NOWHERE, &plan_args("o/other", &[]), &[])
        .says(2, &["not in the hub cache", "hf:o/other", "hf download o/other"]);
}

#[test]
fn refusals_are_plain_and_have_a_kind() {
    let model = root().join(OLMOE);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let refused = |code: &'static str, status: u16| {
        let model = model.clone();
        Server::start(move |request| {
            if request.path().contains("/resolve/") || code != "GatedRepo" {
                return Response::new(status, "").header("X-Error-Code", code);
            }
            hub_answer(request, &model)
        })
    };
    for (code, status, kind, part) in [
        ("GatedRepo", 403, "hub.gated", "accept its licence"),
        ("RepoNotFound", 401, "hub.repo_not_found", "HF_TOKEN"),
        ("RevisionNotFound", 404, "hub.revision_not_found", "branches"),
    ] {
        let server = refused(code, status);
        let ran = tierkeep(folder, &server.url(""), &plan_args("hf:o/n", &[]), &[]);
        ran.says(2, &[part]);
        assert_eq!(ran.json()["error"]["kind"], kind);
    }
    let ran = tierkeep(folder, NOWHERE, &plan_args("hf:o/n", &[]), &[]);
    ran.says(2, &["cannot reach 127.0.0.1:9", "HTTPS_PROXY"]);
    let whole = Server::start(|request| {
        let name = request.path().trim_start_matches('/');
        let body = fs::read(root().join(OLMOE).join(name));
        body.map_or_else(|_| Response::new(404, ""), |body| Response::new(200, body))
    });
    let ran = tierkeep(folder, NOWHERE, &plan_args(&whole.url("/config.json"), &[]), &[]);
    ran.says(2, &["does not send parts of files"]);
    tierkeep(folder, NOWHERE, &plan_args("hf:a/b/c", &[]), &[]).says(2, &["one slash"]);
    let ran = tierkeep(folder, "nonsense", &plan_args("hf:o/n", &[]), &[]);
    ran.says(2, &["HF_ENDPOINT"]);
    // A setting that is of no use here is no reason to refuse.
    let here = model.to_str().unwrap();
    assert_eq!(tierkeep(folder, "nonsense", &plan_args(here, &[]), &[]).code, 0);
}

/// A damaged file on a server is found by its header, as on disk.
#[test]
fn damage_is_found_before_the_download() {
    let folder = tempfile::tempdir().unwrap();
    let model = published(OLMOE, folder.path());
    let shard = model.join("model-00003-of-00004.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 4096]).unwrap();
    let hub = hub_server(&model);
    let run = |args: &[&str]| tierkeep(folder.path(), &hub.url(""), args, &[]);
    run(&plan_args("hf:o/n", &[])).says(1, &["model-00003-of-00004.safetensors", "cut off"]);
    fs::remove_file(&shard).unwrap();
    let server = folder_server(&model);
    let ran = run(&plan_args(&server.url(""), &[]));
    ran.says(1, &["model-00003-of-00004.safetensors is missing"]);
    let mut hostile = bytes;
    hostile[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    fs::write(&shard, hostile).unwrap();
    run(&plan_args(&server.url(""), &[])).says(1, &["declares a header of 1152921504606846976"]);
}

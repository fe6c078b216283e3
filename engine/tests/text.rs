//! Tokenizers and chat templates made here, against what the reference client does with them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};
use tempfile::TempDir;
use tierkeep_engine::text::{Message, Text, TextError};

/// The characters by which byte-level tokenizers spell bytes.
fn byte_level_alphabet() -> Vec<char> {
    let plain = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256;
    (0..256_u32)
        .map(|b| {
            let code = if plain(b) {
                b
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).unwrap()
        })
        .collect()
}

fn special(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true})
}

/// Four special tokens, then the 256 bytes, then a few merges. Its post-processor would add a BOS.
fn byte_level() -> Value {
    let alphabet = byte_level_alphabet();
    let mut vocab = serde_json::Map::new();
    for (id, name) in ["<|eos|>", "<|user|>", "<|assistant|>", "<|bos|>"].iter().enumerate() {
        vocab.insert((*name).to_owned(), json!(id));
    }
    for (byte, c) in alphabet.iter().enumerate() {
        vocab.insert(c.to_string(), json!(4 + byte));
    }
    // The last cuts the second byte of U+00E9 off from the first.
    let e9 = (alphabet[0xc3], alphabet[0xa9]);
    let merges = [("h", "i"), ("Ġ", "hi")];
    for (id, token) in ["hi", "Ġhi"].iter().enumerate() {
        vocab.insert((*token).to_owned(), json!(260 + id));
    }
    vocab.insert(format!("{}!", e9.1), json!(262));
    let merges: Vec<Value> = merges.iter().map(|(a, b)| json!([a, b])).collect();
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|eos|>"},
        "added_tokens": [special(0, "<|eos|>"), special(1, "<|user|>"),
            special(2, "<|assistant|>"), special(3, "<|bos|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [3], "tokens": ["<|bos|>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges}
    })
}

/// As sentencepiece models are published: spaces as U+2581, bytes as `<0x..>`, a first space that
/// decoding takes away.
fn byte_fallback() -> Value {
    let mut vocab = serde_json::Map::new();
    for token in ["<unk>", "<s>", "</s>"] {
        let id = vocab.len();
        vocab.insert(token.to_owned(), json!(id));
    }
    for byte in 0..256 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(3 + byte));
    }
    for token in ["▁", "▁▁", "a", "▁a", "é", "n't"] {
        let id = vocab.len();
        vocab.insert(token.to_owned(), json!(id));
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>",
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": []}
    })
}

/// Words with spaces between, which decoding joins at contractions.
fn word_pieces() -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "[UNK]")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab":
            {"[UNK]": 0, "do": 1, "n't": 2, "##ing": 3, ".": 4, "'": 5, "s": 6, "é": 7}}
    })
}

struct Files(TempDir);

impl Files {
    fn new(tokenizer: &Value) -> Self {
        let files = Self(TempDir::new().unwrap());
        files.write("tokenizer.json", &tokenizer.to_string())
    }

    fn write(self, name: &str, text: &str) -> Self {
        fs::write(self.0.path().join(name), text).unwrap();
        self
    }

    fn template(template: &str) -> Self {
        let config = json!({"chat_template": template, "bos_token": "<|bos|>", "add_bos_token": true,
            "eos_token": {"content": "<|eos|>", "special": true}, "pad_token": null});
        Self::new(&byte_level()).write("tokenizer_config.json", &config.to_string())
    }

    fn open(&self) -> Result<Text, TextError> {
        Text::open(self.0.path())
    }

    fn error(&self) -> String {
        self.open().err().expect("a broken folder").to_string()
    }

    fn render(&self, messages: &[Message]) -> Result<String, TextError> {
        self.open().unwrap().render_chat(messages)
    }
}

fn turns(turns: &[(&str, &str)]) -> Vec<Message> {
    turns
        .iter()
        .map(|(role, content)| Message { role: (*role).into(), content: (*content).into() })
        .collect()
}

#[test]
fn no_special_token_is_added_and_those_in_the_text_are_found() {
    let text = Files::new(&byte_level()).open().unwrap();
    // Neither is cut to 5 nor filled to 40: those are the training pipeline's settings.
    let ids = text.encode_raw("<|user|>hi hi é").unwrap();
    let bytes = |s: &str| s.bytes().map(|b| 4 + u32::from(b)).collect::<Vec<_>>();
    assert_eq!(ids, [vec![1, 260, 261], bytes(" é")].concat());
    assert_eq!(text.decode(&ids).unwrap(), "hi hi é");
    assert_eq!(text.vocab_size(), 263);
    assert_eq!(text.decode(&[260, 4000]).unwrap(), "hi", "an id that the tokenizer lacks");
    assert!(text.encode_raw("").unwrap().is_empty());
}

#[test]
fn a_conversation_is_what_the_template_says() {
    let files = Files::template(
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m.content.strip() }}{{ eos_token }}\
         {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    );
    let text = files.open().unwrap();
    assert!(text.has_chat_template());
    let messages = [Message::user(" hi ")];
    assert_eq!(text.render_chat(&messages).unwrap(), "<|user|>hi<|eos|><|assistant|>");
    assert_eq!(text.encode_chat(&messages).unwrap(), [1, 260, 0, 2]);
}

#[test]
fn templates_run_as_in_the_reference_client() {
    // Each expected text is what jinja2 renders with trim_blocks, lstrip_blocks and loop controls.
    let cases = [
        ("{{ bos_token }}{% if pad_token is defined %}pad{% endif %}", "<|bos|>"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{{ messages[0].content.startswith('h') }}", "True"),
        (
            "{{ messages | length }}{{ messages[1:] | length }}{{ messages[-1]['role'] }}",
            "21assistant",
        ),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
            "assistant",
        ),
        ("{% for m in messages %}{{ m.role[:1] | upper }}{% break %}{% endfor %}", "U"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        ("{{ '<b>' ~ (messages[0].content | tojson) }}", "<b>\"hi <you>\""),
        ("{{ {'a': [1, 2]} | tojson }}", "{\"a\": [1, 2]}"),
        ("{{ {'a': [1]} | tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ]\n}"),
        ("{{ {'a': 1} | tojson(ensure_ascii=False) }}", "{\"a\": 1}"),
        ("{% if strftime_now is defined %}today{% else %}26 Jul 2024{% endif %}", "26 Jul 2024"),
        ("{% if tools is not none %}tools{% endif %}{% if not documents %}-{% endif %}", "-"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% macro turn(m) %}[{{ m.role }}]{% endmacro %}{{ turn(messages[0]) }}", "[user]"),
        ("{{ messages[0].content.split(' ')[-1].rstrip('>').lstrip('<') }}", "you"),
        ("{{ messages[0].get('name', 'none') }}", "none"),
        ("{%- if messages[0]['role'] == 'system' %}s{%- else -%} u {%- endif %}", "u"),
        ("{{ undefined_thing }}{{ messages[0].tool_calls is defined }}", "False"),
    ];
    let messages = turns(&[("user", "hi <you>"), ("assistant", "yes")]);
    for (template, expect) in cases {
        let rendered = Files::template(template).render(&messages);
        assert_eq!(rendered.unwrap_or_else(|e| panic!("{template}: {e}")), expect, "{template}");
    }
}

#[test]
fn a_template_refuses_and_fails_by_line() {
    let messages = turns(&[("user", "hi")]);
    let cases = [
        ("\n\n{{ raise_exception('roles must alternate') }}", "line 3: roles must alternate"),
        ("a\n{% if %}", "line 2: syntax error"),
        ("{{ messages[0].content.no_such_method() }}", "line 1: unknown method"),
        ("{{ no_such_function('%Y') }}", "line 1: unknown function"),
    ];
    for (template, expect) in cases {
        let files = Files::template(template);
        let error = files.render(&messages).unwrap_err();
        assert!(matches!(error, TextError::Template { .. }));
        let error = error.to_string();
        assert!(error.contains("tokenizer_config.json") && error.contains(expect), "{error}");
        // Raw text needs no template.
        assert_eq!(files.open().unwrap().encode_raw("hi").unwrap(), [260]);
    }
}

#[test]
fn templates_are_found_where_models_keep_them() {
    let config = json!({"chat_template": [{"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "from the list"}]});
    let files = Files::new(&byte_level()).write("tokenizer_config.json", &config.to_string());
    assert_eq!(files.render(&[]).unwrap(), "from the list");
    let files = files.write("chat_template.jinja", "from the file{{ bos_token }}");
    assert_eq!(files.render(&[]).unwrap(), "from the file");

    for config in [r#"{}"#, r#"{"chat_template":null}"#, r#"{"chat_template":[{"name":"rag"}]}"#] {
        let files = Files::new(&byte_level()).write("tokenizer_config.json", config);
        let text = files.open().unwrap();
        assert!(!text.has_chat_template());
        let error = text.encode_chat(&[]).unwrap_err().to_string();
        assert!(error.contains("has no chat template"), "{error}");
    }
    assert!(!Files::new(&byte_level()).open().unwrap().has_chat_template());
}

#[test]
fn broken_files_are_named_with_the_remedy() {
    let empty = Files(TempDir::new().unwrap());
    let error = empty.error();
    assert!(error.ends_with("tokenizer.json is missing: give token ids with --ids"), "{error}");
    for broken in ["{}", "", "[", r#"{"version":"1.0","model":{"type":"BPE"}}"#] {
        let error = Files(TempDir::new().unwrap()).write("tokenizer.json", broken).error();
        assert!(error.contains("tokenizer.json is not a tokenizer"), "{error}");
        assert!(error.ends_with("give token ids with --ids"), "{error}");
    }
    let error = Files::new(&byte_level()).write("tokenizer_config.json", "{").error();
    assert!(error.contains("tokenizer_config.json cannot be used"), "{error}");
}

/// Pieces that a stream gives for each token, then what `finish` gives.
fn pieces(text: &Text, ids: &[u32]) -> Vec<Option<String>> {
    let mut stream = text.stream();
    let mut pieces: Vec<_> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

#[test]
fn a_stream_holds_back_what_is_not_yet_a_character() {
    let some = |s: &str| Some(s.to_owned());
    let text = Files::new(&byte_level()).open().unwrap();
    let byte = |b: u8| 4 + u32::from(b);
    // U+20AC in three bytes, a special token inside it.
    let ids = [260, byte(0xe2), 0, byte(0x82), byte(0xac), 261, 0];
    let expect = [some("hi"), None, None, None, some("€"), some(" hi"), None, None];
    assert_eq!(pieces(&text, &ids), expect);
    // A token that begins with the end of a character.
    assert_eq!(pieces(&text, &[byte(0xc3), 262]), [None, some("é!"), None]);
    // What never becomes a character comes out at the end.
    assert_eq!(pieces(&text, &[260, byte(0xe2)]), [some("hi"), None, some("\u{fffd}")]);
    assert_eq!(pieces(&text, &[]), [None]);
    // U+FFFD that the model wrote itself.
    let real: Vec<u32> = "\u{fffd}".bytes().map(byte).chain([260]).collect();
    assert_eq!(pieces(&text, &real), [None, None, None, some("\u{fffd}hi"), None]);

    let text = Files::new(&byte_fallback()).open().unwrap();
    let piece = |token: u32| 3 + 256 + token;
    // A leading space is taken from the first token only.
    let ids = [piece(3), piece(3), 3 + 0xc3, 3 + 0xa9, piece(2)];
    assert_eq!(pieces(&text, &ids), [some("a"), some(" a"), None, None, some("éa"), None]);
}

fn check_stream(text: &Text, ids: &[u32]) -> Result<(), TestCaseError> {
    let streamed: String = pieces(text, ids).into_iter().flatten().collect();
    prop_assert_eq!(streamed, text.decode(ids).unwrap());
    Ok(())
}

#[test]
fn streamed_text_is_the_text_of_the_whole() {
    for (tokenizer, ids) in [
        // Mostly the bytes of multi-byte characters.
        (byte_level(), prop_oneof![0..5_u32, 255..265_u32, 130..260_u32].boxed()),
        (byte_fallback(), prop_oneof![0..3_u32, 258..266_u32, 130..200_u32, 195..258_u32].boxed()),
        (word_pieces(), (0..9_u32).boxed()),
    ] {
        let text = Files::new(&tokenizer).open().unwrap();
        let config =
            ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() };
        let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let mut runner = TestRunner::new_with_rng(config, random);
        runner
            .run(&proptest::collection::vec(ids, 0..24), |ids| check_stream(&text, &ids))
            .unwrap();
    }
    let text = Files::new(&byte_level()).open().unwrap();
    let ids = text.encode_raw("hi é € 😀 hi 日本語").unwrap();
    check_stream(&text, &ids).unwrap();
}

#[test]
fn glm_nano_speaks_as_its_oracle() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/glm-nano");
    let text = Text::open(&directory).unwrap();
    let oracle: Value =
        serde_json::from_slice(&fs::read(directory.join("oracle.json")).unwrap()).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let mut chats = 0;
    for case in oracle["cases"].as_array().unwrap() {
        let prompt = case["text"].as_str().unwrap();
        assert_eq!(text.encode_raw(prompt).unwrap(), ids(&case["prompt"]), "{prompt}");
        let greedy = ids(&case["greedy"]);
        // The oracle spells the stop token; text leaves special tokens out.
        let expect = case["greedy_text"].as_str().unwrap().replace("<|endoftext|>", "");
        assert_eq!(text.decode(&greedy).unwrap(), expect);
        let streamed: String = pieces(&text, &greedy).into_iter().flatten().collect();
        assert_eq!(streamed, expect);
        let question =
            prompt.strip_prefix("<|user|>\n").and_then(|p| p.strip_suffix("<|assistant|>\n"));
        if let Some(question) = question {
            let chat = text.encode_chat(&[Message::user(question)]).unwrap();
            assert_eq!(chat, ids(&case["prompt"]));
            chats += 1;
        }
    }
    assert!(chats > 0, "the oracle holds chats");
}

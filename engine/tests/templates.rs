//! Idioms of published chat templates, in templates written here: what each must give is what jinja2 3.1 gives
//! with the settings and functions of the reference client.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops where something is wrong")]

use std::fs;

use tempfile::TempDir;
use tierkeep_engine::text::{Message, Text, TextError};

const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
    "decoder": null, "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0}}}"#;

fn render(template: &str) -> Result<String, TextError> {
    let directory = TempDir::new().unwrap();
    fs::write(directory.path().join("tokenizer.json"), TOKENIZER).unwrap();
    fs::write(directory.path().join("chat_template.jinja"), template).unwrap();
    let turn = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
    let messages = [
        turn("system", "be\n brief "),
        turn("user", "hi <you>"),
        turn("assistant", "<think>\nhm\n</think>\n\nyes"),
        turn("user", "  more/nothink"),
    ];
    Text::open(directory.path()).unwrap().render_chat(&messages)
}

#[test]
fn idioms_give_what_the_reference_client_gives() {
    let cases = [
        (
            "{%- set ns = namespace(last=-1, tool=false) %}{%- for m in messages[::-1] %}{%- set i = (messages | length - 1) - loop.index0 %}{%- if ns.last < 0 and m.role == 'user' and m.content is string %}{%- set ns.last = i %}{%- endif %}{%- endfor %}{{ ns.last }}{{ ns.tool }}",
            "3False",
        ),
        (
            "{{ messages[2].content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}",
            "hm",
        ),
        ("{{ messages[2]['content'].split('</think>')[-1].strip() }}", "yes"),
        (
            "{% for m in messages[1:] %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{{ loop.index0 }}{% endfor %}",
            "012",
        ),
        (
            "{%- macro text(content) -%}{%- if content is string -%}{{- content }}{%- elif content is iterable and content is not mapping -%}{%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}{%- endfor -%}{%- else -%}{{- content }}{%- endif -%}{%- endmacro -%}{{ text(messages[1].content) }}|{{ text([{'type': 'text', 'text': 'a'}, 'b']) }}|{{ text(5) }}",
            "hi <you>|ab|5",
        ),
        (
            "{%- macro spec(p, required=[], nullable=false) -%}{{ p.name }}{{ '?' if p.name not in required }}{{ ' | null' if nullable }}{%- endmacro -%}{{ spec({'name': 'a'}, ['b'], nullable=true) }};{{ spec({'name': 'b'}, required=['b']) }}",
            "a? | null;b",
        ),
        (
            "{%- for k, v in {'x': 1, 'y': [2]}.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}",
            "x=1, y=[2]",
        ),
        (
            "{% for k, v in {'x': 1, 'y': 'z'} | items %}{{ k }}={{ v if v is string else v | tojson }};{% endfor %}",
            "x=1;y=z;",
        ),
        (
            "{{ messages[-1].content.endswith('/nothink') }}{{ '' if messages[-1].content.endswith('/nothink') else '/nothink' }}",
            "True",
        ),
        (
            "{{ '/nothink' in messages[-1].content }}{{ messages[-1].content.replace('/nothink', '').strip() }}",
            "Truemore",
        ),
        (
            "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}",
            "False",
        ),
        (
            "{%- if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}",
            "on",
        ),
        (
            "{{ '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}.",
            ".",
        ),
        (
            "{{ reasoning_effort | default('medium', true) }}{{ (model_identity or 'You are a model') }}",
            "mediumYou are a model",
        ),
        (
            "{% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}{{ loop_messages | length }}",
            "3",
        ),
        (
            "{% set system = messages[0].content | trim if messages[0]['role'] == 'system' else '' %}[{{ system }}]",
            "[be\n brief]",
        ),
        (
            "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | map(attribute='role') | join(',') }}",
            "2system,user,assistant,user",
        ),
        (
            "{{ messages | rejectattr('role', 'equalto', 'system') | map(attribute='content') | first }}",
            "hi <you>",
        ),
        (
            "{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content }}",
            "  more/nothink",
        ),
        (
            "{{ 'name'.title() }}{{ 'NAME'.lower() }}{{ 'x'.upper() }}{{ 'ab'.capitalize() }}",
            "NamenameXAb",
        ),
        ("{{ 'k: {}'.format(3) }}", "k: 3"),
        ("{{ '%s is %d' | format('x', 3) }}", "x is 3"),
        (
            "{{ 'abc'[::-1] }}{{ 'abcdef'[1:-1] }}{{ [1, 2, 3][-2:] }}{{ [1,2,3,4][::2] }}",
            "cbabcde[2, 3][1, 3]",
        ),
        (
            "{% for i in range(2) %}{{ i }}{% else %}none{% endfor %}{% for i in [] %}{{ i }}{% else %}none{% endfor %}",
            "01none",
        ),
        (
            "{%- for m in messages %}{%- if loop.previtem is defined and loop.previtem.role == 'user' %}<{{ m.role }}{% endif %}{%- if loop.nextitem is defined and loop.nextitem.role == 'user' %}>{{ m.role }}{% endif %}{%- endfor %}",
            ">system<assistant>assistant",
        ),
        (
            "{%- if messages is iterable and messages is sequence and 1 is number and not 'a' is number and true is boolean %}y{% endif %}",
            "y",
        ),
        (
            "{%- for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.length }}{{ loop.revindex }}{%- endfor %}",
            "122221",
        ),
        (
            "{%- set x = 'out' %}{%- for m in messages %}{%- set x = 'in' %}{%- endfor %}{{ x }}",
            "out",
        ),
        ("{%- if true %}{%- set x = 'in' %}{%- endif %}{{ x }}", "in"),
        ("{% set content %}a{{ messages[1].role }}{% endset %}{{ content }}", "auser"),
        ("{% filter upper %}abc{% endfilter %}{# a note #}{{- ' x' -}}  y", "ABC xy"),
        (
            "{{ messages[1].content | replace('<', '&') | upper }}{{ 7 // 2 }}{{ 7 / 2 }}{{ 2 ** 3 }}{{ 7 % 3 }}",
            "HI &YOU>33.581",
        ),
        (
            "{{ ns is defined }}{{ messages[9] is defined }}{{ messages[0]['nothing'] is defined }}{{ messages[0].nothing or 'x' }}",
            "FalseFalseFalsex",
        ),
        (
            "{{ 'a\\nb\\n'.splitlines() | join('|') }}{{ 'abc'.find('c') }}{{ 'aXb'.count('X') }}{{ 'a'.isalpha() }}{{ '12'.isdigit() }}",
            "a|b21TrueTrue",
        ),
        (
            "{{ 'x'.startswith(('a', 'x')) }}{{ '-'.join(['a', 'b']) }}{{ 'ab'.partition('a') if false else '' }}",
            "Truea-b",
        ),
        (
            "{{ messages[1].content | string | e }}{{ 'é' | tojson }}{{ {'z': 1, 'a': 'b'} | tojson(indent=2) }}{{ [] | tojson(indent=4) }}{{ {'a': 1, 'b': [1, 2]} | tojson(separators=(',', ':')) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=True) }}",
            "hi &lt;you&gt;\"é\"{\n  \"z\": 1,\n  \"a\": \"b\"\n}[]{\"a\":1,\"b\":[1,2]}{\"a\": 2, \"b\": 1}",
        ),
        ("{{ {'a': {'b': 1}}.a.b }}{{ {'items': 5}['items'] }}{{ {'a': 1}.get('b', 2) }}", "152"),
        (
            "{% macro wrap() %}<{{ caller('q') }}>{% endmacro %}{% call(x) wrap() %}{{ x }}{% endcall %}",
            "<q>",
        ),
        (
            "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% for (k, v) in [('x', 1)] %}{{ k }}{{ v }}{% endfor %}",
            "12x1",
        ),
        (
            "{{ messages | tojson }}",
            "[{\"role\": \"system\", \"content\": \"be\\n brief \"}, {\"role\": \"user\", \"content\": \"hi <you>\"}, {\"role\": \"assistant\", \"content\": \"<think>\\nhm\\n</think>\\n\\nyes\"}, {\"role\": \"user\", \"content\": \"  more/nothink\"}]",
        ),
        (
            "{{ 1 if messages[0].content.strip().split('\\n') | length > 1 else 2 }}{{ messages[0].content.strip() ~ 1 ~ none }}",
            "1be\n brief1None",
        ),
        ("{%- set ns = namespace() %}{%- set ns.x = 1 %}{{ ns.x }}{{ ns.y is defined }}", "1False"),
        (
            "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- break %}{%- endif %}{%- if m.role == 'system' %}{%- continue %}{%- endif %}{{ m.role }}{%- endfor %}",
            "user",
        ),
        (
            "{{ 'abc' | first }}{{ 'a' < 'b' }}{{ 1 == 1.0 }}{{ 'line1\nline2' | indent(2) }}",
            "aTrueTrueline1\n  line2",
        ),
        (
            "{{ {'b': 1, 'a': {'d': 'x', 'c': [1, 2]}} | tojson }}",
            "{\"b\": 1, \"a\": {\"d\": \"x\", \"c\": [1, 2]}}",
        ),
        (
            "{{ {'b': 1, 'a': {'d': 'x', 'c': [1, 2]}} | tojson(indent=2) }}",
            "{\n  \"b\": 1,\n  \"a\": {\n    \"d\": \"x\",\n    \"c\": [\n      1,\n      2\n    ]\n  }\n}",
        ),
        (
            "{{ {'b': 1, 'a': {'d': 'x', 'c': []}} | tojson(sort_keys=true) }}",
            "{\"a\": {\"c\": [], \"d\": \"x\"}, \"b\": 1}",
        ),
        ("{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':')) }}", "{\"b\":1,\"a\":[1,2]}"),
        (
            "{{ {'b': 1, 'a': [1, 2]} | tojson(indent=1, separators=(';', '=')) }}",
            "{\n \"b\"=1;\n \"a\"=[\n  1;\n  2\n ]\n}",
        ),
        (
            "{{ 'é😀' | tojson(ensure_ascii=true) }}{{ 'é😀' | tojson }}",
            "\"\\u00e9\\ud83d\\ude00\"\"é😀\"",
        ),
        (
            "{% for k, v in {'z': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'z': 1, 'a': 2}.keys() | join(',') }}",
            "z1a2z,a",
        ),
        (
            "{{ [] | tojson(indent=2) }}{{ {} | tojson(indent=2) }}{{ [{}] | tojson(indent=2) }}",
            "[]{}[\n  {}\n]",
        ),
    ];
    for (template, expect) in cases {
        let rendered = render(template).unwrap_or_else(|e| panic!("{template}: {e}"));
        assert_eq!(rendered, expect, "{template}");
    }
}

/// gpt-oss takes the date for granted; the year alone is told from the clock here.
#[test]
fn a_template_that_takes_the_date_for_granted_gets_it() {
    let date = render("Current date: {{ strftime_now('%Y-%m-%d') }}").unwrap();
    let parts: Vec<u32> =
        date["Current date: ".len()..].split('-').map(|part| part.parse().unwrap()).collect();
    let [year, month, day] = parts[..] else { panic!("{date}") };
    assert!(year >= 2024 && (1..=12).contains(&month) && (1..=31).contains(&day), "{date}");
    let asked =
        "{% if strftime_now is not defined %}1 Jan{% else %}{{ strftime_now('%d') }}{% endif %}";
    assert_eq!(render(asked).unwrap(), "1 Jan");
    let error = render("\n{{ strftime_now('%Q') }}").unwrap_err().to_string();
    assert!(error.contains("line 2: strftime_now: 'Q'"), "{error}");
}

/// What neither it nor this build knows is refused by line, not left out.
#[test]
fn what_is_not_known_is_refused_by_line() {
    for (template, part) in [
        ("\n{{ messages | no_such_filter }}", "line 2: unknown filter"),
        ("{{ '%s' % messages[0].role }}", "line 1: "),
        ("{{ {'a': 1} | tojson(depth=2) }}", "line 1: "),
        ("{{ {'a': 1} | tojson(separators=(',',)) }}", "line 1: separators are two texts"),
        ("{% include 'other' %}", "line 1: "),
    ] {
        let error = render(template).unwrap_err().to_string();
        assert!(error.contains("chat_template.jinja") && error.contains(part), "{error}");
    }
}

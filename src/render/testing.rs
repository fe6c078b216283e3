//! Snapshots of what a person sees: every view at 80 and 120 columns, with and without colour.
//! Figures come from fixtures, never from the machine that runs the test.
#![allow(clippy::panic, reason = "a test stops where something is wrong")]

use super::Style;

/// The styles that every view is looked at in.
const STYLES: [(&str, Style); 4] = [
    ("80 columns", Style { width: 80, colour: false }),
    ("120 columns", Style { width: 120, colour: false }),
    ("80 columns, colour", Style { width: 80, colour: true }),
    ("120 columns, colour", Style { width: 120, colour: true }),
];

/// Compares a view in every style with `snapshots/NAME.snap`, and checks what must hold of any view:
/// no line is wider than the style, none ends in blanks, and colour changes no character.
pub(crate) fn snapshot(name: &str, view: impl Fn(Style) -> String) {
    let mut all = String::new();
    for (title, style) in STYLES {
        let text = view(style);
        let plain = without_colour(&text);
        for line in plain.lines() {
            let width = textwrap::core::display_width(line);
            assert!(width <= usize::from(style.width), "{name}, {title}: {width} wide: {line:?}");
            assert_eq!(line.trim_end(), line, "{name}, {title}");
        }
        if style.colour {
            assert_eq!(plain, view(Style { colour: false, ..style }), "{name}, {title}");
        } else {
            assert_eq!(plain, text, "{name}, {title}: escapes without colour");
        }
        all += &format!("==== {title}\n{}\n", text.replace('\u{1b}', "␛"));
    }
    insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true }, {
        insta::assert_snapshot!(name, all);
    });
}

/// Text without its escapes for colour.
fn without_colour(text: &str) -> String {
    let mut plain = String::new();
    let mut parts = text.split("\u{1b}[");
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        match part.split_once('m') {
            Some((_, rest)) => plain.push_str(rest),
            None => panic!("an escape that is no colour: {part:?}"),
        }
    }
    plain
}

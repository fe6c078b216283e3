//! How text is set for its reader: how wide, and whether in colour. Owns the few tones that there
//! are; what they are put on is the business of who renders.

use std::io::{self, IsTerminal};

use anstyle::AnsiColor;

/// Width where standard output is no terminal and nothing says otherwise.
const PLAIN_WIDTH: u16 = 100;
/// Narrower than this, tables are a column of letters.
const LEAST_WIDTH: u16 = 40;
/// Prose in longer lines is hard to read.
const PROSE_WIDTH: usize = 110;
/// Width of what no one reads line by line, such as a log: paragraphs are not broken there, so that
/// what is searched for in it is found.
const UNBROKEN: u16 = u16::MAX;

/// How text is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Style {
    /// Columns.
    pub(crate) width: u16,
    /// Whether tones are shown.
    pub(crate) colour: bool,
}

/// What a piece of text is to its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Nothing special.
    Plain,
    /// The title of what follows.
    Heading,
    /// As it should be.
    Ok,
    /// To be known.
    Warn,
    /// Wrong.
    Fail,
    /// What matters most of what stands around it.
    Strong,
}

impl Tone {
    fn ansi(self) -> anstyle::Style {
        let style = anstyle::Style::new();
        match self {
            Self::Plain => style,
            Self::Heading => style.bold(),
            Self::Ok => style.fg_color(Some(AnsiColor::Green.into())),
            Self::Warn => style.fg_color(Some(AnsiColor::Yellow.into())),
            Self::Fail => style.fg_color(Some(AnsiColor::Red.into())).bold(),
            Self::Strong => style.fg_color(Some(AnsiColor::Cyan.into())).bold(),
        }
    }

    /// The same for a cell of a table.
    pub(super) fn cell(self, text: impl ToString) -> comfy_table::Cell {
        use comfy_table::{Attribute, Cell, Color};
        let cell = Cell::new(text);
        match self {
            Self::Plain => cell,
            Self::Heading => cell.add_attribute(Attribute::Bold),
            Self::Ok => cell.fg(Color::DarkGreen),
            Self::Warn => cell.fg(Color::DarkYellow),
            Self::Fail => cell.fg(Color::DarkRed).add_attribute(Attribute::Bold),
            Self::Strong => cell.fg(Color::DarkCyan).add_attribute(Attribute::Bold),
        }
    }
}

impl Style {
    /// For standard output as it is: a terminal's own width, else `columns`; in colour on a terminal
    /// whose user has not asked for none.
    pub(crate) fn of_output(columns: Option<u16>, is_plain: bool) -> Self {
        let is_terminal = io::stdout().is_terminal();
        let size = if is_terminal { terminal_size::terminal_size() } else { None };
        let width = size.map(|(width, _)| width.0).or(columns).unwrap_or(PLAIN_WIDTH);
        Self { width: width.max(LEAST_WIDTH), colour: is_terminal && !is_plain }
    }

    /// For standard error as it is: lines are broken and coloured for a terminal alone.
    pub(crate) fn of_errors(is_plain: bool) -> Self {
        let is_terminal = io::stderr().is_terminal();
        let size = if is_terminal { terminal_size::terminal_size_of(io::stderr()) } else { None };
        let width = match size {
            Some((width, _)) => width.0.max(LEAST_WIDTH),
            None => UNBROKEN,
        };
        Self { width, colour: is_terminal && !is_plain }
    }

    /// Text in a tone.
    pub(crate) fn paint(self, tone: Tone, text: &str) -> String {
        if !self.colour || tone == Tone::Plain || text.is_empty() {
            return text.to_owned();
        }
        let ansi = tone.ansi();
        format!("{ansi}{text}{ansi:#}")
    }

    /// A title on a line of its own.
    pub(crate) fn heading(self, text: &str) -> String {
        format!("{}\n", self.paint(Tone::Heading, text))
    }

    /// A paragraph after `label`, its further lines under the first one's text.
    pub(crate) fn paragraph(self, label: &str, text: &str) -> String {
        if self.width == UNBROKEN {
            return format!("{label}{text}\n");
        }
        let hanging = " ".repeat(label.chars().count());
        let width = usize::from(self.width).min(PROSE_WIDTH);
        let options = whole_words(width).initial_indent(label).subsequent_indent(&hanging);
        let mut filled = String::new();
        for line in textwrap::wrap(&with_units_tied(text), options) {
            filled.push_str(&line.trim_end().replace(TIE, " "));
            filled.push('\n');
        }
        filled
    }

    /// The same with the label, or the word that it begins with, in a tone.
    pub(crate) fn toned_paragraph(self, tone: Tone, label: &str, text: &str) -> String {
        let filled = self.paragraph(label, text);
        let word = label.trim();
        filled.replacen(word, &self.paint(tone, word), 1)
    }
}

/// A blank at which no line is broken.
const TIE: char = '\u{a0}';
/// What stays on the line of its number.
const UNITS: [&str; 12] =
    ["%", "B", "kB", "MB", "GB", "TB", "MiB", "GiB", "us", "ms", "s", "tokens/s"];

/// Text with the blanks between numbers and their units tied.
fn with_units_tied(text: &str) -> String {
    let mut tied = String::with_capacity(text.len());
    for (at, word) in text.split(' ').enumerate() {
        let unit = word.trim_end_matches([',', ';', ':', '.', ')']);
        let is_unit = tied.ends_with(|c: char| c.is_ascii_digit()) && UNITS.contains(&unit);
        if at > 0 {
            tied.push(if is_unit { TIE } else { ' ' });
        }
        tied.push_str(word);
    }
    tied
}

/// How prose is broken: between words alone. A path, a flag or a command that is wider than the line
/// stands out of it, for in pieces it could not be copied.
pub(super) fn whole_words<'a>(width: usize) -> textwrap::Options<'a> {
    textwrap::Options::new(width)
        .break_words(false)
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_is_only_added() {
        let plain = Style { width: 80, colour: false };
        let colour = Style { width: 80, colour: true };
        assert_eq!(plain.paint(Tone::Fail, "FAIL"), "FAIL");
        assert_eq!(colour.paint(Tone::Fail, "FAIL"), "\u{1b}[1m\u{1b}[31mFAIL\u{1b}[0m");
        assert_eq!(colour.paint(Tone::Plain, "x"), "x");
    }

    #[test]
    fn paragraphs_hang_under_their_label() {
        let style = Style { width: 20, colour: false };
        assert_eq!(
            style.paragraph("pins  ", "no pins: no usage history yet"),
            "pins  no pins: no\n      usage history\n      yet\n"
        );
    }
    #[test]
    fn numbers_and_their_units_stay_together() {
        let style = Style { width: 20, colour: false };
        assert_eq!(
            style.paragraph("", "the sum of it is 20.00 GB, or 95.5 %"),
            "the sum of it is\n20.00 GB, or 95.5 %\n"
        );
    }

    #[test]
    fn what_would_be_copied_is_not_broken() {
        let style = Style { width: 20, colour: false };
        assert_eq!(
            style.paragraph("file  ", "see /models/a-long-name/of-some-model and --no-measure"),
            "file  see\n      /models/a-long-name/of-some-model\n      and\n      --no-measure\n"
        );
        let log = Style { width: UNBROKEN, colour: false };
        let long = "word ".repeat(60);
        assert_eq!(log.paragraph("error: ", &long), format!("error: {long}\n"));
    }
}

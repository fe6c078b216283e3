//! The filter `tojson` as the client gives it to templates: Python's `json.dumps(value,
//! ensure_ascii=False)` and its options. Jinja's own filter would escape `<` and `>`.

use std::collections::BTreeMap;
use std::io::{Result as IoResult, Write};

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::Value as Json;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// The filter.
#[expect(clippy::needless_pass_by_value, reason = "filters own their keyword arguments")]
pub(super) fn to_json(
    value: &Value,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let is_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let is_sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators are two texts")),
        // With an indent the line break takes the place of the blank.
        None => (if indent.is_some() { "," } else { ", " }, ": "),
    };
    let spaces = vec![b' '; indent.unwrap_or(0)];
    let lines = indent.map(|_| PrettyFormatter::with_indent(&spaces));
    let formatter = PythonFormatter { item, key, is_ascii, lines };
    if is_sorted {
        let json = serde_json::to_value(value).map_err(|e| failed(&e))?;
        return dump(&sorted(json), formatter).map(Value::from);
    }
    dump(value, formatter).map(Value::from)
}

fn failed(error: &serde_json::Error) -> Error {
    Error::new(ErrorKind::BadSerialization, error.to_string())
}

fn dump(value: &impl Serialize, formatter: PythonFormatter<'_>) -> Result<String, Error> {
    let mut bytes = Vec::new();
    value
        .serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        .map_err(|e| failed(&e))?;
    String::from_utf8(bytes).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// The same with keys in ascending order.
fn sorted(value: Json) -> Json {
    match value {
        Json::Object(map) => {
            let by_key: BTreeMap<String, Json> = map.into_iter().collect();
            by_key.into_iter().map(|(key, value)| (key, sorted(value))).collect()
        }
        Json::Array(items) => items.into_iter().map(sorted).collect(),
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::String(_) => value,
    }
}

/// Separators and escapes of Python's encoder.
struct PythonFormatter<'a> {
    item: &'a str,
    key: &'a str,
    /// Whether everything else is escaped.
    is_ascii: bool,
    /// Line breaks and indents, where there are any.
    lines: Option<PrettyFormatter<'a>>,
}

impl PythonFormatter<'_> {
    /// What goes before an item; `pretty` writes a comma and a line break.
    fn begin_item<W: Write + ?Sized>(
        &mut self,
        writer: &mut W,
        is_first: bool,
        pretty: impl FnOnce(&mut PrettyFormatter<'_>, &mut Vec<u8>) -> IoResult<()>,
    ) -> IoResult<()> {
        if !is_first {
            writer.write_all(self.item.as_bytes())?;
        }
        let Some(lines) = &mut self.lines else { return Ok(()) };
        let mut text = Vec::new();
        pretty(lines, &mut text)?;
        writer.write_all(&text)
    }
}

impl Formatter for PythonFormatter<'_> {
    fn begin_array<W: Write + ?Sized>(&mut self, writer: &mut W) -> IoResult<()> {
        match &mut self.lines {
            Some(lines) => lines.begin_array(writer),
            None => writer.write_all(b"["),
        }
    }

    fn end_array<W: Write + ?Sized>(&mut self, writer: &mut W) -> IoResult<()> {
        match &mut self.lines {
            Some(lines) => lines.end_array(writer),
            None => writer.write_all(b"]"),
        }
    }

    // Told that each item is the first, the other formatter writes its line break alone.
    fn begin_array_value<W: Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> IoResult<()> {
        self.begin_item(writer, first, |lines, text| lines.begin_array_value(text, true))
    }

    fn end_array_value<W: Write + ?Sized>(&mut self, writer: &mut W) -> IoResult<()> {
        self.lines.as_mut().map_or(Ok(()), |lines| lines.end_array_value(writer))
    }

    fn begin_object<W: Write + ?Sized>(&mut self, writer: &mut W) -> IoResult<()> {
        match &mut self.lines {
            Some(lines) => lines.begin_object(writer),
            None => writer.write_all(b"{"),
        }
    }

    fn end_object<W: Write + ?Sized>(&mut self, writer: &mut W) -> IoResult<()> {
        match &mut self.lines {
            Some(lines) => lines.end_object(writer),
            None => writer.write_all(b"}"),
        }
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> IoResult<()> {
        self.begin_item(writer, first, |lines, text| lines.begin_object_key(text, true))
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, writer: &mut W) -> IoResult<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: Write + ?Sized>(&mut self, writer: &mut W) -> IoResult<()> {
        self.lines.as_mut().map_or(Ok(()), |lines| lines.end_object_value(writer))
    }

    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> IoResult<()> {
        if !self.is_ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            if c.is_ascii() {
                write!(writer, "{c}")?;
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }
}

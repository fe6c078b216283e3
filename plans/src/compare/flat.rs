//! A plan as a list of named figures, in the order of the file. Owns how tables and lists get their
//! names, and which unit a figure has by the name of its field.

use std::collections::HashMap;

use toml::{Table, Value};

use super::Quantity;

/// Fields by which an entry of a list is known, the first that it has.
const KEYS: [&str; 6] = ["line", "tier", "card", "layer", "index", "name"];

/// Named figures.
#[derive(Debug, Default)]
pub(super) struct Flat {
    names: Vec<String>,
    figures: HashMap<String, Quantity>,
}

impl Flat {
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.names.iter()
    }

    pub(super) fn get(&self, name: &str) -> Option<&Quantity> {
        self.figures.get(name)
    }

    fn add(&mut self, name: &str, figure: Quantity) {
        if self.figures.insert(name.to_owned(), figure).is_none() {
            self.names.push(name.to_owned());
        }
    }

    fn table(&mut self, path: &str, table: &Table, left_out: &[&str]) {
        if let Some(source) = table.get("source").and_then(Value::as_str)
            && (table.contains_key("value") || table.contains_key("reason") || table.len() <= 2)
        {
            self.fact(path, source, table.get("value"), left_out);
            return;
        }
        for (name, value) in table {
            self.value(&join(path, name), value, left_out);
        }
    }

    /// Of a fact its value counts; how it was found is in words that differ from run to run.
    fn fact(&mut self, path: &str, source: &str, value: Option<&Value>, left_out: &[&str]) {
        match value {
            Some(value) => self.value(path, value, left_out),
            None if source == "unknown" => self.add(path, Quantity::Text("unknown".to_owned())),
            None => self.add(path, Quantity::Text("none".to_owned())),
        }
    }

    fn value(&mut self, path: &str, value: &Value, left_out: &[&str]) {
        if left_out.contains(&path) {
            return;
        }
        match value {
            Value::Table(table) => self.table(path, table, left_out),
            Value::Array(list) if list.iter().any(Value::is_table) => {
                for (at, entry) in list.iter().enumerate() {
                    self.entry(path, at, entry, left_out);
                }
            }
            // Lines of words are known by how they begin: what comes after is figures.
            Value::Array(list) if path.ends_with("evidence") => {
                for line in list.iter().filter_map(Value::as_str) {
                    let end = line.find(|c: char| c.is_ascii_digit() || c == ':');
                    let beginning = line[..end.unwrap_or(line.len())].trim_end();
                    self.add(&format!("{path}: {beginning}"), Quantity::Text(line.to_owned()));
                }
            }
            Value::Array(list) => {
                let all: Vec<String> = list.iter().map(in_words).collect();
                self.add(path, Quantity::Text(all.join(" ")));
            }
            Value::Integer(number) => self.add(path, figure(path, *number as f64)),
            Value::Float(number) => self.add(path, figure(path, *number)),
            Value::Boolean(flag) => self.add(path, Quantity::Flag(*flag)),
            Value::String(_) | Value::Datetime(_) => {
                self.add(path, Quantity::Text(in_words(value)));
            }
        }
    }

    fn entry(&mut self, path: &str, at: usize, entry: &Value, left_out: &[&str]) {
        let Value::Table(table) = entry else {
            return self.value(&format!("{path} {at}"), entry, left_out);
        };
        let key = KEYS.into_iter().find(|key| {
            table.get(*key).is_some_and(|value| !value.is_table() && !value.is_array())
        });
        let Some(key) = key else {
            return self.table(&format!("{path} {at}"), table, left_out);
        };
        let id = table.get(key).map(in_words).unwrap_or_default();
        // A ledger's line is its bytes; its note is in words that follow from them.
        let name = match key {
            "line" => join(path, &id.replace('_', " ")),
            "tier" | "name" => join(path, &id),
            _ => format!("{path} {key} {id}"),
        };
        for (field, value) in table.iter().filter(|(field, _)| *field != key) {
            match (key, field.as_str()) {
                ("line", "note") => {}
                ("line", "bytes") => {
                    let bytes = value.as_integer().unwrap_or(0);
                    self.add(&name, Quantity::Bytes(bytes.max(0) as u64));
                }
                _ => self.value(&join(&name, field), value, left_out),
            }
        }
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn in_words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A number with the unit that its field has.
fn figure(path: &str, number: f64) -> Quantity {
    let has = |part: &str| path.split(['.', ' ']).any(|field| field.contains(part));
    let last = path.rsplit('.').next().unwrap_or(path);
    if has("bytes_per_s") {
        Quantity::BytesPerSecond(number)
    } else if has("tokens_per_s") {
        Quantity::TokensPerSecond(number)
    } else if last == "bytes" || last.ends_with("_bytes") || last.ends_with("bytes_per_token") {
        Quantity::Bytes(number.max(0.0) as u64)
    } else if has("hit_rate") || last.ends_with("share") {
        Quantity::Share(number)
    } else if last == "seconds" || last.ends_with("_s") {
        Quantity::Seconds(number)
    } else {
        Quantity::Number(number)
    }
}

/// The figures of a plan; paths in `left_out` are passed over.
pub(super) fn flatten(plan: &Table, left_out: &[&str]) -> Flat {
    let mut flat = Flat::default();
    flat.table("", plan, left_out);
    flat
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<(String, String)> {
        let table: Table = text.parse().unwrap();
        let flat = flatten(&table, &["left.out"]);
        flat.names().map(|n| (n.clone(), flat.get(n).unwrap().to_string())).collect()
    }

    #[test]
    fn figures_get_the_unit_of_their_field() {
        let text = r#"
            budget_bytes = 2000000000
            read_bandwidth_bytes_per_s = 15e9
            decode_tokens_per_s = { p10 = 1.0 }
            hit_rate = { p50 = 0.5 }
            threads = 8
            isa = "avx2"
            [[terms]]
            name = "disk"
            seconds = 0.012
        "#;
        let found = names(text);
        let found: Vec<_> = found.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        for expected in [
            ("budget_bytes", "2.00 GB"),
            ("read_bandwidth_bytes_per_s", "15.0 GB/s"),
            ("decode_tokens_per_s.p10", "1.00 tokens/s"),
            ("hit_rate.p50", "50.0 %"),
            ("threads", "8"),
            ("isa", "avx2"),
            ("terms.disk.seconds", "12.00 ms"),
        ] {
            assert!(found.contains(&expected), "{expected:?} in {found:?}");
        }
    }

    #[test]
    fn facts_are_their_values_and_ledger_lines_their_bytes() {
        let text = r#"
            left = { out = 1 }
            total_bytes = { source = "read", detail = "MemTotal", value = 1000 }
            swap_bytes = { source = "unknown", reason = "no file" }
            limit = { source = "read", detail = "no group" }
            disk = { source = "measured", detail = "x", value = { bytes_per_s = 1e9 } }
            [[ledger]]
            line = "kv_cache"
            bytes = 10
            note = "words"
            [[gpus]]
            index = 3
            free_bytes = { source = "read", value = 7 }
        "#;
        let found = names(text);
        let found: Vec<_> = found.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        let mut expected = vec![
            ("disk.bytes_per_s", "1.0 GB/s"),
            ("gpus index 3.free_bytes", "7 B"),
            ("ledger.kv cache", "10 B"),
            ("limit", "none"),
            ("swap_bytes", "unknown"),
            ("total_bytes", "1.00 kB"),
        ];
        let mut found = found;
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected);
    }

    #[test]
    fn lines_of_evidence_are_known_by_their_beginning() {
        let found =
            names("evidence = [\"memory bandwidth 15.8 GB/s: measured\", \"none: at all\"]");
        assert_eq!(found[0].0, "evidence: memory bandwidth");
        assert_eq!(found[1].0, "evidence: none");
    }
}

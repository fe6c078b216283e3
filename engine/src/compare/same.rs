//! Whether two folders hold one model: what their architectures and tokenizers differ in, by name. How
//! weights are stored is not looked at: that is what is compared.

use serde::Serialize;
use serde_json::Value;
use tierkeep_plans::spec::ArchSpec;

/// Fields of an architecture that change no logit: limits, stop tokens, and layers that no forward
/// pass of the text uses, which a converter may leave out.
const ASIDE: [&str; 4] = ["max_context", "stop_tokens", "n_mtp_layers", "mtp_layer"];

/// Something that two models of one kind would share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// What it is, such as `router.n_experts`.
    pub what: String,
    /// As the first has it.
    pub a: String,
    /// As the second has it.
    pub b: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is {} in A and {} in B", self.what, self.a, self.b)
    }
}

/// What two architectures differ in; empty where they give the same logits from the same weights.
#[must_use]
pub fn differences(a: &ArchSpec, b: &ArchSpec) -> Vec<Difference> {
    let mut found = Vec::new();
    match (serde_json::to_value(a), serde_json::to_value(b)) {
        (Ok(a), Ok(b)) => collect("", &a, &b, &mut found),
        // A number that JSON cannot hold, such as an infinity: no field by field then.
        _ if a == b => {}
        _ => found.push(difference("architecture", &Value::Null, &Value::Null)),
    }
    found
}

/// Goes down where both sides have the same kind of thing.
fn collect(path: &str, a: &Value, b: &Value, found: &mut Vec<Difference>) {
    if a == b || ASIDE.contains(&path) {
        return;
    }
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let mut names: Vec<&String> = a.keys().chain(b.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let below = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                let of = |side: &serde_json::Map<String, Value>| {
                    side.get(name).cloned().unwrap_or(Value::Null)
                };
                collect(&below, &of(a), &of(b), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (at, (a, b)) in a.iter().zip(b).enumerate() {
                collect(&format!("{path}[{at}]"), a, b, found);
            }
        }
        _ => found.push(difference(path, a, b)),
    }
}

fn difference(what: &str, a: &Value, b: &Value) -> Difference {
    Difference { what: what.to_owned(), a: shown(a), b: shown(b) }
}

/// A value that reads well in a sentence; long ones by their size.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "absent".to_owned(),
        Value::Array(values) => format!("a list of {}", values.len()),
        Value::Object(_) => "of another kind".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tierkeep_plans::catalogue::Catalogue;

    use super::*;

    fn spec(family: &str) -> ArchSpec {
        let oracles = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles");
        Catalogue::open(&oracles.join(family)).unwrap().spec
    }

    #[test]
    fn what_changes_no_logit_is_no_difference() {
        let a = spec("glm_moe_dsa");
        let mut b = a.clone();
        b.max_context += 1;
        b.stop_tokens.push(7);
        b.n_mtp_layers = Some(3);
        b.mtp_layer = None;
        assert_eq!(differences(&a, &b), []);
    }

    #[test]
    fn differences_are_named_with_both_values() {
        let a = spec("glm_moe_dsa");
        let mut b = a.clone();
        b.router.n_experts += 1;
        b.hidden_size = 1;
        let said: Vec<String> = differences(&a, &b).iter().map(Difference::to_string).collect();
        let n = a.router.n_experts;
        let expected = [
            format!("hidden_size is {} in A and 1 in B", a.hidden_size),
            format!("router.n_experts is {n} in A and {} in B", n + 1),
        ];
        assert_eq!(said, expected);
        let other = differences(&a, &spec("olmoe"));
        assert!(other.iter().any(|d| d.what == "family" && d.b == "olmoe"), "{other:?}");
    }
}

//! Two plans side by side: what differs, by part of the plan, with the unit that each figure has.
//! Pure. Says nothing about which of the two is better.
//!
//! Plans are compared as they are written, field by field, so that a field that is added to the
//! format is compared without a line here; slots and pins are grouped by layers.

mod flat;

use std::collections::BTreeSet;
use std::fmt;

use serde::{Serialize, Serializer};

use self::flat::{Flat, flatten};
use crate::budget::Slots;
use crate::plan::{Plan, PlanError};
use crate::units::{Bytes, Rate};

/// Pins that are named one by one; of more, only the number is told.
const PINS_NAMED: usize = 12;

/// A part of a plan, in the order in which they are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// Which model.
    Model,
    /// What was asked for.
    Request,
    /// Settings of the engine.
    Engine,
    /// Lines of the ledger.
    Ledger,
    /// Where experts and layers go, slots and pins left out.
    Placement,
    /// Slots of layers.
    Slots,
    /// Pinned experts.
    Pins,
    /// How many experts each tier holds.
    Tiers,
    /// What is expected of a run.
    Prediction,
    /// Facts about the machine.
    Machine,
    /// Whatever else a plan holds.
    Plan,
}

impl Group {
    /// Its name as users see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Request => "request",
            Self::Engine => "engine",
            Self::Ledger => "ledger",
            Self::Placement => "placement",
            Self::Slots => "slots",
            Self::Pins => "pins",
            Self::Tiers => "tiers",
            Self::Prediction => "prediction",
            Self::Machine => "machine",
            Self::Plan => "plan",
        }
    }

    fn of(field: &str) -> Self {
        match field {
            "model" => Self::Model,
            "request" => Self::Request,
            "engine" => Self::Engine,
            "ledger" => Self::Ledger,
            "placement" => Self::Placement,
            "tiers" => Self::Tiers,
            "prediction" => Self::Prediction,
            "machine" => Self::Machine,
            _ => Self::Plan,
        }
    }
}

/// A figure or a text of a plan, with its unit.
#[derive(Clone, Debug, PartialEq)]
pub enum Quantity {
    /// Bytes.
    Bytes(u64),
    /// Bytes a second.
    BytesPerSecond(f64),
    /// Tokens a second.
    TokensPerSecond(f64),
    /// From 0 to 1.
    Share(f64),
    /// Seconds.
    Seconds(f64),
    /// A number without a unit.
    Number(f64),
    /// Yes or no.
    Flag(bool),
    /// Anything in words.
    Text(String),
}

impl Quantity {
    /// Its unit, for programs; empty where there is none.
    #[must_use]
    pub fn unit(&self) -> &'static str {
        match self {
            Self::Bytes(_) => "bytes",
            Self::BytesPerSecond(_) => "bytes_per_s",
            Self::TokensPerSecond(_) => "tokens_per_s",
            Self::Share(_) => "share",
            Self::Seconds(_) => "s",
            Self::Number(_) | Self::Flag(_) | Self::Text(_) => "",
        }
    }

    fn number(&self) -> Option<f64> {
        match *self {
            Self::Bytes(bytes) => Some(bytes as f64),
            Self::BytesPerSecond(value)
            | Self::TokensPerSecond(value)
            | Self::Share(value)
            | Self::Seconds(value)
            | Self::Number(value) => Some(value),
            Self::Flag(_) | Self::Text(_) => None,
        }
    }

    /// A number in this one's unit.
    fn like(&self, value: f64) -> Self {
        match self {
            Self::Bytes(_) => Self::Bytes(value as u64),
            Self::BytesPerSecond(_) => Self::BytesPerSecond(value),
            Self::TokensPerSecond(_) => Self::TokensPerSecond(value),
            Self::Share(_) => Self::Share(value),
            Self::Seconds(_) => Self::Seconds(value),
            Self::Number(_) | Self::Flag(_) | Self::Text(_) => Self::Number(value),
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Bytes(bytes) => Bytes(*bytes).to_string(),
            Self::BytesPerSecond(rate) => Rate(*rate).to_string(),
            Self::TokensPerSecond(speed) if *speed < 10.0 => format!("{speed:.2} tokens/s"),
            Self::TokensPerSecond(speed) => format!("{speed:.1} tokens/s"),
            Self::Share(share) => format!("{:.1} %", share * 100.0),
            Self::Seconds(seconds) if *seconds < 1e-3 => format!("{:.1} us", seconds * 1e6),
            Self::Seconds(seconds) if *seconds < 1.0 => format!("{:.2} ms", seconds * 1e3),
            Self::Seconds(seconds) => format!("{seconds:.2} s"),
            Self::Number(value) if value.fract() == 0.0 => format!("{value:.0}"),
            Self::Number(value) => format!("{value:.3}"),
            Self::Flag(flag) => if *flag { "yes" } else { "no" }.to_owned(),
            Self::Text(text) => text.clone(),
        };
        f.pad(&text)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bytes(bytes) => serializer.serialize_u64(*bytes),
            Self::BytesPerSecond(value)
            | Self::TokensPerSecond(value)
            | Self::Share(value)
            | Self::Seconds(value)
            | Self::Number(value) => serializer.serialize_f64(*value),
            Self::Flag(flag) => serializer.serialize_bool(*flag),
            Self::Text(text) => serializer.serialize_str(text),
        }
    }
}

/// Something that is not the same in both plans.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Which part of the plan.
    pub group: Group,
    /// What, within that part.
    pub name: String,
    /// In the first plan; `None` where it has none.
    pub was: Option<Quantity>,
    /// In the second plan.
    pub is: Option<Quantity>,
}

impl Difference {
    /// How much more or less it became, such as `+1.20 GB (+4.1 %)`; `None` for what has no number.
    #[must_use]
    pub fn delta(&self) -> Option<String> {
        let (was, is) = (self.was.as_ref()?, self.is.as_ref()?);
        let (before, after) = (was.number()?, is.number()?);
        let change = after - before;
        let sign = if change < 0.0 { '-' } else { '+' };
        let amount = is.like(change.abs());
        let share = match is {
            // Of shares the difference says more than the ratio.
            Quantity::Share(_) => return Some(format!("{sign}{amount}")),
            _ if before > 0.0 => format!(" ({sign}{:.1} %)", (change / before * 100.0).abs()),
            _ => String::new(),
        };
        Some(format!("{sign}{amount}{share}"))
    }
}

impl Serialize for Difference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let unit = self.is.as_ref().or(self.was.as_ref()).map_or("", Quantity::unit);
        let mut object = serializer.serialize_struct("Difference", 5)?;
        object.serialize_field("group", &self.group)?;
        object.serialize_field("name", &self.name)?;
        object.serialize_field("was", &self.was)?;
        object.serialize_field("is", &self.is)?;
        object.serialize_field("unit", unit)?;
        object.end()
    }
}

/// Everything in which two plans differ, by group; nothing where they are the same.
///
/// # Errors
/// [`PlanError::Serialize`], which would be a bug in the schema.
pub fn compare(first: &Plan, second: &Plan) -> Result<Vec<Difference>, PlanError> {
    let (a, b) = (flat(first)?, flat(second)?);
    let mut found = Vec::new();
    let mut names: Vec<&String> = a.names().collect();
    names.extend(b.names().filter(|name| a.get(name).is_none()));
    for name in names {
        let (was, is) = (a.get(name), b.get(name));
        if was != is {
            let (field, rest) = name.split_once('.').unwrap_or((name, name));
            found.push(Difference {
                group: Group::of(field),
                name: rest.to_owned(),
                was: was.cloned(),
                is: is.cloned(),
            });
        }
    }
    let (before, after) = (&first.placement.slots, &second.placement.slots);
    found.extend(slots(before, after));
    found.extend(pins(before, after));
    // Stable, so that each group stays in the order of the file.
    found.sort_by_key(|difference| difference.group);
    Ok(found)
}

/// A plan field by field, slots left out.
fn flat(plan: &Plan) -> Result<Flat, PlanError> {
    let value =
        toml::Table::try_from(plan).map_err(|e| PlanError::Serialize { reason: e.to_string() })?;
    Ok(flatten(&value, &["placement.slots"]))
}

/// Layers whose slots differ, as runs with the same two numbers.
fn slots(before: &Slots, after: &Slots) -> Vec<Difference> {
    let n_layers = before.caps.len().max(after.caps.len());
    let cap = |slots: &Slots, layer: usize| slots.caps.get(layer).copied();
    let mut runs: Vec<(usize, usize, Option<u32>, Option<u32>)> = Vec::new();
    for layer in 0..n_layers {
        let (was, is) = (cap(before, layer), cap(after, layer));
        if was == is {
            continue;
        }
        match runs.last_mut() {
            Some((_, end, w, i)) if *end + 1 == layer && (*w, *i) == (was, is) => *end = layer,
            _ => runs.push((layer, layer, was, is)),
        }
    }
    let number = |cap: Option<u32>| cap.map(|cap| Quantity::Number(f64::from(cap)));
    let total = |slots: &Slots| slots.caps.iter().map(|&cap| f64::from(cap)).sum::<f64>();
    let mut found = Vec::new();
    if total(before) != total(after) {
        found.push(Difference {
            group: Group::Slots,
            name: "all layers".to_owned(),
            was: Some(Quantity::Number(total(before))),
            is: Some(Quantity::Number(total(after))),
        });
    }
    found.extend(runs.into_iter().map(|(start, end, was, is)| Difference {
        group: Group::Slots,
        name: if start == end {
            format!("layer {start}")
        } else {
            format!("each of layers {start}-{end}")
        },
        was: number(was),
        is: number(is),
    }));
    found
}

/// How many experts are pinned, and which ones in one plan alone.
fn pins(before: &Slots, after: &Slots) -> Vec<Difference> {
    let all = |slots: &Slots| -> BTreeSet<(usize, u32)> {
        let of_layer = |(layer, pins): (usize, &Vec<u32>)| {
            pins.iter().map(move |&expert| (layer, expert)).collect::<Vec<_>>()
        };
        slots.pins.iter().enumerate().flat_map(of_layer).collect()
    };
    let (was, is) = (all(before), all(after));
    if was == is {
        return Vec::new();
    }
    let named = |pins: Vec<&(usize, u32)>| -> Option<Quantity> {
        let named: Vec<String> = pins
            .iter()
            .take(PINS_NAMED)
            .map(|(layer, expert)| format!("{layer}:{expert}"))
            .collect();
        let more = pins.len().saturating_sub(PINS_NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        (!pins.is_empty()).then(|| Quantity::Text(named.join(", ") + &more))
    };
    let count = |pins: &BTreeSet<(usize, u32)>| Some(Quantity::Number(pins.len() as f64));
    vec![
        Difference {
            group: Group::Pins,
            name: "experts".to_owned(),
            was: count(&was),
            is: count(&is),
        },
        Difference {
            group: Group::Pins,
            name: "in one plan only".to_owned(),
            was: named(was.difference(&is).collect()),
            is: named(is.difference(&was).collect()),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(was: Quantity, is: Quantity) -> Difference {
        Difference { group: Group::Plan, name: String::new(), was: Some(was), is: Some(is) }
    }

    #[test]
    fn deltas_have_the_unit_of_their_figures() {
        use Quantity::{Bytes, Number, Share, Text, TokensPerSecond};
        let cases = [
            (Bytes(2_000_000_000), Bytes(3_500_000_000), "+1.50 GB (+75.0 %)"),
            (Bytes(3_500_000_000), Bytes(2_000_000_000), "-1.50 GB (-42.9 %)"),
            (Number(0.0), Number(4.0), "+4"),
            (Share(0.5), Share(0.61), "+11.0 %"),
            (TokensPerSecond(2.0), TokensPerSecond(1.0), "-1.00 tokens/s (-50.0 %)"),
        ];
        for (was, is, delta) in cases {
            assert_eq!(difference(was, is).delta().as_deref(), Some(delta));
        }
        assert_eq!(difference(Text("a".into()), Text("b".into())).delta(), None);
        let absent = Difference { was: None, ..difference(Number(1.0), Number(2.0)) };
        assert_eq!(absent.delta(), None);
    }

    #[test]
    fn slots_are_grouped_by_what_became_of_them() {
        let before = Slots { caps: vec![0, 5, 5, 5, 4], pins: vec![Vec::new(); 5] };
        let after = Slots { caps: vec![0, 6, 6, 5, 5], pins: vec![Vec::new(); 5] };
        let found: Vec<_> = slots(&before, &after)
            .into_iter()
            .map(|d| (d.name, d.was.unwrap().to_string(), d.is.unwrap().to_string()))
            .collect();
        let expected =
            [("all layers", "19", "22"), ("each of layers 1-2", "5", "6"), ("layer 4", "4", "5")];
        let expected = expected.map(|(n, w, i)| (n.to_owned(), w.to_owned(), i.to_owned()));
        assert_eq!(found, expected);
        assert!(slots(&before, &before).is_empty());
    }

    #[test]
    fn pins_are_named_by_the_plan_that_has_them() {
        let of = |pins: &[u32]| Slots { caps: vec![20], pins: vec![pins.to_vec()] };
        let found = pins(&of(&[1, 2]), &of(&[2, 3]));
        assert_eq!(found[1].was, Some(Quantity::Text("0:1".into())));
        assert_eq!(found[1].is, Some(Quantity::Text("0:3".into())));
        let found = pins(&of(&[]), &of(&(0..20).collect::<Vec<_>>()));
        assert_eq!(found[0].is, Some(Quantity::Number(20.0)));
        assert_eq!(found[1].was, None);
        let Some(Quantity::Text(text)) = &found[1].is else { panic!("{found:?}") };
        assert!(text.ends_with("0:11 and 8 more"), "{text}");
    }
}

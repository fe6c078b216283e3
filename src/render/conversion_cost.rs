//! What a choice of bits costs in quality, from the table that was measured on a small model. Owns the
//! choice of its nearest row and how that is said; the table is docs/benchmarks/quality.csv.

use serde_json::{Value, json};
use tierkeep_engine::convert::{Bits, Choices, ConvertOptions};
use tierkeep_plans::catalogue::container::ContainerPart;
use tierkeep_plans::catalogue::{Group, Packed, PackedBits, ScaleType};

use super::percent;

/// What tests/quality.rs wrote.
const TABLE: &str = include_str!("../../docs/benchmarks/quality.csv");
/// The model of the rows that are quoted: its weights are trained, and its texts were held out.
const MODEL: &str = "glm-nano";
/// The text that is quoted: the hardest of the four kinds.
const TEXT: &str = "novel";
const SOURCE: &str = "measured on glm-nano, see docs/numerics.md";

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cost {
    experts: &'static str,
    dense: &'static str,
    group: &'static str,
    scales: &'static str,
    mean_kl: f64,
    agreement: f64,
    /// It is the row of just this choice; if not, the nearest.
    is_exact: bool,
}

impl Cost {
    /// Of the row that is nearest to a choice; `None` where nothing is rounded to integers.
    pub(crate) fn of(options: &ConvertOptions) -> Option<Self> {
        let (experts, dense) = (options.experts, options.dense);
        let wanted = [bits(&experts), bits(&dense)];
        let packed =
            [&experts, &dense].map(|of| packed(of, options)).into_iter().flatten().next()?;
        let is_one = [experts, dense].iter().all(is_uniform);
        let mut nearest: Option<(u32, Self)> = None;
        for row in TABLE.lines().skip(1) {
            let Some(mut cost) = read(row) else { continue };
            let found = [cost.experts, cost.dense].map(bits_of);
            let apart = |at: usize| wanted[at].ilog2().abs_diff(found[at].ilog2());
            let scales_differ = u32::from(cost.scales != scale_name(packed.scale));
            // Bits count most, those of experts first; then how many weights share a scale.
            let distance = apart(0) * 1000
                + apart(1) * 100
                + group_rank(packed.group).abs_diff(rank_of(cost.group)) * 2
                + scales_differ;
            cost.is_exact = distance == 0 && is_one;
            if nearest.is_none_or(|(least, _)| distance < least) {
                nearest = Some((distance, cost));
            }
        }
        nearest.map(|(_, cost)| cost)
    }

    /// As people read it.
    pub(crate) fn text(&self) -> String {
        let nearest = if self.is_exact { "" } else { "the nearest choice that was measured is " };
        format!(
            "{nearest}{}-bit experts with {}-bit dense weights, scales by {} in {}: KL {:.4} nats, the best next \
             token the same at {} of a novel's positions ({SOURCE}; other models differ)",
            self.experts,
            self.dense,
            if self.group == "row" { "row".to_owned() } else { format!("{} weights", self.group) },
            self.scales.to_uppercase(),
            self.mean_kl,
            percent(self.agreement),
        )
    }

    /// As programs read it.
    pub(crate) fn json(cost: Option<&Self>) -> Value {
        cost.map_or(Value::Null, |cost| {
            json!({
                "source": SOURCE,
                "model": MODEL,
                "text": TEXT,
                "experts": cost.experts,
                "dense": cost.dense,
                "group": cost.group,
                "scales": cost.scales,
                "is_exact": cost.is_exact,
                "mean_kl_nats": cost.mean_kl,
                "agreement": cost.agreement,
            })
        })
    }
}

fn read(row: &'static str) -> Option<Cost> {
    let cells: Vec<&str> = row.split(',').collect();
    let &[model, experts, dense, group, scales, _, text, _, kl, _, _, agreement, ..] = &cells[..]
    else {
        return None;
    };
    if (model, text) != (MODEL, TEXT) {
        return None;
    }
    Some(Cost {
        experts,
        dense,
        group,
        scales,
        mean_kl: kl.parse().ok()?,
        agreement: agreement.parse().ok()?,
        is_exact: false,
    })
}

/// The fewest bits that any part of a class has.
fn bits(choices: &Choices) -> u32 {
    let parts = ContainerPart::ALL.into_iter().map(Some).chain([None]);
    parts.map(|part| of_bits(choices.of(part).bits)).min().unwrap_or(16)
}

fn is_uniform(choices: &Choices) -> bool {
    ContainerPart::ALL.into_iter().all(|part| choices.of(Some(part)) == choices.of(None))
}

fn of_bits(bits: Bits) -> u32 {
    match bits {
        Bits::Packed(PackedBits::Two) => 2,
        Bits::Packed(PackedBits::Four) => 4,
        Bits::Packed(PackedBits::Eight) => 8,
        Bits::Sixteen | Bits::Keep => 16,
    }
}

fn bits_of(text: &str) -> u32 {
    text.parse().unwrap_or(16)
}

/// How the first part of a class that is packed is packed.
fn packed(choices: &Choices, options: &ConvertOptions) -> Option<Packed> {
    let parts = [None].into_iter().chain(ContainerPart::ALL.into_iter().map(Some));
    parts.filter_map(|part| choices.of(part).packed(options.packing)).next()
}

/// Groups from the finest.
fn group_rank(group: Group) -> u32 {
    match group {
        Group::Of32 => 0,
        Group::Of64 => 1,
        Group::Of128 => 2,
        Group::Row => 3,
    }
}

fn rank_of(name: &str) -> u32 {
    Group::ALL.into_iter().find(|group| group.name() == name).map_or(3, group_rank)
}

fn scale_name(scale: ScaleType) -> &'static str {
    match scale {
        ScaleType::F32 => "f32",
        ScaleType::F16 => "f16",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierkeep_engine::convert::Packing;

    fn options(experts: Bits, dense: Bits) -> ConvertOptions {
        let (experts, dense) = (Choices::from(experts), Choices::from(dense));
        ConvertOptions { experts, dense, ..ConvertOptions::default() }
    }

    const INT: fn(PackedBits) -> Bits = Bits::Packed;

    #[test]
    fn every_choice_of_bits_has_its_own_row() {
        let packed = [PackedBits::Eight, PackedBits::Four, PackedBits::Two].map(INT);
        for experts in packed.into_iter().chain([Bits::Keep]) {
            for dense in [Bits::Sixteen, INT(PackedBits::Eight), INT(PackedBits::Four)] {
                if (experts, dense) == (Bits::Keep, Bits::Sixteen) {
                    continue;
                }
                let cost = Cost::of(&options(experts, dense)).unwrap();
                assert!(cost.is_exact, "{experts:?} {dense:?}: {cost:?}");
                let found = [cost.experts, cost.dense].map(bits_of);
                assert_eq!(found, [of_bits(experts), of_bits(dense)]);
                assert_eq!((cost.group, cost.scales), ("64", "f16"));
            }
        }
        assert_eq!(Cost::of(&options(Bits::Keep, Bits::Sixteen)), None);
    }

    #[test]
    fn what_was_not_measured_is_said_by_its_nearest() {
        let four = options(INT(PackedBits::Four), INT(PackedBits::Eight));
        let row = Packing { group: Group::Row, scale: ScaleType::F32 };
        let by_row = Cost::of(&ConvertOptions { packing: row, ..four }).unwrap();
        assert_eq!((by_row.group, by_row.scales, by_row.is_exact), ("row", "f32", true));
        let mixed = four.experts.with(ContainerPart::ExpertDown, INT(PackedBits::Eight));
        let mixed = Cost::of(&ConvertOptions { experts: mixed, ..four }).unwrap();
        assert_eq!((mixed.experts, mixed.is_exact), ("4", false));
        assert!(mixed.text().contains("nearest choice that was measured"));
        assert!(mixed.text().contains("measured on glm-nano"));
    }
}

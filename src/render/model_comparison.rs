//! How far one container of a model is from another: what `compare` shows.

use std::path::Path;

use serde_json::{Value, json};
use tierkeep_engine::compare::{Compared, Disagreement, Summary, Windows};
use tierkeep_plans::catalogue::{Catalogue, Projection};
use tierkeep_plans::units::Bytes;

use super::style::Tone;
use super::{Style, count, harmless, plural, table};

/// One of the two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelView<'a> {
    /// As it was asked for.
    pub(crate) path: &'a Path,
    /// What it is.
    pub(crate) model: &'a Catalogue,
    /// Its part of the budget.
    pub(crate) budget: Bytes,
}

/// What was asked of the result, and whether it holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LimitsView {
    /// The least agreement, 0 to 1, and whether there is as much.
    agreement: Option<(f64, bool)>,
    /// The largest mean KL, nats, and whether it is at most that.
    kl: Option<(f64, bool)>,
}

impl LimitsView {
    /// The limits against a result; without any position none holds.
    pub(crate) fn of(compared: &Compared, agreement: Option<f64>, kl: Option<f64>) -> Self {
        let all = compared.all.as_ref();
        Self {
            agreement: agreement.map(|least| (least, all.is_some_and(|s| s.agreement >= least))),
            kl: kl.map(|most| (most, all.is_some_and(|s| s.kl.mean <= most))),
        }
    }

    /// Whether all that was asked for holds.
    pub(crate) fn holds(self) -> bool {
        [self.agreement, self.kl].into_iter().flatten().all(|(_, holds)| holds)
    }
}

/// Everything that is shown.
pub(crate) struct ComparedView<'a> {
    /// The reference, and what is compared with it.
    pub(crate) models: [ModelView<'a>; 2],
    /// Names of the files.
    pub(crate) names: Vec<&'a str>,
    /// Texts in each of them.
    pub(crate) texts: Vec<usize>,
    /// How texts are cut.
    pub(crate) windows: Windows,
    /// What came of it.
    pub(crate) compared: &'a Compared,
    /// What was asked of it.
    pub(crate) limits: LimitsView,
    /// A token as text, where there is a tokenizer.
    pub(crate) spell: &'a dyn Fn(u32) -> Option<String>,
}

/// Models, figures by file and over all, where they part, and the verdict.
pub(crate) fn comparison(view: &ComparedView<'_>, style: Style) -> String {
    let mut text = models(view, style);
    text.push('\n');
    text += &figures(view, style);
    text.push('\n');
    text += &style.paragraph("", &how(view.windows));
    if let Some(first) = view.compared.all.as_ref().and_then(|all| all.first_disagreement) {
        text += &style.paragraph("", &parting(view, first));
    }
    if view.compared.interrupted {
        let done = view.compared.all.as_ref().map_or(0, |all| all.positions);
        let what = plural(done, "position", "positions");
        text += &style.paragraph("", &format!("interrupted: the figures are of the first {what}"));
    }
    text + &verdicts(view, style)
}

fn models(view: &ComparedView<'_>, style: Style) -> String {
    let mut rows = table::table(style, &["", "model", "bytes", "experts", "budget"]);
    for (side, model) in ["A", "B"].into_iter().zip(&view.models) {
        rows.add_row([
            side.to_owned(),
            model.path.display().to_string(),
            model.model.total_bytes().to_string(),
            stored(model.model),
            model.budget.to_string(),
        ]);
    }
    table::right(&mut rows, 2);
    table::text(&rows)
}

/// How the experts of a model are stored; `mixed` where they are not of one type.
fn stored(model: &Catalogue) -> String {
    let projections = [Projection::Gate, Projection::Up, Projection::Down];
    let mut all = model
        .experts
        .iter()
        .flat_map(|expert| projections.map(|projection| expert.matrix(projection).stored));
    match all.next() {
        None => "none".to_owned(),
        Some(first) if all.all(|stored| stored == first) => first.name().to_owned(),
        Some(_) => "mixed".to_owned(),
    }
}

fn figures(view: &ComparedView<'_>, style: Style) -> String {
    let mut means = table::table(
        style,
        &["over", "positions", "same best", "mean KL, nats", "perplexity A", "B"],
    );
    let mut spread =
        table::table(style, &["KL(A||B) of positions", "50 %", "95 %", "99 %", "largest"]);
    let compared = view.compared;
    let mut rows: Vec<(&str, &Option<Summary>)> =
        view.names.iter().copied().zip(&compared.groups).collect();
    if rows.len() != 1 {
        rows.push(("all", &compared.all));
    }
    for (name, summary) in rows {
        let Some(summary) = summary else {
            means.add_row([name, "0", "-", "-", "-", "-"]);
            continue;
        };
        let [a, b] = summary.perplexity.map(|p| p.map_or_else(|| "-".to_owned(), perplexity));
        means.add_row([
            name.to_owned(),
            count(summary.positions),
            format!("{:.2} %", summary.agreement * 100.0),
            format!("{} +- {}", nats(summary.kl.mean), nats(summary.kl.standard_error)),
            a,
            b,
        ]);
        let kl = &summary.kl;
        spread.add_row([name.to_owned(), nats(kl.p50), nats(kl.p95), nats(kl.p99), nats(kl.max)]);
    }
    for column in 1..=5 {
        table::right(&mut means, column);
        table::right(&mut spread, column);
    }
    format!("{}\n{}", table::text(&means), table::text(&spread))
}

/// A divergence with as many digits as tell two conversions apart.
fn nats(nats: f64) -> String {
    match nats {
        0.0 => "0".to_owned(),
        n if n < 1e-4 => format!("{n:.1e}"),
        n if n < 1.0 => format!("{n:.5}"),
        n => format!("{n:.3}"),
    }
}

fn perplexity(perplexity: f64) -> String {
    match perplexity {
        p if p < 100.0 => format!("{p:.3}"),
        p if p < 1e6 => format!("{p:.1}"),
        p => format!("{p:.3e}"),
    }
}

/// How positions were come to.
fn how(windows: Windows) -> String {
    let Windows { context, stride } = windows;
    let cut = if stride == context {
        "each begins anew".to_owned()
    } else {
        format!("one begins every {stride} tokens, and a position counts in the first that has it")
    };
    format!(
        "Measured: both are given the text's own tokens, in windows of {context} tokens; {cut}. The +- is \
         the standard error of the mean."
    )
}

/// The first position at which the best tokens differ.
fn parting(view: &ComparedView<'_>, first: Disagreement) -> String {
    let place = first.place;
    let token = |token: u32| match (view.spell)(token) {
        Some(text) => format!("{token} {:?}", harmless(&text)),
        None => token.to_string(),
    };
    let name = view.names.get(place.group).copied().unwrap_or("?");
    let text = match view.texts.get(place.group) {
        Some(1) | None => String::new(),
        Some(_) => format!("text {} of ", place.text),
    };
    format!(
        "They first differ after position {} of {text}{name}: A goes on with {}, B with {}.",
        place.position,
        token(first.a),
        token(first.b)
    )
}

fn verdicts(view: &ComparedView<'_>, style: Style) -> String {
    let mut text = String::new();
    let mut say = |holds: bool, what: String| {
        let (tone, word) = if holds { (Tone::Ok, "holds") } else { (Tone::Fail, "FAILS") };
        text += &format!("{} {what}\n", style.paint(tone, word));
    };
    if let Some((least, holds)) = view.limits.agreement {
        say(holds, format!("agreement of at least {:.2} %", least * 100.0));
    }
    if let Some((most, holds)) = view.limits.kl {
        say(holds, format!("mean KL of at most {most} nats"));
    }
    text
}

/// The same for programs.
pub(crate) fn compared_json(view: &ComparedView<'_>) -> Value {
    let model = |view: &ModelView<'_>| {
        json!({
            "directory": view.model.directory,
            "fingerprint": view.model.fingerprint,
            "total_bytes": view.model.total_bytes(),
            "experts": stored(view.model),
            "budget_bytes": view.budget,
        })
    };
    let compared = view.compared;
    let texts: Vec<Value> = view
        .names
        .iter()
        .zip(&view.texts)
        .zip(&compared.groups)
        .map(|((name, texts), summary)| json!({ "name": name, "texts": texts, "summary": summary }))
        .collect();
    let limits = view.limits;
    json!({
        "schema_version": 1,
        "a": model(&view.models[0]),
        "b": model(&view.models[1]),
        "windows": view.windows,
        "ended": if compared.interrupted { "interrupted" } else { "done" },
        "summary": compared.all,
        "by_file": texts,
        "limits": {
            "min_agreement": limits.agreement.map(|(least, _)| least),
            "max_kl": limits.kl.map(|(most, _)| most),
            "hold": limits.holds(),
        },
    })
}

#[cfg(test)]
mod tests {
    use tierkeep_engine::compare::{Place, Position, Tally};

    use super::super::testing::{nano, snapshot};
    use super::*;

    /// Two files, of which the second has a position without a next token and is where they part.
    fn compared(interrupted: bool) -> Compared {
        let (mut all, mut groups) = (Tally::default(), [Tally::default(), Tally::default()]);
        for (group, kl, best) in [(0, 0.0, [7, 7]), (0, 0.0123, [8, 8]), (1, 2.5, [7, 9])] {
            let loss = (group == 0).then_some([4.25, 4.3]);
            let at = Position { kl, best, loss };
            let place = Place { group, text: 1, position: 16 };
            all.add(place, &at);
            groups[group].add(place, &at);
        }
        let groups = groups.iter().map(Tally::summary).collect();
        Compared { all: all.summary(), groups, interrupted }
    }

    fn show(compared: &Compared, limits: LimitsView, stride: usize, style: Style) -> String {
        let model = nano();
        let view = |path, budget| ModelView { path: Path::new(path), model: &model, budget };
        comparison(
            &ComparedView {
                models: [
                    view("/models/glm-nano", Bytes(30_000_000)),
                    view("/models/glm-nano-int4", Bytes(20_000_000)),
                ],
                names: vec!["novel.json", "speech.txt"],
                texts: vec![3, 1],
                windows: Windows { context: 512, stride },
                compared,
                limits,
                spell: &|token| (token == 9).then(|| " wh\u{1b}ale".to_owned()),
            },
            style,
        )
    }

    #[test]
    fn a_comparison_with_its_limits() {
        let compared = compared(false);
        let limits = LimitsView::of(&compared, Some(0.5), Some(0.02));
        assert!(!limits.holds());
        snapshot("model-comparison", |style| show(&compared, limits, 512, style));
    }

    #[test]
    fn an_interrupted_comparison() {
        let mut compared = compared(true);
        compared.groups[1] = None;
        let limits = LimitsView::of(&compared, None, None);
        assert!(limits.holds());
        snapshot("model-comparison-interrupted", |style| show(&compared, limits, 128, style));
    }

    #[test]
    fn nothing_compared_holds_no_limit() {
        let nothing = Compared { all: None, groups: Vec::new(), interrupted: true };
        assert!(!LimitsView::of(&nothing, Some(0.0), None).holds());
        assert!(!LimitsView::of(&nothing, None, Some(1.0)).holds());
    }

    #[test]
    fn divergences_have_the_digits_that_tell_them_apart() {
        assert_eq!([0.0, 1.5e-7, 0.01394, 2.5].map(nats), ["0", "1.5e-7", "0.01394", "2.500"]);
    }
}

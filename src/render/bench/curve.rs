//! The curve of a sweep as SVG: tokens per second, measured and predicted, and hit rate over the swept
//! value, on bands of what is predicted to take most of a token's time. Written by hand, so that the same
//! figures give the same bytes; read in light and dark.

use std::fmt::Write as _;

use tierkeep_engine::bench::statistics::Repeats;
use tierkeep_plans::units::Bytes;

use super::{BenchRow, BenchView, rows};
use crate::args::Sweep;
use crate::render::{harmless, speed};

const WIDTH: f64 = 760.0;
/// The plot: left, right, top, bottom.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 696.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 336.0;
/// The first line of the legend.
const LEGEND: f64 = BOTTOM + 62.0;
/// From one line of it to the next.
const LINE: f64 = 22.0;
/// Room that a label of the horizontal axis needs.
const LABEL_WIDTH: f64 = 58.0;
/// Bands have as many colours.
const N_BANDS: usize = 6;

const CSS: &str = "\
svg{background:#fff}.ground{fill:#fff}\
text{font:13px system-ui,sans-serif;fill:#1f2328}\
.title{font-size:16px;font-weight:600}.sub{fill:#57606a}\
.grid{stroke:#d0d7de;stroke-width:1}.axis{stroke:#57606a;stroke-width:1}\
.speed{stroke:#0550ae;fill:none;stroke-width:2.5}.speed-dot{fill:#0550ae}\
.predicted{stroke:#0550ae;fill:none;stroke-width:1.5;stroke-dasharray:6 4}\
.hits{stroke:#953800;fill:none;stroke-width:2}.hits-dot{fill:#953800}\
.speed-text{fill:#0550ae}.hits-text{fill:#953800}\
.band{opacity:.16}.b0{fill:#0969da}.b1{fill:#bf8700}.b2{fill:#8250df}.b3{fill:#1a7f37}.b4{fill:#cf222e}.b5{fill:#57606a}\
@media(prefers-color-scheme:dark){\
svg{background:#0d1117}.ground{fill:#0d1117}text{fill:#e6edf3}.sub{fill:#9198a1}.grid{stroke:#30363d}.axis{stroke:#9198a1}\
.speed,.predicted{stroke:#79c0ff}.speed-dot,.speed-text{fill:#79c0ff}\
.hits{stroke:#ffa657}.hits-dot,.hits-text{fill:#ffa657}.band{opacity:.26}}";

/// One measured value.
#[derive(Clone, Debug)]
struct Point {
    /// On the axis.
    value: f64,
    label: String,
    speed: Repeats,
    predicted: f64,
    hit_rate: Option<f64>,
    binding: String,
}

/// What is drawn.
#[derive(Clone, Debug)]
pub(crate) struct CurveView {
    title: String,
    subtitle: String,
    axis: &'static str,
    /// Whether the axis is of powers of two.
    is_logarithmic: bool,
    points: Vec<Point>,
}

impl CurveView {
    /// Of a sweep's rows, by ascending value.
    pub(crate) fn of(sweep: Sweep, view: &BenchView<'_>) -> Self {
        let mut points: Vec<Point> =
            view.rows.iter().filter_map(|row| Point::of(sweep, row)).collect();
        points.sort_by(|a, b| a.value.total_cmp(&b.value));
        let first = view.rows.first();
        let name = first.map_or_else(String::new, |row| {
            row.model.directory.file_name().unwrap_or_default().to_string_lossy().into_owned()
        });
        let (axis, over) = match sweep {
            Sweep::Ram => ("budget", "budgets"),
            Sweep::Threads => ("threads", "threads"),
            Sweep::Context => ("context, tokens", "contexts"),
        };
        let at = match (sweep, first) {
            (Sweep::Ram | Sweep::Threads, Some(row)) => {
                format!("context {}, ", row.summary.context)
            }
            (Sweep::Context, _) | (_, None) => String::new(),
        };
        Self {
            title: format!("{name}: decode over {over}"),
            subtitle: format!("{at}medians of {} rounds, tierkeep {}", view.rounds, rows::build()),
            axis,
            is_logarithmic: sweep == Sweep::Context,
            points,
        }
    }

    /// The picture.
    pub(crate) fn svg(&self) -> String {
        let bands = self.bands();
        let height = LEGEND + LINE * (1.0 + bands.len() as f64) + 16.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
             aria-labelledby=\"t d\">\n<title id=\"t\">{}</title>\n<desc id=\"d\">{}</desc>\n\
             <style>{CSS}</style>\n\
             <rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>\n",
            escaped(&self.title),
            escaped(&self.description())
        );
        text(&mut svg, ("title", "start"), (LEFT, 26.0), &self.title);
        text(&mut svg, ("sub", "start"), (LEFT, 46.0), &self.subtitle);
        self.shade(&mut svg, &bands);
        let top = self.axes(&mut svg);
        self.lines(&mut svg, top);
        legend(&mut svg, &bands);
        svg.push_str("</svg>\n");
        svg
    }

    /// The figures in words, for who cannot see the picture.
    fn description(&self) -> String {
        let point = |p: &Point| {
            let hits =
                p.hit_rate.map_or_else(String::new, |rate| format!(", hits {:.1} %", rate * 100.0));
            format!("{}: {} tokens/s{hits}, {}", p.label, speed(p.speed.median), p.binding)
        };
        let points: Vec<String> = self.points.iter().map(point).collect();
        points.join("; ")
    }

    /// Where a value is on the horizontal axis.
    fn x(&self, value: f64) -> f64 {
        let scaled = |value: f64| if self.is_logarithmic { value.max(1.0).log2() } else { value };
        let ends = self.points.first().zip(self.points.last());
        let Some((first, last)) = ends else { return f64::midpoint(LEFT, RIGHT) };
        let (least, most) = (scaled(first.value), scaled(last.value));
        if most > least {
            // Off the edges, so that a point's band can be seen.
            let room = 28.0;
            LEFT + room + (scaled(value) - least) / (most - least) * (RIGHT - LEFT - 2.0 * room)
        } else {
            f64::midpoint(LEFT, RIGHT)
        }
    }

    /// The binding terms, in the order of their colours.
    fn bands(&self) -> Vec<String> {
        let mut terms: Vec<String> = Vec::new();
        for point in &self.points {
            if !terms.contains(&point.binding) {
                terms.push(point.binding.clone());
            }
        }
        terms
    }

    /// Bands of the binding term, each reaching halfway to the neighbours.
    fn shade(&self, svg: &mut String, bands: &[String]) {
        let mut from = LEFT;
        for (at, point) in self.points.iter().enumerate() {
            let next = self.points.get(at + 1).map(|next| self.x(next.value));
            let to = next.map_or(RIGHT, |next| f64::midpoint(self.x(point.value), next));
            let colour = bands.iter().position(|term| *term == point.binding).unwrap_or(0);
            let _ = writeln!(
                svg,
                "<rect class=\"band b{}\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\"/>",
                colour % N_BANDS,
                to - from,
                BOTTOM - TOP
            );
            from = to;
        }
    }

    /// Grid, axes and their labels; returns the speed at the top of the plot.
    fn axes(&self, svg: &mut String) -> f64 {
        let most = self.points.iter().map(|p| p.speed.most.max(p.predicted)).fold(0.0, f64::max);
        let step = nice_step(most / 5.0);
        let n_steps = (most / step).ceil().max(1.0);
        let top = step * n_steps;
        for at in 0..=n_steps as u32 {
            let value = step * f64::from(at);
            let y = y(value / top);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{RIGHT}\" y2=\"{y:.1}\"/>"
            );
            text(svg, ("speed-text", "end"), (LEFT - 8.0, y + 4.0), &tick(value, step));
        }
        for percent in [0, 25, 50, 75, 100] {
            let y = y(f64::from(percent) / 100.0);
            text(svg, ("hits-text", "start"), (RIGHT + 8.0, y + 4.0), &format!("{percent} %"));
        }
        let _ = writeln!(
            svg,
            "<path class=\"axis\" fill=\"none\" d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}V{TOP}\"/>"
        );
        let mut free_from = f64::NEG_INFINITY;
        for point in &self.points {
            let x = self.x(point.value);
            let _ = writeln!(
                svg,
                "<line class=\"axis\" x1=\"{x:.1}\" y1=\"{BOTTOM}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>",
                BOTTOM + 5.0
            );
            if x - LABEL_WIDTH / 2.0 >= free_from {
                text(svg, ("", "middle"), (x, BOTTOM + 20.0), &point.label);
                free_from = x + LABEL_WIDTH / 2.0;
            }
        }
        text(svg, ("sub", "middle"), (f64::midpoint(LEFT, RIGHT), BOTTOM + 40.0), self.axis);
        text(svg, ("speed-text", "start"), (8.0, TOP - 14.0), "tokens/s");
        text(svg, ("hits-text", "end"), (WIDTH - 8.0, TOP - 14.0), "hit rate");
        top
    }

    /// The measured speed with its range over rounds, the predicted one, the hit rate.
    fn lines(&self, svg: &mut String, top: f64) {
        let line = |class: &str, points: Vec<(f64, f64)>, svg: &mut String| {
            let points: Vec<String> =
                points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(svg, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
        };
        let of = |figure: &dyn Fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
            let point = |p: &Point| Some((self.x(p.value), y(figure(p)?)));
            self.points.iter().filter_map(point).collect()
        };
        let hits = of(&|p| p.hit_rate);
        let speeds = of(&|p| Some(p.speed.median / top));
        line("predicted", of(&|p| Some(p.predicted / top)), svg);
        for (x, y) in &hits {
            let _ = writeln!(
                svg,
                "<rect class=\"hits-dot\" x=\"{:.1}\" y=\"{:.1}\" width=\"7\" height=\"7\"/>",
                x - 3.5,
                y - 3.5
            );
        }
        line("hits", hits, svg);
        for point in &self.points {
            let (x, least, most) =
                (self.x(point.value), y(point.speed.least / top), y(point.speed.most / top));
            let _ = writeln!(
                svg,
                "<path class=\"speed\" d=\"M{:.1} {most:.1}h8m-4 0V{least:.1}m-4 0h8\"/>",
                x - 4.0
            );
        }
        for (x, y) in &speeds {
            let _ =
                writeln!(svg, "<circle class=\"speed-dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>");
        }
        line("speed", speeds, svg);
    }
}

impl Point {
    fn of(sweep: Sweep, row: &BenchRow<'_>) -> Option<Self> {
        let summary = &row.summary;
        let (value, label) = match sweep {
            Sweep::Ram => (row.value?, Bytes(row.value? as u64).to_string()),
            Sweep::Threads => (row.value?, format!("{:.0}", row.value?)),
            Sweep::Context => (summary.context as f64, summary.context.to_string()),
        };
        Some(Self {
            value,
            label,
            speed: summary.decode_tokens_per_s.clone()?,
            predicted: summary.expected.decode_tokens_per_s.p50,
            hit_rate: summary.hit_rate,
            binding: summary.expected.binding.clone(),
        })
    }
}

/// Where a share of the plot's height is.
fn y(share: f64) -> f64 {
    BOTTOM - share.clamp(0.0, 1.0) * (BOTTOM - TOP)
}

/// The smallest of 1, 2 and 5 times a power of ten that is no smaller.
fn nice_step(least: f64) -> f64 {
    if !(least > 0.0 && least.is_finite()) {
        return 1.0;
    }
    let power = 10.0_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|n| n * power)
        .into_iter()
        .find(|&step| step >= least)
        .unwrap_or(power)
}

/// A number with the digits that its step has.
fn tick(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.digits$}")
}

fn legend(svg: &mut String, bands: &[String]) {
    for (class, x, said) in [
        ("speed", LEFT, "tokens/s, measured"),
        ("predicted", 250.0, "tokens/s, predicted by the plan"),
        ("hits", 520.0, "hit rate in decode"),
    ] {
        let (y, end) = (LEGEND - 4.0, x + 24.0);
        let _ = writeln!(
            svg,
            "<line class=\"{class}\" x1=\"{x}\" y1=\"{y}\" x2=\"{end}\" y2=\"{y}\"/>"
        );
        text(svg, ("", "start"), (x + 32.0, LEGEND), said);
    }
    for (at, term) in bands.iter().enumerate() {
        let y = LEGEND + LINE * (1.0 + at as f64);
        let _ = writeln!(
            svg,
            "<rect class=\"band b{}\" x=\"{LEFT}\" y=\"{:.1}\" width=\"24\" height=\"14\"/>",
            at % N_BANDS,
            y - 11.0
        );
        let said = format!("predicted to take most of a token: {term}");
        text(svg, ("", "start"), (LEFT + 32.0, y), &said);
    }
}

fn text(svg: &mut String, (class, anchor): (&str, &str), (x, y): (f64, f64), said: &str) {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let said = escaped(said);
    let _ = writeln!(
        svg,
        "<text{class} x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{said}</text>"
    );
}

fn escaped(text: &str) -> String {
    harmless(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_numbers() {
        let steps: Vec<f64> = [0.3, 1.0, 3.4, 40.0, 0.0].map(nice_step).into();
        assert_eq!(steps, [0.5, 1.0, 5.0, 50.0, 1.0]);
        assert_eq!((tick(2.5, 0.5), tick(150.0, 50.0)), ("2.5".to_owned(), "150".to_owned()));
    }

    #[test]
    fn names_are_text_and_no_markup() {
        assert_eq!(escaped("a<b>&\u{1b}"), "a&lt;b&gt;&amp;\u{fffd}");
    }
}

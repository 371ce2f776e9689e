//! Plots as SVG inside the page: axes, marks of two shapes, spreads as bars, a title on each mark.

use super::compare::{figure, size};
use super::row::median;
use std::fmt::Write;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 68.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 46.0;
/// Labels below the axis, at most.
const LABELS: usize = 12;

/// How the upright axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// From zero, evenly.
    Linear,
    /// By powers of ten.
    Logarithmic,
    /// Around one, with a line there.
    Ratio,
}

/// One mark.
#[derive(Debug, Clone)]
pub struct Mark {
    /// Bytes.
    pub size: u64,
    /// Where it is.
    pub value: f64,
    /// Where its bar begins and ends.
    pub range: (f64, f64),
    /// What a pointer on it shows.
    pub title: String,
}

/// Marks that belong together.
#[derive(Debug, Clone)]
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// Its style: `a` or `b`.
    pub class: &'static str,
    /// Dashed and hollow.
    pub hollow: bool,
    /// Its marks, by size.
    pub marks: Vec<Mark>,
}

/// A plot.
#[derive(Debug, Clone)]
pub struct Plot {
    /// What is shown, for those who do not see it.
    pub title: String,
    /// The unit, beside the upright axis.
    pub unit: &'static str,
    /// How that axis counts.
    pub scale: Scale,
    /// The lines.
    pub lines: Vec<Line>,
}

/// Text that may stand anywhere in the page.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            // Not allowed in a page, whatever a program printed.
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// What a plot of ratios reaches over: all marks, and bars as long as most are. One round that went wrong must not flatten
/// the others; differences below a twentieth are not blown up.
fn around_one<'a>(marks: impl Iterator<Item = &'a Mark> + Clone) -> (f64, f64) {
    let lengths: Vec<f64> = marks.clone().map(|mark| mark.range.1 - mark.range.0).collect();
    let usual = median(&lengths).unwrap_or(0.0);
    let low = marks.clone().map(|mark| mark.range.0.max(mark.value - usual)).fold(0.95, f64::min);
    let high = marks.map(|mark| mark.range.1.min(mark.value + usual)).fold(1.05, f64::max);
    (low - 0.02, high + 0.02)
}

/// Where values lie.
struct Axes {
    sizes: Vec<u64>,
    least: f64,
    most: f64,
    logarithmic: bool,
}

impl Axes {
    fn of(plot: &Plot) -> Option<Self> {
        let marks = || plot.lines.iter().flat_map(|line| &line.marks);
        let mut sizes: Vec<u64> = marks().map(|mark| mark.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let low = marks().map(|mark| mark.range.0).fold(f64::INFINITY, f64::min);
        let high = marks().map(|mark| mark.range.1).fold(f64::NEG_INFINITY, f64::max);
        if sizes.is_empty() || !low.is_finite() || !high.is_finite() {
            return None;
        }
        let (least, most) = match plot.scale {
            Scale::Linear => (0.0, high * 1.05),
            Scale::Logarithmic => (low / 1.15, high * 1.15),
            Scale::Ratio => around_one(marks()),
        };
        let most = if most > least { most } else { least + 1.0 };
        Some(Self { sizes, least, most, logarithmic: plot.scale == Scale::Logarithmic })
    }

    fn x(&self, size: u64) -> f64 {
        // Size 0 is printed by some programs.
        let at = |size: u64| (size.max(1) as f64).log2();
        let (first, last) = (at(self.sizes[0]), at(self.sizes[self.sizes.len() - 1]));
        let room = WIDTH - LEFT - RIGHT - 24.0;
        let part = if last > first { (at(size) - first) / (last - first) } else { 0.5 };
        LEFT + 12.0 + part * room
    }

    fn y(&self, value: f64) -> f64 {
        let of = |value: f64| if self.logarithmic { value.max(1e-12).log10() } else { value };
        let part = (of(value) - of(self.least)) / (of(self.most) - of(self.least));
        HEIGHT - BOTTOM - part.clamp(0.0, 1.0) * (HEIGHT - TOP - BOTTOM)
    }

    /// Round values for the upright axis.
    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let decades = self.most.log10() - self.least.log10();
            let steps: &[f64] = if decades > 3.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
            let first = self.least.log10().floor() as i32;
            let last = self.most.log10().ceil() as i32;
            let all =
                (first..=last).flat_map(|power| steps.iter().map(move |s| s * 10f64.powi(power)));
            let inside = |value: &f64| *value >= self.least && *value <= self.most;
            return all.filter(inside).collect();
        }
        let rough = (self.most - self.least) / 6.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|s| s * power).into_iter().find(|s| *s >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.least / step).ceil();
        let count = ((self.most / step).floor() - first).clamp(0.0, 20.0) as usize;
        (0..=count).map(|at| (first + at as f64) * step).collect()
    }
}

/// The plot with its legend; nothing where there is nothing to show. `id` is its own on the page.
pub fn figure_of(plot: &Plot, id: &str) -> String {
    let Some(axes) = Axes::of(plot) else { return String::new() };
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = draw(plot, &axes, id, &mut out);
    out
}

fn draw(plot: &Plot, axes: &Axes, id: &str, out: &mut String) -> std::fmt::Result {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    writeln!(out, "<figure><figcaption>{}</figcaption>", escaped(&plot.title))?;
    writeln!(
        out,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"{id}\"><title id=\"{id}\">{}. The table below \
         has the figures.</title>",
        escaped(&plot.title)
    )?;
    for value in axes.ticks() {
        let y = axes.y(value);
        let label = match plot.scale {
            Scale::Ratio => format!("{value:.2}"),
            _ => tick(value),
        };
        writeln!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
        )?;
        let y = y + 4.0;
        writeln!(
            out,
            "<text x=\"{}\" y=\"{y:.1}\" text-anchor=\"end\">{label}</text>",
            LEFT - 8.0
        )?;
    }
    let every = axes.sizes.len().div_ceil(LABELS).max(1);
    for one in axes.sizes.iter().step_by(every) {
        let x = axes.x(*one);
        writeln!(
            out,
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{}\"/>",
            bottom + 5.0
        )?;
        writeln!(
            out,
            "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            bottom + 19.0,
            size(*one)
        )?;
    }
    writeln!(out, "<path class=\"axis\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/>")?;
    let middle = f64::midpoint(LEFT, right);
    writeln!(
        out,
        "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">size (bytes)</text>",
        HEIGHT - 8.0
    )?;
    let middle = f64::midpoint(TOP, bottom);
    writeln!(
        out,
        "<text transform=\"translate(15 {middle}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        plot.unit
    )?;
    if plot.scale == Scale::Ratio {
        let y = axes.y(1.0);
        writeln!(
            out,
            "<line class=\"one\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
        )?;
    }
    for line in &plot.lines {
        let class =
            if line.hollow { format!("{} hollow", line.class) } else { line.class.to_owned() };
        writeln!(out, "<g class=\"{class}\">")?;
        let points: Vec<String> = line
            .marks
            .iter()
            .map(|mark| format!("{:.1},{:.1}", axes.x(mark.size), axes.y(mark.value)))
            .collect();
        writeln!(out, "<polyline points=\"{}\"/>", points.join(" "))?;
        for mark in &line.marks {
            let (x, y) = (axes.x(mark.size), axes.y(mark.value));
            let (low, high) = (axes.y(mark.range.0), axes.y(mark.range.1));
            write!(out, "<g><title>{}</title>", escaped(&mark.title))?;
            // The bar takes no part in pointing, the wide ring around the mark does.
            write!(out, "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>")?;
            write!(out, "<circle class=\"touch\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"11\"/>")?;
            shape(line.class, x, y, out)?;
            writeln!(out, "</g>")?;
        }
        writeln!(out, "</g>")?;
    }
    writeln!(out, "</svg>")?;
    legend(plot, out)?;
    writeln!(out, "</figure>")
}

/// A circle for A, a square for B: colour is not all that tells them apart.
fn shape(class: &str, x: f64, y: f64, out: &mut String) -> std::fmt::Result {
    if class == "a" {
        write!(out, "<circle class=\"mark\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>")
    } else {
        let (x, y) = (x - 3.7, y - 3.7);
        write!(out, "<rect class=\"mark\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"7.4\" height=\"7.4\"/>")
    }
}

fn legend(plot: &Plot, out: &mut String) -> std::fmt::Result {
    writeln!(out, "<ul class=\"legend\">")?;
    for line in &plot.lines {
        let class =
            if line.hollow { format!("{} hollow", line.class) } else { line.class.to_owned() };
        write!(
            out,
            "<li><svg viewBox=\"0 0 34 12\" width=\"34\" height=\"12\" aria-hidden=\"true\"><g class=\"{class}\"><polyline \
             points=\"1,6 33,6\"/>"
        )?;
        shape(line.class, 17.0, 6.0, out)?;
        writeln!(out, "</g></svg>{}</li>", escaped(&line.name))?;
    }
    writeln!(out, "</ul>")
}

/// A round value without needless digits.
fn tick(value: f64) -> String {
    if value >= 1e6 {
        return format!("{}M", value / 1e6);
    }
    if value >= 1e4 {
        return format!("{}k", value / 1e3);
    }
    let text = if value < 0.01 && value > 0.0 { format!("{value}") } else { figure(value) };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(scale: Scale, values: &[(u64, f64)]) -> Plot {
        let mark = |(size, value): &(u64, f64)| Mark {
            size: *size,
            value: *value,
            range: (value * 0.9, value * 1.1),
            title: "<&\"'>".into(),
        };
        let line = |class, hollow| Line {
            name: "A & B".into(),
            class,
            hollow,
            marks: values.iter().map(mark).collect(),
        };
        let lines = vec![line("a", false), line("b", true)];
        Plot { title: "t".into(), unit: "us", scale, lines }
    }

    #[test]
    fn nothing_to_show_is_no_plot() {
        assert_eq!(figure_of(&plot(Scale::Linear, &[]), "p"), "");
    }

    #[test]
    fn every_mark_is_inside_and_has_a_title() {
        let values = [(0, 1.0), (8, 14.0), (1 << 20, 100.0), (1 << 34, 2.5e6)];
        for scale in [Scale::Linear, Scale::Logarithmic, Scale::Ratio] {
            let shown = figure_of(&plot(scale, &values), "p");
            assert_eq!(shown.matches("<title>").count(), 2 * values.len());
            assert_eq!(shown.matches("class=\"touch\"").count(), 2 * values.len());
            for (name, most) in [("cx=\"", WIDTH), ("cy=\"", HEIGHT)] {
                for part in shown.split(name).skip(1) {
                    let number: f64 = part.split('"').next().unwrap().parse().unwrap();
                    assert!(number >= 0.0 && number <= most, "{name}{number}");
                }
            }
            assert!(!shown.contains("NaN") && !shown.contains("inf"), "{shown}");
            assert!(shown.contains("&lt;&amp;&quot;&#39;&gt;") && shown.contains("A &amp; B"));
        }
    }

    #[test]
    fn one_size_and_one_value_are_shown_in_the_middle() {
        let shown = figure_of(&plot(Scale::Linear, &[(8, 0.0)]), "p");
        assert!(!shown.contains("NaN") && shown.contains("class=\"mark\""), "{shown}");
    }

    #[test]
    fn one_round_that_went_wrong_does_not_flatten_the_ratios() {
        let mark = |high| Mark { size: 8, value: 1.0, range: (0.9, high), title: String::new() };
        let marks = [mark(1.1), mark(1.1), mark(25.0)];
        let (low, high) = around_one(marks.iter());
        assert!(low < 0.9 && high > 1.1 && high < 1.5, "{low} {high}");
    }

    #[test]
    fn ticks_are_round_and_few() {
        let axes = |least, most, logarithmic| Axes { sizes: vec![8], least, most, logarithmic };
        assert_eq!(axes(0.0, 12.0, false).ticks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
        assert_eq!(axes(4.0, 60.0, true).ticks(), [5.0, 10.0, 20.0, 50.0]);
        assert_eq!(axes(4.0, 9e5, true).ticks(), [10.0, 100.0, 1000.0, 1e4, 1e5]);
        let shown = [0.005, 0.5, 20.0, 12.5, 1e4, 2e6].map(tick);
        assert_eq!(shown, ["0.005", "0.5", "20", "12.5", "10k", "2M"]);
    }

    #[test]
    fn no_text_can_end_its_place() {
        assert_eq!(escaped("<script>\u{1}\n"), "&lt;script&gt;\u{fffd}\n");
    }
}

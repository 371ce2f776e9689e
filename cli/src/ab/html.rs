//! The comparison as one page that needs nothing else: no script, no font, no picture from elsewhere.

use super::child::Ending;
use super::compare::{Point, Spread, figure, size};
use super::plot::{Line, Mark, Plot, Scale, escaped, figure_of};
use super::row::Series;
use super::side::differences;
use super::study::{Level, Study};
use super::text::measured;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Colours have a contrast of at least 4.5 to what is behind them, in light and in dark.
const STYLE: &str = "
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de; --card: #f6f8fa;
  --a: #0550ae; --b: #bc4c00; --bad: #b3261e; --good: #116329; --doubt: #7d4e00; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --soft: #9da7b3; --line: #3d444d;
  --card: #161b22; --a: #79b8ff; --b: #ffa657; --bad: #ff8a80; --good: #6fdd8b; --doubt: #e3b341; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 64rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; } .soft { color: var(--soft); } code, pre { font-family: ui-monospace, monospace; font-size: .875em; }
code { overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .75rem; overflow-x: auto; }
.verdict { display: inline-block; padding: .1rem .6rem; border: 2px solid currentColor; border-radius: 1rem; font-weight: 600; }
.fine, .faster { color: var(--good); } .problem, .problems, .slower { color: var(--bad); }
.unknown, .advice { color: var(--doubt); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th.l, td.l { text-align: left; white-space: normal; } thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; }
tbody th { font-weight: 400; } .faster, .slower { font-weight: 600; }
ul.remarks { list-style: none; padding: 0; } ul.remarks li { border-left: 4px solid currentColor; padding: .2rem .8rem; margin: .5rem 0; }
ul.remarks span { color: var(--text); }
figure { margin: 1rem 0; padding: 1rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figcaption { font-weight: 600; margin-bottom: .5rem; } figure > svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 13px system-ui, sans-serif; } .grid { stroke: var(--line); }
.axis { fill: none; stroke: var(--soft); } .one { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 2 4; }
.a { color: var(--a); } .b { color: var(--b); } .a polyline, .b polyline { fill: none; stroke: currentColor; stroke-width: 2; }
.hollow polyline { stroke-dasharray: 6 4; } .a line, .b line { stroke: currentColor; stroke-width: 1.5; opacity: .6; }
.mark { fill: currentColor; stroke: currentColor; stroke-width: 2; } .hollow .mark { fill: var(--card); }
.touch { fill: transparent; } g:hover > .mark { stroke-width: 5; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: .5rem 0 0; padding: 0; font-size: .9rem; }
.legend svg { vertical-align: middle; margin-right: .5rem; }
details { margin: .5rem 0; } summary { cursor: pointer; }
@media print { body { max-width: none; } figure { break-inside: avoid; } }
";

/// The page.
pub fn page(study: &Study) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_page(study, &mut out);
    out
}

fn write_page(study: &Study, out: &mut String) -> std::fmt::Result {
    let [a, b] = &study.sides;
    let title = format!("{} against {}", b.short(), a.short());
    write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"default-src \
         'none'; style-src 'unsafe-inline'\">\n<title>pinrail ab: {}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n",
        escaped(&title)
    )?;
    writeln!(out, "<h1>{}</h1>", escaped(&title))?;
    let word = match study.verdict() {
        "fine" => "both ran as they should",
        "problems" => "problems",
        _ => "could not be told",
    };
    writeln!(
        out,
        "<p><span class=\"verdict {}\">{word}</span> <span class=\"soft\">pinrail {} · {} · {} of {} rounds with figures of \
         both</span></p>",
        study.verdict(),
        env!("CARGO_PKG_VERSION"),
        date(study.began),
        study.whole_rounds(),
        study.asked
    )?;
    writeln!(out, "<p><code>{}</code></p>", escaped(&study.shown_command()))?;
    if !study.parameters.is_empty() {
        writeln!(out, "<p class=\"soft\">{}</p>", escaped(&measured(study)))?;
    }
    remarks(study, out)?;
    sides(study, out)?;
    summary(study, out)?;
    plots(study, out)?;
    if !study.points.is_empty() {
        table(study, out)?;
    }
    settings(study, out)?;
    runs(study, out)?;
    out.push_str("</main>\n</body>\n</html>\n");
    Ok(())
}

fn remarks(study: &Study, out: &mut String) -> std::fmt::Result {
    if study.remarks.is_empty() {
        return Ok(());
    }
    writeln!(out, "<h2>Before reading a number</h2>\n<ul class=\"remarks\">")?;
    for remark in &study.remarks {
        let word = match remark.level {
            Level::Problem => "Problem",
            Level::Unknown => "Unknown",
            Level::Note => "Note",
        };
        let about = study.about(remark);
        let about = if about.is_empty() { about } else { format!(" ({about})") };
        writeln!(
            out,
            "<li class=\"{}\"><strong>{word}</strong>{} <span>{}</span></li>",
            remark.level.name(),
            escaped(&about),
            escaped(&remark.text)
        )?;
    }
    writeln!(out, "</ul>")
}

fn sides(study: &Study, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "<h2>What was compared</h2>\n<div class=\"scroll\"><table>\n<thead><tr><th class=\"l\" scope=\"col\">Side</th><th class=\"l\" \
         scope=\"col\">Plugin</th><th class=\"l\" scope=\"col\">Network used</th><th class=\"l\" scope=\"col\">NCCL</th></tr></thead>\n<tbody>"
    )?;
    for (index, side) in study.sides.iter().enumerate() {
        let log = &study.logs[index];
        let used = study.networks[index].clone().unwrap_or_else(|| {
            let used = log.used();
            if used.is_empty() { "not told".into() } else { used.join(", ") }
        });
        let class = if index == 0 { "a" } else { "b" };
        writeln!(
            out,
            "<tr><th class=\"l {class}\" scope=\"row\"><strong>{}</strong></th><td class=\"l\">{}</td><td class=\"l\">{}</td><td \
             class=\"l\">{}</td></tr>",
            side.letter,
            escaped(&side.name()),
            escaped(&used),
            escaped(log.version.as_deref().unwrap_or("not told"))
        )?;
    }
    writeln!(out, "</tbody></table></div>")
}

fn named(series: Series, label: &str) -> String {
    if label.is_empty() { series.name().to_owned() } else { format!("{label}, {}", series.name()) }
}

fn summary(study: &Study, out: &mut String) -> std::fmt::Result {
    if study.summaries.is_empty() {
        return Ok(());
    }
    writeln!(out, "<h2>In short</h2>\n<ul>")?;
    for short in &study.summaries {
        writeln!(
            out,
            "<li>{}: B is <strong>{:.3}</strong> times as fast as A over all sizes; lowest {:.3} at {}, highest {:.3} at {}</li>",
            escaped(&named(short.series, &short.label)),
            short.ratio.median,
            short.ratio.least,
            size(short.at[0]),
            short.ratio.most,
            size(short.at[1])
        )?;
    }
    writeln!(out, "</ul>")
}

/// What a plot shows of a point, for one side.
type Shown = fn(&Point, usize) -> Option<Spread>;

fn plots(study: &Study, out: &mut String) -> std::fmt::Result {
    let mut labels: Vec<&str> = study.points.iter().map(|point| point.label.as_str()).collect();
    labels.sort_unstable();
    labels.dedup();
    for (index, label) in labels.iter().enumerate() {
        let heading = if label.is_empty() { "Plots".to_owned() } else { format!("Plots: {label}") };
        writeln!(out, "<h2>{}</h2>", escaped(&heading))?;
        let bandwidth: Shown = |point, side| point.bandwidth[side];
        let time: Shown = |point, side| point.time[side];
        let kinds = [
            ("Bandwidth, more is better", "GB/s", Scale::Linear, bandwidth),
            ("Time, less is better", "microseconds", Scale::Logarithmic, time),
        ];
        for (number, (title, unit, scale, shown)) in kinds.into_iter().enumerate() {
            let lines = lines(study, label, unit, scale, shown);
            let plot = Plot { title: titled(title, label), unit, scale, lines };
            out.push_str(&figure_of(&plot, &format!("p{index}-{number}")));
        }
        let plot = Plot {
            title: titled("How much faster B is than A, above 1 it is", label),
            unit: "B to A",
            scale: Scale::Ratio,
            lines: ratio_lines(study, label),
        };
        out.push_str(&figure_of(&plot, &format!("p{index}-2")));
    }
    writeln!(
        out,
        "<p class=\"soft\">Marks are the middle of the rounds, bars reach from the lowest to the highest (in the plots of ratios \
         as far as there is room). Point at a mark for its figures.</p>"
    )
}

fn titled(title: &str, label: &str) -> String {
    if label.is_empty() { title.to_owned() } else { format!("{title} ({label})") }
}

/// The series of a label, in order.
fn series_of(study: &Study, label: &str) -> Vec<Series> {
    let mut all: Vec<Series> = study
        .points
        .iter()
        .filter(|point| point.label == label)
        .map(|point| point.series)
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn lines(study: &Study, label: &str, unit: &str, scale: Scale, shown: Shown) -> Vec<Line> {
    let mut lines = Vec::new();
    let all = series_of(study, label);
    for series in &all {
        for (side, class) in ["a", "b"].into_iter().enumerate() {
            let letter = study.sides[side].letter;
            let marks: Vec<Mark> = study
                .points
                .iter()
                .filter(|point| point.label == label && point.series == *series)
                .filter_map(|point| {
                    let spread = shown(point, side)?;
                    // There is no place for nothing on such a scale.
                    if scale == Scale::Logarithmic && spread.least <= 0.0 {
                        return None;
                    }
                    Some(mark(point.size, spread, letter, *series, unit))
                })
                .collect();
            if !marks.is_empty() {
                let name = format!("{letter}, {}", series.name());
                lines.push(Line { name, class, hollow: *series == Series::InPlace, marks });
            }
        }
    }
    lines
}

fn ratio_lines(study: &Study, label: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    for series in series_of(study, label) {
        let marks: Vec<Mark> = study
            .points
            .iter()
            .filter(|point| point.label == label && point.series == series)
            .filter_map(|point| Some(mark(point.size, point.ratio?, "B to A", series, "")))
            .collect();
        if !marks.is_empty() {
            let hollow = matches!(series, Series::InPlace | Series::Latency);
            lines.push(Line { name: series.name().to_owned(), class: "b", hollow, marks });
        }
    }
    lines
}

fn mark(bytes: u64, spread: Spread, who: &str, series: Series, unit: &str) -> Mark {
    let shown = |value: f64| if unit.is_empty() { format!("{value:.3}") } else { figure(value) };
    let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
    Mark {
        size: bytes,
        value: spread.median,
        range: (spread.least, spread.most),
        title: format!(
            "{who}, {}, {} bytes: {}{unit} ({} to {}, {} rounds)",
            series.name(),
            bytes,
            shown(spread.median),
            shown(spread.least),
            shown(spread.most),
            spread.count
        ),
    }
}

fn table(study: &Study, out: &mut String) -> std::fmt::Result {
    let labelled = study.points.iter().any(|point| !point.label.is_empty());
    let kind = if labelled { "<th class=\"l\" scope=\"col\">Type</th>" } else { "" };
    writeln!(
        out,
        "<h2>Figures</h2>\n<div class=\"scroll\"><table>\n<caption>The middle of the rounds; the ratios are taken within each \
         round. A ratio is coloured and marked with an arrow where at least three rounds all say so.</caption>\n<thead><tr><th \
         scope=\"col\">Size</th>{kind}<th class=\"l\" scope=\"col\">Series</th><th scope=\"col\">A (us)</th><th scope=\"col\">B \
         (us)</th><th scope=\"col\">A (GB/s)</th><th scope=\"col\">B (GB/s)</th><th scope=\"col\">B to A</th><th \
         scope=\"col\">lowest to highest</th><th scope=\"col\">Wrong</th></tr></thead>\n<tbody>"
    )?;
    let cell = |spread: Option<Spread>| spread.map_or_else(|| "–".into(), |s| figure(s.median));
    for point in &study.points {
        let (ratio, range, class) = match point.ratio {
            None => ("–".into(), "–".into(), ""),
            Some(ratio) => {
                let (class, arrow) = match (ratio.is_one_sided(), ratio.median > 1.0) {
                    (false, _) => ("", ""),
                    (true, true) => ("faster", " ▲"),
                    (true, false) => ("slower", " ▼"),
                };
                let range = format!("{:.3} to {:.3}", ratio.least, ratio.most);
                (format!("{:.3}{arrow}", ratio.median), range, class)
            }
        };
        let wrong = match point.wrong {
            [None, None] => "not checked".to_owned(),
            wrong => format!("{}", wrong.iter().flatten().sum::<f64>()),
        };
        let kind = if labelled {
            format!("<td class=\"l\">{}</td>", escaped(&point.label))
        } else {
            String::new()
        };
        writeln!(
            out,
            "<tr><th scope=\"row\">{}</th>{kind}<td class=\"l\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td \
             class=\"{class}\">{ratio}</td><td>{range}</td><td>{wrong}</td></tr>",
            size(point.size),
            point.series.name(),
            cell(point.time[0]),
            cell(point.time[1]),
            cell(point.bandwidth[0]),
            cell(point.bandwidth[1]),
        )?;
    }
    writeln!(out, "</tbody></table></div>")
}

fn settings(study: &Study, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "<h2>Settings</h2>\n<div class=\"scroll\"><table>\n<caption>Variables that differ. All others were alike.</caption>\n<thead><tr><th \
         class=\"l\" scope=\"col\">Variable</th><th class=\"l\" scope=\"col\">A</th><th class=\"l\" scope=\"col\">B</th></tr></thead>\n<tbody>"
    )?;
    let shown = |value: Option<String>| {
        value.map_or_else(
            || "<span class=\"soft\">not set</span>".into(),
            |value| format!("<code>{}</code>", escaped(&value)),
        )
    };
    let [a, b] = &study.sides;
    for (name, a, b) in differences(a, b) {
        writeln!(
            out,
            "<tr><th class=\"l\" scope=\"row\"><code>{}</code></th><td class=\"l\">{}</td><td class=\"l\">{}</td></tr>",
            escaped(&name),
            shown(a),
            shown(b)
        )?;
    }
    writeln!(out, "</tbody></table></div>")?;
    for (side, log) in study.sides.iter().zip(&study.logs) {
        for (settings, times) in &log.settings {
            let times =
                if log.settings.len() > 1 { format!(" ({times} times)") } else { String::new() };
            writeln!(
                out,
                "<p><strong>{}</strong>{times}: <code>{}</code></p>",
                side.letter,
                escaped(settings)
            )?;
        }
    }
    Ok(())
}

fn runs(study: &Study, out: &mut String) -> std::fmt::Result {
    writeln!(out, "<h2>Runs</h2>")?;
    for run in study.runs.iter().filter(|run| run.ended.ending != Ending::Well) {
        let lines = run.ended.tail.join("\n");
        writeln!(
            out,
            "<p class=\"problem\">{} in round {} {}. Its last lines:</p>\n<pre>{}</pre>",
            study.sides[run.side].letter,
            run.round,
            escaped(&run.ended.ending.to_string()),
            escaped(&lines)
        )?;
    }
    writeln!(
        out,
        "<details><summary>{} runs in the order in which they were made</summary>\n<div class=\"scroll\"><table>\n<thead><tr><th \
         scope=\"col\">Round</th><th class=\"l\" scope=\"col\">Side</th><th class=\"l\" scope=\"col\">Ending</th><th \
         scope=\"col\">Seconds</th><th scope=\"col\">Figures</th></tr></thead>\n<tbody>",
        study.runs.len()
    )?;
    for run in &study.runs {
        writeln!(
            out,
            "<tr><td>{}</td><td class=\"l\">{}</td><td class=\"l\">{}</td><td>{:.1}</td><td>{}</td></tr>",
            run.round,
            study.sides[run.side].letter,
            escaped(&run.ended.ending.to_string()),
            run.ended.seconds,
            run.rows
        )?;
    }
    writeln!(out, "</tbody></table></div></details>")
}

/// Day and minute, in UTC.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March have their odd day last.
    let day = days + 719_468;
    let era = day / 146_097;
    let of_era = day % 146_097;
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", rest / 3600, rest % 3600 / 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn days_have_their_dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_772_449_725, "2026-03-02 11:08 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }
}

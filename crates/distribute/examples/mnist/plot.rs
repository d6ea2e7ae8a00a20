//! Small line charts, as SVG.

use std::fmt::Write;

/// A chart of one quantity.
pub(crate) struct Panel {
    /// The quantity, with its unit.
    pub(crate) label: &'static str,
    /// Positions and values; positions are above 0.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Width and height of a panel, and its margins to the left and to the right, above and below, in pixels.
const SIZE: (f64, f64) = (640.0, 240.0);
const MARGINS: (f64, f64, f64, f64) = (80.0, 24.0, 16.0, 36.0);
/// Lines across a panel, in addition to the lowest one.
const LINES: u32 = 4;

/// Draws panels below each other, over one logarithmic axis.
pub(crate) fn draw(title: &str, panels: &[Panel]) -> String {
    let (width, height) = (SIZE.0, 40.0 + SIZE.1 * panels.len() as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(&mut svg, (width / 2.0, 26.0), "middle", title);
    for (at, panel) in panels.iter().enumerate() {
        panel.draw(&mut svg, 40.0 + SIZE.1 * at as f64);
    }
    svg.push_str("</svg>\n");
    svg
}

impl Panel {
    /// Draws the panel below `above`.
    fn draw(&self, svg: &mut String, above: f64) {
        let (left, right, top, bottom) = MARGINS;
        let (width, height) = (SIZE.0 - left - right, SIZE.1 - top - bottom);
        let (first, last) = range(self.points.iter().map(|(at, _)| at.log2()));
        let (least, most) = range(self.points.iter().map(|(_, value)| *value));
        // A margin above and below, also where all values are equal.
        let margin = (0.1 * (most - least)).max(0.01 * most.abs()).max(1e-9);
        let (least, most) = (least - margin, most + margin);
        let x = |at: f64| left + width * if last > first { (at.log2() - first) / (last - first) } else { 0.5 };
        let y = |value: f64| above + top + height * (most - value) / (most - least);
        for line in 0..=LINES {
            let value = least + (most - least) * f64::from(line) / f64::from(LINES);
            let (y, end, decimals) = (y(value), left + width, if most > 1000.0 { 0 } else { 1 });
            stroke(svg, &format!("{left:.1},{y:.1} {end:.1},{y:.1}"), "#ddd", 1);
            text(svg, (left - 6.0, y + 4.0), "end", &format!("{value:.decimals$}"));
        }
        let mut line = String::new();
        for (at, value) in &self.points {
            let (x, y) = (x(*at), y(*value));
            line.push_str(&format!("{x:.1},{y:.1} "));
            svg.push_str(&format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"#1f77b4\"/>\n"));
            text(svg, (x, above + top + height + 18.0), "middle", &at.to_string());
        }
        stroke(svg, line.trim_end(), "#1f77b4", 2);
        text(svg, (left, above + top - 4.0), "start", self.label);
    }
}

fn stroke(svg: &mut String, points: &str, colour: &str, width: u32) {
    // Writing to a string cannot fail.
    let _ = writeln!(svg, "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>");
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

/// Returns the least and the greatest value.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| (least.min(value), most.max(value)))
}

//! Bus bandwidth over size, as an SVG picture.

use std::collections::BTreeMap;
use std::path::Path;

use plotters::prelude::*;

use super::collective::{Operation, Row};
use crate::error::text;

pub(super) const COLORS: [RGBColor; 9] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(23, 190, 207),
    RGBColor(140, 86, 75),
    RGBColor(90, 90, 90),
    RGBColor(188, 189, 34),
];

/// One line per transport and number of ranks; both axes logarithmic.
pub(super) fn draw(path: &Path, operation: Operation, rows: &[Row]) -> Result<(), String> {
    let mut lines: BTreeMap<(String, usize, String), Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.bytes > 0 && row.busbw_gb_s > 0.0) {
        let key = (row.transport.clone(), row.ranks, row.algorithm.clone());
        // Auto chooses by size; its line is one all the same.
        let key = if rows
            .iter()
            .filter(|it| (it.transport == row.transport) && it.ranks == row.ranks && it.bytes == row.bytes)
            .count()
            > 1
        {
            key
        } else {
            (key.0, key.1, String::new())
        };
        lines.entry(key).or_default().push((row.bytes as f64, row.busbw_gb_s));
    }
    let all = || lines.values().flatten();
    let range = |pick: fn(&(f64, f64)) -> f64| {
        let least = all().map(pick).fold(f64::INFINITY, f64::min);
        let greatest = all().map(pick).fold(0.0, f64::max);
        least / 1.5..greatest * 1.5
    };
    let (sizes, rates) = (range(|point| point.0), range(|point| point.1));
    if !sizes.start.is_finite() {
        return Err("nothing was measured that could be drawn".to_owned());
    }
    let root = SVGBackend::new(path, (900, 540)).into_drawing_area();
    root.fill(&WHITE).map_err(text)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("{}: bus bandwidth over size", operation.name()), ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(sizes.log_scale().base(2.0), rates.log_scale())
        .map_err(text)?;
    chart
        .configure_mesh()
        .x_desc("bytes")
        .y_desc("GB/s")
        .x_labels(10)
        .x_label_formatter(&|bytes| size(*bytes))
        .y_label_formatter(&|rate| format!("{rate}"))
        .label_style(("sans-serif", 14))
        .light_line_style(WHITE.mix(0.0))
        .bold_line_style(BLACK.mix(0.12))
        .draw()
        .map_err(text)?;
    for (index, ((transport, ranks, algorithm), points)) in lines.iter().enumerate() {
        let style = COLORS[index % COLORS.len()].stroke_width(2);
        let series = LineSeries::new(points.iter().copied(), style).point_size(3);
        let label = format!("{transport}, {ranks} ranks {algorithm}");
        chart
            .draw_series(series)
            .map_err(text)?
            .label(label.trim_end())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 14))
        .draw()
        .map_err(text)?;
    root.present().map_err(text)
}

/// Powers of two as people write them.
fn size(bytes: f64) -> String {
    match bytes.round() as u64 {
        bytes if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

//! Rates of training, and of the same models in other libraries, as an SVG picture.

use std::path::Path;

use plotters::prelude::*;

use crate::bench::plot::COLORS;
use crate::error::text;

/// The rate of a model under a strategy.
pub(super) struct Bar {
    pub(super) model: String,
    pub(super) name: String,
    pub(super) samples_per_s: f64,
    pub(super) is_peer: bool,
}

/// Width and height of the picture, in pixels.
const SIZE: (u32, u32) = (1300, 540);

/// The width of the list of names.
const NAMES: u32 = 400;

/// Draws a group of bars for each model. They are multiples of the model's fastest peer, or, without peers, of its
/// first bar.
pub(super) fn draw(path: &Path, bars: &[Bar]) -> Result<(), String> {
    let mut models: Vec<&str> = bars.iter().map(|bar| bar.model.as_str()).collect();
    models.dedup();
    let mut names: Vec<&str> = Vec::new();
    for bar in bars {
        if !names.contains(&bar.name.as_str()) {
            names.push(&bar.name);
        }
    }
    if bars.is_empty() {
        return Err("nothing was measured that could be drawn".to_owned());
    }
    let of_model = |model: &str| bars.iter().filter(|bar| bar.model == model).collect::<Vec<&Bar>>();
    let unit = |model: &str| {
        let peers = of_model(model).into_iter().filter(|bar| bar.is_peer);
        let peer = peers.map(|bar| bar.samples_per_s).reduce(f64::max);
        peer.or_else(|| of_model(model).first().map(|bar| bar.samples_per_s)).unwrap_or(1.0)
    };
    let highest = bars.iter().map(|bar| bar.samples_per_s / unit(&bar.model)).fold(1.0, f64::max);
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(text)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Training: samples per second, the fastest peer = 1", ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(36)
        .y_label_area_size(56)
        // The names are on the right of the groups.
        .build_cartesian_2d(
            0.0..models.len() as f64 * f64::from(SIZE.0) / f64::from(SIZE.0 - NAMES),
            0.0..highest * 1.1,
        )
        .map_err(text)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .label_style(("sans-serif", 14))
        .light_line_style(WHITE.mix(0.0))
        .bold_line_style(BLACK.mix(0.12))
        .draw()
        .map_err(text)?;
    let most = models.iter().map(|model| of_model(model).len()).max().unwrap_or(1);
    let width = 0.9 / most as f64;
    for (place, of_name) in names.iter().enumerate() {
        // Paler where colours begin again.
        let color = COLORS[place % COLORS.len()].mix(if place < COLORS.len() { 1.0 } else { 0.5 });
        let drawn = models.iter().enumerate().flat_map(|(group, model)| {
            let found = of_model(model).into_iter().enumerate().filter(|(_, bar)| bar.name == *of_name);
            found.map(move |(at, bar)| {
                let left = group as f64 + 0.05 + width * at as f64;
                let corners = [(left, 0.0), (left + width * 0.9, bar.samples_per_s / unit(model))];
                Rectangle::new(corners, color.filled())
            })
        });
        chart
            .draw_series(drawn)
            .map_err(text)?
            .label(*of_name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], color.filled()));
    }
    for (group, model) in models.iter().enumerate() {
        let (x, y) = chart.plotting_area().map_coordinate(&(group as f64 + 0.05, 0.0));
        let label = Text::new((*model).to_owned(), (x, y + 10), ("sans-serif", 14));
        root.draw(&label).map_err(text)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 13))
        .draw()
        .map_err(text)?;
    root.present().map_err(text)
}

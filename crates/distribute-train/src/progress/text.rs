//! Formatting of numbers, durations and names, the same in every form.

use super::protocol::Status;

/// Metrics by group: training, validation (`val_…`), fractions of a step (`comm`, `skew`).
pub(crate) struct Groups<'a> {
    pub(crate) train: Vec<(&'a str, f64)>,
    pub(crate) validation: Vec<(&'a str, f64)>,
    pub(crate) shares: Vec<(&'a str, f64)>,
}

impl<'a> Groups<'a> {
    pub(crate) fn of(status: &'a Status) -> Self {
        let mut groups = Self { train: Vec::new(), validation: Vec::new(), shares: Vec::new() };
        for (name, value) in &status.metrics {
            let group = if name.starts_with("val_") {
                &mut groups.validation
            } else if SHARES.contains(&name.as_str()) {
                &mut groups.shares
            } else {
                &mut groups.train
            };
            group.push((name, *value));
        }
        groups
    }
}

/// Breaks a title between its parts, which ` · ` separates, where it is longer than the columns; further lines are
/// indented. A part that is longer by itself stays whole.
pub(crate) fn lines(title: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for part in title.split(" · ") {
        let more = lines.last().map(|line| format!("{line} · {part}"));
        match (lines.last_mut(), more) {
            (Some(last), Some(more)) if more.chars().count() <= columns => *last = more,
            (Some(_), _) => lines.push(format!("  {part}")),
            (None, _) => lines.push(part.to_owned()),
        }
    }
    lines
}

/// Formats with four decimals, or in scientific notation if those would show nothing or too much.
pub(crate) fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        value.to_string()
    } else if value != 0.0 && !(1e-3..1e6).contains(&size) {
        format!("{value:.4e}")
    } else {
        format!("{value:.4}")
    }
}

/// Formats `0.06` as `6 %`.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Formats with three significant digits and a unit prefix: `8.1`, `812`, `19.4k`, `1.2M`.
pub(crate) fn rate(per_second: f64) -> String {
    if !per_second.is_finite() || per_second < 0.0 {
        return "?".into();
    }
    let mut value = per_second;
    let mut prefix = "";
    for next in ["k", "M", "G", "T"] {
        // 999.5 would be rounded to 1000.
        if value < 999.5 {
            break;
        }
        value /= 1000.0;
        prefix = next;
    }
    let decimals = usize::from(value < 99.95);
    format!("{value:.decimals$}{prefix}")
}

/// Formats as `3.1s`, `2m 03s`, `1h 02m`.
pub(crate) fn seconds(value: f64) -> String {
    if !value.is_finite() || value < 0.0 {
        return "?".into();
    }
    if value < 59.95 {
        return format!("{value:.1}s");
    }
    let whole = value.round() as u64;
    let (hours, minutes) = (whole / 3600, whole / 60 % 60);
    if hours == 0 { format!("{minutes}m {:02}s", whole % 60) } else { format!("{hours}h {minutes:02}m") }
}

/// Replaces control characters, so that a title cannot move the cursor.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Converts a metric's name to a key: characters that would end the key or the line become `_`.
pub(crate) fn key(name: &str) -> String {
    let odd = |c: char| c.is_control() || c.is_whitespace() || c == '=' || c == '"';
    let key: String = name.chars().map(|c| if odd(c) { '_' } else { c }).collect();
    if key.is_empty() || RESERVED.contains(&key.as_str()) { format!("metric_{key}") } else { key }
}

const SHARES: [&str; 2] = ["comm", "skew"];

/// Keys of a line that are not metrics.
const RESERVED: [&str; 11] =
    ["time", "level", "event", "title", "summary", "epoch", "epochs", "step", "steps", "examples_per_s", "elapsed_s"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_are_broken_between_their_parts() {
        let title = "mnist · Mirrored 2 replicas (CPU:0, CPU:1) · batch 128 (64 per replica) · lr 0.001 · seed 42";
        assert_eq!(lines(title, 120), [title]);
        assert_eq!(
            lines(title, 79),
            ["mnist · Mirrored 2 replicas (CPU:0, CPU:1) · batch 128 (64 per replica)", "  lr 0.001 · seed 42"]
        );
        assert_eq!(lines(title, 20)[1], "  Mirrored 2 replicas (CPU:0, CPU:1)");
        assert_eq!(lines("", 0), [""]);
    }

    #[test]
    fn numbers_have_four_decimals_and_turn_scientific_when_small_or_large() {
        let shown = [0.28412, 0.0, 1.0, -0.5, 1e-3, 9.99e-4, -2e-5, 123_456.0, 1e6, f64::NAN].map(number);
        let expected = [
            "0.2841",
            "0.0000",
            "1.0000",
            "-0.5000",
            "0.0010",
            "9.9900e-4",
            "-2.0000e-5",
            "123456.0000",
            "1.0000e6",
            "NaN",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn rates_have_at_most_three_digits_before_the_unit() {
        let shown = [0.0, 8.12, 99.96, 812.4, 999.6, 19_431.0, 119_431.0, 1.2e6].map(rate);
        assert_eq!(shown, ["0.0", "8.1", "100", "812", "1.0k", "19.4k", "119k", "1.2M"]);
        assert_eq!(rate(f64::INFINITY), "?");
    }

    #[test]
    fn durations_change_units() {
        let shown = [0.0, 3.12, 59.94, 59.96, 123.0, 3599.6, 3720.0].map(seconds);
        assert_eq!(shown, ["0.0s", "3.1s", "59.9s", "1m 00s", "2m 03s", "1h 00m", "1h 02m"]);
        assert_eq!(seconds(f64::NAN), "?");
    }

    #[test]
    fn keys_cannot_break_a_line_or_hide_a_field() {
        let shown = ["loss", "top 5", "a=b\n", "step", ""].map(key);
        assert_eq!(shown, ["loss", "top_5", "a_b_", "metric_step", "metric_"]);
    }
}

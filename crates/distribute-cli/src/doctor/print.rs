//! The forms of the report: lines for people, a table for an issue, JSON for programs.

mod markdown;
mod text;

pub(crate) use markdown::markdown;
pub(crate) use text::{Look, text};

use super::report::Report;

/// Formats the report as one JSON object.
pub(crate) fn json(report: &Report) -> String {
    // Texts, lists and optional texts can always be serialized.
    serde_json::to_string_pretty(report).map_or_else(|_| String::from("{}\n"), |json| json + "\n")
}

/// Replaces control characters, so that text from files and variables cannot move the cursor.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Check;

    #[test]
    fn json_has_all_keys_in_every_check() {
        let report = Report::new(vec![Check::ok("cpu", "2 cores"), Check::fail("x", "a").why("b").remedy("c")]);
        let value: serde_json::Value = serde_json::from_str(&json(&report)).unwrap();
        let expected = serde_json::json!({"version": env!("CARGO_PKG_VERSION"), "checks": [
            {"topic": "cpu", "status": "ok", "found": "2 cores", "why": null, "remedy": null, "details": []},
            {"topic": "x", "status": "fail", "found": "a", "why": "b", "remedy": "c", "details": []},
        ]});
        assert_eq!(value, expected);
    }
}

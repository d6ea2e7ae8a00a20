//! A table for an issue.

use super::clean;
use crate::doctor::report::Report;

/// Formats the report as a table for GitHub, GitLab and Forgejo.
pub(crate) fn markdown(report: &Report, verbose: bool) -> String {
    let mut text = format!("**`distribute doctor`** {}: {}\n\n", report.version, report.summary());
    text.push_str("| | topic | found | remedy |\n|---|---|---|---|\n");
    for check in &report.checks {
        let mut found = cell(&check.found);
        if let Some(why) = &check.why {
            found.push_str(&format!("; {}", cell(why)));
        }
        if verbose {
            check.details.iter().for_each(|detail| found.push_str(&format!("<br>{}", cell(detail))));
        }
        let remedy = check.remedy.as_deref().map(cell).unwrap_or_default();
        text.push_str(&format!("| {} | {} | {found} | {remedy} |\n", check.status.name(), cell(&check.topic)));
    }
    text
}

/// Escapes text for a cell.
fn cell(text: &str) -> String {
    let mut cell = String::with_capacity(text.len());
    for c in clean(text).chars() {
        match c {
            '<' => cell.push_str("&lt;"),
            '&' => cell.push_str("&amp;"),
            '|' | '*' | '_' | '`' | '\\' | '[' | ']' | '#' | '~' => cell.extend(['\\', c]),
            c => cell.push(c),
        }
    }
    cell
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Check;

    #[test]
    fn texts_stand_for_themselves_in_a_table() {
        let check = Check::warn("a|b", "`x`\n<y>").why("why_not").remedy("c & d").details(["more".to_owned()]);
        let report = Report::new(vec![check]);
        let rows = |verbose| markdown(&report, verbose).lines().last().map(str::to_owned);
        let row = r"| warn | a\|b | \`x\`�&lt;y>; why\_not | c &amp; d |";
        assert_eq!(rows(false).unwrap(), row);
        assert_eq!(rows(true).unwrap(), row.replace("why\\_not", "why\\_not<br>more"));
        assert!(markdown(&report, false).contains("1 warn\n\n| | topic |"));
    }
}

//! Lines for people.

use std::io::IsTerminal;

use comfy_table::{ContentArrangement, Table, presets};
use console::Style;

use super::clean;
use crate::doctor::report::{Check, Report, Status};

/// Options of the lines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    /// Columns of the terminal. Without a terminal each check is one line, however long, for `grep`.
    pub(crate) width: Option<u16>,
    pub(crate) colors: bool,
    pub(crate) verbose: bool,
}

impl Look {
    /// Returns the options that suit standard output.
    pub(crate) fn from_stdout(verbose: bool) -> Self {
        let columns = || console::Term::stdout().size_checked().map_or(80, |(_rows, columns)| columns);
        let width = std::io::stdout().is_terminal().then(columns);
        Self { width, colors: console::colors_enabled(), verbose }
    }
}

/// Formats the report as aligned lines, and a last one with the counts.
pub(crate) fn text(report: &Report, look: Look) -> String {
    let lines = match look.width {
        Some(width) => wrapped(report, width.max(NARROWEST), look),
        None => one_line_each(report, look),
    };
    let lines: String = lines.lines().map(|line| colored(line, look) + "\n").collect();
    format!("{lines}\n{}\n", summary(report, look))
}

fn one_line_each(report: &Report, look: Look) -> String {
    let topics = report.checks.iter().map(|check| check.topic.len()).max().unwrap_or(0);
    let mut text = String::new();
    for check in &report.checks {
        let remedy = check.remedy.as_ref().map_or(String::new(), |remedy| format!("  {REMEDY} {}", clean(remedy)));
        text.push_str(&format!(
            "{:<STATUS$}  {:<topics$}  {}{remedy}\n",
            check.status.name(),
            check.topic,
            found(check)
        ));
        let indent = STATUS + 2 + topics + 2;
        let details = check.details.iter().filter(|_| look.verbose);
        text.extend(details.map(|detail| format!("{:indent$}{}\n", "", clean(detail))));
    }
    text
}

fn wrapped(report: &Report, width: u16, look: Look) -> String {
    let mut table = Table::new();
    // The last column is left free, since some terminals wrap a line that fills it.
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_width(width - 1);
    for check in &report.checks {
        let mut cell = found(check);
        if let Some(remedy) = &check.remedy {
            cell.push_str(&format!("\n{REMEDY} {}", clean(remedy)));
        }
        if look.verbose {
            check.details.iter().for_each(|detail| cell.push_str(&format!("\n{}", clean(detail))));
        }
        table.add_row([check.status.name(), &check.topic, &cell]);
    }
    for (column, right) in table.column_iter_mut().zip([2, 2, 0]) {
        column.set_padding((0, right));
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

fn found(check: &Check) -> String {
    match &check.why {
        Some(why) => format!("{}; {}", clean(&check.found), clean(why)),
        None => clean(&check.found),
    }
}

fn summary(report: &Report, look: Look) -> String {
    let worst = Status::ALL.into_iter().find(|status| report.count(*status) > 0);
    let summary = worst.map_or_else(Style::new, style).force_styling(look.colors).apply_to(report.summary());
    match look.verbose || report.checks.iter().all(|check| check.details.is_empty()) {
        true => summary.to_string(),
        false => {
            let hint = Style::new().dim().force_styling(look.colors).apply_to("(more with --verbose)");
            format!("{summary}  {hint}")
        }
    }
}

/// Colours the status at the beginning of a line, and the label of the remedy.
fn colored(line: &str, look: Look) -> String {
    let begins = Status::ALL.into_iter().find(|status| line.starts_with(status.name()));
    let (head, rest) = line.split_at(begins.map_or(0, |status| status.name().len()));
    let head = begins.map(|status| style(status).force_styling(look.colors).apply_to(head).to_string());
    let remedy = Style::new().bold().force_styling(look.colors).apply_to(REMEDY).to_string();
    head.unwrap_or_default() + &rest.replacen(REMEDY, &remedy, 1)
}

fn style(status: Status) -> Style {
    match status {
        Status::Ok => Style::new().green(),
        Status::Warn => Style::new().yellow().bold(),
        Status::Fail => Style::new().red().bold(),
        Status::Skipped => Style::new().dim(),
    }
}

/// The width of the longest status.
const STATUS: usize = 7;

const REMEDY: &str = "Remedy:";

/// A terminal with fewer columns, or none reported, wraps the lines itself.
const NARROWEST: u16 = 50;

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Look = Look { width: None, colors: false, verbose: false };

    fn report() -> Report {
        let shm = Check::warn("/dev/shm", "64 MiB").why("NCCL needs more").remedy("docker run --shm-size=1g");
        let details = ["a detail of the processor that is rather long".to_owned()];
        Report::new(vec![Check::ok("cpu", "2 cores").details(details), shm, Check::skipped("tpu", "none\n")])
    }

    #[test]
    fn without_a_terminal_a_check_is_one_plain_line() {
        let expected = "\
ok       cpu       2 cores
warn     /dev/shm  64 MiB; NCCL needs more  Remedy: docker run --shm-size=1g
skipped  tpu       none\u{fffd}

1 warn, 1 ok, 1 skipped  (more with --verbose)
";
        assert_eq!(text(&report(), PLAIN), expected);
        let verbose = text(&report(), Look { verbose: true, ..PLAIN });
        assert!(verbose.contains("2 cores\n                   a detail"), "{verbose}");
        assert!(verbose.ends_with("1 skipped\n"), "{verbose}");
    }

    #[test]
    fn a_terminal_gets_lines_that_fit_under_each_other() {
        let expected = "\
ok       cpu       2 cores
                   a detail of the processor that
                   is rather long
warn     /dev/shm  64 MiB; NCCL needs more
                   Remedy: docker run
                   --shm-size=1g
skipped  tpu       none\u{fffd}

1 warn, 1 ok, 1 skipped
";
        let look = Look { width: Some(51), verbose: true, ..PLAIN };
        assert_eq!(text(&report(), look), expected);
        assert!(text(&report(), Look { width: Some(3), ..look }).lines().all(|line| line.chars().count() < 50));
    }

    #[test]
    fn colours_are_only_added() {
        for width in [None, Some(60)] {
            let look = Look { width, ..PLAIN };
            let colored = text(&report(), Look { colors: true, ..look });
            assert!(colored.contains("\x1b[33m\x1b[1mwarn\x1b[0m"), "{colored:?}");
            assert_eq!(console::strip_ansi_codes(&colored), text(&report(), look));
        }
    }
}

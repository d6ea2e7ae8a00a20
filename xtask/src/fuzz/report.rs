//! The output of libFuzzer.

use std::fmt;

/// The end of a run.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Report {
    runs: u64,
    runs_per_s: u64,
    /// Edges of the code that were reached, and features of their counts.
    edges: u64,
    features: u64,
    inputs: u64,
    /// The file of the input that failed.
    pub(super) crash: Option<String>,
}

impl Report {
    pub(super) fn of(text: &str) -> Report {
        let mut report = Report::default();
        for line in text.lines() {
            if let Some((name, value)) = line.strip_prefix("stat::").and_then(|stat| stat.split_once(':')) {
                let value = value.trim().parse().unwrap_or(0);
                match name {
                    "number_of_executed_units" => report.runs = value,
                    "average_exec_per_sec" => report.runs_per_s = value,
                    _ => {}
                }
            }
            let after = |mark: &str| line.split_once(mark)?.1.split([' ', '/']).next()?.parse().ok();
            if line.starts_with('#') {
                report.edges = after(" cov: ").unwrap_or(report.edges);
                report.features = after(" ft: ").unwrap_or(report.features);
                report.inputs = after(" corp: ").unwrap_or(report.inputs);
            }
            if let Some((_, path)) = line.split_once("Test unit written to ") {
                report.crash = Some(path.trim().to_owned());
            }
        }
        report
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { runs, runs_per_s, edges, features, inputs, crash } = self;
        write!(f, "{runs} runs, {runs_per_s}/s, {edges} edges, {features} features, {inputs} inputs")?;
        crash.as_ref().map_or(Ok(()), |path| write!(f, ", failed: {path}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_run_is_read() {
        let text = "INFO: Seed: 1\n#2\tINITED cov: 12 ft: 13 corp: 1/1b exec/s: 0 rss: 30Mb\n\
            #4096\tDONE   cov: 120 ft: 345 corp: 67/1234b lim: 43 exec/s: 100 rss: 50Mb\n\
            stat::number_of_executed_units: 4096\nstat::average_exec_per_sec:     100\n";
        let report = Report::of(text);
        assert_eq!(report.to_string(), "4096 runs, 100/s, 120 edges, 345 features, 67 inputs");
        let crash = "artifact_prefix='/a/'; Test unit written to /a/crash-0123\nBase64: AA==\n";
        assert_eq!(Report::of(crash).crash.as_deref(), Some("/a/crash-0123"));
    }
}

//! The closing block of a run.

use std::fmt;
use std::time::Duration;

use super::text;

/// The summary of a run, printed on standard output as two aligned columns.
///
/// # Examples
///
/// ```
/// use distribute_train::progress::Summary;
///
/// let summary = Summary { test_accuracy: Some(0.9781), replicas: 2, ..Summary::default() };
/// assert_eq!(summary.to_string(), "test accuracy  97.81 %\nreplicas       2\n");
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Summary {
    /// Accuracy on the test examples, 0 to 1.
    pub test_accuracy: Option<f64>,
    /// Examples of the global batch per second of training.
    pub examples_per_s: Option<f64>,
    /// Time spent training, validation included.
    pub training_time: Option<Duration>,
    /// Fraction of a step spent on communication that is not overlapped with computation, 0 to 1.
    pub communication: Option<f64>,
    /// Fraction of a step for which replicas waited for data, 0 to 1.
    pub input_wait: Option<f64>,
    /// Replicas that trained in sync; 0 leaves the line out.
    pub replicas: u32,
    /// The largest resident memory that this process has had; see [`peak_memory_bytes`](super::peak_memory_bytes).
    pub peak_memory_bytes: Option<u64>,
    /// Further lines: label and value.
    pub extra: Vec<(String, String)>,
}

impl Summary {
    fn rows(&self) -> Vec<(String, String)> {
        let known = [
            ("test accuracy", self.test_accuracy.map(|share| format!("{:.2} %", share * 100.0))),
            ("samples/s", self.examples_per_s.map(text::rate)),
            ("training time", self.training_time.map(|time| text::seconds(time.as_secs_f64()))),
            ("communication", self.communication.map(|share| format!("{} of a step", text::percent(share)))),
            ("waiting for data", self.input_wait.map(|share| format!("{:.1} % of a step", share * 100.0))),
            ("replicas", (self.replicas > 0).then(|| self.replicas.to_string())),
            ("peak memory", self.peak_memory_bytes.map(|bytes| format!("{} MiB", bytes.div_ceil(1 << 20)))),
        ];
        let known = known.into_iter().filter_map(|(label, value)| Some((label.to_owned(), value?)));
        let extra = self.extra.iter().map(|(a, b)| (text::one_line(a), text::one_line(b)));
        known.chain(extra).collect()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        let width = rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        rows.iter().try_for_each(|(label, value)| writeln!(f, "{label:width$}  {value}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let summary = Summary {
            test_accuracy: Some(0.978),
            examples_per_s: Some(19_431.0),
            training_time: Some(Duration::from_millis(15_640)),
            communication: Some(0.061),
            input_wait: Some(0.004),
            replicas: 2,
            peak_memory_bytes: Some(200 << 20),
            extra: vec![("bytes per step".into(), "795 KiB".into())],
        };
        let expected = "\
test accuracy     97.80 %
samples/s         19.4k
training time     15.6s
communication     6 % of a step
waiting for data  0.4 % of a step
replicas          2
peak memory       200 MiB
bytes per step    795 KiB
";
        assert_eq!(summary.to_string(), expected);
    }

    #[test]
    fn what_is_unknown_is_left_out() {
        assert_eq!(Summary::default().to_string(), "");
    }
}

//! The content of a status: progress, remaining time and metrics, within the limits of Kubeflow's API.

use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::progress::{Status, one_line};

/// Estimates the end of a training from its progress.
#[derive(Debug, Default)]
pub(super) struct Gauge {
    /// The first share of the training that is known to be done, which an earlier process may have done, and when.
    first: Option<(f64, Instant)>,
    /// The newest share, and since when it is known.
    newest: Option<(f64, Instant)>,
    metrics: Vec<(String, f64)>,
}

/// The state of a training at one time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Report {
    pub(super) percent: Option<u8>,
    pub(super) remaining: Option<Duration>,
    pub(super) metrics: Vec<(String, f64)>,
    pub(super) at: SystemTime,
    /// Whether training has ended.
    pub(super) is_last: bool,
}

impl Gauge {
    /// Returns the state after a step, or after an epoch and its validation.
    pub(super) fn report(&mut self, status: &Status, is_epoch: bool, now: Instant, at: SystemTime) -> Report {
        // Values of the last validation stay while there are none.
        for (name, value) in &status.metrics {
            self.set(name, *value);
        }
        self.set("currentEpoch", f64::from(status.epoch));
        if status.epochs > 0 {
            self.set("totalEpochs", f64::from(status.epochs));
        }
        let share = share(status, is_epoch);
        if let Some(share) = share {
            self.first.get_or_insert((share, now));
            if self.newest.is_none_or(|(newest, _)| newest != share) {
                self.newest = Some((share, now));
            }
        }
        let percent = share.map(|share| (share * 100.0).floor().clamp(0.0, 99.0) as u8);
        let remaining = share.and_then(|_| self.remaining(now));
        Report { percent, remaining, metrics: self.metrics.clone(), at, is_last: false }
    }

    /// Returns the state at the end of the training.
    pub(super) fn last(&self, at: SystemTime) -> Report {
        let (percent, remaining) = (Some(100), Some(Duration::ZERO));
        Report { percent, remaining, metrics: self.metrics.clone(), at, is_last: true }
    }

    /// Estimates the remaining time by this process's mean speed up to the newest share.
    fn remaining(&self, now: Instant) -> Option<Duration> {
        let ((first, began), (newest, known)) = (self.first?, self.newest?);
        let (done, took) = (newest - first, known.saturating_duration_since(began).as_secs_f64());
        if done <= 0.0 {
            return None;
        }
        let remaining = Duration::try_from_secs_f64((1.0 - newest) / done * took).ok()?;
        Some(remaining.saturating_sub(now.saturating_duration_since(known)))
    }

    fn set(&mut self, name: &str, value: f64) {
        match self.metrics.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = value,
            None => self.metrics.push((name.to_owned(), value)),
        }
    }
}

impl Report {
    /// Returns the body of the request, and the number of metrics that it leaves out.
    pub(super) fn body(&self) -> (Vec<u8>, usize) {
        let (metrics, left_out) = self.metrics();
        let trainer_status = TrainerStatus {
            progress_percentage: self.percent,
            estimated_remaining_seconds: self.remaining.map(|time| i32::try_from(time.as_secs()).unwrap_or(i32::MAX)),
            metrics,
            // Times before the epoch and after the year 9999 cannot be written.
            last_updated_time: humantime::format_rfc3339_seconds(self.at.max(SystemTime::UNIX_EPOCH)).to_string(),
        };
        // Texts and numbers always have a form in JSON.
        (serde_json::to_vec(&Request { trainer_status }).unwrap_or_default(), left_out)
    }

    fn metrics(&self) -> (Vec<Metric>, usize) {
        let (mut metrics, mut bytes) = (Vec::new(), 0);
        for (name, value) in self.metrics.iter().filter(|(name, _)| !name.is_empty()) {
            let name: String = one_line(name).chars().take(LONGEST_NAME).collect();
            let metric = Metric { name, value: text(*value) };
            bytes += serde_json::to_vec(&metric).map_or(0, |json| json.len() + 1);
            if metrics.len() == MOST_METRICS || bytes > MOST_METRIC_BYTES {
                break;
            }
            metrics.push(metric);
        }
        let left_out = self.metrics.len() - metrics.len();
        (metrics, left_out)
    }
}

/// Returns the share of a training that is done, from 0 to 1, if it can be estimated.
fn share(status: &Status, is_epoch: bool) -> Option<f64> {
    let steps = status.steps.filter(|steps| *steps > 0);
    let of_epoch = match (is_epoch, steps) {
        (true, _) => 1.0,
        (false, Some(steps)) => (status.step as f64 / steps as f64).min(1.0),
        // In the only epoch, all of the progress is unknown.
        (false, None) if status.epochs == 1 => return None,
        (false, None) => 0.0,
    };
    let epochs = f64::from(status.epoch.saturating_sub(1)) + of_epoch;
    (status.epochs > 0).then(|| (epochs / f64::from(status.epochs)).clamp(0.0, 1.0))
}

/// Formats a value in at most 64 characters, from which the same number can be read.
fn text(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() || value == 0.0 || (1e-5..1e16).contains(&size) {
        value.to_string()
    } else {
        format!("{value:e}")
    }
}

/// `UpdateTrainJobStatusRequest` of Kubeflow Trainer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    trainer_status: TrainerStatus,
}

/// `TrainerStatus`, whose numbers are 32-bit integers. All but the time may be missing.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TrainerStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    progress_percentage: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    estimated_remaining_seconds: Option<i32>,
    metrics: Vec<Metric>,
    last_updated_time: String,
}

/// `Metric`, whose name and value have 1 to 64 characters each.
#[derive(Serialize)]
struct Metric {
    name: String,
    value: String,
}

/// `MaxItems` of `metrics`.
const MOST_METRICS: usize = 256;

/// `MaxLength` of `name`, in characters.
const LONGEST_NAME: usize = 64;

/// The server reads 64 KiB, of which the other fields take less than 1 KiB.
const MOST_METRIC_BYTES: usize = 63 * 1024;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn status(epoch: u32, epochs: u32, step: u64, steps: Option<u64>) -> Status {
        Status { epoch, epochs, step, steps, ..Status::default() }
    }

    /// 2026-11-20T20:41:07Z
    fn wall() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(1_795_207_267_900)
    }

    fn json(report: &Report) -> Value {
        serde_json::from_slice(&report.body().0).unwrap()
    }

    #[test]
    fn the_body_is_that_of_kubeflow() {
        let (mut gauge, begin) = (Gauge::default(), Instant::now());
        gauge.report(&status(1, 2, 0, Some(10)), false, begin, wall());
        let metrics = vec![("loss".to_owned(), 0.25), ("val_loss".to_owned(), f64::NAN)];
        let at = begin + Duration::from_secs(30);
        let report = gauge.report(&Status { metrics, ..status(1, 2, 5, Some(10)) }, false, at, wall());
        let expected = json!({"trainerStatus": {
            "progressPercentage": 25,
            "estimatedRemainingSeconds": 90,
            "metrics": [
                {"name": "currentEpoch", "value": "1"},
                {"name": "totalEpochs", "value": "2"},
                {"name": "loss", "value": "0.25"},
                {"name": "val_loss", "value": "NaN"},
            ],
            "lastUpdatedTime": "2026-11-20T20:41:07Z",
        }});
        assert_eq!(json(&report), expected);
        assert_eq!(json(&gauge.last(wall()))["trainerStatus"]["progressPercentage"], 100);
        assert_eq!(json(&gauge.last(wall()))["trainerStatus"]["estimatedRemainingSeconds"], 0);
    }

    #[test]
    fn progress_counts_epochs_and_the_steps_that_are_known() {
        let percent =
            |status: Status, is_epoch| Gauge::default().report(&status, is_epoch, Instant::now(), wall()).percent;
        assert_eq!(percent(status(1, 4, 0, Some(10)), false), Some(0));
        assert_eq!(percent(status(3, 4, 5, Some(10)), false), Some(62));
        assert_eq!(percent(status(3, 4, 99, Some(10)), false), Some(75), "an epoch that is longer than announced");
        assert_eq!(percent(status(4, 4, 10, Some(10)), true), Some(99), "100 only at the end");
        assert_eq!(percent(status(2, 4, 7, None), false), Some(25));
        assert_eq!(percent(status(2, 4, 7, None), true), Some(50));
        assert_eq!(percent(status(2, 4, 7, Some(0)), false), Some(25));
        assert_eq!(percent(status(1, 1, 7, None), false), None, "nothing is known");
        assert_eq!(percent(status(7, 0, 7, Some(10)), false), None);
    }

    #[test]
    fn the_remaining_time_is_that_of_this_process_and_ends_at_zero() {
        let (mut gauge, begin) = (Gauge::default(), Instant::now());
        let mut remaining = |step, seconds| {
            let at = begin + Duration::from_secs(seconds);
            let report = gauge.report(&status(3, 4, step, Some(10)), false, at, wall());
            report.remaining.map(|time| time.as_secs_f64().round() as u64)
        };
        // An earlier process has made half of the epochs.
        assert_eq!(remaining(0, 0), None);
        assert_eq!(remaining(0, 60), None, "no speed is known yet");
        assert_eq!(remaining(1, 100), Some(1900));
        assert_eq!(remaining(5, 500), Some(1500));
        assert_eq!(remaining(5, 800), Some(1200), "it falls while a step lasts");
        assert_eq!(remaining(5, 9000), Some(0));
    }

    #[test]
    fn what_does_not_fit_is_cut_or_left_out() {
        let body = |names: Vec<String>| {
            let metrics = names.into_iter().map(|name| (name, 1.0)).collect();
            let report = Report { percent: None, remaining: None, metrics, at: wall(), is_last: false };
            let (body, left_out) = report.body();
            let names: Vec<String> = serde_json::from_slice::<Value>(&body).unwrap()["trainerStatus"]["metrics"]
                .as_array()
                .unwrap()
                .iter()
                .map(|metric| metric["name"].as_str().unwrap().to_owned())
                .collect();
            (body.len(), names, left_out)
        };
        let (_, names, left_out) = body((0..300).map(|at| format!("m{at}")).collect());
        assert_eq!((names.len(), names[255].as_str(), left_out), (256, "m255", 44));
        let (_, names, left_out) = body(vec![String::new(), "é\n".repeat(64), "loss".to_owned()]);
        assert_eq!((names.len(), names[0].chars().count(), left_out), (2, 64, 1));
        assert!(names[0].starts_with("é é ") && names[1] == "loss", "{names:?}");
        let (bytes, names, left_out) = body((0..300).map(|at| format!("{at}{}", "😀".repeat(64))).collect());
        assert!(bytes < 1 << 16 && names.len() > 200 && names.len() + left_out == 300, "{bytes} {}", names.len());
    }

    #[test]
    fn values_are_short_texts_of_the_same_number() {
        for value in [0.0, -0.0, 1.0, 0.1 + 0.2, -2.5e-5, 1e300, 5e-324, 12_345_678.9, f64::MAX, f64::INFINITY] {
            let text = text(value);
            assert!(text.len() <= 64, "{text}");
            assert_eq!(text.parse::<f64>().unwrap().to_bits(), value.to_bits(), "{text}");
        }
        assert_eq!((text(0.2347).as_str(), text(3.0).as_str(), text(1e-7).as_str()), ("0.2347", "3", "1e-7"));
        assert_eq!((text(f64::NAN).as_str(), text(f64::NEG_INFINITY).as_str()), ("NaN", "-inf"));
    }

    #[test]
    fn a_time_that_cannot_be_written_is_the_epoch_and_long_waits_are_bounded() {
        let at = SystemTime::UNIX_EPOCH - Duration::from_secs(5);
        let remaining = Some(Duration::MAX);
        let report = Report { percent: None, remaining, metrics: Vec::new(), at, is_last: false };
        let expected = json!({"trainerStatus": {
            "estimatedRemainingSeconds": i32::MAX, "metrics": [], "lastUpdatedTime": "1970-01-01T00:00:00Z",
        }});
        assert_eq!(json(&report), expected);
    }
}

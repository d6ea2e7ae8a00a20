//! The progress protocol between a chief and the launcher: one JSON object per line over TCP.

use serde::{Deserialize, Serialize};

use super::vitals::Vitals;

/// One line of the progress protocol: an event and the task it came from.
///
/// On the wire a message is a JSON object on a line of its own:
///
/// ```
/// use distribute_train::progress::{Event, Message};
///
/// let message = Message { task: "chief:0".into(), event: Event::Begin { title: "mnist".into() } };
/// let line = serde_json::to_string(&message)?;
/// assert_eq!(line, r#"{"task":"chief:0","event":"begin","title":"mnist"}"#);
/// assert_eq!(serde_json::from_str::<Message>(&line)?, message);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// The sender, as `job:index`.
    pub task: String,
    /// The event.
    #[serde(flatten)]
    pub event: Event,
}

/// The events of a training run, in order: one `Begin`, any number of `Step`s and one `Epoch` per epoch, one `End`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// Training starts.
    Begin {
        /// One line that describes the run; no line breaks.
        title: String,
    },
    /// Some steps of an epoch are completed. Intermediate events may be dropped.
    Step(Status),
    /// An epoch is completed, including its validation. Never dropped.
    Epoch(Status),
    /// The vital signs of a task, sent by every task while a status page is shown. Renderers ignore them.
    Vitals(Vitals),
    /// Training has ended. Never dropped.
    End {
        /// The closing block for standard output, ready to print; may have several lines.
        summary: String,
    },
}

/// The progress of a run within an epoch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The current epoch, counted from 1.
    pub epoch: u32,
    /// The number of epochs.
    pub epochs: u32,
    /// Completed steps of this epoch.
    pub step: u64,
    /// Steps per epoch, if known.
    pub steps: Option<u64>,
    /// Examples of the global batch per second of training, excluding validation time. A shorter last batch of a
    /// pass counts as a whole one.
    pub examples_per_s: f64,
    /// Names and values, in the order in which they are shown. `val_…` marks a validation metric; `comm` and `skew` are
    /// fractions of a step (0 to 1). Values that are not JSON numbers are encoded as the strings `NaN`, `inf` and
    /// `-inf`.
    #[serde(with = "metrics")]
    pub metrics: Vec<(String, f64)>,
    /// Seconds since the epoch began.
    pub elapsed_s: f64,
    /// Steps of this epoch that an earlier run has made, and for which `elapsed_s` has no time.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub resumed: u64,
    /// Completed steps of all epochs, if the sender counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
}

fn is_zero(steps: &u64) -> bool {
    *steps == 0
}

/// A number that JSON can encode even if it is not finite, so that a diverged loss does not make the line unreadable
/// for the launcher.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Number(pub(crate) f64);

impl Serialize for Number {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f64(self.0) } else { serializer.collect_str(&self.0) }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(f64),
            Word(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(value) => Ok(Self(value)),
            Form::Word(word) => match word.as_str() {
                "NaN" => Ok(Self(f64::NAN)),
                "inf" => Ok(Self(f64::INFINITY)),
                "-inf" => Ok(Self(f64::NEG_INFINITY)),
                _ => Err(serde::de::Error::custom(format_args!(
                    "metric value {word:?}: expected a number, \"NaN\", \"inf\" or \"-inf\""
                ))),
            },
        }
    }
}

mod metrics {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Number;

    pub(super) fn serialize<S: Serializer>(metrics: &[(String, f64)], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(metrics.iter().map(|(name, value)| (name, Number(*value))))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, f64)>, D::Error> {
        let metrics = Vec::<(String, Number)>::deserialize(deserializer)?;
        Ok(metrics.into_iter().map(|(name, Number(value))| (name, value)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Activity;

    fn status() -> Status {
        Status {
            epoch: 1,
            epochs: 5,
            step: 214,
            steps: Some(469),
            examples_per_s: 19_431.5,
            metrics: vec![("loss".into(), 0.25), ("accuracy".into(), 1.0)],
            elapsed_s: 3.1,
            resumed: 0,
            total_steps: None,
        }
    }

    #[test]
    fn every_event_survives_the_wire() {
        for event in [
            Event::Begin { title: "mnist · 2 workers".into() },
            Event::Step(status()),
            Event::Step(Status { steps: None, resumed: 3, total_steps: Some(7), ..status() }),
            Event::Epoch(status()),
            Event::Vitals(Vitals { host: "a".into(), own_s: Some(0.25), ..Vitals::default() }),
            Event::End { summary: "test accuracy  97.8 %\nreplicas  2\n".into() },
        ] {
            let message = Message { task: "worker:1".into(), event };
            let line = serde_json::to_string(&message).unwrap();
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(serde_json::from_str::<Message>(&line).unwrap(), message);
        }
    }

    #[test]
    fn vital_signs_may_lack_what_is_not_known() {
        let line = r#"{"task":"worker:1","event":"vitals","pid":7,"activity":"training","steps":3,"own_s":0.5}"#;
        let vitals = Vitals { pid: 7, activity: Activity::Training, steps: 3, own_s: Some(0.5), ..Vitals::default() };
        let message = Message { task: "worker:1".into(), event: Event::Vitals(vitals) };
        assert_eq!(serde_json::from_str::<Message>(line).unwrap(), message);
    }

    #[test]
    fn a_step_looks_like_this() {
        let message = Message { task: "chief:0".into(), event: Event::Step(status()) };
        assert_eq!(
            serde_json::to_string(&message).unwrap(),
            concat!(
                r#"{"task":"chief:0","event":"step","epoch":1,"epochs":5,"step":214,"steps":469,"#,
                r#""examples_per_s":19431.5,"metrics":[["loss",0.25],["accuracy",1.0]],"elapsed_s":3.1}"#,
            )
        );
    }

    #[test]
    fn values_that_are_not_finite_survive_the_wire() {
        let metrics = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        let metrics = metrics.map(|value| ("loss".to_owned(), value)).to_vec();
        let event = Event::Epoch(Status { metrics, ..status() });
        let line = serde_json::to_string(&Message { task: "chief:0".into(), event }).unwrap();
        let Event::Epoch(back) = serde_json::from_str::<Message>(&line).unwrap().event else {
            panic!("{line}");
        };
        assert!(back.metrics[0].1.is_nan());
        assert_eq!(back.metrics[1].1, f64::INFINITY);
        assert_eq!(back.metrics[2].1, f64::NEG_INFINITY);
    }

    #[test]
    fn a_value_that_is_no_number_is_refused_in_words() {
        let line = concat!(
            r#"{"task":"chief:0","event":"epoch","epoch":1,"epochs":5,"step":1,"steps":null,"#,
            r#""examples_per_s":1.0,"metrics":[["loss","low"]],"elapsed_s":3.1}"#,
        );
        let error = serde_json::from_str::<Message>(line).unwrap_err().to_string();
        assert!(error.contains(r#"metric value "low""#), "{error}");
    }
}

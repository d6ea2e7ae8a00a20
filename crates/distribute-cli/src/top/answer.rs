//! The state of a job, as its status server answers.

use distribute_train::status::Place;
use serde::Deserialize;

/// The parts of `/status.json` that are shown. Fields that another version lacks are not known.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Answer {
    pub(super) job: Job,
    pub(super) tasks: Vec<Task>,
    pub(super) collectives: Vec<Collective>,
    pub(super) errors: Vec<Story>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) title: String,
    pub(super) state: String,
    pub(super) elapsed_s: f64,
    pub(super) epoch: Option<u32>,
    pub(super) epochs: Option<u32>,
    pub(super) step: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Task {
    pub(super) task: String,
    pub(super) state: String,
    pub(super) ended: Option<String>,
    pub(super) lost: Option<String>,
    pub(super) steps: Option<u64>,
    pub(super) step_s: Option<Spread>,
    pub(super) own_s: Option<f64>,
    pub(super) straggler: bool,
    pub(super) input_wait_s: Option<f64>,
    pub(super) peer_wait_s: Option<f64>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) restarts: u32,
    pub(super) heard_s: Option<f64>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Spread {
    pub(super) p50: f64,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Collective {
    pub(super) group: String,
    pub(super) world_size: u32,
    pub(super) call: String,
    pub(super) bytes: u64,
    pub(super) waiting_s: f64,
    pub(super) waiting: Vec<u32>,
    pub(super) entered: Vec<u32>,
    pub(super) missing_count: usize,
    pub(super) missing: Vec<Rank>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Rank {
    pub(super) rank: u32,
    pub(super) name: Option<String>,
    pub(super) task: Option<String>,
    pub(super) state: Option<String>,
    pub(super) straggler: bool,
    pub(super) last: Option<String>,
    pub(super) last_ago_s: Option<f64>,
    pub(super) waits_in: Option<String>,
    pub(super) heard_s: Option<f64>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Story {
    pub(super) at_s: f64,
    pub(super) task: Option<String>,
    pub(super) text: String,
}

/// A job that can be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) place: Place,
    /// The id of the launcher's process, if it is of this host.
    pub(super) launcher: Option<u32>,
}

impl Collective {
    /// Returns whether ranks have waited for long enough that somebody should know.
    pub(super) fn is_long(&self) -> bool {
        self.waiting_s >= LONG_S
    }
}

/// A wait that lasts at least this long is shown, in seconds: tasks report once a second, and most steps are shorter.
pub(super) const LONG_S: f64 = 2.0;

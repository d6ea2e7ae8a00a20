//! The state of a job at one moment, as it is shown.

use serde::{Serialize, Serializer};

use crate::progress::Spread;

/// The state of a job at one moment: the contents of `/status.json`.
///
/// Names end with their unit: `_s` are seconds, `_bytes` bytes, `_share` fractions of a step from 0 to 1. A field is
/// null if it is not known.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct View {
    /// The job as a whole.
    pub job: JobView,
    /// The tasks, in the order of their ranks.
    pub tasks: Vec<TaskView>,
    /// The names of the tasks that are stragglers.
    pub stragglers: Vec<String>,
    /// The collectives in which ranks are blocked, those that have waited longest first.
    pub collectives: Vec<CollectiveView>,
    /// The last errors, newest first.
    pub errors: Vec<Story>,
}

/// The state of a job as a whole.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct JobView {
    /// The name of the program.
    pub name: String,
    /// One line that describes the run.
    pub title: String,
    /// The job's activity.
    pub state: State,
    /// Time since the job began, until its end.
    pub elapsed_s: f64,
    /// The current epoch, from 1.
    pub epoch: Option<u32>,
    /// The number of epochs.
    pub epochs: Option<u32>,
    /// Completed steps of the epoch.
    pub epoch_step: Option<u64>,
    /// Steps per epoch.
    pub epoch_steps: Option<u64>,
    /// Completed steps of all epochs.
    pub step: Option<u64>,
    /// Examples of the global batch per second.
    pub examples_per_s: Option<f64>,
    /// Losses and metrics.
    pub metrics: Vec<Value>,
    /// The closing block, once training has ended.
    pub summary: Option<String>,
}

/// A named value.
#[derive(Debug, Clone, Serialize)]
pub struct Value {
    /// The name.
    pub name: String,
    /// The value; the text `NaN`, `inf` or `-inf` in JSON if it is not finite.
    #[serde(serialize_with = "number")]
    pub value: f64,
}

fn number<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() { serializer.serialize_f64(*value) } else { serializer.collect_str(value) }
}

/// The state of one task.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct TaskView {
    /// Its name, as `job:index`.
    pub task: String,
    /// The job that it belongs to: chief, worker, ps or evaluator.
    pub role: String,
    /// The name of its host.
    pub host: Option<String>,
    /// The id of its process.
    pub pid: Option<u32>,
    /// The task's activity.
    pub state: State,
    /// How its process has ended.
    pub ended: Option<String>,
    /// Why it is considered lost.
    pub lost: Option<String>,
    /// Steps that its process has made.
    pub steps: Option<u64>,
    /// Steps per second.
    pub steps_per_s: Option<f64>,
    /// The time of a step.
    pub step_s: Option<Spread>,
    /// The median time of a step without waiting in collectives.
    pub own_s: Option<f64>,
    /// That time relative to the median of the other tasks'.
    pub own_relative: Option<f64>,
    /// Whether its own time is more than 1.2 times the median of the other tasks'.
    pub straggler: bool,
    /// The median time of a step in collectives.
    pub collective_s: Option<f64>,
    /// The part of it that the exchange of values takes: the time in collectives of the task that arrives last.
    pub communication_s: Option<f64>,
    /// The same as a fraction of a step.
    pub communication_share: Option<f64>,
    /// The part of it in which the task waits for slower ones.
    pub peer_wait_s: Option<f64>,
    /// The same as a fraction of a step.
    pub peer_wait_share: Option<f64>,
    /// The mean time that a step waits for data.
    pub input_wait_s: Option<f64>,
    /// The same as a fraction of a step.
    pub input_wait_share: Option<f64>,
    /// Resident memory.
    pub memory_bytes: Option<u64>,
    /// How often its process was restarted.
    pub restarts: u32,
    /// Its last error.
    pub last_error: Option<String>,
    /// Time since its last report.
    pub heard_s: Option<f64>,
}

/// A collective in which ranks are blocked.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CollectiveView {
    /// The process group's name.
    pub group: String,
    /// A digest of the group's members, which tells groups of the same name apart.
    pub members: String,
    /// The number of ranks in the group.
    pub world_size: u32,
    /// The operation, such as `all_reduce`.
    pub operation: String,
    /// Position in the group's order of calls, from 0.
    pub sequence: u64,
    /// The call as text.
    pub call: String,
    /// Bytes of a rank's values.
    pub bytes: u64,
    /// Time for which the first rank has been blocked in it.
    pub waiting_s: f64,
    /// The ranks that are blocked in it.
    pub waiting: Vec<u32>,
    /// The ranks that have called it, at most the first 65 536 of the group.
    pub entered: Vec<u32>,
    /// The number of ranks that have not called it. If it is 0, values are being exchanged.
    pub missing_count: usize,
    /// The ranks that have not called it, at most 64.
    pub missing: Vec<RankView>,
}

/// A rank that others wait for.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RankView {
    /// The rank in the group.
    pub rank: u32,
    /// Its name; none if its task has not reported it.
    pub name: Option<String>,
    /// The task to which it belongs.
    pub task: Option<String>,
    /// The task's state.
    pub state: Option<State>,
    /// Whether the task is a straggler.
    pub straggler: bool,
    /// The last call of the group that has ended on it.
    pub last: Option<String>,
    /// Time since that.
    pub last_ago_s: Option<f64>,
    /// The call of another group in which it is blocked.
    pub waits_in: Option<String>,
    /// Time since the task's last report.
    pub heard_s: Option<f64>,
}

/// An error, and when and where it occurred.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Story {
    /// Time since the job began.
    pub at_s: f64,
    /// The task; none for the job as a whole.
    pub task: Option<String>,
    /// The message.
    pub text: String,
}

/// The activity of a task or a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum State {
    /// Nothing is known of its process yet.
    Waiting,
    /// No step is completed yet.
    Starting,
    /// The process runs, and reports nothing.
    Running,
    /// Making steps.
    Training,
    /// Measuring the model on other data.
    Validating,
    /// Saving a checkpoint.
    Checkpointing,
    /// Training has ended; the process runs.
    Finished,
    /// The process has ended with exit code 0.
    Ended,
    /// The process has ended otherwise.
    Failed,
    /// No report arrives, or the other tasks have lost it.
    Lost,
}

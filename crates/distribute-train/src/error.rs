//! Errors of checkpoints, callbacks and metrics, and of setting up progress. Later failures of progress never reach the
//! training loop.

use distribute_types::{Class, ErrorClass};
#[cfg(feature = "checkpoint")]
use distribute_types::{Classified, FailureKind, Scope};

use std::path::PathBuf;

/// Any error that the parts of a checkpoint return.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There are no examples.
    #[error("the dataset to {what} has no elements, or not enough for a batch; give more")]
    NoExamples {
        /// The operation, such as training.
        what: &'static str,
    },
    /// A setting of a training run has no effect.
    #[error("{setting}({given}) has no effect: {why}")]
    WithoutEffect {
        /// The setting.
        setting: &'static str,
        /// Its value.
        given: usize,
        /// The reason and the remedy.
        why: &'static str,
    },
    /// A setting of a callback is a number that it cannot use.
    #[cfg(feature = "checkpoint")]
    #[error("{callback}: {setting} is {given}; give {expected}")]
    CallbackSetting {
        /// The callback.
        callback: &'static str,
        /// The setting.
        setting: &'static str,
        /// Its value.
        given: f64,
        /// The numbers that it may be.
        expected: &'static str,
    },
    /// Two callbacks of one training run keep their checkpoints in one folder.
    #[cfg(feature = "checkpoint")]
    #[error(
        "two callbacks keep their checkpoints in {}, the newest {} and the newest {}, and would remove each other's; \
         give each a folder of its own", folder.display(), keep[0], keep[1]
    )]
    SharedFolder {
        /// The folder.
        folder: PathBuf,
        /// The number of checkpoints that each of them keeps.
        keep: [usize; 2],
    },
    /// Something was asked for that an elastic job cannot do.
    #[cfg(feature = "checkpoint")]
    #[error("{what} does not go with an elastic strategy: {why}")]
    Elastic {
        /// The setting or the callback.
        what: &'static str,
        /// The reason and the remedy.
        why: &'static str,
    },
    /// The state of an elastic loop does not describe the steps that its optimizers have made.
    #[cfg(feature = "checkpoint")]
    #[error(
        "the loop's state describes {described} steps of optimizers, and they have made {made}; change the state at \
         once when run has returned, before other operations that may fail"
    )]
    Undescribed {
        /// The steps that the state describes.
        described: u64,
        /// The steps that were made.
        made: u64,
    },
    /// The variables have made steps of which the loop knows nothing.
    #[error(
        "the variables have made {made} steps, and the state of the loop is that of step {known}, of an epoch that has \
         ended since; add BackupAndRestore to the callbacks, or end the servers and workers to begin anew"
    )]
    StepsUnknown {
        /// The steps that were made.
        made: u64,
        /// The steps of the loop's state.
        known: u64,
    },
    /// Class weights were set for targets that are not classes.
    #[error(
        "a target is {target}, and class_weights are by class; give the number of each example's class as its target, \
         from 0 on, or leave class_weights out"
    )]
    NotAClass {
        /// The target.
        target: f32,
    },
    /// `DISTRIBUTE_PROGRESS` does not name a form.
    #[error(
        "DISTRIBUTE_PROGRESS is {given:?}; set it to auto, bar, plain, json, launcher or off, or unset it for auto"
    )]
    UnknownForm {
        /// The variable's value.
        given: String,
    },
    /// `DISTRIBUTE_LOG` has an unknown value.
    #[error("DISTRIBUTE_LOG is {given:?}; set it to json or text, or unset it for text")]
    UnknownLog {
        /// The variable's value.
        given: String,
    },
    /// The launcher form was chosen without the launcher's address.
    #[error(
        "DISTRIBUTE_PROGRESS is \"launcher\", but DISTRIBUTE_PROGRESS_ADDR is not set; set it to the host:port where \
        the \
         launcher listens, or set DISTRIBUTE_PROGRESS to plain"
    )]
    MissingAddress,
    /// `DISTRIBUTE_PROGRESS_ADDR` is not an address.
    #[error(
        "DISTRIBUTE_PROGRESS_ADDR is {given:?}; expected host:port with a port from 1 to 65535, such as 127.0.0.1:4711"
    )]
    BadAddress {
        /// The variable's value.
        given: String,
    },
    /// `DISTRIBUTE_STATUS_ADDR` is not an address.
    #[error(
        "DISTRIBUTE_STATUS_ADDR is {given:?}; expected host:port with a port from 1 to 65535, such as 127.0.0.1:4711, \
         as `distribute run --status` sets it"
    )]
    BadStatusAddress {
        /// The variable's value.
        given: String,
    },
    /// The thread that writes progress could not be started.
    #[error("progress: the writer thread cannot be started; raise the process's thread limit")]
    Thread(#[source] std::io::Error),
    /// The numbers of predictions, targets and weights do not fit together.
    #[error("metrics: {problem}; give a target, and a weight if any, for each example")]
    Predictions {
        /// The mismatch.
        problem: String,
    },
    /// A metric cannot be computed from outputs and targets such as these.
    #[error("the metric {metric:?} needs {problem}")]
    Metric {
        /// The metric's name.
        metric: String,
        /// The need, and the remedy.
        problem: String,
    },
    /// A callback monitors a value that does not exist.
    #[error("a callback watches {name:?}, but an epoch has {known}; name one of these, or give a validation")]
    Monitor {
        /// The name.
        name: String,
        /// The existing names.
        known: String,
    },
    /// A callback monitors a value of which it is unknown whether it should rise.
    #[error(
        "a callback watches {name:?}, and neither its metric nor its name tells whether it should rise or fall; call \
         rises(true) or rises(false) on the callback, or implement Metric::rises"
    )]
    Direction {
        /// The value's name.
        name: String,
    },
    /// A file, or an object of a store, cannot be read or written.
    #[error("{}", described(path, source))]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system or the store.
        source: std::io::Error,
    },
    /// An image for an event file has no such pixels.
    #[cfg(feature = "tensorboard")]
    #[error(
        "an image {problem}; give the bytes of a PNG file, or the shape [height, width, channels] and a value for each \
         channel of each pixel"
    )]
    Image {
        /// The mismatch.
        problem: String,
    },
    /// A file of a checkpoint is not as it was written.
    #[cfg(feature = "checkpoint")]
    #[error("checkpoint {}: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        problem: String,
    },
    /// A checkpoint has the format of another version.
    #[cfg(feature = "checkpoint")]
    #[error(
        "{}: the checkpoint has format {found}, and this version of the program reads format 2; restore it with the \
        version \
         that wrote it, or choose another folder", path.display()
    )]
    Format {
        /// The manifest.
        path: PathBuf,
        /// The format that it names.
        found: String,
    },
    /// A folder holds checkpoints, and none of them is whole.
    #[cfg(feature = "checkpoint")]
    #[error(
        "none of the {count} checkpoints in {} is whole ({problem}); put back what is missing, or move them elsewhere \
        to begin \
         anew", folder.display()
    )]
    NoneWhole {
        /// The folder.
        folder: PathBuf,
        /// Their number.
        count: usize,
        /// The problem of the newest.
        problem: String,
    },
    /// A folder holds the checkpoints of another run.
    #[cfg(feature = "checkpoint")]
    #[error(
        "{} holds checkpoints of {other} ({steps}), and this training is run {run}; to continue that run, restore \
        before the \
         first save (CheckpointManager::restore, or BackupAndRestore on this folder); to begin anew, choose another \
         folder, or \
         have them moved out of the way (set_aside_other_runs)", folder.display()
    )]
    OtherRun {
        /// The folder.
        folder: PathBuf,
        /// The other run.
        other: String,
        /// Its steps.
        steps: String,
        /// The run that was about to save.
        run: crate::checkpoint::RunId,
    },
    /// A folder holds checkpoints of more than one run.
    #[cfg(feature = "checkpoint")]
    #[error(
        "{} holds checkpoints of several runs: {runs}; a folder belongs to one run, so move those of the others \
        elsewhere",
        folder.display()
    )]
    SeveralRuns {
        /// The folder.
        folder: PathBuf,
        /// The runs with their steps.
        runs: String,
    },
    /// Another process writes into a folder of a store.
    #[cfg(feature = "checkpoint")]
    #[error(
        "another process has begun to save into {} after this one, for example this job started again; nothing more is \
        saved here; end this process, or give each training a folder of its own", folder.display()
    )]
    OtherWriter {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder of checkpoints no longer exists, nor does its parent.
    #[cfg(feature = "checkpoint")]
    #[error(
        "{} is gone, and so is the folder that it was in, so that nothing can be saved; see whether a disk has been \
        unmounted, \
         or make the folder again, and start the program again", folder.display()
    )]
    FolderGone {
        /// The folder.
        folder: PathBuf,
    },
    /// A file of a checkpoint cannot have this name.
    #[cfg(feature = "checkpoint")]
    #[error(
        "a checkpoint cannot have a file of tensors named {name:?}; give a name without path, colon or control \
        characters that \
         does not begin with a dot or end in -NNNNN-of-NNNNN, such as \"model\""
    )]
    FileName {
        /// The name.
        name: String,
    },
    /// An operation on the disk exceeds its time limit.
    #[cfg(feature = "checkpoint")]
    #[error(
        "{what} is not done: {under_way} has taken {:.1} s so far; see whether the disk hangs or its server is \
        away, or \
         allow more time (CheckpointManager::write_timeout)", waited.as_secs_f64()
    )]
    DiskHangs {
        /// The work.
        what: String,
        /// The operation.
        under_way: String,
        /// How long it has taken so far.
        waited: std::time::Duration,
    },
    /// A checkpoint does not hold what the program needs.
    #[cfg(feature = "checkpoint")]
    #[error("{name:?} cannot be restored: {problem}; restore into the model and the optimizer that were saved")]
    Restore {
        /// The tensor.
        name: String,
        /// The mismatch.
        problem: String,
    },
    /// A checkpoint was given two tensors of one file, or two values, of one name.
    #[cfg(feature = "checkpoint")]
    #[error(
        "the checkpoint's {file} has {name:?} already, and one of the two would be lost; save each part once, and give \
        each model names of its own, such as by a prefix (vb.pp)"
    )]
    PutTwice {
        /// The group of tensors, such as `model`; `state.json` for a value.
        file: String,
        /// The tensor, or the key of the value.
        name: String,
    },
    /// Workers read different tensors of a checkpoint at the same time.
    #[cfg(feature = "checkpoint")]
    #[error(
        "{name:?} is read from a checkpoint here while {other} reads another tensor; under a strategy that shards, \
        every worker must load the same parts, and read the same tensors in the same order"
    )]
    LoadOrder {
        /// The tensor.
        name: String,
        /// The name of a rank that reads another one.
        other: String,
    },
    /// A tensor of a checkpoint is read after its parts were restored.
    #[cfg(feature = "checkpoint")]
    #[error(
        "{name:?} is not in memory: under a strategy that shards, and with parts that stream, such as parameter \
        servers, tensors are read while the parts of a checkpoint are loaded; read it there, or with Snapshot::read"
    )]
    ReadLate {
        /// The tensor.
        name: String,
    },
    /// No new checkpoint has been saved within the limit.
    #[cfg(feature = "checkpoint")]
    #[error(
        "the evaluator has waited {} s for {awaited} in {}; see whether training still runs and writes there, or let \
        it wait \
         longer (limits; RunConfig::wait_for_checkpoints)", waited.as_secs(), folder.display()
    )]
    NoNewCheckpoint {
        /// The checkpoint waited for: the first one, or one after a step.
        awaited: String,
        /// The folder.
        folder: PathBuf,
        /// How long it was waited for.
        waited: std::time::Duration,
    },
    /// A value of a checkpoint cannot be written or read as JSON.
    #[cfg(feature = "checkpoint")]
    #[error("the checkpoint's state {key:?}: {source}")]
    State {
        /// Its key.
        key: String,
        /// The error of serde.
        source: serde_json::Error,
    },
    /// The error of one of a checkpoint's parts.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Part(BoxError),
    /// The message of an error on the chief.
    #[cfg(feature = "checkpoint")]
    #[error("on the chief: {0}")]
    Chief(String),
    /// The message of an error on a worker other than the chief. As after the loss of that worker, the others may
    /// continue or start again.
    #[cfg(feature = "checkpoint")]
    #[error("on {worker}: {problem}")]
    OnWorker {
        /// The first worker that has an error, such as `worker:2`.
        worker: String,
        /// The message of its error.
        problem: String,
    },
    /// The message of a hang of the chief's disk.
    #[cfg(feature = "checkpoint")]
    #[error("on the chief: {0}")]
    ChiefsDisk(String),
    /// A handler for a signal cannot be installed.
    #[cfg(feature = "checkpoint")]
    #[error("signal {signal} cannot be taken: {source}; choose another, such as SIGTERM")]
    Signal {
        /// Its number.
        signal: i32,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The thread that calls the function of `TerminationConfig::watch` could not be started.
    #[cfg(feature = "checkpoint")]
    #[error("the thread of TerminationConfig::watch cannot be started: {0}; raise the process's thread limit")]
    WatcherThread(#[source] std::io::Error),
    /// The function of `TerminationConfig::watch` panicked; the run has stopped as after a signal.
    #[cfg(feature = "checkpoint")]
    #[error(
        "the function of TerminationConfig::watch panicked: {problem}; training has stopped after step {step}; \
         correct the function, and start the program again to resume"
    )]
    WatcherPanicked {
        /// The last step.
        step: u64,
        /// The message of the panic.
        problem: String,
    },
    /// The run was told to stop, and has saved a checkpoint.
    #[cfg(feature = "checkpoint")]
    #[error("stopped after step {step}, which is saved; start the program again to resume")]
    Preempted {
        /// The last step.
        step: u64,
        /// The code to exit with.
        exit_code: u8,
    },
    /// The run was told to stop, and no callback has saved a checkpoint after the last step.
    #[cfg(feature = "checkpoint")]
    #[error(
        "stopped after step {step}, which no callback has saved; started again, the program resumes from its newest \
         checkpoint, or with the others of an elastic job. BackupAndRestore saves when the program is told to stop"
    )]
    Unsaved {
        /// The last step.
        step: u64,
        /// The code to exit with.
        exit_code: u8,
    },
    /// This process was told to stop, and has left the others of an elastic job, which have its state.
    #[cfg(feature = "checkpoint")]
    #[error("told to stop: this process has left the elastic job after step {step}, from which the others train on")]
    Left {
        /// The last step.
        step: u64,
        /// The code to exit with.
        exit_code: u8,
    },
    /// An address cannot be listened on.
    #[cfg(any(feature = "prometheus", feature = "status"))]
    #[error("{address:?} cannot be listened on: {source}; give an address of this machine and a free port, or port 0")]
    Listen {
        /// The address.
        address: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A job's status server does not answer.
    #[cfg(feature = "status")]
    #[error(
        "no job answers at {place}: {source}; the job may have ended, or the address is not that of its status page"
    )]
    NoAnswer {
        /// The address, or the path of the socket.
        place: String,
        /// The failure.
        source: std::io::Error,
    },
    /// A job's status server refuses a question.
    #[cfg(feature = "status")]
    #[error("the server at {place} answers with the HTTP status {status}: {said}")]
    Refusal {
        /// The address, or the path of the socket.
        place: String,
        /// The HTTP status.
        status: u16,
        /// The text of the answer.
        said: String,
    },
    /// Some of the variables that Kubeflow Trainer sets in a TrainJob are missing or empty.
    #[cfg(feature = "kubeflow")]
    #[error(
        "the variables of a TrainJob are incomplete: {set} present, {missing} missing or empty; set all three, as \
         Kubeflow Trainer does, or unset them all"
    )]
    KubeflowVariables {
        /// The variables that are set.
        set: String,
        /// The others.
        missing: String,
    },
    /// A status cannot be posted to this URL.
    #[cfg(feature = "kubeflow")]
    #[error(
        "the URL of Kubeflow's status server is {given:?}: {problem}; give the one that Kubeflow Trainer sets in \
         KUBEFLOW_TRAINER_SERVER_URL, which begins with https"
    )]
    KubeflowUrl {
        /// The URL.
        given: String,
        /// The reason.
        problem: String,
    },
    /// A collective failed.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// The strategy failed.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// An operation on a tensor failed.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::UnknownForm { .. }
            | Error::UnknownLog { .. }
            | Error::MissingAddress
            | Error::BadAddress { .. }
            | Error::BadStatusAddress { .. } => Class::CONFIGURATION,
            #[cfg(feature = "checkpoint")]
            other => other.class_of_checkpoints(),
            #[cfg(not(feature = "checkpoint"))]
            _ => Class::PERMANENT,
        }
    }
}

/// Returns the message of a file's error; a store's own message names its URL.
fn described(path: &std::path::Path, source: &std::io::Error) -> String {
    #[cfg(any(feature = "checkpoint", feature = "tensorboard"))]
    if let Some(message) = crate::objects::message(source) {
        return message;
    }
    format!("{}: {source}", path.display())
}

#[cfg(feature = "checkpoint")]
impl Error {
    fn class_of_checkpoints(&self) -> Class {
        match self {
            Error::Collective(error) => error.class(),
            Error::Strategy(error) => error.class(),
            Error::Values(error) => error.class(),
            Error::Part(error) => Classified::class_of(&**error),
            Error::File { source, .. } => crate::objects::class(source).unwrap_or(Class::PERMANENT),
            // Of this process alone, also in an elastic job: the others train on without it.
            Error::DiskHangs { .. } => Class::new(Scope::Caller, FailureKind::Retryable),
            // The worker that has the error ends with its class; for the others it is lost.
            Error::NoNewCheckpoint { .. } | Error::ChiefsDisk(_) | Error::OnWorker { .. } => {
                Class::new(Scope::Cluster, FailureKind::Retryable)
            }
            #[cfg(feature = "kubeflow")]
            Error::KubeflowVariables { .. } | Error::KubeflowUrl { .. } => Class::CONFIGURATION,
            Error::Preempted { exit_code, .. } | Error::Unsaved { exit_code, .. } | Error::Left { exit_code, .. } => {
                Class::PERMANENT.with_exit_code(*exit_code)
            }
            _ => Class::PERMANENT,
        }
    }
}

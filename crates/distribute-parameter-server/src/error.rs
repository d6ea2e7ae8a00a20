//! Errors of coordinator, workers and parameter servers.

use distribute_types::{Class, ErrorClass, FailureKind, Scope};

use std::time::Duration;

use distribute_cluster::Task;
use tonic::{Code, Status};

/// Any error as a source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A function of the program returned an error, or panicked.
    #[error("function {function:?} failed on worker:{worker}: {message}")]
    UserFunction {
        /// The function's name.
        function: String,
        /// The worker that ran it.
        worker: u32,
        /// The message of its error or panic.
        message: String,
    },
    /// Workers were lost repeatedly while they ran a function, or there is no worker at all.
    #[error("{what}: {why}; look at the workers' logs, for a function that ends its process takes every worker along")]
    WorkerLost {
        /// The function, or everything that was scheduled.
        what: String,
        /// How often it was tried, and what happened.
        why: String,
    },
    /// A parameter server was lost, and its variables with it.
    #[error(
        "lost ps:{server} at {address}: {why}; start it and this coordinator again and restore a checkpoint, or name a \
         folder of checkpoints (restore_servers_from) from which a server that is started again gets its part"
    )]
    ServerLost {
        /// The server's index.
        server: u32,
        /// The server's address.
        address: String,
        /// How the loss was noticed.
        why: String,
    },
    /// An operation was cancelled, because something else had failed before or the coordinator ended.
    #[error("{what} was cancelled: {why}")]
    Cancelled {
        /// The operation.
        what: String,
        /// The reason.
        why: String,
    },
    /// A task could not be reached in time.
    #[error(
        "cannot reach {task} at {address} within {} s: {last}; check that it runs and that the address is right",
        waited.as_secs_f64().round()
    )]
    Unreachable {
        /// The task.
        task: Task,
        /// Its address.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// The last failure.
        last: String,
    },
    /// This process and another task do not have the same job secret.
    #[error("{task}: {call}: {message}")]
    Secret {
        /// The task.
        task: Task,
        /// The call.
        call: &'static str,
        /// The side that lacks the secret, if one does, and a remedy.
        message: String,
    },
    /// Another task refused a call.
    #[error("{task} refused {call}: {message}")]
    Refused {
        /// The task.
        task: Task,
        /// The call.
        call: &'static str,
        /// The task's message.
        message: String,
    },
    /// The program has no function or dataset of this name.
    #[error("the program has no {kind} {name:?}; it has {known}{suggestion}")]
    UnknownName {
        /// "function" or "dataset".
        kind: &'static str,
        /// The name.
        name: String,
        /// The existing names.
        known: String,
        /// The most similar name as a suggestion, or empty.
        suggestion: String,
    },
    /// A value does not fit the type that a function takes or returns.
    #[error("{what}: {source}; pass and fetch the types that the function is declared with")]
    Value {
        /// The value.
        what: String,
        /// The mismatch.
        source: BoxError,
    },
    /// A partitioner returned an invalid partition.
    #[error(
        "the partitioner cuts variable {name:?} of shape {shape:?} into {given:?}; expected one number for each \
        dimension, the \
         first at least 1 and all others 1"
    )]
    Partition {
        /// The variable.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The result of the partitioner.
        given: Vec<usize>,
    },
    /// No server has a variable of this name.
    #[error("no parameter server has a variable {name:?}; the coordinator must have made it, and there are {known}")]
    UnknownVariable {
        /// The name.
        name: String,
        /// The existing variables.
        known: String,
    },
    /// A variable was misused.
    #[error("variable {name:?}: {problem}")]
    Variable {
        /// The name.
        name: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// A numbered step cannot be scheduled.
    #[error("step {step}: {problem}")]
    Step {
        /// Its number.
        step: u64,
        /// The problem and the remedy.
        problem: String,
    },
    /// The servers have kept another training than that of this program.
    #[error(
        "{problem}; start the program that began the training, or end its servers and workers before another training"
    )]
    OtherTraining {
        /// The difference.
        problem: String,
    },
    /// An option is outside its range.
    #[error("{what} is {given}; give {expected}")]
    Option {
        /// The option.
        what: &'static str,
        /// Its value.
        given: String,
        /// The expected range.
        expected: &'static str,
    },
    /// A worker's dataset has no further element.
    #[error("the dataset {name:?} has no further element on worker:{worker}; repeat it, or schedule fewer steps")]
    EndOfData {
        /// The dataset's name.
        name: String,
        /// The worker.
        worker: u32,
    },
    /// This task cannot do what was asked of it, such as coordinate or serve.
    #[error("{task} cannot do this: {problem}")]
    WrongTask {
        /// This task.
        task: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// The port of this task cannot be listened on.
    #[error(
        "{task} cannot listen on {address}: {source}; end the program that uses the port, or change the address in \
        every task's TF_CONFIG"
    )]
    Listen {
        /// This task.
        task: Task,
        /// The address.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// No coordinator came, or came back, in time.
    #[error("{task}: no coordinator for {} s; start it, or look at its log", waited.as_secs())]
    NoCoordinator {
        /// This task.
        task: Task,
        /// How long it waited.
        waited: Duration,
    },
    /// No island came, or came back, in time.
    #[error(
        "{task}: no island has attended for {} s; start the chief and the workers, or look at their logs",
        waited.as_secs()
    )]
    NoIslands {
        /// This task.
        task: Task,
        /// How long it waited.
        waited: Duration,
    },
    /// A server of outer parameters has not answered an island for too long.
    #[error(
        "lost ps:{server} at {address}, which has not answered for {} s: {why}; start it again, and it continues from \
         its checkpoints, or without any from the outer parameters of the first island that calls",
        waited.as_secs()
    )]
    OuterServerLost {
        /// The server's index.
        server: u32,
        /// The server's address.
        address: String,
        /// How long it has not answered.
        waited: Duration,
        /// The last failure.
        why: String,
    },
    /// The coordinator has ended with an error that another run would also meet.
    #[error("{task} ends with its job, whose coordinator has failed: {why}")]
    JobFailed {
        /// This task.
        task: Task,
        /// The coordinator's error.
        why: String,
        /// Whether a setting is at fault, rather than the program.
        configuration: bool,
    },
    /// Nothing has happened for longer than all limits allow.
    #[error("{what}: nothing has happened for {} s ({state}); look at the workers' logs", waited.as_secs())]
    Stalled {
        /// The condition waited for.
        what: String,
        /// How long nothing has happened.
        waited: Duration,
        /// The waiting and running functions, and the missing workers.
        state: String,
    },
    /// This task received a signal to stop.
    #[error("{task} was stopped by signal {signal}")]
    Stopped {
        /// This task.
        task: Task,
        /// The signal.
        signal: i32,
    },
    /// Threads or the runtime cannot be started.
    #[error("cannot start threads: {0}")]
    Threads(#[source] std::io::Error),
    /// The description of the cluster is invalid.
    #[error(transparent)]
    Cluster(#[from] distribute_cluster::Error),
    /// The description of an optimizer makes no sense.
    #[error(transparent)]
    Optimizer(#[from] distribute_rules::Error),
    /// A tensor cannot be read or written.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// A dataset failed.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// A checkpoint could not be read or written.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// The strategy of an island is invalid.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        let lost = |scope| Class::new(scope, FailureKind::Retryable);
        match self {
            Error::WorkerLost { .. }
            | Error::ServerLost { .. }
            | Error::OuterServerLost { .. }
            | Error::Unreachable { .. } => lost(Scope::Peer),
            Error::Stalled { .. } | Error::NoCoordinator { .. } | Error::NoIslands { .. } => lost(Scope::Cluster),
            Error::WrongTask { .. } | Error::Option { .. } | Error::Secret { .. } | Error::OtherTraining { .. } => {
                Class::CONFIGURATION
            }
            Error::JobFailed { configuration: true, .. } => Class::CONFIGURATION,
            // As the shell counts processes that a signal ends.
            Error::Stopped { signal, .. } => {
                Class::PERMANENT.with_exit_code(128u8.saturating_add(u8::try_from(*signal).unwrap_or(0)))
            }
            Error::Cluster(error) => error.class(),
            Error::Optimizer(error) => error.class(),
            Error::Values(error) => error.class(),
            Error::Input(error) => error.class(),
            Error::Train(error) => error.class(),
            Error::Strategy(error) => error.class(),
            _ => Class::PERMANENT,
        }
    }
}

impl Error {
    /// Returns a copy of the error, for each caller that waits for the same outcome.
    pub(crate) fn again(&self) -> Error {
        match self {
            Error::UserFunction { function, worker, message } => {
                Error::UserFunction { function: function.clone(), worker: *worker, message: message.clone() }
            }
            Error::WorkerLost { what, why } => Error::WorkerLost { what: what.clone(), why: why.clone() },
            Error::ServerLost { server, address, why } => {
                Error::ServerLost { server: *server, address: address.clone(), why: why.clone() }
            }
            Error::Refused { task, call, message } => Error::Refused { task: *task, call, message: message.clone() },
            Error::Secret { task, call, message } => Error::Secret { task: *task, call, message: message.clone() },
            Error::Cancelled { what, why } => Error::Cancelled { what: what.clone(), why: why.clone() },
            Error::Stalled { what, waited, state } => {
                Error::Stalled { what: what.clone(), waited: *waited, state: state.clone() }
            }
            other => Error::Cancelled { what: "this".to_owned(), why: other.to_string() },
        }
    }

    /// Converts the status of a failed call to a parameter server.
    pub(crate) fn of_server(server: usize, address: &str, call: &'static str, status: Status) -> Error {
        let index = server as u32;
        match status.code() {
            Code::Aborted => Error::Cancelled { what: call.to_owned(), why: status.message().to_owned() },
            _ if crate::wire::is_lost(&status) => {
                Error::ServerLost { server: index, address: address.to_owned(), why: status.message().to_owned() }
            }
            _ => Error::refused(Task::new(distribute_cluster::TaskType::Ps, index), call, &status),
        }
    }

    /// Converts the status of a call that a task has refused.
    pub(crate) fn refused(task: Task, call: &'static str, status: &Status) -> Error {
        let message = status.message().to_owned();
        match status.code() {
            Code::Unauthenticated => Error::Secret { task, call, message },
            _ => Error::Refused { task, call, message },
        }
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

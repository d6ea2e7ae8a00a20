//! Errors of describing, joining and coordinating a cluster.

use std::time::Duration;

use distribute_types::{Class, ErrorClass, FailureKind, Scope};

use crate::Failure;
use crate::secret::Problem;
use crate::text::clean;

/// An error of a cluster's description or of its coordination service.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The description of the cluster or of this process's task is invalid.
    #[error("{subject}: {problem}. Given: {given}. Expected: {expected}. {remedy}")]
    Config {
        /// The subject of the description, such as `TF_CONFIG`.
        subject: &'static str,
        /// The problem.
        problem: String,
        /// The offending part.
        given: String,
        /// A description or example of a valid value.
        expected: String,
        /// The remedy.
        remedy: String,
    },
    /// The leader cannot listen on its port.
    #[error(
        "{task} leads the job and cannot listen on {address}: {source}; end the program that uses the port, or choose \
         another one: set DISTRIBUTE_PORT alike on every task, or change the leader's address in every task's TF_CONFIG"
    )]
    Listen {
        /// This task.
        task: String,
        /// The address.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// Some tasks did not join in time.
    #[error(
        "{task}: {missing} did not join within {} s; start them, or look at their logs and at the addresses they were \
         given",
        seconds(waited)
    )]
    Missing {
        /// This task.
        task: String,
        /// How long this task waited.
        waited: Duration,
        /// The missing tasks, with their addresses if known.
        missing: String,
    },
    /// The leader could not be reached in time.
    #[error(
        "{task}: cannot join the leader {leader} at {address} within {} s: {last}; check that it runs and that the \
         address is right on every task",
        seconds(waited)
    )]
    Unreachable {
        /// This task.
        task: String,
        /// The leader.
        leader: String,
        /// Its address.
        address: String,
        /// How long this task tried.
        waited: Duration,
        /// The error of the last attempt.
        last: String,
    },
    /// The leader refused this task.
    #[error("{task} was refused by the leader at {address}: {reason}")]
    Refused {
        /// This task.
        task: String,
        /// The leader's address.
        address: String,
        /// The leader's reason, with a remedy.
        reason: String,
    },
    /// This process and another one do not have the same secret, or do not accept each other's certificates.
    #[error("{task}: {peer}: {problem}; {remedy}")]
    Secret {
        /// This task.
        task: String,
        /// The other process.
        peer: String,
        /// How the secrets or certificates differ, as far as it is known; nothing of the secrets.
        problem: Problem,
        /// The remedy.
        remedy: &'static str,
    },
    /// Not every member joined an exchange or barrier in time.
    #[error("{task}: {what} was not completed within {} s; missing: {missing}", seconds(waited))]
    Incomplete {
        /// This task.
        task: String,
        /// The exchange or barrier.
        what: String,
        /// How long this task waited.
        waited: Duration,
        /// The missing members.
        missing: String,
    },
    /// No member put a key in time.
    #[error(
        "{task}: no task put key {key:?} within {} s; check that some task puts it, or wait longer",
        seconds(waited)
    )]
    KeyMissing {
        /// This task.
        task: String,
        /// The key.
        key: String,
        /// How long this task waited.
        waited: Duration,
    },
    /// A key or value is too large for the coordination service, or the job has stored too many.
    #[error("{task}: {what}: {problem}")]
    TooLarge {
        /// This task.
        task: String,
        /// The call.
        what: String,
        /// The item that is too large, the limit, and a remedy.
        problem: String,
    },
    /// A member failed while this task waited.
    #[error("{task}: {what}: {failure}")]
    Failed {
        /// This task.
        task: String,
        /// The call that was waiting.
        what: String,
        /// The first failure of the job.
        failure: Failure,
    },
    /// A call to the coordination service failed.
    #[error("{task}: {what}: {reason}")]
    Call {
        /// This task.
        task: String,
        /// The call.
        what: String,
        /// The reason.
        reason: String,
    },
    /// A store could not be read or written.
    #[error("{task}: {what}: the store cannot be used: {source}; check that every task reaches it and may write there")]
    Store {
        /// This task.
        task: String,
        /// The call.
        what: String,
        /// The store's error.
        source: std::io::Error,
    },
    /// A request to a cloud's service was refused, or had no usable answer in time.
    #[error("{service}: {request}: {problem}. {remedy}")]
    Service {
        /// The service.
        service: &'static str,
        /// The request.
        request: String,
        /// The problem, such as the status of the answer.
        problem: String,
        /// The remedy.
        remedy: String,
        /// Whether a restart helps.
        kind: FailureKind,
    },
    /// A resource of a cloud is in a state in which it cannot be used.
    #[error("{resource} {problem}. {remedy}")]
    NotReady {
        /// The resource.
        resource: String,
        /// Its state.
        problem: String,
        /// The remedy.
        remedy: String,
        /// Whether a restart helps.
        kind: FailureKind,
    },
    /// The API server of Kubernetes refused a request, failed, or did not answer in time.
    #[error("the API server {server}: {problem}; {remedy}")]
    Kubernetes {
        /// The server's URL; `of Kubernetes` before it is known.
        server: String,
        /// The problem, with the server's own message if there is one.
        problem: String,
        /// The remedy; of several lines if it is YAML.
        remedy: String,
        /// Whether the same request may succeed later.
        kind: FailureKind,
    },
    /// Pods of the cluster are missing or not running.
    #[error(
        "not all pods run in namespace {namespace} after {} s: {pods}; look at `kubectl describe pod -n {namespace}`, \
         or wait longer",
        seconds(waited)
    )]
    Pods {
        /// How long they were waited for.
        waited: Duration,
        /// Their namespace.
        namespace: String,
        /// The pods by job, with their phases and with what their containers wait for.
        pods: String,
    },
    /// No generation of an elastic job was decided in time that has this process.
    #[error(
        "{control}: no generation of the job with this process within {} s: {problem}; start more processes, or look \
         at the logs of those that are missing",
        seconds(waited)
    )]
    TooFew {
        /// The address at which this process takes control messages.
        control: String,
        /// How long this process waited.
        waited: Duration,
        /// Which members are there, and how many are needed.
        problem: String,
    },
    /// An elastic job has ended: its members have done their work. Its exit code is 0.
    #[error("{control}: the elastic job has ended before this process could join it; nothing is left to do")]
    JobEnded {
        /// The address at which this process takes control messages.
        control: String,
    },
    /// This process was told to stop while it waited for a generation of an elastic job. Its exit code is 143.
    #[error(
        "{control}: told to stop while it waited for other processes of the elastic job; those that are left train on, \
        or the job resumes from its checkpoint when it is started again"
    )]
    Stopped {
        /// The address at which this process takes control messages.
        control: String,
    },
    /// The generation of an elastic job that this task was to join is over.
    #[error("{task}: generation {generation} of the job is over; continue with generation {newer} or a later one")]
    GenerationOver {
        /// This task in the generation that is over.
        task: String,
        /// The number of the generation.
        generation: u64,
        /// The number of a newer one.
        newer: u64,
    },
    /// The members of a generation may be behind those of an earlier one, of which none is there.
    #[error(
        "generation {generation} has no member of generation {trained}, which has trained: the steps since are lost \
         with its members; start the job again from its checkpoint, with a job identity of its own"
    )]
    Outdated {
        /// The generation.
        generation: u64,
        /// The newest generation before it that may have trained.
        trained: u64,
    },
    /// A process of an elastic job cannot listen for messages of the others.
    #[error(
        "cannot listen on {address} for the processes of the elastic job: {source}; end the program that uses the \
         port, or choose another address"
    )]
    Control {
        /// The address.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The system returned no random numbers; these identify jobs and their members.
    #[error("the system gives no random numbers: {0}; look at getrandom(2), and at /dev/urandom in containers")]
    Random(String),
    /// The thread of the coordination service could not be started.
    #[error("cannot start the thread of the coordination service: {0}")]
    Thread(#[source] std::io::Error),
}

distribute_types::debug_is_display!(Error);

impl Error {
    /// Returns [`Error::Config`] with its parts shortened and made printable.
    pub(crate) fn config(
        subject: &'static str,
        problem: impl Into<String>,
        given: impl Into<String>,
        expected: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        // Each part may contain the given text, so all of them are cleaned.
        let [problem, given, expected, remedy] = [problem.into(), given.into(), expected.into(), remedy.into()];
        let [problem, given, expected, remedy] = [problem, given, expected, remedy].map(|text| clean(&text, MAX_PART));
        Error::Config { subject, problem, given, expected, remedy }
    }

    /// Returns the same error with another subject.
    pub(crate) fn about(self, subject: &'static str) -> Error {
        match self {
            Error::Config { problem, given, expected, remedy, .. } => {
                Error::Config { subject, problem, given, expected, remedy }
            }
            other => other,
        }
    }
}

/// Length limit of one part of a configuration error, in characters.
const MAX_PART: usize = 600;

impl ErrorClass for Error {
    fn class(&self) -> Class {
        let scope = match self {
            Error::Config { .. }
            | Error::TooLarge { .. }
            | Error::KeyMissing { .. }
            | Error::Random(_)
            | Error::Thread(_) => Scope::Caller,
            Error::Failed { .. } | Error::GenerationOver { .. } => Scope::Peer,
            _ => Scope::Cluster,
        };
        let kind = match self {
            Error::Config { .. } | Error::Refused { .. } | Error::Secret { .. } => FailureKind::Configuration,
            Error::TooLarge { .. } => FailureKind::Permanent,
            // Nothing has failed.
            Error::JobEnded { .. } => return Class::new(scope, FailureKind::Permanent).with_exit_code(0),
            Error::Stopped { .. } => return Class::new(scope, FailureKind::Permanent).with_exit_code(143),
            Error::Failed { failure, .. } => failure.kind,
            Error::Service { kind, .. } | Error::NotReady { kind, .. } => *kind,
            Error::Kubernetes { kind, .. } => *kind,
            _ => FailureKind::Retryable,
        };
        Class::new(scope, kind)
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Formats a duration as seconds, rounded to one decimal from 1 s and to two below: `300`, `2.5`, `0.04`.
pub(crate) fn seconds(duration: &Duration) -> String {
    let seconds = duration.as_secs_f64();
    let rounded = if seconds < 1.0 { (seconds * 100.0).round() / 100.0 } else { (seconds * 10.0).round() / 10.0 };
    rounded.to_string()
}

//! Errors of process groups.

use std::sync::Arc;
use std::time::Duration;

use distribute_types::{Class, ErrorClass, FailureKind, Scope};

use crate::transport::AbortReason;
use crate::{Call, Rank};

/// The errors of this crate.
///
/// Every variant that concerns a running group names the operation, its sequence number and the ranks involved. After
/// such an error the group is aborted on all ranks: further calls return [`Error::Aborted`] with the first cause.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two ranks called different operations, or two ranks of one process the same one with buffers of different forms:
    /// in place and apart. Remedy: make every rank issue the same calls in the same order.
    #[error("{}", mismatch(here, here_name, there, there_name))]
    Mismatch {
        /// The call on one side.
        here: Box<Call>,
        /// The rank that made it.
        here_name: String,
        /// The call on the other side.
        there: Box<Call>,
        /// The rank that made that.
        there_name: String,
    },
    /// Two processes made the same call, but execute it by different algorithms. Remedy: give every process the same
    /// algorithm, link figures, transport and version.
    #[error(
        "{call}: {here_name} carries it out by {here}, {there_name} by {there}; give every process the same algorithm, \
         link figures and transport (DISTRIBUTE_ALGORITHM, DISTRIBUTE_LINK, DISTRIBUTE_TRANSPORT, Options), and the \
         same build"
    )]
    Schedules {
        /// The call.
        call: Box<Call>,
        /// The rank on one side.
        here_name: String,
        /// Its algorithm.
        here: &'static str,
        /// The rank on the other side.
        there_name: String,
        /// Its algorithm.
        there: &'static str,
    },
    /// Two ranks of one process disagree on the number of elements that one sends to the other.
    #[error("{call}: {from} sends {sent} elements to {to}, which expects {expected}; pass counts that match")]
    Parts {
        /// The operation.
        call: Box<Call>,
        /// The sending rank.
        from: String,
        /// The receiving rank.
        to: String,
        /// The number of elements that the sender sends.
        sent: usize,
        /// The number of elements that the receiver expects.
        expected: usize,
    },
    /// An operation did not finish in time. Remedy: check the named ranks; raise the timeout if they are only slow.
    #[error(
        "{name}: {call} in group {group:?} did not finish within {waited:.1?}; waiting for {missing}; if they are only \
         slow, raise the timeout (Options::timeout or DISTRIBUTE_TIMEOUT)"
    )]
    Deadline {
        /// The operation.
        call: Box<Call>,
        /// This rank's name.
        name: String,
        /// The group's name.
        group: String,
        /// How long the operation waited.
        waited: Duration,
        /// The missing ranks, and when they were last heard from.
        missing: String,
    },
    /// A peer's process ended, crashed or became unreachable. Remedy: restart the job from its last checkpoint.
    #[error("{name}: lost {peer} during {during}: {how}")]
    PeerLost {
        /// This rank's name.
        name: String,
        /// The name of the lost peer.
        peer: String,
        /// Its rank.
        peer_rank: Rank,
        /// The operation in which the loss was detected.
        during: String,
        /// The symptom: connection reset, end of stream.
        how: String,
    },
    /// A peer dropped its handle of the group while this rank waited for it.
    #[error(
        "{name}: {peer} left group {group:?} while {during} waited for it; every rank must issue the same operations \
         before it drops the group"
    )]
    PeerLeft {
        /// This rank's name.
        name: String,
        /// The name of the peer that left.
        peer: String,
        /// The group's name.
        group: String,
        /// The waiting operation.
        during: String,
    },
    /// A rank of the same process has finished its part of the work without making a call that this rank waits for.
    #[error(
        "{name}: {peer} has ended its part without {during} in group {group:?}, which waits for it; every rank must \
         issue the same operations"
    )]
    Absent {
        /// This rank's name.
        name: String,
        /// The name of the rank that did not make the call.
        peer: String,
        /// The group's name.
        group: String,
        /// The operation.
        during: String,
    },
    /// The group was aborted by another rank or by an earlier failure.
    #[error("group {group:?} was aborted by {origin}: {cause}")]
    Aborted {
        /// The group's name.
        group: String,
        /// The rank or task that failed first.
        origin: String,
        /// The first cause.
        cause: String,
        /// Whether a restart helps, as reported by the rank that failed first.
        kind: FailureKind,
    },
    /// A user's function (a reduction, a cross-device operation, an algorithm or a transport) panicked during an
    /// operation. The group is aborted on all ranks, and the contents of the call's memory are unspecified.
    #[error("{name}: a function of the caller's panicked during {during}: {message}; it must return for all values")]
    Panicked {
        /// This rank's name.
        name: String,
        /// The operation.
        during: String,
        /// The panic's message.
        message: String,
    },
    /// The lengths of the buffers of one call do not fit together.
    #[error("{what}: got {got} elements, expected {expected}; {remedy}")]
    Length {
        /// The buffer and its operation.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length it should have.
        expected: usize,
        /// The remedy.
        remedy: &'static str,
    },
    /// The slices of one call have different element types.
    #[error("slice {index} holds {got}, but slice 0 holds {expected}; one call reduces one data type")]
    MixedTypes {
        /// The index of the first slice that differs.
        index: usize,
        /// Its type.
        got: distribute_device::DType,
        /// The type of slice 0.
        expected: distribute_device::DType,
    },
    /// The reduction is not defined for this type.
    #[error("{op} of {dtype} values is not defined; bits are combined in integers only")]
    UnfitType {
        /// The reduction.
        op: crate::ReduceOp,
        /// The type.
        dtype: distribute_device::DType,
    },
    /// A tensor does not match the plan of a fused all-reduce.
    #[error("tensor {index} of a fused all-reduce: {problem}; push every tensor of the plan once a step")]
    Tensor {
        /// The tensor's index.
        index: usize,
        /// The problem.
        problem: String,
    },
    /// The settings of a compression are invalid.
    #[error("compression {name}: {problem}")]
    Compression {
        /// The compression's name.
        name: String,
        /// The problem.
        problem: String,
    },
    /// A root or peer is not a member of the group.
    #[error("{what} {given} is outside the group, whose ranks are 0..{world_size}")]
    RankOutside {
        /// The argument: `root`, `rank` or `process`.
        what: &'static str,
        /// The rank that was given.
        given: u32,
        /// The size of the group.
        world_size: usize,
    },
    /// A setting has an unknown value.
    #[error("{what} {given:?} is not known; give {expected}")]
    UnknownName {
        /// The setting's name.
        what: &'static str,
        /// The value given.
        given: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// A group cannot have this size.
    #[error("a group of {given} ranks was asked for; give at least 1 and at most {max}")]
    GroupSize {
        /// The requested size.
        given: usize,
        /// The maximum size.
        max: usize,
    },
    /// A listening or connecting socket failed while the group was formed.
    #[error("{name}: cannot {action} {address} while forming group {group:?}: {source}")]
    Connect {
        /// This rank's name.
        name: String,
        /// The action that failed.
        action: &'static str,
        /// The address.
        address: String,
        /// The group's name.
        group: String,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
    /// Members of a group that is being formed do not have the same job secret.
    #[error("{name}: cannot form group {group:?} with the process at {address}: {reason}")]
    Secret {
        /// This rank's name.
        name: String,
        /// The address.
        address: String,
        /// The group's name.
        group: String,
        /// The side that lacks the secret, if one does, and a remedy.
        reason: String,
    },
    /// Members of a group that is being formed were given different options.
    #[error("{what} of group {group:?} differs: {mine} on {here}, {theirs} on {there}; give every process the same")]
    Disagreement {
        /// The group's name.
        group: String,
        /// The option's name.
        what: Box<str>,
        /// This task's name.
        here: String,
        /// Its value.
        mine: Box<str>,
        /// The other task's name.
        there: String,
        /// The other's value.
        theirs: Box<str>,
    },
    /// An operation needs new connections between members of a group whose transport was supplied by the user.
    #[error(
        "{what} connects processes of group {group:?} anew, which needs {needs}; make the group by \
         ProcessGroup::from_env or ProcessGroup::join, or connect the members yourself and use \
         ProcessGroup::with_transport"
    )]
    NotConnectable {
        /// The operation.
        what: &'static str,
        /// The group's name.
        group: String,
        /// The missing precondition.
        needs: &'static str,
    },
    /// A transport or a way to meet is not included in this build.
    #[error("{needed} needs the cargo feature {feature:?} of distribute-collectives, which is off in this build")]
    NotBuilt {
        /// The transport, or the way to meet.
        needed: &'static str,
        /// The name of the feature.
        feature: &'static str,
    },
    /// A device operation failed.
    #[error("{name}: {source}")]
    Device {
        /// This rank's name.
        name: String,
        /// The device's error.
        source: Arc<distribute_device::Error>,
    },
    /// An NCCL call failed.
    #[error("{name}: {action} by NCCL failed: {problem}; NCCL_DEBUG=INFO makes it say more")]
    Nccl {
        /// This rank's name.
        name: String,
        /// The action that failed.
        action: String,
        /// The message of NCCL's error.
        problem: String,
    },
    /// Finding or joining the other members failed.
    #[error(transparent)]
    Cluster(#[from] Arc<distribute_cluster::Error>),
}

distribute_types::debug_is_display!(Error);

impl From<distribute_cluster::Error> for Error {
    fn from(error: distribute_cluster::Error) -> Self {
        Error::Cluster(Arc::new(error))
    }
}

impl Error {
    /// Builds the reason that is sent to peers for this error of `name`: the first cause, and not the rank that has
    /// passed it on.
    pub(crate) fn as_reason(&self, name: &str) -> AbortReason {
        match self {
            Error::Aborted { origin, cause, kind, .. } => {
                AbortReason { origin: origin.clone(), cause: cause.clone(), kind: *kind }
            }
            other => AbortReason { origin: name.to_owned(), cause: other.to_string(), kind: other.failure_kind() },
        }
    }

    /// Builds the error of an aborted group from its first cause. If the cause is itself an abort, passed on by a rank
    /// that was aborted, it is replaced with the cause that it names.
    pub(crate) fn aborted(group: &str, origin: &str, cause: &str, kind: FailureKind) -> Error {
        let (origin, cause) = match cause.rsplit_once(ABORTED_BY).and_then(|(_, told)| told.split_once(": ")) {
            Some((first, cause)) => (first, cause),
            None => (origin, cause),
        };
        let AbortReason { origin, cause, kind } =
            AbortReason { origin: origin.to_owned(), cause: cause.to_owned(), kind }.tidied();
        Error::Aborted { group: group.to_owned(), origin, cause, kind }
    }
}

impl ErrorClass for Error {
    fn class(&self) -> Class {
        let scope = match self {
            Error::Cluster(error) => return error.class(),
            Error::PeerLost { .. } | Error::PeerLeft { .. } => Scope::Peer,
            Error::Mismatch { .. }
            | Error::Schedules { .. }
            | Error::Parts { .. }
            | Error::Deadline { .. }
            | Error::Absent { .. }
            | Error::Aborted { .. }
            | Error::Nccl { .. }
            | Error::Connect { .. }
            | Error::Secret { .. } => Scope::Group,
            _ => Scope::Caller,
        };
        let kind = match self {
            Error::PeerLost { .. } | Error::PeerLeft { .. } | Error::Deadline { .. } | Error::Connect { .. } => {
                FailureKind::Retryable
            }
            Error::Aborted { kind, .. } => *kind,
            Error::UnknownName { .. }
            | Error::Disagreement { .. }
            | Error::Secret { .. }
            | Error::Schedules { .. }
            | Error::NotBuilt { .. } => FailureKind::Configuration,
            _ => FailureKind::Permanent,
        };
        Class::new(scope, kind)
    }
}

/// Returns the text of [`Error::Mismatch`].
fn mismatch(here: &Call, here_name: &str, there: &Call, there_name: &str) -> String {
    if here == there {
        return format!(
            "{here_name} and {there_name} both called {here}, but one of them in place and the other not, or with \
             slices of other lengths; ranks of one process must pass buffers of the same form"
        );
    }
    format!(
        "{here_name} called {here}, but {there_name} called {there}; every rank of a group must issue the same \
         operations with equal shapes in the same order"
    )
}

/// Precedes the name of the rank that has aborted a group, in [`Error::Aborted`]'s message.
const ABORTED_BY: &str = " was aborted by ";

/// The result of operations that fail with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abort_is_told_once_with_its_first_cause_and_kind() {
        let first = Error::UnknownName { what: "transport", given: "tpc".to_owned(), expected: "tcp" };
        let abort =
            |reason: AbortReason, group: &str| Error::aborted(group, &reason.origin, &reason.cause, reason.kind);
        let mut told = abort(first.as_reason("worker:1"), "world");
        // A rank that was aborted passes the cause on, as a reason or as text.
        for peer in ["worker:2", "worker:3"] {
            told = abort(told.as_reason(peer), "inner");
        }
        let words = format!("worker 3 failed: {told}");
        for error in [told, Error::aborted("inner", "worker:3", &words, FailureKind::Configuration)] {
            assert_eq!(error.failure_kind(), FailureKind::Configuration);
            assert_eq!(error.to_string(), format!("group \"inner\" was aborted by worker:1: {first}"));
        }
        let lost = Error::aborted("g", "worker:1", "the power went\nINFO all is well", FailureKind::Retryable);
        assert_eq!(lost.to_string(), "group \"g\" was aborted by worker:1: the power went\\nINFO all is well");
        assert!(lost.is_retryable());
    }
}

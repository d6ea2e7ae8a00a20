//! What can go wrong in a process group.

use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::{FailureKind, printable};

use crate::{Call, Rank};

/// An error of this crate.
///
/// Every variant that concerns a running group names the operation, its sequence number and the ranks involved. After
/// such an error the group is aborted on all ranks: further calls return [`Error::Aborted`] with the first cause.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two ranks called different operations. Remedy: make every rank issue the same calls in the same order.
    #[error(
        "{here_name} called {here}, but {there_name} called {there}; every rank of a group must issue the same \
         operations with equal shapes in the same order"
    )]
    Mismatch {
        /// The call on one side.
        here: Box<Call>,
        /// Who made it.
        here_name: String,
        /// The call on the other side.
        there: Box<Call>,
        /// Who made that.
        there_name: String,
    },
    /// Two ranks of one process do not agree on what one sends the other.
    #[error("{call}: {from} sends {sent} elements to {to}, which expects {expected}; pass counts that match")]
    Parts {
        /// The operation.
        call: Box<Call>,
        /// The sending rank.
        from: String,
        /// The receiving rank.
        to: String,
        /// Elements that the one sends.
        sent: usize,
        /// Elements that the other expects.
        expected: usize,
    },
    /// An operation did not finish in time. Remedy: look at the ranks named; raise the timeout if they are only slow.
    #[error(
        "{name}: {call} in group {group:?} did not finish within {waited:.1?}; waiting for {missing}; if they are only \
         slow, raise the timeout (Options::timeout or DISTRIBUTE_TIMEOUT)"
    )]
    Deadline {
        /// The operation.
        call: Box<Call>,
        /// This rank.
        name: String,
        /// The group.
        group: String,
        /// How long the operation waited.
        waited: Duration,
        /// Who has not done their part, and when they were last heard.
        missing: String,
    },
    /// A peer's process ended, crashed or became unreachable. Remedy: restart the job from its last checkpoint.
    #[error("{name}: lost {peer} during {during}: {how}")]
    PeerLost {
        /// This rank.
        name: String,
        /// The peer that was lost.
        peer: String,
        /// Its rank.
        peer_rank: Rank,
        /// The operation that noticed.
        during: String,
        /// What was seen: connection reset, end of stream.
        how: String,
    },
    /// A peer dropped its side of the group while this rank waited for it.
    #[error(
        "{name}: {peer} left group {group:?} while {during} waited for it; every rank must issue the same operations \
         before it drops the group"
    )]
    PeerLeft {
        /// This rank.
        name: String,
        /// The peer that left.
        peer: String,
        /// The group.
        group: String,
        /// The operation that waits.
        during: String,
    },
    /// The group was aborted by another rank or by an earlier failure.
    #[error("group {group:?} was aborted by {origin}: {cause}")]
    Aborted {
        /// The group.
        group: String,
        /// Who failed first.
        origin: String,
        /// Why.
        cause: String,
        /// Whether a restart helps against that.
        kind: FailureKind,
    },
    /// Buffers of one call have lengths that do not fit together.
    #[error("{what}: got {got} elements, expected {expected}; {remedy}")]
    Length {
        /// Which buffer of which operation.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length it should have.
        expected: usize,
        /// How to mend it.
        remedy: &'static str,
    },
    /// Slices of one call have different element types.
    #[error("slice {index} holds {got}, but slice 0 holds {expected}; one call reduces one data type")]
    MixedTypes {
        /// The first slice that differs.
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
    /// A tensor does not fit the plan of a fused all-reduce.
    #[error("tensor {index} of a fused all-reduce: {problem}; push every tensor of the plan once a step")]
    Tensor {
        /// Its index.
        index: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A compression cannot be used as it is set.
    #[error("compression {name}: {problem}")]
    Compression {
        /// Its name.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A root or peer is not a member.
    #[error("{what} {given} is outside the group, whose ranks are 0..{world_size}")]
    RankOutside {
        /// What the rank was given as.
        what: &'static str,
        /// The rank.
        given: u32,
        /// Size of the group.
        world_size: usize,
    },
    /// A name was not recognised.
    #[error("{what} {given:?} is not known; give {expected}")]
    UnknownName {
        /// What was named.
        what: &'static str,
        /// What was given.
        given: String,
        /// What would be accepted.
        expected: &'static str,
    },
    /// A group cannot have this size.
    #[error("a group of {given} ranks was asked for; give at least 1 and at most {max}")]
    GroupSize {
        /// The size that was asked for.
        given: usize,
        /// The largest size.
        max: usize,
    },
    /// A listening or connecting socket failed while the group was formed.
    #[error("{name}: cannot {action} {address} while forming group {group:?}: {source}")]
    Connect {
        /// This rank.
        name: String,
        /// What was tried.
        action: &'static str,
        /// The address.
        address: String,
        /// The group.
        group: String,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
    /// Members of a group that is being formed were given different options.
    #[error(
        "{what} of group {group:?} differs: {mine} on {here}, {theirs} on {there}; give every process the same number of \
         devices and the same options"
    )]
    Disagreement {
        /// The group.
        group: String,
        /// The option.
        what: &'static str,
        /// This task.
        here: String,
        /// Its value.
        mine: Box<str>,
        /// The other task.
        there: String,
        /// The other's value.
        theirs: Box<str>,
    },
    /// Members of a group whose transport was given by the caller are to be connected in another way.
    #[error(
        "{what} connects processes of group {group:?} anew, which needs {needs}; make the group by ProcessGroup::from_env or \
         ProcessGroup::join, or connect the members yourself and use ProcessGroup::with_transport"
    )]
    NotConnectable {
        /// What was called.
        what: &'static str,
        /// The group.
        group: String,
        /// What is missing.
        needs: &'static str,
    },
    /// The transport that was asked for is not in this build.
    #[error(
        "transport {given} needs the cargo feature {feature:?} of distribute-collectives, which is off in this build"
    )]
    NotBuilt {
        /// The transport.
        given: &'static str,
        /// The feature.
        feature: &'static str,
    },
    /// A device refused, or failed.
    #[error("{name}: {source}")]
    Device {
        /// This rank.
        name: String,
        /// What the device said.
        source: Arc<distribute_device::Error>,
    },
    /// NCCL refused, or failed.
    #[error("{name}: {action} by NCCL failed: {problem}; NCCL_DEBUG=INFO makes it say more")]
    Nccl {
        /// This rank.
        name: String,
        /// What was asked of it.
        action: String,
        /// What it said.
        problem: String,
    },
    /// Finding or joining the other members failed.
    #[error(transparent)]
    Cluster(#[from] Arc<distribute_cluster::Error>),
}

impl From<distribute_cluster::Error> for Error {
    fn from(error: distribute_cluster::Error) -> Self {
        Error::Cluster(Arc::new(error))
    }
}

/// Who an error concerns, and thereby what helps against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scope {
    /// The caller's own arguments or configuration.
    Caller,
    /// One peer.
    Peer,
    /// The whole group.
    Group,
}

impl Error {
    /// Who the error concerns.
    pub fn scope(&self) -> Scope {
        match self {
            Error::PeerLost { .. } | Error::PeerLeft { .. } => Scope::Peer,
            Error::Mismatch { .. }
            | Error::Parts { .. }
            | Error::Deadline { .. }
            | Error::Aborted { .. }
            | Error::Nccl { .. }
            | Error::Connect { .. } => Scope::Group,
            _ => Scope::Caller,
        }
    }

    /// Whether the same program may succeed when it is started again.
    pub fn is_retryable(&self) -> bool {
        self.failure_kind() == FailureKind::Retryable
    }

    /// Whether a restart helps; where the group was aborted, whether it helps against the first cause.
    pub fn failure_kind(&self) -> FailureKind {
        match self {
            Error::PeerLost { .. } | Error::PeerLeft { .. } | Error::Deadline { .. } | Error::Connect { .. } => {
                FailureKind::Retryable
            }
            Error::Aborted { kind, .. } => *kind,
            Error::UnknownName { .. } | Error::Disagreement { .. } | Error::NotBuilt { .. } => {
                FailureKind::Configuration
            }
            Error::Cluster(error) => error.failure_kind(),
            _ => FailureKind::Permanent,
        }
    }

    /// The abort of a group, with the first cause alone: a cause that is an abort itself, told on by one that was aborted, is
    /// replaced by what it tells of.
    pub(crate) fn aborted(group: &str, origin: &str, cause: &str, kind: FailureKind) -> Error {
        let (origin, cause) = match cause.rsplit_once(ABORTED_BY).and_then(|(_, told)| told.split_once(": ")) {
            Some((first, cause)) => (first, cause),
            None => (origin, cause),
        };
        let [origin, cause] = [origin, cause].map(|text| printable(text, MAX_CAUSE));
        Error::Aborted { group: group.to_owned(), origin, cause, kind }
    }

    /// What the other processes of a group are told of an error: its kind, who failed first, and why.
    pub(crate) fn notice(&self, name: &str) -> String {
        let kind = self.failure_kind().code();
        match self {
            Error::Aborted { origin, cause, .. } => format!("{kind}\n{origin}\n{cause}"),
            other => format!("{kind}\n{name}\n{other}"),
        }
    }

    /// The abort that another process, called `peer`, gives notice of; a transport of the program's own may say a reason alone.
    pub(crate) fn noticed(group: &str, peer: &str, notice: &str) -> Error {
        let mut lines = notice.splitn(3, '\n');
        match (lines.next().map(str::parse), lines.next(), lines.next()) {
            (Some(Ok(kind)), Some(origin), Some(cause)) => {
                Error::aborted(group, origin, cause, FailureKind::from_code(kind))
            }
            _ => Error::aborted(group, peer, notice, FailureKind::Retryable),
        }
    }
}

/// What stands before the name of whoever has aborted a group.
const ABORTED_BY: &str = " was aborted by ";

/// The longest cause that is passed on, in characters.
const MAX_CAUSE: usize = 2000;

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abort_is_told_once_with_its_first_cause_and_kind() {
        let first = Error::UnknownName { what: "transport", given: "tpc".to_owned(), expected: "tcp" };
        let mut told = Error::noticed("world", "worker:1", &first.notice("worker:1"));
        // Whoever was aborted tells the next, by notice or in words.
        for peer in ["worker:2", "worker:3"] {
            told = Error::noticed("inner", peer, &told.notice(peer));
        }
        let words = format!("worker 3 failed: {told}");
        for error in [told, Error::aborted("inner", "worker:3", &words, FailureKind::Configuration)] {
            assert_eq!(error.failure_kind(), FailureKind::Configuration);
            assert_eq!(error.to_string(), format!("group \"inner\" was aborted by worker:1: {first}"));
        }
        let lost = Error::noticed("g", "worker:1", "the power went\nINFO all is well");
        assert_eq!(lost.to_string(), "group \"g\" was aborted by worker:1: the power went\\nINFO all is well");
        assert!(lost.is_retryable());
    }
}

//! Transports: byte streams between the processes of a group.
//!
//! A [`Transport`] connects one member with every other one by ordered, reliable byte streams. It knows neither
//! algorithms nor data types; a user's own plugs in by implementing it and calling
//! [`ProcessGroup::with_transport`](crate::ProcessGroup::with_transport).

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use distribute_cluster::secret::{JOB_REMEDY, Problem};
use distribute_cluster::{JobSecret, JobTls};

use crate::schedule::Link;

mod abort_reason;
mod connect;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(feature = "grpc")]
pub(crate) mod grpc;
mod listen;
mod nonce;
mod poll;
mod shm;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;
#[cfg(all(test, feature = "tls"))]
mod tls_tests;

pub use abort_reason::AbortReason;
pub use connect::connect;
pub(crate) use connect::{GroupIdentity, open};
pub(crate) use listen::{join_host, listen, new_nonce};
pub(crate) use nonce::Nonce;

/// Bytes to send to one peer: the parts, one after another.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// The receiving member.
    pub to: usize,
    /// The bytes. A transport may advance these slices as it goes.
    pub parts: Vec<IoSlice<'a>>,
}

/// Bytes to receive from one peer, and their destination.
pub struct Incoming<'a> {
    /// The sending member.
    pub from: usize,
    /// Takes the bytes in order.
    pub sink: &'a mut dyn Sink,
}

/// Destination of received bytes.
pub trait Sink {
    /// Returns memory for the next bytes; empty exactly when everything has arrived.
    fn space(&mut self) -> &mut [u8];

    /// Takes over the first `len` bytes of [`space`](Sink::space), which the transport has filled.
    ///
    /// # Errors
    /// [`UnexpectedBytes`] where the bytes are not what this member expects; the transport stops and returns
    /// [`TransportError::Refused`].
    fn advance(&mut self, len: usize) -> Result<(), UnexpectedBytes>;
}

/// Error of a [`Sink`] that got bytes of another call; the sink keeps the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes do not belong to the call that was expected")]
pub struct UnexpectedBytes;

/// Limits of an exchange: its deadline, how it waits, and what interrupts it.
#[derive(Clone, Copy, Debug)]
pub struct Timeout<'a> {
    /// When the exchange fails with [`TransportError::Deadline`].
    pub deadline: Instant,
    /// How long to poll without sleeping when nothing moves: short waits then cost no context switch.
    pub spin: Duration,
    /// Set by another thread to end the exchange early; looked at least every [`Timeout::SLICE`].
    pub interrupted: &'a AtomicBool,
}

impl Timeout<'_> {
    /// The longest sleep between two looks at `interrupted`.
    pub const SLICE: Duration = Duration::from_millis(50);

    /// Returns how long to sleep next, at most [`SLICE`](Timeout::SLICE).
    ///
    /// # Errors
    /// [`TransportError::Interrupted`] once another thread has interrupted the exchange, [`TransportError::Deadline`]
    /// once the deadline has passed.
    pub fn next_sleep(&self) -> Result<Duration, TransportError> {
        if self.interrupted.load(Ordering::Acquire) {
            return Err(TransportError::Interrupted);
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(TransportError::Deadline);
        }
        Ok(left.min(Self::SLICE))
    }
}

/// Looks at the limits of an exchange while bytes move; one that waits looks at them before it sleeps.
#[derive(Default)]
pub(crate) struct Progress {
    /// Turns since the last look at the clock.
    turns: u32,
    /// When control messages were last read.
    controlled: Option<Instant>,
}

impl Progress {
    /// Turns between two looks at the clock. Short messages take fewer.
    const UNTIMED: u32 = 8;

    /// Counts a turn in which bytes moved. Returns whether it is time to read control messages, which is once in
    /// [`Timeout::SLICE`], or the error of [`Timeout::next_sleep`].
    pub(crate) fn turn(&mut self, timeout: &Timeout<'_>) -> Result<bool, TransportError> {
        // Relaxed: on an interruption nothing but the flag is read.
        if timeout.interrupted.load(Ordering::Relaxed) {
            return Err(TransportError::Interrupted);
        }
        self.turns = (self.turns + 1) % Progress::UNTIMED;
        if self.turns != 0 {
            return Ok(false);
        }
        timeout.next_sleep()?;
        let now = Instant::now();
        let is_due = now - *self.controlled.get_or_insert(now) >= Timeout::SLICE;
        if is_due {
            self.controlled = Some(now);
        }
        Ok(is_due)
    }
}

/// Why an exchange ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The deadline passed.
    #[error("the deadline passed")]
    Deadline,
    /// [`Timeout::interrupted`] was set.
    #[error("interrupted")]
    Interrupted,
    /// A peer's connection ended without notice.
    #[error("lost member {peer}: {how}")]
    Lost {
        /// The member.
        peer: usize,
        /// The observation from which it follows.
        how: String,
    },
    /// A peer has closed its side properly.
    #[error("member {peer} has left")]
    Left {
        /// The member.
        peer: usize,
    },
    /// A peer has aborted the group.
    #[error("member {peer} aborted, because of {}: {}", reason.origin, reason.cause)]
    Aborted {
        /// The member.
        peer: usize,
        /// Its reason.
        reason: Box<AbortReason>,
    },
    /// The sink of a peer's bytes refused them.
    #[error("bytes of member {peer} were refused")]
    Refused {
        /// The member.
        peer: usize,
    },
}

/// Ordered byte streams between this member and every other one.
///
/// Not promised: fairness between peers, or that bytes of different peers arrive in any relative order.
///
/// # Examples
/// Queues between threads that stand for processes:
/// ```
/// use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
/// use std::time::Instant;
///
/// use distribute_collectives::transport::{AbortReason, Incoming, Outgoing, Timeout, Transport, TransportError};
/// use distribute_collectives::{Options, ProcessGroup, ReduceOp};
///
/// /// A queue to and from each other member.
/// struct Queues {
///     to: Vec<Sender<Vec<u8>>>,
///     from: Vec<Receiver<Vec<u8>>>,
///     /// What has been taken out of a queue and not used yet.
///     rest: Vec<Vec<u8>>,
/// }
///
/// impl Transport for Queues {
///     fn name(&self) -> &'static str {
///         "queues"
///     }
///
///     fn exchange(
///         &mut self,
///         outgoing: &mut [Outgoing<'_>],
///         incoming: &mut [Incoming<'_>],
///         timeout: &Timeout<'_>,
///     ) -> Result<(), TransportError> {
///         for Outgoing { to, parts } in outgoing {
///             // Queues without a limit: sending never waits, so two members that send to each other cannot block.
///             let bytes = parts.drain(..).flat_map(|part| part.to_vec()).collect();
///             self.to[*to].send(bytes).map_err(|_| TransportError::Left { peer: *to })?;
///         }
///         for Incoming { from, sink } in incoming {
///             let (peer, rest) = (*from, &mut self.rest[*from]);
///             while !sink.space().is_empty() {
///                 if rest.is_empty() {
///                     match self.from[peer].recv_timeout(timeout.next_sleep()?) {
///                         Ok(bytes) => *rest = bytes,
///                         Err(RecvTimeoutError::Timeout) => continue,
///                         Err(RecvTimeoutError::Disconnected) => return Err(TransportError::Left { peer }),
///                     }
///                 }
///                 let space = sink.space();
///                 let len = space.len().min(rest.len());
///                 space[..len].copy_from_slice(&rest[..len]);
///                 rest.drain(..len);
///                 sink.advance(len).map_err(|_| TransportError::Refused { peer })?;
///             }
///         }
///         Ok(())
///     }
///
///     fn abort(&mut self, _reason: &AbortReason) {
///         // Peers see the queues end.
///         self.to.clear();
///     }
///
///     fn last_heard(&self, _peer: usize) -> Option<Instant> {
///         None
///     }
/// }
///
/// /// Queues between all of `members`, also to themselves, which are not used.
/// fn connect(members: usize) -> Vec<Queues> {
///     let mut all: Vec<Queues> =
///         (0..members)
///             .map(|_| Queues { to: Vec::new(), from: Vec::new(), rest: vec![Vec::new(); members] })
///             .collect();
///     for from in 0..members {
///         for to in 0..members {
///             let (sender, receiver) = channel();
///             all[from].to.push(sender);
///             all[to].from.push(receiver);
///         }
///     }
///     all
/// }
///
/// let names: Vec<String> = (0..3).map(|rank| format!("rank {rank}")).collect();
/// std::thread::scope(|scope| {
///     for (rank, queues) in connect(3).into_iter().enumerate() {
///         let names = names.clone();
///         scope.spawn(move || {
///             let options = Options::default();
///             let group = ProcessGroup::with_transport(Box::new(queues), rank, 1, names, &options)?.remove(0);
///             let mut values = [rank as f32; 1000];
///             group.all_reduce(&mut values, ReduceOp::Sum)?;
///             assert_eq!(values, [3.0; 1000]);
///             Ok::<(), distribute_collectives::Error>(())
///         });
///     }
/// });
/// ```
pub trait Transport: Send {
    /// Returns the name for reports: `tcp`, or `shm+tcp` where it uses both.
    fn name(&self) -> &'static str;

    /// Sends and receives everything given, all at the same time, so that two members that send to each other cannot
    /// block one another.
    ///
    /// # Errors
    /// Any [`TransportError`]. After [`TransportError::Deadline`] the same exchange can be continued: parts and sinks
    /// say how far it got. After any other error the transport is only good for [`abort`](Transport::abort).
    fn exchange(
        &mut self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        timeout: &Timeout<'_>,
    ) -> Result<(), TransportError>;

    /// Tells every peer that the group has failed and why; never blocks for long and never fails.
    fn abort(&mut self, reason: &AbortReason);

    /// Tells every peer that this member waits in the call with this sequence number; never blocks and never fails.
    ///
    /// Members that wait for each other can so tell who is missing altogether. Without it, errors name direct peers
    /// only.
    fn announce(&mut self, sequence: u64) {
        let _ = sequence;
    }

    /// Returns the last call in which a peer has announced that it waits.
    fn announced(&self, peer: usize) -> Option<u64> {
        let _ = peer;
        None
    }

    /// Returns what its connections cost; the same on all members, who choose algorithms by it.
    fn link(&self) -> Link {
        Link::TCP
    }

    /// Returns the host of each member, where the transport knows; the same list on all members.
    fn hosts(&self) -> Option<&[usize]> {
        None
    }

    /// Returns the address by which peers reach this host, where the transport knows it: sub-groups listen there.
    fn local_host(&self) -> Option<String> {
        None
    }

    /// Returns the kind that connects sub-groups and pairs of members: the one that [`connect()`] was given, alike on
    /// all members. `None`, the default, stands for a transport of another origin, whose group cannot be split between
    /// processes. A transport that wraps another one returns that one's kind.
    fn kind(&self) -> Option<TransportKind> {
        None
    }

    /// Returns the secret that its connections have proved, where there is one: those of sub-groups prove it too.
    fn secret(&self) -> Option<JobSecret> {
        None
    }

    /// Returns the certificate by which its connections use TLS, where they do: those of sub-groups use it too.
    fn tls(&self) -> Option<JobTls> {
        None
    }

    /// Returns when the last byte of this peer arrived; `None` before the first.
    fn last_heard(&self, peer: usize) -> Option<Instant>;
}

/// The transport of a group that has been left: every exchange fails.
pub(crate) struct Closed;

impl Transport for Closed {
    fn name(&self) -> &'static str {
        "closed"
    }

    fn exchange(
        &mut self,
        _outgoing: &mut [Outgoing<'_>],
        _incoming: &mut [Incoming<'_>],
        _timeout: &Timeout<'_>,
    ) -> Result<(), TransportError> {
        Err(TransportError::Interrupted)
    }

    fn abort(&mut self, _reason: &AbortReason) {}

    fn last_heard(&self, _peer: usize) -> Option<Instant> {
        None
    }
}

/// Which members share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    Never,
    WherePossible,
    Everywhere,
}

impl Sharing {
    /// Returns the kind of a transport that shares memory in this way.
    pub(crate) fn kind(self) -> TransportKind {
        match self {
            Sharing::Never => TransportKind::Tcp,
            Sharing::WherePossible => TransportKind::Auto,
            Sharing::Everywhere => TransportKind::Shm,
        }
    }
}

/// Why members could not be connected.
#[derive(Debug)]
pub(crate) struct ConnectError {
    pub(crate) action: &'static str,
    pub(crate) address: String,
    pub(crate) source: std::io::Error,
}

/// A connection that was refused because the two sides do not have the same secret, or do not accept each other's
/// certificates: a sentence, with a remedy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Unproved(pub(crate) String);

impl Unproved {
    pub(crate) fn error(problem: &Problem) -> std::io::Error {
        match problem {
            // Another group's listener, or none of this kind.
            Problem::Other { .. } => std::io::Error::other(problem.to_string()),
            problem if problem.is_passing() => std::io::Error::other(problem.to_string()),
            problem => std::io::Error::other(Unproved(format!("{problem}; {}", problem.remedy(JOB_REMEDY)))),
        }
    }

    /// Returns whether an error is of this kind, so that no later attempt succeeds.
    #[cfg(feature = "grpc")]
    pub(crate) fn is(error: &std::io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Unproved>())
    }
}

/// By what members recognise each other on new connections.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proofs {
    /// The job's secret, if it has one.
    pub(crate) secret: Option<JobSecret>,
    /// The certificate of this process, if the job uses TLS.
    pub(crate) tls: Option<JobTls>,
}

impl ConnectError {
    pub(crate) fn into_error(self, name: &str, group: &str) -> crate::Error {
        if let Some(Unproved(reason)) = self.source.get_ref().and_then(|inner| inner.downcast_ref()) {
            return crate::Error::Secret {
                name: name.to_owned(),
                address: self.address,
                group: group.to_owned(),
                reason: reason.clone(),
            };
        }
        crate::Error::Connect {
            name: name.to_owned(),
            action: self.action,
            address: self.address,
            group: group.to_owned(),
            source: std::sync::Arc::new(self.source),
        }
    }
}

/// Which transport connects processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportKind {
    /// The fastest that each pair of members can use: shared memory on one host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory between processes of one host; an error where a pair cannot share any.
    Shm,
    /// Plain TCP sockets.
    Tcp,
    /// gRPC over HTTP/2; needs the cargo feature `grpc`.
    Grpc,
}

impl TransportKind {
    /// The lower-case name, as the environment spells it.
    pub const fn name(self) -> &'static str {
        match self {
            TransportKind::Auto => "auto",
            TransportKind::Shm => "shm",
            TransportKind::Tcp => "tcp",
            TransportKind::Grpc => "grpc",
        }
    }
}

impl std::str::FromStr for TransportKind {
    type Err = crate::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        [TransportKind::Auto, TransportKind::Shm, TransportKind::Tcp, TransportKind::Grpc]
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| crate::Error::UnknownName {
                what: "transport",
                given: name.to_owned(),
                expected: "auto, shm, tcp or grpc",
            })
    }
}

//! What carries bytes between processes.
//!
//! A [`Transport`] connects one member with every other one by ordered, reliable byte streams. It knows neither
//! algorithms nor data types; a user's own plugs in by implementing it and calling
//! [`ProcessGroup::with_transport`](crate::ProcessGroup::with_transport).

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::schedule::Link;

mod abort_reason;
#[cfg(feature = "grpc")]
pub(crate) mod grpc;
mod nonce;
mod shm;
pub(crate) mod tcp;

pub use abort_reason::AbortReason;
pub(crate) use nonce::Nonce;

/// Bytes for one peer: the parts, one after another.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// The receiving member.
    pub to: usize,
    /// What to send. A transport may advance these slices as it goes.
    pub parts: Vec<IoSlice<'a>>,
}

/// Bytes from one peer, and where they go.
pub struct Incoming<'a> {
    /// The sending member.
    pub from: usize,
    /// Takes the bytes in order.
    pub sink: &'a mut dyn Sink,
}

/// Where received bytes go.
pub trait Sink {
    /// Memory for the next bytes; empty exactly when everything has arrived.
    fn space(&mut self) -> &mut [u8];

    /// Says that the first `len` bytes of [`space`](Sink::space) have been filled.
    ///
    /// # Errors
    /// The bytes are not what this member expects; the transport stops and returns [`TransportError::Refused`].
    fn advance(&mut self, len: usize) -> Result<(), Refusal>;
}

/// The sink has refused what it was given; it keeps the reason.
#[derive(Debug)]
pub struct Refusal;

/// How long an exchange may take, and what interrupts it.
#[derive(Clone, Copy, Debug)]
pub struct Patience<'a> {
    /// When to give up.
    pub deadline: Instant,
    /// How long to poll without sleeping when nothing moves: short waits then cost no context switch.
    pub spin: Duration,
    /// Set by another thread to end the exchange early; looked at least every [`Patience::SLICE`].
    pub interrupted: &'a AtomicBool,
}

impl Patience<'_> {
    /// The longest sleep between two looks at `interrupted`.
    pub const SLICE: Duration = Duration::from_millis(50);

    /// How long to sleep next; an error when the time is up or the exchange was interrupted.
    ///
    /// # Errors
    /// [`TransportError::Interrupted`] and [`TransportError::Deadline`].
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

/// Why an exchange ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The deadline passed.
    #[error("the deadline passed")]
    Deadline,
    /// [`Patience::interrupted`] was set.
    #[error("interrupted")]
    Interrupted,
    /// A peer is gone without a word.
    #[error("lost member {peer}: {how}")]
    Lost {
        /// The member.
        peer: usize,
        /// What was seen.
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
/// use distribute_collectives::transport::{AbortReason, Incoming, Outgoing, Patience, Transport, TransportError};
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
///         patience: &Patience<'_>,
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
///                     match self.from[peer].recv_timeout(patience.next_sleep()?) {
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
/// /// Queues between all of `members`, also to themselves, which nobody uses.
/// fn connect(members: usize) -> Vec<Queues> {
///     let mut all: Vec<Queues> =
///         (0..members).map(|_| Queues { to: Vec::new(), from: Vec::new(), rest: vec![Vec::new(); members] }).collect();
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
///             let group = ProcessGroup::with_transport(Box::new(queues), rank, 1, names, &Options::default())?.remove(0);
///             let mut values = [rank as f32; 1000];
///             group.all_reduce(&mut values, ReduceOp::Sum)?;
///             assert_eq!(values, [3.0; 1000]);
///             Ok::<(), distribute_collectives::Error>(())
///         });
///     }
/// });
/// ```
pub trait Transport: Send {
    /// A word for reports: `tcp`, or `shm+tcp` where it has several ways.
    fn name(&self) -> &'static str;

    /// Sends and receives everything given, all at the same time, so that two members that send to each other cannot
    /// block one another.
    ///
    /// # Errors
    /// Any [`TransportError`]. After [`TransportError::Deadline`] the same exchange can be continued: parts and sinks say how
    /// far it has come. After any other error the transport is only good for [`abort`](Transport::abort).
    fn exchange(
        &mut self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        patience: &Patience<'_>,
    ) -> Result<(), TransportError>;

    /// Tells every peer that the group has failed and why; never blocks for long and never fails.
    fn abort(&mut self, reason: &AbortReason);

    /// Tells every peer that this member waits in the call with this sequence number; never blocks and never fails.
    ///
    /// Members that wait for each other can so tell who is missing altogether. Without it, errors name direct peers only.
    fn announce(&mut self, sequence: u64) {
        let _ = sequence;
    }

    /// The last call in which a peer has said that it waits.
    fn announced(&self, peer: usize) -> Option<u64> {
        let _ = peer;
        None
    }

    /// What its connections cost; the same on all members, who choose algorithms by it.
    fn link(&self) -> Link {
        Link::TCP
    }

    /// For each member the host that it is on, where the transport knows; the same list on all members.
    fn hosts(&self) -> Option<&[usize]> {
        None
    }

    /// The address of this host by which peers reach it, where the transport knows it: sub-groups listen there.
    fn local_host(&self) -> Option<String> {
        None
    }

    /// When the last byte of this peer arrived; `None` before the first.
    fn last_heard(&self, peer: usize) -> Option<Instant>;
}

/// What is left of connections when a group has been left.
pub(crate) struct Closed;

impl Transport for Closed {
    fn name(&self) -> &'static str {
        "closed"
    }

    fn exchange(
        &mut self,
        _outgoing: &mut [Outgoing<'_>],
        _incoming: &mut [Incoming<'_>],
        _patience: &Patience<'_>,
    ) -> Result<(), TransportError> {
        Err(TransportError::Interrupted)
    }

    fn abort(&mut self, _reason: &AbortReason) {}

    fn last_heard(&self, _peer: usize) -> Option<Instant> {
        None
    }
}

/// Connects member `rank` with the listeners at `addresses`, for groups that find each other by their own means.
///
/// Every member calls this at about the same time with the same addresses, in rank order, and its own listener. Callers with
/// another list of addresses are turned away; two groups at equal addresses cannot be told apart.
///
/// # Errors
/// [`Error::Connect`](crate::Error::Connect) where not every member was connected before the deadline,
/// [`Error::NotBuilt`](crate::Error::NotBuilt) for gRPC without its cargo feature.
pub fn connect(
    kind: TransportKind,
    rank: usize,
    addresses: &[String],
    listener: std::net::TcpListener,
    deadline: Instant,
) -> crate::Result<Box<dyn Transport>> {
    let group = ("of explicit addresses", Nonce::of_addresses(addresses));
    open(kind, rank, addresses, listener, group, &format!("rank {rank}"), deadline)
}

/// As [`connect`], for a named group.
pub(crate) fn open(
    kind: TransportKind,
    rank: usize,
    addresses: &[String],
    listener: std::net::TcpListener,
    (group, id): (&str, Nonce),
    name: &str,
    deadline: Instant,
) -> crate::Result<Box<dyn Transport>> {
    let failed = |error: ConnectError| error.into_error(name, group);
    match kind {
        #[cfg(feature = "grpc")]
        TransportKind::Grpc => {
            Ok(Box::new(grpc::GrpcTransport::connect(rank, addresses, listener, id, deadline).map_err(failed)?))
        }
        #[cfg(not(feature = "grpc"))]
        TransportKind::Grpc => Err(crate::Error::NotBuilt { given: "grpc", feature: "grpc" }),
        TransportKind::Auto | TransportKind::Shm | TransportKind::Tcp => {
            let sharing = match kind {
                TransportKind::Shm => Sharing::Everywhere,
                TransportKind::Tcp => Sharing::Never,
                _ => Sharing::WherePossible,
            };
            let transport = tcp::TcpTransport::connect(rank, addresses, &listener, id, sharing, deadline);
            Ok(Box::new(transport.map_err(failed)?))
        }
    }
}

/// Which members share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    Never,
    WherePossible,
    Everywhere,
}

/// Why members could not be connected.
#[derive(Debug)]
pub(crate) struct ConnectError {
    pub(crate) action: &'static str,
    pub(crate) address: String,
    pub(crate) source: std::io::Error,
}

impl ConnectError {
    pub(crate) fn into_error(self, name: &str, group: &str) -> crate::Error {
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

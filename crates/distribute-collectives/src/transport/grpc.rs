//! gRPC between processes: one stream of frames in each direction for each pair of members.
//!
//! The streams live on an event loop of their own, which the thread that exchanges runs itself. Both meet at bounded
//! queues, so a slow reader slows its sender down instead of filling memory.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use distribute_cluster::grpc::Inbox;
use distribute_cluster::threads::EventLoop;
use distribute_cluster::{JobSecret, JobTls};
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, error::TryRecvError};

use self::frames::Frame;
use self::outbox::Outbox;
use self::wire::{Abort, frame::Kind};
use super::{
    AbortReason, ConnectError, Incoming, Nonce, Outgoing, Progress, Proofs, Timeout, Transport, TransportError,
    TransportKind,
};
use crate::schedule::Link;

mod connect;
mod frames;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod outbox;
#[cfg(test)]
mod tests;

/// The messages of the service.
#[expect(unreachable_pub, reason = "generated from the protocol file")]
mod wire {
    include!("../../proto/distribute.v1.rs");
}

/// Bytes of one frame: large enough that its cost is that of its bytes, small enough that caches hold it.
const FRAME_BYTES: usize = 512 << 10;

/// Frames that wait on either side of a stream.
const QUEUED_FRAMES: usize = 8;

/// Bytes taken from one peer before the others are served: a full queue of them.
const TURN_BYTES: usize = QUEUED_FRAMES * FRAME_BYTES;

/// How long to wait for the reason, if the stream to a peer takes no frames any more.
const REASON_GRACE: Duration = Duration::from_millis(200);

/// Limit for emptying the queues when a group is dropped.
const QUEUES: Duration = Duration::from_millis(500);

/// Limit for sending the last frames when a group is dropped.
const FLUSH: Duration = Duration::from_millis(50);

/// Time that connecting may take beyond its own deadline.
const MARGIN: Duration = Duration::from_millis(1500);

/// Streams to every other member.
pub(crate) struct GrpcTransport {
    peers: Vec<Option<Peer>>,
    bell: Arc<Bell>,
    proofs: Proofs,
    aborted: bool,
    event_loop: EventLoop,
}

/// One peer's queues.
struct Peer {
    outbox: Outbox,
    inbox: mpsc::Receiver<Bytes>,
    /// The rest of the last frame.
    rest: Bytes,
    state: Arc<Mutex<PeerState>>,
}

/// Control messages received from a peer.
#[derive(Default)]
struct PeerState {
    heard: Option<Instant>,
    waiting: Option<u64>,
    aborted: Option<Box<AbortReason>>,
    left: bool,
    /// How the stream ended without notice.
    lost: Option<String>,
}

impl PeerState {
    /// Returns whether nothing more comes from the peer.
    fn is_over(&self) -> bool {
        self.aborted.is_some() || self.left || self.lost.is_some()
    }
}

/// Signals that the exchange may be able to continue.
#[derive(Default)]
struct Bell {
    rings: AtomicU64,
    rung: Notify,
}

impl Bell {
    fn ring(&self) {
        // What rings has written before, and the exchange looks at it after it has seen the count.
        self.rings.fetch_add(1, Ordering::Release);
        self.rung.notify_one();
    }

    fn count(&self) -> u64 {
        self.rings.load(Ordering::Acquire)
    }

    /// Waits until the bell has been rung since `seen`.
    async fn wait(&self, seen: u64, time: Duration) {
        let deadline = tokio::time::Instant::now() + time;
        while self.count() == seen {
            if tokio::time::timeout_at(deadline, self.rung.notified()).await.is_err() {
                return;
            }
        }
    }
}

impl GrpcTransport {
    /// Connects member `rank` with all others: it calls those before it and is called by those after it. Both
    /// sides of each connection show their certificates and prove the secret, as far as there are both.
    pub(crate) fn connect(
        rank: usize,
        addresses: &[String],
        listener: TcpListener,
        (group, proofs): (Nonce, Proofs),
        deadline: Instant,
    ) -> Result<GrpcTransport, ConnectError> {
        let own = || addresses.get(rank).cloned().unwrap_or_default();
        let failed = |action| move |source| ConnectError { action, address: own(), source };
        listener.set_nonblocking(true).map_err(failed("listen on"))?;
        let event_loop = EventLoop::start("distribute-grpc").map_err(failed("start the event loop of"))?;
        let bell = Arc::new(Bell::default());
        let identity = (group, proofs.clone());
        let connecting = connect::connect(rank, addresses.to_vec(), listener, identity, bell.clone(), deadline);
        let limit = deadline.saturating_duration_since(Instant::now()).saturating_add(MARGIN);
        let peers = event_loop.drive(async { tokio::time::timeout(limit, connecting).await });
        let peers = peers.unwrap_or_else(|_| Err(connect::missing(own())))?;
        Ok(GrpcTransport { peers, bell, proofs, aborted: false, event_loop })
    }

    fn outboxes(&self) -> impl Iterator<Item = &Outbox> {
        self.peers.iter().flatten().map(|peer| &peer.outbox)
    }
}

impl Transport for GrpcTransport {
    fn name(&self) -> &'static str {
        "grpc"
    }

    fn link(&self) -> Link {
        Link::GRPC
    }

    fn exchange(
        &mut self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        timeout: &Timeout<'_>,
    ) -> Result<(), TransportError> {
        let GrpcTransport { peers, bell, event_loop, .. } = self;
        exchange(event_loop, peers, bell, (outgoing, incoming), timeout)
    }

    fn abort(&mut self, reason: &AbortReason) {
        if !std::mem::replace(&mut self.aborted, true) {
            let AbortReason { origin, cause, kind } = reason.tidied();
            let abort = Abort { origin, cause, kind: kind.code() };
            self.outboxes().for_each(|outbox| outbox.abort(abort.clone()));
            self.event_loop.hand_over();
        }
    }

    fn announce(&mut self, sequence: u64) {
        self.outboxes().for_each(|outbox| outbox.announce(sequence));
    }

    fn announced(&self, peer: usize) -> Option<u64> {
        lock(&self.peers.get(peer)?.as_ref()?.state).waiting
    }

    fn kind(&self) -> Option<TransportKind> {
        Some(TransportKind::Grpc)
    }

    fn secret(&self) -> Option<JobSecret> {
        self.proofs.secret.clone()
    }

    fn tls(&self) -> Option<JobTls> {
        self.proofs.tls.clone()
    }

    fn last_heard(&self, peer: usize) -> Option<Instant> {
        lock(&self.peers.get(peer)?.as_ref()?.state).heard
    }
}

impl Drop for GrpcTransport {
    fn drop(&mut self) {
        let outboxes: Vec<Outbox> = self.peers.drain(..).flatten().map(|peer| peer.outbox).collect();
        if !self.aborted {
            outboxes.iter().for_each(Outbox::leave);
        }
        let (bell, event_loop) = (&self.bell, &self.event_loop);
        event_loop.drive(async {
            // What is queued still goes out, but not for long.
            let deadline = Instant::now() + QUEUES;
            while !outboxes.iter().all(Outbox::is_done) && Instant::now() < deadline {
                bell.wait(bell.count(), Duration::from_millis(5)).await;
            }
            drop(outboxes);
            // A message that was taken out of its queue, such as the reason of an abort, may not have reached its
            // socket: connections end by themselves when it has, and both sides have said all.
            let deadline = Instant::now() + FLUSH;
            while event_loop.handle().metrics().num_alive_tasks() > 0 && Instant::now() < deadline {
                bell.wait(bell.count(), Duration::from_millis(2)).await;
            }
        });
    }
}

/// Sends and receives until both are done, and sockets have taken what was sent, as those of plain TCP have: a member
/// whose last exchange is over may leave, and takes its queues with it.
///
/// The event loop runs between two looks at the queues. What is received is taken, and a user's reduction called,
/// outside of it: a function that waits for an event loop of its own would panic within another.
fn exchange(
    event_loop: &EventLoop,
    peers: &mut [Option<Peer>],
    bell: &Bell,
    (outgoing, incoming): (&mut [Outgoing<'_>], &mut [Incoming<'_>]),
    timeout: &Timeout<'_>,
) -> Result<(), TransportError> {
    let mut idle_since: Option<Instant> = None;
    let mut moving = Progress::default();
    let mut lost = None;
    loop {
        let seen = bell.count();
        let (mut progress, mut done) = (false, true);
        for out in outgoing.iter_mut() {
            let Some(peer) = &mut peers[out.to] else { continue };
            progress |= peer.outbox.send(&mut out.parts);
            done &= peer.has_taken(out);
        }
        for from in incoming.iter_mut() {
            let Some(peer) = &mut peers[from.from] else { continue };
            progress |= peer.receive(from)?;
            done &= from.sink.space().is_empty();
        }
        if done {
            return Ok(());
        }
        if progress {
            idle_since = None;
            if moving.turn(timeout)? {
                match check_control(peers) {
                    // Noticed where nothing moves any more: it may have sent what is missing.
                    Err(TransportError::Lost { .. }) => {}
                    checked => checked?,
                }
            }
            // One frame at a time: it is sent while it lies in the cache.
            event_loop.drive(EventLoop::pause());
            continue;
        }
        // A peer may have sent what is missing, and ended, since it was looked for.
        if let Some(error) = lost {
            return Err(error);
        }
        match check_control(peers) {
            Err(error @ TransportError::Lost { .. }) => {
                lost = Some(error);
                continue;
            }
            checked => checked?,
        }
        let now = Instant::now();
        let idle = now - *idle_since.get_or_insert(now);
        lost = outgoing.iter().find_map(|out| {
            let peer = peers[out.to].as_ref()?;
            if peer.has_taken(out) { None } else { peer.refusal(out.to, idle) }
        });
        if lost.is_some() {
            continue;
        }
        if idle < timeout.spin {
            event_loop.drive(EventLoop::pause());
            continue;
        }
        let time = timeout.next_sleep()?;
        event_loop.drive(bell.wait(seen, time));
    }
}

/// Returns the error of a peer's control message that ends the exchange; leaving does not.
fn check_control(peers: &[Option<Peer>]) -> Result<(), TransportError> {
    for (index, peer) in peers.iter().enumerate() {
        let Some(peer) = peer else { continue };
        let state = lock(&peer.state);
        if let Some(reason) = &state.aborted {
            return Err(TransportError::Aborted { peer: index, reason: reason.clone() });
        }
        if let (Some(how), false) = (&state.lost, state.left) {
            return Err(TransportError::Lost { peer: index, how: how.clone() });
        }
    }
    Ok(())
}

impl Peer {
    /// Returns whether the socket has taken all that is to be sent.
    fn has_taken(&self, out: &Outgoing<'_>) -> bool {
        out.parts.is_empty() && self.outbox.unsent() == 0
    }

    /// Hands over what has arrived, until it is all or `TURN_BYTES`; returns whether anything was.
    fn receive(&mut self, from: &mut Incoming<'_>) -> Result<bool, TransportError> {
        let mut total = 0;
        while total < TURN_BYTES {
            let space = from.sink.space();
            if space.is_empty() {
                break;
            }
            if self.rest.is_empty() {
                match self.inbox.try_recv() {
                    Ok(data) => self.rest = data,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Err(self.ended(from.from)),
                }
                continue;
            }
            let len = space.len().min(self.rest.len());
            space[..len].copy_from_slice(&self.rest[..len]);
            self.rest.advance(len);
            from.sink.advance(len).map_err(|_| TransportError::Refused { peer: from.from })?;
            total += len;
        }
        Ok(total > 0)
    }

    /// Returns why the peer will not read what is left to send, if it has gone. `idle` is how long nothing has moved.
    fn refusal(&self, peer: usize, idle: Duration) -> Option<TransportError> {
        let has_reason = lock(&self.state).is_over();
        (has_reason || (self.outbox.is_closed() && idle >= REASON_GRACE)).then(|| self.ended(peer))
    }

    fn ended(&self, peer: usize) -> TransportError {
        let state = lock(&self.state);
        match (&state.aborted, state.left, &state.lost) {
            (Some(reason), _, _) => TransportError::Aborted { peer, reason: reason.clone() },
            (None, true, _) => TransportError::Left { peer },
            (None, false, how) => {
                TransportError::Lost { peer, how: how.clone().unwrap_or_else(|| "the stream ended".to_owned()) }
            }
        }
    }
}

/// Starts to listen to a peer.
fn peer(outbox: Outbox, mut frames: Inbox, bell: Arc<Bell>) -> Peer {
    let (data, inbox) = mpsc::channel(QUEUED_FRAMES);
    let state: Arc<Mutex<PeerState>> = Arc::default();
    let heard = state.clone();
    tokio::spawn(async move {
        let ended = loop {
            let kind = match frames.next::<Frame>().await {
                Ok(Some(Frame { kind })) => kind,
                Ok(None) => break "its process ended".to_owned(),
                Err(status) => break status.message().to_owned(),
            };
            if let Some(Kind::Data(bytes)) = kind {
                // After the transport is dropped, data are read and discarded: to stop reading would reset the stream,
                // with the reason of an abort that is still to be sent.
                let _ = data.send(bytes).await;
                lock(&heard).heard = Some(Instant::now());
            } else {
                let mut state = lock(&heard);
                state.heard = Some(Instant::now());
                match kind {
                    Some(Kind::Abort(Abort { origin, cause, kind })) => {
                        let kind = distribute_cluster::FailureKind::from_code(kind);
                        let reason = AbortReason { origin, cause, kind };
                        state.aborted = Some(Box::new(reason.tidied()));
                    }
                    Some(Kind::Left(_)) => state.left = true,
                    Some(Kind::Waiting(sequence)) => state.waiting = Some(sequence),
                    Some(Kind::Hello(_) | Kind::Here(_) | Kind::Data(_)) | None => {}
                }
            }
            bell.ring();
        };
        lock(&heard).lost = Some(ended);
        drop(data);
        bell.ring();
    });
    Peer { outbox, inbox, rest: Bytes::new(), state }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

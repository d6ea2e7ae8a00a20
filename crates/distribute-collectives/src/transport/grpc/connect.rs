//! Connection setup: each member calls those before it, and is called by those after it.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_cluster::grpc::{self, Credentials, GrpcService, Inbox, Routed};
use distribute_cluster::secret::{JOB_REMEDY, Terms};
use distribute_cluster::{Acquaintance, Door, Incoming};
use http::HeaderMap;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::transport::{Endpoint, Server};
use tonic::{Code, Status};

use super::super::{ConnectError, Nonce, Proofs, Unproved};
use super::frames::{Frame, MAX_CONTROL_BYTES, MAX_FRAME_BYTES};
use super::outbox::Outbox;
use super::wire::{Hello, frame::Kind};
use super::{Bell, Peer, PeerState, lock, peer};

/// The protocol of these connections: hello, the callee's hello, and the caller's word that it is here.
const VERSION: u32 = 2;

const PATH: &str = "/distribute.v1.Collective/Connect";

/// Largest HTTP/2 frame that a receiver accepts.
const HTTP_FRAME_BYTES: u32 = 2 << 20;

/// HTTP/2 flow-control window: how far a sender may be ahead of its receiver.
const WINDOW_BYTES: u32 = 16 << 20;

/// How long a connection may take to say which member it is of.
const MAX_SILENCE: Duration = Duration::from_secs(10);

/// Most connections that have not said so, in addition to those of members; beyond this the oldest is closed.
const MAX_STRANGERS: usize = 256;

/// Limit for a caller's hello.
const MAX_HELLO: Duration = Duration::from_secs(5);

/// Connects member `rank` with all others.
pub(super) async fn connect(
    rank: usize,
    addresses: Vec<String>,
    listener: TcpListener,
    (group, proofs): (Nonce, Proofs),
    bell: Arc<Bell>,
    deadline: Instant,
) -> Result<Vec<Option<Peer>>, ConnectError> {
    let own = addresses.get(rank).cloned().unwrap_or_default();
    let failed = |action, address: &str, source| ConnectError { action, address: address.to_owned(), source };
    let (arrivals, mut arrived) = mpsc::unbounded_channel();
    let mut peers: Vec<Option<Peer>> = addresses.iter().map(|_| None).collect();
    let listener = tokio::net::TcpListener::from_std(listener).map_err(|source| failed("listen on", &own, source))?;
    let hello = Hello { nonce: Bytes::copy_from_slice(&group.to_bytes()), rank: rank as u32, version: VERSION };
    let terms = Terms::new("collectives over grpc 2", group.to_string());
    let Proofs { secret, tls } = &proofs;
    let door = Door::new(format!("member {rank} of a group"), secret.clone(), terms.clone(), JOB_REMEDY);
    let door = Arc::new(door.tls(tls.clone()));
    let incoming = Incoming::new(listener, MAX_SILENCE, addresses.len() + MAX_STRANGERS);
    let service = service(hello.clone(), addresses.len(), &bell, door.clone(), arrivals);
    let server = tokio::spawn(
        Server::builder()
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .max_frame_size(HTTP_FRAME_BYTES)
            .add_service(service)
            .serve_with_incoming(incoming.behind(door)),
    );
    for (peer, address) in addresses.iter().enumerate().take(rank) {
        let (claim, terms) = (claim(rank as u32, peer as u32), terms.clone());
        let proof = Credentials::new((secret.clone(), tls.clone()), terms, claim, JOB_REMEDY);
        let call = call(address, hello.clone(), (peer, proof), &bell, deadline);
        peers[peer] = Some(call.await.map_err(|source| failed("connect to", address, source))?);
    }
    let deadline = tokio::time::Instant::from_std(deadline);
    while peers.iter().skip(rank + 1).any(Option::is_none) {
        match tokio::time::timeout_at(deadline, arrived.recv()).await {
            Ok(Some((caller, peer))) => peers[caller] = Some(peer),
            _ => return Err(missing(own)),
        }
    }
    // All are there: strangers need not be listened to any more. Connections live on in tasks of their own.
    server.abort();
    Ok(peers)
}

/// Returns the error of the member at `own`, which not all others have called.
pub(super) fn missing(own: String) -> ConnectError {
    let source = std::io::Error::other("not all peers connected before the deadline");
    ConnectError { action: "accept peers at", address: own, source }
}

/// Calls the member `callee`, which comes before this one, again and again until the deadline: it may not listen yet.
async fn call(
    address: &str,
    hello: Hello,
    (callee, proof): (usize, Option<Credentials>),
    bell: &Arc<Bell>,
    deadline: Instant,
) -> std::io::Result<Peer> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(std::io::Error::other)?
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(HTTP_FRAME_BYTES);
    let mut pause = Duration::from_millis(5);
    let mut refusal: Option<std::io::Error> = None;
    loop {
        let attempt = async {
            let connected = grpc::connected(&endpoint, proof.as_ref()).await;
            let mut channel = connected.map_err(|error| failed(grpc::status_of(&error)))?;
            let (outbox, body) = Outbox::new(hello.clone(), bell);
            let body = grpc::call(&mut channel, PATH, HeaderMap::new(), body).await.map_err(failed)?;
            let mut frames = Inbox::new(body, MAX_CONTROL_BYTES);
            match frames.next::<Frame>().await {
                Ok(Some(Frame { kind: Some(Kind::Hello(theirs)) }))
                    if theirs == Hello { rank: callee as u32, ..hello.clone() } =>
                {
                    frames.limit(MAX_FRAME_BYTES);
                    // From here on the attempt is not given up without an error.
                    outbox.here();
                    Ok(peer(outbox, frames, bell.clone()))
                }
                _ => Err(std::io::Error::other(
                    "it answered as no member of this group does: another job or group listens at this address",
                )),
            }
        };
        // A member that took the connection may be frozen.
        let timed = tokio::time::timeout_at(tokio::time::Instant::from_std(deadline), attempt).await;
        let silent = |_| {
            let silent = "it did not answer before the deadline".to_owned();
            let told = refusal.take().map(|error| format!("{silent}; an earlier call ended with: {error}"));
            std::io::Error::new(std::io::ErrorKind::TimedOut, told.unwrap_or(silent))
        };
        match timed.map_err(silent).flatten() {
            Ok(peer) => return Ok(peer),
            Err(error) if Unproved::is(&error) || Instant::now() + pause >= deadline => return Err(error),
            Err(error) => refusal = Some(error),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Returns what a member says of itself when it proves the job's secret.
fn claim(caller: u32, callee: u32) -> String {
    format!("rank {caller} calls rank {callee}")
}

/// Returns the error of an attempt; one that concerns the secret is final.
fn failed(status: Status) -> std::io::Error {
    match status.code() {
        Code::Unauthenticated => std::io::Error::other(Unproved(status.message().to_owned())),
        _ => std::io::Error::other(status),
    }
}

/// Returns the service that takes the calls of members that come after this one.
fn service(
    own: Hello,
    members: usize,
    bell: &Arc<Bell>,
    door: Arc<Door>,
    arrivals: mpsc::UnboundedSender<(usize, Peer)>,
) -> Routed<impl GrpcService> {
    let callers = Callers { seats: Mutex::new(vec![None; members]), arrivals };
    Routed::new(Acceptor { own, members, callers: Arc::new(callers), bell: bell.clone(), door })
}

struct Acceptor {
    /// This member's hello.
    own: Hello,
    members: usize,
    callers: Arc<Callers>,
    bell: Arc<Bell>,
    door: Arc<Door>,
}

/// The members that have called.
struct Callers {
    /// For each rank, what is known of the one that said that it is here.
    seats: Mutex<Vec<Option<Arc<Mutex<PeerState>>>>>,
    arrivals: mpsc::UnboundedSender<(usize, Peer)>,
}

impl Callers {
    /// Returns whether a member of this rank is here, and its stream has not ended.
    fn has(&self, caller: usize) -> bool {
        lock(&self.seats).get(caller).is_some_and(is_taken)
    }

    /// Takes the seat of a rank; one that is taken stays so.
    fn seat(&self, caller: usize, peer: Peer) {
        let mut seats = lock(&self.seats);
        if let Some(seat) = seats.get_mut(caller)
            && !is_taken(seat)
        {
            *seat = Some(peer.state.clone());
            // In the order of the seats. Where the group is complete, the stream ends with its peer.
            let _ = self.arrivals.send((caller, peer));
        }
    }
}

fn is_taken(seat: &Option<Arc<Mutex<PeerState>>>) -> bool {
    seat.as_ref().is_some_and(|state| !lock(state).is_over())
}

impl GrpcService for Acceptor {
    const NAME: &'static str = "distribute.v1.Collective";

    async fn answer(self: Arc<Self>, request: http::Request<Body>) -> Result<Body, Status> {
        match request.uri().path() {
            PATH => {
                let caller = request.extensions().get::<Acquaintance>().cloned();
                let caller = caller.ok_or_else(|| Status::internal("the connection is not known"))?;
                if let Some(reason) = self.door.refusal_of(&caller) {
                    return Err(Status::unauthenticated(reason));
                }
                self.open(request.into_body(), &caller).await
            }
            _ => Err(Status::unimplemented("this service has one method, Connect")),
        }
    }
}

impl Acceptor {
    async fn open(&self, body: Body, connection: &Acquaintance) -> Result<Body, Status> {
        let mut frames = Inbox::new(body, MAX_CONTROL_BYTES);
        let hello = match tokio::time::timeout(MAX_HELLO, frames.next::<Frame>()).await {
            Ok(Ok(Some(Frame { kind: Some(Kind::Hello(hello)) }))) => hello,
            Ok(_) => return Err(Status::invalid_argument("the first frame must be a hello")),
            Err(_) => return Err(Status::deadline_exceeded("no hello came within 5 seconds")),
        };
        if hello.version != self.own.version {
            return Err(Status::failed_precondition(format!(
                "this member speaks version {VERSION} of the protocol of collectives over gRPC, and the caller version \
                 {}: let all members run the same version of distribute",
                hello.version
            )));
        }
        if hello.nonce != self.own.nonce {
            return Err(Status::failed_precondition("this member belongs to another group"));
        }
        // Where a secret is set, this is what the caller has proved.
        if connection.claim().is_some_and(|proved| proved != claim(hello.rank, self.own.rank).as_bytes()) {
            return Err(Status::permission_denied("the hello is not of the member that has proved the job's secret"));
        }
        connection.known();
        let caller = hello.rank as usize;
        if !(self.own.rank as usize + 1..self.members).contains(&caller) {
            return Err(Status::out_of_range(format!("rank {caller} is none of those that call this member")));
        }
        if self.callers.has(caller) {
            return Err(Status::already_exists(format!("rank {caller} has called")));
        }
        let (outbox, replies) = Outbox::new(self.own.clone(), &self.bell);
        let (callers, bell) = (self.callers.clone(), self.bell.clone());
        tokio::spawn(async move {
            // A caller that gives its attempt up never says that it is here, and calls again.
            let here = tokio::select! {
                frame = frames.next::<Frame>() => matches!(frame, Ok(Some(Frame { kind: Some(Kind::Here(_)) }))),
                () = callers.arrivals.closed() => false,
            };
            if here {
                frames.limit(MAX_FRAME_BYTES);
                callers.seat(caller, peer(outbox, frames, bell));
            }
        });
        Ok(replies)
    }
}

#[cfg(test)]
mod tests {
    use distribute_cluster::threads::EventLoop;

    use super::*;

    #[test]
    fn members_of_other_versions_and_ranks_are_refused_in_words() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("bound").to_string();
        let (group, bell) = (Nonce::new().expect("random numbers"), Arc::<Bell>::default());
        let hello = |rank, version| Hello { nonce: Bytes::copy_from_slice(&group.to_bytes()), rank, version };
        let event_loop = EventLoop::start("tested").expect("a thread");
        let members = vec![address.clone(), "nowhere".to_owned()];
        let soon = Instant::now() + Duration::from_secs(20);
        event_loop.drive(async {
            let proofs = (group, Proofs::default());
            let first = tokio::spawn(connect(0, members, listener, proofs, bell.clone(), soon));
            let wait = || Instant::now() + Duration::from_millis(100);
            for (hello, words) in [
                (hello(1, 1), "speaks version 2 of the protocol of collectives over gRPC, and the caller version 1"),
                (hello(0, VERSION), "rank 0 is none of those that call this member"),
                (hello(2, VERSION), "rank 2 is none of those that call this member"),
                (Hello { nonce: Bytes::new(), ..hello(1, VERSION) }, "another group"),
            ] {
                let error = call(&address, hello, (0, None), &bell, wait()).await.err().expect("it is refused");
                assert!(error.to_string().contains(words), "{words}: {error}");
            }
            assert!(call(&address, hello(1, VERSION), (0, None), &bell, soon).await.is_ok());
            let peers = first.await.expect("no panic").expect("both are there");
            assert!(peers[0].is_none() && peers[1].is_some());
        });
    }
}

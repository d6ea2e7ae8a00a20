//! The one call of the service.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_cluster::grpc::{self, Credentials, GrpcService, Inbox, Routed, encode};
use distribute_cluster::{Acquaintance, Door};
use http::HeaderMap;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tonic::{Code, Status};

use super::super::Unproved;
use super::frames::{Frame, MAX_CONTROL_BYTES, MAX_FRAME_BYTES, control};
use super::wire::{Hello, frame::Kind};
use super::{Bell, HTTP_FRAME_BYTES, Peer, QUEUED_FRAMES, WINDOW_BYTES, lock, peer};

const PATH: &str = "/distribute.v1.Collective/Connect";

/// Limit for a caller's hello.
const MAX_SILENCE: Duration = Duration::from_secs(5);

/// Calls the member `callee`, which comes before this one, again and again until the deadline: it may not listen yet.
pub(super) async fn call(
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
    loop {
        let attempt = async {
            let connected = grpc::connected(&endpoint, proof.as_ref()).await;
            let mut channel = connected.map_err(|error| failed(grpc::status_of(&error)))?;
            let (outbox, body) = outgoing(bell);
            // There is room for the first frame of an empty queue.
            let _ = outbox.try_send(control(Kind::Hello(hello.clone())));
            let body = grpc::call(&mut channel, PATH, HeaderMap::new(), body).await.map_err(failed)?;
            let mut frames = Inbox::new(body, MAX_CONTROL_BYTES);
            match frames.next::<Frame>().await {
                Ok(Some(Frame { kind: Some(Kind::Hello(theirs)) }))
                    if theirs == Hello { rank: callee as u32, ..hello.clone() } =>
                {
                    frames.limit(MAX_FRAME_BYTES);
                    Ok(peer(outbox, frames, bell.clone()))
                }
                _ => Err(std::io::Error::other(
                    "it answered as no member of this group does: another job or group listens at this address",
                )),
            }
        };
        // A member that took the connection may be frozen.
        let timed = tokio::time::timeout_at(tokio::time::Instant::from_std(deadline), attempt).await;
        let silent = |_| std::io::Error::new(std::io::ErrorKind::TimedOut, "it did not answer before the deadline");
        match timed.map_err(silent).flatten() {
            Ok(peer) => return Ok(peer),
            Err(error) if Unproved::is(&error) || Instant::now() + pause >= deadline => return Err(error),
            Err(_) => tokio::time::sleep(pause).await,
        }
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Returns what a member says of itself when it proves the job's secret.
pub(super) fn claim(caller: u32, callee: u32) -> String {
    format!("rank {caller} calls rank {callee}")
}

/// Returns the error of an attempt; one that concerns the secret is final.
fn failed(status: Status) -> std::io::Error {
    match status.code() {
        Code::Unauthenticated => std::io::Error::other(Unproved(status.message().to_owned())),
        _ => std::io::Error::other(status),
    }
}

/// Creates a queue of frames, and the body that they are sent in, which rings when there is room again.
fn outgoing(bell: &Arc<Bell>) -> (mpsc::Sender<Frame>, Body) {
    let (outbox, queue) = mpsc::channel(QUEUED_FRAMES);
    (outbox, Body::new(Outgoing { queue, payload: Bytes::new(), bell: bell.clone() }))
}

/// The body of a stream of frames.
struct Outgoing {
    queue: mpsc::Receiver<Frame>,
    /// The payload of the frame whose beginning is sent.
    payload: Bytes,
    bell: Arc<Bell>,
}

impl http_body::Body for Outgoing {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        if !self.payload.is_empty() {
            let payload = std::mem::take(&mut self.payload);
            return Poll::Ready(Some(Ok(http_body::Frame::data(payload))));
        }
        let Some(frame) = ready!(self.queue.poll_recv(cx)) else { return Poll::Ready(None) };
        self.bell.ring();
        let [head, payload] = encode(frame);
        self.payload = payload;
        Poll::Ready(Some(Ok(http_body::Frame::data(head))))
    }
}

/// Returns the service that takes the calls of members that come after this one.
pub(super) fn service(
    own: Hello,
    members: usize,
    bell: &Arc<Bell>,
    door: Arc<Door>,
    arrivals: mpsc::Sender<(usize, Peer)>,
) -> Routed<impl GrpcService> {
    let called = Mutex::new((0..members).map(|rank| rank <= own.rank as usize).collect());
    Routed::new(Acceptor { own, called, bell: bell.clone(), door, arrivals })
}

struct Acceptor {
    /// This member's hello.
    own: Hello,
    /// Whether each rank has called, or cannot.
    called: Mutex<Vec<bool>>,
    bell: Arc<Bell>,
    door: Arc<Door>,
    arrivals: mpsc::Sender<(usize, Peer)>,
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
        let hello = match tokio::time::timeout(MAX_SILENCE, frames.next::<Frame>()).await {
            Ok(Ok(Some(Frame { kind: Some(Kind::Hello(hello)) }))) => hello,
            Ok(_) => return Err(Status::invalid_argument("the first frame must be a hello")),
            Err(_) => return Err(Status::deadline_exceeded("no hello came within 5 seconds")),
        };
        if hello.nonce != self.own.nonce {
            return Err(Status::failed_precondition("this member belongs to another group"));
        }
        // Where a secret is set, this is what the caller has proved.
        if connection.claim().is_some_and(|proved| proved != claim(hello.rank, self.own.rank).as_bytes()) {
            return Err(Status::permission_denied("the hello is not of the member that has proved the job's secret"));
        }
        connection.known();
        let caller = hello.rank as usize;
        match lock(&self.called).get_mut(caller) {
            Some(called @ false) => *called = true,
            Some(true) => {
                return Err(Status::already_exists(format!("rank {caller} has called, or is called by this one")));
            }
            None => return Err(Status::out_of_range(format!("rank {caller} is outside the group"))),
        }
        frames.limit(MAX_FRAME_BYTES);
        let (outbox, replies) = outgoing(&self.bell);
        // There is room for the first frame of an empty queue.
        let _ = outbox.try_send(control(Kind::Hello(self.own.clone())));
        let peer = peer(outbox, frames, self.bell.clone());
        if self.arrivals.send((caller, peer)).await.is_err() {
            return Err(Status::already_exists("the group is complete"));
        }
        Ok(replies)
    }
}

//! The one call of the service, made and answered without tonic's codec.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::{Channel, Endpoint};
use tower_service::Service as _;

use super::framing::{self, FramePart, Unframer};
use super::wire::{Hello, frame::Kind};
use super::{Bell, HTTP_FRAME_BYTES, Peer, QUEUED_FRAMES, WINDOW_BYTES, lock, peer};

const PATH: &str = "/distribute.v1.Collective/Connect";

/// Limit for a caller's hello.
const MAX_SILENCE: Duration = Duration::from_secs(5);

/// Calls the member `callee`, which comes before this one, again and again until the deadline: it may not listen yet.
pub(super) async fn call(
    address: &str,
    hello: Hello,
    callee: usize,
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
            let mut channel = endpoint.connect().await.map_err(std::io::Error::other)?;
            let (outbox, body) = outgoing(bell);
            // There is room for the first frame of an empty queue.
            let _ = outbox.try_send(framing::words(Kind::Hello(hello.clone())));
            let mut body = begin(&mut channel, body).await.map_err(std::io::Error::other)?;
            let (mut unframer, mut rest) = (Unframer::default(), Bytes::new());
            match listen(&mut body, &mut unframer, &mut rest).await {
                Ok(Some(FramePart::Control(Kind::Hello(theirs))))
                    if theirs == Hello { rank: callee as u32, ..hello.clone() } =>
                {
                    Ok(peer(outbox, body, unframer, rest, bell.clone()))
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
            Err(error) if Instant::now() + pause >= deadline => return Err(error),
            Err(_) => tokio::time::sleep(pause).await,
        }
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Sends the request; the body of the reply, once the other side has begun it.
async fn begin(channel: &mut Channel, body: Body) -> Result<Body, Status> {
    let unreachable = |error: tonic::transport::Error| Status::unavailable(error.to_string());
    let request = http::Request::post(PATH)
        .version(http::Version::HTTP_2)
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .body(body)
        .map_err(|error| Status::internal(error.to_string()))?;
    poll_fn(|context| channel.poll_ready(context)).await.map_err(unreachable)?;
    let reply = channel.call(request).await.map_err(unreachable)?;
    match Status::from_header_map(reply.headers()) {
        Some(refused) => Err(refused),
        None if reply.status().is_success() => Ok(reply.into_body()),
        None => Err(Status::unavailable(format!("it answered {}", reply.status()))),
    }
}

/// A queue of frames, and the body that they go into, which rings when there is room again.
fn outgoing(bell: &Arc<Bell>) -> (mpsc::Sender<Bytes>, Body) {
    let (outbox, frames) = mpsc::channel(QUEUED_FRAMES);
    let bell = bell.clone();
    let frames = ReceiverStream::new(frames).map(move |frame| {
        bell.ring();
        Ok::<_, Infallible>(http_body::Frame::data(frame))
    });
    (outbox, Body::new(StreamBody::new(frames)))
}

/// Receives the next part of a stream; `None` at its end. `rest` is the rest of the last piece.
pub(super) async fn listen(
    body: &mut Body,
    unframer: &mut Unframer,
    rest: &mut Bytes,
) -> Result<Option<FramePart>, String> {
    loop {
        let said = unframer.next(rest).map_err(|_| "it sent bytes that are no frames of this protocol".to_owned())?;
        if said.is_some() {
            return Ok(said);
        }
        match body.frame().await {
            None => return Ok(None),
            Some(Ok(frame)) => *rest = frame.into_data().unwrap_or_default(),
            Some(Err(_)) => return Err("its process ended or its connection broke".to_owned()),
        }
    }
}

/// Takes the calls of members that come after this one.
#[derive(Clone)]
pub(super) struct Service(Arc<Acceptor>);

struct Acceptor {
    /// This member's hello.
    own: Hello,
    /// Whether each rank has called, or cannot.
    called: Mutex<Vec<bool>>,
    bell: Arc<Bell>,
    arrivals: mpsc::Sender<(usize, Peer)>,
}

impl Service {
    pub(super) fn new(own: Hello, members: usize, bell: &Arc<Bell>, arrivals: mpsc::Sender<(usize, Peer)>) -> Service {
        let called = Mutex::new((0..members).map(|rank| rank <= own.rank as usize).collect());
        Service(Arc::new(Acceptor { own, called, bell: bell.clone(), arrivals }))
    }
}

impl NamedService for Service {
    const NAME: &'static str = "distribute.v1.Collective";
}

impl tower_service::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let acceptor = self.0.clone();
        Box::pin(async move {
            let reply = match request.uri().path() {
                PATH => acceptor.open(request.into_body()).await,
                _ => Err(Status::unimplemented("this service has one method, Connect")),
            };
            Ok(reply.unwrap_or_else(Status::into_http))
        })
    }
}

impl Acceptor {
    async fn open(&self, mut body: Body) -> Result<http::Response<Body>, Status> {
        let (mut unframer, mut rest) = (Unframer::default(), Bytes::new());
        let first = listen(&mut body, &mut unframer, &mut rest);
        let hello = match tokio::time::timeout(MAX_SILENCE, first).await {
            Ok(Ok(Some(FramePart::Control(Kind::Hello(hello))))) => hello,
            Ok(_) => return Err(Status::invalid_argument("the first frame must be a hello")),
            Err(_) => return Err(Status::deadline_exceeded("no hello came within 5 seconds")),
        };
        if hello.nonce != self.own.nonce {
            return Err(Status::failed_precondition("this member belongs to another group"));
        }
        let caller = hello.rank as usize;
        match lock(&self.called).get_mut(caller) {
            Some(called @ false) => *called = true,
            Some(true) => {
                return Err(Status::already_exists(format!("rank {caller} has called, or is called by this one")));
            }
            None => return Err(Status::out_of_range(format!("rank {caller} is outside the group"))),
        }
        let (outbox, replies) = outgoing(&self.bell);
        let reply = http::Response::builder()
            .header("content-type", "application/grpc")
            .body(replies)
            .map_err(|error| Status::internal(error.to_string()))?;
        // There is room for the first frame of an empty queue.
        let _ = outbox.try_send(framing::words(Kind::Hello(self.own.clone())));
        let peer = peer(outbox, body, unframer, rest, self.bell.clone());
        if self.arrivals.send((caller, peer)).await.is_err() {
            return Err(Status::already_exists("the group is complete"));
        }
        Ok(reply)
    }
}

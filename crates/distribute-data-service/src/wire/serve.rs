//! Answering calls of other processes.

use std::future::Future;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::grpc::{GrpcMessage, GrpcService, Inbox, Routed, reply_of};
use distribute_cluster::{Acquaintance, Door, Incoming};
use tonic::Status;
use tonic::body::Body;

use super::admission::Identity;
use super::{MAX_HEAD_BYTES, MAX_HEADERS_BYTES, WINDOW_BYTES};

/// The methods of a service.
pub(crate) trait Methods: Send + Sync + 'static {
    /// The full name of the service.
    const NAME: &'static str;

    /// Answers an admitted call.
    fn call(self: Arc<Self>, method: String, inbox: Inbox) -> impl Future<Output = Result<Body, Status>> + Send;
}

/// Serves on a listener until the runtime ends.
///
/// # Errors
/// If the runtime cannot use the listener.
pub(crate) fn serve<M: Methods>(
    listener: TcpListener,
    methods: Arc<M>,
    identity: Identity,
    silence: Duration,
) -> std::io::Result<()> {
    let door = identity.door(format!("{} at {}", M::NAME, listener.local_addr()?));
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let server = tonic::transport::Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(2 * WINDOW_BYTES)
        .http2_max_header_list_size(MAX_HEADERS_BYTES)
        // A caller whose host is gone, or whose process is frozen, answers no ping.
        .http2_keepalive_interval(Some(silence / 2))
        .http2_keepalive_timeout(Some(silence / 2))
        .add_service(Routed::new(Admitting { methods, identity, door: door.clone() }))
        .serve_with_incoming(Incoming::new(listener, STRANGER_TIMEOUT, MAX_STRANGERS).behind(door));
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!("the service ended: {error}");
        }
    });
    Ok(())
}

/// Answers a call with one message.
pub(crate) fn reply(message: impl GrpcMessage) -> Result<Body, Status> {
    Ok(reply_of([Ok(message)]))
}

/// Methods behind the admission of callers.
struct Admitting<M> {
    methods: Arc<M>,
    identity: Identity,
    door: Arc<Door>,
}

impl<M: Methods> GrpcService for Admitting<M> {
    const NAME: &'static str = M::NAME;

    async fn answer(self: Arc<Self>, request: http::Request<Body>) -> Result<Body, Status> {
        self.identity.admit(request.headers())?;
        match request.extensions().get::<Acquaintance>() {
            Some(caller) => match self.door.refusal_of(caller) {
                Some(reason) => return Err(Status::unauthenticated(reason)),
                None => caller.known(),
            },
            None if self.door.is_locked() => return Err(Status::unauthenticated("the caller is not known")),
            None => {}
        }
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let inbox = Inbox::new(request.into_body(), MAX_HEAD_BYTES).with_timeout(REQUEST_TIMEOUT);
        Arc::clone(&self.methods).call(method, inbox).await
    }
}

/// How long a connection may stay open without an admitted call.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of such connections; the oldest is closed for a new one.
const MAX_STRANGERS: usize = 128;

/// How long a request may pause between two of its pieces.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

//! Answering calls of other tasks.

use std::convert::Infallible;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use distribute_cluster::Acquaintance;
use distribute_cluster::grpc::{self, GrpcMessage, Inbox, Outbox, outbox, reply_of};
use futures_util::FutureExt;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use super::QUEUED_MESSAGES;
use super::admission::Identity;

/// The methods of a service.
pub(crate) trait Methods: Send + Sync + 'static {
    /// The full name of the service.
    const NAME: &'static str;

    /// Admits a call before its body is read; returns the limit of its messages' length.
    ///
    /// # Errors
    /// If there is no such method, or the session is not the current one.
    fn admit(&self, method: &str, session: u64) -> Result<usize, Status>;

    /// Answers an admitted call.
    fn call(self: Arc<Self>, method: String, inbox: Inbox) -> impl Future<Output = Result<Body, Status>> + Send;
}

/// A service for tonic's router.
pub(crate) struct Router<M> {
    methods: Arc<M>,
    identity: Arc<Identity>,
    timeout: Duration,
}

impl<M: Methods> Router<M> {
    /// Creates the service of a task, which waits for the next message of a call for at most `timeout`.
    pub(crate) fn new(methods: M, identity: Identity, timeout: Duration) -> Router<M> {
        Router { methods: Arc::new(methods), identity: Arc::new(identity), timeout }
    }

    async fn answer(self, request: http::Request<Body>) -> Result<Body, Status> {
        let session = self.identity.admit(request.headers())?;
        if let Some(caller) = request.extensions().get::<Acquaintance>() {
            caller.known();
        }
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let limit_bytes = self.methods.admit(&method, session)?;
        let inbox = Inbox::new(request.into_body(), limit_bytes).with_timeout(self.timeout);
        self.methods.call(method, inbox).await
    }
}

impl<M> Clone for Router<M> {
    fn clone(&self) -> Router<M> {
        let Router { methods, identity, timeout } = self;
        Router { methods: methods.clone(), identity: identity.clone(), timeout: *timeout }
    }
}

impl<M: Methods> NamedService for Router<M> {
    const NAME: &'static str = M::NAME;
}

impl<M: Methods> tower_service::Service<http::Request<Body>> for Router<M> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let router = self.clone();
        Box::pin(async move {
            // A panic would be a bug; it ends only the call that caused it.
            let outcome = AssertUnwindSafe(router.answer(request))
                .catch_unwind()
                .await
                .unwrap_or_else(|_| Err(Status::internal("it panicked while it answered; its log says where")));
            Ok(grpc::reply(outcome))
        })
    }
}

/// Answers a call with one message.
pub(crate) fn reply(message: impl GrpcMessage) -> Result<Body, Status> {
    Ok(reply_of([Ok(message)]))
}

/// Answers a call with messages, each created when there is room for it, up to the first error.
pub(crate) fn reply_all<M: GrpcMessage>(
    messages: impl IntoIterator<Item = Result<M, Status>, IntoIter: Send + 'static>,
) -> Result<Body, Status> {
    Ok(reply_of(messages))
}

/// Answers a call with the messages that `send` queues.
pub(crate) fn reply_stream<F>(send: impl FnOnce(Arc<Outbox>) -> F) -> Result<Body, Status>
where
    F: Future<Output = Result<(), Status>> + Send + 'static,
{
    let (outbox, body) = outbox(QUEUED_MESSAGES);
    let outbox = Arc::new(outbox);
    let sending = send(outbox.clone());
    tokio::spawn(async move {
        let status = sending.await.err().unwrap_or_else(|| Status::ok(""));
        if let Some(outbox) = Arc::into_inner(outbox) {
            outbox.end(&status).await;
        }
    });
    Ok(body)
}

//! Answering calls of other tasks.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::grpc::{GrpcMessage, GrpcService, Inbox, Outbox, Routed, outbox, reply_of};
use distribute_cluster::{Acquaintance, Door};
use tonic::Status;
use tonic::body::Body;

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

/// Returns the service of a task, which waits for the next message of a call for at most `timeout`.
/// Callers come through `door`.
pub(crate) fn service<M: Methods>(
    methods: M,
    identity: Identity,
    door: Arc<Door>,
    timeout: Duration,
) -> Routed<impl GrpcService> {
    Routed::new(Admitting { methods: Arc::new(methods), identity, door, timeout })
}

/// Methods behind the admission of callers.
struct Admitting<M> {
    methods: Arc<M>,
    identity: Identity,
    door: Arc<Door>,
    timeout: Duration,
}

impl<M: Methods> GrpcService for Admitting<M> {
    const NAME: &'static str = M::NAME;

    async fn answer(self: Arc<Self>, request: http::Request<Body>) -> Result<Body, Status> {
        let session = self.identity.admit(request.headers())?;
        let caller = request.extensions().get::<Acquaintance>();
        self.identity.check_proof(&self.door, caller)?;
        if let Some(caller) = caller {
            caller.known();
        }
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let limit_bytes = self.methods.admit(&method, session)?;
        let inbox = Inbox::new(request.into_body(), limit_bytes).with_timeout(self.timeout);
        Arc::clone(&self.methods).call(method, inbox).await
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

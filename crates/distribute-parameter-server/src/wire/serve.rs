//! Answering other tasks.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use super::VERSION;
use super::frame::{Inbox, Outbox, Parcel, outbox, reply_of};

/// The methods of a service.
pub(crate) trait Methods: Send + Sync + 'static {
    /// Its full name.
    const NAME: &'static str;

    /// Answers a call of the method with this name.
    fn call(self: Arc<Self>, method: String, inbox: Inbox) -> impl Future<Output = Result<Body, Status>> + Send;
}

/// A service for tonic's router.
pub(crate) struct Router<M>(pub(crate) Arc<M>);

impl<M> Clone for Router<M> {
    fn clone(&self) -> Router<M> {
        Router(self.0.clone())
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
        let methods = self.0.clone();
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            let outcome = methods.call(method, Inbox::new(request.into_body())).await.and_then(|body| {
                http::Response::builder()
                    .header("content-type", "application/grpc")
                    .body(body)
                    .map_err(|error| Status::internal(error.to_string()))
            });
            Ok(outcome.unwrap_or_else(Status::into_http))
        })
    }
}

/// Two builds that speak different versions refuse each other in words.
pub(crate) fn check_version(of_caller: u32) -> Result<(), Status> {
    if of_caller == VERSION {
        return Ok(());
    }
    let problem = format!("it speaks version {VERSION} and the coordinator {of_caller}; run the same build");
    Err(Status::failed_precondition(problem))
}

/// The answer to a call: one message.
pub(crate) fn reply(message: impl Parcel) -> Result<Body, Status> {
    Ok(reply_of([Ok(message)]))
}

/// The answer to a call: messages, each made when there is room for it, up to the first error.
pub(crate) fn reply_all<M: Parcel>(
    messages: impl IntoIterator<Item = Result<M, Status>, IntoIter: Send + 'static>,
) -> Result<Body, Status> {
    Ok(reply_of(messages))
}

/// The answer to a call: messages as `send` makes them.
pub(crate) fn reply_stream<F>(send: impl FnOnce(Arc<Outbox>) -> F) -> Result<Body, Status>
where
    F: Future<Output = Result<(), Status>> + Send + 'static,
{
    let (outbox, body) = outbox();
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

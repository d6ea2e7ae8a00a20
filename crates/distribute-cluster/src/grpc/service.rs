//! Services of tonic's servers whose calls are answered by hand.

use std::convert::Infallible;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use super::reply;

/// A service that answers the calls of all of its methods.
pub trait GrpcService: Send + Sync + 'static {
    /// The full name of the service.
    const NAME: &'static str;

    /// Admits a call and answers it. The last part of the request's path is the name of the method.
    ///
    /// # Errors
    /// The status with which the call is refused or ends.
    fn answer(self: Arc<Self>, request: http::Request<Body>) -> impl Future<Output = Result<Body, Status>> + Send;
}

/// A [`GrpcService`] as tonic's router takes it. Clones share it. A call that panics ends alone, as `internal`.
#[derive(Debug)]
pub struct Routed<S>(Arc<S>);

impl<S> Routed<S> {
    /// Creates the service for a router.
    pub fn new(service: S) -> Routed<S> {
        Routed(Arc::new(service))
    }
}

impl<S> Clone for Routed<S> {
    fn clone(&self) -> Routed<S> {
        Routed(Arc::clone(&self.0))
    }
}

impl<S: GrpcService> NamedService for Routed<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: GrpcService> tower_service::Service<http::Request<Body>> for Routed<S> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = Arc::clone(&self.0);
        Box::pin(async move {
            // A panic would be a bug; it ends only the call that caused it.
            let outcome = AssertUnwindSafe(service.answer(request))
                .catch_unwind()
                .await
                .unwrap_or_else(|_| Err(Status::internal("it panicked while it answered; its log says where")));
            Ok(reply(outcome))
        })
    }
}

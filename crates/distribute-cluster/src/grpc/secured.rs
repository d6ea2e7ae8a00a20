//! Connections to a gRPC server that show a certificate and prove a secret before the first byte of HTTP/2.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};

use crate::secret::{Problem, Terms, identify};
use crate::tls::socket::Socket;
use crate::{JobSecret, JobTls, net};

/// A certificate and a secret, as far as there are both, and what a caller says of itself when it proves the secret.
#[derive(Clone, Debug)]
pub struct Credentials {
    secret: Option<JobSecret>,
    tls: Option<JobTls>,
    terms: Terms,
    claim: Vec<u8>,
    remedy: &'static str,
}

impl Credentials {
    /// Creates the credentials of a caller, who agrees on the terms with the listener and makes a claim of at most
    /// [`Terms::MAX_CLAIM_BYTES`]; `None` if there is neither a secret nor a certificate.
    pub fn new(
        (secret, tls): (Option<JobSecret>, Option<JobTls>),
        terms: Terms,
        claim: impl Into<Vec<u8>>,
        remedy: &'static str,
    ) -> Option<Credentials> {
        let has_any = secret.is_some() || tls.is_some();
        has_any.then(|| Credentials { secret, tls, terms, claim: claim.into(), remedy })
    }
}

/// Creates a channel that connects on first use and again after the connection broke. With credentials every connection
/// shows and proves them first. The time for both is limited by the endpoint's `connect_timeout`.
pub fn channel(endpoint: &Endpoint, credentials: Option<&Credentials>) -> Channel {
    match credentials {
        Some(credentials) => endpoint.connect_with_connector_lazy(Secured(Arc::new(credentials.clone()))),
        None => endpoint.connect_lazy(),
    }
}

/// Connects now, like [`channel`] does on first use.
///
/// # Errors
/// If there is no connection, or the listener does not show a certificate or prove the secret;
/// [`status_of`](super::status_of) returns the status of the error.
pub async fn connected(
    endpoint: &Endpoint,
    credentials: Option<&Credentials>,
) -> Result<Channel, tonic::transport::Error> {
    match credentials {
        Some(credentials) => endpoint.connect_with_connector(Secured(Arc::new(credentials.clone()))).await,
        None => endpoint.connect().await,
    }
}

/// The error of a connection whose secrets or certificates differ, as a source of tonic's own.
#[derive(Debug, thiserror::Error)]
#[error("{problem}; {remedy}")]
pub(super) struct Unproved {
    pub(super) problem: Problem,
    remedy: &'static str,
}

/// Opens connections that show a certificate and prove a secret.
#[derive(Clone)]
struct Secured(Arc<Credentials>);

type Opened = Result<TokioIo<Socket>, Box<dyn std::error::Error + Send + Sync>>;

impl tower_service::Service<Uri> for Secured {
    type Response = TokioIo<Socket>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Opened> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, address: Uri) -> Self::Future {
        let credentials = self.0.clone();
        Box::pin(async move {
            let Credentials { secret, tls, terms, claim, remedy } = &*credentials;
            let address = address.authority().map_or("", |authority| authority.as_str());
            let stream = net::connected(tokio::net::TcpStream::connect(address).await?);
            // Disables Nagle's algorithm for small messages; the connection works without this, so an error is ignored.
            let _ = stream.set_nodelay(true);
            let proof = secret.as_ref().map(|secret| (secret, terms, &claim[..]));
            match identify(stream, tls.as_ref(), proof).await? {
                Ok(socket) => Ok(TokioIo::new(socket)),
                // Another program may listen there until the task does.
                Err(problem) if problem.is_passing() => Err(problem.to_string().into()),
                Err(problem) => {
                    let remedy = problem.remedy(remedy);
                    Err(Unproved { problem, remedy }.into())
                }
            }
        })
    }
}

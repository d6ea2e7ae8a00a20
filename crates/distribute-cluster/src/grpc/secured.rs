//! Connections to a gRPC server that show a certificate and prove a secret before the first byte of HTTP/2.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::GaiResolver;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint};
use tower_service::Service;

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
        Some(credentials) => {
            endpoint.connect_with_connector_lazy(Secured::new(HttpConnector::new(), endpoint, credentials))
        }
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
        Some(credentials) => {
            endpoint.connect_with_connector(Secured::new(HttpConnector::new(), endpoint, credentials)).await
        }
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
struct Secured<R = GaiResolver> {
    tcp: HttpConnector<R>,
    credentials: Arc<Credentials>,
}

impl<R> Secured<R> {
    fn new(mut tcp: HttpConnector<R>, endpoint: &Endpoint, credentials: &Credentials) -> Secured<R> {
        tcp.enforce_http(false);
        // The addresses of a name share the time: one that does not answer leaves the others theirs.
        tcp.set_connect_timeout(endpoint.get_connect_timeout());
        // Disables Nagle's algorithm for small messages.
        tcp.set_nodelay(true);
        Secured { tcp, credentials: Arc::new(credentials.clone()) }
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl<R> Service<Uri> for Secured<R>
where
    HttpConnector<R>: Service<Uri, Response = TokioIo<TcpStream>, Error: Into<BoxError> + Send, Future: Send + 'static>,
{
    type Response = TokioIo<Socket>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<TokioIo<Socket>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, address: Uri) -> Self::Future {
        let (credentials, connecting) = (self.credentials.clone(), self.tcp.call(address));
        Box::pin(async move {
            let Credentials { secret, tls, terms, claim, remedy } = &*credentials;
            let stream = net::connected(connecting.await.map_err(Into::into)?.into_inner());
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

#[cfg(test)]
mod tests {
    use std::future::{Ready, ready};
    use std::io::Result as IoResult;
    use std::net::{SocketAddr, TcpListener as StdListener, TcpStream as StdStream};
    use std::time::Duration;

    use hyper_util::client::legacy::connect::dns::Name;
    use tokio::net::TcpListener;

    use super::*;

    /// A name with these addresses.
    #[derive(Clone)]
    struct Addresses(Vec<SocketAddr>);

    impl Service<Name> for Addresses {
        type Response = std::vec::IntoIter<SocketAddr>;
        type Error = std::io::Error;
        type Future = Ready<IoResult<Self::Response>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<IoResult<()>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Name) -> Self::Future {
            ready(Ok(self.0.clone().into_iter()))
        }
    }

    #[tokio::test]
    async fn an_address_that_does_not_answer_leaves_the_next_one_its_share_of_the_time() {
        // Linux answers no further caller of a listener whose queue is full.
        let silent = StdListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&silent, 0).unwrap();
        let silent_address = silent.local_addr().unwrap();
        let waiting = |_| StdStream::connect_timeout(&silent_address, Duration::from_millis(200));
        let queued: Vec<StdStream> = (0..4).map_while(|at| waiting(at).ok()).collect();
        assert!(queued.len() < 4, "the queue of the listener is never full");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::from_static("http://a.example").connect_timeout(Duration::from_secs(2));
        let secret = Some(JobSecret::new([7; 32]).unwrap());
        let credentials = Credentials::new((secret, None), Terms::new("a protocol", "a job"), "a caller", "").unwrap();
        let addresses = Addresses(vec![silent_address, listener.local_addr().unwrap()]);
        let mut secured = Secured::new(HttpConnector::new_with_resolver(addresses), &endpoint, &credentials);
        let connecting = tokio::spawn(secured.call(endpoint.uri().clone()));
        let called = tokio::time::timeout(Duration::from_secs(20), listener.accept()).await;
        called.expect("the second address is called").unwrap();
        connecting.abort();
    }
}

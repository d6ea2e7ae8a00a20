//! An HTTP server on a thread of its own, with bounded connections.

use std::convert::Infallible;
use std::future::Future;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::extract::Request;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HOST};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::{Board, pages};
use crate::{Error, Result, event_loop};

/// The routes of a server.
pub(crate) type Routes<S = ()> = axum::Router<S>;

/// Serves the state of a job over HTTP, until it is dropped, which waits at most a second.
///
/// It has one thread, at most 64 connections, and 10 s for each request; what exceeds these is closed. Anyone who
/// reaches the address can read the page, and nothing can be changed through it. A server on a loopback address answers
/// only requests for `localhost` or such an address, so that no page of another origin reads it by a name of its own.
///
/// # Examples
/// See [the module](crate::status).
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    _background: Background,
}

impl Server {
    /// Serves a board at an address of this machine, such as `127.0.0.1:0` for a free port.
    ///
    /// # Errors
    /// [`Error::Listen`] if the address cannot be listened on; [`Error::Thread`] if the thread cannot be started.
    pub fn serve(address: &str, board: &Board) -> Result<Server> {
        Server::start(bind(address)?, pages::routes(board))
    }

    /// Returns the address of the page.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn start(listener: TcpListener, routes: Routes) -> Result<Server> {
        let address = address_of(&listener)?;
        let routes = guarded(routes, address.ip().is_loopback());
        let serve = async move || {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let next = async || listener.accept().await.map(|(stream, _)| stream);
            accept(next, move |stream| respond(stream, routes.clone()), CONNECTIONS).await
        };
        let background = Background::start("status", serve)?;
        Ok(Server { address, _background: background })
    }
}

/// A thread that serves until this is dropped, which waits at most a second.
#[derive(Debug)]
pub(super) struct Background {
    /// Dropped to stop the server.
    end: Option<oneshot::Sender<Infallible>>,
    /// Closed when the server has stopped.
    ended: mpsc::Receiver<Infallible>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts the thread, which runs `serve` in a runtime of its own.
    pub(super) fn start<F: Future<Output = std::io::Result<()>>>(
        name: &'static str,
        serve: impl FnOnce() -> F + Send + 'static,
    ) -> Result<Background> {
        let (end, told) = oneshot::channel();
        let (running, ended) = mpsc::channel();
        let run = move |runtime: Runtime| {
            let _running = running;
            let outcome = runtime.block_on(async {
                tokio::select! {
                    _ = told => Ok(()),
                    outcome = serve() => outcome,
                }
            });
            if let Err(error) = outcome {
                tracing::warn!("the status server {name} has ended: {error}");
            }
            // A call that blocks, such as a stack dump, has a deadline of its own, and is not waited for.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = event_loop::start(thread, run).map_err(Error::Thread)?;
        Ok(Background { end: Some(end), ended, thread: Some(thread) })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        drop(self.end.take());
        // The server has nothing to wait for, so the deadline is a precaution; a panic was reported when it occurred.
        match self.ended.recv_timeout(Duration::from_secs(1)) {
            Err(mpsc::RecvTimeoutError::Timeout) => tracing::warn!("the status server has not ended in 1 s"),
            _ => drop(self.thread.take().map(JoinHandle::join)),
        }
    }
}

/// Listens at an address.
pub(crate) fn bind(address: &str) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    listener.map_err(|source| Error::Listen { address: address.to_owned(), source })
}

/// Returns the address at which a listener is reached.
pub(super) fn address_of(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|source| Error::Listen { address: "the port".to_owned(), source })
}

/// Serves each connection that `next` returns; those above the limit are closed at once.
pub(super) async fn accept<S, F: Future<Output = ()> + Send + 'static>(
    next: impl AsyncFn() -> std::io::Result<S>,
    serve: impl Fn(S) -> F,
    most: usize,
) -> std::io::Result<()> {
    let places = Arc::new(Semaphore::new(most));
    loop {
        let Ok(stream) = next().await else {
            // Most likely out of file descriptors, which may become available later.
            tokio::time::sleep(Duration::from_secs(1)).await;
            continue;
        };
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        let connection = serve(stream);
        tokio::spawn(async move {
            connection.await;
            drop(place);
        });
    }
}

/// Answers the requests of a connection, until its time is over.
pub(super) async fn respond<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(stream: S, routes: Routes) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(REQUEST).max_buf_size(LONGEST_REQUEST);
    let connection = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    // An error is the client's: it left, or sent something else than HTTP. A browser connects again.
    let _ = timeout(CONNECTION, connection).await;
}

/// Returns routes that answer only requests for this machine, if the server is `local`.
pub(super) fn guarded(routes: Routes, local: bool) -> Routes {
    routes.layer(axum::middleware::from_fn(move |request, next| guard(local, request, next)))
}

/// Refuses requests by which a page of another origin would read a server of this machine.
async fn guard(local: bool, request: Request, next: Next) -> Response {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    if local && !host.is_some_and(is_local) {
        let text = "this server answers only requests for localhost; open it by that name, or serve it at an address \
                    that is not a loopback address\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    let mut response = next.run(request).await;
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Returns whether a request's host is this machine.
fn is_local(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Returns a text with its type, or an error of the server.
pub(crate) fn answer(text: std::result::Result<String, std::fmt::Error>, content_type: &'static str) -> Response {
    match text {
        Ok(text) => ([(CONTENT_TYPE, HeaderValue::from_static(content_type))], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// The type of the OpenMetrics text format.
pub(crate) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Maximum number of connections. A browser has up to six.
pub(super) const CONNECTIONS: usize = 64;

/// Time limit of a request's headers.
const REQUEST: Duration = Duration::from_secs(10);

/// Time limit of a connection, also of one that reads nothing.
const CONNECTION: Duration = Duration::from_secs(60);

/// Length limit of a request's headers, in bytes.
const LONGEST_REQUEST: usize = 16 * 1024;

#[cfg(test)]
mod tests;

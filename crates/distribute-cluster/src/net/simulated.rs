//! Sockets of the system, or of a simulated network while a thread acts as a process of one.

use std::future::poll_fn;
use std::io::Result as IoResult;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

mod network;

pub(crate) use network::{Link, Network, Place, act_as};

/// A connection.
#[derive(Debug)]
pub(crate) enum TcpStream {
    System(tokio::net::TcpStream),
    Simulated(network::Stream),
}

/// The listener of a service.
#[derive(Debug)]
pub(crate) enum TcpListener {
    System(tokio::net::TcpListener),
    Simulated(network::Listener),
}

/// Returns a listener of the system.
pub(crate) fn listening(listener: tokio::net::TcpListener) -> TcpListener {
    TcpListener::System(listener)
}

/// Returns a connection of the system.
#[cfg(feature = "grpc")]
pub(crate) fn connected(stream: tokio::net::TcpStream) -> TcpStream {
    TcpStream::System(stream)
}

impl TcpStream {
    pub(crate) async fn connect<A: AsRef<[SocketAddr]> + ?Sized>(addresses: &A) -> IoResult<TcpStream> {
        let addresses = addresses.as_ref();
        match (network::acting(), addresses) {
            (Some(place), [address, ..]) => place.connect(*address).await.map(TcpStream::Simulated),
            _ => tokio::net::TcpStream::connect(addresses).await.map(TcpStream::System),
        }
    }

    pub(crate) fn set_nodelay(&self, nodelay: bool) -> IoResult<()> {
        match self {
            TcpStream::System(stream) => stream.set_nodelay(nodelay),
            TcpStream::Simulated(_) => Ok(()),
        }
    }

    pub(crate) fn peer_addr(&self) -> IoResult<SocketAddr> {
        match self {
            TcpStream::System(stream) => stream.peer_addr(),
            TcpStream::Simulated(stream) => Ok(stream.peer()),
        }
    }

    pub(crate) fn poll_peek(&self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<IoResult<usize>> {
        match self {
            TcpStream::System(stream) => stream.poll_peek(cx, buffer),
            TcpStream::Simulated(stream) => stream.poll_peek(cx, buffer),
        }
    }

    pub(crate) fn try_read(&self, bytes: &mut [u8]) -> IoResult<usize> {
        match self {
            TcpStream::System(stream) => stream.try_read(bytes),
            TcpStream::Simulated(stream) => stream.try_read(bytes),
        }
    }
}

impl TcpListener {
    pub(crate) fn from_std(listener: std::net::TcpListener) -> IoResult<TcpListener> {
        tokio::net::TcpListener::from_std(listener).map(TcpListener::System)
    }

    pub(crate) fn local_addr(&self) -> IoResult<SocketAddr> {
        match self {
            TcpListener::System(listener) => listener.local_addr(),
            TcpListener::Simulated(listener) => Ok(listener.address()),
        }
    }

    pub(crate) fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<IoResult<(TcpStream, SocketAddr)>> {
        match self {
            TcpListener::System(listener) => {
                listener.poll_accept(cx).map_ok(|(stream, peer)| (TcpStream::System(stream), peer))
            }
            TcpListener::Simulated(listener) => listener.poll_accept(cx).map(|stream| {
                let peer = stream.peer();
                Ok((TcpStream::Simulated(stream), peer))
            }),
        }
    }
}

/// Passes a call on to the socket that it is, each of which can be pinned where it is.
macro_rules! on {
    ($kind:ident, $this:expr, $socket:ident => $call:expr) => {
        match $this.get_mut() {
            $kind::System(socket) => {
                let $socket = Pin::new(socket);
                $call
            }
            $kind::Simulated(socket) => {
                let $socket = Pin::new(socket);
                $call
            }
        }
    };
}

impl AsyncRead for TcpStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<IoResult<()>> {
        on!(TcpStream, self, socket => socket.poll_read(cx, buffer))
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<IoResult<usize>> {
        on!(TcpStream, self, socket => socket.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        on!(TcpStream, self, socket => socket.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        on!(TcpStream, self, socket => socket.poll_shutdown(cx))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            TcpStream::System(socket) => socket.is_write_vectored(),
            TcpStream::Simulated(_) => false,
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<IoResult<usize>> {
        on!(TcpStream, self, socket => socket.poll_write_vectored(cx, parts))
    }
}

impl network::Place {
    /// Connects from this place.
    async fn connect(self, address: SocketAddr) -> IoResult<network::Stream> {
        let connecting = self.network().begin(&self, address);
        let _guard = Abandon(&self, connecting);
        poll_fn(|cx| self.network().poll_connect(connecting, &self, cx)).await
    }
}

/// Gives up a connection that is being made.
struct Abandon<'a>(&'a network::Place, u64);

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        self.0.network().abandon(self.1);
    }
}

//! Sockets of an event loop, encrypted or not.

use std::future::Future;
use std::io::{Error as IoError, ErrorKind, IoSlice, Result as IoResult};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::net::TcpStream;

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod handshake;

/// A socket whose bytes are encrypted, or are sent as they are.
pub(crate) struct Socket(Kind);

enum Kind {
    Plain(TcpStream),
    #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "there are no handshakes"))]
    Secure(Box<dyn Duplex>),
    /// The socket is with its handshake.
    Away,
}

/// A stream in both directions.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

/// A handshake: the encrypted socket, and bytes that only both sides can know.
pub(crate) type Handshake = Pin<Box<dyn Future<Output = IoResult<(Socket, [u8; 32])>> + Send>>;

impl Socket {
    /// Returns whether the first byte of what the other side sends begins a TLS handshake; it is not taken.
    pub(crate) fn poll_begins_tls(&self, cx: &mut Context<'_>) -> Poll<IoResult<bool>> {
        let Kind::Plain(stream) = &self.0 else { return Poll::Ready(Ok(false)) };
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        stream.poll_peek(cx, &mut buffer).map_ok(|_| super::is_client_hello(buffer.filled()))
    }

    /// Takes the socket of a connection that begins a handshake.
    pub(crate) fn take_plain(&mut self) -> IoResult<TcpStream> {
        match std::mem::replace(&mut self.0, Kind::Away) {
            Kind::Plain(stream) => Ok(stream),
            other => {
                self.0 = other;
                Err(away())
            }
        }
    }

    /// Takes unread bytes from the system, as far as they are there, so that closing the socket does not take back what
    /// was sent.
    pub(crate) fn discard(&self) {
        if let Kind::Plain(stream) = &self.0 {
            let mut bytes = [0; 4096];
            for _ in 0..16 {
                if !matches!(stream.try_read(&mut bytes), Ok(1..)) {
                    break;
                }
            }
        }
    }
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Socket {
        Socket(Kind::Plain(stream))
    }
}

fn away() -> IoError {
    ErrorKind::NotConnected.into()
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<IoResult<()>> {
        match &mut self.0 {
            Kind::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Kind::Secure(stream) => Pin::new(stream).poll_read(cx, buffer),
            Kind::Away => Poll::Ready(Err(away())),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<IoResult<usize>> {
        match &mut self.0 {
            Kind::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Kind::Secure(stream) => Pin::new(stream).poll_write(cx, bytes),
            Kind::Away => Poll::Ready(Err(away())),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<IoResult<usize>> {
        match &mut self.0 {
            Kind::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            Kind::Secure(stream) => Pin::new(stream).poll_write_vectored(cx, parts),
            Kind::Away => Poll::Ready(Err(away())),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.0 {
            Kind::Plain(stream) => stream.is_write_vectored(),
            Kind::Secure(stream) => stream.is_write_vectored(),
            Kind::Away => false,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        match &mut self.0 {
            Kind::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Kind::Secure(stream) => Pin::new(stream).poll_flush(cx),
            Kind::Away => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult<()>> {
        match &mut self.0 {
            Kind::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Kind::Secure(stream) => Pin::new(stream).poll_shutdown(cx),
            Kind::Away => Poll::Ready(Ok(())),
        }
    }
}

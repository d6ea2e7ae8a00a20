//! Handshakes of an event loop.

use std::io::{Error as IoError, ErrorKind};

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{Handshake, Kind, Socket};
use crate::JobTls;
use crate::net::TcpStream;
use crate::tls::session::{binding_of, failed};
use crate::tls::{ADMITTED, PROTOCOL, TlsProblem};

impl JobTls {
    /// Begins the handshake on a connection that this process has opened. The caller limits the time.
    ///
    /// # Errors
    /// The socket's; one that holds a [`TlsProblem`] if the handshake failed, or this process was not admitted.
    pub(crate) fn call(&self, stream: TcpStream) -> Handshake {
        let (ready, name) = (self.ready(), self.server_name());
        Box::pin(async move {
            let connector = TlsConnector::from(ready.caller.clone());
            let mut stream = connector.connect(name, buffered(stream)).await.map_err(described)?;
            let mut byte = [0];
            // Until now the listener has not verified this side's certificate.
            match stream.read(&mut byte).await.map_err(described)? {
                1 if byte == [ADMITTED] => {}
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                _ => return Err(failed(TlsProblem::Handshake("it does not admit callers".to_owned()))),
            }
            let binding = binding_of(stream.get_ref().1)?;
            Ok((Socket(Kind::Secure(Box::new(stream))), binding))
        })
    }

    /// Begins the handshake on a connection that was accepted. The caller limits the time.
    ///
    /// # Errors
    /// The socket's; one that holds a [`TlsProblem`] if the handshake failed.
    pub(crate) fn answer(&self, stream: TcpStream) -> Handshake {
        let ready = self.ready();
        Box::pin(async move {
            let acceptor = TlsAcceptor::from(ready.listener.clone());
            let mut stream = acceptor.accept(buffered(stream)).await.map_err(described)?;
            if stream.get_ref().1.alpn_protocol() == Some(PROTOCOL) {
                stream.write_all(&[ADMITTED]).await?;
                stream.flush().await?;
            }
            let binding = binding_of(stream.get_ref().1)?;
            Ok((Socket(Kind::Secure(Box::new(stream))), binding))
        })
    }
}

/// rustls reads 4 KiB at a time at first, which would be a call of the system each.
fn buffered(stream: TcpStream) -> BufReader<TcpStream> {
    BufReader::with_capacity(READ_BYTES, stream)
}

const READ_BYTES: usize = 64 * 1024;

/// Returns an error of rustls as the problem that it stands for.
fn described(error: IoError) -> IoError {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(inner) => failed(TlsProblem::of(inner)),
        None => error,
    }
}

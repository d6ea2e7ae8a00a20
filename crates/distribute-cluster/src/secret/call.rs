//! The caller's side of a connection over a socket: TLS and the secret, as far as there are both.

use std::io::{Error as IoError, ErrorKind, Result as IoResult};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Calling, Event, JobSecret, Problem, Terms};
use crate::JobTls;
use crate::net::TcpStream;
use crate::tls::TlsProblem;
use crate::tls::socket::Socket;

/// Identifies this process and the listener to each other on a new connection: by certificates, if there is TLS, then
/// by the secret and a claim, if there is one. The caller limits the time.
///
/// # Errors
/// The inner error if one side refuses the other; the outer one if the connection breaks.
pub(crate) async fn identify(
    stream: TcpStream,
    tls: Option<&JobTls>,
    proof: Option<(&JobSecret, &Terms, &[u8])>,
) -> IoResult<Result<Socket, Problem>> {
    let (mut socket, binding) = match tls {
        None => (Socket::from(stream), None),
        Some(tls) => match tls.call(stream).await {
            Ok((socket, binding)) => (socket, Some(binding)),
            Err(error) => return handshake_failed(error).map(Err),
        },
    };
    let Some((secret, terms, claim)) = proof else { return Ok(Ok(socket)) };
    let proved = match binding {
        Some(binding) => prove(&mut socket, secret, &terms.bound_to(&binding), claim).await,
        None => prove(&mut socket, secret, terms, claim).await,
    };
    Ok(proved?.map(|()| socket))
}

/// Returns the problem of a handshake that has failed.
fn handshake_failed(error: IoError) -> IoResult<Problem> {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    match error.get_ref().and_then(|inner| inner.downcast_ref::<TlsProblem>()) {
        Some(problem) => Ok(Problem::Tls(problem.clone())),
        None if matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof) => {
            Ok(Problem::Tls(TlsProblem::Handshake("it hung up".to_owned())))
        }
        None => Err(error),
    }
}

/// Proves the secret on a new connection, and that the listener has it too.
async fn prove(stream: &mut Socket, secret: &JobSecret, terms: &Terms, claim: &[u8]) -> IoResult<Result<(), Problem>> {
    let (mut calling, first) = Calling::new(secret, terms, claim).map_err(|error| IoError::other(error.to_string()))?;
    stream.write_all(&first).await?;
    stream.flush().await?;
    let mut bytes = [0; PIECE_BYTES];
    loop {
        let wanted = calling.wants().min(PIECE_BYTES);
        let read = match stream.read(&mut bytes[..wanted]).await {
            // A program that does not know this exchange hangs up.
            Ok(0) => return Ok(Err(Problem::Garbled)),
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof) => {
                return Ok(Err(Problem::Garbled));
            }
            read => read?,
        };
        match calling.receive(&mut &bytes[..read]) {
            Event::More => {}
            Event::Send(bytes) => {
                stream.write_all(&bytes).await?;
                stream.flush().await?;
            }
            Event::Proved { .. } => return Ok(Ok(())),
            Event::Failed { problem, .. } => return Ok(Err(problem)),
            Event::Plain(_) => return Ok(Err(Problem::Garbled)),
        }
    }
}

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 512;

//! The caller's side of the exchange over a socket.

use std::io::{Error as IoError, ErrorKind};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{Calling, Event, JobSecret, Problem, Terms};

/// Proves the secret on a new connection, and that the listener has it too. The caller limits the time.
///
/// # Errors
/// The inner error if the listener refuses, or does not prove the secret; the outer one if the connection breaks.
pub async fn prove<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    secret: &JobSecret,
    terms: &Terms,
    claim: &[u8],
) -> Result<Result<(), Problem>, IoError> {
    let (mut calling, first) = Calling::new(secret, terms, claim).map_err(|error| IoError::other(error.to_string()))?;
    stream.write_all(&first).await?;
    let mut bytes = [0; PIECE_BYTES];
    loop {
        let wanted = calling.wants().min(PIECE_BYTES);
        let read = match stream.read(&mut bytes[..wanted]).await {
            // A program that does not know this exchange hangs up.
            Ok(0) => return Ok(Err(Problem::Garbled)),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(Err(Problem::Garbled)),
            read => read?,
        };
        match calling.receive(&mut &bytes[..read]) {
            Event::More => {}
            Event::Send(bytes) => stream.write_all(&bytes).await?,
            Event::Proved { .. } => return Ok(Ok(())),
            Event::Failed { problem, .. } => return Ok(Err(problem)),
            Event::Plain(_) => return Ok(Err(Problem::Garbled)),
        }
    }
}

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 512;

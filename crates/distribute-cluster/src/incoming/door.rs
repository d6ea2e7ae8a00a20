//! The exchange of secrets on an accepted connection.

use std::io::{ErrorKind, Result as IoResult};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::JobSecret;
use crate::net::TcpStream;
use crate::secret::{Event, Listening, Problem, Refusals, Terms};

/// Admits callers of a listener by the secret that they prove. Refusals are logged once for each address.
#[derive(Debug)]
pub struct Door {
    secret: Option<JobSecret>,
    terms: Terms,
    service: String,
    remedy: &'static str,
    refusals: Refusals,
}

impl Door {
    /// Creates the door of a service, which messages name, such as `worker:0`. Without a secret every caller is let
    /// through, but one that has a secret, which is told that this process has none.
    pub fn new(service: impl Into<String>, secret: Option<JobSecret>, terms: Terms, remedy: &'static str) -> Door {
        Door { secret, terms, service: service.into(), remedy, refusals: Refusals::default() }
    }

    /// Returns whether callers have to prove a secret.
    pub fn is_locked(&self) -> bool {
        self.secret.is_some()
    }

    /// Returns the sentence for a caller of the service's own protocol that has proved nothing, or `None` if it need
    /// not. Logs the refusal.
    pub fn refusal_of(&self, caller: &crate::Acquaintance) -> Option<String> {
        if !self.is_locked() || caller.claim().is_some() {
            return None;
        }
        self.log(caller.peer(), &Problem::MissingThere);
        Some(format!("{}; {}", Problem::MissingThere.seen_from_there(), self.remedy))
    }

    fn log(&self, peer: Option<SocketAddr>, problem: &Problem) {
        if self.refusals.is_first(peer) {
            let peer = peer.map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string());
            tracing::warn!(
                "{} refused a connection of {peer}: {problem}; {}; further ones of that host are refused without a \
                 message",
                self.service,
                self.remedy
            );
        }
    }
}

/// The exchange on one connection.
pub(super) struct Entry {
    door: Arc<Door>,
    peer: Option<SocketAddr>,
    listening: Option<Listening>,
    /// Bytes to send, and how the exchange ends once they are sent.
    out: Vec<u8>,
    end: Option<End>,
}

/// The end of an exchange: the proved claim, or the first bytes of a caller that has proved nothing.
pub(super) type Entered = Result<Vec<u8>, Vec<u8>>;

enum End {
    Entered(Entered),
    Refused,
}

impl Entry {
    pub(super) fn new(door: Arc<Door>, peer: Option<SocketAddr>) -> Entry {
        Entry { door, peer, listening: None, out: Vec::new(), end: None }
    }

    /// Continues the exchange.
    ///
    /// # Errors
    /// If the caller is refused or gone.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, stream: &mut TcpStream) -> Poll<IoResult<Entered>> {
        loop {
            while !self.out.is_empty() {
                let sent = ready!(Pin::new(&mut *stream).poll_write(cx, &self.out))?;
                self.out.drain(..sent);
            }
            match self.end.take() {
                Some(End::Entered(entered)) => return Poll::Ready(Ok(entered)),
                Some(End::Refused) => return Poll::Ready(Err(ErrorKind::ConnectionAborted.into())),
                None => {}
            }
            let listening = match &mut self.listening {
                Some(listening) => listening,
                none => none.insert(
                    Listening::new(self.door.secret.as_ref(), &self.door.terms)
                        .map_err(|error| std::io::Error::other(error.to_string()))?,
                ),
            };
            let mut bytes = [0; PIECE_BYTES];
            let mut buffer = ReadBuf::new(&mut bytes[..listening.wants().min(PIECE_BYTES)]);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer))?;
            if buffer.filled().is_empty() {
                return Poll::Ready(Err(ErrorKind::UnexpectedEof.into()));
            }
            match listening.receive(&mut { buffer.filled() }) {
                Event::More => {}
                Event::Send(bytes) => self.out = bytes,
                Event::Plain(first) => self.end = Some(End::Entered(Err(first))),
                Event::Proved { send, claim } => (self.out, self.end) = (send, Some(End::Entered(Ok(claim)))),
                Event::Failed { send, problem } => {
                    self.door.log(self.peer, &problem);
                    (self.out, self.end) = (send, Some(End::Refused));
                }
            }
        }
    }
}

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 512;

//! The handshake and the exchange of secrets on an accepted connection.

use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::secret::{Event, Listening, Problem, Refusals, Terms};
use crate::tls::TlsProblem;
use crate::tls::socket::{Handshake, Socket};
use crate::{JobSecret, JobTls};

/// Admits callers of a listener by the certificate that they show and the secret that they prove. Refusals are logged
/// once for each address.
#[derive(Debug)]
pub struct Door {
    secret: Option<JobSecret>,
    tls: Option<JobTls>,
    terms: Terms,
    service: String,
    remedy: &'static str,
    refusals: Refusals,
}

impl Door {
    /// Creates the door of a service, which messages name, such as `worker:0`. Without a secret every caller is let
    /// through, but one that has a secret, which is told that this process has none.
    pub fn new(service: impl Into<String>, secret: Option<JobSecret>, terms: Terms, remedy: &'static str) -> Door {
        Door { secret, tls: None, terms, service: service.into(), remedy, refusals: Refusals::default() }
    }

    /// Asks callers for a certificate. Without one every caller is let through, but one that begins a handshake, which
    /// is told that this process has no TLS.
    #[must_use]
    pub fn tls(self, tls: Option<JobTls>) -> Door {
        Door { tls, ..self }
    }

    /// Returns whether callers have to show a certificate or to prove a secret.
    pub fn is_locked(&self) -> bool {
        self.secret.is_some() || self.tls.is_some()
    }

    /// Returns the sentence for a caller of the service's own protocol that has shown or proved nothing, or `None` if
    /// it need not. Logs the refusal.
    pub fn refusal_of(&self, caller: &crate::Acquaintance) -> Option<String> {
        let problem = match (&self.tls, &self.secret) {
            (Some(_), _) if !caller.is_encrypted() => Problem::Tls(TlsProblem::MissingThere),
            (_, Some(_)) if caller.claim().is_none() => Problem::MissingThere,
            _ => return None,
        };
        self.log(caller.peer(), &problem);
        Some(format!("{}; {}", problem.seen_from_there(), problem.remedy(self.remedy)))
    }

    fn log(&self, peer: Option<SocketAddr>, problem: &Problem) {
        if self.refusals.is_first(peer) {
            let peer = peer.map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string());
            tracing::warn!(
                "{} refused a connection of {peer}: {problem}; {}; further ones of that host are refused without a \
                 message",
                self.service,
                problem.remedy(self.remedy)
            );
        }
    }
}

/// The handshake and the exchange on one connection.
pub(super) struct Entry {
    door: Arc<Door>,
    peer: Option<SocketAddr>,
    stage: Stage,
    /// Bytes to send, and how the exchange ends once they are sent.
    out: Vec<u8>,
    end: Option<End>,
    is_encrypted: bool,
}

enum Stage {
    /// The caller's first byte says whether it begins a handshake.
    First,
    Handshake(Handshake),
    /// The exchange of secrets, inside TLS or without.
    Exchange(Box<Listening>),
}

/// The end of an exchange: the proved claim, or the first bytes of a caller that has proved nothing.
pub(super) type Entered = Result<Vec<u8>, Vec<u8>>;

enum End {
    Entered(Entered),
    Refused,
}

impl Entry {
    pub(super) fn new(door: Arc<Door>, peer: Option<SocketAddr>) -> Entry {
        Entry { door, peer, stage: Stage::First, out: Vec::new(), end: None, is_encrypted: false }
    }

    /// Returns whether the caller has shown a certificate.
    pub(super) fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }

    /// Continues the handshake and the exchange.
    ///
    /// # Errors
    /// If the caller is refused or gone.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, stream: &mut Socket) -> Poll<IoResult<Entered>> {
        loop {
            while !self.out.is_empty() {
                let sent = ready!(Pin::new(&mut *stream).poll_write(cx, &self.out))?;
                self.out.drain(..sent);
            }
            match self.end.take() {
                Some(End::Entered(entered)) => {
                    // What was sent may still be in the buffer of TLS.
                    let flushed = Pin::new(&mut *stream).poll_flush(cx)?;
                    if flushed.is_pending() {
                        self.end = Some(End::Entered(entered));
                        return Poll::Pending;
                    }
                    return Poll::Ready(Ok(entered));
                }
                Some(End::Refused) => {
                    let _ = Pin::new(&mut *stream).poll_flush(cx);
                    // A socket that is closed with bytes unread takes back what it has sent.
                    stream.discard();
                    return Poll::Ready(Err(ErrorKind::ConnectionAborted.into()));
                }
                None => {}
            }
            let listening = match &mut self.stage {
                Stage::First => {
                    self.stage = ready!(self.begin(cx, stream))?;
                    continue;
                }
                Stage::Handshake(handshake) => {
                    let (socket, binding) = ready!(handshake.as_mut().poll(cx)).inspect_err(|error| {
                        if let Some(problem) = error.get_ref().and_then(|inner| inner.downcast_ref::<TlsProblem>()) {
                            self.door.log(self.peer, &Problem::Tls(problem.clone()));
                        }
                    })?;
                    *stream = socket;
                    self.is_encrypted = true;
                    let terms = self.door.terms.bound_to(&binding);
                    self.stage = Stage::Exchange(listening(self.door.secret.as_ref(), &terms)?);
                    continue;
                }
                Stage::Exchange(listening) => listening,
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

    /// Begins the handshake, where a certificate is asked for and the caller begins one, or else the exchange.
    fn begin(&self, cx: &mut Context<'_>, stream: &mut Socket) -> Poll<IoResult<Stage>> {
        let Some(tls) = &self.door.tls else {
            return Poll::Ready(Ok(Stage::Exchange(listening(self.door.secret.as_ref(), &self.door.terms)?)));
        };
        if ready!(stream.poll_begins_tls(cx))? {
            return Poll::Ready(Ok(Stage::Handshake(tls.answer(stream.take_plain()?))));
        }
        let refusing = listening(self.door.secret.as_ref(), &self.door.terms)?;
        Poll::Ready(Ok(Stage::Exchange(Box::new(refusing.refusing(Problem::Tls(TlsProblem::MissingThere))))))
    }
}

fn listening(secret: Option<&JobSecret>, terms: &Terms) -> IoResult<Box<Listening>> {
    Listening::new(secret, terms).map(Box::new).map_err(|error| IoError::other(error.to_string()))
}

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 512;

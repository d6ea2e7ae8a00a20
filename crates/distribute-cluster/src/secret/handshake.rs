//! The exchange by which both sides of a connection prove the job's secret, without sockets.
//!
//! ```text
//! caller                                    listener
//!   call: challenge, identity, claim  ─────▶
//!                                     ◀─────  challenge
//!   proof                             ─────▶
//!                                     ◀─────  proof
//! ```
//!
//! A proof is the HMAC-SHA256 of a label, the protocol, the side that proves, the identity, the claim and both
//! challenges. Challenges are random and used once, so that a recorded exchange proves nothing later; sides have
//! different codes, so that neither's proof can be sent back to it. The listener proves last: to strangers it gives
//! nothing that depends on the secret. On a connection with TLS, proofs also cover its channel binding, so that they
//! cannot be relayed between two connections.
//!
//! # Source
//! RFC 2104; ISO/IEC 9798-4, mutual authentication in three passes.

use super::{JobSecret, PROOF_BYTES, Problem};
use crate::planted::{Defect, planted};
use crate::text::{LONGEST, clean};
use crate::tls::{ALERT_WITHOUT_TLS, TlsProblem, is_client_hello};
use crate::{Error, Result};

/// The terms on which both sides of a connection must agree: the protocol, and the job or group that they belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    protocol: &'static str,
    identity: String,
    /// The channel binding of the connection; empty without TLS.
    binding: Vec<u8>,
}

impl Terms {
    /// Creates the terms of a protocol, such as `coordination 3`, for a job or group. Of the identity at most
    /// [`MAX_IDENTITY_BYTES`](Terms::MAX_IDENTITY_BYTES) bytes are kept.
    pub fn new(protocol: &'static str, identity: impl Into<String>) -> Terms {
        let mut identity: String = identity.into();
        while identity.len() > Terms::MAX_IDENTITY_BYTES {
            identity.pop();
        }
        Terms { protocol, identity, binding: Vec::new() }
    }

    /// Returns the same terms for a connection with TLS, which this binding identifies.
    #[must_use]
    pub fn bound_to(&self, binding: &[u8]) -> Terms {
        Terms { binding: binding.to_vec(), ..self.clone() }
    }

    /// Length limit of an identity, in bytes.
    pub const MAX_IDENTITY_BYTES: usize = 200;

    /// Length limit of a claim, in bytes.
    pub const MAX_CLAIM_BYTES: usize = 200;

    fn proves<'a>(&'a self, side: &'a [u8; 1], claim: &'a [u8], exchange: &'a Exchange) -> Vec<&'a [u8]> {
        let mut fields: Vec<&[u8]> = vec![
            LABEL,
            self.protocol.as_bytes(),
            side,
            self.identity.as_bytes(),
            claim,
            &exchange.caller,
            &exchange.listener,
        ];
        fields.extend((!self.binding.is_empty()).then_some(&self.binding[..]));
        fields
    }
}

impl Problem {
    /// Returns the message by which a listener tells a caller that it is refused; empty if it is told nothing.
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = match self {
            Problem::Garbled => return Vec::new(),
            Problem::Tls(TlsProblem::MissingThere) => vec![CALLER_LACKS_TLS],
            // TLS has alerts of its own.
            Problem::Tls(_) => return Vec::new(),
            Problem::Wrong => vec![WRONG],
            Problem::MissingHere => vec![LISTENER_LACKS],
            Problem::MissingThere => vec![CALLER_LACKS],
            Problem::Other { ours, .. } => [&[OTHER], ours.as_bytes()].concat(),
        };
        frame(Code::Refused, &[&body])
    }

    /// Reads the message of a listener.
    fn of_listener(body: &[u8], ours: &str) -> Problem {
        match body.split_first() {
            Some((&WRONG, _)) => Problem::Wrong,
            Some((&LISTENER_LACKS, _)) => Problem::MissingThere,
            Some((&CALLER_LACKS, _)) => Problem::MissingHere,
            Some((&CALLER_LACKS_TLS, _)) => Problem::Tls(TlsProblem::MissingHere),
            Some((&OTHER, theirs)) => {
                let theirs = clean(&String::from_utf8_lossy(theirs), LONGEST);
                Problem::Other { theirs, ours: ours.to_owned() }
            }
            _ => Problem::Garbled,
        }
    }
}

/// The next action, after bytes of the other side have arrived.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// More bytes are to be read.
    More,
    /// These bytes are to be sent; then more are to be read.
    Send(Vec<u8>),
    /// Both sides have proved the secret, for the other once these bytes are sent.
    Proved {
        /// The bytes to send, which may be none.
        send: Vec<u8>,
        /// The claim of the caller.
        claim: Vec<u8>,
    },
    /// The caller does not begin the exchange: it has no secret, or is of another program. These are its first bytes,
    /// at most 11.
    Plain(Vec<u8>),
    /// The connection is to be closed once these bytes are sent.
    Failed {
        /// The bytes to send, which may be none.
        send: Vec<u8>,
        /// The problem.
        problem: Problem,
    },
}

impl Event {
    fn failed(problem: Problem) -> Event {
        Event::Failed { send: Vec::new(), problem }
    }

    fn refused(problem: Problem) -> Event {
        Event::Failed { send: problem.to_bytes(), problem }
    }
}

/// The caller's side of the exchange.
///
/// # Examples
/// Bytes are moved by the caller of both:
/// ```
/// use distribute_cluster::JobSecret;
/// use distribute_cluster::secret::{Calling, Event, Listening, Terms};
///
/// let (secret, terms) = (JobSecret::new("9b1c5f0a7be24c0d8f3e")?, Terms::new("example 1", "job a"));
/// let (mut caller, first) = Calling::new(&secret, &terms, b"rank 1")?;
/// let mut listener = Listening::new(Some(&secret), &terms)?;
/// let mut to_listener = first;
/// let claim = loop {
///     let event = listener.receive(&mut &to_listener[..]);
///     let (Event::Send(bytes) | Event::Proved { send: bytes, .. }) = &event else { panic!("{event:?}") };
///     match caller.receive(&mut &bytes[..]) {
///         Event::Send(bytes) => to_listener = bytes,
///         Event::Proved { .. } => match event {
///             Event::Proved { claim, .. } => break claim,
///             other => panic!("{other:?}"),
///         },
///         other => panic!("{other:?}"),
///     }
/// };
/// assert_eq!(claim, b"rank 1");
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
#[derive(Debug)]
pub struct Calling {
    secret: JobSecret,
    terms: Terms,
    claim: Vec<u8>,
    challenge: [u8; CHALLENGE_BYTES],
    /// Known once the listener has sent its challenge.
    exchange: Option<Exchange>,
    reader: Reader,
}

impl Calling {
    /// Begins the exchange; the bytes are to be sent. The claim, of at most
    /// [`MAX_CLAIM_BYTES`](Terms::MAX_CLAIM_BYTES), says who calls; the listener gets it once it is proved.
    ///
    /// # Errors
    /// [`Error::Random`] if the system returns no random numbers, [`Error::Config`] for a longer claim.
    pub fn new(secret: &JobSecret, terms: &Terms, claim: &[u8]) -> Result<(Calling, Vec<u8>)> {
        if claim.len() > Terms::MAX_CLAIM_BYTES {
            let (problem, expected) = (format!("it has {} bytes", claim.len()), "at most 200 bytes");
            let given = String::from_utf8_lossy(claim);
            return Err(Error::config("a connection's claim", problem, given, expected, "Shorten it."));
        }
        let challenge = challenge()?;
        let identity = terms.identity.as_bytes();
        // Both lengths are at most 200.
        let first = frame(Code::Call, &[&challenge, &[identity.len() as u8], identity, claim]);
        let (secret, terms, claim) = (secret.clone(), terms.clone(), claim.to_vec());
        Ok((Calling { secret, terms, claim, challenge, exchange: None, reader: Reader::default() }, first))
    }

    /// Returns how many bytes to read at most, so that none that follow the exchange are taken.
    pub fn wants(&self) -> usize {
        self.reader.wants()
    }

    /// Takes bytes of the listener, as many as belong to the exchange, and returns what to do.
    pub fn receive(&mut self, bytes: &mut &[u8]) -> Event {
        let (code, body) = match self.reader.take(bytes) {
            Taken::More => return Event::More,
            Taken::Frame(code, body) => (code, body),
            Taken::Foreign => return Event::failed(Problem::Garbled),
        };
        match (code, &self.exchange) {
            (Code::Refused, _) => Event::failed(Problem::of_listener(&body, &self.terms.identity)),
            (Code::Challenge, None) => {
                let Ok(listener) = body.try_into() else { return Event::failed(Problem::Garbled) };
                let exchange = self.exchange.insert(Exchange { caller: self.challenge, listener });
                let proof = exchange.prove(&self.secret, &self.terms, Side::Caller, &self.claim);
                Event::Send(frame(Code::Proof, &[&proof]))
            }
            (Code::Proof, Some(exchange)) => {
                match exchange.verify(&self.secret, &self.terms, Side::Listener, &self.claim, &body) {
                    true => Event::Proved { send: Vec::new(), claim: self.claim.clone() },
                    false => Event::failed(Problem::Wrong),
                }
            }
            _ => Event::failed(Problem::Garbled),
        }
    }
}

/// The listener's side of the exchange. See [`Calling`].
#[derive(Debug)]
pub struct Listening {
    secret: Option<JobSecret>,
    terms: Terms,
    /// The reason for which every caller that begins is refused.
    refuses: Option<Problem>,
    challenge: [u8; CHALLENGE_BYTES],
    /// Known once the caller has begun, with its claim.
    exchange: Option<(Exchange, Vec<u8>)>,
    reader: Reader,
}

impl Listening {
    /// Waits for a caller; without a secret one that has one is told so.
    ///
    /// # Errors
    /// [`Error::Random`] if the system returns no random numbers.
    pub fn new(secret: Option<&JobSecret>, terms: &Terms) -> Result<Listening> {
        let (secret, terms, reader) = (secret.cloned(), terms.clone(), Reader::default());
        Ok(Listening { secret, terms, refuses: None, challenge: challenge()?, exchange: None, reader })
    }

    /// Refuses every caller that begins the exchange, for this reason; others may still be plain.
    #[must_use]
    pub fn refusing(self, problem: Problem) -> Listening {
        Listening { refuses: Some(problem), ..self }
    }

    /// Returns how many bytes to read at most, so that none that follow the exchange are taken.
    pub fn wants(&self) -> usize {
        self.reader.wants()
    }

    /// Takes bytes of the caller, as many as belong to the exchange, and returns what to do.
    pub fn receive(&mut self, bytes: &mut &[u8]) -> Event {
        let (code, body) = match self.reader.take(bytes) {
            Taken::More => return Event::More,
            Taken::Frame(code, body) => (code, body),
            // A caller that begins a handshake here, where its certificate is not asked for, has TLS alone.
            Taken::Foreign if self.exchange.is_none() && is_client_hello(&self.reader.bytes) => {
                let problem = Problem::Tls(TlsProblem::MissingHere);
                return Event::Failed { send: ALERT_WITHOUT_TLS.to_vec(), problem };
            }
            Taken::Foreign if self.exchange.is_none() => return Event::Plain(std::mem::take(&mut self.reader.bytes)),
            Taken::Foreign => return Event::failed(Problem::Garbled),
        };
        match (code, &self.exchange, &self.secret) {
            (Code::Call, None, secret) => {
                let Some((caller, identity, claim)) = read_call(&body) else {
                    return Event::failed(Problem::Garbled);
                };
                if identity != self.terms.identity.as_bytes() {
                    let theirs = clean(&String::from_utf8_lossy(identity), LONGEST);
                    return Event::refused(Problem::Other { theirs, ours: self.terms.identity.clone() });
                }
                if let Some(problem) = &self.refuses {
                    return Event::refused(problem.clone());
                }
                if secret.is_none() {
                    return Event::refused(Problem::MissingHere);
                }
                self.exchange = Some((Exchange { caller, listener: self.challenge }, claim.to_vec()));
                Event::Send(frame(Code::Challenge, &[&self.challenge]))
            }
            (Code::Proof, Some((exchange, claim)), Some(secret)) => {
                if !exchange.verify(secret, &self.terms, Side::Caller, claim, &body) {
                    return Event::refused(Problem::Wrong);
                }
                let proof = exchange.prove(secret, &self.terms, Side::Listener, claim);
                Event::Proved { send: frame(Code::Proof, &[&proof]), claim: claim.clone() }
            }
            _ => Event::failed(Problem::Garbled),
        }
    }
}

/// The side that proves.
#[derive(Clone, Copy)]
enum Side {
    Caller = 1,
    Listener = 2,
}

/// The challenges of one connection.
#[derive(Debug)]
struct Exchange {
    caller: [u8; CHALLENGE_BYTES],
    listener: [u8; CHALLENGE_BYTES],
}

impl Exchange {
    fn prove(&self, secret: &JobSecret, terms: &Terms, side: Side, claim: &[u8]) -> [u8; PROOF_BYTES] {
        secret.code(&terms.proves(&[side as u8], claim, self))
    }

    fn verify(&self, secret: &JobSecret, terms: &Terms, side: Side, claim: &[u8], proof: &[u8]) -> bool {
        secret.verifies(&terms.proves(&[side as u8], claim, self), proof) || planted(Defect::AnyProof)
    }
}

fn challenge() -> Result<[u8; CHALLENGE_BYTES]> {
    let mut bytes = [0; CHALLENGE_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| Error::Random(error.to_string()))?;
    Ok(bytes)
}

/// Returns the challenge, identity and claim of a call.
fn read_call(body: &[u8]) -> Option<([u8; CHALLENGE_BYTES], &[u8], &[u8])> {
    let (challenge, rest) = body.split_first_chunk()?;
    let (len, rest) = rest.split_first()?;
    let (identity, claim) = rest.split_at_checked(usize::from(*len))?;
    let fits = identity.len() <= Terms::MAX_IDENTITY_BYTES && claim.len() <= Terms::MAX_CLAIM_BYTES;
    fits.then_some((*challenge, identity, claim))
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Call = 1,
    Challenge = 2,
    Proof = 3,
    Refused = 4,
}

impl Code {
    fn of(byte: u8) -> Option<Code> {
        [Code::Call, Code::Challenge, Code::Proof, Code::Refused].into_iter().find(|code| *code as u8 == byte)
    }
}

fn frame(code: Code, parts: &[&[u8]]) -> Vec<u8> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    // Every message has less than 500 bytes.
    let head = [&MAGIC[..], &[code as u8], &(len as u16).to_be_bytes()].concat();
    [&[&head[..]], parts].concat().concat()
}

/// A message as it arrives.
#[derive(Debug, Default)]
struct Reader {
    bytes: Vec<u8>,
}

enum Taken {
    More,
    Frame(Code, Vec<u8>),
    /// Bytes that no message begins with, or a message that is too long.
    Foreign,
}

impl Reader {
    /// Takes the bytes up to the end of one message. Of foreign bytes those stay in `self.bytes` that were taken.
    fn take(&mut self, bytes: &mut &[u8]) -> Taken {
        let code = loop {
            if let Some(length) = self.length() {
                // Before the body arrives, so that foreign bytes are never longer than a head.
                let code = Code::of(self.bytes[MAGIC.len()]).filter(|_| length <= MAX_BODY_BYTES);
                match code {
                    Some(code) if self.bytes.len() == HEAD_BYTES + length => break code,
                    Some(_) => {}
                    None => return Taken::Foreign,
                }
            }
            if bytes.is_empty() {
                return Taken::More;
            }
            let (taken, rest) = bytes.split_at(bytes.len().min(self.wants()));
            self.bytes.extend_from_slice(taken);
            *bytes = rest;
            let begun = self.bytes.len().min(MAGIC.len());
            if self.bytes[..begun] != MAGIC[..begun] {
                return Taken::Foreign;
            }
        };
        let body = self.bytes.split_off(HEAD_BYTES);
        self.bytes.clear();
        Taken::Frame(code, body)
    }

    fn wants(&self) -> usize {
        (HEAD_BYTES + self.length().unwrap_or(0)).saturating_sub(self.bytes.len())
    }

    /// Returns the length of the body once it is known.
    fn length(&self) -> Option<usize> {
        let length = self.bytes.get(MAGIC.len() + 1..HEAD_BYTES)?;
        Some(usize::from(u16::from_be_bytes(length.try_into().ok()?)))
    }
}

/// The first bytes of every message; the last one is the version of the exchange.
const MAGIC: &[u8; 8] = b"dst-sec1";

/// The magic, a code and a length.
const HEAD_BYTES: usize = MAGIC.len() + 3;

/// Limit of a message without its head.
const MAX_BODY_BYTES: usize = CHALLENGE_BYTES + 1 + Terms::MAX_IDENTITY_BYTES + Terms::MAX_CLAIM_BYTES;

const CHALLENGE_BYTES: usize = 32;

/// The first field of all proofs, so that the secret's codes have no other meaning.
const LABEL: &[u8] = b"distribute: connection of a job";

const WRONG: u8 = 1;
const LISTENER_LACKS: u8 = 2;
const CALLER_LACKS: u8 = 3;
const OTHER: u8 = 4;
const CALLER_LACKS_TLS: u8 = 5;

#[cfg(test)]
mod tests;

//! One side of a connection without an event loop: over any socket, blocking or not.

use std::fmt;
use std::io::{Error as IoError, ErrorKind, IoSlice, Read, Result as IoResult, Write};

use rustls::{ClientConnection, Connection, ConnectionCommon, ServerConnection};

use super::{ADMITTED, JobTls, PROTOCOL, TlsProblem};

/// One side of a connection: encrypts and decrypts what its user reads from and writes to a socket.
///
/// It works with sockets that block and with those that do not. With the latter, [`wants_write`](Session::wants_write)
/// says whether encrypted bytes wait until the socket has room. What has been read from the socket and is decrypted
/// already is invisible to `poll`: read until [`ErrorKind::WouldBlock`] before waiting.
pub struct Session {
    connection: Connection,
    phase: Phase,
    binding: [u8; BINDING_BYTES],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Handshake,
    /// The caller waits until the listener has verified its certificate.
    Admission,
    Open,
}

impl Session {
    /// Begins the handshake of a caller.
    ///
    /// # Errors
    /// [`TlsProblem::Own`] if the certificate cannot be used.
    pub fn calling(tls: &JobTls) -> Result<Session, TlsProblem> {
        let connection = ClientConnection::new(tls.ready().caller.clone(), tls.server_name());
        Session::new(connection.map(Connection::from))
    }

    /// Begins the handshake of a listener.
    ///
    /// # Errors
    /// [`TlsProblem::Own`] if the certificate cannot be used.
    pub fn listening(tls: &JobTls) -> Result<Session, TlsProblem> {
        Session::new(ServerConnection::new(tls.ready().listener.clone()).map(Connection::from))
    }

    fn new(connection: Result<Connection, rustls::Error>) -> Result<Session, TlsProblem> {
        let mut connection = connection.map_err(|error| TlsProblem::Own(error.to_string()))?;
        // `write` bounds what waits.
        connection.set_buffer_limit(None);
        Ok(Session { connection, phase: Phase::Handshake, binding: [0; BINDING_BYTES] })
    }

    /// Returns whether the handshake is over, and this process admitted.
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Returns whether the other side has begun a handshake in earnest: its first message was whole.
    pub fn has_begun(&self) -> bool {
        self.connection.protocol_version().is_some()
    }

    /// Returns bytes that only the two sides of this connection can know, once it is open.
    pub fn binding(&self) -> [u8; 32] {
        self.binding
    }

    /// Returns whether encrypted bytes wait to be sent.
    pub fn wants_write(&self) -> bool {
        self.connection.wants_write()
    }

    /// Continues the handshake; returns whether it is over. With a socket that does not block, call it again when the
    /// socket can be read or, if [`wants_write`](Session::wants_write), written.
    ///
    /// # Errors
    /// The socket's; one that holds a [`TlsProblem`] if the handshake failed.
    pub fn advance<S: Read + Write>(&mut self, socket: &mut S) -> IoResult<bool> {
        loop {
            match self.flush(socket) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(self.is_open()),
                sent => sent?,
            }
            if self.step()? {
                continue;
            }
            if self.is_open() {
                return Ok(true);
            }
            match self.fill(socket) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                filled => filled?,
            }
        }
    }

    /// Moves to the next phase, where what has arrived allows it.
    fn step(&mut self) -> IoResult<bool> {
        match self.phase {
            Phase::Handshake if self.connection.is_handshaking() => Ok(false),
            Phase::Handshake => {
                let (is_caller, binding) = match &self.connection {
                    Connection::Client(caller) => (true, binding_of(caller)?),
                    Connection::Server(listener) => (false, binding_of(listener)?),
                };
                self.binding = binding;
                if !is_caller && self.connection.alpn_protocol() == Some(PROTOCOL) {
                    self.connection.writer().write_all(&[ADMITTED])?;
                }
                self.phase = if is_caller { Phase::Admission } else { Phase::Open };
                Ok(true)
            }
            Phase::Admission => {
                let mut byte = [0];
                match self.connection.reader().read(&mut byte) {
                    Ok(1) if byte == [ADMITTED] => self.phase = Phase::Open,
                    Ok(_) => return Err(failed(TlsProblem::Handshake("it does not admit callers".to_owned()))),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                    Err(error) => return Err(error),
                }
                Ok(true)
            }
            Phase::Open => Ok(false),
        }
    }

    /// Reads from the socket once, and decrypts what has arrived.
    fn fill<S: Read + Write>(&mut self, socket: &mut S) -> IoResult<()> {
        if self.connection.read_tls(socket)? == 0 {
            // Not even a message that ends the stream: the other side may have been cut off.
            return Err(IoError::new(ErrorKind::UnexpectedEof, "the connection was closed"));
        }
        let Err(error) = self.connection.process_new_packets() else { return Ok(()) };
        // The other side is told, if it still listens.
        let _ = self.flush(socket);
        Err(failed(TlsProblem::of(&error)))
    }

    /// Reads what the other side has sent; 0 if it has ended the stream in order.
    ///
    /// # Errors
    /// The socket's; [`ErrorKind::UnexpectedEof`] if the connection ended without notice;
    /// [`ErrorKind::InvalidData`] if what arrives is not what the other side has sent.
    pub fn read<S: Read + Write>(&mut self, socket: &mut S, bytes: &mut [u8]) -> IoResult<usize> {
        loop {
            match self.connection.reader().read(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.fill(socket)?,
                read => return read,
            }
        }
    }

    /// Encrypts and sends bytes; returns how many were taken, which may not have left yet. Nothing is taken while
    /// earlier ones wait.
    ///
    /// # Errors
    /// The socket's; [`ErrorKind::WouldBlock`] if earlier bytes wait.
    pub fn write<S: Write>(&mut self, socket: &mut S, parts: &[IoSlice<'_>]) -> IoResult<usize> {
        self.flush(socket)?;
        let mut room = TURN_BYTES;
        // Parts that are small share records.
        let turn: Vec<IoSlice<'_>> = parts
            .iter()
            .map_while(|part| {
                let len = part.len().min(room);
                room -= len;
                (len > 0 || part.is_empty()).then(|| IoSlice::new(&part[..len]))
            })
            .collect();
        let taken = self.connection.writer().write_vectored(&turn)?;
        match self.flush(socket) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(taken),
        }
    }

    /// Sends encrypted bytes that wait.
    ///
    /// # Errors
    /// The socket's; [`ErrorKind::WouldBlock`] if it has no room for all.
    pub fn flush<S: Write>(&mut self, socket: &mut S) -> IoResult<()> {
        while self.connection.wants_write() {
            match self.connection.write_tls(socket) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Tells the other side that nothing more comes, so that it can tell the end from a connection that was cut.
    ///
    /// # Errors
    /// The socket's error if it takes no bytes.
    pub fn close<S: Write>(&mut self, socket: &mut S) -> IoResult<()> {
        self.connection.send_close_notify();
        self.flush(socket)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("phase", &self.phase).finish_non_exhaustive()
    }
}

/// Returns the channel binding of a connection whose handshake is complete (RFC 9266).
pub(super) fn binding_of<Side>(connection: &ConnectionCommon<Side>) -> IoResult<[u8; BINDING_BYTES]> {
    let exported = connection.export_keying_material([0; BINDING_BYTES], BINDING_LABEL, Some(&[]));
    exported.map_err(|error| failed(TlsProblem::of(&error)))
}

/// Returns the error of a connection that holds a problem.
pub(super) fn failed(problem: TlsProblem) -> IoError {
    IoError::new(ErrorKind::InvalidData, problem)
}

/// Plain bytes that are encrypted before they are sent: eight full records, which one call of the system sends.
const TURN_BYTES: usize = 8 * 16 * 1024;

const BINDING_LABEL: &[u8] = b"EXPORTER-Channel-Binding";

const BINDING_BYTES: usize = 32;

//! A socket between two members, encrypted or not.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;

use distribute_cluster::tls::Session;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd};

/// A socket whose bytes are encrypted, or are sent as they are.
///
/// With TLS, [`wants_write`](Stream::wants_write) says whether encrypted bytes wait for room: the peer does not see
/// them until they are [flushed](Write::flush). Bytes may have been decrypted that `poll` does not tell of, so the
/// stream is read until it would block before anybody waits for it.
pub(super) struct Stream {
    socket: TcpStream,
    session: Option<Box<Session>>,
}

impl Stream {
    /// Encrypts what is sent from now on; the handshake is still to come.
    pub(super) fn encrypt(&mut self, session: Session) {
        self.session = Some(Box::new(session));
    }

    /// The socket below.
    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Whether encrypted bytes wait to be sent.
    pub(super) fn wants_write(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.wants_write())
    }

    /// Whether the peer has begun a handshake in earnest.
    pub(super) fn has_begun(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.has_begun())
    }

    /// Continues the handshake; returns the channel binding once it is over.
    pub(super) fn advance(&mut self) -> io::Result<Option<[u8; 32]>> {
        let Some(session) = &mut self.session else { return Ok(None) };
        Ok(session.advance(&mut self.socket)?.then(|| session.binding()))
    }

    /// Tells the peer that nothing more comes, if there is room.
    pub(super) fn close(&mut self) {
        if let Some(session) = &mut self.session {
            let _ = session.close(&mut self.socket);
        }
    }

    /// Waits for bytes to read, and for room where encrypted ones wait.
    pub(super) fn interest(&self) -> PollFd<'_> {
        let room = if self.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
        PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN | room)
    }
}

impl From<TcpStream> for Stream {
    fn from(socket: TcpStream) -> Stream {
        Stream { socket, session: None }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match &mut self.session {
            None => self.socket.read(bytes),
            Some(session) => session.read(&mut self.socket, bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.session {
            None => self.socket.write(bytes),
            Some(session) => session.write(&mut self.socket, &[IoSlice::new(bytes)]),
        }
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.session {
            None => self.socket.write_vectored(parts),
            Some(session) => session.write(&mut self.socket, parts),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.session {
            None => Ok(()),
            Some(session) => session.flush(&mut self.socket),
        }
    }
}

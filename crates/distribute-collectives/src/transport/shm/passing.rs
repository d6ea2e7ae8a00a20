//! Segments whose file is passed from one process to the other, where that cannot be opened through `/proc`.
//!
//! Containers of one pod have process ids of their own, but one network, and with it the same abstract Unix sockets.
//! The side that makes a segment listens on such a socket under a random name. It tells the name over the connection
//! that exists already, together with a ticket, and passes the file to the caller that shows the ticket. In another
//! network, or on a system without such sockets, nothing listens under the name.
//!
//! All waiting is for messages of that connection; on the Unix socket everything is there when it is looked for.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg,
    socket_with,
};

use super::super::nonce::Nonce;
use super::identity::Obstacle;
use super::{Lane, RING_BYTES, Segment, SegmentFile};

/// A name, a ticket, and the number in the segment.
pub(super) const PASS_BYTES: usize = 3 * Nonce::LEN;

/// Callers that may wait; strangers among them are turned away.
const CALLERS: i32 = 16;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Makes a segment, and passes its file to the peer. Without shared memory the answer is the obstacle given.
pub(in crate::transport) fn give(
    stream: &mut (impl Read + Write),
    obstacle: Obstacle,
) -> io::Result<Result<Lane, Obstacle>> {
    let given = Given::new().ok();
    stream.write_all(&given.as_ref().map_or([0; PASS_BYTES], |given| given.pass.encode()))?;
    let called = read_flag(stream)?;
    let Some(given) = given.filter(|_| called) else { return Ok(Err(obstacle)) };
    let passed = given.pass_on().is_ok();
    stream.write_all(&[u8::from(passed)])?;
    if !passed {
        return Ok(Err(obstacle));
    }
    let mut nonce = [0; Nonce::LEN];
    stream.read_exact(&mut nonce)?;
    let recognised = given.segment.is_signed(Nonce::from_bytes(nonce));
    stream.write_all(&[u8::from(recognised)])?;
    Ok(if recognised { Ok(Lane::new(given.segment, 0, None)) } else { Err(obstacle) })
}

/// Takes a segment over whose file the peer passes.
pub(in crate::transport) fn take(
    stream: &mut (impl Read + Write),
    obstacle: Obstacle,
) -> io::Result<Result<Lane, Obstacle>> {
    let mut bytes = [0; PASS_BYTES];
    stream.read_exact(&mut bytes)?;
    let pass = Pass::decode(&bytes);
    let socket = pass.as_ref().and_then(|pass| pass.call().ok());
    stream.write_all(&[u8::from(socket.is_some())])?;
    let (Some(pass), Some(socket)) = (pass, socket) else { return Ok(Err(obstacle)) };
    if !read_flag(stream)? {
        return Ok(Err(obstacle));
    }
    let segment = receive(&socket).ok().and_then(|file| Segment::adopt(&file, RING_BYTES, pass.segment).ok());
    let mut nonce = [0; Nonce::LEN];
    if let Some(segment) = &segment {
        let own = Nonce::new()?;
        segment.sign(own);
        nonce = own.to_bytes();
    }
    // Zeros sign nothing.
    stream.write_all(&nonce)?;
    let recognised = read_flag(stream)?;
    Ok(segment.filter(|_| recognised).map(|segment| Lane::new(segment, 1, None)).ok_or(obstacle))
}

fn read_flag(stream: &mut impl Read) -> io::Result<bool> {
    let mut flag = [0];
    stream.read_exact(&mut flag)?;
    Ok(flag == [1])
}

/// Where a segment's file is passed, and how its receiver and the segment are recognised.
#[derive(Debug, PartialEq)]
pub(super) struct Pass {
    /// The name of the socket.
    name: Nonce,
    /// The caller shows it.
    ticket: Nonce,
    segment: Nonce,
}

impl Pass {
    pub(super) fn encode(&self) -> [u8; PASS_BYTES] {
        let mut bytes = [0; PASS_BYTES];
        for (place, nonce) in bytes.chunks_exact_mut(Nonce::LEN).zip([self.name, self.ticket, self.segment]) {
            place.copy_from_slice(&nonce.to_bytes());
        }
        bytes
    }

    /// Returns the pass; `None` for zeros, which say that there is no segment.
    pub(super) fn decode(bytes: &[u8; PASS_BYTES]) -> Option<Pass> {
        let nonce = |at: usize| Some(Nonce::from_bytes(*bytes[at * Nonce::LEN..].first_chunk()?));
        let pass = Pass { name: nonce(0)?, ticket: nonce(1)?, segment: nonce(2)? };
        bytes.iter().any(|byte| *byte != 0).then_some(pass)
    }

    fn address(&self) -> io::Result<SocketAddrUnix> {
        Ok(SocketAddrUnix::new_abstract_name(format!("distribute/{}", self.name).as_bytes())?)
    }

    /// Connects to the socket and shows the ticket, without waiting.
    fn call(&self) -> io::Result<OwnedFd> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        connect(&socket, &self.address()?)?;
        let sent = rustix::net::send(&socket, &self.ticket.to_bytes(), SendFlags::NOSIGNAL)?;
        if sent == Nonce::LEN { Ok(socket) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

/// A segment that the peer may call for.
struct Given {
    segment: Segment,
    file: SegmentFile,
    listener: OwnedFd,
    pass: Pass,
}

impl Given {
    fn new() -> io::Result<Given> {
        let pass = Pass { name: Nonce::new()?, ticket: Nonce::new()?, segment: Nonce::new()? };
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        bind(&listener, &pass.address()?)?;
        listen(&listener, CALLERS)?;
        let (segment, file) = Segment::create(RING_BYTES, pass.segment)?;
        Ok(Given { segment, file, listener, pass })
    }

    /// Passes the file to the caller with the ticket, who has called already.
    fn pass_on(&self) -> io::Result<()> {
        loop {
            let caller = accept_with(&self.listener, FLAGS)?;
            let mut shown = [0; Nonce::LEN];
            let read = rustix::io::read(&caller, &mut shown).unwrap_or(0);
            if read == shown.len() && Nonce::from_bytes(shown) == self.pass.ticket {
                return send(&caller, &self.file);
            }
        }
    }
}

/// Sends a file, with one byte to which it is attached.
fn send(socket: &OwnedFd, file: &SegmentFile) -> io::Result<()> {
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    if !attached.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::StorageFull.into());
    }
    sendmsg(socket, &[IoSlice::new(&[0])], &mut attached, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a file that was sent already.
fn receive(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut attached, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = attached.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    files.next().and_then(|mut files| files.next()).ok_or_else(|| io::ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        for stream in [&near, &far] {
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        }
        (near, far)
    }

    #[test]
    fn a_file_arrives_once_and_is_the_same_memory() {
        let (mut near, mut far) = connected();
        let taking = std::thread::spawn(move || take(&mut far, Obstacle::CannotOpen).unwrap());
        let given = give(&mut near, Obstacle::CannotOpen).unwrap().unwrap();
        let taken = taking.join().unwrap().unwrap();
        assert!(!given.fetches() && !taken.fetches());
        // Each recognised the other's number in the segment, which both hold for themselves.
        let (given, taken) = (given.to_peer.segment(), taken.to_peer.segment());
        assert!(!std::sync::Arc::ptr_eq(&given, &taken));
    }

    #[test]
    fn strangers_who_know_the_name_get_nothing() {
        let given = Given::new().unwrap();
        let forged = |ticket| Pass { name: given.pass.name, ticket, segment: given.pass.segment };
        let liar = forged(Nonce::new().unwrap()).call().unwrap();
        let silent = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None).unwrap();
        connect(&silent, &given.pass.address().unwrap()).unwrap();
        let peer = forged(given.pass.ticket).call().unwrap();
        given.pass_on().unwrap();
        assert!(receive(&liar).is_err() && receive(&silent).is_err());
        assert!(Segment::adopt(&receive(&peer).unwrap(), RING_BYTES, given.pass.segment).is_ok());
        // No caller is left.
        assert_eq!(given.pass_on().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_peer_that_finds_no_socket_says_so() {
        let (mut near, mut far) = connected();
        let name = || Nonce::new().unwrap();
        near.write_all(&Pass { name: name(), ticket: name(), segment: name() }.encode()).unwrap();
        assert_eq!(take(&mut far, Obstacle::CannotOpen).unwrap().err(), Some(Obstacle::CannotOpen));
        assert!(!read_flag(&mut near).unwrap());
    }

    #[test]
    fn any_other_file_is_refused() {
        let expected = Nonce::new().unwrap();
        let (_, another) = Segment::create(RING_BYTES, Nonce::new().unwrap()).unwrap();
        let file = another.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(Segment::adopt(&file, RING_BYTES, expected).err(), Some(Obstacle::OtherSegment));
        let unsealed = OwnedFd::from(tempfile::tempfile().unwrap());
        assert_eq!(Segment::adopt(&unsealed, RING_BYTES, expected).err(), Some(Obstacle::OtherSegment));
    }
}

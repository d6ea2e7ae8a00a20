//! Callers whose bytes arrive in pieces.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use distribute_cluster::JobSecret;
use distribute_cluster::secret::{Refusals, Terms};

use super::super::super::Proofs;
use super::super::hello::{Hello, claim};
use super::{Caller, Door, Received};

thread_local! {
    /// Where the callers of this thread call.
    static LISTENER: RefCell<Option<TcpListener>> = const { RefCell::new(None) };
}

/// Returns both ends of a connection.
fn connected() -> (TcpStream, TcpStream) {
    LISTENER.with_borrow_mut(|listener| {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let listener = listener.get_or_insert_with(bind);
        let address = listener.local_addr().expect("it listens");
        let caller = TcpStream::connect(address).expect("it listens");
        let (accepted, _) = listener.accept().expect("a caller is there");
        accepted.set_nonblocking(true).expect("a socket can be non-blocking");
        caller.set_read_timeout(Some(Duration::from_secs(5))).expect("a socket has timeouts");
        // Closed without the wait that would keep its port.
        (caller, accepted)
    })
}

/// The first byte chooses whether there is a secret, the second one the length of the pieces; the rest is what a caller
/// sends. It is believed nothing that it has not proved.
pub(crate) fn reception(bytes: &[u8]) -> bool {
    let [flags, size, sent @ ..] = bytes else { return false };
    // More is a message of another connection, which is not read here.
    let sent = &sent[..sent.len().min(2048)];
    let secret = (flags & 1 == 1).then(|| JobSecret::new([7; 32]).expect("it is long enough"));
    let (proofs, terms) = (Proofs { secret, tls: None }, Terms::new("fuzz 1", "group a"));
    let door = Door { rank: 3, proofs: &proofs, terms: &terms, refusals: Refusals::default() };
    let (mut client, stream) = connected();
    let mut caller = Caller::new(stream);
    let mut read = 0;
    for piece in sent.chunks(usize::from(*size).max(1)) {
        client.write_all(piece).expect("a connection of this thread");
        let expected = read + piece.len();
        while read < expected {
            let got = match caller.begin(&door).and_then(|()| caller.read()) {
                Ok(got) => got,
                // The kernel may take a moment.
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                Err(error) => panic!("{error}"),
            };
            read += got;
            assert!(got > 0 && caller.len <= Hello::LEN);
            match caller.receive(got, &door) {
                Received::More => {}
                Received::Nothing => return finish(&mut client, caller, false),
                Received::Hello(hello, proved) => {
                    assert!(!proved, "a caller without the secret was believed");
                    assert!(sent.starts_with(&hello.encode()), "it says what it did not receive");
                    assert!(claim(&hello, 3).len() <= Terms::MAX_CLAIM_BYTES);
                    return finish(&mut client, caller, true);
                }
            }
        }
    }
    finish(&mut client, caller, false)
}

/// Closes the connection, and checks what the caller was sent: less than two messages of a proof.
fn finish(client: &mut TcpStream, caller: Caller, accepted: bool) -> bool {
    drop(caller);
    let mut told = Vec::new();
    // Unread bytes of the caller make the end of the connection an error.
    let _ = client.read_to_end(&mut told);
    assert!(told.len() < 1024);
    accepted
}

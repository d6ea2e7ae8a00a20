//! The encrypted stream, against a plain one.

use std::net::{Shutdown, TcpStream};
use std::thread;

use distribute_cluster::JobTls;
use distribute_cluster::tls::{Session, TlsFiles};
use distribute_testkit::certificates::{Authority, Certificate};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::*;

const DEADLINE: Duration = Duration::from_secs(20);

/// Two ends of an encrypted connection that do not block.
fn pair(tls: &JobTls) -> [Stream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let calls = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (answers, _) = listener.accept().expect("somebody calls");
    let session = [Session::calling(tls), Session::listening(tls)].map(|session| session.expect("a certificate"));
    let [calling, listening] = session;
    let mut ends = [(calls, calling), (answers, listening)].map(|(socket, session)| {
        socket.set_nonblocking(true).expect("a socket");
        let mut stream = Stream::from(socket);
        stream.encrypt(session);
        stream
    });
    let deadline = Instant::now() + DEADLINE;
    let mut bindings = [None; 2];
    while bindings.iter().any(Option::is_none) {
        assert!(Instant::now() < deadline, "the handshake stands still");
        for (end, binding) in ends.iter_mut().zip(&mut bindings) {
            *binding = end.advance().expect("one authority");
        }
    }
    assert_eq!(bindings[0], bindings[1]);
    ends
}

fn own() -> JobTls {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new().expect("keys");
    let files = authority.issue(folder.path(), "own", &Certificate::valid()).expect("a folder");
    JobTls::open(TlsFiles::new(files.authority, files.certificate, files.key)).expect("files that were issued")
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (seed + at * 31 + at / 251) as u8).collect()
}

/// One direction: what is sent in which portions, and read in which.
#[derive(Clone, Debug)]
struct Direction {
    len: usize,
    writes: Vec<usize>,
    reads: Vec<usize>,
}

fn direction() -> impl Strategy<Value = Direction> {
    let portion = || prop::collection::vec(prop_oneof![1usize..64, 1000usize..40_000, 100_000usize..400_000], 1..5);
    (prop_oneof![0usize..100, 10_000usize..3_000_000], portion(), portion()).prop_map(|(len, writes, reads)| {
        // Portions of some bytes are for messages of some bytes: others would take long.
        let at_least = if len > 20_000 { 997 } else { 1 };
        let long = |portions: Vec<usize>| portions.into_iter().map(|len| len.max(at_least)).collect();
        Direction { len, writes: long(writes), reads: long(reads) }
    })
}

fn would_block<T: Default>(outcome: io::Result<T>) -> T {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => T::default(),
        outcome => outcome.expect("the connection holds"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn bytes_arrive_in_order_whatever_their_portions(ways in prop::array::uniform2(direction())) {
        let mut ends = pair(&own());
        let sent = [bytes(3, ways[0].len), bytes(7, ways[1].len)];
        let mut read = [Vec::new(), Vec::new()];
        let mut written = [0, 0];
        let (mut turn, deadline) = (0, Instant::now() + DEADLINE);
        // Both directions at once, as an exchange has them: what waits to be sent is flushed, whatever is read.
        while (0..2).any(|way| read[way].len() < sent[way].len()) {
            prop_assert!(Instant::now() < deadline, "{written:?} of {ways:?}");
            for way in 0..2 {
                let portion = ways[way].writes[turn % ways[way].writes.len()];
                let next = &sent[way][written[way]..];
                let next = &next[..next.len().min(portion)];
                let (first, second) = next.split_at(next.len() / 3);
                if next.is_empty() {
                    would_block(ends[way].flush());
                } else {
                    written[way] += would_block(ends[way].write_vectored(&[IoSlice::new(first), IoSlice::new(second)]));
                }
                let portion = ways[way].reads[turn % ways[way].reads.len()];
                let mut space = vec![0; portion];
                let arrived = would_block(ends[1 - way].read(&mut space));
                read[way].extend_from_slice(&space[..arrived]);
            }
            turn += 1;
        }
        prop_assert!(read == sent);
        // The end in order is told from a connection that is cut.
        let [mut one, mut two] = ends;
        one.close();
        let mut byte = [0];
        loop {
            match two.read(&mut byte) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => prop_assert!(Instant::now() < deadline),
                ended => break prop_assert_eq!(ended.expect("in order"), 0),
            }
        }
    }
}

#[test]
fn a_connection_that_is_cut_is_no_end_and_changed_bytes_are_noticed() {
    let tls = own();
    let [one, mut two] = pair(&tls);
    one.socket().shutdown(Shutdown::Write).expect("a socket");
    let read = |stream: &mut Stream| {
        let deadline = Instant::now() + DEADLINE;
        loop {
            match stream.read(&mut [0; 8]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => assert!(Instant::now() < deadline),
                read => return read,
            }
        }
    };
    assert_eq!(read(&mut two).expect_err("it was cut").kind(), io::ErrorKind::UnexpectedEof);
    let [one, mut two] = pair(&tls);
    // A record that neither side has encrypted.
    (&mut one.socket()).write_all(&[&[0x17, 3, 3, 0, 32][..], &[1; 32]].concat()).expect("room");
    assert_eq!(read(&mut two).expect_err("it is not theirs").kind(), io::ErrorKind::InvalidData);
}

#[test]
fn what_waits_to_be_sent_is_known() {
    let [mut one, mut two] = pair(&own());
    let data = bytes(5, 64 << 20);
    let mut written = 0;
    while !one.wants_write() {
        written += one.write(&data[written..]).expect("it takes some");
    }
    assert_eq!(one.write(&data[written..]).expect_err("earlier bytes wait").kind(), io::ErrorKind::WouldBlock);
    let (mut arrived, deadline) = (0, Instant::now() + DEADLINE);
    let mut space = vec![0; 1 << 20];
    let reader = thread::spawn(move || {
        while arrived < written {
            assert!(Instant::now() < deadline, "{arrived} of {written}");
            arrived += would_block(two.read(&mut space));
        }
    });
    while one.wants_write() {
        would_block(one.flush());
    }
    reader.join().expect("all has arrived");
}

/// Takes bytes into memory, and refuses the first that is not expected.
struct Expecting(Vec<u8>);

impl super::super::Sink for Expecting {
    fn space(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn advance(&mut self, len: usize) -> Result<(), super::super::UnexpectedBytes> {
        if !self.0[..len].iter().all(|byte| *byte == 1) {
            return Err(super::super::UnexpectedBytes);
        }
        self.0.drain(..len);
        Ok(())
    }
}

/// Receives `len` bytes of ones from the other of two members.
fn receive(transport: &mut TcpTransport, from: usize, len: usize) -> Result<(), TransportError> {
    let interrupted = std::sync::atomic::AtomicBool::new(false);
    let timeout = Timeout { deadline: Instant::now() + DEADLINE, spin: Duration::ZERO, interrupted: &interrupted };
    let mut sink = Expecting(vec![0; len]);
    transport.exchange(&mut [], &mut [Incoming { from, sink: &mut sink }], &timeout)
}

fn send(transport: &mut TcpTransport, to: usize, bytes: &[u8]) -> Result<(), TransportError> {
    let interrupted = std::sync::atomic::AtomicBool::new(false);
    let timeout = Timeout { deadline: Instant::now() + DEADLINE, spin: Duration::ZERO, interrupted: &interrupted };
    transport.exchange(&mut [Outgoing { to, parts: vec![IoSlice::new(bytes)] }], &mut [], &timeout)
}

/// Two members over encrypted sockets, which share memory as far as `sharing` allows.
fn members(sharing: Sharing) -> [TcpTransport; 2] {
    let tls = own();
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    let addresses = listeners.each_ref().map(|listener| listener.local_addr().expect("bound").to_string());
    let group = Nonce::new().expect("random numbers");
    thread::scope(|scope| {
        let members = [0, 1].map(|rank| {
            let (listener, addresses) = (&listeners[rank], &addresses);
            let proofs = Proofs { secret: None, tls: Some(tls.clone()) };
            let deadline = Instant::now() + DEADLINE;
            scope.spawn(move || TcpTransport::connect(rank, addresses, listener, (group, proofs), sharing, deadline))
        });
        members.map(|member| member.join().expect("no panic").unwrap_or_else(|error| panic!("{error:?}")))
    })
}

#[test]
fn lost_aborting_leaving_and_refused_members_are_told_apart_at_once() {
    for sharing in [Sharing::Never, Sharing::WherePossible] {
        let began = Instant::now();
        // The process has ended: its sockets are closed without a word.
        let [mut first, second] = members(sharing);
        for stream in second.peers.iter().flatten().flat_map(|peer| [&peer.data, &peer.control]) {
            stream.socket().shutdown(Shutdown::Both).expect("a socket");
        }
        let lost = receive(&mut first, 1, 8).expect_err("it is gone");
        assert!(matches!(lost, TransportError::Lost { peer: 1, .. }), "{sharing:?} {lost}");
        let [mut first, mut second] = members(sharing);
        let (origin, cause) = ("rank 1".to_owned(), "a test".to_owned());
        let kind = distribute_cluster::FailureKind::Permanent;
        second.abort(&AbortReason { origin, cause, kind });
        let aborted = receive(&mut first, 1, 8).expect_err("it has aborted");
        assert!(matches!(&aborted, TransportError::Aborted { reason, .. } if reason.cause == "a test"), "{aborted}");
        let [mut first, second] = members(sharing);
        drop(second);
        let left = receive(&mut first, 1, 8).expect_err("it has left");
        assert!(matches!(left, TransportError::Left { peer: 1 }), "{sharing:?} {left}");
        let [mut first, mut second] = members(sharing);
        send(&mut second, 0, &[1; 8]).expect("room");
        receive(&mut first, 1, 8).expect("as expected");
        send(&mut second, 0, &[1, 1, 2]).expect("room");
        let refused = receive(&mut first, 1, 8).expect_err("it is not expected");
        assert!(matches!(refused, TransportError::Refused { peer: 1 }), "{sharing:?} {refused}");
        assert!(began.elapsed() < DEADLINE / 2, "{:?}", began.elapsed());
    }
}

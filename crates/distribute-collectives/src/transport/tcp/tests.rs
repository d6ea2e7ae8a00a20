use std::net::TcpStream;
use std::thread;

use distribute_testkit::{short_or_long, skipped};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::hello::Hello;
use super::*;

const DEADLINE: Duration = Duration::from_secs(20);

fn listeners(host: &str, count: usize) -> io::Result<(Vec<TcpListener>, Vec<String>)> {
    let listeners: io::Result<Vec<TcpListener>> = (0..count).map(|_| TcpListener::bind((host, 0))).collect();
    let listeners = listeners?;
    let addresses = listeners.iter().map(|listener| listener.local_addr().map(|address| address.to_string()));
    let addresses = addresses.collect::<io::Result<Vec<String>>>()?;
    Ok((listeners, addresses))
}

/// Connects members while `disturb` has the address of the first.
fn connect_while(
    host: &str,
    members: usize,
    sharing: Sharing,
    disturb: impl FnOnce(&str) + Send,
) -> Vec<Result<TcpTransport, ConnectError>> {
    let (listeners, addresses) = listeners(host, members).expect("free ports");
    thread::scope(|scope| {
        let first = &addresses[0];
        let disturber = scope.spawn(move || disturb(first));
        // The disturbing connections come first.
        thread::sleep(Duration::from_millis(100));
        let members: Vec<_> = listeners
            .iter()
            .enumerate()
            .map(|(rank, listener)| {
                let addresses = &addresses;
                let (deadline, group) = (Instant::now() + DEADLINE, Nonce::of_addresses(addresses));
                scope.spawn(move || {
                    TcpTransport::connect(rank, addresses, listener, (group, Proofs::default()), sharing, deadline)
                })
            })
            .collect();
        let outcomes = members.into_iter().map(|member| member.join().expect("no panic")).collect();
        disturber.join().expect("no panic");
        outcomes
    })
}

#[test]
fn garbage_and_silence_on_the_port_disturb_nobody() {
    let began = Instant::now();
    let outcomes = connect_while("127.0.0.1", 3, Sharing::Never, |address| {
        let mut calls: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(address).expect("it listens")).collect();
        for (index, call) in calls.iter_mut().enumerate() {
            let garbage: &[u8] = match index % 5 {
                0 => b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",
                1 => b"dst-tcp",
                2 => &[0xff; 4096],
                // A member of another group.
                3 => b"dst-tcp2................\x01\0\0\0\0\0\0\0",
                _ => b"",
            };
            // The other side may have hung up already.
            let _ = call.write_all(garbage);
        }
        thread::sleep(Duration::from_millis(500));
    });
    assert!(outcomes.iter().all(Result::is_ok));
    assert!(began.elapsed() < Duration::from_secs(4), "the silent ones were waited for: {:?}", began.elapsed());
}

#[test]
fn absent_members_are_an_error_at_the_deadline() {
    let (listeners, addresses) = listeners("127.0.0.1", 2).expect("free ports");
    let deadline = Instant::now() + Duration::from_millis(200);
    let group = Nonce::of_addresses(&addresses);
    let error =
        TcpTransport::connect(0, &addresses, &listeners[0], (group, Proofs::default()), Sharing::Never, deadline).err();
    let error = error.expect("nobody came");
    assert!(error.source.to_string().contains("not all peers connected before the deadline"), "{}", error.source);
}

#[test]
fn members_meet_over_ipv6() {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        return skipped(format_args!("this machine has no IPv6 loopback interface ({error})"));
    }
    let outcomes = connect_while("::1", 3, Sharing::Never, |_| ());
    assert!(outcomes.iter().all(Result::is_ok));
}

struct Received([u8; 7], usize);

impl crate::transport::Sink for Received {
    fn space(&mut self) -> &mut [u8] {
        &mut self.0[self.1..]
    }

    fn advance(&mut self, len: usize) -> Result<(), crate::transport::UnexpectedBytes> {
        self.1 += len;
        Ok(())
    }
}

#[test]
fn what_a_member_has_sent_before_it_is_killed_arrives() {
    let kinds =
        if cfg!(target_os = "linux") { vec![Sharing::Never, Sharing::Everywhere] } else { vec![Sharing::Never] };
    for sharing in kinds {
        for round in 0..10 {
            let mut members = connect_while("127.0.0.1", 3, sharing, |_| ()).into_iter();
            let mut next = || members.next().expect("three members").expect("all are there");
            let (mut killed, mut other, mut third) = (next(), next(), next());
            let interrupted = std::sync::atomic::AtomicBool::new(false);
            let timeout =
                Timeout { deadline: Instant::now() + DEADLINE, spin: Duration::ZERO, interrupted: &interrupted };
            thread::scope(|scope| {
                scope.spawn(move || {
                    // The other one sleeps by then.
                    thread::sleep(Duration::from_millis(5));
                    let mut outgoing = [Outgoing { to: 1, parts: vec![IoSlice::new(b"message")] }];
                    killed.exchange(&mut outgoing, &mut [], &timeout).expect("its socket has room");
                    // A killed process tells its peers nothing.
                    killed.aborted = true;
                    drop(killed);
                });
                let mut received = Received([0; 7], 0);
                let outcome = other.exchange(&mut [], &mut [Incoming { from: 0, sink: &mut received }], &timeout);
                assert_eq!((outcome, &received.0), (Ok(()), b"message"), "{sharing:?} {round}");
                // Who waits for another member is told nevertheless.
                let began = Instant::now();
                let mut received = Received([0; 7], 0);
                let outcome = third.exchange(&mut [], &mut [Incoming { from: 1, sink: &mut received }], &timeout);
                assert!(
                    matches!(outcome, Err(TransportError::Lost { peer: 0, .. })),
                    "{sharing:?} {round} {outcome:?}"
                );
                assert!(began.elapsed() < Duration::from_secs(2), "{sharing:?} {round} {:?}", began.elapsed());
            });
        }
    }
}

fn peer() -> (Peer, TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let pair = || {
        let theirs = TcpStream::connect(address).expect("it listens");
        let (ours, _) = listener.accept().expect("somebody calls");
        ours.set_nonblocking(true).expect("a socket");
        (ours, theirs)
    };
    let ((data, their_data), (control, their_control)) = (pair(), pair());
    let peer = Peer {
        data: data.into(),
        control: control.into(),
        heard: None,
        inbox: Vec::new(),
        waiting: None,
        lane: None,
        ended: None,
    };
    (peer, their_data, their_control)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: short_or_long(64, 256),
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_bytes_as_hello_are_a_member_or_nobody(bytes: [u8; Hello::LEN], valid: bool) {
        let mut bytes = bytes;
        if valid {
            bytes[..8].copy_from_slice(b"dst-tcp2");
        }
        match Hello::decode(&bytes) {
            Some(hello) => prop_assert_eq!(hello.encode(), bytes),
            None => prop_assert!(!valid),
        }
    }

    #[test]
    fn any_bytes_as_control_messages_end_in_one_and_bounded_memory(
        bytes in prop::collection::vec(prop_oneof![0u8..4, any::<u8>()], 0..2000),
    ) {
        let (mut peer, _data, mut control) = peer();
        control.write_all(&bytes).expect("it fits into the buffer");
        drop(control);
        // Until the end of the stream, which is a message too.
        let deadline = Instant::now() + DEADLINE;
        while peer.read_control().is_none() {
            prop_assert!(Instant::now() < deadline);
        }
        prop_assert!(peer.inbox.len() <= bytes.len());
    }
}

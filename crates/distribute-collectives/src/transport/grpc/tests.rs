use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::AtomicBool;
use std::thread;

use distribute_types::FailureKind;

use super::super::tests::{Connected, connected, group, listeners, opened};
use super::*;
use crate::transport::{Sink, UnexpectedBytes};
use crate::{Error, Rank, ReduceOp, Reduction};

/// More than the queues and flow-control windows of a stream hold.
const LEN: usize = 64 << 20;

/// The deadline of what ends by itself.
const SOON: Duration = Duration::from_secs(20);

fn pair() -> [Connected; 2] {
    let pair = connected(TransportKind::Grpc, &[Proofs::default(), Proofs::default()], SOON, |_| ());
    pair.try_into().ok().expect("two members")
}

/// Discards bytes, up to a number of them.
struct Discard {
    space: Vec<u8>,
    left: usize,
}

impl Sink for Discard {
    fn space(&mut self) -> &mut [u8] {
        let len = self.left.min(self.space.len());
        &mut self.space[..len]
    }

    fn advance(&mut self, len: usize) -> Result<(), UnexpectedBytes> {
        self.left -= len;
        Ok(())
    }
}

/// Receives bytes of member 1 until the time is over.
fn receive(transport: &mut dyn Transport, len: usize, time: Duration) -> Result<(), TransportError> {
    let mut sink = Discard { space: vec![0; 1 << 16], left: len };
    let mut incoming = [Incoming { from: 1, sink: &mut sink }];
    let never = AtomicBool::new(false);
    let timeout = Timeout { deadline: Instant::now() + time, spin: Duration::ZERO, interrupted: &never };
    transport.exchange(&mut [], &mut incoming, &timeout)
}

/// Sends to member 0, which does not read, until there is no room any more.
fn fill(transport: &mut dyn Transport) {
    let bytes = vec![0; LEN];
    let mut outgoing = [Outgoing { to: 0, parts: vec![std::io::IoSlice::new(&bytes)] }];
    let never = AtomicBool::new(false);
    let deadline = Instant::now() + Duration::from_millis(400);
    let timeout = Timeout { deadline, spin: Duration::ZERO, interrupted: &never };
    assert_eq!(transport.exchange(&mut outgoing, &mut [], &timeout), Err(TransportError::Deadline));
}

#[test]
fn that_a_member_waits_and_leaves_is_told_although_its_queue_is_full() {
    let [mut first, mut second] = pair().map(|transport| transport.expect("it connects"));
    fill(&mut *second);
    second.announce(6);
    second.announce(7);
    let deadline = Instant::now() + SOON;
    while first.announced(1) != Some(7) {
        assert!(Instant::now() < deadline, "{:?}", first.announced(1));
        let received = receive(&mut *first, LEN, Duration::from_millis(50));
        assert_eq!(received, Err(TransportError::Deadline));
    }
    fill(&mut *second);
    thread::scope(|scope| {
        scope.spawn(move || drop(second));
        // It leaves while there is no room.
        thread::sleep(Duration::from_millis(100));
        assert_eq!(receive(&mut *first, 3 * LEN, SOON), Err(TransportError::Left { peer: 1 }));
    });
}

#[test]
fn what_a_member_has_sent_arrives_although_it_leaves_at_once_and_the_other_reads_late() {
    // As much as windows and queues of both sides hold, and more.
    for len in [24 << 20, LEN] {
        let [mut first, mut second] = pair().map(|transport| transport.expect("it connects"));
        let bytes = vec![7; len];
        thread::scope(|scope| {
            scope.spawn(move || {
                let never = AtomicBool::new(false);
                let mut outgoing = [Outgoing { to: 0, parts: vec![std::io::IoSlice::new(&bytes)] }];
                let timeout = Timeout { deadline: Instant::now() + SOON, spin: Duration::ZERO, interrupted: &never };
                assert_eq!(second.exchange(&mut outgoing, &mut [], &timeout), Ok(()));
            });
            thread::sleep(Duration::from_millis(900));
            assert_eq!(receive(&mut *first, len, SOON), Ok(()), "{len}");
        });
    }
}

#[test]
fn reductions_of_users_may_wait_for_event_loops_of_their_own() {
    let sum = Reduction::new(|a: f32, b: f32| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("an event loop");
        runtime.block_on(async { a + b })
    });
    let [first, second] = pair();
    let (first, second) = (group(first, 0, 2, SOON), group(second, 1, 2, SOON));
    thread::scope(|scope| {
        for group in [first, second] {
            let sum = &sum;
            scope.spawn(move || {
                let mut values = [1.0f32 + group.rank().index() as f32; 3];
                group.all_reduce(&mut values, sum).expect("both take part");
                assert_eq!(values, [3.0; 3]);
            });
        }
    });
}

#[test]
fn an_abort_while_data_wait_for_room_tells_its_reason() {
    let timeout = Duration::from_secs(5);
    let [first, second] = pair();
    let (first, second) = (group(first, 0, 2, timeout), group(second, 1, 2, timeout));
    thread::scope(|scope| {
        let sends = scope.spawn(|| first.broadcast(&mut vec![0u8; LEN], Rank(0)));
        // Until there is no room any more.
        thread::sleep(Duration::from_millis(300));
        first.abort("as planned", FailureKind::Permanent);
        assert!(sends.join().expect("no panic").is_err());
        let started = Instant::now();
        let error = second.broadcast(&mut vec![0u8; LEN], Rank(0)).expect_err("the group has failed");
        assert!(matches!(error, Error::Aborted { .. }) && error.to_string().contains("as planned"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    });
}

#[test]
fn members_connect_and_leave_on_threads_that_run_an_event_loop() {
    let (listeners, addresses) = listeners(3);
    let nonce = Nonce::new().expect("random numbers");
    let within = |rank, members: usize, listener, wait| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().expect("an event loop");
        runtime.block_on(async {
            let proofs = (nonce, Proofs::default());
            let transport = opened(TransportKind::Grpc, rank, &addresses[..members], listener, proofs, wait);
            transport.map(drop)
        })
    };
    let [first, second, third] = <[TcpListener; 3]>::try_from(listeners).expect("three");
    thread::scope(|scope| {
        let within = &within;
        let members =
            [(0, first), (1, second)].map(|(rank, listener)| scope.spawn(move || within(rank, 2, listener, SOON)));
        for member in members {
            member.join().expect("no panic").expect("both are there");
        }
    });
    // No peer answers.
    let error = within(2, 3, third, Duration::from_millis(200)).expect_err("it is alone");
    assert!(matches!(error, Error::Connect { .. }), "{error}");
}

/// Passes connections on to `target`. Of the first, no answer reaches the caller: it is cut once the callee has sent
/// `answered` bytes.
fn cut_once(target: String, answered: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    thread::spawn(move || {
        let mut is_first = true;
        while let Ok((mut caller, _)) = listener.accept() {
            let mut callee = TcpStream::connect(&target).expect("it listens");
            let (mut from, mut to) = (callee.try_clone().expect("a socket"), caller.try_clone().expect("a socket"));
            let passes = thread::spawn(move || std::io::copy(&mut to, &mut from));
            if std::mem::take(&mut is_first) {
                let (mut seen, mut bytes) = (0, [0; 4096]);
                while seen < answered {
                    seen += callee.read(&mut bytes).expect("it answers");
                }
                for socket in [&caller, &callee] {
                    socket.shutdown(Shutdown::Both).expect("it is open");
                }
                let _ = passes.join();
            } else {
                thread::spawn(move || std::io::copy(&mut callee, &mut caller));
            }
        }
    });
    address
}

#[test]
fn a_member_whose_call_breaks_before_it_knows_of_its_answer_calls_again() {
    // At the head of an answer to the call, and after the hello that follows it.
    for answered in [1, 60, 120] {
        let (mut listeners, mut addresses) = listeners(2);
        addresses[0] = cut_once(addresses[0].clone(), answered);
        let nonce = Nonce::new().expect("random numbers");
        let (second, first) = (listeners.remove(1), listeners.remove(0));
        let started = Instant::now();
        let member = |rank, listener| {
            let transport = opened(TransportKind::Grpc, rank, &addresses, listener, (nonce, Proofs::default()), SOON);
            let group = group(transport, rank, 2, SOON);
            let mut values = [rank as u32 + 1];
            group.all_reduce(&mut values, ReduceOp::Sum).expect("both are there");
            assert_eq!(values, [3], "{answered}");
        };
        thread::scope(|scope| {
            scope.spawn(|| member(0, first));
            scope.spawn(|| member(1, second));
        });
        assert!(started.elapsed() < SOON / 2, "{:?}", started.elapsed());
    }
}

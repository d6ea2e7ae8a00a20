//! Members prove the job's secret over every transport.

use std::io::{IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use distribute_cluster::JobSecret;
use distribute_types::{ErrorClass, FailureKind};

use super::*;
use crate::{Options, ProcessGroup, ReduceOp};

const SECRET: &str = "the secret of this one job";
const OTHER: &str = "the secret of another job";

/// The deadline of groups that form.
const SOON: Duration = Duration::from_secs(20);

pub(super) fn kinds() -> Vec<TransportKind> {
    let kinds = [TransportKind::Auto, TransportKind::Tcp, TransportKind::Shm, TransportKind::Grpc];
    let built = |kind: &TransportKind| cfg!(feature = "grpc") || *kind != TransportKind::Grpc;
    kinds.into_iter().filter(built).filter(|kind| cfg!(target_os = "linux") || *kind != TransportKind::Shm).collect()
}

/// Returns the kinds whose connections differ: shared memory is agreed on over the sockets of TCP.
pub(super) fn kinds_of_connections() -> impl Iterator<Item = TransportKind> {
    kinds().into_iter().filter(|kind| matches!(kind, TransportKind::Tcp | TransportKind::Grpc))
}

pub(super) fn listeners(count: usize) -> (Vec<TcpListener>, Vec<String>) {
    let listeners: Vec<TcpListener> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port")).collect();
    let addresses = listeners.iter().map(|listener| listener.local_addr().expect("bound").to_string()).collect();
    (listeners, addresses)
}

fn secret(text: &str) -> Proofs {
    Proofs { secret: Some(JobSecret::new(text).expect("long enough")), tls: None }
}

pub(super) type Connected = crate::Result<Box<dyn Transport>>;

pub(super) fn opened(
    kind: TransportKind,
    rank: usize,
    addresses: &[String],
    listener: TcpListener,
    (nonce, proofs): (Nonce, Proofs),
    wait: Duration,
) -> Connected {
    let group = GroupIdentity { name: "g", nonce, proofs };
    open(kind, rank, addresses, listener, group, &format!("rank {rank}"), Instant::now() + wait)
}

/// Connects members with these proofs, in rank order, after strangers have called the first.
pub(super) fn connected(
    kind: TransportKind,
    proofs: &[Proofs],
    wait: Duration,
    disturb: impl FnOnce(&str) + Send,
) -> Vec<Connected> {
    let (listeners, addresses) = listeners(proofs.len());
    let nonce = Nonce::new().expect("random numbers");
    thread::scope(|scope| {
        let (addresses, first) = (&addresses, &addresses[0]);
        scope.spawn(move || disturb(first)).join().expect("no panic");
        let members: Vec<_> = listeners
            .into_iter()
            .zip(proofs.iter().cloned())
            .enumerate()
            .map(|(rank, (listener, proofs))| {
                scope.spawn(move || opened(kind, rank, addresses, listener, (nonce, proofs), wait))
            })
            .collect();
        members.into_iter().map(|member| member.join().expect("no panic")).collect()
    })
}

pub(super) fn group(transport: Connected, rank: usize, members: usize, timeout: Duration) -> ProcessGroup {
    let names = (0..members).map(|rank| format!("rank {rank}")).collect();
    let options = Options::default().timeout(timeout);
    let groups = ProcessGroup::with_transport(transport.expect("proofs of one job"), rank, 1, names, &options);
    groups.expect("as many ranks").remove(0)
}

/// Lets four members reduce, in one group and in two halves, whose connections have proofs that are `inherited`.
pub(super) fn form_groups_and_sub_groups(kind: TransportKind, proofs: &[Proofs; 4], inherited: fn(&Proofs) -> bool) {
    let transports = connected(kind, proofs, SOON, |_| ());
    thread::scope(|scope| {
        for (rank, transport) in transports.into_iter().enumerate() {
            scope.spawn(move || {
                let group = group(transport, rank, 4, SOON);
                // More than the sockets hold, and not a whole number of records.
                for len in [1, 5000, 1_500_007] {
                    let mut values = vec![rank as f32; len];
                    group.all_reduce(&mut values, ReduceOp::Sum).expect("all are there");
                    assert!(values.iter().all(|value| *value == 6.0), "{kind:?} {len}");
                }
                if kind == TransportKind::Grpc {
                    return;
                }
                let half = group.split(Some(rank as u32 % 2), 0).expect("all split").expect("all have a colour");
                assert!(inherited(&half.proofs()), "{kind:?}");
                let mut values = [rank as u32];
                half.all_reduce(&mut values, ReduceOp::Sum).expect("both are there");
                assert_eq!(values, [if rank % 2 == 0 { 2 } else { 4 }], "{kind:?}");
            });
        }
    });
}

/// Asserts that the second of two members is refused for good, with these words, while the first waits for a member.
pub(super) fn second_is_refused(kind: TransportKind, proofs: &[Proofs; 2], wait: Duration, words: [&str; 2]) {
    let mut outcomes = connected(kind, proofs, wait, |_| ());
    let refused = outcomes.remove(1).err().expect("it is refused");
    assert!(matches!(refused, crate::Error::Secret { .. }), "{kind:?} {words:?} {refused}");
    assert_eq!(refused.failure_kind(), FailureKind::Configuration, "{refused}");
    let text = refused.to_string();
    assert!(words.into_iter().all(|words| text.contains(words)), "{kind:?} {text}");
    // The listener waits for a member until the end.
    let waited = outcomes.remove(0).err().expect("no member came");
    assert!(waited.to_string().contains("not all peers connected before the deadline"), "{waited}");
}

#[test]
fn members_with_one_secret_form_groups_and_sub_groups() {
    for kind in kinds() {
        form_groups_and_sub_groups(kind, &[(); 4].map(|()| secret(SECRET)), |proofs| proofs.secret.is_some());
    }
}

#[test]
fn a_member_without_the_groups_secret_is_refused_for_good_and_the_others_wait() {
    let cases = [
        ([secret(SECRET), secret(OTHER)], "this process and the other side do not have the same secret"),
        ([secret(SECRET), Proofs::default()], "this process has no secret, and the other side has one"),
        ([Proofs::default(), secret(SECRET)], "this process has a secret, and the other side has none"),
    ];
    thread::scope(|scope| {
        for (kind, (proofs, words)) in kinds_of_connections().flat_map(|kind| cases.clone().map(|case| (kind, case))) {
            scope.spawn(move || {
                let words = [words, "set DISTRIBUTE_JOB_SECRET_FILE"];
                second_is_refused(kind, &proofs, Duration::from_secs(1), words);
            });
        }
    });
}

/// Passes connections on to `target`, and returns what their callers sent.
fn recorder(target: String) -> (String, Arc<Mutex<Vec<Vec<u8>>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let record = recorded.clone();
    thread::spawn(move || {
        while let Ok((mut caller, _)) = listener.accept() {
            let (mut callee, record) = (TcpStream::connect(&target).expect("it listens"), record.clone());
            let (mut from, mut to) = (callee.try_clone().expect("a socket"), caller.try_clone().expect("a socket"));
            thread::spawn(move || std::io::copy(&mut from, &mut to));
            thread::spawn(move || {
                let place = {
                    let mut record = record.lock().expect("no panic");
                    record.push(Vec::new());
                    record.len() - 1
                };
                let mut bytes = [0; 4096];
                while let Ok(read @ 1..) = caller.read(&mut bytes) {
                    record.lock().expect("no panic")[place].extend_from_slice(&bytes[..read]);
                    callee.write_all(&bytes[..read]).expect("it reads");
                }
            });
        }
    });
    (address, recorded)
}

#[test]
fn what_a_member_has_sent_makes_no_member_again() {
    for kind in kinds_of_connections() {
        let (mut listeners, mut addresses) = listeners(2);
        let nonce = Nonce::new().expect("random numbers");
        let (again, target) = (listeners[0].try_clone().expect("a socket"), addresses[0].clone());
        let (proxy, recorded) = recorder(target.clone());
        addresses[0] = proxy;
        let (second, first) = (listeners.remove(1), listeners.remove(0));
        thread::scope(|scope| {
            let (addresses, own) = (&addresses, || (nonce, secret(SECRET)));
            let leads = scope.spawn(move || opened(kind, 0, addresses, first, own(), SOON));
            let follows = scope.spawn(move || opened(kind, 1, addresses, second, own(), SOON));
            let both = [leads, follows].map(|member| member.join().expect("no panic").expect("one secret"));
            drop(both);
        });
        let recorded = recorded.lock().expect("no panic").clone();
        assert!(recorded.len() >= if kind == TransportKind::Grpc { 1 } else { 2 }, "{kind:?}");
        let wait = Duration::from_millis(500);
        let outcome = thread::scope(|scope| {
            let addresses = &addresses;
            let leads = scope.spawn(move || opened(kind, 0, addresses, again, (nonce, secret(SECRET)), wait));
            let replayed: Vec<TcpStream> = recorded
                .iter()
                .map(|bytes| {
                    let mut stream = TcpStream::connect(&target).expect("it listens");
                    // The rest is not read any more once the proof is found wrong.
                    let _ = stream.write_all(bytes);
                    stream
                })
                .collect();
            let outcome = leads.join().expect("no panic");
            drop(replayed);
            outcome
        });
        let error = outcome.err().expect("no member has proved the secret");
        assert!(error.to_string().contains("not all peers connected before the deadline"), "{kind:?} {error}");
    }
}

/// Takes bytes without end, so slowly that more are always there, and refuses them at a time.
struct Endless {
    space: Vec<u8>,
    until: Instant,
}

impl Sink for Endless {
    fn space(&mut self) -> &mut [u8] {
        &mut self.space
    }

    fn advance(&mut self, _: usize) -> Result<(), UnexpectedBytes> {
        thread::sleep(Duration::from_millis(1));
        if Instant::now() < self.until { Ok(()) } else { Err(UnexpectedBytes) }
    }
}

#[test]
fn bytes_that_keep_moving_hide_no_limit_and_no_abort() {
    for kind in kinds().into_iter().filter(|kind| *kind != TransportKind::Auto) {
        let members = connected(kind, &[(); 3].map(|()| Proofs::default()), SOON, |_| ());
        let [mut reader, mut writer, mut third] =
            <[Connected; 3]>::try_from(members).ok().expect("three members").map(|member| member.expect("it connects"));
        let (interrupted, never, ended) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let bytes = vec![0; 1 << 20];
                while !ended.load(Ordering::SeqCst) {
                    let mut outgoing = [Outgoing { to: 0, parts: vec![IoSlice::new(&bytes)] }];
                    let timeout =
                        Timeout { deadline: Instant::now() + SOON, spin: Duration::ZERO, interrupted: &ended };
                    // The reader ends in the middle of a message.
                    let _ = writer.exchange(&mut outgoing, &mut [], &timeout);
                }
            });
            let mut read = |limit: Duration, interrupted: &AtomicBool| {
                let began = Instant::now();
                let mut sink = Endless { space: vec![0; 1 << 16], until: began + Duration::from_secs(8) };
                let mut incoming = [Incoming { from: 1, sink: &mut sink }];
                let timeout = Timeout { deadline: began + limit, spin: Duration::ZERO, interrupted };
                (reader.exchange(&mut [], &mut incoming, &timeout), began.elapsed())
            };
            let soon = Duration::from_secs(4);
            let (outcome, took) = read(Duration::from_millis(200), &never);
            let by_deadline = outcome == Err(TransportError::Deadline) && took < soon;
            let later = scope.spawn(|| {
                thread::sleep(Duration::from_millis(100));
                interrupted.store(true, Ordering::SeqCst);
            });
            let (outcome, took) = read(SOON, &interrupted);
            let by_interruption = outcome == Err(TransportError::Interrupted) && took < soon;
            later.join().expect("no panic");
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(100));
                let (origin, cause) = ("rank 2".to_owned(), "it has failed".to_owned());
                third.abort(&AbortReason { origin, cause, kind: FailureKind::Permanent });
            });
            let (outcome, took) = read(SOON, &never);
            let by_abort = matches!(outcome, Err(TransportError::Aborted { peer: 2, .. })) && took < soon;
            ended.store(true, Ordering::SeqCst);
            assert_eq!((by_deadline, by_interruption, by_abort), (true, true, true), "{kind:?} {outcome:?} {took:?}");
        });
    }
}

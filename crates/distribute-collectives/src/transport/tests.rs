//! Members prove the job's secret over every transport.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
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

fn kinds() -> Vec<TransportKind> {
    let kinds = [TransportKind::Auto, TransportKind::Tcp, TransportKind::Shm, TransportKind::Grpc];
    let built = |kind: &TransportKind| cfg!(feature = "grpc") || *kind != TransportKind::Grpc;
    kinds.into_iter().filter(built).filter(|kind| cfg!(target_os = "linux") || *kind != TransportKind::Shm).collect()
}

fn listeners(count: usize) -> (Vec<TcpListener>, Vec<String>) {
    let listeners: Vec<TcpListener> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port")).collect();
    let addresses = listeners.iter().map(|listener| listener.local_addr().expect("bound").to_string());
    let addresses = addresses.collect();
    (listeners, addresses)
}

fn opened(
    kind: TransportKind,
    rank: usize,
    addresses: &[String],
    listener: TcpListener,
    (nonce, secret): (Nonce, Option<&str>),
    wait: Duration,
) -> crate::Result<Box<dyn Transport>> {
    let secret = secret.map(|text| JobSecret::new(text).expect("long enough"));
    let group = GroupIdentity { name: "g", nonce, proofs: Proofs { secret, tls: None } };
    open(kind, rank, addresses, listener, group, &format!("rank {rank}"), Instant::now() + wait)
}

/// Connects members with these secrets, in rank order.
fn connected(kind: TransportKind, secrets: &[Option<&str>], wait: Duration) -> Vec<crate::Result<Box<dyn Transport>>> {
    let (listeners, addresses) = listeners(secrets.len());
    let nonce = Nonce::new().expect("random numbers");
    thread::scope(|scope| {
        let members: Vec<_> = listeners
            .into_iter()
            .zip(secrets)
            .enumerate()
            .map(|(rank, (listener, secret))| {
                let addresses = &addresses;
                scope.spawn(move || opened(kind, rank, addresses, listener, (nonce, *secret), wait))
            })
            .collect();
        members.into_iter().map(|member| member.join().expect("no panic")).collect()
    })
}

#[test]
fn members_with_one_secret_form_groups_and_sub_groups() {
    for kind in kinds() {
        let transports = connected(kind, &[Some(SECRET); 4], SOON);
        thread::scope(|scope| {
            for (rank, transport) in transports.into_iter().enumerate() {
                scope.spawn(move || {
                    let names = (0..4).map(|rank| format!("rank {rank}")).collect();
                    let transport = transport.expect("one secret");
                    let (name, options) = (transport.name(), Options::default().timeout(SOON));
                    let group = ProcessGroup::with_transport(transport, rank, 1, names, &options);
                    let group = group.expect("four ranks").remove(0);
                    let mut values = [rank as f32; 5000];
                    group.all_reduce(&mut values, ReduceOp::Sum).expect("all are there");
                    assert_eq!(values, [6.0; 5000], "{name}");
                    if kind == TransportKind::Grpc {
                        return;
                    }
                    let half = group.split(Some(rank as u32 % 2), 0).expect("all split").expect("all have a colour");
                    assert!(half.proofs().secret.is_some(), "{name}");
                    let mut values = [rank as u32];
                    half.all_reduce(&mut values, ReduceOp::Sum).expect("both are there");
                    assert_eq!(values, [if rank % 2 == 0 { 2 } else { 4 }], "{name}");
                });
            }
        });
    }
}

#[test]
fn a_member_without_the_groups_secret_is_refused_for_good_and_the_others_wait() {
    let cases = [
        ([Some(SECRET), Some(OTHER)], "this process and the other side do not have the same secret"),
        ([Some(SECRET), None], "this process has no secret, and the other side has one"),
        ([None, Some(SECRET)], "this process has a secret, and the other side has none"),
    ];
    // Shared memory is agreed on over the sockets of TCP.
    let kinds = kinds().into_iter().filter(|kind| matches!(kind, TransportKind::Tcp | TransportKind::Grpc));
    thread::scope(|scope| {
        for (kind, (secrets, words)) in kinds.flat_map(|kind| cases.map(|case| (kind, case))) {
            scope.spawn(move || {
                let mut outcomes = connected(kind, &secrets, Duration::from_secs(1));
                let refused = outcomes.remove(1).err().expect("it is refused");
                assert!(matches!(refused, crate::Error::Secret { .. }), "{kind:?} {refused}");
                assert_eq!(refused.failure_kind(), FailureKind::Configuration, "{refused}");
                let text = refused.to_string();
                assert!(text.contains(words) && text.contains("set DISTRIBUTE_JOB_SECRET_FILE"), "{kind:?} {text}");
                // The listener waits for a member until the end.
                let waited = outcomes.remove(0).err().expect("no member came");
                assert!(waited.to_string().contains("not all peers connected before the deadline"), "{waited}");
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
    for kind in kinds().into_iter().filter(|kind| matches!(kind, TransportKind::Tcp | TransportKind::Grpc)) {
        let (mut listeners, mut addresses) = listeners(2);
        let nonce = Nonce::new().expect("random numbers");
        let (again, target) = (listeners[0].try_clone().expect("a socket"), addresses[0].clone());
        let (proxy, recorded) = recorder(target.clone());
        addresses[0] = proxy;
        let (second, first) = (listeners.remove(1), listeners.remove(0));
        thread::scope(|scope| {
            let (addresses, own) = (&addresses, (nonce, Some(SECRET)));
            let leads = scope.spawn(move || opened(kind, 0, addresses, first, own, SOON));
            let follows = scope.spawn(move || opened(kind, 1, addresses, second, own, SOON));
            let both = [leads, follows].map(|member| member.join().expect("no panic").expect("one secret"));
            drop(both);
        });
        let recorded = recorded.lock().expect("no panic").clone();
        assert!(recorded.len() >= if kind == TransportKind::Grpc { 1 } else { 2 }, "{kind:?}");
        let wait = Duration::from_millis(500);
        let outcome = thread::scope(|scope| {
            let addresses = &addresses;
            let leads = scope.spawn(move || opened(kind, 0, addresses, again, (nonce, Some(SECRET)), wait));
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

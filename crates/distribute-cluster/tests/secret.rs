//! Members prove the job's secret, and others take no part.

#![cfg(feature = "coordination")]
#![expect(clippy::unwrap_used, reason = "a failure of a test is a panic")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use distribute_cluster::{Coordination, CoordinationOptions, Error, FailureKind, JobId, JobSecret, Membership};
use distribute_types::ErrorClass;

#[path = "secret/log.rs"]
mod log;

use log::{log, warnings};

const SOON: Duration = Duration::from_secs(10);
const SECRET: &str = "the secret of this one job";

fn secret(text: &str) -> Option<JobSecret> {
    Some(JobSecret::new(text).unwrap())
}

/// A free port on loopback with its listener, and the options of a leader that uses it.
fn leader_at(secret: Option<JobSecret>) -> (CoordinationOptions, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (options(secret).listener(Some(Arc::new(listener))), address)
}

fn options(secret: Option<JobSecret>) -> CoordinationOptions {
    CoordinationOptions::default().join_timeout(SOON).secret(secret)
}

fn member(rank: u32, address: &str, job: &str) -> Membership {
    Membership::new(rank, 2, address).unwrap().with_job_id(JobId::new(job).unwrap())
}

fn start(rank: u32, address: &str, job: &str, options: CoordinationOptions) -> thread::JoinHandle<Joined> {
    let membership = member(rank, address, job);
    thread::spawn(move || Coordination::start(&membership, options))
}

type Joined = distribute_cluster::Result<Coordination>;

/// Asserts that a task is refused for good, long before its timeout, and returns the sentence.
fn refused(address: &str, job: &str, secret: Option<JobSecret>) -> String {
    let started = Instant::now();
    let error = Coordination::start(&member(1, address, job), options(secret)).unwrap_err();
    assert!(started.elapsed() < SOON / 2, "{error}");
    assert_eq!(error.failure_kind(), FailureKind::Configuration, "{error}");
    assert!(!error.to_string().contains(SECRET), "{error}");
    error.to_string()
}

/// Asserts that both members work together.
fn works(leader: &Coordination, second: &Coordination) {
    leader.put("k", b"v").unwrap();
    assert_eq!(second.get("k", SOON).unwrap(), b"v");
    assert_eq!((leader.failure(), second.failure()), (None, None));
}

#[test]
fn tasks_without_the_jobs_secret_are_refused_once_in_the_log_and_disturb_nothing() {
    log();
    let (leads, address) = leader_at(secret(SECRET));
    let leader = start(0, &address, "job-refuses", leads);
    for _ in 0..2 {
        let text = refused(&address, "job-refuses", secret("the secret of another"));
        assert!(text.contains("this process and the other side do not have the same secret; set DISTR"), "{text}");
        let text = refused(&address, "job-refuses", None);
        assert!(text.contains("this process has no secret, and the other side has one; set DISTRIBUTE"), "{text}");
        // Another job is named, whatever its secret.
        for secret in [secret("the secret of another"), None] {
            let text = refused(&address, "job-b", secret);
            assert!(text.contains("it belongs to job job-b, but worker:0 leads job job-refuses"), "{text}");
        }
    }
    let second = start(1, &address, "job-refuses", options(secret(SECRET))).join().unwrap().unwrap();
    let leader = leader.join().unwrap().unwrap();
    works(&leader, &second);
    // The same for tasks that come while the job runs.
    refused(&address, "job-refuses", secret("the secret of another"));
    works(&leader, &second);
    assert_eq!(leader.secret(), secret(SECRET).as_ref());
    let warned = warnings("worker:0, which leads job job-refuses, refused a connection of 127.0.0.1");
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warnings(SECRET).is_empty());
}

#[test]
fn a_leader_without_the_secret_is_not_joined() {
    let (leads, address) = leader_at(None);
    let leader = start(0, &address, "job", leads);
    let text = refused(&address, "job", secret(SECRET));
    let words = format!("worker:1: the leader at {address}: this process has a secret, and the other side has none");
    assert!(text.starts_with(&words), "{text}");
    let second = start(1, &address, "job", options(None)).join().unwrap().unwrap();
    works(&leader.join().unwrap().unwrap(), &second);
    // A program that answers as a leader does, but without a proof, is not joined either.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let joins = start(1, &address, "job", options(secret(SECRET)).join_timeout(Duration::from_secs(1)));
    let (mut stream, _) = silent.accept().unwrap();
    stream.write_all(b"distcoor\0\0\0\x14\x1a\x12\x0a\x10................").unwrap();
    let error = joins.join().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Unreachable { last, .. } if last.contains("does not prove")), "{error}");
}

#[test]
fn recorded_and_damaged_joins_make_no_member() {
    let (leads, address) = leader_at(secret(SECRET));
    let leader = start(0, &address, "job-recorded", leads);
    let target: SocketAddr = address.parse().unwrap();
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = between.local_addr().unwrap().to_string();
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let record = recorded.clone();
    thread::spawn(move || {
        let (mut inside, _) = between.accept().unwrap();
        let mut outside = TcpStream::connect(target).unwrap();
        let (mut back, mut to) = (outside.try_clone().unwrap(), inside.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut back, &mut to));
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = inside.read(&mut bytes) {
            record.lock().unwrap().extend_from_slice(&bytes[..read]);
            outside.write_all(&bytes[..read]).unwrap();
        }
    });
    let second = start(1, &proxy, "job-recorded", options(secret(SECRET))).join().unwrap().unwrap();
    let leader = leader.join().unwrap().unwrap();
    works(&leader, &second);
    let recorded = recorded.lock().unwrap().clone();
    assert!(recorded.starts_with(b"dst-sec1") && recorded.windows(8).any(|window| window == b"distcoor"));
    let call_bytes = 11 + usize::from(u16::from_be_bytes([recorded[9], recorded[10]]));
    let mut replayed = vec![recorded.clone()];
    // The call and a proof that is cut, or of other bytes.
    for seed in 0..16u8 {
        let mut bytes = recorded.clone();
        bytes[call_bytes + 11 + usize::from(seed)] ^= seed + 1;
        bytes.truncate(if seed % 2 == 0 { bytes.len() } else { call_bytes + 2 * usize::from(seed) });
        replayed.push(bytes);
    }
    for bytes in replayed {
        let mut stranger = TcpStream::connect(target).unwrap();
        stranger.set_read_timeout(Some(SOON)).unwrap();
        // Bytes that were not read reset the connection.
        let _ = stranger.write_all(&bytes).and_then(|()| stranger.shutdown(Shutdown::Write));
        let mut answer = Vec::new();
        let _ = stranger.read_to_end(&mut answer);
        // At most a challenge and a refusal: neither a proof of the leader nor a message of its protocol.
        let leads = answer.windows(8).any(|window| window == b"distcoor");
        assert!(!leads && answer.len() < 60, "{answer:?}");
    }
    works(&leader, &second);
}

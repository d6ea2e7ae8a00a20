use std::collections::HashMap;
use std::io::Result as IoResult;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use distribute_types::ErrorClass;

use super::*;
use crate::{FileStore, JobId};

const SOON: Duration = Duration::from_secs(10);

/// A store of a user: the values of one process.
#[derive(Clone, Default)]
struct InMemory(Arc<Mutex<HashMap<String, Vec<u8>>>>);

impl Store for InMemory {
    fn put(&self, key: &str, value: &[u8]) -> IoResult<()> {
        self.0.lock().unwrap().insert(key.to_owned(), value.to_vec());
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> IoResult<Option<Vec<u8>>> {
        let started = Instant::now();
        loop {
            let value = self.0.lock().unwrap().get(key).cloned();
            if value.is_some() || started.elapsed() >= timeout {
                return Ok(value);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn member(rank: u32, size: u32) -> Membership {
    let mut membership = Membership::new(rank, size, "h:1").unwrap();
    membership.advertised_host = Some("127.0.0.1".to_owned());
    membership.with_job_id(JobId::new("job").unwrap())
}

/// Starts the members of a job, each on its own thread.
fn job<S: Store + Clone + 'static>(store: &S, size: u32) -> Vec<StoreRendezvous<S>> {
    let started = (0..size).map(|rank| {
        let store = store.clone();
        thread::spawn(move || StoreRendezvous::start(store, member(rank, size), SOON).unwrap())
    });
    let started: Vec<_> = started.collect();
    started.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Exchanges the rank of each member under one key.
fn exchanged<S: Store>(job: &[StoreRendezvous<S>], key: &str) {
    thread::scope(|scope| {
        let threads: Vec<_> = job
            .iter()
            .map(|member| scope.spawn(|| member.exchange(key, &[member.membership().rank as u8], SOON).unwrap()))
            .collect();
        threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), [[0], [1], [2]]));
    });
}

#[test]
fn members_meet_at_any_store_again_and_again() {
    fn meet<S: Store + Clone + 'static>(store: &S) {
        let mut incarnations = Vec::new();
        // What the first start has left is there at the second.
        for _ in 0..2 {
            let job = job(store, 3);
            exchanged(&job, "endpoint");
            exchanged(&job, "endpoint");
            job[1].put("k", b"v").unwrap();
            assert_eq!(job[2].get("k", SOON).unwrap(), b"v");
            assert!(job.iter().all(|member| member.incarnation() == job[0].incarnation()));
            assert_eq!(job[0].local_host(), "127.0.0.1");
            incarnations.push(job[0].incarnation());
            let missing = job[0].get("none", Duration::ZERO).unwrap_err();
            assert!(matches!(missing, Error::KeyMissing { .. }), "{missing}");
        }
        assert_ne!(incarnations[0], incarnations[1]);
    }
    let folder = tempfile::tempdir().unwrap();
    meet(&FileStore::new(folder.path()).unwrap());
    meet(&InMemory::default());
}

#[test]
fn a_member_does_not_take_what_an_earlier_start_left_for_its_leader() {
    let store = InMemory::default();
    drop(job(&store, 2));
    let waited = Duration::from_millis(100);
    let error = StoreRendezvous::start(store.clone(), member(1, 2), waited).unwrap_err();
    assert!(matches!(error, Error::Missing { .. }) && error.is_retryable(), "{error}");
    assert!(error.to_string().contains("worker:1: worker:0 did not join within 0.1 s"), "{error}");
    // Nor does the leader take an earlier member's number for its confirmation.
    let error = StoreRendezvous::start(store.clone(), member(0, 2), waited).unwrap_err();
    assert!(error.to_string().contains("worker:0: worker:1 did not join within 0.1 s"), "{error}");
    assert_eq!(job(&store, 2).len(), 2);
}

#[test]
fn who_does_not_come_to_an_exchange_is_named() {
    let store = InMemory::default();
    let job = job(&store, 3);
    let text = job[0].exchange("e", &[0], Duration::from_millis(50)).unwrap_err().to_string();
    assert!(text.contains("exchange \"e\" was not completed within") && text.ends_with("worker:1, worker:2"), "{text}");
    exchanged(&job, "another");
}

#[test]
fn an_exchange_that_failed_on_a_member_is_not_taken_for_the_next_one() {
    let store = InMemory::default();
    let [a, b] = <[_; 2]>::try_from(job(&store, 2)).unwrap_or_else(|_| panic!("there are two"));
    let error = a.exchange("e", b"a0", Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, Error::Incomplete { .. }), "{error}");
    // For the other one it succeeds, which is in the next round then.
    assert_eq!(b.exchange("e", b"b0", SOON).unwrap(), [b"a0", b"b0"]);
    for _ in 0..2 {
        let error = a.exchange("e", b"a1", SOON).unwrap_err();
        assert!(matches!(error, Error::Call { .. }) && error.is_retryable(), "{error}");
        assert!(error.to_string().contains("let the members meet again"), "{error}");
    }
    let again = job(&store, 2);
    thread::scope(|scope| {
        let other = scope.spawn(|| again[1].exchange("e", b"b2", SOON).unwrap());
        assert_eq!(again[0].exchange("e", b"a2", SOON).unwrap(), [b"a2", b"b2"]);
        other.join().unwrap();
    });
}

/// Panics when a value of an exchange is put.
struct Panics;

impl Store for Panics {
    fn put(&self, key: &str, _: &[u8]) -> IoResult<()> {
        assert!(!key.contains("exchange"), "a store of a user panics");
        Ok(())
    }

    fn get(&self, _: &str, _: Duration) -> IoResult<Option<Vec<u8>>> {
        Ok(None)
    }
}

#[test]
fn an_exchange_in_which_the_store_panics_has_failed_and_is_not_in_progress() {
    let alone = StoreRendezvous::start(Panics, member(0, 1), SOON).unwrap();
    let exchange = || alone.exchange("k", b"", SOON);
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(exchange)).unwrap_err();
    let error = exchange().unwrap_err().to_string();
    assert!(error.contains("an earlier exchange of this key failed on this task"), "{error}");
}

#[test]
fn threads_of_a_member_do_not_take_each_others_values() {
    let store = InMemory::default();
    let [a, b] = <[_; 2]>::try_from(job(&store, 2)).unwrap_or_else(|_| panic!("there are two"));
    thread::scope(|scope| {
        let first = scope.spawn(|| a.exchange("e", b"a0", SOON));
        let begun = Instant::now();
        while !store.0.lock().unwrap().keys().any(|key| key.contains("exchange/e/0/0")) {
            assert!(begun.elapsed() < SOON);
            thread::yield_now();
        }
        let error = a.exchange("e", b"a1", SOON).unwrap_err();
        assert!(matches!(error, Error::Call { .. }), "{error}");
        assert!(error.to_string().contains("another thread of this task is there already"), "{error}");
        assert_eq!(b.exchange("e", b"b0", SOON).unwrap(), [b"a0", b"b0"]);
        assert_eq!(first.join().unwrap().unwrap(), [b"a0", b"b0"]);
    });
    // The refusal does not end the key.
    thread::scope(|scope| {
        let other = scope.spawn(|| b.exchange("e", b"b1", SOON).unwrap());
        assert_eq!(a.exchange("e", b"a1", SOON).unwrap(), [b"a1", b"b1"]);
        other.join().unwrap();
    });
}

#[test]
fn a_job_of_several_without_an_identity_of_its_own_is_refused() {
    let store = InMemory::default();
    // Another job of two at this port would have the same one.
    let derived = Membership::new(0, 2, "h:1").unwrap();
    let error = StoreRendezvous::start(store.clone(), derived, SOON).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Config { .. }) && text.contains("Set DISTRIBUTE_JOB_ID to"), "{text}");
    // A job of one meets no other.
    StoreRendezvous::start(store, Membership::new(0, 1, "").unwrap(), SOON).unwrap();
}

#[test]
fn jobs_at_one_store_do_not_meet() {
    let store = InMemory::default();
    let (tell, told) = mpsc::channel();
    for job in ["a", "b"] {
        for rank in 0..2 {
            let (store, tell) = (store.clone(), tell.clone());
            let membership = member(rank, 2).with_job_id(JobId::new(job).unwrap());
            thread::spawn(move || {
                let meeting = StoreRendezvous::start(store, membership, SOON).unwrap();
                tell.send((job, meeting.exchange("job", job.as_bytes(), SOON).unwrap())).unwrap();
            });
        }
    }
    for _ in 0..4 {
        let (job, values) = told.recv_timeout(SOON).unwrap();
        assert_eq!(values, [job.as_bytes(), job.as_bytes()]);
    }
}

#[test]
fn a_store_that_cannot_be_used_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::new(folder.path().join("gone")).unwrap();
    std::fs::remove_dir(store.folder()).unwrap();
    let error = StoreRendezvous::start(store, member(0, 2), SOON).unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
    assert!(
        error.to_string().starts_with("worker:0: meeting the other members: the store cannot be used: "),
        "{error}"
    );
}

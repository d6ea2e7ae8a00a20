use std::net::TcpListener;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use super::*;
use crate::{FailureCause, Task, TaskType};

mod connections;
mod failures;
mod joining;

const SOON: Duration = Duration::from_secs(10);

/// A free port on loopback with its listener, so that no other process takes it meanwhile.
fn listener() -> (Arc<TcpListener>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (Arc::new(listener), address)
}

fn options() -> CoordinationOptions {
    CoordinationOptions { join_timeout: SOON, ..CoordinationOptions::default() }
}

/// Options that detect silence quickly.
fn nervous() -> CoordinationOptions {
    let (heartbeat_interval, heartbeat_timeout) = (Duration::from_millis(100), Duration::from_millis(400));
    CoordinationOptions { heartbeat_interval, heartbeat_timeout, ..options() }
}

/// Starts all members of a job, each on its own thread.
fn job(size: u32, options: &CoordinationOptions) -> Vec<Coordination> {
    let (listener, address) = listener();
    let started = (0..size).map(|rank| {
        let membership = Membership::new(rank, size, address.clone()).unwrap();
        let listener = (rank == 0).then(|| listener.clone());
        let options = CoordinationOptions { listener, ..options.clone() };
        thread::spawn(move || Coordination::start(&membership, options))
    });
    let started: Vec<_> = started.collect();
    drop(listener);
    started.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
}

/// Runs `body` on every member in parallel and returns the results in rank order.
fn each<R: Send>(job: &[Coordination], body: impl Fn(&Coordination) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = job.iter().map(|member| scope.spawn(|| body(member))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

impl Coordination {
    /// Ends as a killed process does: sockets close without a message.
    fn vanish(self) {
        if let Backend::Joined(link) = &self.backend {
            link.left.store(true, Ordering::Release);
        }
    }

    /// Blocks the service's thread, as a stopped process does, until the returned sender is dropped.
    fn freeze(&self) -> mpsc::Sender<()> {
        let (thaw, frozen) = mpsc::channel::<()>();
        if let Backend::Joined(link) = &self.backend {
            link.driver.handle().spawn(async move { frozen.recv_timeout(SOON).is_ok() });
        }
        thaw
    }
}

#[test]
fn values_are_put_and_got() {
    let job = job(3, &options());
    job[1].put("model", b"mlp").unwrap();
    assert_eq!(job[2].get("model", SOON).unwrap(), b"mlp");
    assert_eq!(job[0].try_get("model").unwrap().as_deref(), Some(&b"mlp"[..]));
    assert_eq!(job[0].try_get("other").unwrap(), None);
    job[0].put("model", b"").unwrap();
    assert_eq!(job[1].get("model", Duration::ZERO).unwrap(), b"");
    // A key that is put while a member waits for it.
    let waited = thread::scope(|scope| {
        let waiter = scope.spawn(|| job[2].get("late", SOON));
        job[1].put("late", &[7; Coordination::MAX_VALUE_BYTES]).unwrap();
        waiter.join().unwrap().unwrap()
    });
    assert_eq!(waited.len(), Coordination::MAX_VALUE_BYTES);
    let text = job[1].get("never", Duration::from_millis(50)).unwrap_err().to_string();
    assert!(text.contains("worker:1: no task put key \"never\" within 0.05 s"), "{text}");
    let text = job[1].put("big", &vec![0; Coordination::MAX_VALUE_BYTES + 1]).unwrap_err().to_string();
    assert!(text.contains("1048577 bytes"), "{text}");
}

#[test]
fn exchanges_bring_everybodys_values_again_and_again() {
    let job = job(4, &options());
    for round in 0..20u8 {
        let values =
            each(&job, |member| member.exchange("address", &[member.membership.rank as u8, round], SOON).unwrap());
        assert!(values.iter().all(|all| *all == [[0, round], [1, round], [2, round], [3, round]]), "{values:?}");
    }
    // Values of the largest size for all.
    let large = each(&job, |member| member.exchange("large", &vec![1; Coordination::MAX_VALUE_BYTES], SOON).unwrap());
    assert!(large.iter().flatten().all(|value| value.len() == Coordination::MAX_VALUE_BYTES));
}

#[test]
fn a_barrier_holds_until_the_last_has_come() {
    let job = job(3, &options());
    let last_came = std::sync::atomic::AtomicBool::new(false);
    for _ in 0..3 {
        last_came.store(false, Ordering::SeqCst);
        thread::scope(|scope| {
            let (passed, passes) = mpsc::channel();
            for member in &job[..2] {
                let (passed, last_came) = (passed.clone(), &last_came);
                scope.spawn(move || {
                    member.barrier("step", SOON).unwrap();
                    passed.send(last_came.load(Ordering::SeqCst)).unwrap();
                });
            }
            assert!(passes.recv_timeout(Duration::from_millis(50)).is_err());
            last_came.store(true, Ordering::SeqCst);
            job[2].barrier("step", SOON).unwrap();
            assert!(passes.recv_timeout(SOON).unwrap() && passes.recv_timeout(SOON).unwrap());
        });
    }
}

#[test]
fn a_barrier_names_who_is_missing_and_where_they_are() {
    let job = job(4, &options());
    let began = Instant::now();
    let errors = thread::scope(|scope| {
        let elsewhere = scope.spawn(|| job[3].barrier("b", Duration::from_secs(1)));
        let waits = job[..2].iter().zip([300, 9000]).map(|(member, millis)| (member, Duration::from_millis(millis)));
        let threads: Vec<_> = waits.map(|(member, wait)| scope.spawn(move || member.barrier("a", wait))).collect();
        let errors: Vec<String> =
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap_err().to_string()).collect();
        assert!(elsewhere.join().unwrap().is_err());
        errors
    });
    // The first one's deadline is that of all.
    assert!(began.elapsed() < Duration::from_secs(9), "{:?}", began.elapsed());
    for (rank, text) in errors.iter().enumerate() {
        let words = format!("worker:{rank}: barrier \"a\" was not completed within ");
        assert!(
            text.starts_with(&words)
                && text.contains("missing: worker:2, ")
                && text.contains("worker:3 (waits at barrier \"b\")"),
            "{text}"
        );
    }
    // Members that timed out do not count as present.
    let text = job[2].barrier("a", Duration::from_millis(50)).unwrap_err().to_string();
    assert!(text.contains("missing: worker:0, worker:1, worker:3"), "{text}");
    assert!(each(&job, |member| member.barrier("a", SOON)).iter().all(Result::is_ok));
}

#[test]
fn members_that_wait_for_one_that_has_left_name_it_alone() {
    for _ in 0..5 {
        let mut job = job(4, &options());
        let leaves = job.pop().unwrap();
        let texts: Vec<String> = thread::scope(|scope| {
            let waits = |member| scope.spawn(move || Coordination::barrier(member, "b", SOON).unwrap_err().to_string());
            let threads: Vec<_> = job.iter().map(waits).collect();
            thread::sleep(Duration::from_millis(50));
            leaves.leave();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(texts.iter().all(|text| text.ends_with("missing: worker:3 (has left the job)")), "{texts:?}");
    }
}

#[test]
fn one_name_is_not_used_by_two_threads_of_a_member_at_once() {
    let job = job(2, &options());
    let texts: Vec<String> = thread::scope(|scope| {
        let both = [0, 1].map(|_| scope.spawn(|| job[0].barrier("same", Duration::from_secs(1))));
        both.map(|thread| thread.join().unwrap().unwrap_err().to_string()).to_vec()
    });
    assert!(texts.iter().any(|text| text.contains("another thread of this task is there already")), "{texts:?}");
    assert!(texts.iter().any(|text| text.contains("missing: worker:1")), "{texts:?}");
}

#[test]
fn a_job_of_one_process_listens_nowhere() {
    let membership = Membership::new(0, 1, "").unwrap();
    let alone = Coordination::start(&membership, CoordinationOptions::default()).unwrap();
    assert!(matches!(alone.backend, Backend::Alone(_)));
    assert_eq!(alone.local_host(), "127.0.0.1");
    alone.barrier("b", SOON).unwrap();
    assert_eq!(alone.exchange("e", b"x", SOON).unwrap(), [b"x"]);
    assert_eq!(alone.try_get("k").unwrap(), None);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| alone.get("k", SOON));
        alone.put("k", b"v").unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), b"v");
    });
    assert!(matches!(alone.get("never", Duration::from_millis(10)), Err(Error::KeyMissing { .. })));
    alone.report_error("nobody hears it");
    assert_eq!(alone.failure(), None);
}

#[test]
fn it_works_on_a_thread_that_runs_an_event_loop_of_its_own() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let job = job(2, &options());
        job[1].put("k", b"v").unwrap();
        assert_eq!(job[0].get("k", SOON).unwrap(), b"v");
    });
}

#[test]
fn endless_timeouts_are_no_panic() {
    let endless = CoordinationOptions { join_timeout: Duration::MAX, progress_interval: Duration::MAX, ..options() };
    let (heartbeat_interval, heartbeat_timeout) = (Duration::MAX, Duration::MAX);
    let job = job(2, &CoordinationOptions { heartbeat_interval, heartbeat_timeout, ..endless });
    job[1].put("k", b"v").unwrap();
    assert_eq!(job[0].get("k", Duration::MAX).unwrap(), b"v");
    assert!(each(&job, |member| member.barrier("b", Duration::MAX)).iter().all(Result::is_ok));
}

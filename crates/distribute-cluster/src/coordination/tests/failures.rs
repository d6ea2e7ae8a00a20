use super::*;
use distribute_types::ErrorClass;

/// Returns a channel of every failure that a member learns of.
fn ears(job: &[Coordination]) -> mpsc::Receiver<(u32, Failure)> {
    let (tell, told) = mpsc::channel();
    for member in job {
        let (rank, tell) = (member.membership().rank, tell.clone());
        member.on_failure(move |failure| drop(tell.send((rank, failure.clone()))));
    }
    told
}

/// Returns `count` failures, sorted by rank.
fn heard(told: &mpsc::Receiver<(u32, Failure)>, count: usize) -> Vec<(u32, Failure)> {
    let mut all: Vec<_> = (0..count).map(|_| told.recv_timeout(SOON).unwrap()).collect();
    all.sort_by_key(|(rank, _)| *rank);
    all
}

#[test]
fn a_member_that_dies_is_noticed_at_once() {
    let mut job = job(3, &options());
    let told = ears(&job[..2]);
    let (dead, died) = (job.remove(1), Instant::now());
    dead.vanish();
    let failure = told.recv_timeout(SOON).unwrap();
    assert_eq!(failure.0, 0);
    // Missing heartbeats would be detected only after ten seconds.
    assert!(died.elapsed() < Duration::from_secs(2), "{:?}", died.elapsed());
    let failure = failure.1;
    assert_eq!((failure.task, failure.rank), (Task::new(TaskType::Worker, 1), 1));
    assert!(
        failure.to_string().starts_with("lost worker:1: its process ended or its connection broke (last heard from ")
    );
    for member in &job {
        let rank = member.membership().rank;
        let text = member.barrier("b", SOON).unwrap_err().to_string();
        assert!(text.starts_with(&format!("worker:{rank}: barrier \"b\": lost worker:1")), "{text}");
        assert!(matches!(member.get("k", SOON), Err(Error::Failed { .. })));
        assert_eq!(member.failure().as_ref(), Some(&failure));
        // Values can still be read and written.
        member.put("last words", b"x").unwrap();
        assert_eq!(member.try_get("none").unwrap(), None);
    }
    let late = ears(&job);
    assert_eq!(heard(&late, 2)[1].1, failure);
}

#[test]
fn who_waits_for_a_member_that_dies_is_woken() {
    let mut job = job(3, &options());
    let dead = job.remove(2);
    thread::scope(|scope| {
        let (arrived, arrivals) = mpsc::channel();
        let waiters: Vec<_> = job
            .iter()
            .map(|member| {
                let arrived = arrived.clone();
                scope.spawn(move || {
                    arrived.send(()).unwrap();
                    (member.exchange("e", b"", SOON).unwrap_err(), Instant::now())
                })
            })
            .collect();
        job.iter().for_each(|_| arrivals.recv_timeout(SOON).unwrap());
        let died = Instant::now();
        dead.vanish();
        for waiter in waiters {
            let (error, woken) = waiter.join().unwrap();
            assert!(error.to_string().contains("exchange \"e\": lost worker:2"), "{error}");
            assert!(woken - died < Duration::from_secs(2));
        }
    });
}

#[test]
fn a_leader_that_dies_is_noticed_at_once() {
    let mut job = job(3, &options());
    let told = ears(&job[1..]);
    let (leader, died) = (job.remove(0), Instant::now());
    leader.vanish();
    for (_, failure) in heard(&told, 2) {
        assert_eq!((failure.task, failure.rank), (Task::new(TaskType::Worker, 0), 0));
    }
    assert!(died.elapsed() < Duration::from_secs(2), "{:?}", died.elapsed());
    for member in &job {
        for error in [member.put("k", b"v").unwrap_err(), member.barrier("b", SOON).unwrap_err()] {
            assert!(error.to_string().contains("lost worker:0: its process ended"), "{error}");
        }
    }
}

#[test]
fn a_frozen_member_is_lost_after_the_timeout() {
    let job = job(3, &nervous());
    let told = ears(&[]);
    drop(told);
    let told = ears(&job[..2]);
    let (thaw, frozen) = (job[2].freeze(), Instant::now());
    for (_, failure) in heard(&told, 2) {
        assert_eq!(failure.rank, 2);
        let FailureCause::Lost { how, last_heard } = failure.cause else { panic!("{failure}") };
        assert!(how.contains("no sign of life") && last_heard >= Duration::from_millis(400), "{how} {last_heard:?}");
    }
    assert!(frozen.elapsed() < Duration::from_secs(3), "{:?}", frozen.elapsed());
    drop(thaw);
}

#[test]
fn a_frozen_leader_is_lost_after_the_timeout() {
    let job = job(2, &nervous());
    let told = ears(&job[1..]);
    let thaw = job[0].freeze();
    let text = job[1].barrier("b", SOON).unwrap_err().to_string();
    assert!(text.contains("lost worker:0: it gives no sign of life"), "{text}");
    assert_eq!(heard(&told, 1)[0].1.rank, 0);
    drop(thaw);
}

#[test]
fn members_that_only_live_are_not_lost() {
    let job = job(3, &nervous());
    let told = ears(&job);
    assert!(told.recv_timeout(Duration::from_secs(1)).is_err());
}

#[test]
fn the_first_report_is_everybodys_cause() {
    let job = job(3, &options());
    let told = ears(&job);
    job[1].report_error("the loss is NaN at step 7");
    job[2].report_error("worker:1 went away");
    for (_, failure) in heard(&told, 3) {
        assert_eq!(failure.to_string(), "worker:1 failed: the loss is NaN at step 7");
        assert_eq!(failure.cause, FailureCause::Reported("the loss is NaN at step 7".to_owned()));
    }
    let error = job[0].barrier("b", SOON).unwrap_err();
    assert!(error.to_string().contains("worker:1 failed: the loss is NaN"), "{error}");
    assert!(!error.is_retryable() && error.failure_kind() == FailureKind::Permanent);
    assert_eq!(error.scope(), crate::Scope::Peer);
}

#[test]
fn the_kind_of_a_failure_travels_with_it() {
    for kind in [FailureKind::Configuration, FailureKind::Permanent, FailureKind::Retryable] {
        let job = job(2, &options());
        let told = ears(&job);
        job[1].report_failure("line 1\nline 2", kind);
        for (_, failure) in heard(&told, 2) {
            assert_eq!((failure.kind, failure.to_string().as_str()), (kind, "worker:1 failed: line 1\\nline 2"));
        }
        let error = job[0].barrier("b", SOON).unwrap_err();
        assert_eq!((error.failure_kind(), error.is_retryable()), (kind, kind == FailureKind::Retryable), "{error}");
    }
    let mut job = job(2, &options());
    let told = ears(&job);
    job.remove(1).vanish();
    assert_eq!(heard(&told, 1)[0].1.kind, FailureKind::Retryable);
}

#[test]
fn a_report_outlives_its_process() {
    let mut job = job(3, &options());
    let told = ears(&job);
    let leader = job.remove(0);
    leader.report_error("disk full");
    leader.vanish();
    for (_, failure) in heard(&told, 3) {
        assert_eq!(failure.to_string(), "worker:0 failed: disk full");
    }
}

#[test]
fn a_panic_is_reported() {
    let mut job = job(2, &options());
    let member = job.remove(1);
    let panicked = thread::spawn(move || {
        let _member = member;
        std::panic::resume_unwind(Box::new("a bug"));
    });
    assert!(panicked.join().is_err());
    assert_eq!(job[0].failure().unwrap().to_string(), "worker:1 failed: its thread panicked");
}

#[test]
fn who_leaves_is_no_failure() {
    let mut job = job(3, &options());
    let told = ears(&job);
    let left = job.remove(1);
    left.leave();
    assert!(left.barrier("b", SOON).unwrap_err().to_string().contains("this task has left the job"));
    drop(left);
    // Members do not wait for one that has left.
    let text = job[0].barrier("b", SOON).unwrap_err().to_string();
    assert!(text.contains("worker:1 (has left the job)"), "{text}");
    job[1].put("k", b"v").unwrap();
    drop(job.remove(1));
    drop(job);
    assert!(told.try_recv().is_err());
}

#[test]
fn a_leader_that_leaves_is_no_failure_and_answers_first() {
    for _ in 0..10 {
        let mut job = job(3, &options());
        let told = ears(&job);
        let leader = job.remove(0);
        thread::scope(|scope| {
            let others: Vec<_> = job.iter().map(|member| scope.spawn(|| member.barrier("end", SOON))).collect();
            leader.barrier("end", SOON).unwrap();
            drop(leader);
            others.into_iter().for_each(|other| other.join().unwrap().unwrap());
        });
        let text = job[0].get("k", SOON).unwrap_err().to_string();
        assert!(text.contains("the leader has left the job"), "{text}");
        // A loop that waits for failures does not spin from then on.
        let (began, pause) = (Instant::now(), Duration::from_millis(20));
        assert!(job[0].await_failure(pause).is_none() && began.elapsed() >= pause);
        drop(job);
        assert!(told.try_recv().is_err());
    }
}

#[test]
fn callbacks_may_report_panic_and_drop() {
    let mut job = job(3, &options());
    let (member, dead) = (Arc::new(job.remove(1)), job.remove(1));
    let (tell, told) = mpsc::channel();
    member.on_failure(|_| std::panic::resume_unwind(Box::new("a bug")));
    let own = parking_lot::Mutex::new(Some(member.clone()));
    member.on_failure(move |failure| {
        let Some(own) = own.lock().take() else { return };
        own.report_error("too late");
        let refused = own.barrier("b", SOON).unwrap_err().to_string();
        drop(own);
        tell.send((failure.clone(), refused)).unwrap();
    });
    drop(member);
    dead.vanish();
    let (failure, refused) = told.recv_timeout(SOON).unwrap();
    assert_eq!(failure.rank, 2);
    assert!(refused.contains("on_failure callback makes it"), "{refused}");
}

use super::*;
use distribute_types::ErrorClass;

#[test]
fn a_job_meets_quickly() {
    let started = Instant::now();
    let job = job(4, &options());
    // Two orders of magnitude above the usual time; exact measurements belong in a benchmark.
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    for (rank, member) in (0..).zip(&job) {
        assert_eq!(member.membership().rank, rank);
        assert_eq!(member.local_host(), "127.0.0.1");
        assert_eq!(member.failure(), None);
    }
}

#[test]
fn hundreds_of_tasks_join_at_once_and_none_is_lost() {
    let job = job(256, &CoordinationOptions { join_timeout: Duration::from_secs(60), ..options() });
    let seen = each(&job, |member| {
        let own = member.membership().rank.to_string().into_bytes();
        member.exchange("ranks", &own, Duration::from_secs(60)).map(|all| all.len())
    });
    assert_eq!(seen.into_iter().collect::<Result<Vec<_>>>().unwrap(), [256; 256]);
}

#[test]
fn members_may_come_before_the_leader() {
    let (listener, address) = listener();
    drop(listener);
    let (tell, told) = mpsc::channel();
    let progress: Arc<Progress> = Arc::new(move |waiting: &Waiting| drop(tell.send(waiting.clone())));
    let options = CoordinationOptions { progress_interval: Duration::from_millis(20), ..options() };
    let eager = CoordinationOptions { progress: Some(progress), ..options.clone() };
    let member = Membership::new(1, 2, address.clone()).unwrap();
    let member = thread::spawn(move || Coordination::start(&member, eager));
    let waiting = told.recv_timeout(SOON).unwrap();
    let text = waiting.to_string();
    assert!(text.starts_with(&format!("waiting for the leader worker:0 at {address} (0 s of 10 s): ")), "{text}");
    assert!(text.contains("Connection refused") || text.contains("not connected yet"), "{text}");
    let leader = Coordination::start(&Membership::new(0, 2, address).unwrap(), options).unwrap();
    let member = member.join().unwrap().unwrap();
    assert!(thread::scope(|scope| {
        let there = scope.spawn(|| member.barrier("b", SOON));
        leader.barrier("b", SOON).is_ok() && there.join().unwrap().is_ok()
    }));
}

#[test]
fn who_is_missing_is_said_while_waiting_and_in_the_end() {
    let (listener, address) = listener();
    let tasks = [Task::new(TaskType::Chief, 0), Task::new(TaskType::Worker, 0), Task::new(TaskType::Worker, 1)];
    let spec = crate::ClusterSpec::new().with_job(TaskType::Chief, [address]).unwrap();
    let spec = spec.with_job(TaskType::Worker, ["127.0.0.1:4", "127.0.0.1:5"]).unwrap();
    let (tell, told) = mpsc::channel();
    let progress: Arc<Progress> = Arc::new(move |waiting: &Waiting| drop(tell.send(waiting.to_string())));
    let options = CoordinationOptions {
        join_timeout: Duration::from_millis(900),
        progress_interval: Duration::from_millis(300),
        progress: Some(progress),
        ..options()
    };
    let texts = thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let membership = Membership::from_cluster(&spec, tasks[rank]).unwrap();
            let listener = (rank == 0).then(|| listener.clone());
            let options = CoordinationOptions { listener, ..options.clone() };
            scope.spawn(move || Coordination::start(&membership, options).unwrap_err())
        });
        threads.map(|thread| thread.join().unwrap())
    });
    for error in &texts {
        assert!(matches!(error, Error::Missing { .. }) && error.is_retryable(), "{error}");
        assert!(error.to_string().contains("worker:1 at 127.0.0.1:5 did not join within 0."), "{error}");
    }
    let lines: Vec<String> = told.try_iter().collect();
    assert!(lines.iter().any(|line| line == "waiting for 1 of 3 tasks: worker:1 (0 s of 0.9 s)"), "{lines:?}");
}

#[test]
fn no_leader_is_said_with_the_last_error() {
    let (listener, address) = listener();
    drop(listener);
    let options = CoordinationOptions { join_timeout: Duration::from_millis(100), ..options() };
    let error = Coordination::start(&Membership::new(1, 2, address.clone()).unwrap(), options.clone()).unwrap_err();
    let text = error.to_string();
    let words = format!("worker:1: cannot join the leader worker:0 at {address} within 0.1 s: ");
    assert!(text.starts_with(&words) && text.contains("Connection refused"), "{text}");
    // Names that cannot be resolved are retried until the timeout, too: they may appear when the leader's machine does.
    let nowhere = Membership::new(1, 2, "no-such-host.invalid:5").unwrap();
    let error = Coordination::start(&nowhere, options).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

#[test]
fn what_is_no_leader_is_said() {
    let (silent, address) = listener();
    let options = CoordinationOptions { join_timeout: Duration::from_millis(300), ..options() };
    let text = Coordination::start(&Membership::new(1, 2, address).unwrap(), options).unwrap_err().to_string();
    assert!(text.contains("cannot join the leader worker:0"), "{text}");
    drop(silent);
}

/// Runs a leader of a job of three and returns the error of a task that must not join it.
fn refusal(membership: impl Fn(&str) -> Membership) -> String {
    let (listener, address) = listener();
    let leader = Membership::new(0, 3, address.clone()).unwrap();
    let second = Membership::new(1, 3, address.clone()).unwrap();
    let (tell, told) = mpsc::channel();
    let progress: Arc<Progress> = Arc::new(move |waiting: &Waiting| _ = tell.send(waiting.missing.len()));
    let options = CoordinationOptions {
        join_timeout: Duration::from_millis(1500),
        progress_interval: Duration::from_millis(20),
        progress: Some(progress),
        ..options()
    };
    let patient = CoordinationOptions { listener: Some(listener), ..options.clone() };
    let leader = thread::spawn(move || Coordination::start(&leader, patient).unwrap_err().to_string());
    let silent = CoordinationOptions { progress: None, ..options };
    let quiet = silent.clone();
    let second = thread::spawn(move || Coordination::start(&second, quiet).unwrap_err().to_string());
    while told.recv_timeout(SOON).unwrap() != 1 {}
    let error = Coordination::start(&membership(&address), silent).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }) && !error.is_retryable(), "{error}");
    // The correct tasks keep waiting.
    assert!(leader.join().unwrap().contains("worker:2 did not join"));
    assert!(second.join().unwrap().contains("worker:2 did not join"));
    error.to_string()
}

#[test]
fn two_processes_with_one_rank_are_refused_with_both_addresses() {
    let text = refusal(|address| Membership::new(1, 3, address).unwrap());
    let words = "two processes say that they are worker:1: one at 127.0.0.1:";
    assert!(
        text.contains(words) && text.contains(", one at 127.0.0.1:") && text.contains("index of its own"),
        "{text}"
    );
}

#[test]
fn other_descriptions_of_the_job_are_refused() {
    let text = refusal(|address| Membership::new(2, 4, address).unwrap());
    assert!(text.contains("told that the job has 4 tasks, but worker:0 was told 3"), "{text}");
    let text = refusal(|address| {
        let mut membership = Membership::new(2, 3, address).unwrap();
        membership.tasks[0] = Task::new(TaskType::Chief, 0);
        membership
    });
    assert!(text.contains("calls rank 0 chief:0, but worker:0 calls it worker:0"), "{text}");
}

#[test]
fn members_with_other_heartbeats_are_refused() {
    let (listener, address) = listener();
    let hasty = options().heartbeat_interval(Duration::from_millis(50)).heartbeat_timeout(Duration::from_millis(500));
    let patient = CoordinationOptions { listener: Some(listener), ..options() };
    let leader = Membership::new(0, 2, address.clone()).unwrap();
    let leader = thread::spawn(move || Coordination::start(&leader, patient));
    let second = Membership::new(1, 2, address).unwrap();
    let error = Coordination::start(&second, hasty).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }) && !error.is_retryable(), "{error}");
    assert!(error.to_string().contains("set heartbeat_interval and heartbeat_timeout alike"), "{error}");
    // One with the same joins.
    let second = Coordination::start(&second, options()).unwrap();
    assert_eq!((leader.join().unwrap().unwrap().failure(), second.failure()), (None, None));
}

#[test]
fn two_jobs_on_one_address_refuse_each_other() {
    let (listener, address) = listener();
    let of = |rank, job: &str| Membership::new(rank, 2, address.clone()).unwrap().with_job_id(JobId::new(job).unwrap());
    let (leader, stranger, second) = (of(0, "job-a"), of(1, "job-b"), of(1, "job-a"));
    let options = options();
    let patient = CoordinationOptions { listener: Some(listener), ..options.clone() };
    let leader = thread::spawn(move || Coordination::start(&leader, patient));
    let error = Coordination::start(&stranger, options.clone()).unwrap_err();
    let text = error.to_string();
    let words = format!(
        "worker:1 was refused by the leader at {address}: it belongs to job job-b, but worker:0 leads job job-a"
    );
    assert!(matches!(error, Error::Refused { .. }) && !error.is_retryable() && text.starts_with(&words), "{text}");
    // The leader's own job is not affected.
    let second = Coordination::start(&second, options).unwrap();
    let leader = leader.join().unwrap().unwrap();
    assert_eq!((leader.failure(), second.failure()), (None, None));
    assert_eq!((leader.job_id(), leader.incarnation()), (second.job_id(), second.incarnation()));
}

#[test]
fn every_meeting_has_an_incarnation_of_its_own() {
    let meetings = [job(2, &options()), job(2, &options())];
    for members in &meetings {
        assert_eq!(members[0].incarnation(), members[1].incarnation());
    }
    assert_ne!(meetings[0][0].incarnation(), meetings[1][0].incarnation());
    let alone = Membership::new(0, 1, "").unwrap();
    let alone = [(); 2].map(|()| Coordination::start(&alone, options()).unwrap().incarnation());
    assert_ne!(alone[0], alone[1]);
}

#[test]
fn the_options_identity_counts_before_the_memberships() {
    let given = |name: &str| Some(JobId::new(name).unwrap());
    let membership = Membership::new(0, 1, "").unwrap().with_job_id(JobId::new("a").unwrap());
    let started = Coordination::start(&membership, CoordinationOptions { job_id: given("b"), ..options() }).unwrap();
    assert_eq!(Some(started.job_id()), given("b"));
    let read = CoordinationOptions::from_vars(|name| (name == "DISTRIBUTE_JOB_ID").then(|| "c".to_owned())).unwrap();
    assert_eq!(read.job_id, given("c"));
}

#[test]
fn a_port_in_use_is_a_sentence() {
    let (taken, address) = listener();
    let error = Coordination::start(&Membership::new(0, 2, address.clone()).unwrap(), options()).unwrap_err();
    let text = error.to_string();
    let words = format!("worker:0 leads the job and cannot listen on {address}: ");
    assert!(text.starts_with(&words) && text.contains("in use") && text.contains("DISTRIBUTE_PORT"), "{text}");
    drop(taken);
}

#[test]
fn wrong_options_are_sentences() {
    let membership = Membership::new(0, 2, "127.0.0.1:1").unwrap();
    let hasty = CoordinationOptions { heartbeat_timeout: Duration::from_secs(1), ..options() };
    let text = Coordination::start(&membership, hasty).unwrap_err().to_string();
    assert!(text.contains("at least twice the interval"), "{text}");
    let none = CoordinationOptions { heartbeat_interval: Duration::ZERO, ..options() };
    assert!(matches!(Coordination::start(&membership, none), Err(Error::Config { .. })));
    let endless = CoordinationOptions { heartbeat_interval: Duration::MAX, ..options() };
    assert!(matches!(Coordination::start(&membership, endless), Err(Error::Config { .. })));
    let outside = Membership { rank: 2, ..membership };
    assert!(matches!(Coordination::start(&outside, options()), Err(Error::Config { .. })));
    let of = |given: &'static str| move |name: &str| (name == "DISTRIBUTE_TIMEOUT").then(|| given.to_owned());
    let timeout = |given: &'static str| CoordinationOptions::from_vars(of(given));
    assert_eq!(timeout("2.5").unwrap().join_timeout, Duration::from_millis(2500));
    for given in ["0", "-1", "x", "nan", "inf", "1e300"] {
        let text = timeout(given).unwrap_err().to_string();
        assert!(text.contains("DISTRIBUTE_TIMEOUT: it is not a number of seconds above 0"), "{text}");
    }
    assert_eq!(CoordinationOptions::from_vars(|_| None).unwrap().join_timeout, Duration::from_secs(300));
}

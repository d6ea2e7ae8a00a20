use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use distribute_types::{ErrorClass, FailureKind};

use super::*;
use crate::JobSecret;

const SOON: Duration = Duration::from_secs(10);

/// A process of a job at a free port of loopback.
fn listener() -> Arc<TcpListener> {
    Arc::new(TcpListener::bind("127.0.0.1:0").unwrap())
}

fn address(listener: &TcpListener) -> String {
    listener.local_addr().unwrap().to_string()
}

/// Options of a job of `min` to 3 members with windows that are short enough for tests.
fn options(min: u32, seeds: &[String]) -> ElasticOptions {
    ElasticOptions::new(min..=3, seeds.to_vec(), JobId::new("elastic").unwrap())
        .join_window(Duration::from_secs(5))
        .answer_window(Duration::from_millis(200))
        .join_timeout(SOON)
        .host("127.0.0.1".to_owned())
}

/// Starts a job at these listeners, by rank.
fn start(listeners: &[Arc<TcpListener>], change: impl Fn(ElasticOptions) -> ElasticOptions) -> Vec<ElasticJob> {
    let seeds: Vec<String> = listeners.iter().map(|listener| address(listener)).collect();
    let joining: Vec<_> = listeners
        .iter()
        .map(|listener| {
            let options = change(options(1, &seeds).members(1..=listeners.len() as u32)).listener(listener.clone());
            thread::spawn(move || ElasticJob::join(options).unwrap())
        })
        .collect();
    joining.into_iter().map(|thread| thread.join().unwrap()).collect()
}

impl ElasticOptions {
    fn members(self, members: std::ops::RangeInclusive<u32>) -> ElasticOptions {
        ElasticOptions { members, ..self }
    }
}

/// The members of the next generation by their control addresses, which all of these processes agree on.
fn agree(jobs: &[&ElasticJob], after: u64) -> Generation {
    let next: Vec<Generation> = jobs.iter().map(|job| job.next_generation(after).unwrap()).collect();
    assert!(next.iter().all(|generation| *generation == next[0]), "{next:?}");
    next[0].clone()
}

/// Starts the coordination of a generation on all of its members, and exchanges their ranks.
fn coordinate(jobs: &[&ElasticJob], generation: &Generation) {
    thread::scope(|scope| {
        for job in jobs {
            scope.spawn(|| {
                let options = CoordinationOptions::default().join_timeout(SOON);
                let coordination = job.coordinate(generation, options).unwrap();
                let own = coordination.membership().rank;
                let ranks = coordination.exchange("rank", &[own as u8], SOON).unwrap();
                assert_eq!(ranks, (0..jobs.len() as u8).map(|rank| vec![rank]).collect::<Vec<_>>());
            });
        }
    });
}

#[test]
fn members_fail_join_and_lead_in_turn() {
    let listeners = [listener(), listener(), listener()];
    let seeds: Vec<String> = listeners.iter().map(|listener| address(listener)).collect();
    let mut jobs = start(&listeners, |options| options);
    let first = agree(&jobs.iter().collect::<Vec<_>>(), 0);
    let controls: Vec<&String> = first.members.iter().map(|member| &member.control).collect();
    assert_eq!(controls, seeds.iter().collect::<Vec<_>>());
    assert_eq!(jobs.iter().map(ElasticJob::rank).collect::<Vec<_>>(), [0, 1, 2]);
    coordinate(&jobs.iter().collect::<Vec<_>>(), &first);

    // One is gone with its sockets. The leader is told, and the other learns it.
    let changed = Arc::new(AtomicU64::new(0));
    let seen = changed.clone();
    jobs[1].on_change(move |number| seen.store(number, Ordering::SeqCst));
    let lost = Instant::now();
    drop(jobs.pop());
    jobs[0].suspect(1, &[2]);
    let second = agree(&[&jobs[0], &jobs[1]], 1);
    assert!(lost.elapsed() < SOON / 4, "{:?}", lost.elapsed());
    assert_eq!((second.number, second.members.len()), (2, 2));
    while changed.load(Ordering::SeqCst) != 2 {
        assert!(lost.elapsed() < SOON, "the callback was not called");
        thread::yield_now();
    }
    assert!(jobs[0].membership(&first).is_ok() && first.members[0].joined_in == 1);
    coordinate(&[&jobs[0], &jobs[1]], &second);

    // Another joins, at an address of its own.
    let joining = options(1, &seeds).founding(false).listener(listener());
    let joiner = thread::spawn(move || ElasticJob::join(joining.join_window(Duration::from_millis(50))).unwrap());
    let joiner = joiner.join().unwrap();
    let third = joiner.generation();
    assert_eq!((third.number, third.members.len(), joiner.rank()), (3, 3, 2));
    assert_eq!((third.members[2].join_number, third.members[2].joined_in), (3, 3));
    jobs.push(joiner);
    assert_eq!(agree(&[&jobs[0], &jobs[1], &jobs[2]], 2), third);

    // The leader dies; the lowest that lives takes over.
    drop(jobs.remove(0));
    jobs.iter().for_each(|job| job.suspect(3, &[0]));
    let fourth = agree(&[&jobs[0], &jobs[1]], 3);
    assert_eq!((jobs[0].rank(), jobs[1].rank(), fourth.members.len()), (0, 1, 2));
    coordinate(&[&jobs[0], &jobs[1]], &fourth);

    // The leader leaves, which the other need not find out.
    jobs[0].leave();
    let fifth = jobs[1].next_generation(4).unwrap();
    assert_eq!((fifth.members.len(), jobs[1].rank()), (1, 0));
    let text = jobs[0].next_generation(4).unwrap_err().to_string();
    assert!(text.contains("this process has left the job"), "{text}");
    assert!(jobs[0].membership(&fifth).is_err());
}

#[test]
fn one_of_two_does_not_continue_by_a_majority_and_does_by_a_register() {
    let shorter = |options: ElasticOptions| options.join_timeout(Duration::from_millis(1500));
    let mut jobs = start(&[listener(), listener()], shorter);
    drop(jobs.pop());
    jobs[0].suspect(1, &[1]);
    let error = jobs[0].next_generation(1).unwrap_err();
    let words = "1 of 2 members of generation 1 answer; a majority is 2";
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(error.class().kind, FailureKind::Retryable);

    let folder = tempfile::tempdir().unwrap();
    let register: Arc<dyn Register> =
        Arc::new(FileRegister::new(folder.path(), &JobId::new("elastic").unwrap()).unwrap());
    let held = register.clone();
    let by_register = |options: ElasticOptions| options.authority(Authority::Register(held.clone()));
    let mut jobs = start(&[listener(), listener()], by_register);
    assert_eq!(register.read().unwrap(), Some(jobs[0].generation()));
    drop(jobs.remove(0));
    jobs[0].suspect(1, &[0]);
    let second = jobs[0].next_generation(1).unwrap();
    assert_eq!((second.members.len(), jobs[0].rank()), (1, 0));
    coordinate(&[&jobs[0]], &second);

    // One that joins finds the survivor by the register; the seeds are gone.
    let gone = address(&listener());
    let joining = by_register(options(1, &[gone]).members(1..=2)).founding(false).listener(listener());
    let joiner = ElasticJob::join(joining.join_window(Duration::from_millis(50))).unwrap();
    assert_eq!((joiner.rank(), joiner.generation().number), (1, 3));
}

#[test]
fn a_member_that_was_left_out_joins_again_by_itself() {
    let jobs = start(&[listener(), listener(), listener()], |options| options);
    // Two believe the third to be gone, which lives.
    jobs[..2].iter().for_each(|job| job.suspect(1, &[2]));
    let again = jobs[2].next_generation(1).unwrap();
    assert!(again.number > 2 && again.members.len() == 3, "{again}");
    let own = &again.members[jobs[2].rank() as usize];
    assert_eq!((own.join_number, own.joined_in, jobs[2].rank()), (3, again.number, 2));
    agree(&jobs.iter().collect::<Vec<_>>(), again.number - 1);
}

#[test]
fn the_answer_of_a_process_whose_port_is_closed_is_not_awaited() {
    let mut jobs = start(&[listener(), listener(), listener()], |options| options.answer_window(SOON / 2));
    drop(jobs.pop());
    let began = Instant::now();
    // Neither has seen which member was lost.
    jobs.iter().for_each(|job| job.suspect(1, &[]));
    assert_eq!(agree(&[&jobs[0], &jobs[1]], 1).members.len(), 2);
    assert!(began.elapsed() < SOON / 4, "{:?}", began.elapsed());
}

#[test]
fn a_generation_that_loses_a_member_before_it_trains_is_over_at_once() {
    let mut jobs = start(&[listener(), listener(), listener()], |options| options);
    let first = agree(&jobs.iter().collect::<Vec<_>>(), 0);
    drop(jobs.pop());
    let waited = Instant::now();
    thread::scope(|scope| {
        let meeting = [&jobs[0], &jobs[1]].map(|job| {
            let (first, options) = (&first, CoordinationOptions::default().join_timeout(SOON));
            scope.spawn(move || job.coordinate(first, options).unwrap_err())
        });
        let errors = meeting.map(|meeting| meeting.join().unwrap());
        assert!(errors.iter().all(|error| error.class().kind == FailureKind::Retryable), "{errors:?}");
    });
    assert_eq!(agree(&[&jobs[0], &jobs[1]], 1).members.len(), 2);
    assert!(waited.elapsed() < SOON / 4, "{:?}", waited.elapsed());
}

#[test]
fn coordinations_of_generations_that_are_over_end_and_later_ones_wait_for_the_leader() {
    let mut jobs = start(&[listener(), listener(), listener()], |options| options);
    let first = agree(&jobs.iter().collect::<Vec<_>>(), 0);
    let options = || CoordinationOptions::default().join_timeout(SOON);
    // One is gone before the generation's coordination has begun, which does not wait for it.
    drop(jobs.pop());
    let waited = Instant::now();
    thread::scope(|scope| {
        let waiting = [&jobs[0], &jobs[1]].map(|job| {
            let first = &first;
            scope.spawn(move || job.coordinate(first, options()))
        });
        jobs[1].suspect(1, &[2]);
        for (rank, thread) in waiting.into_iter().enumerate() {
            let error = thread.join().unwrap().unwrap_err();
            let is_over = matches!(error, Error::GenerationOver { generation: 1, newer: 2, .. });
            // The other one may see first that its leader has ended.
            assert!(is_over || (rank == 1 && matches!(error, Error::Missing { .. })), "worker:{rank}: {error}");
            assert_eq!(error.class().kind, FailureKind::Retryable);
        }
    });
    assert!(waited.elapsed() < SOON / 2, "{:?}", waited.elapsed());

    // A member that is ahead of the leader waits for it; one that is behind is told so.
    let [leader, member] = [&jobs[0], &jobs[1]];
    let second = agree(&[leader, member], 1);
    let coordinations = thread::scope(|scope| {
        let leads = scope.spawn(|| leader.coordinate(&second, options()).unwrap());
        let joined = member.coordinate(&second, options()).unwrap();
        let earlier = (joined, leads.join().unwrap());
        member.suspect(2, &[]);
        let third = agree(&[leader, member], 2);
        let next = third.clone();
        let ahead = scope.spawn(move || member.coordinate(&next, options()).unwrap());
        // The service of the second generation answers until it is dropped.
        thread::sleep(Duration::from_millis(50));
        drop(earlier);
        let leads = leader.coordinate(&third, options()).unwrap();
        (ahead.join().unwrap(), leads)
    });
    let late = Coordination::start(&member.membership(&second).unwrap(), options()).unwrap_err();
    assert!(matches!(late, Error::GenerationOver { generation: 2, newer: 3, .. }), "{late}");
    assert_eq!(late.class().kind, FailureKind::Retryable);
    drop(coordinations);
}

#[test]
fn strangers_and_other_jobs_at_the_control_port_do_no_harm() {
    let listeners = [listener(), listener()];
    let seeds: Vec<String> = listeners.iter().map(|listener| address(listener)).collect();
    let jobs = start(&listeners, |options| options);
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"distelas\xff\xff\xff\xff", b"distelas\0\0\0\x02\x08\x01", b""] {
        let mut stream = TcpStream::connect(&seeds[0]).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        // It hangs up before all is sent.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        // It is closed without an answer, but for the preamble and a refusal of a greeting that is none.
        let mut answer = Vec::new();
        let _ = stream.take(4096).read_to_end(&mut answer);
        assert!(answer.len() < 200, "{bytes:?}: {answer:?}");
    }
    let other = ElasticOptions { job_id: JobId::new("other").unwrap(), ..options(1, &seeds) };
    let other = other.founding(false).listener(listener()).join_timeout(Duration::from_millis(400));
    let text = ElasticJob::join(other).unwrap_err().to_string();
    assert!(text.contains("no member of the job answers at 127.0.0.1:"), "{text}");
    assert!(text.contains("it belongs to job other, not to elastic"), "{text}");
    assert_eq!(agree(&[&jobs[0], &jobs[1]], 0).members.len(), 2);
    // The job is as able as before.
    jobs[1].suspect(1, &[]);
    assert_eq!(agree(&[&jobs[0], &jobs[1]], 1).members.len(), 2);
}

#[test]
fn processes_with_other_options_do_not_found_a_job_together() {
    let folder = tempfile::tempdir().unwrap();
    let register = Arc::new(FileRegister::new(folder.path(), &JobId::new("elastic").unwrap()).unwrap());
    let both = |patience: Duration, second: &dyn Fn(ElasticOptions) -> ElasticOptions| {
        let listeners = [listener(), listener()];
        let seeds = [0, 1].map(|place: usize| address(&listeners[place]));
        let of =
            |place: usize| options(2, &seeds).members(2..=2).listener(listeners[place].clone()).join_timeout(patience);
        let each = [of(0), second(of(1))];
        let joining = each.map(|options| thread::spawn(move || ElasticJob::join(options).unwrap_err()));
        joining.map(|joining| joining.join().unwrap())
    };
    let began = Instant::now();
    let by_register = |options: ElasticOptions| options.authority(Authority::Register(register.clone()));
    for (errors, words) in [
        (both(SOON, &by_register), "a register decides there, a majority decides here"),
        (both(SOON, &|options| options.members(1..=3)), "members is 1..=3 there, members is 2..=2 here"),
    ] {
        let [first, second] = errors.map(|error| {
            assert_eq!((error.class().kind, error.is_retryable()), (FailureKind::Configuration, false), "{error}");
            error.to_string()
        });
        assert!(first.contains("of the same job, has others") && first.contains(words), "{first}");
        assert!(second.contains("of the same job, has others"), "{second}");
    }
    assert!(began.elapsed() < SOON / 2, "{:?}", began.elapsed());
    // Other seeds may become the same, so these processes try until the end.
    let errors = both(Duration::from_millis(600), &|options| {
        let seeds = options.seeds.iter().rev().cloned().collect();
        ElasticOptions { seeds, ..options }
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, Error::TooFew { .. }) && text.contains("the seeds are not the same"), "{text}");
    }
}

#[test]
fn a_process_with_other_options_does_not_disturb_a_job() {
    let listeners = [listener(), listener()];
    let seeds = [0, 1].map(|place: usize| address(&listeners[place]));
    let soon = |options: ElasticOptions| options.members(1..=3).join_window(Duration::from_millis(50));
    let jobs = start(&listeners, soon);
    let first = agree(&[&jobs[0], &jobs[1]], 0);
    let error = ElasticJob::join(options(1, &seeds).members(1..=4).listener(listener())).unwrap_err();
    assert!(error.to_string().contains("members is 1..=3 there, members is 1..=4 here"), "{error}");
    assert_eq!((jobs[0].generation(), jobs[1].generation()), (first.clone(), first));
    // The place of one that was lost may have another address, so that the seeds are others.
    let again = listener();
    let joined = ElasticJob::join(soon(options(1, &[address(&again), seeds[1].clone()])).listener(again)).unwrap();
    assert_eq!((joined.rank(), agree(&[&jobs[0], &jobs[1], &joined], 1).members.len()), (2, 3));
}

#[test]
fn a_process_that_meets_a_wrong_one_first_joins_the_job() {
    let listeners = [listener(), listener()];
    // There is room for more than one, so that the job waits for others while the process may give up.
    let slow = |options: ElasticOptions| options.members(1..=4).join_window(Duration::from_millis(600));
    let jobs = start(&listeners, slow);
    let (wrong, right) = (listener(), listener());
    // The wrong one reaches no member, and answers the right one at once.
    let alone = options(1, &[address(&wrong), address(&right)]).members(1..=5).join_timeout(SOON);
    let seeds = [address(&wrong), address(&listeners[1])];
    let wrong = thread::spawn(move || ElasticJob::join(alone.listener(wrong)).unwrap_err().to_string());
    let joined = ElasticJob::join(slow(options(1, &seeds)).listener(right)).unwrap();
    assert_eq!(agree(&[&jobs[0], &jobs[1], &joined], 1).members.len(), 3);
    let told = wrong.join().unwrap();
    assert!(told.contains("of the same job, has others"), "{told}");
}

#[test]
fn threads_share_a_job() {
    fn is_shared<T: Send + Sync + 'static>() {}
    is_shared::<ElasticJob>();
}

#[test]
fn only_a_process_in_the_place_of_a_lost_one_does_not_found_the_job() {
    let mut membership = Membership::new(0, 2, "127.0.0.1:2222").unwrap();
    membership.addresses = vec![Some("127.0.0.1:2222".to_owned()), Some("127.0.0.1:2223".to_owned())];
    let founds = |name: &str, count: &str| {
        let variable = |asked: &str| (asked == name).then(|| count.to_owned());
        ElasticOptions::from_vars(&membership, 1..=2, None, variable).unwrap().founding
    };
    // A job that was started again as a whole has an identity of its own.
    assert!(founds("DISTRIBUTE_RESTART_COUNT", "1") && founds("DISTRIBUTE_TASK_RESTARTS", "0"));
    assert!(!founds("DISTRIBUTE_TASK_RESTARTS", "1") && !founds("DISTRIBUTE_TASK_RESTARTS", " 12 "));
    // A register decides the first generation once, also among processes that have all been started again before it.
    let folder = tempfile::tempdir().unwrap();
    let register = format!("file:{}", folder.path().display());
    let variable = |asked: &str| match asked {
        "DISTRIBUTE_GENERATIONS" => Some(register.clone()),
        "DISTRIBUTE_JOB_ID" => Some("j".to_owned()),
        "DISTRIBUTE_TASK_RESTARTS" => Some("1".to_owned()),
        _ => None,
    };
    assert!(ElasticOptions::from_vars(&membership, 1..=2, None, variable).unwrap().founding);
    for given in ["abc", "-1", "1.5"] {
        let variable = |asked: &str| (asked == "DISTRIBUTE_TASK_RESTARTS").then(|| given.to_owned());
        let error = ElasticOptions::from_vars(&membership, 1..=2, None, variable).unwrap_err().to_string();
        assert!(error.contains("DISTRIBUTE_TASK_RESTARTS: it is not a number") && error.contains(given), "{error}");
    }
}

#[test]
fn the_environment_limits_how_long_a_process_waits_for_others() {
    let mut membership = Membership::new(0, 2, "127.0.0.1:2222").unwrap();
    membership.addresses = vec![Some("127.0.0.1:2222".to_owned()), Some("127.0.0.1:2223".to_owned())];
    let timeout = |given: Option<&str>| {
        let variable = |asked: &str| given.filter(|_| asked == "DISTRIBUTE_TIMEOUT").map(str::to_owned);
        ElasticOptions::from_vars(&membership, 1..=2, None, variable).map(|options| options.join_timeout)
    };
    assert_eq!(timeout(Some("2.5")).unwrap(), Duration::from_millis(2500));
    assert_eq!((timeout(None).unwrap(), timeout(Some(" ")).unwrap()), (Duration::from_secs(300), SOON * 30));
    let text = timeout(Some("soon")).unwrap_err().to_string();
    assert!(text.contains("DISTRIBUTE_TIMEOUT: it is not a number of seconds above 0"), "{text}");
}

#[test]
fn a_register_of_the_environment_is_that_of_a_named_job() {
    let folder = tempfile::tempdir().unwrap();
    let register = format!("file:{}", folder.path().display());
    let derived = Membership::new(0, 4, "127.0.0.1:29501").unwrap();
    let options = |membership: &Membership, name: Option<&str>| {
        ElasticOptions::from_vars(membership, 1..=4, None, |variable| match variable {
            "DISTRIBUTE_GENERATIONS" => Some(register.clone()),
            "DISTRIBUTE_JOB_ID" => name.map(str::to_owned),
            _ => None,
        })
    };
    // Two jobs of one size and port, or two starts of one, would share it.
    let error = options(&derived, None).unwrap_err();
    assert_eq!((error.class().kind, error.is_retryable()), (FailureKind::Configuration, false), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("DISTRIBUTE_GENERATIONS: ") && text.contains("Set DISTRIBUTE_JOB_ID to"), "{text}");
    assert_eq!(options(&derived, Some("a-1")).unwrap().job_id, JobId::new("a-1").unwrap());
    let named = derived.clone().with_job_id(JobId::new("b-1").unwrap());
    assert_eq!(options(&named, Some("a-1")).unwrap().job_id, JobId::new("b-1").unwrap());
    // torchrun's identity is that of each of its starts.
    let by_torchrun = derived.clone().with_job_id(JobId::of_scheduler("TORCHELASTIC_RUN_ID", "a".to_owned()).unwrap());
    let text = options(&by_torchrun, None).unwrap_err().to_string();
    assert!(text.contains("TORCHELASTIC_RUN_ID") && text.contains("Set DISTRIBUTE_JOB_ID to a name"), "{text}");
    // A majority needs no more than the addresses.
    let known = Membership { addresses: (1..=4).map(|port| Some(format!("127.0.0.1:{port}"))).collect(), ..derived };
    assert!(ElasticOptions::from_vars(&known, 1..=4, None, |_| None).unwrap().job_id.is_derived());
}

#[test]
fn a_process_of_no_known_address_is_reached_at_the_chosen_interface() {
    let folder = tempfile::tempdir().unwrap();
    let register = format!("file:{}", folder.path().display());
    let host = |membership: &Membership, interface: Option<&str>| {
        let variable = |variable: &str| match variable {
            "DISTRIBUTE_GENERATIONS" => Some(register.clone()),
            "DISTRIBUTE_INTERFACE" => interface.map(str::to_owned),
            _ => None,
        };
        ElasticOptions::from_vars(membership, 1..=2, None, variable).map(|options| options.host)
    };
    let mut membership = Membership::new(0, 2, "10.0.0.1:29501").unwrap().with_job_id(JobId::new("j").unwrap());
    assert_eq!(host(&membership, None).unwrap().as_deref(), Some("10.0.0.1"));
    assert_eq!(host(&membership, Some("127.0.0.1")).unwrap().as_deref(), Some("127.0.0.1"));
    assert!(host(&membership, Some("no-such-interface")).is_err());
    // The addresses at which processes find each other are those that all know.
    membership.addresses = vec![Some("10.0.0.1:1".to_owned()), Some("10.0.0.2:1".to_owned())];
    membership.advertised_host = Some("10.0.0.1".to_owned());
    assert_eq!(host(&membership, Some("127.0.0.1")).unwrap().as_deref(), Some("10.0.0.1"));
}

#[test]
fn options_that_cannot_be_are_sentences() {
    let seeds = ["a:1".to_owned(), "b:1".to_owned()];
    let majority = |options: ElasticOptions| ElasticJob::join(options).unwrap_err().to_string();
    for (options, words) in [
        (options(1, &seeds).members(0..=3), "Given: 0..=3. Expected: from 1 to 4096"),
        (options(1, &seeds).members(1..=5000), "Given: 1..=5000"),
        (options(1, &["a:1".to_owned(), "a:1".to_owned()]), "seed 1: it is there twice"),
        (options(1, &["nowhere".to_owned()]), "seed 0: the address \"nowhere\" is not of the form host:port"),
        (options(1, &[]), "processes cannot find each other"),
        (options(1, &seeds).answer_window(Duration::ZERO), "an answer_window of at least 10 ms"),
    ] {
        let text = majority(options);
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn processes_without_the_jobs_secret_do_not_join() {
    let secret = |text: &str| JobSecret::new(text).unwrap();
    let listeners = [listener(), listener()];
    let jobs = start(&listeners, |options| options.secret(secret("the secret of this job")));
    let first = agree(&[&jobs[0], &jobs[1]], 0);
    let seeds = [address(&listeners[0])];
    for (own, told) in [(None, "secret"), (Some(secret("the secret of another")), "secret")] {
        let short = options(1, &seeds).listener(listener()).join_timeout(Duration::from_millis(600)).secret(own);
        let refused = ElasticJob::join(short).unwrap_err();
        assert!(refused.to_string().contains(told), "{refused}");
    }
    assert_eq!(jobs[0].generation(), first);
}

#[test]
fn a_process_that_comes_when_the_job_has_ended_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let register = Arc::new(FileRegister::new(folder.path(), &JobId::new("elastic").unwrap()).unwrap());
    let by_register = |options: ElasticOptions| options.authority(Authority::Register(register.clone()));
    let listeners = [listener(), listener()];
    let jobs = start(&listeners, by_register);
    // One waits for the next generation, and one comes later.
    let waiting = thread::spawn({
        let seeds = [address(&listeners[0])];
        let late = by_register(options(1, &seeds).members(1..=2)).listener(listener());
        move || ElasticJob::join(late).unwrap_err()
    });
    jobs[0].end().unwrap();
    jobs[1].end().unwrap();
    drop(jobs);
    let began = Instant::now();
    let seeds = [address(&listeners[0])];
    let late = ElasticJob::join(by_register(options(1, &seeds)).listener(listener())).unwrap_err();
    for error in [waiting.join().unwrap(), late] {
        assert!(matches!(error, Error::JobEnded { .. }), "{error}");
        assert_eq!((error.exit_code(), error.is_retryable()), (0, false));
    }
    assert!(began.elapsed() < SOON / 2);
}

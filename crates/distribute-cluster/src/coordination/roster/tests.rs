use proptest::prelude::*;

use super::*;
use crate::TaskType;

const INTERVAL: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(10);

fn roster(size: u32) -> Roster {
    Roster::new(Membership::new(0, size, "h:1").unwrap(), INTERVAL, TIMEOUT)
}

fn join(rank: u32, size: u32, process: u64) -> wire::Join {
    let job = JobId::of_ranks(size, "h:1");
    let tasks: Vec<Task> = (0..size).map(|index| Task::new(TaskType::Worker, index)).collect();
    wire::Join {
        version: VERSION,
        rank,
        process,
        job: Some(named(&job)),
        world_size: size,
        tasks_digest: Vec::from(digest(&tasks)).into(),
        tasks: tasks.iter().map(Task::to_string).collect(),
        heartbeat_interval_us: micros(INTERVAL),
        heartbeat_timeout_us: micros(TIMEOUT),
    }
}

fn named(job: &JobId) -> wire::Job {
    wire::Job {
        id: Vec::from(job.to_bytes()).into(),
        name: job.to_string(),
        derived: job.is_derived(),
        ..wire::Job::default()
    }
}

fn given(name: &str) -> wire::Job {
    named(&JobId::new(name).unwrap())
}

/// Returns a roster in which all have joined, and the numbers of their streams.
fn complete(size: u32, now: Instant) -> (Roster, Vec<u64>) {
    let mut roster = roster(size);
    let visits = (0..size).map(|rank| arrived(&mut roster, &join(rank, size, 1), &format!("10.0.0.{rank}:5"), now));
    let visits = visits.collect();
    (roster, visits)
}

/// Has a member join and say that it is here; returns the number of its stream.
fn arrived(roster: &mut Roster, join: &wire::Join, address: &str, now: Instant) -> u64 {
    match roster.admit(join, address.to_owned(), now) {
        Answer::Seated { visit, .. } => {
            roster.arrive(join.rank, visit);
            visit
        }
        refused => panic!("{refused:?}"),
    }
}

fn report(message: &str) -> wire::Report {
    wire::Report { message: message.to_owned(), kind: FailureKind::Configuration.code() }
}

fn refusal(answer: Answer) -> (String, bool) {
    match answer {
        Answer::Refused { reason, passing, .. } => (reason, passing),
        seated => panic!("{seated:?}"),
    }
}

#[test]
fn descriptions_must_agree() {
    let now = Instant::now();
    let mut roster = roster(3);
    let other = [Task::new(TaskType::Chief, 0), Task::new(TaskType::Worker, 0), Task::new(TaskType::Worker, 1)];
    let renamed = wire::Join {
        tasks: other.iter().map(Task::to_string).collect(),
        tasks_digest: Vec::from(digest(&other)).into(),
        ..join(1, 3, 1)
    };
    let unnamed = wire::Join { tasks: Vec::new(), ..renamed.clone() };
    for (join, words) in [
        (wire::Join { version: 9, job: None, ..join(1, 3, 1) }, "version 9 of the protocol"),
        (join(1, 2, 1), "told that the job has 2 tasks, but worker:0 was told 3"),
        (join(3, 3, 1), "rank 3 is outside a job of 3"),
        (
            wire::Join { heartbeat_timeout_us: 500_000, heartbeat_interval_us: 50_000, ..join(1, 3, 1) },
            "a heartbeat every 0.05 s and waits for 0.5 s, but worker:0 does so every 1 s and waits for 10 s; set",
        ),
        (
            wire::Join { heartbeat_interval_us: 0, ..join(1, 3, 1) },
            "set heartbeat_interval and heartbeat_timeout alike",
        ),
        (unnamed, "it knows other tasks of the job than worker:0 does"),
        (renamed, "calls rank 0 chief:0, but worker:0 calls it worker:0"),
    ] {
        let (reason, passing) = refusal(roster.admit(&join, "a:1".to_owned(), now));
        assert!(reason.contains(words) && !passing, "{reason}");
    }
    assert_eq!(roster.state().missing, [0, 1, 2]);
}

#[test]
fn other_jobs_are_refused_with_both_names() {
    let now = Instant::now();
    let ours = Membership::new(0, 2, "h:1").unwrap().with_job_id(JobId::new("ours").unwrap());
    let mut roster = Roster::new(ours, INTERVAL, TIMEOUT);
    let of = |job| wire::Join { job, ..join(1, 2, 1) };
    let forged = wire::Job { name: "ours\nERROR \u{1b}[2J".to_owned(), ..given("theirs") };
    let short = wire::Job { id: Vec::new().into(), ..given("ours") };
    for (job, words) in [
        (Some(given("theirs")), "it belongs to job theirs, but worker:0 leads job ours"),
        (Some(forged), "it belongs to job ours\\nERROR \\u{1b}[2J, but worker:0 leads job ours"),
        (Some(short), "it belongs to job ours, but worker:0 leads job ours"),
        (None, "it belongs to job (none), but worker:0 leads job ours"),
        (Some(named(&JobId::of_ranks(2, "h:1"))), "it belongs to job derived-"),
    ] {
        let (reason, passing) = refusal(roster.admit(&of(job), "a:1".to_owned(), now));
        assert!(reason.contains(words) && !passing, "{reason}");
    }
    // A difference of jobs is reported before a difference of sizes.
    let (reason, _) =
        refusal(roster.admit(&wire::Join { job: Some(given("b")), ..join(1, 9, 1) }, "a:1".to_owned(), now));
    assert!(reason.contains("it belongs to job b"), "{reason}");
    assert_eq!(roster.state().missing, [0, 1]);
    assert!(matches!(roster.admit(&of(Some(given("ours"))), "a:1".to_owned(), now), Answer::Seated { .. }));
    // A member of the next job that reaches the ending one is told to retry.
    roster.close();
    assert!(refusal(roster.admit(&of(Some(given("next"))), "a:1".to_owned(), now)).1);
}

#[test]
fn other_addresses_are_refused_as_such() {
    let now = Instant::now();
    let mut roster = roster(2);
    let other = wire::Join { job: Some(named(&JobId::of_ranks(2, "h:2"))), ..join(1, 2, 1) };
    let (reason, passing) = refusal(roster.admit(&other, "a:1".to_owned(), now));
    assert!(reason.contains("it was told of another cluster (derived-") && !passing, "{reason}");
}

#[test]
fn one_rank_is_one_process() {
    let now = Instant::now();
    let mut roster = roster(3);
    assert_eq!(arrived(&mut roster, &join(1, 3, 7), "10.0.0.1:5", now), 1);
    let (reason, passing) = refusal(roster.admit(&join(1, 3, 8), "10.0.0.2:6".to_owned(), now));
    assert!(reason.contains("worker:1: one at 10.0.0.1:5, one at 10.0.0.2:6") && !passing, "{reason}");
    // The same process reconnects before the end of its first stream was detected.
    assert_eq!(roster.admit(&join(1, 3, 7), "10.0.0.1:6".to_owned(), now), Answer::Seated { visit: 2, tell: true });
    assert!(!roster.broke(1, 1, now) && !roster.arrive(1, 1));
    assert_eq!(roster.state().missing, [0, 1, 2]);
    roster.arrive(1, 2);
    assert_eq!(roster.state().missing, [0, 2]);
}

#[test]
fn a_process_in_the_place_of_a_silent_one_may_try_again() {
    let now = Instant::now();
    let (mut roster, visits) = complete(2, now);
    let passing = |roster: &mut Roster, after: Duration| {
        let (reason, passing) = refusal(roster.admit(&join(1, 2, 9), "10.0.0.9:6".to_owned(), now + after));
        assert!(reason.contains("two processes say that they are worker:1"), "{reason}");
        passing
    };
    assert!(!passing(&mut roster, INTERVAL * 2));
    roster.heard(1, visits[1], now + INTERVAL * 2);
    assert!(!passing(&mut roster, INTERVAL * 4));
    assert!(passing(&mut roster, INTERVAL * 4 + INTERVAL / 2));
    // The loss is noticed later, and ends the job that the process does not belong to.
    assert!((5..15).any(|step| roster.look(now + INTERVAL * step)));
    let later = roster.admit(&join(1, 2, 9), "10.0.0.9:6".to_owned(), now + INTERVAL * 15);
    assert!(refusal(later).1);
}

#[test]
fn a_connection_that_its_member_has_given_up_does_not_count() {
    let now = Instant::now();
    let mut roster = roster(2);
    arrived(&mut roster, &join(0, 2, 1), "10.0.0.0:5", now);
    // Its end is noticed later than what it has sent, and meanwhile another process takes its place.
    let given_up = roster.admit(&join(1, 2, 7), "10.0.0.1:5".to_owned(), now);
    assert_eq!(given_up, Answer::Seated { visit: 2, tell: false });
    assert_eq!(roster.state().missing, [1]);
    assert_eq!(roster.admit(&join(1, 2, 8), "10.0.0.1:6".to_owned(), now), Answer::Seated { visit: 3, tell: true });
    assert!(!roster.broke(1, 2, now) && roster.failure().is_none());
    assert!(roster.arrive(1, 3));
    assert!(roster.state().missing.is_empty() && roster.failure().is_none());
}

#[test]
fn who_goes_before_all_have_joined_may_come_back() {
    let now = Instant::now();
    let mut roster = roster(2);
    for (gone, incarnation) in [(0, 1), (1, 2), (2, 3)] {
        let visit = arrived(&mut roster, &join(1, 2, incarnation), "a:1", now);
        let changed = match gone {
            0 => roster.broke(1, visit, now),
            1 => roster.leave(1, visit),
            _ => (1..=3).any(|step| roster.look(now + TIMEOUT / 2 * step)),
        };
        assert!(changed, "{gone}");
        assert_eq!(
            roster.state(),
            wire::State { missing: vec![0, 1], missing_count: 2, failure: None, closing: false }
        );
    }
}

#[test]
fn the_first_failure_counts() {
    let now = Instant::now();
    let (mut roster, visits) = complete(3, now);
    assert!(roster.state().missing.is_empty());
    assert!(roster.report(2, visits[2], &report("disk full\n")));
    assert!(!roster.broke(2, visits[2], now) && !roster.report(1, visits[1], &report("later")));
    assert_eq!(
        roster.failure(),
        Some(&wire::Failure { rank: 2, cause: Some(Cause::Reported("disk full\\n".to_owned())), kind: 2 })
    );
    let (reason, passing) = refusal(roster.admit(&join(1, 3, 9), "a:1".to_owned(), now));
    assert!(passing, "{reason}");
}

#[test]
fn a_silent_member_is_lost_and_one_that_left_is_not() {
    let now = Instant::now();
    let (mut roster, visits) = complete(3, now);
    assert!(roster.leave(1, visits[1]) && roster.has_left(1) && roster.is_over(1, visits[1]));
    let second = Duration::from_secs(1);
    let mut lost = None;
    for step in 1..20 {
        roster.heard(0, visits[0], now + second * step);
        if roster.look(now + second * step) {
            lost = lost.or(Some(step));
        }
    }
    assert_eq!(lost, Some(11));
    let failure = roster.failure().unwrap();
    assert!(
        failure.rank == 2 && matches!(&failure.cause, Some(Cause::Lost(lost)) if lost.last_heard_ms == 11_000),
        "{failure:?}"
    );
}

#[test]
fn large_jobs_are_told_in_few_words() {
    let now = Instant::now();
    let mut roster = roster(50_000);
    let state = roster.state();
    assert_eq!((state.missing.len(), state.missing_count), (MAX_TOLD, 50_000));
    for rank in (0..50_000).filter(|rank| *rank != 40_000) {
        let large = wire::Join { tasks: Vec::new(), ..join(0, 1, 1) };
        let digest = Vec::from(roster.tasks_digest).into();
        let job = Some(named(&JobId::of_ranks(50_000, "h:1")));
        let large = wire::Join { rank, world_size: 50_000, tasks_digest: digest, job, ..large };
        arrived(&mut roster, &large, "", now);
    }
    assert_eq!((roster.state().missing, roster.state().missing_count), (vec![40_000], 1));
    // A quadratic implementation would take minutes.
    assert!(now.elapsed() < Duration::from_secs(10), "{:?}", now.elapsed());
}

proptest! {
    /// For any order of events, `missing` is accurate until the roster is complete, and the failure never changes.
    #[test]
    fn any_history_is_consistent(events in prop::collection::vec((0u8..8, 0u32..4, 0u64..3, 0u64..12), 0..60)) {
        let start = Instant::now();
        let mut roster = roster(3);
        let (mut first, mut was_complete) = (None, false);
        for (step, (event, rank, incarnation, visit)) in (1u64..).zip(events) {
            let now = start + Duration::from_secs(step);
            match event {
                0 | 1 => drop(roster.admit(&join(rank, 3, incarnation), "a:1".to_owned(), now)),
                2 => drop(roster.leave(rank, visit)),
                3 => drop(roster.broke(rank, visit, now)),
                4 => drop(roster.report(rank, visit, &report("no"))),
                5 | 6 => drop(roster.arrive(rank, visit)),
                _ => drop(roster.look(now)),
            }
            let state = roster.state();
            prop_assert!(!was_complete || state.missing.is_empty());
            was_complete |= state.missing.is_empty();
            prop_assert!(was_complete || state.failure.is_none());
            prop_assert!(first.is_none() || first == state.failure);
            first = state.failure;
        }
    }
}

use proptest::prelude::*;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(10);

fn roster(size: u32) -> Roster {
    Roster::new(Membership::new(0, size, "h:1").unwrap(), TIMEOUT)
}

fn join(rank: u32, size: u32, incarnation: u64) -> wire::Join {
    wire::Join {
        version: VERSION,
        rank,
        incarnation,
        tasks: (0..size).map(|index| format!("worker:{index}")).collect(),
    }
}

/// A roster in which all have joined, and the numbers of their streams.
fn complete(size: u32, now: Instant) -> (Roster, Vec<u64>) {
    let mut roster = roster(size);
    let visits = (0..size).map(|rank| match roster.admit(&join(rank, size, 1), format!("10.0.0.{rank}:5"), now) {
        Answer::Seated { visit } => visit,
        refused => panic!("{refused:?}"),
    });
    let visits = visits.collect();
    (roster, visits)
}

fn refusal(answer: Answer) -> (String, bool) {
    match answer {
        Answer::Refused { reason, passing } => (reason, passing),
        seated => panic!("{seated:?}"),
    }
}

#[test]
fn descriptions_must_agree() {
    let now = Instant::now();
    let mut roster = roster(3);
    let renamed =
        wire::Join { tasks: vec!["chief:0".to_owned(), "worker:0".to_owned(), "worker:1".to_owned()], ..join(1, 3, 1) };
    for (join, words) in [
        (wire::Join { version: 9, ..join(1, 3, 1) }, "version 9 of the protocol"),
        (join(1, 2, 1), "told that the job has 2 tasks, but worker:0 was told 3"),
        (join(3, 3, 1), "rank 3 is outside a job of 3"),
        (renamed, "calls rank 0 chief:0, but worker:0 calls it worker:0"),
    ] {
        let (reason, passing) = refusal(roster.admit(&join, "a:1".to_owned(), now));
        assert!(reason.contains(words) && !passing, "{reason}");
    }
    assert_eq!(roster.state().missing, [0, 1, 2]);
}

#[test]
fn one_rank_is_one_process() {
    let now = Instant::now();
    let mut roster = roster(3);
    assert_eq!(roster.admit(&join(1, 3, 7), "10.0.0.1:5".to_owned(), now), Answer::Seated { visit: 1 });
    let (reason, passing) = refusal(roster.admit(&join(1, 3, 8), "10.0.0.2:6".to_owned(), now));
    assert!(reason.contains("worker:1: one at 10.0.0.1:5, one at 10.0.0.2:6") && !passing, "{reason}");
    // The same process connects again before its first stream was seen to end.
    assert_eq!(roster.admit(&join(1, 3, 7), "10.0.0.1:6".to_owned(), now), Answer::Seated { visit: 2 });
    assert!(!roster.broke(1, 1, now));
    assert_eq!(roster.state().missing, [0, 2]);
}

#[test]
fn who_goes_before_all_have_joined_may_come_back() {
    let now = Instant::now();
    let mut roster = roster(2);
    for (gone, incarnation) in [(0, 1), (1, 2), (2, 3)] {
        let Answer::Seated { visit } = roster.admit(&join(1, 2, incarnation), "a:1".to_owned(), now) else { panic!() };
        let changed = match gone {
            0 => roster.broke(1, visit, now),
            1 => roster.leave(1, visit),
            _ => (1..=3).any(|step| roster.look(now + TIMEOUT / 2 * step)),
        };
        assert!(changed, "{gone}");
        assert_eq!(roster.state(), wire::State { missing: vec![0, 1], failure: None, closing: false });
    }
}

#[test]
fn the_first_failure_counts() {
    let now = Instant::now();
    let (mut roster, visits) = complete(3, now);
    assert!(roster.state().missing.is_empty());
    assert!(roster.report(2, visits[2], "disk full".to_owned()));
    assert!(!roster.broke(2, visits[2], now) && !roster.report(1, visits[1], "later".to_owned()));
    assert_eq!(
        roster.failure(),
        Some(&wire::Failure { rank: 2, cause: Some(Cause::Reported("disk full".to_owned())) })
    );
    let (reason, passing) = refusal(roster.admit(&join(1, 3, 9), "a:1".to_owned(), now));
    assert!(passing, "{reason}");
}

#[test]
fn a_silent_member_is_lost_and_one_that_left_is_not() {
    let now = Instant::now();
    let (mut roster, visits) = complete(3, now);
    assert!(roster.leave(1, visits[1]) && roster.has_left(1) && !roster.knows(1, 1) && roster.is_over(1, visits[1]));
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

proptest! {
    /// Whatever happens in whatever order: `missing` is what it says until complete, and the failure never changes.
    #[test]
    fn any_history_is_consistent(events in prop::collection::vec((0u8..6, 0u32..4, 0u64..3, 0u64..12), 0..60)) {
        let start = Instant::now();
        let mut roster = roster(3);
        let (mut first, mut was_complete) = (None, false);
        for (step, (event, rank, incarnation, visit)) in (1u64..).zip(events) {
            let now = start + Duration::from_secs(step);
            match event {
                0 | 1 => drop(roster.admit(&join(rank, 3, incarnation), "a:1".to_owned(), now)),
                2 => drop(roster.leave(rank, visit)),
                3 => drop(roster.broke(rank, visit, now)),
                4 => drop(roster.report(rank, visit, "no".to_owned())),
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

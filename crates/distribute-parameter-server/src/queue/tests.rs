use super::*;

fn queue(updates: Updates) -> ClosureQueue<char> {
    ClosureQueue::new(100, updates, 2, 0)
}

fn failed(message: &str) -> Error {
    Error::UserFunction { function: "f".to_owned(), worker: 0, message: message.to_owned() }
}

fn put(queue: &mut ClosureQueue<char>, closures: &str) {
    for closure in closures.chars() {
        queue.put(closure);
    }
}

fn begin(queue: &mut ClosureQueue<char>) -> Option<char> {
    queue.begin().map(|begin| begin.entry.closure)
}

#[test]
fn first_in_first_out() {
    let mut queue = queue(Updates::Asynchronous);
    assert!(queue.is_idle() && queue.begin().is_none());
    put(&mut queue, "abc");
    assert_eq!((begin(&mut queue), begin(&mut queue)), (Some('a'), Some('b')));
    assert_eq!(queue.counts(), (1, 2));
    queue.done(0, true);
    queue.done(1, true);
    assert_eq!(begin(&mut queue), Some('c'));
    assert!(!queue.is_idle());
    queue.done(2, true);
    assert!(queue.is_idle());
}

#[test]
fn a_full_queue_has_no_room() {
    let mut queue = ClosureQueue::new(2, Updates::Asynchronous, 1, 0);
    queue.put('a');
    assert!(queue.has_room());
    queue.put('b');
    assert!(!queue.has_room());
    // Running closures do not count.
    queue.begin().unwrap();
    assert!(queue.has_room());
}

#[test]
fn what_is_put_back_runs_again_first() {
    let mut queue = queue(Updates::Asynchronous);
    put(&mut queue, "ab");
    let first = queue.begin().unwrap();
    assert_eq!(first.entry.attempts, 1);
    assert!(queue.put_back(first.entry).is_none());
    let again = queue.begin().unwrap().entry;
    assert_eq!((again.closure, again.number, again.attempts), ('a', 0, 2));
    assert_eq!(begin(&mut queue), Some('b'));
    // Nothing is lost or counted twice.
    queue.done(0, true);
    queue.done(1, true);
    assert!(queue.is_idle());
}

#[test]
fn servers_learn_what_may_run_again() {
    let mut queue = queue(Updates::Asynchronous);
    put(&mut queue, "abcd");
    let first = queue.begin().unwrap();
    assert_eq!((first.horizon, first.live.as_slice()), (1, &[0][..]));
    let second = queue.begin().unwrap();
    assert_eq!((second.horizon, second.live.as_slice()), (2, &[0, 1][..]));
    let third = queue.begin().unwrap();
    // An attempt that failed because of a server does not count.
    assert!(queue.put_back(Entry { attempts: 0, spared: 1, ..first.entry }).is_none());
    assert!(queue.put_back(third.entry).is_none());
    queue.done(1, true);
    let again = queue.begin().unwrap();
    // 0 waits to run again; 1 has ended.
    assert_eq!((again.entry.number, again.horizon, again.live), (2, 3, vec![2, 0]));
}

#[test]
fn an_error_cancels_what_waits_and_is_told_once_when_all_is_still() {
    let mut queue = queue(Updates::Asynchronous);
    put(&mut queue, "abcd");
    queue.begin().unwrap();
    queue.begin().unwrap();
    assert_eq!(queue.fail(Some(0), failed("first")), ['c', 'd']);
    assert!(queue.has_failed() && queue.begin().is_none());
    // One is still running.
    assert!(queue.take_error().is_none());
    queue.done(1, true);
    assert!(queue.take_error().unwrap().to_string().contains("first"));
    // The queue can be used again.
    assert!(queue.take_error().is_none() && queue.is_idle());
    queue.put('e');
    assert_eq!(begin(&mut queue), Some('e'));
}

#[test]
fn the_first_of_many_errors_counts() {
    let mut queue = queue(Updates::Asynchronous);
    put(&mut queue, "ab");
    queue.begin().unwrap();
    queue.begin().unwrap();
    queue.fail(Some(1), failed("one"));
    queue.fail(Some(0), failed("another"));
    assert!(queue.take_error().unwrap().to_string().ends_with("one"));
    assert!(queue.take_error().is_none());
}

#[test]
fn what_comes_back_while_all_is_cancelled_is_cancelled_too() {
    let mut queue = queue(Updates::Asynchronous);
    put(&mut queue, "ab");
    let first = queue.begin().unwrap();
    queue.begin().unwrap();
    queue.fail(Some(1), failed("x"));
    assert_eq!(queue.put_back(first.entry), Some('a'));
    assert!(queue.take_error().is_some() && queue.is_idle());
}

#[test]
fn an_error_besides_closures_cancels_too() {
    let mut queue = queue(Updates::Asynchronous);
    queue.put('a');
    assert_eq!(queue.fail(None, failed("a server")), ['a']);
    assert!(queue.take_error().is_some());
}

#[test]
fn without_staleness_rounds_do_not_overlap() {
    let mut queue = queue(Updates::BoundedStaleness { rounds: 0 });
    put(&mut queue, "abcdef");
    assert_eq!((begin(&mut queue), begin(&mut queue), begin(&mut queue)), (Some('a'), Some('b'), None));
    queue.done(0, true);
    assert_eq!(begin(&mut queue), None);
    queue.done(1, true);
    assert_eq!((begin(&mut queue), begin(&mut queue), begin(&mut queue)), (Some('c'), Some('d'), None));
}

#[test]
fn with_staleness_the_fast_run_ahead_so_far() {
    let mut queue = queue(Updates::BoundedStaleness { rounds: 2 });
    put(&mut queue, "abcdefgh");
    // Closure 0 hangs in round 0: rounds 1 and 2 may run, round 3 may not.
    for number in 0..6 {
        assert!(queue.begin().is_some(), "{number}");
        if number > 0 {
            queue.done(number, true);
        }
    }
    assert!(queue.begin().is_none());
    queue.done(0, true);
    assert!(queue.begin().is_some());
}

#[test]
fn a_synchronous_round_ends_with_its_contributions() {
    let mut queue = queue(Updates::Synchronous { contributions: 2, backups: 1 });
    put(&mut queue, "abcdefg");
    let rounds: Vec<u64> = (0..3).map(|_| queue.begin().unwrap().round).collect();
    assert_eq!(rounds, [0, 0, 0]);
    assert!(queue.begin().is_none());
    queue.done(0, true);
    assert!(queue.begin().is_none());
    queue.done(2, true);
    // The slowest still runs, in a round that has ended.
    assert_eq!(queue.begin().unwrap().round, 1);
    queue.done(1, true);
    assert_eq!(queue.begin().unwrap().round, 1);
}

#[test]
fn a_lost_contribution_is_begun_again_in_its_round() {
    let mut queue = queue(Updates::Synchronous { contributions: 2, backups: 0 });
    put(&mut queue, "ab");
    let first = queue.begin().unwrap();
    queue.begin().unwrap();
    assert!(queue.put_back(first.entry).is_none());
    assert_eq!(queue.begin().unwrap().round, 0);
    queue.done(0, true);
    queue.done(1, true);
    queue.put('c');
    assert_eq!(queue.begin().unwrap().round, 1);
}

#[test]
fn with_staleness_what_runs_again_keeps_its_round() {
    let mut queue = queue(Updates::BoundedStaleness { rounds: 1 });
    put(&mut queue, "abcdef");
    let first = queue.begin().unwrap();
    for number in 1..4 {
        queue.begin().unwrap();
        queue.done(number, true);
    }
    assert!(queue.put_back(first.entry).is_none());
    // Round 2 waits for it.
    assert_eq!((begin(&mut queue), begin(&mut queue)), (Some('a'), None));
    queue.done(0, true);
    assert_eq!(begin(&mut queue), Some('e'));
}

#[test]
fn what_runs_again_keeps_its_place_in_its_round() {
    let mut queue = queue(Updates::Synchronous { contributions: 2, backups: 0 });
    put(&mut queue, "abcd");
    let first = queue.begin().unwrap();
    queue.begin().unwrap();
    assert!(queue.put_back(first.entry).is_none());
    queue.done(1, true);
    // Servers may have its gradients, and with those of another closure they would complete the round.
    assert_eq!((begin(&mut queue), begin(&mut queue)), (Some('a'), None));
    queue.done(0, true);
    assert_eq!((queue.begin().unwrap().round, queue.begin().unwrap().round), (1, 1));
}

#[test]
fn what_runs_again_after_its_round_takes_no_place_in_a_later_one() {
    let mut queue = queue(Updates::Synchronous { contributions: 2, backups: 1 });
    put(&mut queue, "abcdef");
    let first = queue.begin().unwrap();
    queue.begin().unwrap();
    queue.begin().unwrap();
    queue.done(1, true);
    queue.done(2, true);
    // The round has ended without it, or with what it had pushed.
    assert!(queue.put_back(first.entry).is_none());
    let rounds: Vec<(char, u64)> =
        std::iter::from_fn(|| queue.begin()).map(|begin| (begin.entry.closure, begin.round)).collect();
    assert_eq!(rounds, [('a', 0), ('d', 1), ('e', 1), ('f', 1)]);
    queue.done(0, true);
    queue.done(3, true);
    queue.put('g');
    // Round 1 has one contribution so far.
    assert!(queue.begin().is_none());
    queue.done(4, true);
    assert_eq!(queue.begin().unwrap().round, 2);
}

#[test]
fn a_closure_that_pushes_nothing_leaves_its_place_in_a_round() {
    let mut queue = queue(Updates::Synchronous { contributions: 2, backups: 0 });
    put(&mut queue, "abcde");
    queue.begin().unwrap();
    queue.begin().unwrap();
    queue.done(0, true);
    queue.done(1, false);
    assert_eq!((queue.begin().unwrap().round, begin(&mut queue)), (0, None));
    queue.done(2, true);
    assert_eq!((queue.begin().unwrap().round, queue.begin().unwrap().round), (1, 1));
}

#[test]
fn after_a_restored_checkpoint_a_begun_round_is_given_up() {
    let mut queue = queue(Updates::Synchronous { contributions: 2, backups: 0 });
    put(&mut queue, "abc");
    queue.begin().unwrap();
    queue.done(0, true);
    queue.abandon_round();
    assert_eq!((queue.begin().unwrap().round, queue.begin().unwrap().round), (1, 1));
}

#[test]
fn after_an_error_a_begun_round_is_given_up() {
    let mut queue = queue(Updates::Synchronous { contributions: 2, backups: 0 });
    put(&mut queue, "ab");
    queue.begin().unwrap();
    queue.begin().unwrap();
    queue.done(0, true);
    queue.fail(Some(1), failed("x"));
    assert!(queue.take_error().is_some());
    queue.put('c');
    // Servers hold a contribution to round 0, which must not enter another step.
    assert_eq!(queue.begin().unwrap().round, 1);
}

#[test]
fn a_failed_contribution_goes_into_no_later_step() {
    let mut queue = queue(Updates::Synchronous { contributions: 2, backups: 0 });
    put(&mut queue, "a");
    queue.begin().unwrap();
    // It may have pushed before it failed.
    queue.fail(Some(0), failed("x"));
    assert!(queue.take_error().is_some());
    put(&mut queue, "b");
    assert_eq!(queue.begin().unwrap().round, 1);
}

#[test]
fn any_staleness_and_any_number_of_backups_count_as_given() {
    let unbounded = Updates::BoundedStaleness { rounds: u64::MAX };
    for updates in [unbounded, Updates::Synchronous { contributions: 2, backups: usize::MAX }] {
        let mut queue = queue(updates);
        put(&mut queue, "abcdefg");
        // Rounds are of two closures.
        (0..4).for_each(|number| {
            assert!(begin(&mut queue).is_some(), "{updates:?}");
            queue.done(number, false);
        });
        assert_eq!((begin(&mut queue), begin(&mut queue)), (Some('e'), Some('f')), "{updates:?}");
        queue.done(4, false);
        assert_eq!(begin(&mut queue), Some('g'), "{updates:?}");
    }
}

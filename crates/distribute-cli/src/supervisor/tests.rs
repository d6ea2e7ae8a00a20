use proptest::prelude::*;
use signal_hook::consts::SIGUSR1;

use super::*;
use crate::outcome::Verdict;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const GRACE: Duration = Duration::from_secs(10);

fn actions(supervisor: &mut Supervisor) -> Vec<Action> {
    std::iter::from_fn(|| supervisor.poll_action()).collect()
}

fn signals(supervisor: &mut Supervisor) -> Vec<(usize, i32)> {
    let only_signals = |action| match action {
        Action::Signal { rank, signal } if signal != SIGCONT => Some((rank, signal)),
        _ => None,
    };
    actions(supervisor).into_iter().filter_map(only_signals).collect()
}

fn verdict(supervisor: &Supervisor) -> Verdict {
    Verdict::of(&supervisor.outcomes(), supervisor.interrupted())
}

#[test]
fn a_failure_stops_the_others_and_kills_them_after_the_grace() {
    let mut job = Supervisor::new(3, GRACE);
    job.handle_exit(1, Exit::Code(7), false, ms(100));
    let told = actions(&mut job);
    assert_eq!(told[0], Action::Note(Note::Failed { rank: 1, exit: Exit::Code(7), at: ms(100), others: 2 }));
    assert_eq!(told[1..3], [0, 2].map(|rank| Action::Signal { rank, signal: SIGTERM }));
    job.handle_exit(0, Exit::Code(143), false, ms(200));
    assert_eq!(job.poll_timeout(), Some(ms(10_100)));
    job.handle_timeout(ms(10_099));
    assert_eq!(signals(&mut job), []);
    job.handle_timeout(ms(10_100));
    assert_eq!(signals(&mut job), [(2, SIGKILL)]);
    assert!(!job.is_done());
    job.handle_exit(2, Exit::Signal(SIGKILL), false, ms(10_200));
    assert!(job.is_done() && job.poll_timeout().is_none());
    assert_eq!(verdict(&job), Verdict::Cause(1));
    assert_eq!(job.outcomes().iter().map(|outcome| outcome.stopped).collect::<Vec<_>>(), [true, false, true]);
}

fn revivable(restarts: u32) -> Supervisor {
    Supervisor::new(3, GRACE).with_revivable(0, Budget::new(restarts, None, Duration::from_secs(1)))
}

#[test]
fn a_task_is_started_again_alone_while_the_others_run() {
    let mut job = revivable(2);
    for (count, exit, at) in [(1, Exit::Signal(SIGKILL), 100), (2, Exit::Code(138), 5000)] {
        job.handle_exit(0, exit, false, ms(at));
        let pause = Duration::from_secs(count);
        let again = Note::Again { rank: 0, exit, at: ms(at), pause, count: count as u32, of: 2 };
        assert_eq!(actions(&mut job), [Action::Note(again)]);
        assert_eq!(job.poll_timeout(), Some(ms(at) + pause));
        job.handle_timeout(ms(at + 999));
        assert!(actions(&mut job).is_empty() && !job.is_done());
        job.handle_timeout(ms(at) + pause);
        assert_eq!(actions(&mut job), [Action::Start { rank: 0, count: count as u32 }]);
    }
    [0, 1, 2].into_iter().for_each(|rank| job.handle_exit(rank, Exit::Code(0), false, ms(9000)));
    assert!(job.is_done());
    assert_eq!((verdict(&job), job.restarts()), (Verdict::Success, vec![2, 0, 0]));
}

#[test]
fn a_task_is_not_started_again_without_need_or_budget() {
    // Its own failure, a request to stop, and another task's end.
    for (rank, exit) in
        [(0, Exit::Code(7)), (0, Exit::Code(143)), (0, Exit::Signal(SIGTERM)), (1, Exit::Signal(SIGKILL))]
    {
        let mut job = revivable(9);
        job.handle_exit(rank, exit, false, ms(100));
        assert!(matches!(actions(&mut job)[0], Action::Note(Note::Failed { .. })), "{exit}");
    }
    let mut job = revivable(0);
    job.handle_exit(0, Exit::Signal(SIGKILL), false, ms(100));
    assert!(matches!(actions(&mut job)[..], [Action::Note(Note::Failed { .. }), ..]));
    // What it has left behind ends first.
    let mut job = revivable(1);
    job.handle_exit(0, Exit::Signal(SIGKILL), true, ms(100));
    job.handle_timeout(ms(100));
    assert_eq!(signals(&mut job), [(0, SIGTERM)]);
    job.handle_timeout(ms(2000));
    assert_eq!(actions(&mut job), []);
    job.handle_gone(0);
    job.handle_timeout(ms(2001));
    assert_eq!(actions(&mut job), [Action::Start { rank: 0, count: 1 }]);
    // The job is stopped while it pauses.
    let mut job = revivable(1);
    job.handle_exit(0, Exit::Signal(SIGKILL), false, ms(100));
    job.handle_exit(1, Exit::Code(7), false, ms(200));
    assert_eq!(signals(&mut job), [(2, SIGTERM)]);
    job.handle_exit(2, Exit::Signal(SIGTERM), false, ms(300));
    job.handle_timeout(ms(5000));
    assert!(job.is_done() && actions(&mut job).is_empty());
    assert_eq!(job.outcomes()[0].exit, Exit::Signal(SIGKILL));
}

#[test]
fn a_job_goes_on_without_what_it_can_do_without() {
    let mut job = Supervisor::new(3, GRACE).with_expendable([1, 2]);
    job.handle_exit(1, Exit::Signal(SIGKILL), false, ms(100));
    let told = actions(&mut job);
    assert_eq!(told, [Action::Note(Note::Forgiven { rank: 1, exit: Exit::Signal(SIGKILL), at: ms(100) })]);
    job.handle_exit(2, Exit::Code(0), false, ms(200));
    job.handle_exit(0, Exit::Code(0), false, ms(300));
    assert_eq!(verdict(&job), Verdict::Success);
    // Not without the last of its kind.
    let mut job = Supervisor::new(3, GRACE).with_expendable([1, 2]);
    job.handle_exit(1, Exit::Code(1), false, ms(100));
    job.handle_exit(2, Exit::Code(7), false, ms(200));
    assert_eq!(signals(&mut job), [(0, SIGTERM)]);
    job.handle_exit(0, Exit::Signal(SIGTERM), false, ms(300));
    assert_eq!(verdict(&job), Verdict::Cause(2));
}

#[test]
fn a_blamed_task_gets_a_moment_to_end_by_itself() {
    let mut job = Supervisor::new(3, GRACE);
    job.handle_exit(0, Exit::Code(138), false, ms(100));
    assert_eq!(actions(&mut job), []);
    job.handle_exit(1, Exit::Code(101), false, ms(150));
    assert_eq!(signals(&mut job), [(2, SIGTERM)]);
    job.handle_exit(2, Exit::Signal(SIGTERM), false, ms(160));
    assert_eq!(verdict(&job), Verdict::Cause(1));
}

#[test]
fn the_cause_gets_a_moment_where_one_that_it_has_told_ends_first_with_the_same_code() {
    for code in [1, 2] {
        let mut job = Supervisor::new(3, GRACE);
        job.handle_exit(0, Exit::Code(code), false, ms(100));
        assert_eq!(actions(&mut job), []);
        job.handle_exit(1, Exit::Code(code), false, ms(900));
        assert_eq!(actions(&mut job), []);
        job.handle_timeout(ms(1100));
        assert_eq!(signals(&mut job), [(2, SIGTERM)]);
        job.handle_exit(2, Exit::Signal(SIGTERM), false, ms(1200));
        assert_eq!(job.outcomes().iter().map(|outcome| outcome.stopped).collect::<Vec<_>>(), [false, false, true]);
    }
    // After a task that says that another failed, this one is the cause.
    let mut job = Supervisor::new(3, GRACE);
    job.handle_exit(0, Exit::Code(138), false, ms(100));
    job.handle_exit(1, Exit::Code(2), false, ms(900));
    assert_eq!(signals(&mut job), [(2, SIGTERM)]);
}

#[test]
fn where_nobody_else_ends_the_moment_passes() {
    let mut job = Supervisor::new(2, GRACE);
    job.handle_exit(0, Exit::Code(138), false, ms(100));
    assert_eq!(job.poll_timeout(), Some(ms(1100)));
    job.handle_timeout(ms(1100));
    assert_eq!(signals(&mut job), [(1, SIGTERM)]);
    job.handle_exit(1, Exit::Signal(SIGTERM), false, ms(1200));
    assert_eq!(verdict(&job), Verdict::Cause(0));
}

#[test]
fn the_second_interrupt_kills_and_a_repeated_hangup_does_not() {
    for (second, expected) in [(SIGINT, SIGKILL), (SIGQUIT, SIGKILL), (1, 1), (SIGTERM, SIGTERM)] {
        let mut job = Supervisor::new(1, GRACE);
        job.handle_signal(SIGINT, ms(1));
        assert_eq!(signals(&mut job), [(0, SIGINT)]);
        job.handle_signal(second, ms(2));
        assert_eq!(signals(&mut job), [(0, expected)]);
        job.handle_exit(0, Exit::Signal(expected), false, ms(3));
        assert_eq!(verdict(&job), Verdict::Interrupted(SIGINT));
    }
}

#[test]
fn a_request_to_end_is_kept_whatever_the_tasks_end_with() {
    // While the tasks are being stopped after a failure.
    let mut job = Supervisor::new(2, GRACE);
    job.handle_exit(0, Exit::Code(7), false, ms(1));
    job.handle_signal(SIGUSR1, ms(2));
    assert_eq!(job.asked_to_end(), None);
    job.handle_signal(SIGTERM, ms(3));
    job.handle_exit(1, Exit::Signal(SIGTERM), false, ms(4));
    assert_eq!((verdict(&job), job.asked_to_end()), (Verdict::Cause(0), Some(SIGTERM)));
    // A task that fails to save.
    let mut job = Supervisor::new(1, GRACE);
    job.handle_signal(SIGTERM, ms(1));
    job.handle_exit(0, Exit::Code(1), false, ms(2));
    assert_eq!((verdict(&job), job.asked_to_end()), (Verdict::Cause(0), Some(SIGTERM)));
}

#[test]
fn what_a_finished_task_leaves_behind_may_linger_for_a_moment() {
    let mut job = Supervisor::new(1, GRACE);
    job.handle_exit(0, Exit::Code(0), true, ms(0));
    assert!(!job.is_done());
    job.handle_timeout(ms(1999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(ms(2000));
    assert_eq!(signals(&mut job), [(0, SIGTERM)]);
    job.handle_timeout(ms(12_000));
    assert_eq!(signals(&mut job), [(0, SIGKILL)]);
    job.handle_gone(0);
    assert!(job.is_done());
    assert_eq!(verdict(&job), Verdict::Success);
}

#[test]
fn a_task_that_cannot_be_killed_is_given_up() {
    let mut job = Supervisor::new(1, GRACE);
    job.handle_signal(SIGTERM, ms(0));
    job.handle_timeout(ms(10_000));
    assert_eq!(signals(&mut job).last(), Some(&(0, SIGKILL)));
    job.handle_timeout(ms(20_000));
    assert_eq!(actions(&mut job), [Action::Note(Note::Stuck { rank: 0 })]);
    assert!(job.is_done());
    assert_eq!(verdict(&job), Verdict::Interrupted(SIGTERM));
}

#[test]
fn requests_to_the_program_stop_nothing() {
    let mut job = Supervisor::new(2, GRACE);
    job.handle_exit(0, Exit::Code(0), false, ms(1));
    job.handle_signal(SIGUSR1, ms(2));
    assert_eq!(actions(&mut job), [Action::SignalLeader { rank: 1, signal: SIGUSR1 }]);
    assert_eq!(job.interrupted(), None);
}

fn any_exit() -> impl Strategy<Value = Exit> {
    prop_oneof![
        3 => Just(Exit::Code(0)),
        3 => Just(Exit::Code(138)),
        1 => (1..255_i32).prop_map(Exit::Code),
        1 => (1..31_i32).prop_map(Exit::Signal),
    ]
}

proptest! {
    /// However tasks end, and whatever the user sends, a job with a failure ends within the time limits, and its exit
    /// code reports the failure.
    #[test]
    fn a_job_with_a_failure_ends(
        exits in proptest::collection::vec((any_exit(), 0..5000_u64, any::<bool>()), 1..6),
        fails in (1..255_i32).prop_map(Exit::Code),
        signal in proptest::option::of((prop_oneof![Just(SIGINT), Just(SIGTERM)], 0..5000_u64)),
    ) {
        // Task 0 fails by itself; the others end by themselves, unless they ignore signals and must be killed.
        let tasks = exits.len() + 1;
        let mut job = Supervisor::new(tasks, GRACE);
        let mut due: Vec<(Duration, usize, Exit)> = vec![(ms(700), 0, fails)];
        let willing = exits.iter().zip(1..).filter(|((.., stubborn), _)| !stubborn);
        due.extend(willing.map(|((exit, at, _), rank)| (ms(*at), rank, *exit)));
        let mut signal = signal.map(|(signal, at)| (signal, ms(at)));
        let mut now = Duration::ZERO;
        let mut ended = vec![false; tasks];
        for _ in 0..100 {
            while let Some(action) = job.poll_action() {
                if let Action::Signal { rank, signal: SIGKILL } = action && !ended[rank] {
                    ended[rank] = true;
                    job.handle_exit(rank, Exit::Signal(SIGKILL), false, now);
                }
            }
            if job.is_done() {
                break;
            }
            let times = due.iter().filter(|(_, rank, _)| !ended[*rank]).map(|(at, ..)| *at);
            let next = times.chain(job.poll_timeout()).chain(signal.map(|(_, at)| at)).min();
            prop_assert!(next.is_some(), "nothing left to wait for");
            now = now.max(next.unwrap_or_default());
            if let Some((number, _)) = signal.take_if(|(_, at)| *at <= now) {
                job.handle_signal(number, now);
            }
            for (at, rank, exit) in &due {
                if *at <= now && !std::mem::replace(&mut ended[*rank], true) {
                    job.handle_exit(*rank, *exit, false, now);
                }
            }
            job.handle_timeout(now);
        }
        prop_assert!(job.is_done());
        prop_assert!(now <= ms(5000) + GRACE + SETTLE);
        let outcomes = job.outcomes();
        prop_assert_eq!(outcomes.len(), tasks);
        prop_assert_ne!(verdict(&job).exit_code(&outcomes), 0);
    }
}

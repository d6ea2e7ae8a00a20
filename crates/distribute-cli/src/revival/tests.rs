use proptest::prelude::*;
use signal_hook::consts::{SIGCONT, SIGINT, SIGKILL, SIGSEGV, SIGUSR1};

use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const GRACE: Duration = Duration::from_secs(10);

/// Creates `tasks` workers of which `min` suffice, and starts them; each may be started again `restarts` times.
fn elastic(tasks: usize, min: usize, restarts: u32) -> Revival {
    let mut job = Revival::new(tasks, Rules::Elastic { min }, &Budget::new(restarts, None, ms(1000)), GRACE);
    job.handle_timeout(ms(0));
    assert_eq!(starts(&mut job), (0..tasks).map(|rank| (rank, 0)).collect::<Vec<_>>());
    job
}

fn actions(job: &mut Revival) -> Vec<Action> {
    std::iter::from_fn(|| job.poll_action()).collect()
}

fn starts(job: &mut Revival) -> Vec<(usize, u32)> {
    let start = |action| if let Action::Start { rank, start } = action { Some((rank, start.attempt)) } else { None };
    actions(job).into_iter().filter_map(start).collect()
}

fn signals(job: &mut Revival) -> Vec<(usize, i32)> {
    let signal = |action| match action {
        Action::Signal { rank, signal } if signal != SIGCONT => Some((rank, signal)),
        _ => None,
    };
    actions(job).into_iter().filter_map(signal).collect()
}

/// Returns the messages of the actions, all of which are messages.
fn notes(job: &mut Revival) -> Vec<String> {
    let tasks = crate::job::Roles { workers: job.tasks.len() as u32, ..Default::default() }.tasks(1);
    let text = |action| match action {
        Action::Note(note) => note.text(&tasks, GRACE),
        other => panic!("{other:?}"),
    };
    actions(job).into_iter().map(text).collect()
}

fn end(job: &mut Revival, rank: usize, exit: Exit, at: u64) {
    job.handle_exit(rank, exit, false, ms(at));
}

fn verdict(job: &Revival) -> (Verdict, u8) {
    assert!(job.is_done());
    let outcomes = job.outcomes();
    let verdict = job.verdict(&outcomes);
    (verdict, verdict.exit_code(&outcomes))
}

#[test]
fn a_lost_worker_is_started_again_alone() {
    let mut job = elastic(3, 2, 3);
    end(&mut job, 2, Exit::Signal(SIGKILL), 3200);
    let expected = "worker-2 was killed by SIGKILL after 3.2 s; starting it again in 1 s (1 of 3), the others train on";
    assert_eq!(notes(&mut job), [expected]);
    assert_eq!(job.poll_timeout(), Some(ms(4200)));
    job.handle_timeout(ms(4199));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(ms(4200));
    let start = Start { attempt: 1, job: 0, in_job: 1 };
    assert_eq!(actions(&mut job), [Action::Start { rank: 2, start }]);
    // Each has a budget of its own, and 138 is a loss too. The processes that it has left behind end first.
    job.handle_exit(1, Exit::Code(138), true, ms(5000));
    job.handle_timeout(ms(6500));
    assert_eq!(starts(&mut job), []);
    job.handle_gone(1);
    job.handle_timeout(ms(6600));
    assert_eq!(starts(&mut job), [(1, 1)]);
    (0..3).for_each(|rank| end(&mut job, rank, Exit::Code(0), 7000));
    assert_eq!((verdict(&job), job.starts()), ((Verdict::Success, 0), vec![1, 2, 2]));
}

#[test]
fn a_failure_that_a_restart_would_not_change_stops_all() {
    let mut job = elastic(3, 1, 3);
    end(&mut job, 0, Exit::Signal(SIGSEGV), 100);
    actions(&mut job);
    end(&mut job, 1, Exit::Code(101), 200);
    assert_eq!(signals(&mut job), [(2, SIGTERM)]);
    job.handle_timeout(ms(5000));
    assert_eq!(starts(&mut job), []);
    end(&mut job, 2, Exit::Code(143), 5100);
    assert_eq!(verdict(&job), (Verdict::Cause(1), 101));

    // The one that was told of a failure ends first, and the cause gets a moment.
    let mut job = elastic(3, 1, 3);
    end(&mut job, 0, Exit::Code(2), 100);
    assert_eq!((actions(&mut job), job.poll_timeout()), (vec![], Some(ms(1100))));
    end(&mut job, 1, Exit::Code(2), 300);
    job.handle_timeout(ms(1099));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(ms(1100));
    assert_eq!(signals(&mut job), [(2, SIGTERM)]);
    job.handle_timeout(ms(11_100));
    assert_eq!(signals(&mut job), [(2, SIGKILL)]);
    end(&mut job, 2, Exit::Signal(SIGKILL), 11_200);
    let mut outcomes = job.outcomes();
    outcomes[0].told = true;
    assert_eq!(job.verdict(&outcomes), Verdict::Cause(1));
}

#[test]
fn one_that_was_told_to_stop_is_neither_started_again_nor_a_failure() {
    let mut job = elastic(3, 1, 3);
    end(&mut job, 1, Exit::Code(143), 100);
    end(&mut job, 2, Exit::Signal(SIGTERM), 200);
    let note = "worker-1 ended with exit code 143 after 0.1 s and is not started again: it was told to stop; the \
                others train on";
    assert_eq!(notes(&mut job)[0], note);
    end(&mut job, 0, Exit::Code(0), 300);
    assert_eq!((verdict(&job), job.starts()), ((Verdict::Success, 0), vec![1; 3]));

    // Where too few are left, the others may be about to end likewise; they are not signalled while they save.
    let mut job = elastic(3, 3, 3);
    end(&mut job, 1, Exit::Code(143), 100);
    assert_eq!(
        notes(&mut job)[1],
        "2 workers are left, and the job needs 3; stopping them in 10 s, unless all end before"
    );
    end(&mut job, 0, Exit::Code(143), 200);
    job.handle_timeout(ms(10_099));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(ms(10_100));
    assert_eq!(signals(&mut job), [(2, SIGTERM)]);
    end(&mut job, 2, Exit::Code(143), 10_200);
    assert_eq!(verdict(&job), (Verdict::Cause(1), 143));

    // One that fails while it saves is the cause then.
    let mut job = elastic(2, 2, 3);
    end(&mut job, 0, Exit::Code(143), 100);
    end(&mut job, 1, Exit::Code(1), 200);
    assert_eq!(verdict(&job), (Verdict::Cause(1), 1));
}

#[test]
fn a_good_end_means_that_the_job_is_ending() {
    let mut job = elastic(4, 2, 3);
    end(&mut job, 3, Exit::Signal(SIGKILL), 100);
    actions(&mut job);
    end(&mut job, 0, Exit::Code(0), 200);
    assert_eq!(notes(&mut job), ["worker-0 has ended, so worker-3 is not started again"]);
    end(&mut job, 1, Exit::Code(138), 300);
    job.handle_timeout(ms(9000));
    assert_eq!(starts(&mut job), []);
    end(&mut job, 2, Exit::Code(0), 9100);
    assert_eq!(verdict(&job), (Verdict::Success, 0));

    // But too few good ends are a failure.
    let mut job = elastic(2, 2, 3);
    end(&mut job, 0, Exit::Code(0), 200);
    end(&mut job, 1, Exit::Signal(SIGKILL), 300);
    assert_eq!(verdict(&job), (Verdict::Cause(1), 137));
    let mut job = elastic(3, 3, 3);
    end(&mut job, 1, Exit::Code(138), 100);
    end(&mut job, 0, Exit::Code(0), 200);
    assert_eq!(signals(&mut job), [(2, SIGTERM)]);
    end(&mut job, 2, Exit::Code(0), 300);
    assert_eq!(verdict(&job), (Verdict::Cause(1), 138));
}

#[test]
fn a_job_with_too_few_workers_is_stopped() {
    let mut job = elastic(3, 2, 1);
    end(&mut job, 0, Exit::Signal(SIGKILL), 100);
    job.handle_timeout(ms(1100));
    assert_eq!(starts(&mut job), [(0, 1)]);
    end(&mut job, 0, Exit::Signal(SIGKILL), 1200);
    let note = "worker-0 was killed by SIGKILL after 1.2 s and is not started again: it was started again 1 times, as \
                often as --max-restarts says; the others train on";
    assert_eq!(notes(&mut job), [note]);
    // One that pauses is left.
    end(&mut job, 1, Exit::Signal(SIGSEGV), 1300);
    job.handle_timeout(ms(2300));
    assert_eq!(starts(&mut job), [(1, 1)]);
    end(&mut job, 1, Exit::Code(138), 2400);
    let told = actions(&mut job);
    assert_eq!(told[1], Action::Note(Note::TooFew { left: 1, min: 2, running: 1, waits: false }));
    assert_eq!(told[2], Action::Signal { rank: 2, signal: SIGTERM });
    // An error of one that is being stopped is not the cause.
    end(&mut job, 2, Exit::Code(1), 2500);
    assert_eq!(verdict(&job), (Verdict::Cause(1), 138));
}

#[test]
fn an_interrupt_stops_all_and_starts_none() {
    let mut job = elastic(2, 1, 3);
    end(&mut job, 1, Exit::Signal(SIGKILL), 100);
    actions(&mut job);
    job.handle_signal(SIGUSR1, ms(150));
    assert_eq!(actions(&mut job), [Action::SignalLeader { rank: 0, signal: SIGUSR1 }]);
    job.handle_signal(SIGTERM, ms(200));
    assert_eq!(signals(&mut job), [(0, SIGTERM)]);
    end(&mut job, 0, Exit::Code(143), 300);
    assert_eq!(verdict(&job), (Verdict::Interrupted(SIGTERM), 143));

    // Also where all pause, and a second one kills.
    let mut job = elastic(2, 1, 3);
    (0..2).for_each(|rank| end(&mut job, rank, Exit::Code(138), 100));
    assert!(!notes(&mut job)[1].contains("train on"));
    job.handle_signal(SIGINT, ms(200));
    assert_eq!(verdict(&job), (Verdict::Interrupted(SIGINT), 130));
    let mut job = elastic(2, 1, 3);
    job.handle_signal(SIGINT, ms(200));
    assert_eq!(signals(&mut job), [(0, SIGINT), (1, SIGINT)]);
    job.handle_signal(SIGINT, ms(300));
    let killing = Action::Note(Note::Common(supervisor::Note::Killing { ranks: vec![0, 1], asked: true }));
    let told = actions(&mut job);
    assert!(told.ends_with(&[killing]) && told.contains(&Action::Signal { rank: 1, signal: SIGKILL }), "{told:?}");
}

#[test]
fn tasks_that_were_all_lost_begin_another_job() {
    let mut job = elastic(3, 2, 3);
    end(&mut job, 0, Exit::Signal(SIGKILL), 100);
    job.handle_timeout(ms(1100));
    assert_eq!(
        actions(&mut job).pop(),
        Some(Action::Start { rank: 0, start: Start { attempt: 1, job: 0, in_job: 1 } })
    );
    // The others are lost, and then the one that was started again, which had nothing of theirs.
    (1..3).for_each(|rank| end(&mut job, rank, Exit::Signal(SIGKILL), 1200));
    end(&mut job, 0, Exit::Code(138), 1900);
    let told = notes(&mut job);
    assert!(told[3].starts_with("all workers were lost; those that are started again begin another job"), "{told:?}");
    job.handle_timeout(ms(2200));
    let start = |attempt| Start { attempt, job: 1, in_job: 0 };
    let started = |rank, attempt| Action::Start { rank, start: start(attempt) };
    assert_eq!(actions(&mut job), [started(1, 1), started(2, 1)]);
    job.handle_timeout(ms(3900));
    assert_eq!(actions(&mut job), [started(0, 2)]);
    end(&mut job, 1, Exit::Signal(SIGKILL), 4000);
    job.handle_timeout(ms(6000));
    let start = Start { attempt: 2, job: 1, in_job: 1 };
    assert_eq!(actions(&mut job).pop(), Some(Action::Start { rank: 1, start }));
}

/// Returns a generation of workers, each with the generation in which it came in.
fn generation(number: u64, trained: u64, members: &[(usize, u64)]) -> Option<Newest> {
    let members = members.iter().map(|&(rank, joined_in)| newest::Member { rank, joined_in }).collect();
    Some(Newest { number, trained, members })
}

/// Starts a worker again after the newest generation.
fn start_again(job: &mut Revival, rank: usize, at: u64) {
    job.handle_timeout(ms(at));
    assert_eq!(starts(job).first().map(|(started, _)| *started), Some(rank));
    job.handle_start(rank);
}

#[test]
fn workers_that_wait_for_the_last_member_begin_another_job() {
    let mut job = elastic(2, 1, 3);
    job.handle_newest(generation(1, 0, &[(0, 1), (1, 1)]));
    end(&mut job, 0, Exit::Signal(SIGKILL), 100);
    job.handle_newest(generation(2, 1, &[(1, 1)]));
    start_again(&mut job, 0, 1100);
    end(&mut job, 1, Exit::Signal(SIGKILL), 5000);
    let told = actions(&mut job);
    assert!(matches!(told[0], Action::Note(Note::Again { rank: 1, others: false, .. })), "{told:?}");
    assert_eq!(told[1..3], [Action::Note(Note::AllLost { running: 1 }), Action::Signal { rank: 0, signal: SIGTERM }]);
    let text = "all workers with the state of the job were lost; those that are started again begin another job, from \
                a checkpoint if the program restores one; stopping 1 worker without it first (killed after 10 s)";
    assert_eq!(Note::AllLost { running: 1 }.text(&[], GRACE), text);
    // It is started again without a pause, and without a restart of its budget.
    job.handle_newest(generation(2, 1, &[(1, 1)]));
    end(&mut job, 0, Exit::Code(143), 5200);
    job.handle_timeout(ms(5200));
    let start = Start { attempt: 2, job: 1, in_job: 0 };
    assert_eq!(actions(&mut job), [Action::Start { rank: 0, start }]);
    job.handle_newest(None);
    job.handle_start(0);
    job.handle_timeout(ms(6000));
    let start = Start { attempt: 1, job: 1, in_job: 0 };
    assert_eq!(actions(&mut job), [Action::Start { rank: 1, start }]);
    job.handle_start(1);
    // The numbers of generations begin anew.
    job.handle_newest(generation(1, 0, &[(0, 1), (1, 1)]));
    end(&mut job, 1, Exit::Signal(SIGKILL), 7000);
    assert_eq!(signals(&mut job), []);
    end(&mut job, 0, Exit::Code(0), 7100);
    assert_eq!(verdict(&job), (Verdict::Success, 0));

    // A job that is interrupted starts none.
    let mut job = elastic(2, 1, 3);
    job.handle_newest(generation(1, 0, &[(1, 1)]));
    end(&mut job, 1, Exit::Signal(SIGKILL), 100);
    assert_eq!(signals(&mut job), [(0, SIGTERM)]);
    job.handle_signal(SIGINT, ms(200));
    end(&mut job, 0, Exit::Code(143), 300);
    assert_eq!(verdict(&job), (Verdict::Interrupted(SIGINT), 130));
}

#[test]
fn members_without_the_state_of_the_job_begin_another_one() {
    // Worker 1 is lost when worker 0 is a member and has not taken over its state. Later it is let in by worker 0.
    let lost = |trained: u64, exit: Exit| {
        let mut job = elastic(2, 1, 3);
        job.handle_newest(generation(2, 1, &[(1, 1), (0, 2)]));
        end(&mut job, 1, Exit::Signal(SIGKILL), 5000);
        assert_eq!(signals(&mut job), []);
        job.handle_newest(generation(3, 1, &[(0, 2)]));
        start_again(&mut job, 1, 6000);
        job.handle_newest(generation(4, trained, &[(0, 2), (1, 4)]));
        end(&mut job, 0, exit, 16_000);
        signals(&mut job)
    };
    assert_eq!(lost(1, Exit::Code(138)), [(1, SIGTERM)]);
    // Worker 0 had the state, and worker 1 may have got it.
    assert_eq!(lost(3, Exit::Code(138)), []);
    assert_eq!(lost(1, Exit::Signal(SIGKILL)), []);

    // Members of which the launcher knows nothing decide for themselves.
    let generation = distribute_cluster::Generation { number: 1, members: Vec::new(), next_join: 0, trained: 0 };
    let member = |port: u16| distribute_cluster::ElasticMember {
        join_number: 0,
        joined_in: 1,
        identity: 1,
        control: format!("127.0.0.1:{port}"),
        service: String::new(),
    };
    let of = |port| distribute_cluster::Generation { members: vec![member(port)], ..generation.clone() };
    assert_eq!(Newest::of(&of(7001), &[7000, 7001]).unwrap().members, [newest::Member { rank: 1, joined_in: 1 }]);
    assert_eq!(Newest::of(&of(7002), &[7000, 7001]), None);
}

#[test]
fn tasks_that_no_other_needs_are_started_again_after_any_failure() {
    let mut tasks = Revival::new(2, Rules::Independent, &Budget::new(1, None, ms(1000)), GRACE);
    tasks.handle_timeout(ms(0));
    actions(&mut tasks);
    end(&mut tasks, 0, Exit::Code(1), 100);
    assert_eq!(notes(&mut tasks), ["worker-0 ended with exit code 1 after 0.1 s; starting it again in 1 s (1 of 1)"]);
    end(&mut tasks, 1, Exit::Code(0), 200);
    job_starts_again(&mut tasks);
    end(&mut tasks, 0, Exit::Code(101), 1200);
    assert!(tasks.is_done() && tasks.interrupted().is_none());
    assert_eq!(tasks.outcomes()[0].exit, Exit::Code(101));
}

fn job_starts_again(tasks: &mut Revival) {
    tasks.handle_timeout(ms(1100));
    assert_eq!(starts(tasks), [(0, 1)]);
}

fn any_exit() -> impl Strategy<Value = Exit> {
    let code = prop::sample::select(vec![0, 0, 1, 2, 7, 101, 138, 143]).prop_map(Exit::Code);
    prop_oneof![code, prop::sample::select(vec![SIGKILL, SIGTERM]).prop_map(Exit::Signal)]
}

proptest! {
    /// Whatever ends when, the job ends, starts none while it stops, and succeeds only if enough have ended well.
    #[test]
    fn an_elastic_job_ends(
        ends in prop::collection::vec((0..4_usize, any_exit(), any::<bool>()), 0..24),
        min in 1..=4_usize,
        restarts in 0..3_u32,
    ) {
        let mut job = elastic(4, min, restarts);
        let (mut now, mut runs, mut stopping) = (0, [true; 4], false);
        // Those that are left at last end well.
        let rest = (0..40).map(|at| (at % 4, Exit::Code(0), true));
        for (rank, exit, waits) in ends.into_iter().chain(rest) {
            now += if waits { 3000 } else { 10 };
            job.handle_timeout(ms(now));
            for action in actions(&mut job) {
                match action {
                    Action::Start { rank, .. } => {
                        prop_assert!(!runs[rank] && !stopping);
                        runs[rank] = true;
                    }
                    Action::Signal { signal, .. } => stopping |= signal == SIGTERM,
                    Action::SignalLeader { .. } | Action::Note(_) => {}
                }
            }
            if runs[rank] {
                runs[rank] = false;
                end(&mut job, rank, exit, now);
            }
        }
        prop_assert!(job.is_done() && runs == [false; 4]);
        let exits: Vec<Exit> = job.outcomes().iter().map(|outcome| outcome.exit).collect();
        let good = exits.iter().filter(|exit| exit.is_success()).count();
        let failed = exits.iter().any(|exit| Kind::of(*exit) == Kind::Failed);
        let (verdict, code) = verdict(&job);
        prop_assert_eq!(verdict == Verdict::Success, good >= min && !failed, "{:?} {:?}", verdict, exits);
        prop_assert_eq!(verdict == Verdict::Success, code == 0);
    }
}

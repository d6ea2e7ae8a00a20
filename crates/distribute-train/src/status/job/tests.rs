use super::*;
use crate::progress::{Activity, Spread};
use crate::status::{State, View};

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn training(own_s: f64, collective_s: f64) -> Vitals {
    let step = own_s + collective_s;
    Vitals {
        host: "host-1".into(),
        pid: 7,
        activity: Activity::Training,
        steps: 10,
        steps_per_s: Some(1.0 / step),
        step_s: Some(Spread { p10: step, p50: step, p90: step }),
        own_s: Some(own_s),
        collective_s: Some(collective_s),
        input_wait_s: Some(0.0),
        memory_bytes: Some(1 << 20),
        ..Vitals::default()
    }
}

fn report(job: &mut Job, task: &str, vitals: Vitals, now: Duration) {
    job.receive(&Message { task: task.into(), event: Event::Vitals(vitals) }, now);
}

/// Returns a job of workers that have reported these own times and times in collectives.
fn job(times: &[(f64, f64)]) -> Job {
    let mut job = Job::new("mnist");
    for (index, (own_s, collective_s)) in times.iter().enumerate() {
        let task = format!("worker:{index}");
        job.expect(&task);
        job.start(&task, 100 + index as u32, s(0));
        report(&mut job, &task, training(*own_s, *collective_s), s(1));
    }
    job
}

fn near(value: Option<f64>, expected: f64) -> bool {
    value.is_some_and(|value| (value - expected).abs() < 1e-9)
}

fn states(view: &View) -> Vec<State> {
    view.tasks.iter().map(|task| task.state).collect()
}

#[test]
fn a_slow_task_is_a_straggler_and_the_others_wait_for_it() {
    let view = job(&[(0.10, 0.07), (0.16, 0.01), (0.11, 0.06)]).view(s(2));
    assert_eq!(view.stragglers, ["worker:1"]);
    let slow = &view.tasks[1];
    assert!(slow.straggler && near(slow.own_relative, 0.16 / 0.105), "{slow:?}");
    assert!(near(slow.peer_wait_s, 0.0) && near(slow.communication_s, 0.01), "{slow:?}");
    let fast = &view.tasks[0];
    assert!(near(fast.peer_wait_s, 0.06) && near(fast.peer_wait_share, 0.06 / 0.17), "{fast:?}");
    assert!(near(fast.communication_share, 0.01 / 0.17) && near(fast.input_wait_share, 0.0), "{fast:?}");
}

#[test]
fn equal_tasks_and_a_single_one_are_no_stragglers() {
    for times in [&[(0.1, 0.01); 4][..], &[(0.1, 0.0)], &[(0.119, 0.0), (0.1, 0.019)], &[(0.0, 0.1), (0.0, 0.1)]] {
        let view = job(times).view(s(2));
        assert!(view.stragglers.is_empty(), "{view:?}");
    }
    let alone = job(&[(0.1, 0.02)]).view(s(2));
    assert!(alone.tasks[0].own_relative.is_none() && near(alone.tasks[0].communication_s, 0.02), "{alone:?}");
}

#[test]
fn of_two_tasks_one_can_be_the_straggler() {
    assert_eq!(job(&[(0.121, 0.0), (0.1, 0.021)]).view(s(2)).stragglers, ["worker:0"]);
}

#[test]
fn numbers_that_are_none_are_not_known_and_compared_with_nothing() {
    let nan = f64::NAN;
    let mut job = job(&[(nan, nan), (f64::INFINITY, 0.0), (-1.0, 0.1), (0.1, 0.0), (0.1, nan)]);
    let status = Status { epoch: 1, metrics: vec![("loss".into(), nan)], examples_per_s: nan, ..Status::default() };
    job.receive(&Message { task: "worker:0".into(), event: Event::Step(status) }, s(1));
    let view = job.view(s(2));
    assert!(view.stragglers.is_empty(), "{view:?}");
    assert_eq!(view.tasks[0].own_s, None);
    assert!(view.tasks[0].step_s.is_none() && view.tasks[2].own_s.is_none() && view.tasks[3].own_s == Some(0.1));
    assert_eq!(view.job.examples_per_s, None);
    let json = serde_json::to_string(&view).unwrap();
    assert!(json.contains(r#"{"name":"loss","value":"NaN"}"#), "{json}");
}

#[test]
fn tasks_that_have_ended_or_are_lost_are_no_measure() {
    let mut job = job(&[(0.1, 0.1), (0.2, 0.0), (0.2, 0.0), (0.01, 0.0)]);
    assert_eq!(job.view(s(2)).stragglers, ["worker:1", "worker:2"]);
    job.end("worker:0", End::Code(0), s(2));
    job.end("worker:3", End::Signal("SIGKILL".into()), s(2));
    let view = job.view(s(3));
    assert!(view.stragglers.is_empty(), "{view:?}");
    assert_eq!(states(&view), [State::Ended, State::Training, State::Training, State::Failed]);
    assert_eq!(view.tasks[3].ended.as_deref(), Some("ended by SIGKILL"));
    assert_eq!((view.tasks[3].memory_bytes, view.tasks[3].steps_per_s), (None, None));
}

#[test]
fn parameter_servers_are_not_compared() {
    let mut job = job(&[(0.1, 0.0), (0.1, 0.0)]);
    job.expect("ps:0");
    report(&mut job, "ps:0", training(5.0, 0.0), s(1));
    let view = job.view(s(2));
    assert!(view.stragglers.is_empty() && view.tasks[2].role == "ps", "{view:?}");
}

#[test]
fn a_task_passes_through_its_states() {
    let mut job = Job::new("mnist");
    job.expect("worker:0");
    assert_eq!(states(&job.view(s(0))), [State::Waiting]);
    job.start("worker:0", 7, s(1));
    assert_eq!((job.view(s(2)).tasks[0].state, job.view(s(60)).tasks[0].state), (State::Starting, State::Running));
    for (activity, state) in [
        (Activity::Starting, State::Starting),
        (Activity::Training, State::Training),
        (Activity::Validating, State::Validating),
        (Activity::Checkpointing, State::Checkpointing),
        (Activity::Finished, State::Finished),
    ] {
        report(&mut job, "worker:0", Vitals { activity, ..Vitals::default() }, s(10));
        let view = job.view(s(11));
        assert_eq!((view.tasks[0].state, view.job.state), (state, state));
    }
    job.end("worker:0", End::Code(0), s(12));
    let view = job.view(s(99));
    assert_eq!((states(&view), view.job.state, view.job.elapsed_s), (vec![State::Ended], State::Ended, 12.0));
    assert!(view.errors.is_empty());
}

#[test]
fn a_silent_task_is_lost_until_it_reports_again() {
    let mut job = job(&[(0.1, 0.0)]);
    let view = job.view(s(14));
    assert_eq!((states(&view), view.tasks[0].lost.as_deref()), (vec![State::Lost], Some("no report for 13 s")));
    report(&mut job, "worker:0", training(0.1, 0.0), s(15));
    assert_eq!(states(&job.view(s(16))), [State::Training]);
    job.lose("worker:0", "its connection ended", s(16));
    job.lose("worker:0", "again", s(17));
    let view = job.view(s(17));
    assert_eq!(view.tasks[0].lost.as_deref(), Some("its connection ended"));
    assert_eq!(view.errors.len(), 1);
}

#[test]
fn a_restart_begins_anew_and_is_counted() {
    let mut job = job(&[(0.1, 0.0), (0.1, 0.0)]);
    job.end("worker:1", End::Code(138), s(2));
    job.explain("worker:1", "  lost worker:0\n");
    job.explain("worker:0", "nothing has failed here");
    job.start("worker:1", 900, s(3));
    let view = job.view(s(4));
    let task = &view.tasks[1];
    assert_eq!((task.restarts, task.pid, task.state), (1, Some(900), State::Starting));
    assert_eq!((task.last_error.as_deref(), task.ended.as_deref()), (Some("exit code 138: lost worker:0"), None));
    assert_eq!(view.job.state, State::Training);
}

#[test]
fn a_task_that_the_launcher_stops_has_not_failed() {
    let mut job = job(&[(0.1, 0.0), (0.1, 0.0)]);
    job.end("worker:1", End::Code(1), s(2));
    job.end("worker:0", End::Stopped, s(3));
    let view = job.view(s(4));
    assert_eq!((states(&view), view.job.state), (vec![State::Ended, State::Failed], State::Failed));
    assert_eq!((view.errors.len(), view.errors[0].text.as_str()), (1, "exit code 1"));
    assert_eq!(view.tasks[0].ended.as_deref(), Some("stopped by the launcher"));
}

#[test]
fn the_step_is_counted_over_all_epochs() {
    let mut job = job(&[(0.1, 0.0)]);
    let of = |status: Status| Message { task: "worker:0".into(), event: Event::Step(status) };
    let status = Status { epoch: 3, epochs: 5, step: 7, steps: Some(100), ..Status::default() };
    job.receive(&of(status.clone()), s(1));
    let view = job.view(s(1)).job;
    assert_eq!((view.step, view.epoch, view.epochs, view.epoch_step), (Some(207), Some(3), Some(5), Some(7)));
    job.receive(&of(Status { total_steps: Some(42), ..status.clone() }), s(1));
    assert_eq!(job.view(s(1)).job.step, Some(42));
    job.receive(&of(Status { steps: None, epochs: 0, ..status }), s(1));
    let view = job.view(s(1)).job;
    assert_eq!((view.step, view.epochs), (Some(10), None));
}

#[test]
fn what_tasks_send_is_limited() {
    let mut job = job(&[(0.1, 0.0)]);
    let send = |job: &mut Job, task: &str, event| job.receive(&Message { task: task.into(), event }, s(1));
    send(&mut job, "worker:9", Event::Vitals(training(0.1, 0.0)));
    send(&mut job, "worker:0", Event::Begin { title: "x\n".repeat(9000) });
    let metrics = vec![("m".repeat(9000), 1.0); 9000];
    send(&mut job, "worker:0", Event::Step(Status { metrics, ..Status::default() }));
    report(&mut job, "worker:0", Vitals { host: "h".repeat(9000), ..training(0.1, 0.0) }, s(1));
    (0..100).for_each(|error| job.fail(Some("worker:0"), &error.to_string(), s(1)));
    let view = job.view(s(2));
    assert_eq!((view.tasks.len(), view.errors.len(), view.errors[0].text.as_str()), (1, MOST_ERRORS, "99"));
    assert!(view.job.title.chars().count() == TEXT + 1 && !view.job.title.contains('\n'));
    assert!(view.job.metrics.len() == MOST_METRICS && view.job.metrics[0].name.chars().count() == NAME + 1);
    assert_eq!(view.tasks[0].host.as_ref().map(|host| host.chars().count()), Some(NAME + 1));
}

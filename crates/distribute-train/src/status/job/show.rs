//! The state of a job, derived from what is known of it.

use std::time::Duration;

use super::collectives::{Reported, collectives};
use super::peers::{Comparison, finite};
use super::{End, Job, Task};
use crate::progress::{Activity, Spread, Vitals};
use crate::status::{JobView, State, Story, TaskView, Value, View};

impl Job {
    /// Returns the state of the job at a time since it began.
    pub fn view(&self, now: Duration) -> View {
        let comparisons = self.compared();
        let tasks: Vec<TaskView> =
            self.tasks.iter().zip(comparisons).map(|(task, comparison)| task.view(comparison, now)).collect();
        let stragglers = tasks.iter().filter(|task| task.straggler).map(|task| task.task.clone()).collect();
        let errors = self.errors.iter().rev().map(|failure| Story {
            at_s: failure.at.as_secs_f64(),
            task: failure.task.clone(),
            text: failure.text.clone(),
        });
        let reported = self.tasks.iter().zip(&tasks).filter_map(|(task, view)| {
            let (vitals, at) = task.vitals.as_ref()?;
            let heard_s = now.saturating_sub(*at).as_secs_f64();
            Some(Reported { task: view, calls: &vitals.calls, heard_s })
        });
        let collectives = collectives(&reported.collect::<Vec<_>>());
        View { job: self.job_view(&tasks, now), stragglers, collectives, errors: errors.collect(), tasks }
    }

    fn job_view(&self, tasks: &[TaskView], now: Duration) -> JobView {
        let progress = self.progress.as_ref();
        let step = progress.map(|status| match (status.total_steps, status.steps) {
            (Some(total), _) => total,
            (None, Some(steps)) => {
                u64::from(status.epoch.saturating_sub(1)).saturating_mul(steps).saturating_add(status.step)
            }
            (None, None) => tasks.iter().filter_map(|task| task.steps).max().unwrap_or(status.step),
        });
        let metrics = progress.into_iter().flat_map(|status| &status.metrics);
        let any = |state: State| tasks.iter().any(|task| task.state == state);
        let state = if self.ended.is_some() && any(State::Failed) {
            State::Failed
        } else if self.ended.is_some() {
            State::Ended
        } else if self.summary.is_some() {
            State::Finished
        } else {
            // Also at the end of training, when no task makes steps any more.
            PRECEDENCE.into_iter().find(|state| any(*state)).unwrap_or(State::Waiting)
        };
        JobView {
            name: self.name.clone(),
            title: self.title.clone().unwrap_or_else(|| self.name.clone()),
            state,
            elapsed_s: self.ended.unwrap_or(now).as_secs_f64(),
            epoch: progress.map(|status| status.epoch),
            epochs: progress.map(|status| status.epochs).filter(|epochs| *epochs > 0),
            epoch_step: progress.map(|status| status.step),
            epoch_steps: progress.and_then(|status| status.steps),
            step,
            examples_per_s: progress.and_then(|status| finite(Some(status.examples_per_s))),
            metrics: metrics.map(|(name, value)| Value { name: name.clone(), value: *value }).collect(),
            summary: self.summary.clone(),
        }
    }
}

impl Task {
    fn view(&self, comparison: Comparison, now: Duration) -> TaskView {
        let vitals = self.vitals.as_ref().map(|(vitals, _)| vitals);
        let of = |number: fn(&Vitals) -> Option<f64>| finite(vitals.and_then(number));
        let heard_s = self.vitals.as_ref().map(|(_, at)| now.saturating_sub(*at).as_secs_f64());
        let state = self.state(heard_s, now);
        let step_s = vitals.and_then(|vitals| vitals.step_s).filter(is_finite);
        let lives = !matches!(state, State::Ended | State::Failed | State::Lost);
        let share = |part: Option<f64>| Some((part? / step_s?.p50).clamp(0.0, 1.0)).filter(|share| share.is_finite());
        TaskView {
            task: self.name.clone(),
            role: self.role().to_owned(),
            host: vitals.map(|vitals| super::short(&vitals.host, super::NAME)).filter(|host| !host.is_empty()),
            pid: vitals.map(|vitals| vitals.pid).or(self.process.map(|process| process.pid)),
            state,
            ended: self.ended.as_ref().map(End::to_string),
            lost: self.lost.clone().or_else(|| match heard_s {
                Some(heard_s) if state == State::Lost => Some(format!("no report for {heard_s:.0} s")),
                _ => None,
            }),
            steps: vitals.map(|vitals| vitals.steps),
            steps_per_s: of(|vitals| vitals.steps_per_s).filter(|_| lives),
            step_s,
            own_s: of(|vitals| vitals.own_s),
            own_relative: comparison.relative,
            straggler: comparison.is_straggler && lives,
            collective_s: of(|vitals| vitals.collective_s),
            communication_s: comparison.communication_s,
            communication_share: share(comparison.communication_s),
            peer_wait_s: comparison.peer_wait_s,
            peer_wait_share: share(comparison.peer_wait_s),
            input_wait_s: of(|vitals| vitals.input_wait_s),
            input_wait_share: share(of(|vitals| vitals.input_wait_s)),
            memory_bytes: vitals.and_then(|vitals| vitals.memory_bytes).filter(|_| lives),
            restarts: self.restarts,
            last_error: self.last_error.clone(),
            heard_s,
        }
    }

    fn state(&self, heard_s: Option<f64>, now: Duration) -> State {
        let activity = self.vitals.as_ref().map(|(vitals, _)| vitals.activity);
        match (&self.ended, activity, self.process) {
            (Some(end), ..) if end.is_failure() => State::Failed,
            (Some(_), ..) => State::Ended,
            _ if self.lost.is_some() => State::Lost,
            (None, Some(Activity::Finished), _) => State::Finished,
            (None, Some(_), _) if heard_s.is_some_and(|heard_s| heard_s > SILENT_S) => State::Lost,
            (None, Some(Activity::Starting), _) => State::Starting,
            (None, Some(Activity::Training), _) => State::Training,
            (None, Some(Activity::Validating), _) => State::Validating,
            (None, Some(Activity::Checkpointing), _) => State::Checkpointing,
            (None, None, Some(process)) if now.saturating_sub(process.started) < SLOW_START => State::Starting,
            (None, None, Some(_)) => State::Running,
            (None, None, None) => State::Waiting,
        }
    }
}

/// The job does what the first of these says that a task does.
const PRECEDENCE: [State; 9] = [
    State::Checkpointing,
    State::Validating,
    State::Training,
    State::Starting,
    State::Running,
    State::Finished,
    State::Lost,
    State::Failed,
    State::Ended,
];

fn is_finite(spread: &Spread) -> bool {
    [spread.p10, spread.p50, spread.p90].into_iter().all(|value| finite(Some(value)).is_some())
}

/// Tasks report every second; one that has not for this long is stopped, or cannot be reached.
const SILENT_S: f64 = 10.0;

/// A process that reports nothing for this long may be a program without progress.
const SLOW_START: Duration = Duration::from_secs(30);

//! Attendance: a coordinator's hold on another task. Both sides send heartbeats, so that each notices when the other's
//! host is gone silently, even if a proxy in between keeps connections open.

use std::marker::PhantomData;
use std::time::Duration;

use distribute_cluster::grpc::{GrpcMessage, Inbox, Outbox};
use tokio::task::JoinHandle;
use tokio::time::{Interval, MissedTickBehavior};

/// The longest heartbeat interval, whatever the configured silence: the other side's may be shorter.
const BEAT: Duration = Duration::from_millis(250);

/// The shortest silence after which a task may count as lost.
pub(crate) const MIN_SILENCE: Duration = Duration::from_secs(1);

/// The number of intervals in which a silence is measured, so that a process that was itself frozen reads what has
/// arrived meanwhile before it decides.
const PARTS: u32 = 4;

/// Returns the interval of heartbeats.
pub(crate) fn beat_interval(silence: Duration) -> Interval {
    every(BEAT.min(silence / PARTS))
}

/// Measures the other side's silence.
#[derive(Debug)]
pub(crate) struct Pulse {
    parts: Interval,
    missed: u32,
    silence: Duration,
}

impl Pulse {
    pub(crate) fn new(silence: Duration) -> Pulse {
        Pulse { parts: every(silence / PARTS), missed: 0, silence }
    }

    /// Records a sign of life.
    pub(crate) fn heard(&mut self) {
        self.missed = 0;
    }

    /// Returns a description when the other side has been silent for too long. Cancel safe.
    pub(crate) async fn lost(&mut self) -> String {
        while self.missed <= PARTS {
            self.parts.tick().await;
            self.missed += 1;
        }
        format!("it has said nothing for {:.1} s", self.silence.as_secs_f64())
    }
}

fn every(period: Duration) -> Interval {
    let mut interval = tokio::time::interval(period.max(Duration::from_millis(1)));
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

/// Sends heartbeats until it is dropped.
pub(super) struct Beats(JoinHandle<()>);

impl Drop for Beats {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(super) fn beats<Q: GrpcMessage>(outbox: Outbox, silence: Duration) -> Beats {
    Beats(tokio::spawn(async move {
        let mut interval = beat_interval(silence);
        loop {
            interval.tick().await;
            if !outbox.offer(Q::default()) {
                return;
            }
        }
    }))
}

/// The coordinator's side of an attendance, which ends when it is dropped.
pub(crate) struct Attendance<S> {
    states: Inbox,
    pulse: Pulse,
    _beats: Beats,
    of: PhantomData<fn() -> S>,
}

impl<S: GrpcMessage> Attendance<S> {
    pub(super) fn new(states: Inbox, beats: Beats, silence: Duration) -> Attendance<S> {
        Attendance { states, pulse: Pulse::new(silence), _beats: beats, of: PhantomData }
    }

    /// Returns the reason when the other side has left or is lost. Cancel safe.
    pub(crate) async fn over(&mut self) -> String {
        loop {
            tokio::select! {
                state = self.states.next::<S>() => match state {
                    Ok(Some(_)) => self.pulse.heard(),
                    Ok(None) => return "it has left".to_owned(),
                    Err(status) => return status.message().to_owned(),
                },
                lost = self.pulse.lost() => return lost,
            }
        }
    }
}

//! A coordinator's hold on another task: either side says again and again that it lives, so that the other one notices when its
//! host has gone without a word, also through something in between that keeps connections open.

use std::marker::PhantomData;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Interval, MissedTickBehavior};

use super::frame::{Inbox, Outbox, Parcel};

/// The longest time between two signs of life, whatever the silence that counts: the other side may have a shorter one.
const BEAT: Duration = Duration::from_millis(250);

/// The shortest silence after which a task may count as lost.
pub(crate) const MIN_SILENCE: Duration = Duration::from_secs(1);

/// In how many parts a silence is measured, so that a process that was itself frozen hears what has come meanwhile before it judges.
const PARTS: u32 = 4;

/// How often a side says that it lives.
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

    /// The other side has spoken.
    pub(crate) fn heard(&mut self) {
        self.missed = 0;
    }

    /// Returns, in words, when the other side has been silent for too long. May be given up and begun again.
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

/// Says that this side lives, until it is dropped.
pub(super) struct Beats(JoinHandle<()>);

impl Drop for Beats {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(super) fn beats<Q: Parcel>(outbox: Outbox, silence: Duration) -> Beats {
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

/// An attendance, as its coordinator sees it. Dropping it lets go.
pub(crate) struct Attendance<S> {
    states: Inbox,
    pulse: Pulse,
    _beats: Beats,
    of: PhantomData<fn() -> S>,
}

impl<S: Parcel> Attendance<S> {
    pub(super) fn new(states: Inbox, beats: Beats, silence: Duration) -> Attendance<S> {
        Attendance { states, pulse: Pulse::new(silence), _beats: beats, of: PhantomData }
    }

    /// Returns, in words, when the other side has let go or is lost. May be given up and begun again.
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

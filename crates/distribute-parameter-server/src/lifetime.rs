//! How long a task lives: until its coordinator says that the job is done, a signal comes, or nobody asks for it any more.

use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::wire::{Outbox, Parcel};

/// What a task's services tell its main thread, and the other way round.
#[derive(Debug)]
pub(crate) struct Lifetime {
    state: watch::Sender<State>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    /// Who coordinates: counts attendances, so that an older one cannot end a newer one.
    attended_by: Option<u64>,
    /// Since when nobody has.
    alone_since: Instant,
    attendances: u64,
    ending: bool,
}

/// A coordinator's hold on this task; dropping it lets go.
pub(crate) struct Attended<'a> {
    lifetime: &'a Lifetime,
    number: u64,
}

impl Lifetime {
    pub(crate) fn new() -> Lifetime {
        let state = State { attended_by: None, alone_since: Instant::now(), attendances: 0, ending: false };
        Lifetime { state: watch::Sender::new(state) }
    }

    /// A coordinator has come; an earlier one's hold ends.
    pub(crate) fn attend(&self) -> Attended<'_> {
        let mut number = 0;
        self.state.send_modify(|state| {
            state.attendances += 1;
            number = state.attendances;
            state.attended_by = Some(number);
        });
        Attended { lifetime: self, number }
    }

    /// The job is done.
    pub(crate) fn end(&self) {
        self.state.send_modify(|state| state.ending = true);
    }

    /// Returns once the job is done (`true`), or nobody has coordinated for `patience`.
    pub(crate) async fn ended(&self, patience: Duration) -> bool {
        let mut changes = self.state.subscribe();
        loop {
            let state = *changes.borrow_and_update();
            if state.ending {
                return true;
            }
            let alone_until = state.alone_since + patience;
            if state.attended_by.is_none() && Instant::now() >= alone_until {
                return false;
            }
            let changed = changes.changed();
            match state.attended_by {
                Some(_) => drop(changed.await),
                None => drop(tokio::time::timeout_at(alone_until.into(), changed).await),
            }
        }
    }
}

impl Attended<'_> {
    /// Says that the hold has begun, and returns when it ends: with the coordinator, with the job, or with another coordinator's.
    pub(crate) async fn hold(&self, outbox: &Outbox, begun: impl Parcel) {
        if outbox.send(begun).await {
            tokio::select! {
                () = outbox.closed() => {}
                () = self.over() => {}
            }
        }
    }

    /// Returns when the job ends, or another coordinator has come.
    async fn over(&self) {
        let mut changes = self.lifetime.state.subscribe();
        loop {
            let state = *changes.borrow_and_update();
            if state.ending || state.attended_by != Some(self.number) {
                return;
            }
            drop(changes.changed().await);
        }
    }
}

impl Drop for Attended<'_> {
    fn drop(&mut self) {
        self.lifetime.state.send_modify(|state| {
            if state.attended_by == Some(self.number) {
                state.attended_by = None;
                state.alone_since = Instant::now();
            }
        });
    }
}

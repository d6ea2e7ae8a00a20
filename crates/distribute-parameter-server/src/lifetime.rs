//! The lifetime of a task: it ends when the coordinator ends the job, on a signal, or when no coordinator has been
//! attached for too long.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::wire::proto::JobFailure;
use crate::wire::{GrpcMessage, Inbox, Outbox, Pulse, beat_interval};

/// The state that a task's services and its main thread share.
#[derive(Debug)]
pub(crate) struct Lifetime {
    state: watch::Sender<State>,
}

#[derive(Clone, Debug)]
struct State {
    /// The number of the current attendance, by which an older one cannot end a newer one.
    attended_by: Option<u64>,
    /// Instant at which the last coordinator left, if none is attached.
    alone_since: Instant,
    attendances: u64,
    ending: Option<End>,
}

/// How a task's service ends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    /// The job is done.
    Done,
    /// The job has failed, and would fail again.
    Failed(JobFailure),
    /// No coordinator has been attached for too long.
    Alone,
}

/// A coordinator's hold on this task, released when it is dropped.
pub(crate) struct Attended {
    lifetime: Arc<Lifetime>,
    number: u64,
}

impl Lifetime {
    pub(crate) fn new() -> Lifetime {
        let state = State { attended_by: None, alone_since: Instant::now(), attendances: 0, ending: None };
        Lifetime { state: watch::Sender::new(state) }
    }

    /// Attaches a coordinator; an earlier one's hold ends.
    pub(crate) fn attend(self: &Arc<Self>) -> Attended {
        let mut number = 0;
        self.state.send_modify(|state| {
            state.attendances += 1;
            number = state.attendances;
            state.attended_by = Some(number);
        });
        Attended { lifetime: self.clone(), number }
    }

    /// Ends the coordinator's hold, since another one is about to attach.
    pub(crate) fn release(&self) {
        self.state.send_modify(|state| {
            if state.attended_by.take().is_some() {
                state.alone_since = Instant::now();
            }
        });
    }

    /// Ends the job.
    pub(crate) fn end(&self, failure: Option<JobFailure>) {
        let end = failure.map_or(End::Done, End::Failed);
        self.state.send_modify(|state| {
            // The first outcome counts.
            state.ending.get_or_insert(end);
        });
    }

    /// Returns once the job is over, or no coordinator has been attached for `timeout`.
    pub(crate) async fn ended(&self, timeout: Duration) -> End {
        let mut changes = self.state.subscribe();
        loop {
            let state = changes.borrow_and_update().clone();
            if let Some(end) = state.ending {
                return end;
            }
            let alone = state.alone_since.elapsed();
            if state.attended_by.is_none() && alone >= timeout {
                return End::Alone;
            }
            let changed = changes.changed();
            match state.attended_by {
                // The coordinator sends heartbeats, or its hold ends.
                Some(_) => drop(changed.await),
                None => drop(tokio::time::timeout(timeout - alone, changed).await),
            }
        }
    }
}

impl Attended {
    /// Sends heartbeats, and returns when the hold ends: because the coordinator leaves or is silent for too long, the
    /// job ends, or another coordinator attaches. `Q` is the coordinator's heartbeat.
    pub(crate) async fn hold<Q: GrpcMessage>(
        &self,
        mut inbox: Inbox,
        outbox: &Outbox,
        state: impl GrpcMessage + Clone,
        silence: Duration,
    ) {
        if !outbox.send(state.clone()).await {
            return;
        }
        let (mut pulse, mut beats) = (Pulse::new(silence), beat_interval(silence));
        let over = self.over();
        tokio::pin!(over);
        loop {
            tokio::select! {
                () = outbox.closed() => return,
                () = &mut over => return,
                said = inbox.next::<Q>() => match said {
                    Ok(Some(_)) => pulse.heard(),
                    Ok(None) | Err(_) => return,
                },
                lost = pulse.lost() => {
                    tracing::warn!("lost the coordinator: {lost}; another one is awaited");
                    return;
                }
                _ = beats.tick() => if !outbox.offer(state.clone()) { return },
            }
        }
    }

    /// Returns when the job ends, or another coordinator has attached.
    async fn over(&self) {
        let mut changes = self.lifetime.state.subscribe();
        loop {
            let over = {
                let state = changes.borrow_and_update();
                state.ending.is_some() || state.attended_by != Some(self.number)
            };
            if over {
                return;
            }
            drop(changes.changed().await);
        }
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        self.lifetime.state.send_modify(|state| {
            if state.attended_by == Some(self.number) {
                state.attended_by = None;
                state.alone_since = Instant::now();
            }
        });
    }
}

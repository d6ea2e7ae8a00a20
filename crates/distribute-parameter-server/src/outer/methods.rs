//! The methods of a server of outer parameters.

use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_cluster::Task;
use tonic::Status;
use tonic::body::Body;

use super::fragment::Taken;
use super::held::Held;
use super::store::{Creating, OuterStore, Received, Receiving};
use crate::wire::proto::{
    AttendIsland, Changes, CreateFragment, Done, Fragment, IslandState, LeaveIsland, OuterValues,
};
use crate::wire::{
    Inbox, MAX_HEAD_BYTES, MAX_MESSAGE_BYTES, Methods, Outbox, Pulse, SHORT_MESSAGE_BYTES, beat_interval, parts_of,
    reply, reply_all, reply_stream,
};

/// The service of a server of outer parameters.
pub(crate) struct OuterMethods {
    store: Arc<OuterStore>,
    /// The silence after which an island counts as lost.
    silence: Duration,
}

impl OuterMethods {
    pub(crate) fn new(store: Arc<OuterStore>, silence: Duration) -> OuterMethods {
        OuterMethods { store, silence }
    }

    async fn attend(self: Arc<Self>, mut inbox: Inbox) -> Result<Body, Status> {
        let (island, seat) = self.store.attend(&inbox.one::<AttendIsland>().await?)?;
        tracing::info!("{island} attends");
        let state = IslandState { incarnation: self.store.incarnation(), seat };
        reply_stream(async move |outbox| {
            self.hold(inbox, &outbox, state, island).await;
            self.store.lose(island, seat, Instant::now());
            Ok(())
        })
    }

    /// Sends heartbeats, and returns when the attendance ends: because the island leaves or is silent for too long, or
    /// attends again.
    async fn hold(&self, mut inbox: Inbox, outbox: &Outbox, state: IslandState, island: Task) {
        if !outbox.send(state).await {
            return;
        }
        let (mut pulse, mut beats) = (Pulse::new(self.silence), beat_interval(self.silence));
        let mut changes = self.store.changes();
        while self.store.attends(island, state.seat) {
            tokio::select! {
                () = outbox.closed() => return,
                _ = changes.changed() => {}
                said = inbox.next::<AttendIsland>() => match said {
                    Ok(Some(_)) => pulse.heard(),
                    Ok(None) | Err(_) => return,
                },
                lost = pulse.lost() => {
                    tracing::warn!("lost {island}: {lost}; it is no longer waited for");
                    return;
                }
                _ = beats.tick() => if !outbox.offer(state) { return },
            }
        }
    }

    async fn create(&self, mut inbox: Inbox) -> Result<Body, Status> {
        let mut creating = Creating::default();
        while let Some(message) = inbox.next::<CreateFragment>().await? {
            if let Some(state) = self.store.create(&mut creating, message)? {
                return reply(state);
            }
        }
        Err(Status::invalid_argument("the call has ended before all parts of the fragment"))
    }

    async fn exchange(&self, mut inbox: Inbox) -> Result<Body, Status> {
        let mut receiving = Receiving::default();
        while let Some(message) = inbox.next::<Changes>().await? {
            let now = Instant::now();
            let Some(received) = self.store.receive(&mut receiving, message, now)? else { continue };
            if let Some(Taken::Counted { step, .. }) = received.taken {
                self.settle(&received.held, step, now).await;
            }
            return reply_all(self.answer(&received));
        }
        Err(Status::invalid_argument("the call has ended before all parts of the changes"))
    }

    /// Returns when an outer step is made, or when it is waited for no longer: `grace` after the changes arrived if the
    /// quorum is not reached by then, else when the grace window closes.
    async fn settle(&self, held: &Held, step: u64, arrived: Instant) {
        let mut changes = self.store.changes();
        loop {
            let now = Instant::now();
            self.store.advance(held, now);
            let (version, closes_at) = held.state();
            let until = closes_at.or_else(|| arrived.checked_add(held.grace())).unwrap_or(now);
            if version >= step || now >= until {
                return;
            }
            tokio::select! {
                _ = changes.changed() => {}
                () = tokio::time::sleep_until(until.into()) => {}
            }
        }
    }

    /// Returns the newest values, in messages that are created one after another.
    fn answer(&self, received: &Received) -> impl Iterator<Item = Result<OuterValues, Status>> + Send + use<> {
        let known = received.taken.is_some().then_some(received.version);
        let (version, values) = received.held.newest(known);
        let (late, refused) = match received.taken {
            Some(Taken::Counted { late, .. }) => (late, false),
            Some(Taken::TooLate { late }) => (late, true),
            None => (0, false),
        };
        let (newer, refusals) = (values.is_some(), self.store.refusals(received.island));
        let message = OuterValues { version, late, refused, refusals, newer, ..OuterValues::default() };
        let parts = parts_of(values.unwrap_or_default());
        parts.map(move |(payload, more)| Ok(OuterValues { payload, more, ..message.clone() }))
    }
}

impl Methods for OuterMethods {
    const NAME: &'static str = "distribute.v1.OuterParameters";

    fn admit(&self, method: &str, _session: u64) -> Result<usize, Status> {
        match method {
            "Attend" | "Leave" => Ok(SHORT_MESSAGE_BYTES),
            "Join" => Ok(MAX_HEAD_BYTES),
            "Create" | "Exchange" => Ok(MAX_MESSAGE_BYTES),
            other => Err(no_method(other)),
        }
    }

    async fn call(self: Arc<Self>, method: String, mut inbox: Inbox) -> Result<Body, Status> {
        match method.as_str() {
            "Attend" => self.attend(inbox).await,
            "Join" => reply(self.store.join(&inbox.one::<Fragment>().await?)?),
            "Create" => self.create(inbox).await,
            "Exchange" => self.exchange(inbox).await,
            "Leave" => {
                self.store.leave(&inbox.one::<LeaveIsland>().await?, Instant::now())?;
                reply(Done {})
            }
            other => Err(no_method(other)),
        }
    }
}

fn no_method(name: &str) -> Status {
    Status::unimplemented(format!("a server of outer parameters has no method {name:?}"))
}

//! One task per worker, which sends it closures, and one per server, which watches it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use distribute_cluster::{Task, TaskType};
use distribute_train::checkpoint::Snapshot;
use tonic::Status;

use crate::Error;
use crate::coordinator::{Delivery, Scheduled, ServerState, Shared, WorkerState, cancel};
use crate::message;
use crate::queue::{Begin, Entry};
use crate::steps::ActiveStep;
use crate::strategy::{BETWEEN_ATTEMPTS, Inner};
use crate::wire::proto::{
    AttendWorker, Closure, Done, FenceRequest, Origin, Outcome, Resource, WorkerState as Attending,
};
use crate::wire::{Attendance, Link, Parts, is_lost, parts_of, ps, worker};

/// A worker's dispatcher.
struct Dispatcher {
    worker: usize,
    link: Link,
    /// The number of the current attendance.
    epoch: u64,
    shared: Arc<Shared>,
    inner: Arc<Inner>,
}

/// The state of a server that a worker could not reach.
enum ServerOutcome {
    Ready,
    Recovered,
    Lost,
}

/// Sends closures to a worker for as long as the coordinator lives. Its attendances are numbered from `first`.
pub(crate) async fn serve_worker(worker: usize, first: u64, shared: Arc<Shared>, inner: Arc<Inner>) {
    let link = match inner.link_to_worker(worker, inner.options.silence) {
        Ok(link) => link,
        Err(status) => return shared.fail(None, refused(worker, "connect", &status)),
    };
    let mut dispatcher = Dispatcher { worker, link, epoch: first, shared, inner };
    while let Some(attendance) = dispatcher.attend().await {
        let why = dispatcher.work(attendance).await;
        if dispatcher.is_closing() {
            return;
        }
        tracing::warn!("lost worker:{worker}: {why}; what it was to do is done elsewhere, and it is awaited");
        dispatcher.shared.set_worker(worker, WorkerState::Lost);
    }
}

impl Dispatcher {
    /// Attends to the worker as soon as it answers; `None` at the end.
    async fn attend(&mut self) -> Option<Attendance<Attending>> {
        while !self.is_closing() {
            self.epoch += 1;
            match self.attend_once().await {
                Ok(attendance) => {
                    self.shared.set_worker(self.worker, WorkerState::Ready);
                    return Some(attendance);
                }
                Err(status) if is_lost(&status) => self.check_any_worker(&status),
                Err(status) => {
                    // The worker has another build or belongs to another coordinator: report it with every schedule
                    // until that is fixed.
                    if !self.shared.lock().has_failed() {
                        self.shared.fail(None, refused(self.worker, "Attend", &status));
                    }
                    tokio::time::sleep(10 * BETWEEN_ATTEMPTS).await;
                }
            }
            tokio::time::sleep(BETWEEN_ATTEMPTS).await;
        }
        None
    }

    async fn attend_once(&self) -> Result<Attendance<Attending>, Status> {
        let message_timeout = self.inner.options.message_timeout;
        let names = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        let request = AttendWorker {
            session: self.inner.parameters.session(),
            worker: self.worker as u32,
            workers: self.inner.workers.len() as u32,
            epoch: self.epoch,
            servers: (0..self.inner.parameters.servers())
                .map(|server| self.inner.parameters.address(server).to_owned())
                .collect(),
            functions: names(self.shared.program.functions().collect()),
            datasets: names(self.shared.program.datasets().collect()),
            wire: self.inner.options.wire.map(|wire| wire.code().into()),
            lineage: self.inner.lineage,
        };
        let (_, attendance) = self.link.attend::<_, Attending>(worker!("Attend"), request, message_timeout).await?;
        Ok(attendance)
    }

    /// Fails all scheduled functions if there has been no worker at all for too long.
    fn check_any_worker(&self, last: &Status) {
        let limit = self.shared.options.worker_timeout;
        let all_lost = self.shared.workers.lock().iter().all(|state| *state == WorkerState::Lost);
        let without = self.shared.worker_seen.lock().elapsed();
        if all_lost && without > limit && !self.shared.lock().is_idle() {
            let error = Error::WorkerLost {
                what: "everything that was scheduled".to_owned(),
                why: format!(
                    "there has been no worker for {} s; worker:{} said last: {}",
                    without.as_secs(),
                    self.worker,
                    last.message()
                ),
            };
            self.inner.note_failure(&error);
            self.shared.fail(None, error);
        }
    }

    /// Sends closures until the worker is lost; returns the reason.
    async fn work(&self, mut attendance: Attendance<Attending>) -> String {
        let mut resources = 0;
        loop {
            let begun = tokio::select! {
                begun = self.next_closure() => begun,
                ended = attendance.over() => return ended,
            };
            let Some(begun) = begun else { return "the coordinator ends".to_owned() };
            let outcome = tokio::select! {
                outcome = self.run(&begun, &mut resources) => outcome,
                ended = attendance.over() => Err(Status::unavailable(ended)),
            };
            match outcome {
                Ok(outcome) => self.note(begun.entry, outcome).await,
                Err(status) if is_lost(&status) => {
                    self.give_up(begun.entry).await;
                    return status.message().to_owned();
                }
                // The worker refused this closure.
                Err(status) => {
                    self.fail(begun.entry, refused(self.worker, "Run", &status));
                }
            }
        }
    }

    /// Returns the next closure that may start; `None` at the end.
    async fn next_closure(&self) -> Option<Begin<Scheduled>> {
        let mut servers = self.shared.servers.subscribe();
        loop {
            let ready = self.shared.ready.notified();
            tokio::pin!(ready);
            // Registered before the check, so that no notification is missed in between.
            ready.as_mut().enable();
            if self.is_closing() {
                return None;
            }
            let recovering = servers.borrow_and_update().contains(&ServerState::Recovering);
            if !recovering && let Some(begun) = self.shared.lock().begin() {
                // There is room in the queue now.
                self.shared.notify();
                return Some(begun);
            }
            tokio::select! {
                () = ready => {}
                _ = servers.changed() => {}
            }
        }
    }

    async fn run(&self, begun: &Begin<Scheduled>, resources: &mut usize) -> Result<Outcome, Status> {
        self.make_resources(resources).await?;
        let Scheduled { arguments, value, step } = &begun.entry.closure;
        let origin = Origin {
            session: self.inner.parameters.session(),
            worker: self.worker as u32,
            epoch: self.epoch,
            closure: begun.entry.number,
            change: 0,
            once: self.shared.options.delivery == Delivery::EffectivelyOnce,
            horizon: begun.horizon,
            live: begun.live.clone(),
            round: begun.round,
            step: step.as_ref().map(ActiveStep::number),
            steps: step.as_ref().map(ActiveStep::start),
        };
        let mut first = Some((origin, value.function().to_owned()));
        let messages = parts_of(arguments.clone()).map(|(payload, more)| {
            let (origin, function) = first.take().map_or((None, String::new()), |(origin, of)| (Some(origin), of));
            Closure { origin, function, more, payload }
        });
        let (limit, message_timeout) = (self.shared.options.closure_timeout, self.inner.options.message_timeout);
        let mut replies = self.link.ask(worker!("Run"), messages.collect(), limit).await?;
        let mut payload = Parts::up_to(message::MAX_VALUE_BYTES);
        let mut problem = None;
        loop {
            let next: Option<Outcome> = replies.next(message_timeout).await?;
            let next = next.ok_or_else(|| Status::unavailable("its answer has no end"))?;
            payload.push(next.payload)?;
            problem = problem.or(next.problem);
            if !next.more {
                return Ok(Outcome { problem, pushed: next.pushed, more: false, payload: payload.join() });
            }
        }
    }

    /// Lets the worker create the datasets that it does not have yet.
    async fn make_resources(&self, made: &mut usize) -> Result<(), Status> {
        let missing: Vec<String> = self.shared.resources.lock()[*made..].to_vec();
        for dataset in missing {
            let resource = *made as u64;
            let session = self.inner.parameters.session();
            let request = Resource { session, epoch: self.epoch, resource, dataset: dataset.clone() };
            let timeout = self.shared.options.closure_timeout;
            let done = self.link.call::<Done>(worker!("CreateResource"), request, timeout).await;
            done.map_err(|status| match is_lost(&status) {
                true => status,
                false => Status::new(status.code(), format!("dataset {dataset:?}: {}", status.message())),
            })?;
            *made += 1;
        }
        Ok(())
    }

    /// Processes the outcome of a closure.
    async fn note(&self, mut entry: Entry<Scheduled>, outcome: Outcome) {
        let Some(problem) = outcome.problem else {
            // Taken, so that it may be scheduled again as soon as its result is there.
            if let Some(step) = entry.closure.step.take() {
                step.succeed();
            }
            let goes_on = {
                let mut queue = self.shared.lock();
                queue.done(entry.number, outcome.pushed);
                // A function whose result is there is done, and `join` returns when results are there.
                entry.closure.value.set(Ok(outcome.payload));
                !queue.has_failed()
            };
            if goes_on {
                self.inner.forget_failure();
            }
            return self.shared.notify();
        };
        match problem.server {
            Some(server) => {
                match self.await_server(server as usize).await {
                    // Neither the function nor the worker is at fault.
                    ServerOutcome::Recovered
                        if entry.spared < SPARED.saturating_mul(self.shared.options.max_attempts) =>
                    {
                        entry.attempts -= 1;
                        entry.spared += 1;
                        return self.put_back(entry);
                    }
                    // The coordinator reaches the server; another attempt or another worker may do so too.
                    ServerOutcome::Ready if entry.attempts < self.shared.options.max_attempts => {
                        self.put_back(entry);
                        // Another worker that is free takes it first.
                        return tokio::time::sleep(BETWEEN_ATTEMPTS).await;
                    }
                    ServerOutcome::Recovered | ServerOutcome::Ready | ServerOutcome::Lost => {}
                }
                let servers = 0..self.inner.parameters.servers();
                let address =
                    servers.contains(&(server as usize)).then(|| self.inner.parameters.address(server as usize));
                let address = address.unwrap_or("an unknown address").to_owned();
                let error = Error::ServerLost { server, address, why: problem.message };
                self.inner.note_failure(&error);
                self.fail(entry, error);
            }
            None if problem.cancelled && entry.attempts < self.shared.options.max_attempts => self.put_back(entry),
            None => {
                let function = entry.closure.value.function().to_owned();
                self.fail(
                    entry,
                    Error::UserFunction { function, worker: self.worker as u32, message: problem.message },
                );
            }
        }
    }

    /// Waits until a server that a worker could not reach is available again, or lost.
    async fn await_server(&self, server: usize) -> ServerOutcome {
        let mut servers = self.shared.servers.subscribe();
        // The watcher may notice a little later than the worker.
        let noticed = tokio::time::sleep(2 * BETWEEN_ATTEMPTS);
        tokio::pin!(noticed);
        let (mut waited, mut recovering) = (false, false);
        loop {
            match servers.borrow_and_update().get(server) {
                Some(ServerState::Ready) if recovering => return ServerOutcome::Recovered,
                Some(ServerState::Ready) if waited => return ServerOutcome::Ready,
                Some(ServerState::Lost) | None => return ServerOutcome::Lost,
                Some(ServerState::Ready) => {}
                Some(ServerState::Recovering) => recovering = true,
            }
            tokio::select! {
                changed = servers.changed() => if changed.is_err() { return ServerOutcome::Lost },
                () = &mut noticed, if !waited => waited = true,
            }
        }
    }

    /// Gives the lost worker up: servers refuse its further changes, and its closure runs elsewhere.
    async fn give_up(&self, entry: Entry<Scheduled>) {
        self.shared.fences.lock().insert(self.worker as u32, self.epoch);
        for server in 0..self.inner.parameters.servers() {
            // A server that is not reached is told when it is back.
            drop(fence(&self.inner, server, self.worker as u32, self.epoch).await);
        }
        let limit = self.shared.options.max_attempts;
        if entry.attempts >= limit {
            let what = format!("function {:?}", entry.closure.value.function());
            let why = format!("its workers were lost {} times, lastly worker:{}", entry.attempts, self.worker);
            let error = Error::WorkerLost { what, why };
            self.inner.note_failure(&error);
            return self.fail(entry, error);
        }
        self.put_back(entry);
    }

    /// Reports the failure of a closure to waits for its value and for the queue.
    fn fail(&self, mut entry: Entry<Scheduled>, error: Error) {
        drop(entry.closure.step.take());
        self.shared.fail(Some((entry.number, &entry.closure.value)), error);
    }

    fn put_back(&self, entry: Entry<Scheduled>) {
        {
            let mut queue = self.shared.lock();
            // Before a caller can take the error, and schedule the same step again.
            cancel(queue.put_back(entry), "something else has failed");
        }
        self.shared.notify();
    }

    fn is_closing(&self) -> bool {
        self.shared.closing.load(Ordering::Acquire)
    }
}

/// Watches a server for as long as the coordinator lives.
pub(crate) async fn watch_server(server: usize, shared: Arc<Shared>, inner: Arc<Inner>) {
    let set = |state| {
        shared.servers.send_modify(|states| states[server] = state);
        shared.notify();
    };
    loop {
        // An earlier coordinator took its attendance along, in which case a new one is begun.
        let mut lost = None;
        if let Some(mut attendance) = inner.take_attendance(server) {
            let why = attendance.over().await;
            if shared.closing.load(Ordering::Acquire) {
                return;
            }
            tracing::warn!("lost ps:{server}: {why}; it is awaited");
            lost = Some(why);
        }
        set(ServerState::Recovering);
        match recover(server, &shared, &inner).await {
            Ok(words) => {
                if lost.is_some() {
                    tracing::warn!("ps:{server} is back: {words}");
                }
                set(ServerState::Ready);
            }
            // Another coordinator has taken over, and a further run would take over from that one.
            Err(error @ Error::Refused { .. }) => {
                inner.note_failure(&error);
                set(ServerState::Lost);
                return shared.fail(None, error);
            }
            Err(error) => {
                let address = inner.parameters.address(server).to_owned();
                let why = match error {
                    Error::ServerLost { why, .. } => why,
                    other => lost.map_or_else(|| other.to_string(), |why| format!("{why}; {other}")),
                };
                let error = Error::ServerLost { server: server as u32, address, why };
                inner.note_failure(&error);
                set(ServerState::Lost);
                return shared.fail(None, error);
            }
        }
    }
}

/// Attends to a server again, and restores its part if it was restarted, as often as it is lost meanwhile and until the
/// time for it is over. Only when all of it has succeeded does it count as one that has its part, and is used.
async fn recover(server: usize, shared: &Shared, inner: &Inner) -> Result<String, Error> {
    let folder = inner.options.restore_servers_from.as_deref();
    // A connection may break although both sides are alive.
    let (timeout, started) = (folder.map_or(TRANSIENT, |_| inner.options.server_timeout), Instant::now());
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        let (incarnation, mut attendance) = inner.attend(server, left).await?;
        let _recovers = inner.restoring.read().await;
        let snapshot = match folder {
            _ if inner.has_part(server, incarnation) => None,
            Some(folder) => Some(inner.newest(server, folder)?),
            None => {
                let address = inner.parameters.address(server).to_owned();
                let why = "it was started again and holds nothing".to_owned();
                return Err(Error::ServerLost { server: server as u32, address, why });
            }
        };
        let resumed = tokio::select! {
            resumed = resume(server, snapshot.as_ref(), shared, inner) => resumed,
            ended = attendance.over() => Err(inner.parameters.failed(server, "Attend")(Status::unavailable(ended))),
        };
        match resumed {
            Ok(()) => {
                inner.note_part(server, incarnation, attendance);
                return Ok(match snapshot.map(|snapshot| snapshot.step()) {
                    None => "its connection had broken, and it has kept its variables".to_owned(),
                    Some(step) => format!("it was started again, and has its part of the checkpoint of step {step}"),
                });
            }
            Err(Error::ServerLost { why, .. }) if started.elapsed() < timeout => {
                tracing::warn!("ps:{server} was lost again before it was ready: {why}; it is awaited");
                tokio::time::sleep(BETWEEN_ATTEMPTS).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Restores a server if there is a checkpoint to restore, and tells it which workers are given up. It is used
/// afterwards only, so that it takes nothing of them.
async fn resume(server: usize, snapshot: Option<&Snapshot>, shared: &Shared, inner: &Inner) -> Result<(), Error> {
    if let Some(snapshot) = snapshot {
        inner.restore_again(server, snapshot).await?;
    }
    let fences: Vec<(u32, u64)> = shared.fences.lock().iter().map(|(worker, epoch)| (*worker, *epoch)).collect();
    for (worker, epoch) in fences {
        // One that belongs to another coordinator by now says so to the next attendance.
        if let Err(status) = fence(inner, server, worker, epoch).await
            && is_lost(&status)
        {
            return Err(inner.parameters.failed(server, "Fence")(status));
        }
    }
    if snapshot.is_some() {
        inner.end_restore(server).await?;
        inner.complete_again(server).await?;
    }
    Ok(())
}

/// Makes a server refuse a worker's attendance. An unreachable server is told when it is back.
async fn fence(inner: &Inner, server: usize, worker: u32, epoch: u64) -> Result<(), Status> {
    let request = FenceRequest { session: inner.parameters.session(), worker, epoch };
    let told = inner.parameters.link(server).call::<Done>(ps!("Fence"), request, inner.options.silence).await;
    told.map(drop).inspect_err(|status| {
        tracing::debug!("ps:{server} was not told that worker:{worker} is given up: {}", status.message());
    })
}

fn refused(worker: usize, call: &'static str, status: &Status) -> Error {
    Error::refused(Task::new(TaskType::Worker, worker as u32), call, status)
}

/// How often, for each of its attempts, a closure restarts because of servers that were lost and recovered.
const SPARED: u32 = 10;

/// How long a server may be unreachable if nothing can restore it.
const TRANSIENT: Duration = Duration::from_secs(2);

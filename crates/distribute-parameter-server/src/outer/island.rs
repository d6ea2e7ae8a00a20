//! An island's calls to the servers of outer parameters.

use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_cluster::threads::Threads;
use distribute_cluster::{Task, TaskType};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use crate::server::incarnation;
use crate::strategy::BETWEEN_ATTEMPTS;
use crate::wire::proto::{
    AttendIsland, Caller, Changes, CreateFragment, Done, Fragment, FragmentState, IslandState, LeaveIsland,
    OuterSettings, OuterValues, OuterVariable,
};
use crate::wire::{Addressee, Link, OwnJob, Parts, is_lost, outer, parts_of};
use crate::{Error, Result, numbers};

/// How long an island waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// For all servers to appear at the start.
    pub(crate) connect: Duration,
    /// For a sign of life of a server.
    pub(crate) silence: Duration,
    /// For an answer, in addition to what a server waits for other islands.
    pub(crate) message: Duration,
    /// For a server that is lost.
    pub(crate) server: Duration,
}

/// This process, as an island among others.
pub(crate) struct Island {
    task: Task,
    /// Drawn, so that servers know whether another process has taken this island's place.
    process: u64,
    settings: OuterSettings,
    times: Times,
    servers: Vec<Mutex<Server>>,
    /// Whether an exchange has failed for good.
    has_failed: Mutex<bool>,
    threads: Threads,
}

/// A server of outer parameters.
struct Server {
    index: u32,
    address: String,
    link: Link,
    seat: Option<Seat>,
    /// Instant of its last answer.
    heard: Instant,
}

/// This island's attendance on a server.
struct Seat {
    incarnation: u64,
    number: u64,
    /// Ends with the attendance.
    watch: JoinHandle<String>,
}

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server cannot be reached, or was started again; nothing was counted.
    Away(String),
    /// The server was lost while it answered, so what was sent may have counted.
    Unanswered(String),
    /// An error that another attempt would meet too, or the server is lost for too long.
    Error(Error),
}

/// A fragment that was joined.
pub(crate) struct Joined {
    pub(crate) incarnation: u64,
    pub(crate) version: u64,
    /// This island's inner steps at the last changes that the server has of it; 0 if there are none.
    pub(crate) sent_after: u64,
    /// The outer parameters; `None` if they are this island's.
    pub(crate) values: Option<Vec<f32>>,
}

/// The changes of a fragment that an island sends.
pub(crate) struct Contribution {
    pub(crate) incarnation: u64,
    /// The outer step that it begins at.
    pub(crate) version: u64,
    pub(crate) examples: u64,
    /// The inner steps so far.
    pub(crate) steps: u64,
    pub(crate) int8: bool,
    pub(crate) payload: Bytes,
}

/// A server's answer to changes.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) version: u64,
    pub(crate) late: u64,
    pub(crate) refused: bool,
    pub(crate) refusals: u64,
    /// The outer parameters, unless the island has the newest.
    pub(crate) values: Option<Vec<f32>>,
}

impl Island {
    /// Attends on all servers.
    ///
    /// # Errors
    /// [`Error::Unreachable`] for a server that does not appear in time, [`Error::Refused`] if one does not accept the
    /// settings, [`Error::Secret`] if it does not have the same secret, [`Error::Threads`].
    pub(crate) fn connect(
        job: &OwnJob,
        task: Task,
        addresses: &[String],
        settings: OuterSettings,
        times: Times,
    ) -> Result<Island> {
        let threads = Threads::start("island", 1).map_err(Error::Threads)?;
        let server = |(index, address): (u32, &String)| {
            let addressee = Addressee { job: job.clone(), task: Task::new(TaskType::Ps, index), session: 0 };
            // The channel's tasks run on the threads.
            let _entered = threads.handle().enter();
            let link = Link::new(address, &addressee, times.silence);
            let link = link.map_err(|status| Error::refused(addressee.task, "Attend", &status))?;
            Ok(Mutex::new(Server { index, address: address.clone(), link, seat: None, heard: Instant::now() }))
        };
        let servers = (0..).zip(addresses).map(server).collect::<Result<Vec<_>>>()?;
        let has_failed = Mutex::new(false);
        let island = Island { task, process: incarnation(), settings, times, servers, has_failed, threads };
        for server in &island.servers {
            island.block_on(island.first_seat(&mut server.lock()))?;
        }
        Ok(island)
    }

    /// Returns the process of a server, on which this island attends.
    pub(crate) fn incarnation(&self, server: usize) -> Result<u64, Failure> {
        let mut server = self.servers[server].lock();
        let seat = self.block_on(self.seat(&mut server));
        seat.map(|(incarnation, _)| incarnation).map_err(|status| self.failure(&server, "Attend", &status, false))
    }

    /// Joins a fragment. If the server does not have it, it gets this island's outer parameters, which `values`
    /// returns; else this island gets those of the server.
    pub(crate) fn join(
        &self,
        server: usize,
        fragment: u32,
        variables: &[OuterVariable],
        values: impl FnOnce() -> Result<Vec<f32>>,
    ) -> Result<Joined, Failure> {
        let (index, mut server) = (server, self.servers[server].lock());
        let timeout = self.times.message;
        let of = |caller: Caller| Fragment { caller: Some(caller), fragment, variables: variables.to_vec() };
        let join = async |link: &Link, caller| link.call(outer!("Join"), of(caller), timeout).await;
        let (mut incarnation, mut state): (u64, FragmentState) = self.call(&mut server, "Join", None, join)?;
        if !state.held {
            let payload = numbers::to_bytes(values().map_err(Failure::Error)?);
            let create = async |link: &Link, caller: Caller| {
                let first = of(caller);
                let parts = parts_of(payload.clone()).enumerate().map(|(at, (payload, more))| CreateFragment {
                    fragment: (at == 0).then(|| first.clone()),
                    more,
                    payload,
                });
                link.tell(outer!("Create"), parts.collect(), timeout).await
            };
            (incarnation, state) = self.call(&mut server, "Create", Some(incarnation), create)?;
            if !state.held {
                return Ok(Joined { incarnation, version: state.version, sent_after: 0, values: None });
            }
        }
        drop(server);
        let payload = Bytes::new();
        let nothing = Contribution { incarnation, version: 0, examples: 0, steps: 0, int8: false, payload };
        let len = variables.iter().map(|variable| variable.len as usize).sum();
        let Answer { version, values, .. } = self.exchange(index, (fragment, len), &nothing)?;
        Ok(Joined { incarnation, version, sent_after: state.sent_after, values })
    }

    /// Sends changes of a fragment with this number of elements, or without examples asks for the newest values.
    pub(crate) fn exchange(
        &self,
        server: usize,
        (fragment, len): (u32, usize),
        sent: &Contribution,
    ) -> Result<Answer, Failure> {
        let mut server = self.servers[server].lock();
        // What a server waits for the quorum, and then for the window to close.
        let waits = Duration::from_micros(self.settings.grace_us).saturating_mul(2);
        let timeout = self.times.message.saturating_add(waits);
        let exchange = async |link: &Link, caller: Caller| {
            let about = Changes {
                fragment,
                version: sent.version,
                examples: sent.examples,
                steps: sent.steps,
                int8: sent.int8,
                ..Changes::default()
            };
            let message = |(payload, more)| Changes { caller: Some(caller.clone()), more, payload, ..about.clone() };
            let messages = parts_of(sent.payload.clone()).map(message).collect();
            let mut replies = link.ask(outer!("Exchange"), messages, timeout).await?;
            let (mut first, mut parts) = (None, Parts::up_to(len * size_of::<f32>()));
            while let Some(mut reply) = replies.next::<OuterValues>(timeout).await? {
                parts.push(std::mem::take(&mut reply.payload))?;
                first.get_or_insert(reply);
            }
            answer_of(first, parts, len)
        };
        Ok(self.call(&mut server, "Exchange", Some(sent.incarnation), exchange)?.1)
    }

    /// Makes a call as an island that attends, to this incarnation of the server if one is given. Attends again if the
    /// server has given this island up.
    fn call<R>(
        &self,
        server: &mut Server,
        name: &'static str,
        incarnation: Option<u64>,
        call: impl AsyncFn(&Link, Caller) -> Result<R, Status>,
    ) -> Result<(u64, R), Failure> {
        let mut attempts = 0..2;
        loop {
            let seat = self.block_on(self.seat(server));
            let (now, seat) = seat.map_err(|status| self.failure(server, "Attend", &status, false))?;
            if incarnation.is_some_and(|expected| expected != now) {
                return Err(Failure::Away("it was started again".to_owned()));
            }
            let caller = Caller { island: self.task.to_string(), seat };
            attempts.next();
            match self.block_on(call(&server.link, caller)) {
                Ok(answer) => {
                    server.heard = Instant::now();
                    return Ok((now, answer));
                }
                // Nothing was done for an island that does not attend.
                Err(status) if status.code() == Code::NotFound && !attempts.is_empty() => server.seat = None,
                Err(status) => return Err(self.failure(server, name, &status, true)),
            }
        }
    }

    /// Attends on a server for the first time, and waits for it to appear.
    async fn first_seat(&self, server: &mut Server) -> Result<()> {
        let started = Instant::now();
        loop {
            match self.seat(server).await {
                Ok(_) => return Ok(()),
                Err(status) if is_lost(&status) && started.elapsed() < self.times.connect => {
                    tokio::time::sleep(BETWEEN_ATTEMPTS).await;
                }
                Err(status) if is_lost(&status) => {
                    return Err(Error::Unreachable {
                        task: Task::new(TaskType::Ps, server.index),
                        address: server.address.clone(),
                        waited: started.elapsed(),
                        last: status.message().to_owned(),
                    });
                }
                Err(status) => return Err(Error::refused(Task::new(TaskType::Ps, server.index), "Attend", &status)),
            }
        }
    }

    /// Returns the server's process and the attendance on it, which begins if there is none.
    async fn seat(&self, server: &mut Server) -> Result<(u64, u64), Status> {
        if let Some(seat) = server.seat.as_ref().filter(|seat| !seat.watch.is_finished()) {
            return Ok((seat.incarnation, seat.number));
        }
        server.seat = None;
        let request =
            AttendIsland { island: self.task.to_string(), settings: Some(self.settings), process: self.process };
        // It is answered at once, so a server that is silent for longer is frozen.
        let timeout = self.times.message.min(self.times.silence);
        let attended = server.link.attend::<_, IslandState>(outer!("Attend"), request, timeout).await;
        let (IslandState { incarnation, seat: number }, mut attendance) = attended?;
        let watch = tokio::spawn(async move { attendance.over().await });
        server.heard = Instant::now();
        server.seat = Some(Seat { incarnation, number, watch });
        Ok((incarnation, number))
    }

    /// Returns the failure that a status means; `begun` if what was sent may have been taken.
    fn failure(&self, server: &Server, call: &'static str, status: &Status, begun: bool) -> Failure {
        let error = match is_lost(status) {
            true if server.heard.elapsed() < self.times.server => {
                let why = status.message().to_owned();
                return if begun { Failure::Unanswered(why) } else { Failure::Away(why) };
            }
            true => Error::OuterServerLost {
                server: server.index,
                address: server.address.clone(),
                waited: server.heard.elapsed(),
                why: status.message().to_owned(),
            },
            false => Error::refused(Task::new(TaskType::Ps, server.index), call, status),
        };
        *self.has_failed.lock() = true;
        Failure::Error(error)
    }

    fn block_on<T>(&self, call: impl Future<Output = T>) -> T {
        self.threads.block_on(call)
    }
}

impl Drop for Island {
    fn drop(&mut self) {
        let done = !*self.has_failed.lock() && !std::thread::panicking();
        for server in &self.servers {
            let mut server = server.lock();
            let Some(seat) = server.seat.take().filter(|seat| !seat.watch.is_finished()) else { continue };
            let caller = Some(Caller { island: self.task.to_string(), seat: seat.number });
            let timeout = self.times.message.min(LEAVING);
            let left = server.link.call::<Done>(outer!("Leave"), LeaveIsland { caller, done }, timeout);
            if let Err(status) = self.block_on(left) {
                // It notices that the attendance ends.
                tracing::warn!("ps:{} was not told that {} leaves: {}", server.index, self.task, status.message());
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

/// Reads an answer to changes of a fragment with this number of elements.
fn answer_of(first: Option<OuterValues>, parts: Parts, len: usize) -> Result<Answer, Status> {
    let wrong = |problem: &str| Status::data_loss(problem.to_owned());
    let first = first.ok_or_else(|| wrong("it has not answered"))?;
    let mut values = None;
    if first.newer {
        let mut all = vec![0.0f32; len];
        if !parts.copy_to(bytemuck::cast_slice_mut(&mut all)) {
            return Err(wrong("it has sent another number of values than the fragment has"));
        }
        values = Some(all);
    }
    let OuterValues { version, late, refused, refusals, .. } = first;
    Ok(Answer { version, late, refused, refusals, values })
}

/// How long a server is told that this island leaves.
const LEAVING: Duration = Duration::from_secs(2);

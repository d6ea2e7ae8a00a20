//! Variables on parameter servers, as workers and the coordinator use them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_cluster::threads::{self, EventLoop};
use distribute_cluster::{Task, TaskType};
use distribute_device::DType;
use futures_util::future::join_all;
use futures_util::stream::{select_all, try_unfold};
use futures_util::{Stream, StreamExt, TryFutureExt};
use parking_lot::{Mutex, RwLock};
use tonic::Status;

use crate::numbers;
use crate::wire::proto::{
    AssignRequest, DescribeRequest, Description, Done, Elements, Origin, PullRequest, PushReply, PushRequest, Wanted,
};
use crate::wire::{Addressee, Link, MAX_PAYLOAD_BYTES, OwnJob, ps};
use crate::{Error, Result};

mod gradient;
mod lookup;
mod pieces;
mod table;

pub use self::gradient::Gradient;
pub(crate) use self::table::Table;
pub use self::table::{ShardInfo, VariableInfo};

/// Connections to all parameter servers.
#[derive(Debug)]
pub(crate) struct Parameters {
    addresses: Vec<String>,
    links: Vec<Link>,
    /// Dropped after the links, whose tasks it runs.
    runner: Runner,
    session: u64,
    wire: Option<DType>,
    message_timeout: Duration,
    table: RwLock<Arc<Table>>,
    /// Whether servers have kept variables that the coordinator cannot assign yet.
    pub(crate) sealed: AtomicBool,
    pulled_bytes: AtomicU64,
    pushed_bytes: AtomicU64,
    /// The last server that was lost, or cancelled a call of this task.
    noted: Mutex<Option<Error>>,
}

/// The event loop that runs the tasks of the links.
#[derive(Debug)]
pub(crate) enum Runner {
    /// Threads of the coordinator, which has other tasks too.
    Coordinator(tokio::runtime::Handle),
    /// The thread of a worker that calls: its changes belong to functions.
    Worker(EventLoop),
}

impl Runner {
    fn handle(&self) -> &tokio::runtime::Handle {
        match self {
            Runner::Coordinator(handle) => handle,
            Runner::Worker(event_loop) => event_loop.handle(),
        }
    }
}

/// The versions of variables that a caller has.
#[derive(Debug, Default)]
pub struct Versions {
    /// The process of each server that has answered last.
    incarnations: HashMap<usize, u64>,
    /// The process that a shard's version is of, and the version.
    shards: HashMap<u32, (u64, u64)>,
}

/// Bytes of elements that a worker has transferred since its coordinator attached, excluding protocol overhead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Fetched from servers.
    pub pulled_bytes: u64,
    /// Gradients sent to servers.
    pub pushed_bytes: u64,
}

impl Versions {
    /// Returns the version of a shard; 0 for none, and for one of an earlier process of its server, which says nothing
    /// to the current one.
    fn of(&self, shard: &ShardInfo) -> u64 {
        match (self.incarnations.get(&shard.server), self.shards.get(&shard.number)) {
            (Some(current), Some((incarnation, version))) if current == incarnation => *version,
            _ => 0,
        }
    }
}

/// Receives elements: the index of the variable in the request, the position in it, their type and their bytes.
type ShowElements<'a> = dyn FnMut(usize, usize, DType, &[u8]) -> Result<()> + 'a;

/// Maximum number of shards or slots in one request.
const WANTED_IN_REQUEST: usize = 8192;

impl Parameters {
    pub(crate) fn new(
        runner: Runner,
        job: &OwnJob,
        addresses: &[String],
        session: u64,
        wire: Option<DType>,
        (silence, message_timeout): (Duration, Duration),
    ) -> Result<Parameters> {
        // A link must be created inside the runtime.
        let inside = runner.handle().enter();
        let links = addresses.iter().enumerate().map(|(server, address)| {
            let addressee = Addressee { job: job.clone(), task: Task::new(TaskType::Ps, server as u32), session };
            Link::new(address, &addressee, silence)
                .map_err(|status| Error::of_server(server, address, "connect", status))
        });
        let links = links.collect::<Result<_>>()?;
        drop(inside);
        let addresses = addresses.to_vec();
        Ok(Parameters {
            addresses,
            links,
            runner,
            session,
            wire,
            message_timeout,
            table: RwLock::default(),
            sealed: AtomicBool::new(false),
            pulled_bytes: AtomicU64::new(0),
            pushed_bytes: AtomicU64::new(0),
            noted: Mutex::default(),
        })
    }

    /// Returns whether a worker uses them.
    pub(crate) fn are_of_worker(&self) -> bool {
        matches!(self.runner, Runner::Worker(_))
    }

    pub(crate) fn session(&self) -> u64 {
        self.session
    }

    pub(crate) fn servers(&self) -> usize {
        self.links.len()
    }

    pub(crate) fn link(&self, server: usize) -> &Link {
        &self.links[server]
    }

    pub(crate) fn address(&self, server: usize) -> &str {
        &self.addresses[server]
    }

    /// Runs a call from a thread outside the runtime, which may run an event loop of its own.
    pub(crate) fn block_on<T>(&self, call: impl Future<Output = T>) -> T {
        match &self.runner {
            Runner::Coordinator(handle) => threads::block_on(handle, call),
            Runner::Worker(event_loop) => event_loop.drive(call),
        }
    }

    pub(crate) fn runtime(&self) -> &tokio::runtime::Handle {
        self.runner.handle()
    }

    pub(crate) fn message_timeout(&self) -> Duration {
        self.message_timeout
    }

    pub(crate) fn failed(&self, server: usize, call: &'static str) -> impl Fn(Status) -> Error + '_ {
        move |status| note(&self.noted, Error::of_server(server, self.address(server), call, status))
    }

    /// Returns the error for a server that has not answered since `started`.
    pub(crate) fn unreachable(&self, server: usize, started: Instant, last: &Status) -> Error {
        Error::Unreachable {
            task: Task::new(TaskType::Ps, server as u32),
            address: self.address(server).to_owned(),
            waited: started.elapsed(),
            last: last.message().to_owned(),
        }
    }

    /// Returns the bytes transferred so far.
    pub(crate) fn traffic(&self) -> Traffic {
        let (pulled_bytes, pushed_bytes) = (&self.pulled_bytes, &self.pushed_bytes);
        Traffic {
            pulled_bytes: pulled_bytes.load(Ordering::Relaxed),
            pushed_bytes: pushed_bytes.load(Ordering::Relaxed),
        }
    }

    /// Takes the last error by which a server could not be used, if any. It is kept here because libraries in between
    /// may convert the error that a call returned.
    pub(crate) fn take_noted(&self) -> Option<Error> {
        self.noted.lock().take()
    }

    pub(crate) fn table(&self) -> Arc<Table> {
        self.table.read().clone()
    }

    pub(crate) fn set_table(&self, table: Table) {
        *self.table.write() = Arc::new(table);
    }

    /// Returns a variable by its name.
    pub(crate) async fn variable(&self, name: &str) -> Result<Arc<VariableInfo>> {
        if let Some(variable) = self.table().variables.get(name) {
            return Ok(variable.clone());
        }
        self.refresh().await?;
        let table = self.table();
        table.variables.get(name).cloned().ok_or_else(|| {
            let known: Vec<&str> = table.variables.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            Error::UnknownVariable { name: name.to_owned(), known }
        })
    }

    /// Requests the descriptions of all servers.
    pub(crate) async fn describe(&self) -> Result<Vec<Description>> {
        let mut all = Vec::new();
        for (server, link) in self.links.iter().enumerate() {
            let request = DescribeRequest { session: self.session };
            let description = link.call::<Description>(ps!("Describe"), request, self.message_timeout).await;
            all.push(description.map_err(self.failed(server, "Describe"))?);
        }
        Ok(all)
    }

    /// Refreshes the table of variables.
    pub(crate) async fn refresh(&self) -> Result<()> {
        self.set_table(Table::of(&self.describe().await?)?);
        Ok(())
    }

    /// Fetches the elements that have changed since `versions`, and passes them to `show`, outside of the event loop:
    /// that may use variables itself.
    pub(crate) fn pull(
        &self,
        versions: &mut Versions,
        variables: &[Arc<VariableInfo>],
        show: &mut ShowElements<'_>,
    ) -> Result<()> {
        let mut wanted: Vec<Vec<Wanted>> = vec![Vec::new(); self.links.len()];
        let mut places = HashMap::new();
        for (place, variable) in variables.iter().enumerate() {
            for shard in &variable.shards {
                let version = versions.of(shard);
                wanted[shard.server].push(Wanted { shard: shard.number, version, ..Wanted::default() });
                let row_len = variable.row_len();
                places.insert(shard.number, (place, shard.rows.start * row_len, (shard.rows.len() * row_len) as u64));
            }
        }
        let requests = wanted.into_iter().enumerate().map(|(server, wanted)| {
            let incarnation = versions.incarnations.get(&server).copied().unwrap_or(0);
            PullRequest { incarnation, wanted, ..self.pull_request() }
        });
        let mut arrivals = self.fetch(requests.collect());
        let mut next = HashMap::new();
        while let Some(arrival) = self.block_on(arrivals.next()) {
            let (server, elements) = arrival?;
            let dtype = self.dtype_of(server, &elements)?;
            let next = next.entry(elements.shard).or_insert(0);
            self.check_order(server, &elements, dtype, next)?;
            versions.incarnations.insert(server, elements.incarnation);
            let Some((place, start, len)) = places.get(&elements.shard) else { continue };
            if !elements.more && next != len {
                return Err(self.failed(server, "Pull")(Status::internal("it sent fewer elements than its shard has")));
            }
            show(*place, start.saturating_add(elements.first as usize), dtype, &elements.payload)?;
            // While elements are still to come, the part here belongs to no version.
            match elements.more {
                true => drop(versions.shards.remove(&elements.shard)),
                false => drop(versions.shards.insert(elements.shard, (elements.incarnation, elements.version))),
            }
        }
        Ok(())
    }

    /// Checks that a message continues the answer; `next` elements of it have arrived.
    fn check_order(&self, server: usize, elements: &Elements, dtype: DType, next: &mut u64) -> Result<()> {
        let wrong = |problem: &str| Err(self.failed(server, "Pull")(Status::internal(problem)));
        if !elements.payload.len().is_multiple_of(dtype.size_bytes()) {
            return wrong("it sent a part of an element");
        }
        if elements.first != *next {
            return wrong("it left a part of its answer out");
        }
        *next += (elements.payload.len() / dtype.size_bytes()) as u64;
        Ok(())
    }

    /// Fetches a slot of a variable, or with an empty name the variable itself, in its own type.
    pub(crate) async fn whole(&self, variable: &VariableInfo, slot: &str) -> Result<Vec<u8>> {
        let size = variable.dtype.size_bytes();
        let row_bytes = variable.row_len() * size;
        let len_bytes = variable.rows() * row_bytes;
        let wrong = |problem: String| Error::Variable { name: variable.name.clone(), problem };
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len_bytes).map_err(|_| {
            wrong(format!("it has {len_bytes} bytes, for which there is no room here; read it by rows"))
        })?;
        bytes.resize(len_bytes, 0);
        let mut requests: Vec<PullRequest> =
            self.links.iter().map(|_| PullRequest { wire: None, ..self.pull_request() }).collect();
        // By shard: the range of its elements, and how many have arrived.
        let mut coming = BTreeMap::new();
        for shard in &variable.shards {
            let wanted = Wanted { shard: shard.number, slot: slot.to_owned(), ..Wanted::default() };
            requests[shard.server].wanted.push(wanted);
            coming.insert(shard.number, (shard.rows.start * row_bytes..shard.rows.end * row_bytes, 0u64));
        }
        let mut arrivals = self.fetch(requests);
        while let Some(arrival) = arrivals.next().await {
            let (server, elements) = arrival?;
            let Some((range, next)) = coming.get_mut(&elements.shard) else { continue };
            let start = (*next as usize).saturating_mul(size);
            self.check_order(server, &elements, variable.dtype, next)?;
            let place = bytes[range.clone()].get_mut(start..).and_then(|rest| rest.get_mut(..elements.payload.len()));
            let fits = elements.dtype == u32::from(variable.dtype.code())
                && place
                    .is_some_and(|place| numbers::copy_into(&elements.payload, variable.dtype, place, variable.dtype));
            if !fits {
                return Err(wrong("a server sent another number of elements than it has".to_owned()));
            }
        }
        if coming.values().any(|(range, next)| *next != (range.len() / size) as u64) {
            return Err(wrong("a server sent fewer elements than it has".to_owned()));
        }
        Ok(bytes)
    }

    /// Sends gradients to the servers on which the optimizer updates something; returns whether they counted on all of
    /// them, and whether one of them had counted them in an earlier round.
    pub(crate) async fn push(&self, origin: &Origin, optimizer: u32, gradients: &[Gradient]) -> Result<(bool, bool)> {
        let table = self.table();
        let servers = match table.optimizers.get(&optimizer) {
            Some(servers) => servers.clone(),
            None => {
                self.refresh().await?;
                self.table().optimizers.get(&optimizer).cloned().unwrap_or_default()
            }
        };
        let mut requests: BTreeMap<usize, Vec<PushRequest>> =
            servers.into_iter().map(|server| (server, Vec::new())).collect();
        for gradient in gradients {
            for (server, request) in gradient.cut(self.wire)? {
                self.pushed_bytes.fetch_add(request.payload.len() as u64, Ordering::Relaxed);
                let parts = parts_with_rows(request.rows.clone(), request.payload.clone());
                let message = |(rows, payload, more)| PushRequest { rows, payload, more, ..request.clone() };
                requests.entry(server).or_default().extend(parts.into_iter().map(message));
            }
        }
        let head = PushRequest { origin: Some(origin.clone()), optimizer, ..PushRequest::default() };
        let pushes = requests.into_iter().map(async |(server, gradients)| {
            let messages = [vec![head.clone()], gradients].concat();
            let reply = self.links[server].tell::<_, PushReply>(ps!("Push"), messages, self.message_timeout).await;
            reply.map_err(self.failed(server, "Push"))
        });
        let replies = join_all(pushes).await.into_iter().collect::<Result<Vec<PushReply>>>()?;
        Ok((replies.iter().all(|reply| reply.counted), replies.iter().any(|reply| reply.earlier)))
    }

    /// Changes all elements, or some rows.
    pub(crate) async fn assign(
        &self,
        origin: &Origin,
        variable: &VariableInfo,
        operation: u32,
        rows: Option<&[usize]>,
        elements: &Bytes,
    ) -> Result<()> {
        let row_bytes = variable.row_len() * variable.dtype.size_bytes();
        let mut requests: BTreeMap<usize, Vec<AssignRequest>> = BTreeMap::new();
        for shard in &variable.shards {
            let about = AssignRequest {
                origin: Some(origin.clone()),
                shard: shard.number,
                dtype: variable.dtype.code().into(),
                operation,
                ..AssignRequest::default()
            };
            let messages = requests.entry(shard.server).or_default();
            let mut tell = |part: u32, rows: Option<Bytes>, payload: Bytes| {
                let message = |(rows, payload, more)| AssignRequest { rows, payload, more, part, ..about.clone() };
                messages.extend(parts_with_rows(rows, payload).into_iter().map(message));
            };
            let Some(rows) = rows else {
                tell(0, None, elements.slice(shard.rows.start * row_bytes..shard.rows.end * row_bytes));
                continue;
            };
            // In order, since a row may be written more than once.
            let here: Vec<(usize, usize)> =
                rows.iter().copied().enumerate().filter(|(_, row)| shard.rows.contains(row)).collect();
            let at_once = (MAX_PAYLOAD_BYTES / row_bytes.max(size_of::<u64>())).max(1);
            for (part, some) in (0..).zip(here.chunks(at_once)) {
                let numbers = some.iter().map(|(_, row)| (row - shard.rows.start) as u64);
                let of_row = |(place, _): &(usize, usize)| &elements[place * row_bytes..(place + 1) * row_bytes];
                let values: Vec<u8> = some.iter().flat_map(of_row).copied().collect();
                tell(part, Some(numbers::rows_to_bytes(numbers)), Bytes::from(values));
            }
        }
        requests.retain(|_, messages| !messages.is_empty());
        for (server, requests) in requests {
            let reply = self.links[server].tell::<_, Done>(ps!("Assign"), requests, self.message_timeout).await;
            reply.map_err(self.failed(server, "Assign"))?;
        }
        Ok(())
    }

    fn pull_request(&self) -> PullRequest {
        let wire = self.wire.map(|wire| wire.code().into());
        PullRequest { session: self.session, wire, ..PullRequest::default() }
    }

    /// Sends the requests, indexed by server, to all servers at once; yields the elements as they arrive.
    fn fetch(&self, requests: Vec<PullRequest>) -> impl Stream<Item = Result<(usize, Elements)>> {
        let asked = requests.into_iter().enumerate().flat_map(|(server, mut request)| {
            let mut wanted = std::mem::take(&mut request.wanted);
            let mut some = Vec::new();
            while !wanted.is_empty() {
                let rest = wanted.split_off(wanted.len().min(WANTED_IN_REQUEST));
                some.push((server, PullRequest { wanted, ..request.clone() }));
                wanted = rest;
            }
            some
        });
        let of_server = |(server, request): (usize, PullRequest)| {
            let begin = self.links[server].ask(ps!("Pull"), vec![request], self.message_timeout);
            let replies = begin.map_ok(move |replies| {
                try_unfold(replies, async move |mut replies| {
                    let next = replies.next::<Elements>(self.message_timeout).await?;
                    Ok(next.map(|elements| (elements, replies)))
                })
            });
            let elements = replies.try_flatten_stream().map(move |elements| {
                let elements: Elements = elements.map_err(self.failed(server, "Pull"))?;
                self.pulled_bytes.fetch_add(elements.payload.len() as u64, Ordering::Relaxed);
                Ok((server, elements))
            });
            elements.boxed_local()
        };
        select_all(asked.map(of_server))
    }

    fn dtype_of(&self, server: usize, elements: &Elements) -> Result<DType> {
        numbers::dtype(elements.dtype)
            .ok_or_else(|| self.failed(server, "Pull")(Status::internal("it sent elements of an unknown type")))
    }
}

/// Splits a shard's elements, or those of some rows, into the parts of several messages, each with whether more follow.
fn parts_with_rows(rows: Option<Bytes>, payload: Bytes) -> Vec<(Option<Bytes>, Bytes, bool)> {
    let (mut rows, mut payload, mut parts) = (rows, payload, Vec::new());
    // Rows and payload are joined separately, so they need not be split at the same row.
    let limit = if rows.is_some() { MAX_PAYLOAD_BYTES / 2 } else { MAX_PAYLOAD_BYTES };
    let cut = |bytes: &mut Bytes| bytes.split_to(bytes.len().min(limit));
    loop {
        let some = rows.as_mut().map(cut);
        let part = cut(&mut payload);
        let more = !payload.is_empty() || rows.as_ref().is_some_and(|rows| !rows.is_empty());
        parts.push((some, part, more));
        if !more {
            return parts;
        }
    }
}

/// Remembers an error that is not the caller's.
fn note(noted: &Mutex<Option<Error>>, error: Error) -> Error {
    if matches!(error, Error::ServerLost { .. } | Error::Cancelled { .. }) {
        *noted.lock() = Some(error.again());
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_of_one_process_of_their_server() {
        let [a, b] = [0, 1].map(|number| ShardInfo { server: 0, rows: 0..1, number });
        let mut versions = Versions::default();
        assert_eq!(versions.of(&a), 0);
        versions.incarnations.insert(0, 7);
        versions.shards.extend([(0, (7, 3)), (1, (7, 4))]);
        assert_eq!((versions.of(&a), versions.of(&b)), (3, 4));
        // The server was started again, and the first variable alone was fetched since.
        versions.incarnations.insert(0, 8);
        versions.shards.insert(0, (8, 4));
        assert_eq!((versions.of(&a), versions.of(&b)), (4, 0));
    }
}

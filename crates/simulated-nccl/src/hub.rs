//! The meeting point of a communicator's ranks: a listening socket in the process that created the id.

mod group;

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nccl_sys::{Code, UniqueId};

use crate::failure::Failure;
use crate::wire::{self, Answer, Request};
use group::{Group, Reply};

/// Hubs of this process that are still serving.
static HUBS: LazyLock<Mutex<HashMap<u128, Arc<Hub>>>> = LazyLock::new(Mutex::default);

struct Hub {
    token: u128,
    port: u16,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Ranks that have joined, until all have.
    joined: BTreeMap<u32, Joined>,
    ranks: Option<u32>,
    full: bool,
    connections: HashMap<u64, Connection>,
    last_connection: u64,
    groups: HashMap<u64, Group>,
    last_group: u64,
}

struct Joined {
    connection: u64,
    device: Option<String>,
    shared_devices: bool,
}

struct Connection {
    answers: Sender<Outgoing>,
    process: u32,
}

/// An answer and its data.
type Outgoing = (Answer, Arc<Vec<u8>>);

/// Starts a hub and returns its id.
pub(crate) fn start() -> io::Result<UniqueId> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let token = [(); 2].map(|()| u128::from(RandomState::new().hash_one(port)));
    let token = token[0] << 64 | token[1];
    let hub = Arc::new(Hub { token, port, state: Mutex::default(), changed: Condvar::new() });
    thread::Builder::new().name("nccl-hub".into()).spawn({
        let hub = Arc::clone(&hub);
        move || hub.accept(&listener)
    })?;
    HUBS.lock().unwrap_or_else(PoisonError::into_inner).insert(token, hub);

    let mut bytes = [0; UniqueId::BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..10].copy_from_slice(&port.to_le_bytes());
    bytes[16..32].copy_from_slice(&token.to_le_bytes());
    Ok(UniqueId::from_bytes(bytes))
}

/// Returns the port and the token of an id's hub; `None` if the bytes are not an id.
pub(crate) fn address(id: &UniqueId) -> Option<(u16, u128)> {
    let bytes = id.as_bytes();
    let port = bytes[8..10].try_into().map(u16::from_le_bytes).ok()?;
    let token = bytes[16..32].try_into().map(u128::from_le_bytes).ok()?;
    (&bytes[..8] == MAGIC).then_some((port, token))
}

/// Waits until no other process uses a hub of this process, which would end with the process.
pub(crate) fn linger(token: u128, limit: Duration) {
    let hub = HUBS.lock().unwrap_or_else(PoisonError::into_inner).get(&token).cloned();
    let Some(hub) = hub else { return };
    let deadline = Instant::now() + limit;
    let mut state = hub.lock();
    while state.connections.values().any(|connection| connection.process != std::process::id()) {
        let Some(left) = deadline.checked_duration_since(Instant::now()) else { return };
        state = hub.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts connections until every rank has joined.
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming() {
            if self.lock().full {
                return;
            }
            let Ok(stream) = stream else { continue };
            let hub = Arc::clone(self);
            // Without a thread the connection is dropped, and its end tells the rank.
            let _ = thread::Builder::new().name("nccl-hub-reader".into()).spawn(move || hub.serve(stream));
        }
    }

    fn serve(&self, mut stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let Ok((hello, _)) = wire::read(&mut stream) else { return };
        let Ok(mut writer) = stream.try_clone() else { return };
        let connection = match self.hello(hello) {
            Ok((connection, answers)) => {
                let write = move || {
                    while let Ok((answer, data)) = answers.recv() {
                        if wire::write(&mut writer, &answer, &data).is_err() {
                            return;
                        }
                    }
                };
                if thread::Builder::new().name("nccl-hub-writer".into()).spawn(write).is_err() {
                    return self.lost(connection);
                }
                connection
            }
            Err(failure) => {
                let _ = wire::write(&mut writer, &Answer::Hello(Err(failure)), &[]);
                return;
            }
        };
        while let Ok((request, data)) = wire::read(&mut stream) {
            self.handle(connection, request, data);
        }
        self.lost(connection);
    }

    /// Adds a rank; the last one completes the communicator.
    fn hello(&self, hello: Request) -> Result<(u64, Receiver<Outgoing>), Failure> {
        let Request::Hello { token, ranks, rank, device, shared_devices, process } = hello else {
            return Err(Failure::argument("the first words are not a greeting"));
        };
        let mut state = self.lock();
        let expected = *state.ranks.get_or_insert(ranks);
        if token != self.token || state.full {
            return Err(Failure::argument("the unique id is not of this communicator, or was used before"));
        }
        if expected != ranks || rank >= ranks || state.joined.contains_key(&rank) {
            let text =
                format!("rank {rank} of {ranks} does not fit the {expected} ranks expected, or connected before");
            return Err(Failure::new(Code::INVALID_USAGE, text));
        }
        state.last_connection += 1;
        let connection = state.last_connection;
        let (answers, receiver) = mpsc::channel();
        state.connections.insert(connection, Connection { answers, process });
        state.joined.insert(rank, Joined { connection, device, shared_devices });
        if state.joined.len() == ranks as usize {
            state.complete();
            drop(state);
            // Wakes the accepting thread, which then ends.
            let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        }
        Ok((connection, receiver))
    }

    fn handle(&self, connection: u64, request: Request, data: Vec<u8>) {
        let id = match &request {
            Request::Collective { group, .. }
            | Request::Send { group, .. }
            | Request::Recv { group, .. }
            | Request::Split { group, .. }
            | Request::Shrink { group, .. }
            | Request::Leave { group, .. } => *group,
            Request::Hello { .. } => return,
        };
        let mut state = self.lock();
        let state = &mut *state;
        let Some(group) = state.groups.get_mut(&id) else { return };
        let Some(rank) = group.rank_of(connection) else { return };
        let (replies, formed) = group.handle(rank, request, data, &mut state.last_group);
        if group.is_over() {
            state.groups.remove(&id);
        }
        state.groups.extend(formed.into_iter().map(|group| (group.id(), group)));
        state.send(replies);
    }

    /// Handles the end of a connection: every group that it has not left breaks.
    fn lost(&self, connection: u64) {
        let mut state = self.lock();
        state.connections.remove(&connection);
        if !state.full {
            state.joined.retain(|_, joined| joined.connection != connection);
        }
        let replies: Vec<_> = state.groups.values_mut().flat_map(|group| group.lost(connection)).collect();
        state.groups.retain(|_, group| !group.is_over());
        state.send(replies);
        self.changed.notify_all();
        if state.full && state.connections.is_empty() {
            HUBS.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.token);
        }
    }
}

impl State {
    fn send(&self, replies: Vec<Reply>) {
        for reply in replies {
            if let Some(connection) = self.connections.get(&reply.connection) {
                // Fails if the rank has ended.
                let _ = connection.answers.send((reply.answer, reply.data));
            }
        }
    }

    /// Forms the communicator of all ranks, unless two share a device.
    fn complete(&mut self) {
        self.full = true;
        let connections = self.joined.values().map(|joined| joined.connection).collect();
        let answer = match self.duplicate() {
            Some(failure) => Answer::Hello(Err(failure)),
            None => {
                self.last_group += 1;
                self.groups.insert(self.last_group, Group::new(self.last_group, connections));
                Answer::Hello(Ok(self.last_group))
            }
        };
        let to = self.joined.values().map(|joined| joined.connection);
        self.send(to.map(|connection| Reply { connection, answer: answer.clone(), data: Arc::default() }).collect());
    }

    fn duplicate(&self) -> Option<Failure> {
        let mut first = HashMap::new();
        for (rank, joined) in &self.joined {
            let Some(device) = joined.device.as_deref().filter(|_| !joined.shared_devices) else { continue };
            if let Some(other) = first.insert(device, rank) {
                let text =
                    format!("Duplicate GPU detected : rank {other} and rank {rank} both on CUDA device {device}");
                return Some(Failure::new(Code::INVALID_USAGE, text));
            }
        }
        None
    }
}

const MAGIC: &[u8; 8] = b"SIMNCCL1";

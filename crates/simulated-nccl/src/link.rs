//! A rank's connection to the hub. Communicators that are split off share it.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nccl_sys::Code;

use crate::failure::Failure;
use crate::wire::{self, Answer, Membership, Request};

/// A connection, and the thread that reads it.
pub(crate) struct Link {
    pub(crate) token: u128,
    stream: TcpStream,
    writer: Mutex<TcpStream>,
    inbox: Arc<Inbox>,
    last_tag: AtomicU64,
}

/// The messages received from the hub.
#[derive(Default)]
struct Inbox {
    state: Mutex<Arrived>,
    changed: Condvar,
}

#[derive(Default)]
struct Arrived {
    hello: Option<Result<u64, Failure>>,
    done: HashMap<u64, Vec<u8>>,
    members: HashMap<u64, Option<Membership>>,
    broken: HashMap<u64, Failure>,
    lost: bool,
}

/// Why a wait ended without a result.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The caller gave up.
    GivenUp,
    /// The result cannot arrive any more.
    Broken(Failure),
}

impl Link {
    /// Connects and sends `hello`.
    pub(crate) fn connect(port: u16, token: u128, hello: &Request) -> io::Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        let mut writer = stream.try_clone()?;
        let mut reader = stream.try_clone()?;
        wire::write(&mut writer, hello, &[])?;
        let inbox = Arc::new(Inbox::default());
        thread::Builder::new().name("nccl-rank".into()).spawn({
            let inbox = Arc::clone(&inbox);
            move || inbox.fill(&mut reader)
        })?;
        Ok(Self { token, stream, writer: Mutex::new(writer), inbox, last_tag: AtomicU64::new(0) })
    }

    /// Returns a new number for an answer.
    pub(crate) fn tag(&self) -> u64 {
        self.last_tag.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a request; the reader detects the loss of the hub.
    pub(crate) fn send(&self, request: &Request, data: &[u8]) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = wire::write(&mut *writer, request, data);
    }

    /// Waits until the communicator is complete.
    pub(crate) fn hello(&self, give_up: &dyn Fn() -> bool) -> Result<u64, Ended> {
        self.inbox.wait(give_up, Arrived::loss, |arrived| arrived.hello.take())?.map_err(Ended::Broken)
    }

    /// Waits for an operation's data. A communicator's failure ends the wait only if `impatient`.
    pub(crate) fn done(
        &self,
        tag: u64,
        group: u64,
        impatient: bool,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<u8>, Ended> {
        let broken = |arrived: &Arrived| arrived.failure(group).filter(|_| impatient);
        self.inbox.wait(give_up, broken, |arrived| arrived.done.remove(&tag))
    }

    /// Waits for a place in a new communicator.
    pub(crate) fn member(&self, tag: u64, give_up: &dyn Fn() -> bool) -> Result<Option<Membership>, Ended> {
        self.inbox.wait(give_up, Arrived::loss, |arrived| arrived.members.remove(&tag))
    }

    /// Returns why a communicator is broken, if it is.
    pub(crate) fn failure(&self, group: u64) -> Option<Failure> {
        self.inbox.lock().failure(group)
    }

    /// Closes the connection, even during a write.
    pub(crate) fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Arrived> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fill(&self, reader: &mut TcpStream) {
        while let Ok((answer, data)) = wire::read(reader) {
            let mut arrived = self.lock();
            match answer {
                Answer::Hello(hello) => arrived.hello = Some(hello),
                Answer::Done { tag } => drop(arrived.done.insert(tag, data)),
                Answer::Member { tag, member } => drop(arrived.members.insert(tag, member)),
                Answer::Broken { group, failure } => drop(arrived.broken.entry(group).or_insert(failure)),
            }
            self.changed.notify_all();
        }
        self.lock().lost = true;
        self.changed.notify_all();
    }

    fn wait<T>(
        &self,
        give_up: &dyn Fn() -> bool,
        broken: impl Fn(&Arrived) -> Option<Failure>,
        mut take: impl FnMut(&mut Arrived) -> Option<T>,
    ) -> Result<T, Ended> {
        let mut arrived = self.lock();
        loop {
            if let Some(value) = take(&mut arrived) {
                return Ok(value);
            }
            if give_up() {
                return Err(Ended::GivenUp);
            }
            if let Some(failure) = broken(&arrived) {
                return Err(Ended::Broken(failure));
            }
            // Polls, since an abort by the caller sends no notification.
            let waited = self.changed.wait_timeout(arrived, LOOK_AGAIN);
            arrived = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Arrived {
    fn failure(&self, group: u64) -> Option<Failure> {
        self.broken.get(&group).cloned().or_else(|| self.loss())
    }

    fn loss(&self) -> Option<Failure> {
        let text = "the process that made the unique id has ended";
        self.lost.then(|| Failure::new(Code::REMOTE_ERROR, text))
    }
}

const LOOK_AGAIN: Duration = Duration::from_millis(20);

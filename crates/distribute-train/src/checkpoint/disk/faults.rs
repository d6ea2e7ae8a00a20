//! Operations that fail, tear or hang as a test determines.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Faults injected into the operations of a [`Disk`](super::Disk).
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Faults(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    fault: Fault,
    /// The number of operations so far.
    count: usize,
    no_exchange: bool,
    no_threads: bool,
    hanging: bool,
    /// The operations so far, for the message of a failing test.
    log: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) enum Fault {
    #[default]
    None,
    /// The operation with this number fails and later ones do not, like on a full disk or a lost connection.
    Fails(usize),
    /// The operation with this number and all later ones fail; a write writes half of its bytes. Simulates a killed
    /// process.
    Killed(usize),
    /// The first operation with this verb does not return.
    Hangs(&'static str),
}

impl Faults {
    pub(in super::super) fn set(&self, fault: Fault) {
        let mut state = self.0.state.lock();
        (state.fault, state.count, state.hanging) = (fault, 0, false);
        state.log.clear();
        self.0.changed.notify_all();
    }

    /// Simulates a file system that cannot exchange names.
    pub(in super::super) fn without_exchange(&self) {
        self.0.state.lock().no_exchange = true;
    }

    /// Simulates a system that starts no more threads.
    pub(in super::super) fn without_threads(&self) {
        self.0.state.lock().no_threads = true;
    }

    pub(in super::super) fn count(&self) -> usize {
        self.0.state.lock().count
    }

    pub(in super::super) fn log(&self) -> Vec<String> {
        self.0.state.lock().log.clone()
    }

    /// Waits until an operation hangs.
    pub(in super::super) fn wait_for_hanging(&self) {
        let mut state = self.0.state.lock();
        self.0.changed.wait_while_for(&mut state, |state| !state.hanging, DEADLINE);
        assert!(state.hanging, "no operation hangs: {:?}", state.log);
    }

    pub(super) fn before(&self, verb: &'static str, path: &Path) -> io::Result<()> {
        let mut state = self.0.state.lock();
        state.count += 1;
        state.log.push(format!("{verb} {}", path.display()));
        let fails = match state.fault {
            Fault::None => false,
            Fault::Fails(at) => state.count == at,
            Fault::Killed(at) => state.count >= at,
            Fault::Hangs(at) => {
                if verb == at {
                    state.hanging = true;
                    self.0.changed.notify_all();
                    let hangs = |state: &mut State| state.fault == Fault::Hangs(at);
                    self.0.changed.wait_while_for(&mut state, hangs, DEADLINE);
                }
                false
            }
        };
        if fails { Err(io::Error::other("injected")) } else { Ok(()) }
    }

    /// Returns the part of a write that still takes place in a process killed in the middle of it.
    pub(super) fn torn<'a>(&self, part: &'a [u8]) -> Option<&'a [u8]> {
        let state = self.0.state.lock();
        (state.fault == Fault::Killed(state.count + 1)).then(|| &part[..part.len() / 2])
    }

    pub(super) fn spawn(&self) -> io::Result<()> {
        let no_threads = self.0.state.lock().no_threads;
        if no_threads { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    pub(super) fn exchange(&self) -> io::Result<()> {
        let no_exchange = self.0.state.lock().no_exchange;
        if no_exchange { Err(io::ErrorKind::Unsupported.into()) } else { Ok(()) }
    }
}

/// Ends a hang that a test has not ended.
const DEADLINE: Duration = Duration::from_secs(60);

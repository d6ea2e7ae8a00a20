//! Operations that fail, tear or hang when a test says so.

use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// What happens to the operations of a [`Disk`](super::Disk).
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
    /// Operations so far.
    count: usize,
    no_exchange: bool,
    hanging: bool,
    /// What was done, for a test that says where it failed.
    log: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) enum Fault {
    #[default]
    None,
    /// The operation of this number fails, those after it do not: as a full disk or a lost connection.
    Fails(usize),
    /// The operation of this number and all after it fail; if it writes, half of it is written: as if the process were killed.
    Killed(usize),
    /// The first operation with this verb does not return.
    Hangs(&'static str),
}

impl Faults {
    pub(in super::super) fn set(&self, fault: Fault) {
        let mut state = self.0.state.lock().unwrap();
        (state.fault, state.count, state.hanging) = (fault, 0, false);
        state.log.clear();
        self.0.changed.notify_all();
    }

    /// As on a file system that does not exchange names.
    pub(in super::super) fn without_exchange(&self) {
        self.0.state.lock().unwrap().no_exchange = true;
    }

    pub(in super::super) fn count(&self) -> usize {
        self.0.state.lock().unwrap().count
    }

    pub(in super::super) fn log(&self) -> Vec<String> {
        self.0.state.lock().unwrap().log.clone()
    }

    /// Waits until an operation hangs.
    pub(in super::super) fn wait_for_hanging(&self) {
        let state = self.0.state.lock().unwrap();
        let (state, _) = self.0.changed.wait_timeout_while(state, DEADLINE, |state| !state.hanging).unwrap();
        assert!(state.hanging, "no operation hangs: {:?}", state.log);
    }

    pub(super) fn before(&self, verb: &'static str, path: &Path) -> io::Result<()> {
        let mut state = self.0.state.lock().unwrap();
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
                    drop(self.0.changed.wait_timeout_while(state, DEADLINE, hangs).unwrap());
                }
                false
            }
        };
        if fails { Err(io::Error::other("injected")) } else { Ok(()) }
    }

    /// The part of a write that still happens in a process that is killed in the middle of it.
    pub(super) fn torn<'a>(&self, part: &'a [u8]) -> Option<&'a [u8]> {
        let state = self.0.state.lock().unwrap();
        (state.fault == Fault::Killed(state.count + 1)).then(|| &part[..part.len() / 2])
    }

    pub(super) fn exchange(&self) -> io::Result<()> {
        let no_exchange = self.0.state.lock().unwrap().no_exchange;
        if no_exchange { Err(io::ErrorKind::Unsupported.into()) } else { Ok(()) }
    }
}

/// A test that forgets to end a hang ends all the same.
const DEADLINE: Duration = Duration::from_secs(60);

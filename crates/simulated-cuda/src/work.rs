//! The operations of a stream.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use crate::context::Context;
use crate::error::{Code, Result};
use crate::ffi::report;
use crate::mark::Mark;
use crate::memory::{MEMORY, MemoryKind};
use crate::module::Launch;
use crate::settings::settings;

/// One operation. A graph may run it several times.
#[derive(Clone)]
pub(crate) enum Work {
    Copy { to: (usize, MemoryKind), from: Source, bytes: usize },
    Fill { address: usize, pattern: Vec<u8>, count: usize },
    Launch(Arc<Launch>),
    Call(HostFunction),
    Free { address: usize },
    Reach(Arc<Mark>),
    Await(Arc<Mark>),
    Graph(Arc<Vec<Work>>),
}

#[derive(Clone)]
pub(crate) enum Source {
    /// Read when the copy runs.
    Address(usize, MemoryKind),
    /// Read when the copy was queued, since the caller may overwrite it at once.
    Staged(Arc<[u8]>),
}

/// A function of the caller, with its argument.
#[derive(Clone, Copy)]
pub(crate) struct HostFunction {
    pub(crate) function: extern "C" fn(*mut c_void),
    pub(crate) data: usize,
}

impl Work {
    /// Runs the operation.
    ///
    /// # Errors
    /// The error that fails the context. In a failed context operations are skipped, but marks are reached, so that
    /// waits end.
    pub(crate) fn run(&self, context: &Context) -> Result {
        if let Self::Reach(mark) = self {
            mark.reach();
            return Ok(());
        }
        if context.check().is_err() {
            return Ok(());
        }
        match self {
            Self::Copy { to, from, bytes } => {
                let from = match from {
                    Source::Address(address, place) => (*address, *place),
                    Source::Staged(staged) => (staged.as_ptr().expose_provenance(), MemoryKind::Host),
                };
                MEMORY.live().copy(*to, from, *bytes).map_err(|_| {
                    illegal(context, format_args!("copy of {bytes} bytes from {:#x} to {:#x}", from.0, to.0))
                })
            }
            Self::Fill { address, pattern, count } => {
                let bytes = pattern.len() * count;
                let filled = MEMORY.live().fill(*address, pattern, *count);
                filled.map_err(|_| illegal(context, format_args!("fill of {bytes} bytes at {address:#x}")))
            }
            Self::Launch(launch) => launch.run(context),
            Self::Call(host) => {
                (host.function)(ptr::with_exposed_provenance_mut(host.data));
                Ok(())
            }
            Self::Free { address } => {
                MEMORY.free(*address).map_err(|_| illegal(context, format_args!("free of {address:#x}")))
            }
            Self::Await(mark) => {
                if mark.wait(settings().deadline) {
                    return Ok(());
                }
                report(format_args!("device {}: an awaited event was not reached at the deadline", context.device));
                Err(Code::LAUNCH_TIMEOUT)
            }
            Self::Graph(works) => works.iter().try_for_each(|work| work.run(context)),
            Self::Reach(_) => Ok(()),
        }
    }
}

/// Reports an access to memory that is not allocated.
fn illegal(context: &Context, what: std::fmt::Arguments<'_>) -> Code {
    report(format_args!("device {}: {what}: not, or no longer, within one allocation", context.device));
    Code::ILLEGAL_ADDRESS
}

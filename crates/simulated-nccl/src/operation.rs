//! An operation of one rank: its data, and the destination of its result.
#![expect(unsafe_code, reason = "callers give memory as pointers")]

use std::slice;
use std::sync::Arc;

use nccl_sys::DataType;

use crate::comm::{Comm, Member};
use crate::failure::Failure;
use crate::link::Ended;
use crate::reduce::scale;
use crate::wire::{Call, Key, Request};

/// An operation that was issued.
pub(crate) struct Operation {
    pub(crate) comm: Arc<Comm>,
    pub(crate) member: Member,
    pub(crate) what: What,
    pub(crate) key: Key,
    pub(crate) captured: bool,
    pub(crate) data_type: DataType,
    pub(crate) count: u64,
    pub(crate) send: Source,
    pub(crate) receive: Target,
    pub(crate) factor: Option<Factor>,
}

/// The kind of operation.
#[derive(Debug, Clone, Copy)]
pub(crate) enum What {
    Collective(Call),
    Send(u32),
    Receive(u32),
}

/// Memory that is read while the operation runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    pub(crate) address: *const u8,
    pub(crate) bytes: usize,
}

/// Memory that is written when the operation ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    pub(crate) address: *mut u8,
    pub(crate) bytes: usize,
}

/// The factor that a rank's elements are multiplied by before they are summed.
#[derive(Debug, Clone)]
pub(crate) enum Factor {
    /// Read when the reduction was created.
    Value(Vec<u8>),
    /// Read while the operation runs.
    Memory(Source),
}

// SAFETY: NCCL's contract allows any thread to use the memory until the stream has completed the operation.
unsafe impl Send for Source {}
// SAFETY: as above; it is read only.
unsafe impl Sync for Source {}
// SAFETY: as above.
unsafe impl Send for Target {}
// SAFETY: as above; of all threads, only the one that runs the operation writes.
unsafe impl Sync for Target {}

impl Operation {
    /// Sends this rank's data to the hub. `replay` counts the runs of a captured operation.
    pub(crate) fn post(&self, replay: u64) -> u64 {
        let Member { link, place } = &self.member;
        let (group, tag) = (place.group, link.tag());
        let key = if self.captured { Key { number: replay, ..self.key } } else { self.key };
        let (data_type, count) = (self.data_type.0, self.count);
        let request = match self.what {
            What::Collective(call) => Request::Collective { group, tag, key, call },
            What::Send(peer) => Request::Send { group, tag, key, peer, data_type, count },
            What::Receive(peer) => Request::Recv { group, tag, key, peer, data_type, count },
        };
        let sent = self.send.as_slice();
        match &self.factor {
            Some(factor) => {
                let scaled = scale(self.data_type, sent, factor.as_slice());
                link.send(&request, &scaled.unwrap_or_else(|| sent.to_vec()));
            }
            None => link.send(&request, sent),
        }
        tag
    }

    /// Waits for the result of a posted operation. `impatient` if no other thread could abort meanwhile.
    pub(crate) fn finish(&self, tag: u64, impatient: bool) -> Result<(), Failure> {
        let Member { link, place } = &self.member;
        match link.done(tag, place.group, impatient, &|| self.comm.stops()) {
            Ok(result) => {
                self.receive.write(&result);
                Ok(())
            }
            Err(Ended::GivenUp) => Err(crate::join::aborted()),
            Err(Ended::Broken(failure)) => Err(failure),
        }
    }
}

impl Source {
    fn as_slice(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the caller of NCCL's function has promised `bytes` bytes there until the stream has completed the
        // operation.
        unsafe { slice::from_raw_parts(self.address, self.bytes) }
    }
}

impl Target {
    fn write(&self, result: &[u8]) {
        let bytes = result.len().min(self.bytes);
        if bytes > 0 {
            // SAFETY: the caller of NCCL's function has promised `bytes` bytes there until the stream has completed the
            // operation; `result` is memory of this library.
            unsafe { self.address.copy_from_nonoverlapping(result.as_ptr(), bytes) }
        }
    }
}

impl Factor {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Value(value) => value,
            Self::Memory(memory) => memory.as_slice(),
        }
    }
}

//! The memory of this process's ranks while one thread exchanges it with other processes.
#![expect(unsafe_code, reason = "the thread that exchanges works on the memory of ranks that wait")]

use smallvec::SmallVec;

use super::RawSlice;
use crate::call::Call;
use crate::engine::blocks::{Message, Messages};

/// The memory of one operation, borrowed by the one thread that exchanges it with other processes.
pub(crate) struct ExchangedMemory<'a> {
    slices: &'a [RawSlice],
    messages: &'a [Messages],
}

/// The blocks of one message to another process.
pub(crate) struct Sent<'a> {
    pub(crate) to: usize,
    pub(crate) call: Call,
    pub(crate) slices: Vec<&'a [u8]>,
}

/// The target blocks of one message from another process.
pub(crate) struct Received<'a> {
    pub(crate) from: usize,
    pub(crate) call: Call,
    pub(crate) slices: Vec<&'a mut [u8]>,
}

impl<'a> ExchangedMemory<'a> {
    /// Borrows memory for the calling thread for the lifetime of the value.
    ///
    /// # Safety
    /// For that time the slices, and those of the messages, must be valid, and no other thread may access them. The
    /// slices must not overlap each other, and blocks that are received must overlap neither each other nor blocks that
    /// are sent.
    pub(crate) unsafe fn new(slices: &'a [RawSlice], messages: &'a [Messages]) -> ExchangedMemory<'a> {
        ExchangedMemory { slices, messages }
    }

    /// Returns the slices that a schedule works on.
    pub(crate) fn slices(&mut self) -> SmallVec<[&mut [u8]; 1]> {
        // SAFETY: the caller of `new` has guaranteed exclusive access, which the mutable borrow of `self` gives to one
        // caller at a time.
        self.slices.iter().map(|slice| unsafe { slice.bytes_mut(0..slice.len_bytes()) }).collect()
    }

    /// Returns the blocks that are sent and received.
    pub(crate) fn messages(&mut self) -> (Vec<Sent<'_>>, Vec<Received<'_>>) {
        let sent = self.messages.iter().filter_map(|messages| {
            let Message { call, slices } = messages.send.as_ref()?;
            // SAFETY: no code writes to blocks that are sent (`new`), not even through those that are received.
            let slices = slices.iter().map(|slice| unsafe { slice.bytes(0..slice.len_bytes()) }).collect();
            Some(Sent { to: messages.process, call: *call, slices })
        });
        let received = self.messages.iter().filter_map(|messages| {
            let Message { call, slices } = messages.receive.as_ref()?;
            // SAFETY: blocks that are received do not overlap (`new`), and `self` is borrowed mutably.
            let slices = slices.iter().map(|slice| unsafe { slice.bytes_mut(0..slice.len_bytes()) }).collect();
            Some(Received { from: messages.process, call: *call, slices })
        });
        (sent.collect(), received.collect())
    }
}

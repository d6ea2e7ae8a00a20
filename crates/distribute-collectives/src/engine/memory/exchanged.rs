//! Memory of this process's ranks while one thread exchanges it with other processes.
#![expect(unsafe_code, reason = "the thread that exchanges works on the memory of ranks that wait")]

use super::RawSlice;
use crate::call::Call;
use crate::engine::blocks::{Message, Messages};

/// The memory of one operation, lent to the one thread that exchanges it with other processes.
pub(crate) struct ExchangedMemory<'a> {
    slices: &'a [RawSlice],
    messages: &'a [Messages],
}

/// Blocks that one other process is sent, in one message.
pub(crate) struct Sent<'a> {
    pub(crate) to: usize,
    pub(crate) call: Call,
    pub(crate) slices: Vec<&'a [u8]>,
}

/// Where the blocks of one other process's message go.
pub(crate) struct Received<'a> {
    pub(crate) from: usize,
    pub(crate) call: Call,
    pub(crate) slices: Vec<&'a mut [u8]>,
}

impl<'a> ExchangedMemory<'a> {
    /// Lends memory to the calling thread for as long as the value lives.
    ///
    /// # Safety
    /// For that long the slices, and those of the messages, are alive, and no other thread accesses them. The slices do
    /// not overlap each other, nor do blocks that are received overlap each other or blocks that are sent.
    pub(crate) unsafe fn new(slices: &'a [RawSlice], messages: &'a [Messages]) -> ExchangedMemory<'a> {
        ExchangedMemory { slices, messages }
    }

    /// Returns the slices that a schedule works on.
    pub(crate) fn slices(&mut self) -> Vec<&mut [u8]> {
        // SAFETY: `new` was promised exclusive access, which the mutable borrow of `self` gives to one caller at a
        // time.
        self.slices.iter().map(|slice| unsafe { slice.bytes_mut(0..slice.len_bytes()) }).collect()
    }

    /// Returns the blocks that are sent and received.
    pub(crate) fn messages(&mut self) -> (Vec<Sent<'_>>, Vec<Received<'_>>) {
        let sent = self.messages.iter().filter_map(|messages| {
            let Message { call, slices } = messages.send.as_ref()?;
            // SAFETY: nobody writes to blocks that are sent (`new`), also not through those that are received.
            let slices = slices.iter().map(|slice| unsafe { slice.bytes(0..slice.len_bytes()) }).collect();
            Some(Sent { to: messages.process, call: *call, slices })
        });
        let received = self.messages.iter().filter_map(|messages| {
            let Message { call, slices } = messages.receive.as_ref()?;
            // SAFETY: blocks that are received lie apart (`new`), and `self` is borrowed mutably.
            let slices = slices.iter().map(|slice| unsafe { slice.bytes_mut(0..slice.len_bytes()) }).collect();
            Some(Received { from: messages.process, call: *call, slices })
        });
        (sent.collect(), received.collect())
    }
}

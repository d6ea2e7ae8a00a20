//! The receiving end of a transfer.

use distribute_device::DType;
use smallvec::SmallVec;

use crate::call::{Call, ScheduleId};
use crate::reduction::{Combiner, Side};
use crate::transport::{Sink, UnexpectedBytes};

/// Receives one transfer: first the header with the peer's call, which is compared with this process's, then the
/// elements.
pub(super) struct ReceiveBuffer<'a> {
    pub(super) from: usize,
    pub(super) expected: (Call, ScheduleId),
    header: [u8; Call::ENCODED_LEN],
    header_len: usize,
    targets: SmallVec<[&'a mut [u8]; 1]>,
    /// Index into `targets`, and the number of bytes of that target that are complete.
    at: (usize, usize),
    combine: Option<Combine<'a>>,
    /// Bytes in the scratch memory that have not been combined yet.
    filled: usize,
    /// Bytes still to arrive.
    remaining: usize,
    /// The peer's call, if it differs; `Some(None)` if its bytes do not encode a call.
    pub(super) unexpected: Option<Option<(Call, ScheduleId)>>,
}

/// Scratch memory, and the way in which received elements in it are combined with the targets.
pub(super) type Combine<'a> = (&'a mut [u8], DType, &'a Combiner, Side);

impl<'a> ReceiveBuffer<'a> {
    pub(super) fn new(
        expected: (Call, ScheduleId),
        from: usize,
        len_bytes: usize,
        mut targets: SmallVec<[&'a mut [u8]; 1]>,
        combine: Option<Combine<'a>>,
    ) -> ReceiveBuffer<'a> {
        targets.retain(|target| !target.is_empty());
        ReceiveBuffer {
            from,
            expected,
            header: [0; Call::ENCODED_LEN],
            header_len: 0,
            targets,
            at: (0, 0),
            combine,
            filled: 0,
            remaining: len_bytes,
            unexpected: None,
        }
    }

    /// Returns whether all bytes have arrived.
    pub(super) fn is_complete(&self) -> bool {
        self.header_len == Call::ENCODED_LEN && self.remaining == 0
    }

    /// Combines the elements in the scratch memory with the targets.
    fn flush(&mut self) {
        let Some((scratch, dtype, combiner, side)) = &mut self.combine else { return };
        let mut source: &[u8] = &scratch[..self.filled];
        while !source.is_empty() {
            let (index, done) = self.at;
            let target = &mut self.targets[index][done..];
            let len = target.len().min(source.len());
            combiner.combine(*dtype, &mut target[..len], &source[..len], *side);
            source = &source[len..];
            self.at = if len == target.len() { (index + 1, 0) } else { (index, done + len) };
        }
        self.filled = 0;
    }
}

impl Sink for ReceiveBuffer<'_> {
    fn space(&mut self) -> &mut [u8] {
        if self.header_len < Call::ENCODED_LEN {
            return &mut self.header[self.header_len..];
        }
        if self.remaining == 0 {
            return &mut [];
        }
        match &mut self.combine {
            Some((scratch, ..)) => {
                let end = scratch.len().min(self.filled + self.remaining);
                &mut scratch[self.filled..end]
            }
            None => &mut self.targets[self.at.0][self.at.1..],
        }
    }

    fn advance(&mut self, len: usize) -> Result<(), UnexpectedBytes> {
        if self.header_len < Call::ENCODED_LEN {
            self.header_len += len;
            if self.header_len == Call::ENCODED_LEN {
                match Call::decode(&self.header) {
                    Some(call) if call == self.expected => {}
                    other => {
                        self.unexpected = Some(other);
                        return Err(UnexpectedBytes);
                    }
                }
            }
            return Ok(());
        }
        self.remaining -= len;
        if let Some((scratch, ..)) = &self.combine {
            self.filled += len;
            if self.filled == scratch.len() || self.remaining == 0 {
                self.flush();
            }
        } else {
            let (index, done) = self.at;
            let whole = done + len == self.targets[index].len();
            self.at = if whole { (index + 1, 0) } else { (index, done + len) };
        }
        Ok(())
    }
}

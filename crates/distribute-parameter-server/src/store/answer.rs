//! Answers to requests for a shard's elements.

use std::ops::Range;

use bytes::Bytes;
use distribute_device::{BufferRef, DType, HostBuffer};

use crate::numbers;
use crate::wire::MAX_PAYLOAD_BYTES;
use crate::wire::proto::Elements;

/// The elements of a shard at the time of the request, converted message by message.
pub(crate) struct Answer {
    /// The common fields, without a payload.
    about: Elements,
    dtype: DType,
    wire: Option<DType>,
    source: Bytes,
    /// Rows in the order of the answer; `None` for the whole source.
    rows: Option<Vec<u64>>,
    row_bytes: usize,
    /// Bytes of the whole answer, and of those already sent, in the source's type.
    len_bytes: usize,
    sent_bytes: usize,
    /// The most bytes of a message, in the source's type.
    part_bytes: usize,
    ended: bool,
}

impl Iterator for Answer {
    type Item = Elements;

    fn next(&mut self) -> Option<Elements> {
        if self.ended {
            return None;
        }
        let range = self.sent_bytes..self.len_bytes.min(self.sent_bytes + self.part_bytes);
        let first = (self.sent_bytes / self.dtype.size_bytes()) as u64;
        self.sent_bytes = range.end;
        self.ended = range.end == self.len_bytes;
        let bytes = match &self.rows {
            None => self.source.slice(range),
            Some(rows) => self.picked(rows, range).into(),
        };
        let (dtype, payload) = on_wire(&bytes, self.dtype, self.wire).unwrap_or((self.dtype, bytes));
        let dtype = u32::from(dtype.code());
        Some(Elements { first, more: !self.ended, dtype, payload, ..self.about.clone() })
    }
}

impl Answer {
    /// Creates an answer of `len_bytes` bytes in rows of `row_bytes`, of elements of `dtype` that are sent as `wire`.
    pub(super) fn new(
        about: Elements,
        (dtype, wire): (DType, Option<DType>),
        source: Bytes,
        rows: Option<Vec<u64>>,
        (row_bytes, len_bytes): (usize, usize),
    ) -> Answer {
        let part_bytes = MAX_PAYLOAD_BYTES;
        Answer { about, dtype, wire, source, rows, row_bytes, len_bytes, sent_bytes: 0, part_bytes, ended: false }
    }

    /// Limits the payload of each message, rounded down to whole elements; 0 for as many bytes as a message may have.
    pub(crate) fn in_parts_of(self, most_bytes: u32) -> Answer {
        let (size, most) = (self.dtype.size_bytes(), most_bytes as usize);
        let part_bytes = match most {
            0 => MAX_PAYLOAD_BYTES,
            _ => (most / size * size).clamp(size, MAX_PAYLOAD_BYTES),
        };
        Answer { part_bytes, ..self }
    }

    /// Copies a range of the answer's bytes from the rows that contain it.
    fn picked(&self, rows: &[u64], range: Range<usize>) -> Vec<u8> {
        let mut picked = Vec::with_capacity(range.len());
        let mut at = range.start;
        while at < range.end {
            let (row, inside) = (rows[at / self.row_bytes] as usize, at % self.row_bytes);
            let len = (self.row_bytes - inside).min(range.end - at);
            let from = row * self.row_bytes + inside;
            picked.extend_from_slice(&self.source[from..from + len]);
            at += len;
        }
        picked
    }
}

/// Converts elements for sending; `None` if they are sent unchanged.
fn on_wire(bytes: &[u8], dtype: DType, wire: Option<DType>) -> Option<(DType, Bytes)> {
    wire?;
    match BufferRef::from_bytes(dtype, bytes) {
        Ok(elements) => numbers::to_wire(elements, wire),
        // Copied rows may be unaligned.
        Err(_) => numbers::to_wire(HostBuffer::from_slice(bytes).ok()?.view(dtype).ok()?, wire),
    }
}

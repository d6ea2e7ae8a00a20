//! Payloads longer than a message may be, in parts.

use bytes::{Bytes, BytesMut};
use tonic::Status;

use super::MAX_PAYLOAD_BYTES;

/// Splits a payload into the parts of several messages, each with whether more follow. There is always one part, which
/// may be empty.
pub(crate) fn parts_of(payload: Bytes) -> impl Iterator<Item = (Bytes, bool)> + Send {
    let mut rest = Some(payload);
    std::iter::from_fn(move || {
        let mut part = rest.take()?;
        if part.len() > MAX_PAYLOAD_BYTES {
            rest = Some(part.split_off(MAX_PAYLOAD_BYTES));
        }
        Some((part, rest.is_some()))
    })
}

/// The parts of a payload as they arrive. Only arrived parts use memory.
#[derive(Debug)]
pub(crate) struct Parts {
    limit_bytes: usize,
    len_bytes: usize,
    parts: Vec<Bytes>,
}

impl Parts {
    /// Creates an empty payload of at most `limit_bytes`.
    pub(crate) fn up_to(limit_bytes: usize) -> Parts {
        Parts { limit_bytes, len_bytes: 0, parts: Vec::new() }
    }

    /// Adds a part.
    ///
    /// # Errors
    /// `invalid_argument` if the payload becomes too long.
    pub(crate) fn push(&mut self, part: Bytes) -> Result<(), Status> {
        self.len_bytes = self.len_bytes.saturating_add(part.len());
        if self.len_bytes > self.limit_bytes {
            let (given, limit) = (self.len_bytes, self.limit_bytes);
            return Err(Status::invalid_argument(format!("{given} bytes arrived, and at most {limit} are expected")));
        }
        if !part.is_empty() {
            self.parts.push(part);
        }
        Ok(())
    }

    /// Returns the bytes that have arrived.
    pub(crate) fn len(&self) -> usize {
        self.len_bytes
    }

    /// Copies the payload to memory of its length, and frees each part as soon as it is copied; returns whether the
    /// length is this.
    pub(crate) fn copy_to(self, target: &mut [u8]) -> bool {
        if target.len() != self.len_bytes {
            return false;
        }
        let mut rest = target;
        for part in self.parts {
            let (now, later) = rest.split_at_mut(part.len());
            now.copy_from_slice(&part);
            rest = later;
        }
        true
    }

    /// Joins the payload, without a copy if it arrived in one part.
    pub(crate) fn join(mut self) -> Bytes {
        if self.parts.len() < 2 {
            return self.parts.pop().unwrap_or_default();
        }
        let mut joined = BytesMut::with_capacity(self.len_bytes);
        // Each part is freed as soon as it is copied.
        self.parts.drain(..).for_each(|part| joined.extend_from_slice(&part));
        joined.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_payload_goes_in_parts_and_comes_back() {
        for (len, count) in [(0, 1), (5, 1), (MAX_PAYLOAD_BYTES, 1), (MAX_PAYLOAD_BYTES + 1, 2)] {
            let payload = Bytes::from(vec![7u8; len]);
            let parts: Vec<(Bytes, bool)> = parts_of(payload.clone()).collect();
            assert!(parts.iter().rev().skip(1).all(|(_, more)| *more) && !parts.last().unwrap().1);
            assert_eq!(parts.len(), count);
            let mut back = Parts::up_to(len);
            parts.into_iter().for_each(|(part, _)| back.push(part).unwrap());
            assert!(back.push(Bytes::from_static(b"x")).is_err());
        }
        let mut back = Parts::up_to(3);
        back.push(Bytes::from_static(b"ab")).unwrap();
        back.push(Bytes::from_static(b"c")).unwrap();
        let mut again = Parts::up_to(3);
        [&b"ab"[..], b"c"].into_iter().for_each(|part| again.push(Bytes::from_static(part)).unwrap());
        let mut target = *b"....";
        assert!(again.copy_to(&mut target[..3]) && target == *b"abc.");
        assert!(!Parts::up_to(3).copy_to(&mut target));
        assert_eq!(back.join(), &b"abc"[..]);
    }
}

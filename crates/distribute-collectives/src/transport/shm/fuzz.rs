//! The offer of shared memory, its answer, the pass for a segment's file, and rings that another process writes.

use std::cell::OnceCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::handshake::{ANSWER_BYTES, Answer, OFFER_BYTES, Offer};
use super::identity::PidScope;
use super::passing::{PASS_BYTES, Pass};
use super::ring::{Consumer, HEAD_BYTES, Record, RingMemory as _};
use super::segment::Segment;

thread_local! {
    /// The segment of this thread, as it cannot be given back.
    static SEGMENT: OnceCell<Arc<Segment>> = const { OnceCell::new() };
}

const CAPACITY: usize = 256;

/// The first byte chooses: an offer, an answer, a ring, or a pass.
pub(crate) fn shared_memory(bytes: &[u8]) -> bool {
    let Some((sort, bytes)) = bytes.split_first() else { return false };
    match sort % 4 {
        0 => offer(bytes),
        1 => answer(bytes),
        2 => ring(bytes),
        _ => pass(bytes),
    }
}

fn offer(bytes: &[u8]) -> bool {
    let Some((bytes, _)) = bytes.split_first_chunk::<OFFER_BYTES>() else { return false };
    let Some(offer) = Offer::decode(bytes) else { return false };
    // An offer of an unknown place is one of another host.
    let nowhere = PidScope::default();
    assert!(nowhere.obstacle(&offer.place).is_some());
    let again = offer.encode();
    assert_eq!(again.len(), OFFER_BYTES);
    // Bytes that are not UTF-8 are replaced, which makes the place longer, and no place of a process.
    if let Some(again) = again.first_chunk().filter(|_| std::str::from_utf8(bytes).is_ok()) {
        assert_eq!(Offer::decode(again).map(|offer| offer.nonce), Some(offer.nonce));
    }
    true
}

fn answer(bytes: &[u8]) -> bool {
    let Some((bytes, _)) = bytes.split_first_chunk::<ANSWER_BYTES>() else { return false };
    let answer = Answer::decode(bytes);
    let again = answer.encode();
    assert_eq!(again.first_chunk().map(Answer::decode), Some(answer));
    true
}

fn pass(bytes: &[u8]) -> bool {
    let Some((bytes, _)) = bytes.split_first_chunk::<PASS_BYTES>() else { return false };
    let Some(pass) = Pass::decode(bytes) else { return false };
    assert_eq!(pass.encode(), *bytes);
    true
}

/// The bytes are those of the ring, which another process has written: words of records, and what follows them.
fn ring(bytes: &[u8]) -> bool {
    let segment = SEGMENT.with(|segment| segment.get_or_init(|| Segment::leaked(CAPACITY)).clone());
    let mut whole = [0; CAPACITY];
    whole.iter_mut().zip(bytes).for_each(|(place, byte)| *place = *byte);
    segment.write(0, 0, &whole);
    segment.words(0).consumed.store(0, Ordering::Release);
    let mut consumer = Consumer::new(segment, 0);
    let mut buffer = [0; CAPACITY];
    // As many as there can be in the ring; a producer that never clears a word repeats its records without end.
    for records in 0..CAPACITY / Segment::LINE {
        match consumer.begin() {
            Ok(Record::None) => return records > 0,
            Ok(Record::Short(len)) => {
                assert!((1..=CAPACITY - Segment::LINE - HEAD_BYTES).contains(&len));
                consumer.copy(&mut buffer[..len]);
            }
            Ok(Record::Long(_, len)) => assert!(len > 0),
            Err(_) => return records > 0,
        }
        consumer.release();
    }
    true
}

/// Returns offers, answers and rings, for the corpus.
#[cfg(test)]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    use super::Obstacle;
    use crate::transport::Nonce;
    let nonce = Nonce::from_bytes([7; 16]);
    let place = PidScope::here().unwrap_or_default();
    let offer = Offer { place, pid: 4, fd: 5, capacity: 1 << 18, address: 1 << 40, nonce };
    let yes = Answer { obstacle: None, fetches: true, pid: 4, address: 1 << 40, nonce };
    let no = Answer { obstacle: Some(Obstacle::OtherHost), fetches: false, ..yes };
    let record = |kind: u64, len: u64, bytes: &[u8]| {
        let mut record = [&(kind << 48 | len).to_le_bytes()[..], bytes].concat();
        record.resize(record.len().next_multiple_of(Segment::LINE), 0);
        record
    };
    let ring = [record(0x5348, 5, b"bytes"), record(0x4c4f, 1 << 20, &[1; 8])].concat();
    vec![
        [vec![0], offer.encode()].concat(),
        [vec![1], yes.encode()].concat(),
        [vec![1], no.encode()].concat(),
        [vec![2], ring].concat(),
        [vec![3], (1..=PASS_BYTES as u8).collect()].concat(),
    ]
}

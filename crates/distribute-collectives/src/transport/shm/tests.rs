use std::net::{Ipv4Addr, TcpListener, TcpStream};

use proptest::prelude::*;

use super::ring::RingMemory;
use super::*;
use crate::transport::Sink;

/// Two lanes of this process, one for each end.
fn lanes() -> (Lane, Lane) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut b, _) = listener.accept().unwrap();
    let offered = offer(&mut a).unwrap();
    let answered = answer(&mut b).unwrap();
    let first = accept(&mut a, offered).unwrap().unwrap();
    (first, answered.finish(&mut b).unwrap().unwrap())
}

struct Collected {
    bytes: Vec<u8>,
    filled: usize,
    step: usize,
}

impl Sink for Collected {
    fn space(&mut self) -> &mut [u8] {
        let end = (self.filled + self.step).min(self.bytes.len());
        &mut self.bytes[self.filled..end]
    }

    fn advance(&mut self, len: usize) -> Result<(), UnexpectedBytes> {
        self.filled += len;
        Ok(())
    }
}

/// Sends `parts` and reads them at the same time, as two ends of an exchange do.
fn pass(from: &mut Lane, to: &mut Lane, parts: &[Vec<u8>], step: usize) -> Vec<u8> {
    let total = parts.iter().map(Vec::len).sum();
    let mut sink = Collected { bytes: vec![0; total], filled: 0, step };
    let mut outgoing: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut idle = 0;
    while !outgoing.is_empty() || sink.filled < total {
        let (wrote, _) = from.write(&mut outgoing, 1 << 20);
        let mut incoming = Incoming { from: 0, sink: &mut sink };
        let read = to.read(&mut incoming, 1 << 20).unwrap_or_else(|_| panic!("the lane broke")).0;
        idle = if wrote || read > 0 { 0 } else { idle + 1 };
        assert!(idle < 3, "the lane stands still at {} of {total}", sink.filled);
    }
    sink.bytes
}

#[test]
fn processes_of_one_host_fetch_from_each_other() {
    let (a, b) = lanes();
    assert_eq!(a.fetches(), b.fetches());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn bytes_arrive_in_order_whatever_their_portions(
        lens in proptest::collection::vec(prop_oneof![0usize..100, 1000usize..40_000, 250_000usize..600_000], 0..6),
        step in prop_oneof![1usize..50, 5000usize..300_000],
        fetch: bool,
    ) {
        let (mut a, mut b) = lanes();
        a.peer_fetches &= fetch;
        b.peer_fetches &= fetch;
        let step = if lens.iter().sum::<usize>() > 100_000 { step.max(1000) } else { step };
        let part = |(i, len): (usize, &usize)| (0..*len).map(|j| (i * 31 + j * 7 + j / 251) as u8).collect();
        let parts: Vec<Vec<u8>> = lens.iter().enumerate().map(part).collect();
        for _ in 0..3 {
            prop_assert!(pass(&mut a, &mut b, &parts, step) == parts.concat());
            prop_assert!(pass(&mut b, &mut a, &parts, step) == parts.concat());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_bytes_as_offer_or_answer_are_taken_without_harm(bytes: Vec<u8>, begins_right: bool, as_answer: bool) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut ours, _) = listener.accept().unwrap();
        if begins_right {
            std::io::Write::write_all(&mut theirs, b"dst-shm4").unwrap();
        }
        std::io::Write::write_all(&mut theirs, &bytes).unwrap();
        // Whatever is still expected is zeros, and then the end.
        std::io::Write::write_all(&mut theirs, &[0; 300]).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        if as_answer {
            let offered = offer(&mut ours).unwrap();
            // A peer that reports that it has opened the segment is not believed without its number in it.
            prop_assert!(accept(&mut ours, offered).unwrap().is_err());
        } else if let Ok(answered) = answer(&mut ours) {
            prop_assert!(answered.finish(&mut ours).unwrap().is_err());
        }
    }
}

#[test]
fn what_is_no_record_is_an_error_and_no_panic() {
    let (a, mut b) = lanes();
    let segment = segment_of(&a);
    for head in [1, 0x5348 << 48, (0x5348 << 48) + RING_BYTES as u64, 0x4c4f << 48, u64::MAX] {
        segment.head(0, 0).store(head, std::sync::atomic::Ordering::Release);
        let mut sink = Collected { bytes: vec![0; 10], filled: 0, step: 10 };
        let mut incoming = Incoming { from: 0, sink: &mut sink };
        assert!(matches!(b.read(&mut incoming, 100), Err(LaneError::Broken(_))), "{head:x}");
        let (_, fresh) = lanes();
        b = Lane { from_peer: Consumer::new(segment.clone(), 0), ..fresh };
    }
}

fn segment_of(lane: &Lane) -> std::sync::Arc<segment::Segment> {
    lane.to_peer.segment()
}

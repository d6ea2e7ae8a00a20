//! Both ends of a ring on two threads, small enough for Miri (`cargo xtask miri`), which tries orders of memory
//! accesses that the processor at hand never shows.
#![expect(unsafe_code, reason = "the consumer reads the producer's memory by its address")]

use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use super::*;

/// A few records fill it.
const CAPACITY: usize = 256;

const MESSAGES: usize = if cfg!(miri) { 12 } else { 20_000 };

fn ends() -> (Producer, Consumer) {
    let segment = Segment::leaked(CAPACITY);
    (Producer::new(segment.clone(), 0), Consumer::new(segment, 0))
}

fn message(index: usize) -> Vec<u8> {
    (0..1 + index * 7 % 40).map(|at| (index * 31 + at) as u8).collect()
}

/// Takes `len` bytes, record by record; `idle` is called while there is nothing to take.
fn take(consumer: &mut Consumer, len: usize, mut idle: impl FnMut(&mut Consumer)) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut filled = 0;
    while filled < len {
        match consumer.begin().expect("a record") {
            Record::None => idle(consumer),
            Record::Short(short) => {
                consumer.copy(&mut bytes[filled..filled + short]);
                filled += short;
                consumer.release();
            }
            Record::Long(..) => panic!("none was sent"),
        }
    }
    bytes
}

#[test]
fn records_pass_from_thread_to_thread() {
    let (mut producer, mut consumer) = ends();
    thread::scope(|scope| {
        scope.spawn(move || {
            for index in 0..MESSAGES {
                let message = message(index);
                let mut sent = 0;
                while sent < message.len() {
                    sent += producer.push_short(&[IoSlice::new(&message[sent..])]);
                    thread::yield_now();
                }
            }
        });
        for index in 0..MESSAGES {
            let message = message(index);
            assert_eq!(take(&mut consumer, message.len(), |_| thread::yield_now()), message);
        }
    });
}

#[test]
fn whoever_sleeps_is_woken() {
    let (mut producer, mut consumer) = ends();
    let (ring, bell) = sync_channel(1);
    let (ring_back, bell_back) = sync_channel(1);
    let rang = |bell: &std::sync::mpsc::Receiver<()>| bell.recv_timeout(Duration::from_secs(60)).expect("a bell");
    thread::scope(|scope| {
        scope.spawn(move || {
            for index in 0..MESSAGES {
                let message = message(index);
                let mut sent = 0;
                while sent < message.len() {
                    let mut pushed = producer.push_short(&[IoSlice::new(&message[sent..])]);
                    if pushed == 0 {
                        producer.announce_sleep();
                        pushed = producer.push_short(&[IoSlice::new(&message[sent..])]);
                        if pushed == 0 {
                            rang(&bell_back);
                        }
                        producer.awake();
                    }
                    sent += pushed;
                    if pushed > 0 && producer.must_wake() {
                        let _ = ring.try_send(());
                    }
                }
            }
        });
        for index in 0..MESSAGES {
            let message = message(index);
            let received = take(&mut consumer, message.len(), |consumer| {
                // What was taken before may be what the producer waits for.
                if consumer.must_wake() {
                    let _ = ring_back.try_send(());
                }
                consumer.announce_sleep();
                if consumer.is_empty() {
                    rang(&bell);
                }
                consumer.awake();
            });
            assert_eq!(received, message);
            if consumer.must_wake() {
                let _ = ring_back.try_send(());
            }
        }
    });
}

#[test]
fn memory_that_was_fetched_may_be_written_again() {
    let (mut producer, mut consumer) = ends();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut memory = vec![0u8; 50];
            for index in 0..MESSAGES {
                memory.fill(index as u8);
                while !producer.push_long(memory.as_mut_ptr().expose_provenance() as u64, memory.len()) {
                    thread::yield_now();
                }
                while !producer.all_fetched() {
                    thread::yield_now();
                }
            }
        });
        for index in 0..MESSAGES {
            loop {
                match consumer.begin().expect("a record") {
                    Record::None => thread::yield_now(),
                    Record::Short(_) => panic!("none was sent"),
                    Record::Long(address, len) => {
                        let start = std::ptr::with_exposed_provenance::<u8>(address as usize);
                        // SAFETY: the producer leaves its memory alone until it was fetched.
                        let bytes = unsafe { std::slice::from_raw_parts(start, len) };
                        assert!(bytes.iter().all(|byte| *byte == index as u8));
                        consumer.fetched().expect("it was not taken back");
                        consumer.release();
                        break;
                    }
                }
            }
        }
    });
}

#[test]
fn what_the_producer_takes_back_was_not_fetched() {
    let (mut producer, mut consumer) = ends();
    for (revoke, fetched) in [(false, true), (true, false)] {
        let memory = [1u8; 50];
        assert!(producer.push_long(memory.as_ptr().expose_provenance() as u64, memory.len()));
        assert!(matches!(consumer.begin().expect("a record"), Record::Long(_, 50)));
        if revoke {
            producer.revoke();
        }
        assert_eq!(consumer.fetched().is_ok(), fetched, "revoked: {revoke}");
        consumer.release();
    }
}

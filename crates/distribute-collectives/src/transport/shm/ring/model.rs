//! Both ends of a ring, run through their interleavings by loom: `cargo xtask loom`.
#![expect(unsafe_code, reason = "loom's cells watch accesses through pointers")]

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::thread;

use super::*;

/// One record of a byte, and the word of another.
const CAPACITY: usize = 32;

/// A ring's memory whose bytes loom watches.
struct Model {
    consumed: AtomicU64,
    fetched: AtomicU64,
    consumer_sleeps: AtomicU32,
    producer_sleeps: AtomicU32,
    /// The words of records, one for each line.
    heads: Vec<AtomicU64>,
    ring: Vec<UnsafeCell<u8>>,
    /// The memory that a long record names.
    long: UnsafeCell<u8>,
}

// SAFETY: the cells are what is being tested; loom fails where two accesses to one are not ordered.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            consumed: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            consumer_sleeps: AtomicU32::new(0),
            producer_sleeps: AtomicU32::new(0),
            heads: (0..CAPACITY / Model::LINE).map(|_| AtomicU64::new(0)).collect(),
            ring: (0..CAPACITY).map(|_| UnsafeCell::new(0)).collect(),
            long: UnsafeCell::new(0),
        })
    }

    fn cell(&self, at: u64) -> &UnsafeCell<u8> {
        &self.ring[at as usize % CAPACITY]
    }
}

impl RingMemory for Model {
    const LINE: usize = 16;

    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn words(&self, _: usize) -> Words<'_> {
        Words {
            consumed: &self.consumed,
            fetched: &self.fetched,
            consumer_sleeps: &self.consumer_sleeps,
            producer_sleeps: &self.producer_sleeps,
        }
    }

    fn head(&self, _: usize, at: u64) -> &AtomicU64 {
        &self.heads[at as usize % CAPACITY / Model::LINE]
    }

    fn write(&self, _: usize, at: u64, bytes: &[u8]) {
        for (at, byte) in (at..).zip(bytes) {
            // SAFETY: loom checks that no other thread accesses the cell.
            self.cell(at).with_mut(|cell| unsafe { *cell = *byte });
        }
    }

    fn read(&self, _: usize, at: u64, bytes: &mut [u8]) {
        for (at, byte) in (at..).zip(bytes) {
            // SAFETY: loom checks that no thread writes to the cell meanwhile.
            *byte = self.cell(at).with(|cell| unsafe { *cell });
        }
    }
}

fn ends() -> (Producer<Model>, Consumer<Model>, Arc<Model>) {
    let memory = Model::new();
    (Producer::new(memory.clone(), 0), Consumer::new(memory.clone(), 0), memory)
}

#[test]
fn bytes_are_read_after_they_were_written_and_before_they_are_written_over() {
    loom::model(|| {
        let (mut producer, mut consumer, _) = ends();
        let handle = thread::spawn(move || {
            for byte in [7, 9] {
                while producer.push_short(&[IoSlice::new(&[byte])]) == 0 {
                    thread::yield_now();
                }
            }
        });
        for expected in [7, 9] {
            loop {
                match consumer.begin().unwrap() {
                    Record::Short(1) => break,
                    Record::None => thread::yield_now(),
                    other => panic!("{other:?}"),
                }
            }
            let mut byte = [0];
            consumer.copy(&mut byte);
            consumer.release();
            assert_eq!(byte, [expected]);
        }
        handle.join().unwrap();
    });
}

#[test]
fn a_consumer_that_sleeps_is_woken_or_sees_what_was_pushed() {
    loom::model(|| {
        let (mut producer, mut consumer, _) = ends();
        let handle = thread::spawn(move || {
            assert_eq!(producer.push_short(&[IoSlice::new(&[7])]), 1);
            producer.must_wake()
        });
        consumer.announce_sleep();
        let saw = consumer.begin().unwrap() != Record::None;
        let rang = handle.join().unwrap();
        assert!(saw || rang, "it would sleep for ever");
    });
}

#[test]
fn memory_that_was_taken_back_is_not_taken_for_fetched() {
    loom::model(|| {
        let (mut producer, mut consumer, memory) = ends();
        let watched = memory.clone();
        assert!(producer.push_long(1, 1));
        let handle = thread::spawn(move || {
            producer.revoke();
            // A record that was counted before is one that has been read.
            if producer.all_fetched() {
                // SAFETY: loom checks that the read below is over.
                watched.long.with_mut(|cell| unsafe { *cell = 1 });
            }
        });
        assert!(matches!(consumer.begin().unwrap(), Record::Long(1, 1)));
        // SAFETY: loom checks that no thread writes meanwhile.
        let byte = memory.long.with(|cell| unsafe { *cell });
        if consumer.fetched().is_ok() {
            assert_eq!(byte, 0);
        }
        handle.join().unwrap();
    });
}

//! Random programs against a sequential oracle.

use proptest::prelude::*;

use super::*;

/// One step of a random program over two devices with one buffer each.
#[derive(Clone, Debug)]
enum Step {
    Fill { on: usize, at: usize, byte: u8 },
    Copy { on: usize, from: usize, to: usize, len: usize },
    Peer { from: usize, at: usize, len: usize },
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..2usize, 0..16usize, any::<u8>()).prop_map(|(on, at, byte)| Step::Fill { on, at, byte }),
        (0..2usize, 0..8usize, 0..8usize, 0..=8usize).prop_map(|(on, from, to, len)| Step::Copy { on, from, to, len }),
        (0..2usize, 0..8usize, 0..=8usize).prop_map(|(from, at, len)| Step::Peer { from, at, len }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Steps on alternating streams, each of which waits for the previous one, have the effect of a single thread.
    #[test]
    fn events_order_streams_as_one_program(steps in prop::collection::vec((0..2usize, any_step()), 1..40)) {
        let devices = cpus(2);
        let memory: Vec<_> = devices.iter().map(|device| device.allocate(16).unwrap()).collect();
        let streams: Vec<_> = devices.iter().map(|device| device.create_stream().unwrap()).collect();
        let event = devices[0].create_event().unwrap();
        let mut expected = [[0u8; 16]; 2];
        for (stream, step) in steps {
            let part = |on: usize, at: usize, len: usize| memory[on].slice(at..at + len).unwrap();
            let stream = match step {
                Step::Fill { on, .. } | Step::Copy { on, .. } => &streams[on],
                Step::Peer { .. } => &streams[stream],
            };
            stream.wait(&*event).unwrap();
            match step {
                Step::Fill { on, at, byte } => {
                    stream.fill(&part(on, at, 16 - at), byte).unwrap();
                    expected[on][at..].fill(byte);
                }
                Step::Copy { on, from, to, len } => {
                    stream.copy(&part(on, from, len), &part(on, to, len)).unwrap();
                    expected[on].copy_within(from..from + len, to);
                }
                Step::Peer { from, at, len } => {
                    stream.copy_peer(&part(from, at, len), &part(1 - from, at, len)).unwrap();
                    let bytes = expected[from];
                    expected[1 - from][at..at + len].copy_from_slice(&bytes[at..at + len]);
                }
            }
            stream.record(&*event).unwrap();
        }
        event.wait(soon()).unwrap();
        for (memory, expected) in memory.iter().zip(expected) {
            prop_assert_eq!(CpuDevice::with_bytes(memory, |bytes| bytes.to_vec()).unwrap(), expected.to_vec());
        }
    }
}

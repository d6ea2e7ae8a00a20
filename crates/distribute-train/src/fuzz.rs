//! Decoders of bytes from outside, for fuzzers and for the replay of their corpora. Not part of the public interface.
//!
//! Each function decodes its input, checks what it decoded, and returns whether the input was accepted. The crate has
//! them in its tests, and in builds by cargo-fuzz, which sets `cfg(fuzzing)`.

#[cfg(test)]
mod tests;

use crate::progress::Message;

/// The manifest of a checkpoint.
#[cfg(feature = "checkpoint")]
pub fn manifest(bytes: &[u8]) -> bool {
    crate::checkpoint::fuzz::manifest(bytes)
}

/// The header of a file of tensors, and the file of the state.
#[cfg(feature = "checkpoint")]
pub fn tensor_file(bytes: &[u8]) -> bool {
    crate::checkpoint::fuzz::tensor_file(bytes)
}

/// A snapshot that the chief sends.
#[cfg(feature = "checkpoint")]
pub fn snapshot(bytes: &[u8]) -> bool {
    crate::checkpoint::fuzz::snapshot(bytes)
}

/// A line of a task's report to the launcher or the status page.
pub fn progress_message(bytes: &[u8]) -> bool {
    let Ok(message) = serde_json::from_slice::<Message>(bytes) else { return false };
    let line = serde_json::to_string(&message).expect("a message is text and numbers");
    assert!(!line.contains('\n'));
    let again: Message = serde_json::from_str(&line).expect("it was written");
    // Numbers may not equal themselves.
    assert_eq!(serde_json::to_string(&again).ok(), Some(line));
    true
}

/// The reports of tasks to the status page, one on each line, and the pages that are made of them.
#[cfg(feature = "status")]
pub fn status_reports(bytes: &[u8]) -> bool {
    crate::status::fuzz::reports(bytes)
}

/// The position of a pass over data, from a checkpoint, and the pass that resumes there.
#[cfg(feature = "checkpoint")]
pub fn input_position(bytes: &[u8]) -> bool {
    use distribute_input::{Dataset, InputOptions, InputPosition, Topology, distribute_dataset};
    let Ok(position) = serde_json::from_slice::<InputPosition>(bytes) else { return false };
    let text = serde_json::to_vec(&position).expect("a position can be written");
    assert_eq!(serde_json::from_slice::<InputPosition>(&text).ok().as_ref(), Some(&position));
    let data = Dataset::range(0..9).shuffle(9, 7).batch(2);
    for workers in 1..3 {
        let topology = Topology::new(workers, 0, 1).expect("worker 0 of them");
        let whole = distribute_dataset(&data, topology, InputOptions::default()).expect("it can be distributed");
        let Ok(rest) = whole.iter_from(&position) else { continue };
        // Each lane has nine rows at most, and takes some bytes.
        assert!(rest.take(10_000).count() <= 9 * bytes.len());
    }
    if let Ok(all) = InputPosition::of_all(vec![position.clone(), position.clone()]) {
        assert_eq!(all.epoch(), position.epoch());
    }
    true
}

//! Decoders of bytes from outside, for fuzzers and for the replay of their corpora. Not part of the public interface.
//!
//! Each function decodes its input, checks what it decoded, and returns whether the input was accepted. The crate has
//! them in its tests, and in builds by cargo-fuzz, which sets `cfg(fuzzing)`.

#[cfg(test)]
mod tests;

use crate::call::Call;
use crate::group::fuzz as group;
use crate::transport::AbortReason;
use crate::transport::fuzz as transport;
use crate::{FlightRecord, explain};

/// The fingerprint at the beginning of every message of a collective.
pub fn call(bytes: &[u8]) -> bool {
    let Some((bytes, _)) = bytes.split_first_chunk() else { return false };
    let Some((call, schedule)) = Call::decode(bytes) else { return false };
    assert_eq!(call.encode(schedule), *bytes);
    assert!(!call.to_string().contains('\n'));
    true
}

/// The reason of an abort.
pub fn abort_reason(bytes: &[u8]) -> bool {
    let reason = AbortReason::decode(bytes);
    for text in [&reason.origin, &reason.cause] {
        // Each character may be shown by an escape.
        assert!(!text.contains('\n') && text.chars().count() <= 10 * AbortReason::MAX_TEXT + 1);
    }
    let again = AbortReason::decode(&reason.encode());
    assert_eq!(again.kind, reason.kind);
    !reason.origin.is_empty()
}

/// The first bytes of a connection between members, as they arrive at a member that is being connected.
pub fn reception(bytes: &[u8]) -> bool {
    transport::reception(bytes)
}

/// The control messages of a connection, as they arrive.
pub fn control_messages(bytes: &[u8]) -> bool {
    transport::control_messages(bytes)
}

/// The offer of shared memory, its answer, and the ring.
#[cfg(target_os = "linux")]
pub fn shared_memory(bytes: &[u8]) -> bool {
    transport::shared_memory(bytes)
}

/// The frames of collectives over gRPC.
#[cfg(feature = "grpc")]
pub fn grpc_frames(bytes: &[u8]) -> bool {
    crate::transport::grpc::fuzz::frames(bytes)
}

/// The information that members exchange before they connect.
pub fn endpoint(bytes: &[u8]) -> bool {
    group::endpoint(bytes)
}

/// The records that failing ranks leave, one on a line.
pub fn flight_records(bytes: &[u8]) -> bool {
    let lines = bytes.split(|byte| *byte == b'\n');
    let records: Vec<FlightRecord> = lines.filter_map(|line| serde_json::from_slice(line).ok()).take(64).collect();
    let text = explain(&records);
    // Each rank has a line or two, and ranks without a record are counted rather than listed.
    assert!(text.len() <= 20 * bytes.len() + 4096, "{} bytes for {}", text.len(), bytes.len());
    for record in &records {
        let json = serde_json::to_vec(record).expect("a record can be written");
        let again: FlightRecord = serde_json::from_slice(&json).expect("it was written");
        assert_eq!((&again.group, again.operations.len()), (&record.group, record.operations.len()));
    }
    !records.is_empty()
}

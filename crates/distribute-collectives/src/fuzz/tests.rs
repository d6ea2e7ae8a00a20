use distribute_device::DType;
use distribute_testkit::replay;

use super::*;
use crate::call::{Kind, Reducing, ScheduleId};
use crate::recorder::{RecordedOperation, RecordedState};
use crate::transport::fuzz::samples;
use crate::{Rank, ReduceOp};

#[test]
fn replay_call() {
    let call = Call {
        kind: Kind::AllReduce,
        sequence: 3,
        dtype: DType::F32,
        count: 1 << 33,
        layout: 7,
        op: Some(Reducing::BuiltIn(ReduceOp::Mean)),
        root: None,
    };
    let other = Call { kind: Kind::Broadcast, op: None, root: Some(Rank(2)), ..call };
    let messages = [call, other].map(|call| call.encode(ScheduleId::ONLY).to_vec());
    replay("call", super::call, &messages, 3000);
}

#[test]
fn replay_abort_reason() {
    let (origin, cause) = ("worker:1".to_owned(), "out of\nmemory ü".to_owned());
    let reason = AbortReason { origin, cause, kind: distribute_cluster::FailureKind::Permanent };
    replay("abort_reason", abort_reason, &[reason.encode()], 2000);
}

#[test]
fn replay_connections() {
    let (callers, control) = samples::tcp();
    // Each has a connection of its own.
    replay("reception", reception, &callers, 300);
    replay("control_messages", control_messages, &control, 2000);
}

#[test]
#[cfg(target_os = "linux")]
fn replay_shared_memory() {
    replay("shared_memory", shared_memory, &samples::shared_memory(), 2000);
}

#[test]
#[cfg(feature = "grpc")]
fn replay_grpc_frames() {
    replay("grpc_frames", grpc_frames, &crate::transport::grpc::fuzz::samples(), 2000);
}

#[test]
fn replay_endpoint() {
    replay("endpoint", endpoint, &[group::sample()], 2000);
}

fn record(rank: u32, world_size: usize) -> FlightRecord {
    let operation = RecordedOperation {
        sequence: 4,
        kind: "all_reduce".to_owned(),
        call: format!("all_reduce #4 of {rank} f32"),
        bytes: 16,
        state: RecordedState::Failed,
        issued_s: 0.5,
        finished_s: None,
        error: Some("lost".to_owned()),
    };
    FlightRecord {
        group: "g".to_owned(),
        rank: Rank(rank),
        name: format!("worker:{rank}"),
        world_size,
        transport: "tcp".to_owned(),
        began_s: 1.5,
        failure: Some("lost".to_owned()),
        operations: vec![operation],
    }
}

#[test]
fn replay_flight_records() {
    let json = |records: &[FlightRecord]| {
        let lines: Vec<String> = records.iter().map(|record| serde_json::to_string(record).unwrap()).collect();
        lines.join("\n").into_bytes()
    };
    let messages = [json(&[record(0, 2), record(1, 2)]), json(&[record(0, 300)])];
    replay("flight_records", flight_records, &messages, 1000);
}

#[test]
fn a_record_of_a_huge_group_is_explained_in_few_words() {
    let text = explain(&[record(0, usize::MAX)]);
    assert!(text.len() < 2000 && text.contains("rank 1, rank 2,") && text.contains(" more"), "{text}");
}

use distribute_testkit::replay;

use super::*;
use crate::progress::{Event, Status, Vitals};

#[test]
#[cfg(feature = "checkpoint")]
fn replay_checkpoints() {
    let [manifests, files, snapshots] = crate::checkpoint::fuzz::samples();
    replay("manifest", manifest, &manifests, 2000);
    replay("tensor_file", tensor_file, &files, 2000);
    replay("snapshot", snapshot, &snapshots, 2000);
}

fn messages() -> Vec<Message> {
    let status = Status {
        epoch: 1,
        epochs: 5,
        step: 214,
        steps: Some(469),
        examples_per_s: 19_431.5,
        metrics: vec![("loss".into(), f64::NAN), ("accuracy".into(), 1.0)],
        elapsed_s: 3.1,
        resumed: 0,
        total_steps: None,
    };
    let vitals = Vitals { host: "a".into(), own_s: Some(0.25), pid: 7, steps: 3, ..Vitals::default() };
    let events = [
        Event::Begin { title: "mnist".into() },
        Event::Step(status.clone()),
        Event::Epoch(status),
        Event::Vitals(vitals),
        Event::End { summary: "accuracy 97.8 %\n".into() },
    ];
    events.map(|event| Message { task: "worker:1".into(), event }).to_vec()
}

#[test]
fn replay_progress() {
    let lines: Vec<Vec<u8>> = messages().iter().map(|message| serde_json::to_vec(message).unwrap()).collect();
    replay("progress_message", progress_message, &lines, 2000);
    #[cfg(feature = "status")]
    replay("status_reports", status_reports, &[lines.join(&b'\n')], 1000);
}

#[test]
#[cfg(feature = "checkpoint")]
fn replay_input_position() {
    use distribute_input::{Dataset, InputOptions, InputPosition, Topology, distribute_dataset};
    let data = Dataset::range(0..9).shuffle(9, 7).batch(2);
    let position = |workers: usize, steps: usize| {
        let of = |worker| {
            let topology = Topology::new(workers, worker, 1).unwrap();
            let whole = distribute_dataset(&data, topology, InputOptions::default()).unwrap();
            let mut pass = whole.iter();
            (0..steps).for_each(|_| drop(pass.next()));
            pass.position().clone()
        };
        InputPosition::of_all((0..workers).map(of).collect()).unwrap()
    };
    let last = serde_json::json!({"epoch": u64::MAX, "steps": u64::MAX, "read_mode": "Walk", "lanes": [{"share": null,
        "cuts": [{"skip": 1, "count": 2, "index": 1}], "seen": 1, "ended": false}]});
    let positions = [position(1, 0), position(1, 2), position(2, 1), serde_json::from_value(last).unwrap()];
    let positions: Vec<Vec<u8>> = positions.iter().map(|position| serde_json::to_vec(position).unwrap()).collect();
    // Each begins passes with threads of their own.
    replay("input_position", input_position, &positions, 200);
}

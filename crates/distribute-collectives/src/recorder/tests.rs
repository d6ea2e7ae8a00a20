use distribute_device::DType;

use super::*;
use crate::Kind;

fn call(sequence: u64, count: u64) -> Call {
    Call { kind: Kind::AllReduce, sequence, dtype: DType::F32, count, layout: 0, op: None, root: None }
}

fn header(rank: usize) -> FlightHeader {
    let name = format!("worker:{rank}");
    Identity { group: "world", rank: Rank::of(rank), name: &name, world_size: 3, transport: "tcp" }.into()
}

fn record(rank: usize, calls: &[(u64, u64)]) -> FlightRecord {
    let recorder = Recorder::new(None, None);
    for (sequence, count) in calls {
        recorder.issue(call(*sequence, *count), Instant::now(), true);
    }
    recorder.record(header(rank))
}

#[test]
fn the_last_operations_are_kept() {
    let recorder = Recorder::new(None, None);
    let count = KEPT as u64 + 5;
    for sequence in 0..count {
        let token = recorder.issue(call(sequence, 8), Instant::now(), true);
        if sequence + 1 < count {
            recorder.finish(token, Ok(()), None, || header(0));
        }
    }
    // Another operation uses its position by now.
    recorder.finish(RecordToken(0), Ok(()), None, || header(0));
    let record = recorder.record(header(0));
    assert_eq!(record.operations.len(), KEPT);
    assert_eq!(record.operations[0].sequence, 5);
    let [.., done, last] = &record.operations[..] else { panic!() };
    assert_eq!((done.state, last.state), (RecordedState::Done, RecordedState::Issued));
    assert!(last.call == format!("all_reduce #{} of 8 f32", count - 1) && last.bytes == 32, "{last:?}");
    assert!(done.finished_s.unwrap() >= done.issued_s);
}

#[test]
fn a_failure_is_written_once_and_reads_back() {
    let folder = tempfile::tempdir().unwrap();
    let recorder = Recorder::new(Some(folder.path().join("flight")), None);
    let error = Error::GroupSize { given: 0, max: 1 };
    let token = recorder.issue(call(0, 8), Instant::now(), true);
    recorder.finish(token, Err(&error), None, || header(2));
    let later = recorder.issue(call(1, 8), Instant::now(), true);
    recorder.finish(later, Err(&error), None, || header(2));
    let records = FlightRecord::read_all(&folder.path().join("flight")).unwrap();
    assert_eq!(records.len(), 1);
    assert_eq!((records[0].rank.0, records[0].operations.len()), (2, 1));
    assert_eq!(records[0].operations[0].state, RecordedState::Failed);
    assert_eq!(records[0].failure, Some(error.to_string()));
}

#[test]
fn groups_in_which_ranks_are_alike_have_records_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let (flight, trace) = (folder.path().join("flight"), folder.path().join("trace.json"));
    // Two processes, of which each is rank 0 of a group of its own, and one of them of a group of both.
    let long = "g".repeat(1000);
    for (group, name) in [("world/0.0", "worker:0"), ("world-0.0", "worker:1"), (&*long, "worker:0")] {
        let recorder = Recorder::new(Some(flight.clone()), Some(trace.clone()));
        let header = || Identity { group, rank: Rank::of(0), name, world_size: 1, transport: "tcp" }.into();
        let token = recorder.issue(call(0, 8), Instant::now(), true);
        recorder.finish(token, Err(&Error::GroupSize { given: 0, max: 1 }), None, header);
        recorder.close(header);
    }
    let records = FlightRecord::read_all(&flight).unwrap();
    assert_eq!(records.len(), 3);
    let text = explain(&records);
    assert!(text.matches("1 of 1 ranks left a record").count() == 3 && !text.contains("left no record"), "{text}");
    let traces = fs::read_dir(folder.path()).unwrap().filter(|file| file.as_ref().unwrap().path().is_file());
    assert_eq!(traces.count(), 2, "one for each rank's name");
}

#[test]
fn the_culprit_is_named() {
    let all = [(0, 8), (1, 8), (2, 8)];
    let says = |records: &[FlightRecord], words: &[&str]| {
        let text = explain(records);
        let verdict = text.lines().find(|line| line.starts_with("verdict")).unwrap();
        assert!(words.iter().all(|word| verdict.contains(word)), "{text}");
    };
    says(&[record(0, &all), record(1, &all)], &["rank 2 left no record"]);
    let other = [(0, 8), (1, 9)];
    says(
        &[record(0, &all), record(1, &other), record(2, &all)],
        &["part at #1", "worker:1 calls all_reduce #1 of 9 f32", "worker:2 calls all_reduce #1 of 8 f32"],
    );
    says(&[record(0, &all), record(1, &all[..1]), record(2, &all)], &["worker:1 has not called #1"]);
    says(&[record(0, &all), record(1, &all), record(2, &all)], &["all ranks have called the same"]);
    assert!(explain(&[]).contains("DISTRIBUTE_FLIGHT_DIR"));
}

#[test]
fn a_trace_has_a_span_for_each_operation_that_ended() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    for _ in 0..2 {
        let recorder = Recorder::new(None, Some(path.clone()));
        let token = recorder.issue(call(0, 8), Instant::now(), true);
        recorder.finish(token, Ok(()), None, || header(1));
        recorder.issue(call(1, 8), Instant::now(), true);
        recorder.close(|| header(1));
    }
    let files: Vec<PathBuf> = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    assert!(file.file_name().unwrap().to_str().unwrap().starts_with("trace.worker-1."), "{files:?}");
    let written = fs::read(file).unwrap();
    let events: Vec<serde_json::Value> = serde_json::from_slice(&written).unwrap();
    let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(spans.len(), 2, "one of each group");
    assert_eq!((&spans[0]["name"], &spans[0]["args"]["bytes"]), (&"all_reduce".into(), &32.into()));
    assert!(spans[0]["ts"].as_f64().unwrap() > 1e15 && spans[0]["dur"].as_f64().unwrap() >= 0.0);
}

#[test]
fn the_present_call_is_the_oldest_that_blocks() {
    let recorder = Recorder::new(None, None);
    assert_eq!(recorder.present(), (0, None, None));
    let early = Instant::now() - Duration::from_secs(7);
    let background = recorder.issue(call(0, 8), early, false);
    let (calls, present, last) = recorder.present();
    let present = present.unwrap();
    assert_eq!((calls, present.sequence, present.blocked, last), (1, 0, None, None));
    assert!(present.since >= Duration::from_secs(7) && present.call == "all_reduce #0 of 8 f32" && present.bytes == 32);
    let blocking = recorder.issue(call(1, 8), Instant::now(), true);
    assert_eq!(recorder.present().1.unwrap().sequence, 1, "the one in the background holds up nobody");
    recorder.block(background, early);
    let present = recorder.present().1.unwrap();
    assert!(present.sequence == 0 && present.blocked.unwrap() >= Duration::from_secs(7), "{present:?}");
    recorder.finish(background, Ok(()), Some(early), || header(0));
    recorder.finish(blocking, Ok(()), None, || header(0));
    let (calls, present, last) = recorder.present();
    assert_eq!((calls, present, last.unwrap().call.as_str()), (2, None, "all_reduce #1 of 8 f32"));
}

#[test]
fn a_call_that_has_been_pending_for_long_is_not_searched_for_ever() {
    let recorder = Recorder::new(None, None);
    recorder.issue(call(0, 8), Instant::now(), false);
    for sequence in 1..=SEARCHED {
        let token = recorder.issue(call(sequence, 8), Instant::now(), true);
        recorder.finish(token, Ok(()), None, || header(0));
    }
    assert_eq!(recorder.present().1, None);
}

#[test]
fn groups_that_write_at_once_never_show_a_part() {
    let folder = tempfile::tempdir().unwrap();
    let (file, text) = (folder.path().join("rank_00000.json"), "a".repeat(1 << 20));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    write_json(&file, &text).unwrap();
                    assert!(serde_json::from_slice::<String>(&fs::read(&file).unwrap()).unwrap() == text);
                }
            });
        }
    });
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_record_that_cannot_be_written_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    // A folder is in the place of the file.
    let file = folder.path().join("rank_00000.json");
    fs::create_dir(&file).unwrap();
    write_json(&file, &1).unwrap_err();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

//! Checkpoints and event files on a server that speaks S3's protocol, over connections that are cut.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use distribute_device::DType;
use distribute_storage::Location;
use distribute_strategy::Strategy;
use distribute_testkit::{RelayFault, with_object_server};
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use distribute_train::{BoxError, Error};
use distribute_types::ErrorClass;

const LIMIT: Duration = Duration::from_secs(400);

/// Larger than one part of an upload.
const BYTES: usize = 20 << 20;

/// Returns the weights of a step: others for each.
fn weights(step: u64) -> Vec<u8> {
    let mut state = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(BYTES);
    while bytes.len() < BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}

struct Weights(Vec<u8>);

impl Checkpointed for Weights {
    fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        snapshot.put_bytes("model", "w", DType::U8, &[self.0.len()], self.0.clone());
        Ok(())
    }

    fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
        Ok(())
    }
}

fn save(manager: &mut CheckpointManager, step: u64) -> Result<(), Error> {
    manager.save(&Strategy::default_strategy()?, step, &[&Weights(weights(step))], &step)?;
    manager.finish()
}

/// Returns the step of the newest checkpoint, whose weights are compared bit for bit.
fn newest(root: &str) -> Option<u64> {
    let snapshot = CheckpointManager::new(root).read_newest().unwrap()?;
    let step = snapshot.step();
    assert_eq!(snapshot.program::<u64>().unwrap(), step);
    let (_, _, bytes) = snapshot.tensor("model", "w").unwrap();
    assert!(bytes == weights(step), "the weights of step {step} are others than those that were saved");
    Some(step)
}

/// Set in the process that saves until it is killed.
const SAVER: &str = "DISTRIBUTE_TEST_SAVER";

#[test]
fn a_process_killed_in_the_middle_of_a_save_leaves_the_last_whole_checkpoint() {
    if let Ok(root) = std::env::var(SAVER) {
        let strategy = Strategy::default_strategy().unwrap();
        let mut manager = CheckpointManager::new(root).keep(2);
        let first = manager.restore::<u64>(&strategy, &[]).unwrap().map_or(1, |(step, _)| step + 1);
        // It is killed long before.
        (first..first + 1000).for_each(|step| save(&mut manager, step).unwrap());
    }
    with_object_server(LIMIT, |relay| {
        let root = "s3://bucket/killed/checkpoints";
        let mut last = 0;
        // In the first checkpoint, in a part, between parts, at the manifest and later.
        let mib = 1 << 20;
        for after in [10 * mib, 25 * mib, 37 * mib, BYTES as u64 + 2000, 2 * BYTES as u64 + 6000, 45 * mib + 7] {
            let begun = relay.sent();
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "object_store::a_process_killed_in_the_middle_of_a_save_leaves_the_last_whole_checkpoint",
                ])
                .env(SAVER, root)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let until = Instant::now() + Duration::from_secs(60);
            while relay.sent() - begun < after && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
            let is_running = child.try_wait().unwrap().is_none();
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(is_running && relay.sent() - begun >= after, "it did not get as far as {after} bytes");
            let found = newest(root).unwrap_or(0);
            let whole = after / (BYTES as u64 + 100_000);
            assert!(found >= last + whole.saturating_sub(1), "{found} after {last}, killed after {after} bytes");
            last = found;
        }
        // The next process resumes, and removes what the others have left.
        let mut manager = CheckpointManager::new(root).keep(2);
        let restored = manager.restore::<u64>(&Strategy::default_strategy().unwrap(), &[]).unwrap();
        assert_eq!(restored, Some((last, last)));
        save(&mut manager, last + 1).unwrap();
        assert_eq!(newest(root), Some(last + 1));
        let below = Location::open(root).unwrap().list_below().unwrap();
        assert_eq!(below.iter().filter(|entry| entry.name.ends_with(".folder")).count(), 2, "{below:?}");
    });
}

#[test]
fn cut_connections_are_repeated_and_never_make_a_wrong_checkpoint() {
    with_object_server(LIMIT, |relay| {
        let root = "s3://bucket/cut/checkpoints";
        let mut manager = CheckpointManager::new(root).keep(2);
        save(&mut manager, 1).unwrap();
        relay.set(RelayFault::CutRequests { after_bytes: 5_000_000, times: 4 });
        save(&mut manager, 2).unwrap();
        assert_eq!((relay.cuts(), newest(root)), (4, Some(2)));
        relay.set(RelayFault::CutAnswers { after_bytes: 300, times: 6 });
        save(&mut manager, 3).unwrap();
        assert_eq!((relay.cuts(), newest(root)), (6, Some(3)));
        relay.set(RelayFault::CutAnswers { after_bytes: 6_000_000, times: 3 });
        assert_eq!(newest(root), Some(3));
        assert_eq!(relay.cuts(), 3);
        // A slow connection is waited for.
        relay.set(RelayFault::Slow(Duration::from_micros(200)));
        save(&mut manager, 4).unwrap();
        assert_eq!(newest(root), Some(4));
        relay.set(RelayFault::None);
        manager.remove().unwrap();
        assert!(!Location::open(root).unwrap().exists().unwrap());
    });
}

/// A job manager may answer the error by a restart.
#[test]
fn a_connection_that_stays_cut_is_an_error_and_no_older_checkpoint_is_used() {
    with_object_server(LIMIT, |relay| {
        let root = "s3://bucket/stays/checkpoints";
        let mut manager = CheckpointManager::new(root).keep(2);
        save(&mut manager, 3).unwrap();
        relay.set(RelayFault::CutAnswers { after_bytes: 200, times: usize::MAX });
        let found = CheckpointManager::new(root).read_newest().map(|found| found.map(|found| found.step()));
        let error = found.unwrap_err();
        assert!(error.is_retryable() && error.to_string().contains(root), "{error}");
        for after_bytes in [1000, 3_000_000] {
            relay.set(RelayFault::CutRequests { after_bytes, times: usize::MAX });
            let error = save(&mut manager, 4).unwrap_err();
            assert!(error.is_retryable() && error.to_string().contains(root), "{error}");
            assert!(!error.to_string().contains("test-secret"));
            relay.set(RelayFault::None);
            assert_eq!(newest(root), Some(3));
        }
        save(&mut manager, 4).unwrap();
        assert_eq!(newest(root), Some(4));
    });
}

#[test]
fn a_missing_bucket_is_an_error_of_the_configuration() {
    with_object_server(LIMIT, |_| {
        let error = save(&mut CheckpointManager::new("s3://no-such-bucket/run"), 1).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("s3://no-such-bucket/run") && text.contains("the bucket does not exist"), "{text}");
        assert_eq!(error.class().exit_code(), 2);
        assert!(CheckpointManager::new("s3://no-such-bucket/run").read_newest().is_err());
    });
}

#[cfg(feature = "tensorboard")]
#[test]
fn event_files_are_read_after_they_are_closed() {
    use distribute_input::Dataset;
    use distribute_input::read::{ReadOptions, TfRecords};
    use distribute_train::tensorboard::EventWriter;

    with_object_server(LIMIT, |relay| {
        relay.set(RelayFault::CutRequests { after_bytes: 1500, times: 3 });
        let mut writer = EventWriter::create("s3://bucket/logs/train").unwrap();
        for step in 0..1000 {
            writer.scalar("loss", step, 0.5).unwrap();
            writer.flush().unwrap();
        }
        writer.close().unwrap();
        relay.set(RelayFault::None);
        let folder = Location::open("s3://bucket/logs/train").unwrap();
        let files = folder.list().unwrap();
        assert_eq!(files.len(), 1);
        let local = tempfile::tempdir().unwrap();
        let path = local.path().join("events");
        std::fs::write(&path, folder.join(&files[0].name).read(1 << 20).unwrap()).unwrap();
        let records = Dataset::from_files([path]).read(TfRecords, ReadOptions::default());
        assert_eq!(records.iter().map(|record| record.unwrap().len()).filter(|length| *length > 0).count(), 1001);
    });
}

//! A profile of some steps on each worker.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use distribute_collectives::FlightRecord;

use super::{Callback, Training};
use crate::checkpoint::bounded;
use crate::objects;
use crate::tensorboard::xplane::{self, Detail, Row, Span};
use crate::{Error, Result};

/// Writes a profile of some steps, on each worker, for TensorBoard's profile plugin (`pip install xprof`): spans of the
/// steps, and of the collective operations of each local replica, with their sizes. It does not see inside a replica's
/// computation.
///
/// Each worker writes `plugins/profile/steps_FIRST_to_LAST/worker_INDEX.xplane.pb` in the folder after the last of the
/// steps; where workers share no folder, copy the files into one. A step's span begins at the end of the step before,
/// so it includes waiting for data. Steps are counted over all epochs, from 1. A later run of the same steps replaces
/// the files.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::Profile;
/// // The first steps allocate memory and are slower than others.
/// let profile = Profile::new("runs/1", 20..=30);
/// ```
///
/// # Source
/// `profile_batch` of `tf.keras.callbacks.TensorBoard`.
#[derive(Debug)]
pub struct Profile {
    folder: PathBuf,
    steps: RangeInclusive<u64>,
    /// The end of the last step, and its number.
    since: Option<(Instant, u64)>,
    recording: Option<Recording>,
}

/// A profile whose last step has not been made.
#[derive(Debug)]
struct Recording {
    began: Instant,
    began_at: SystemTime,
    steps: Vec<Span>,
    /// For each local replica, its operations, and the number of the next one.
    replicas: Vec<(Vec<Span>, u64)>,
}

impl Profile {
    /// Profiles these steps, and writes to this folder, which may be a URL of a store (feature `object-store`). An
    /// empty range profiles nothing.
    pub fn new(folder: impl Into<PathBuf>, steps: RangeInclusive<u64>) -> Profile {
        Profile { folder: folder.into(), steps, since: None, recording: None }
    }

    /// Records the steps after the last call, up to the current one.
    fn record(&mut self, training: &Training<'_>) {
        let now = Instant::now();
        let Some((begin, before)) = self.since else { return };
        let (first, last) = (*self.steps.start(), *self.steps.end());
        if first > last || training.step < first || before >= last || training.step == before {
            return;
        }
        let groups = training.strategy.groups();
        let recording = self.recording.get_or_insert_with(|| Recording {
            began: begin,
            began_at: SystemTime::now().checked_sub(now - begin).unwrap_or(UNIX_EPOCH),
            steps: Vec::new(),
            replicas: vec![(Vec::new(), 0); groups.len()],
        });
        let name = match before + 1 == training.step {
            true => format!("step {}", training.step),
            false => format!("steps {} to {}", before + 1, training.step),
        };
        let seconds = |at: Instant| (at - recording.began).as_secs_f64();
        recording.steps.push(Span { name, begin_s: seconds(begin), end_s: seconds(now), details: Vec::new() });
        let began_s = since_1970(recording.began_at).as_secs_f64();
        for (group, (spans, next)) in groups.iter().zip(&mut recording.replicas) {
            let record = group.flight_record();
            spans.extend(operations(&record, *next, began_s));
            *next = record.operations.last().map_or(*next, |last| last.sequence + 1);
        }
    }

    /// Writes what was recorded, if anything.
    fn write(&mut self, training: &Training<'_>) -> Result<()> {
        let Some(recording) = self.recording.take() else { return Ok(()) };
        let topology = training.strategy.topology();
        let host = format!("worker_{}", topology.worker());
        let began_ns = i64::try_from(since_1970(recording.began_at).as_nanos()).unwrap_or(0);
        let mut rows = vec![Row { name: "steps".to_owned(), spans: recording.steps }];
        for ((spans, _), replica) in recording.replicas.into_iter().zip(topology.first_replica()..) {
            rows.extend(xplane::without_overlap(&format!("collectives of replica {replica}"), spans));
        }
        let bytes = xplane::encode(&host, began_ns, &rows);
        let run = format!("plugins/profile/steps_{}_to_{}", self.steps.start(), self.steps.end());
        let path = objects::resolved(self.folder.clone()).join(run).join(format!("{host}.xplane.pb"));
        let place = path.clone();
        let write = move || write_whole(&path, &bytes).map_err(|source| Error::File { path, source });
        bounded("writing", &place, write)
    }
}

impl Callback for Profile {
    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.since = Some((Instant::now(), training.step));
        Ok(())
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.record(training);
        if training.step >= *self.steps.end() {
            self.write(training)?;
        }
        self.since = Some((Instant::now(), training.step));
        Ok(())
    }

    fn train_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.write(training)
    }
}

/// Returns the operations from number `from` on that have begun since the profile did and have ended.
fn operations(record: &FlightRecord, from: u64, began_s: f64) -> impl Iterator<Item = Span> {
    let later = record.began_s - began_s;
    record.operations.iter().filter(move |operation| operation.sequence >= from).filter_map(move |operation| {
        let (begin_s, end_s) = (operation.issued_s + later, operation.finished_s? + later);
        let mut details =
            vec![("call", Detail::Text(operation.call.clone())), ("bytes", Detail::Number(operation.bytes))];
        details.extend(operation.error.clone().map(|error| ("error", Detail::Text(error))));
        (begin_s >= 0.0).then(|| Span { name: operation.kind.clone(), begin_s, end_s, details })
    })
}

/// Writes a file so that readers find a complete one or none.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(object) = objects::of(path)? {
        return object.write(bytes);
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let unfinished = path.with_extension("pb.tmp");
    fs::write(&unfinished, bytes)?;
    fs::rename(&unfinished, path)
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use distribute_collectives::ReduceOp;
    use distribute_strategy::MirroredStrategy;

    use super::*;
    use crate::callbacks::tests::Toy;

    /// Makes steps with one collective operation each, on two replicas.
    fn train(profile: &mut Profile, steps: u64) {
        let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
        let mut toy = Toy::under(strategy);
        toy.show(&[], |training| profile.epoch_begin(training)).unwrap();
        for _ in 0..steps {
            toy.step += 1;
            let step = |training: &mut Training<'_>| {
                let sums = training.strategy.run_with((), |context, ()| {
                    let mut numbers = vec![1.0f32; 256];
                    context.group().all_reduce(&mut numbers, ReduceOp::Sum)?;
                    Ok::<_, distribute_strategy::Error>(numbers[0])
                });
                assert_eq!(sums.unwrap().values()[0], 2.0);
                profile.step_end(training)
            };
            toy.show(&[("loss", 1.0)], step).unwrap();
        }
        toy.show(&[], |training| profile.train_end(training)).unwrap();
    }

    fn file(folder: &Path, run: &str) -> PathBuf {
        folder.join("plugins/profile").join(run).join("worker_0.xplane.pb")
    }

    #[test]
    fn the_steps_and_their_operations_are_written() {
        let folder = tempfile::tempdir().unwrap();
        train(&mut Profile::new(folder.path(), 2..=3), 5);
        let rows = xplane::decode(&fs::read(file(folder.path(), "steps_2_to_3")).unwrap());
        let names = |row: &Row| row.spans.iter().map(|span| span.name.clone()).collect::<Vec<_>>().join(", ");
        assert_eq!((rows[0].name.as_str(), names(&rows[0]).as_str()), ("steps", "step 2, step 3"));
        for (replica, row) in rows[1..].iter().enumerate() {
            assert_eq!(row.name, format!("collectives of replica {replica}"));
            let sums: Vec<&Span> = row.spans.iter().filter(|span| span.name == "all_reduce").collect();
            assert_eq!(sums.len(), 2, "{row:?}");
            for (sum, step) in sums.iter().zip(&rows[0].spans) {
                // Times of the two clocks differ a little.
                assert!(sum.begin_s > step.begin_s - 1e-3 && sum.end_s < step.end_s + 1e-3, "{sum:?} {step:?}");
                assert!(sum.details.contains(&("bytes", Detail::Number(1024))), "{sum:?}");
            }
        }
        assert_eq!(rows.len(), 3);
    }

    #[test]
    fn a_training_that_ends_before_writes_what_there_is() {
        let folder = tempfile::tempdir().unwrap();
        train(&mut Profile::new(folder.path(), 4..=90), 5);
        let rows = xplane::decode(&fs::read(file(folder.path(), "steps_4_to_90")).unwrap());
        assert_eq!(rows[0].spans.len(), 2);
        train(&mut Profile::new(folder.path().join("none"), 6..=90), 5);
        #[expect(clippy::reversed_empty_ranges, reason = "it profiles nothing")]
        train(&mut Profile::new(folder.path().join("none"), 3..=2), 5);
        assert!(!folder.path().join("none").exists());
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let occupied = folder.path().join("file");
        fs::write(&occupied, "").unwrap();
        let mut toy = Toy::new();
        let mut profile = Profile::new(&occupied, 1..=1);
        toy.show(&[], |training| profile.epoch_begin(training)).unwrap();
        toy.step = 1;
        let error = toy.show(&[], |training| profile.step_end(training)).unwrap_err();
        assert!(matches!(&error, Error::File { path, .. } if path.starts_with(&occupied)), "{error}");
    }

    #[test]
    fn xprof_reads_it() {
        let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/peers/tf/bin/python");
        let installed = Command::new(python).args(["-c", "import xprof"]).output();
        if !installed.is_ok_and(|output| output.status.success()) {
            distribute_testkit::skipped(
                "xprof is not installed \
                 (python3 -m venv target/peers/tf && target/peers/tf/bin/pip install xprof)",
            );
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        train(&mut Profile::new(folder.path(), 2..=3), 5);
        let script = "import sys, json; from xprof.convert import raw_to_tool_data as convert; \
                      data, _ = convert.xspace_to_tool_data([sys.argv[1]], 'trace_viewer', {}); \
                      events = json.loads(data)['traceEvents']; \
                      print(sorted(e['name'] for e in events if e.get('ph') == 'X')); \
                      print(sorted(e['args']['name'] for e in events if e.get('name') == 'thread_name'))";
        let path = file(folder.path(), "steps_2_to_3");
        let output = Command::new(python).args(["-c", script]).arg(path).output().unwrap();
        let expected = "['all_reduce', 'all_reduce', 'all_reduce', 'all_reduce', 'step 2', 'step 3']\n\
                        ['collectives of replica 0', 'collectives of replica 1', 'steps']\n";
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{errors}");
    }
}

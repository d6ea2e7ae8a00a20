//! The rows that each replica reads: the numbers of tf.distribute's own tests.

use distribute_input::read::{ReadOptions, TfRecordWriter, TfRecords};
use distribute_input::{
    BoxError, Cardinality, Error, InputPosition, InputReplicationMode, Parallel, Sizes, UnequalData,
    distribute_datasets_from_function,
};

use super::*;

#[test]
fn range_9_batch_2_over_two_replicas_and_over_two_workers() {
    let data = Dataset::range(0..9).batch(2);
    let one = &workers(&data, 1, 2, InputOptions::default())[0];
    assert_eq!(one.last().unwrap(), &[vec![8], vec![]]);
    let two = workers(&data, 2, 1, InputOptions::default());
    assert_eq!(flat(&two[0]), [[0], [2], [4], [6], [8]]);
    assert_eq!(flat(&two[1]), [vec![1], vec![3], vec![5], vec![7], vec![]]);
    let dropped = InputOptions::default().unequal_data(UnequalData::Drop);
    assert_eq!(workers(&data, 1, 2, dropped)[0].last().unwrap(), &[[6], [7]]);
}

#[test]
fn range_15_batch_4_over_two_workers_of_two_replicas_dealt_by_a_hint() {
    let data = Dataset::range(0..15).shard_hint().batch(4);
    let two = workers(&data, 2, 2, with(AutoShardPolicy::Hint));
    assert_eq!(two[0].last().unwrap(), &[[12], [14]]);
    assert_eq!(two[1].last().unwrap(), &[vec![13], vec![]]);
}

#[test]
fn range_8_batch_3_over_two_workers_by_data() {
    let two = workers(&Dataset::range(0..8).batch(3), 2, 1, with(AutoShardPolicy::Data));
    assert_eq!(flat(&two[0]), [vec![0, 1], vec![3, 4], vec![6]]);
    assert_eq!(flat(&two[1]), [[2], [5], [7]]);
}

#[test]
fn pieces_of_batches_whose_size_rotates_or_is_equal() {
    // 12 elements, global batch 8: two workers get 4, 4, 4 and nothing.
    let two = workers(&Dataset::range(0..12).batch(8), 2, 1, InputOptions::default());
    let sizes = |steps: &[Vec<Rows>]| flat(steps).iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!((sizes(&two[0]), sizes(&two[1])), (vec![4, 4], vec![4, 0]));
    let two = workers(&Dataset::range(0..12).batch(8), 2, 1, with(AutoShardPolicy::Data));
    assert_eq!((sizes(&two[0]), sizes(&two[1])), (vec![4, 2], vec![4, 2]));
    // Global batch 7 over 2 × 2.
    let two = workers(&Dataset::range(0..14).batch(7), 2, 2, InputOptions::default());
    assert_eq!((sizes(&two[0]), sizes(&two[1])), (vec![2, 2, 2, 1], vec![2, 1, 2, 2]));
    // Equal pieces: range(4).batch(4) over 5, and range(8).batch(4) over 3.
    let five = &workers(&Dataset::range(0..4).batch(4), 1, 5, with(AutoShardPolicy::Data))[0];
    assert_eq!(flat(five), [vec![0], vec![1], vec![2], vec![3], vec![]]);
    let three = &workers(&Dataset::range(0..8).batch(4), 1, 3, with(AutoShardPolicy::Data))[0];
    assert_eq!(three[0], [vec![0, 1], vec![2, 3], vec![]]);
}

#[test]
fn off_shows_everything_to_every_worker() {
    let two = workers(&Dataset::range(0..4).batch(2), 2, 1, with(AutoShardPolicy::Off));
    assert_eq!(flat(&two[0]), [[0], [1], [2], [3]]);
    assert_eq!(two[0], two[1]);
    // The policy `Hint` without a hint in the pipeline has the same effect.
    assert_eq!(workers(&Dataset::range(0..4).batch(2), 2, 1, with(AutoShardPolicy::Hint)), two);
    let plan = worker(&Dataset::range(0..4).batch(2), (2, 0, 1), with(AutoShardPolicy::Off)).plan().to_string();
    assert!(plan.contains("each example is seen by every worker"), "{plan}");
}

#[test]
fn policies_that_do_not_fit_are_refused() {
    let topology = Topology::new(2, 0, 1).unwrap();
    let data = Dataset::range(0..4).batch(2);
    let text = distribute_dataset(&data, topology, with(AutoShardPolicy::File)).unwrap_err().to_string();
    assert!(text.contains("Dataset::from_files"), "{text}");
    let deterministic = with(AutoShardPolicy::Off).deterministic(true);
    let text = distribute_dataset(&data, topology, deterministic).unwrap_err().to_string();
    assert!(text.contains("deterministic"), "{text}");
}

#[test]
fn caches_and_shuffles_live_across_passes() {
    let data = Dataset::range(0..8).map(Ok).cache().shuffle(8, 1).batch(4);
    let first = worker(&data, (1, 0, 2), InputOptions::default());
    let (one, two) = (steps(first.iter()), steps(first.iter()));
    assert_ne!(one, two);
    let sorted = |steps: &[Vec<Rows>]| {
        let mut all = flat(steps).concat();
        all.sort_unstable();
        all
    };
    assert_eq!((sorted(&one), sorted(&two)), ((0..8).collect(), (0..8).collect::<Vec<_>>()));
}

#[test]
fn a_function_is_called_for_each_worker_or_each_replica() {
    let per = |replication_mode| {
        let options = InputOptions::default().replication_mode(replication_mode);
        let mut asked = Vec::new();
        let topology = Topology::new(2, 1, 2).unwrap();
        let data = distribute_datasets_from_function(topology, options, |context| {
            asked.push((context.input_pipeline_id, context.num_input_pipelines));
            let count = context.num_input_pipelines;
            Ok(Dataset::range(0..10).shard(count, context.input_pipeline_id).batch(2))
        });
        (asked, steps(data.unwrap().iter()))
    };
    let (asked, parts) = per(InputReplicationMode::PerWorker);
    assert_eq!((asked, parts), (vec![(1, 2)], vec![vec![vec![1, 3], vec![5, 7]], vec![vec![9], vec![]]]));
    let (asked, parts) = per(InputReplicationMode::PerReplica);
    assert_eq!((asked, parts), (vec![(2, 4), (3, 4)], vec![vec![vec![2, 6], vec![3, 7]]]));
}

#[test]
fn options_that_have_no_effect_are_refused() {
    let topology = Topology::local(2).unwrap();
    let told = |outcome: Result<(), distribute_input::Error>| outcome.unwrap_err().to_string();
    let per_replica = InputOptions::default().replication_mode(InputReplicationMode::PerReplica);
    let data = distribute_dataset(&Dataset::range(0..8).batch(4), topology, per_replica);
    assert!(told(data.map(drop)).contains("distribute a function"));
    let policies = [AutoShardPolicy::File, AutoShardPolicy::Data, AutoShardPolicy::Hint, AutoShardPolicy::Off];
    let options = policies.map(|policy| InputOptions::default().auto_shard_policy(policy));
    for options in options.into_iter().chain([InputOptions::default().deterministic(true)]) {
        let data = distribute_datasets_from_function(topology, options, |_| Ok(Dataset::range(0..8).batch(2)));
        assert!(told(data.map(drop)).contains("the input function decides"), "{options:?}");
    }
}

#[test]
fn the_number_of_steps_is_that_of_a_pass_or_unknown_if_some_are_dropped() {
    for unequal in [UnequalData::Pad, UnequalData::Drop, UnequalData::Stop] {
        let (topology, options) = (Topology::local(2).unwrap(), InputOptions::default().unequal_data(unequal));
        let data = distribute_dataset(&Dataset::range(0..9).batch(4), topology, options).unwrap();
        let made = distribute_datasets_from_function(topology, options, |_| Ok(Dataset::range(0..9).batch(4)));
        let made = made.unwrap();
        let (counts, steps) = ([data.cardinality(), made.cardinality()], [data.iter().count(), made.iter().count()]);
        match unequal {
            UnequalData::Drop => assert_eq!((counts, steps), ([Cardinality::Unknown; 2], [2, 1])),
            _ => assert_eq!((counts, steps), ([Cardinality::Known(3), Cardinality::Known(2)], [3, 2])),
        }
    }
}

#[test]
fn workers_read_files_of_their_own_and_divide_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (paths, all) = files(folder.path(), &[4, 4, 3]);
    let data = numbers(&paths, 1).batch(4);
    let two = workers(&data, 2, 1, InputOptions::default());
    assert_eq!(flat(&two[0]), [vec![0, 1], vec![2, 3], vec![8, 10]]);
    assert_eq!(flat(&two[1]), [vec![4, 5], vec![6, 7], vec![9]]);
    // More workers than files.
    let five = workers(&data, 5, 1, InputOptions::default());
    let mut seen = five.iter().flat_map(|steps| flat(steps).concat()).collect::<Rows>();
    seen.sort_unstable();
    assert_eq!(seen, all);
    let plan = worker(&data, (2, 0, 1), InputOptions::default()).plan().to_string();
    assert!(plan.contains("worker 0 reads 0.txt, 2.txt (records 0 of every 2)\nworker 1 reads 1.txt, 2.txt"), "{plan}");
    // With `deterministic`, the rows of each step are the same for any number of workers.
    let deterministic = InputOptions::default().deterministic(true);
    let steps_of = |count: usize, replicas: usize| {
        let workers = workers(&data, count, replicas, deterministic);
        (0..3)
            .map(|step| workers.iter().flat_map(|worker| worker[step].clone()).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    assert_eq!(steps_of(1, 4), steps_of(4, 1));
    assert_eq!(steps_of(1, 4), steps_of(2, 2));
    // A dataset that is no longer a list of files is read by all workers together.
    let taken = worker(&numbers(&paths, 1).take(6).batch(4), (2, 1, 1), InputOptions::default());
    assert!(taken.ends_together(taken.iter().position()));
    // A pass that began with files for each worker continues with them, whatever is asked for then.
    let begun = worker(&data, (2, 0, 1), InputOptions::default());
    let later = worker(&data, (2, 0, 1), deterministic);
    assert!(later.ends_together(later.iter().position()) && !later.ends_together(begun.iter().position()));
    // Workers compare their files, and how elements are chosen and ordered if all read them.
    let differ = |one: &WorkerDataset<_>, other: &WorkerDataset<_>| one.plan().settings() != other.plan().settings();
    let others = numbers(&[&paths[..2], &paths[..1]].concat(), 1).batch(4);
    assert!(differ(&begun, &worker(&others, (2, 1, 1), InputOptions::default())));
    assert!(!differ(&begun, &worker(&data, (2, 1, 1), InputOptions::default())));
    // And how each orders its part of them, which positions compare too.
    let shuffled = |size: usize| worker(&numbers(&paths, 1).shuffle(size, 3).batch(4), (2, 1, 1), Default::default());
    assert!(differ(&shuffled(4), &shuffled(8)) && !differ(&shuffled(4), &shuffled(4)));
    let range = || Dataset::range(0..20);
    let of = |data: Dataset<Array<i64>>| worker(&data.batch(4), (2, 1, 1), InputOptions::default());
    for (one, other) in [
        (range().shuffle(4, 1), range().shuffle(8, 1)),
        (range().shuffle(4, 1), range().shuffle_once(4, 1)),
        (range().skip(4), range().take(16)),
        (range().shard(2, 0), range().shard(2, 1)),
        (range().shuffle(4, 1).memory_budget(64, Sizes::default()), range().shuffle(4, 1)),
        (numbers(&paths, 1).take(6), numbers(&paths, 2).take(6)),
    ] {
        assert_ne!(one.settings().unwrap(), other.settings().unwrap());
        let (one, same, other) = (of(one.clone()), of(one), of(other));
        assert!(differ(&one, &other) && !differ(&one, &same));
    }
}

#[test]
fn exact_batches_of_files_lose_only_what_fills_no_step() {
    let folder = tempfile::tempdir().unwrap();
    let (paths, _) = files(folder.path(), &[7, 8]);
    let data = numbers(&paths, 1).batch_exact(4);
    let two = workers(&data, 2, 1, InputOptions::default());
    assert_eq!(flat(&two[0]), [[0, 1], [2, 3], [4, 5]]);
    assert_eq!(flat(&two[1]), [[7, 8], [9, 10], [11, 12], [13, 14]]);
    // One worker reads whole batches, as do those that read all by themselves.
    assert_eq!(flat(&workers(&data, 1, 1, InputOptions::default())[0]).concat(), (0..12).collect::<Rows>());
    assert_eq!(workers(&data, 2, 1, with(AutoShardPolicy::Off))[0].len(), 6);
    // Parts of unequal sizes need whole batches.
    let odd = workers(&numbers(&paths, 1).batch_exact(5), 2, 1, InputOptions::default());
    assert!(odd.iter().all(|steps| flat(steps).concat().len() == 5), "{odd:?}");
    // So do parts whose replicas get unequal numbers of rows.
    let (paths, _) = files(folder.path(), &[12, 12]);
    let three = workers(&numbers(&paths, 1).batch_exact(8), 2, 3, InputOptions::default());
    let sizes = |steps: &[Vec<Rows>]| flat(steps).iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!((sizes(&three[0]), sizes(&three[1])), (vec![2, 2, 1, 1, 1, 1], vec![1, 1, 1, 2, 2, 1]));
}

#[test]
fn a_snapshot_of_exact_batches_is_that_of_the_rows_of_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let (paths, _) = files(folder.path(), &[12, 12]);
    let encode = |batch: &Array<i64>| batch.as_slice().iter().flat_map(|number| number.to_le_bytes()).collect();
    let decode = |bytes: &[u8]| {
        let numbers = bytes.chunks_exact(8).map(|chunk| Ok(i64::from_le_bytes(chunk.try_into()?)));
        Ok(Array::from(numbers.collect::<Result<Vec<i64>, BoxError>>()?))
    };
    for (first, second) in [(1, 3), (3, 1)] {
        let cached = folder.path().join(format!("{first}"));
        // The third pass reads what the first has written.
        for replicas in [first, second, first, second] {
            let data = numbers(&paths, 1).batch_exact(8);
            let expected = workers(&data, 2, replicas, plain());
            assert_eq!(workers(&data.snapshot(&cached, encode, decode), 2, replicas, plain()), expected, "{replicas}");
        }
        assert_eq!(std::fs::read_dir(&cached).unwrap().count(), 4);
    }
    // Other batches have one file for each share.
    let cached = folder.path().join("batch");
    for replicas in [1, 3] {
        workers(&numbers(&paths, 1).batch(8).snapshot(&cached, encode, decode), 2, replicas, plain());
    }
    assert_eq!(std::fs::read_dir(&cached).unwrap().count(), 2);
}

#[test]
fn batches_that_are_elements_of_a_batch_are_whole_on_every_worker() {
    let folder = tempfile::tempdir().unwrap();
    let (paths, _) = files(folder.path(), &[96, 96]);
    // Windows of 64 numbers, of which each worker has one and a half.
    let windows = numbers(&paths, 1).batch_exact(64);
    let same = |data: &Dataset<Array<i64>>| data.clone().map(Ok);
    for data in [windows.clone().batch(2), same(&windows).batch_exact(2), same(&windows).padded_batch(2)] {
        for at in 0..2 {
            let parts: Vec<_> = worker(&data, (2, at, 1), plain()).iter().flat_map(|step| step.unwrap()).collect();
            let shapes: Vec<_> = parts.iter().map(|part| part.shape().to_vec()).collect();
            assert_eq!(shapes, [[1, 64]]);
        }
    }
}

#[test]
fn padded_batches_are_joined_by_any_number_of_workers() {
    let folder = tempfile::tempdir().unwrap();
    let padded = |lengths: &[usize]| {
        let lines = numbers(&files(folder.path(), lengths).0, 1);
        // Number 4 is 4 times itself, plus 1.
        let rows = lines.map(|number| {
            let number = *number.item().ok_or("no scalar")?;
            Ok(Array::from(vec![number; number as usize + 1]))
        });
        rows.padded_batch(4)
    };
    /// Returns the numbers of the rest of a pass, whose rows have nothing but them and zeros.
    fn rest(pass: WorkerIterator<Array<i64>>) -> Rows {
        let mut seen = Vec::new();
        for part in pass.flat_map(|step| step.unwrap()) {
            for row in part.as_slice().chunks(part.shape()[1]) {
                let number = row[0];
                assert!(
                    row.iter().enumerate().all(|(at, value)| *value == if at as i64 <= number { number } else { 0 })
                );
                seen.push(number);
            }
        }
        seen
    }
    let data = padded(&[6, 6]);
    let mut passes: Vec<_> = (0..2).map(|at| worker(&data, (2, at, 1), plain()).iter()).collect();
    passes.iter_mut().for_each(|pass| drop(pass.next().unwrap().unwrap()));
    let position = InputPosition::of_all(passes.iter().map(|pass| pass.position().clone()).collect()).unwrap();
    // Rows of both batches of the first file are in the first step.
    assert_eq!(rest(worker(&data, (1, 0, 1), plain()).iter_from(&position).unwrap()), [2, 3, 4, 5, 8, 9, 10, 11]);
    // Also after stages that keep the type, and where the short batch is not the last one.
    let data = padded(&[5, 5]).filter(|_| Ok(true)).repeat(2).prefetch(1);
    assert_eq!(rest(worker(&data, (2, 0, 1), plain()).iter()), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
    let both = padded(&[5, 5]).concatenate(padded(&[5, 5]));
    assert_eq!(rest(worker(&both, (2, 1, 1), plain()).iter()), [5, 6, 7, 8, 9, 5, 6, 7, 8, 9]);
    // Also where batches that need no padding precede or follow.
    let plain_rows = || numbers(&files(folder.path(), &[5, 5]).0, 1).map(|_| Ok(Array::from(vec![1, 1]))).batch(4);
    let after = padded(&[5, 5]).concatenate(plain_rows());
    assert_eq!(rest(worker(&after, (2, 1, 1), plain()).iter()), [5, 6, 7, 8, 9, 1, 1, 1, 1, 1]);
    let before = plain_rows().concatenate(padded(&[5, 5]));
    assert_eq!(rest(worker(&before, (2, 1, 1), plain()).iter()), [1, 1, 1, 1, 1, 5, 6, 7, 8, 9]);
    // After a map of the batches, padding may be a value of its own: rows are not mixed with others' padding.
    let less = |ids: Array<i64>| {
        let values = ids.as_slice().iter().map(|id| id - 1).collect();
        Ok(Array::new(ids.shape().to_vec(), values)?)
    };
    let parallel = Parallel::threads(1);
    let is_refused =
        |mut pass: WorkerIterator<Array<i64>>| matches!(pass.find_map(Result::err), Some(Error::UnequalShapes { .. }));
    for data in [padded(&[6, 6]).map(less), padded(&[6, 6]).par_map(parallel, less)] {
        assert!(is_refused(worker(&data, (1, 0, 1), plain()).iter_from(&position).unwrap()));
    }
    let both = padded(&[5, 5]).concatenate(padded(&[5, 5]).map(less));
    assert!(is_refused(worker(&both, (2, 1, 1), plain()).iter()));
}

#[test]
fn a_function_of_batches_that_are_short_at_the_end_drops_them_too() {
    let options = InputOptions::default().unequal_data(UnequalData::Drop);
    let make = |_| Ok(Dataset::range(0..13).batch(4));
    let data = distribute_datasets_from_function(Topology::local(2).unwrap(), options, make).unwrap();
    assert_eq!(steps(data.iter()), [[[0, 1, 2, 3], [4, 5, 6, 7]]]);
}

#[test]
fn each_dataset_of_a_function_fills_its_own_batches() {
    let options =
        InputOptions::default().replication_mode(InputReplicationMode::PerReplica).unequal_data(UnequalData::Drop);
    let make = |sizes: [usize; 2]| {
        let make = move |context: distribute_input::InputContext| {
            Ok(Dataset::range(0..8).batch(sizes[context.input_pipeline_id]))
        };
        distribute_datasets_from_function(Topology::local(2).unwrap(), options, make)
    };
    for sizes in [[4, 2], [2, 4]] {
        let text = make(sizes).unwrap_err().to_string();
        assert!(text.contains("batches of different sizes") && text.contains("by the same size"), "{text}");
    }
    assert_eq!(make([4, 4]).unwrap().iter().count(), 2);
    // The size of one is not known, and says nothing of the other.
    let known = |known: usize| {
        let make = move |context: distribute_input::InputContext| {
            let batches = Dataset::range(0..7).batch(2);
            let is_known = context.input_pipeline_id == known;
            Ok(if is_known { batches } else { batches.interleave(1, 1, |batch| Ok(Dataset::from_tensors(batch))) })
        };
        distribute_datasets_from_function(Topology::local(2).unwrap(), options, make).unwrap()
    };
    for replica in 0..2 {
        assert_eq!((known(replica).iter().count(), known(replica).batch_sizes(0)), (3, None));
    }
}

#[test]
fn record_files_are_divided_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("one.tfrecord");
    let mut writer = TfRecordWriter::new(std::fs::File::create(&path).unwrap());
    (0..7_i64).for_each(|number| writer.write(&number.to_le_bytes()).unwrap());
    writer.finish().unwrap();
    let data = Dataset::from_files([&path])
        .read(TfRecords, ReadOptions::default())
        .map(|record| Ok(Array::scalar(i64::from_le_bytes(record.as_slice().try_into()?))))
        .batch(2);
    let two = workers(&data, 2, 1, InputOptions::default());
    assert_eq!((flat(&two[0]).concat(), flat(&two[1]).concat()), (vec![0, 2, 4, 6], vec![1, 3, 5]));
}

/// Positions of versions that have divided files otherwise are refused, and not resumed with other rows.
#[test]
fn files_that_are_left_are_dealt_in_turn() {
    let folder = tempfile::tempdir().unwrap();
    let (paths, all) = files(folder.path(), &[1, 1, 1]);
    let data = numbers(&paths, 1).batch(4);
    let four = workers(&data, 4, 1, plain());
    let sizes: Vec<usize> = four.iter().map(|steps| flat(steps).concat().len()).collect();
    assert_eq!(sizes, [1, 0, 1, 1]);
    let mut seen = four.iter().flat_map(|steps| flat(steps).concat()).collect::<Rows>();
    seen.sort_unstable();
    assert_eq!(seen, all);
    let plan = worker(&data, (4, 0, 1), plain()).plan().to_string();
    for line in [
        "worker 0 reads 0.txt (records 0 of every 4), 1.txt (records 1 of every 4), 2.txt (records 2 of every 4)",
        "worker 2 reads 0.txt (records 2 of every 4), 1.txt (records 3 of every 4), 2.txt (records 0 of every 4)",
    ] {
        assert!(plan.contains(line), "{plan}");
    }
    let (paths, _) = files(folder.path(), &[4, 4, 4]);
    let data = worker(&numbers(&paths, 1).batch(4), (2, 0, 1), plain());
    let mut pass = data.iter();
    pass.next();
    let text = serde_json::to_string(pass.position()).unwrap();
    let older: InputPosition = serde_json::from_str(&text.replace(" dealt in turn", "")).unwrap();
    assert!(data.iter_from(&older).unwrap_err().to_string().contains("files dealt in turn"));
    assert!(data.iter_from(pass.position()).is_ok());
}

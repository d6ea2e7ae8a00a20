//! Resumption at positions: every example is seen exactly once in any arrangement, and data in another order are
//! refused.

use std::collections::BTreeMap;

use distribute_input::read::{BadRecords, Csv, Parquet, Skipped, arrow, column};
use distribute_input::{BoxError, InputPosition, Sizes, UnequalData, distribute_datasets_from_function};
use proptest::prelude::*;

use super::*;

#[test]
fn exact_batches_end_where_they_would_have_after_a_restart_with_other_replicas() {
    let folder = tempfile::tempdir().unwrap();
    let (paths, _) = files(folder.path(), &[9, 9]);
    let data = numbers(&paths, 1).batch_exact(6);
    let mut passes: Vec<_> = (0..2).map(|at| worker(&data, (2, at, 1), plain()).iter()).collect();
    passes.iter_mut().for_each(|pass| pass.by_ref().take(2).for_each(|step| drop(step.unwrap())));
    let position = InputPosition::of_all(passes.iter().map(|pass| pass.position().clone()).collect()).unwrap();
    for (count, replicas) in [(2, 1), (2, 2), (1, 4), (1, 1), (3, 1)] {
        let rest = |index| steps(worker(&data, (count, index, replicas), plain()).iter_from(&position).unwrap());
        let mut rows = flat(&(0..count).flat_map(rest).collect::<Vec<_>>()).concat();
        rows.sort_unstable();
        assert_eq!(rows, [6, 7, 8, 15, 16, 17], "{count} workers of {replicas} replicas");
    }
    // A position of an older version has no replicas.
    let text = serde_json::to_string(&position).unwrap();
    let older: InputPosition = serde_json::from_str(&text.replace(",\"replicas\":1", "")).unwrap();
    assert_ne!(older, position);
    assert_eq!(steps(worker(&data, (2, 0, 1), plain()).iter_from(&older).unwrap()), [[[6, 7, 8]]]);
}

#[test]
fn positions_are_taken_by_data_that_is_read_as_it_was() {
    let function = |replicas: usize, batch: usize| {
        let make = move |_| Ok(Dataset::range(0..48).batch(batch));
        let topology = Topology::local(replicas).unwrap();
        distribute_datasets_from_function(topology, InputOptions::default(), make).unwrap()
    };
    let dataset = worker(&Dataset::range(0..48).batch(4), (1, 0, 2), InputOptions::default());
    let (mut of_function, mut of_dataset) = (function(2, 4).iter(), dataset.iter());
    of_function.next();
    of_dataset.next();
    let told = |outcome: distribute_input::Result<WorkerIterator<_>>| outcome.err().unwrap().to_string();
    let other = told(dataset.iter_from(of_function.position()));
    assert!(other.contains("one of an input function, and the data is that of a dataset"), "{other}");
    let other = told(function(2, 4).iter_from(of_dataset.position()));
    assert!(other.contains("one of a dataset, and the data is that of an input function"), "{other}");
    let more = told(function(4, 4).iter_from(of_function.position()));
    assert!(more.contains("took 2 batches, 8 rows of each of 1 datasets"), "{more}");
    // A pass that has not begun is the same.
    function(4, 4).iter_from(function(2, 4).iter().position()).unwrap();
    dataset.iter_from(function(2, 4).iter().position()).unwrap();
    // As many rows in all, in other parts.
    let rest = steps(function(4, 2).iter_from(of_function.position()).unwrap());
    assert_eq!(rest[0], [[8, 9], [10, 11], [12, 13], [14, 15]]);
}

#[test]
fn a_position_survives_json_and_functions_keep_their_workers() {
    let make = |workers, worker| {
        let topology = Topology::new(workers, worker, 1).unwrap();
        let make = |context: distribute_input::InputContext| {
            Ok(Dataset::range(0..12).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2))
        };
        distribute_datasets_from_function(topology, InputOptions::default(), make).unwrap()
    };
    let positions = (0..2).map(|worker| {
        let mut pass = make(2, worker).iter();
        pass.next();
        pass.position().clone()
    });
    let all = InputPosition::of_all(positions.collect()).unwrap();
    let text = serde_json::to_string(&all).unwrap();
    let all: InputPosition = serde_json::from_str(&text).unwrap();
    assert_eq!(steps(make(2, 1).iter_from(&all).unwrap()), [[[5, 7]], [[9, 11]]]);
    let text = make(3, 0).iter_from(&all).unwrap_err().to_string();
    assert!(text.contains("2 workers") && text.contains("there are 3 now"), "{text}");
    let other = InputPosition::of_all(vec![all, make(2, 0).iter_epoch(1).position().clone()]);
    assert!(other.unwrap_err().to_string().contains("different passes"));
}

#[test]
fn a_position_is_refused_by_rows_in_another_order() {
    let folder = tempfile::tempdir().unwrap();
    let (paths, _) = files(folder.path(), &[4, 4, 3]);
    let shuffled = |paths: &[PathBuf], seed| worker(&numbers(paths, 1).shuffle(4, seed).batch(2), (1, 0, 1), plain());
    let mut pass = shuffled(&paths, 7).iter();
    let beginning = pass.position().clone();
    pass.next();
    let position = pass.position();
    let refused = |data: WorkerDataset<Array<i64>>| data.iter_from(position).unwrap_err().to_string();
    // A file that comes before the others, a seed, and a selection.
    let grown: Vec<PathBuf> = [folder.path().join("00.txt")].into_iter().chain(paths.clone()).collect();
    let text = refused(shuffled(&grown, 7));
    assert!(text.contains("<3 files") && text.contains("<4 files"), "{text}");
    assert!(refused(shuffled(&paths, 8)).contains("seeds [8]"));
    let fewer = numbers(&paths, 1).take(9).shuffle(4, 7).batch(2);
    assert!(refused(worker(&fewer, (1, 0, 1), plain())).contains("take"));
    let fewer = numbers(&paths, 1).filter(|_| Ok(true)).shuffle(4, 7).batch(2);
    assert!(refused(worker(&fewer, (1, 0, 1), plain())).contains("filter"));
    // A cache repeats the order of the first pass, if there is a shuffle before it.
    let kept = numbers(&paths, 1).shuffle(4, 7).cache().batch(2);
    assert!(refused(worker(&kept, (1, 0, 1), plain())).contains("cache"));
    assert!(worker(&numbers(&paths, 1).cache().shuffle(4, 7).batch(2), (1, 0, 1), plain()).iter_from(position).is_ok());
    // Without the hint, each lane of a part would be everything.
    let hinted = |hint: bool| if hint { Dataset::range(0..12).shard_hint() } else { Dataset::range(0..12) };
    let mut pass = worker(&hinted(true).batch(4), (2, 0, 1), with(AutoShardPolicy::Hint)).iter();
    pass.next();
    let text = worker(&hinted(false).batch(4), (2, 0, 1), plain()).iter_from(pass.position()).unwrap_err().to_string();
    assert!(text.contains("shard_hint"), "{text}");
    assert!(worker(&hinted(true).batch(4), (2, 0, 1), plain()).iter_from(pass.position()).is_ok());
    // Rows in memory, of which there are more now.
    let range = |to| worker(&Dataset::range(0..to).shuffle(9, 1).batch(2), (1, 0, 1), plain());
    let mut pass = range(9).iter();
    pass.next();
    assert!(range(10).iter_from(pass.position()).unwrap_err().to_string().contains("of 10"));
    // Without a shuffle they follow.
    let range = |to| worker(&Dataset::range(0..to).batch(2), (1, 0, 1), plain());
    let mut pass = range(4).iter();
    pass.next();
    assert_eq!(steps(range(5).iter_from(pass.position()).unwrap()), [vec![vec![2, 3]], vec![vec![4]]]);
    // Another batch is not another order, and at the beginning nothing was seen.
    let larger = numbers(&paths, 1).shuffle(4, 7).batch(3);
    assert!(worker(&larger, (1, 0, 1), plain()).iter_from(position).is_ok());
    assert!(shuffled(&grown, 8).iter_from(&beginning).is_ok());
}

/// A stage after `batch` moves batches, and the rows with them.
#[test]
fn a_position_is_refused_by_batches_that_are_chosen_or_ordered_in_another_size() {
    type Stages = fn(Dataset<Array<i64>>) -> Dataset<Array<i64>>;
    type OfSize = fn(usize) -> Dataset<Array<i64>>;
    let generated = || Dataset::from_generator(|| (0..100).map(|number| Ok(Array::scalar(number))));
    let resumed = |make: &dyn Fn(usize) -> Dataset<Array<i64>>| {
        let (saved, now) = (worker(&make(4), (1, 0, 1), plain()), worker(&make(8), (1, 0, 1), plain()));
        let mut pass = saved.iter();
        pass.next();
        assert!(saved.iter_from(pass.position()).is_ok());
        now.iter_from(pass.position()).map(|pass| flat(&steps(pass)).concat()).map_err(|error| error.to_string())
    };
    fn ones() -> Dataset<Array<i64>> {
        Dataset::range(0..100).batch(1)
    }
    let refused: [Stages; 12] = [
        |data| data.shuffle(100, 7),
        |data| data.shuffle_once(100, 7),
        |data| data.take(9),
        |data| data.skip(1),
        |data| data.shard(2, 0),
        |data| data.filter(|batch| Ok(batch.as_slice()[0] % 16 == 0)),
        |data| data.shard_hint(),
        |data| data.batch(1).unbatch().batch(1),
        |data| data.enumerate().batch(1).map(|(_, batches)| Ok(batches)),
        |data| data.zip(Dataset::range(0..100)).batch(1).map(|(batches, _)| Ok(batches)),
        |data| Dataset::range(0..100).zip(data).batch(1).map(|(_, batches)| Ok(batches)),
        |data| ones().concatenate(data).batch(1),
    ];
    for (at, stages) in refused.into_iter().enumerate() {
        let text = resumed(&|size| stages(generated().batch(size))).unwrap_err();
        assert!(text.contains("of batches of 4") && text.contains("of batches of 8"), "{at}: {text}");
    }
    // Batches that are short at the end keep the order of the rows, and exact ones if none follow.
    let allowed: [OfSize; 4] = [
        |size| Dataset::range(0..10).shuffle(10, 3).batch(size).repeat(3),
        |size| Dataset::range(0..10).batch(size).repeat(2).concatenate(Dataset::range(0..10).batch(size)),
        |size| Dataset::range(0..16).batch_exact(size).map(Ok).prefetch(1),
        |size| Dataset::range(0..10).skip(1).batch(size).cache().repeat(2),
    ];
    for (at, make) in allowed.into_iter().enumerate() {
        let whole = flat(&steps(worker(&make(4), (1, 0, 1), plain()).iter())).concat();
        assert_eq!(resumed(&make).unwrap(), whole[4..], "{at}");
    }
    // Exact batches drop other rows in each repetition, and before what is appended.
    let exact: [OfSize; 4] = [
        |size| Dataset::range(0..30).batch_exact(size).repeat_forever(),
        |size| Dataset::range(0..30).batch_exact(size).concatenate(Dataset::range(0..9).batch(size)),
        |size| Dataset::range(0..30).batch_exact(size).unbatch().repeat(2).batch(size),
        |size| ones().concatenate(Dataset::range(0..30).batch_exact(size)).unbatch().repeat(2).batch(size),
    ];
    for (at, make) in exact.into_iter().enumerate() {
        let text = resumed(&make).unwrap_err();
        assert!(text.contains("of batches of 4") && text.contains("of batches of 8"), "{at}: {text}");
    }
}

/// The rows after the first four of pass 1, if a dataset resumes at the position that another has after them.
fn resumed(saved: &Dataset<Array<i64>>, now: &Dataset<Array<i64>>) -> Result<Rows, String> {
    let [saved, now] = [saved, now].map(|data| worker(&data.clone().batch(4), (1, 0, 1), plain()));
    let mut pass = saved.iter_epoch(1);
    pass.next().unwrap().unwrap();
    now.iter_from(pass.position()).map(|pass| flat(&steps(pass)).concat()).map_err(|error| error.to_string())
}

/// Returns the rows of pass 1.
fn rows(data: &Dataset<Array<i64>>) -> Rows {
    data.iter_epoch(1).flat_map(|row| row.unwrap().as_slice().to_vec()).collect()
}

#[test]
fn a_position_names_every_value_that_the_order_depends_on() {
    type Of = fn(i64) -> Dataset<Array<i64>>;
    fn range(to: i64) -> Dataset<Array<i64>> {
        Dataset::range(0..to)
    }
    fn left(pair: (Array<i64>, Array<i64>)) -> Result<Array<i64>, BoxError> {
        Ok(pair.0)
    }
    /// Bytes for the numbers in a shuffle's buffer.
    fn limited(data: Dataset<Array<i64>>) -> Dataset<Array<i64>> {
        data.memory_budget(64, Sizes::default())
    }
    /// A dataset whose order changes with the pass by a shuffle that only the function knows.
    fn inner() -> Dataset<Array<i64>> {
        Dataset::range(0..1).flat_map(|_| Ok(range(20).shuffle(20, 7)))
    }
    /// Splits, which have the number of the pass.
    fn of_pass() -> Dataset<Array<i64>> {
        Dataset::from_splits(9).map(|split| Ok(Array::scalar(10 * split.epoch as i64 + split.index as i64)))
    }
    // Made with the values 10 and 12.
    let values: [Of; 6] = [
        |to| range(to).repeat(2),
        |to| range(to).repeat_forever().take(20),
        |to| range(to).batch(2).repeat(2).unbatch(),
        |to| range(to).filter(|_| Ok(true)).repeat(2),
        |to| range(to).filter(|_| Ok(true)).shuffle(20, 7),
        |to| range(to).concatenate(range(10)),
    ];
    let values = values.map(|of| (of(10), of(12)));
    let places = [
        (range(20).skip(1).zip(range(20)).map(left), range(20).zip(range(20).skip(1)).map(left)),
        (range(20).shuffle(9, 1).zip(range(20)).map(left), range(20).zip(range(20).shuffle(9, 1)).map(left)),
        (limited(range(20).shuffle(20, 1)), limited(range(20).map(Ok).shuffle(20, 1))),
        (limited(range(20).map(Ok).shuffle(20, 1)), limited(range(20).map(Ok).shuffle(20, 1).prefetch(1))),
        (inner(), inner().cache()),
        (of_pass(), of_pass().cache()),
    ];
    for (at, (saved, now)) in values.into_iter().chain(places).enumerate() {
        assert_ne!(rows(&saved)[4..], rows(&now)[4..], "{at}");
        assert_eq!(resumed(&saved, &saved).unwrap(), rows(&saved)[4..], "{at}");
        let text = resumed(&saved, &now).unwrap_err();
        assert!(text.contains("in the order of <"), "{at}: {text}");
    }
    // Rows that follow, and orders that are one.
    for (saved, now) in [
        (range(10).filter(|_| Ok(true)), range(12).filter(|_| Ok(true))),
        (range(20).shuffle_once(20, 7), range(20).shuffle_once(20, 7).cache()),
        (range(20).zip(range(20)).map(left), range(20)),
    ] {
        assert_eq!(resumed(&saved, &now).unwrap(), rows(&now)[4..]);
    }
}

#[test]
fn a_position_is_refused_by_readers_with_options_that_cut_files_in_another_way() {
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("rows.csv");
    std::fs::write(&csv, (0..9).map(|number| format!("{number}\n")).collect::<String>()).unwrap();
    let table = |reader: Csv<(i64,)>| {
        let rows = Dataset::from_files([&csv, &csv]).read(reader, ReadOptions::default());
        rows.map(|(number,)| Ok(Array::scalar(number)))
    };
    let saved = table(Csv::new());
    assert_eq!(resumed(&saved, &saved).unwrap(), rows(&saved)[4..]);
    for (now, word) in [
        (Csv::new().has_headers(false), "csv without headers"),
        (Csv::new().delimiter(b';'), "csv delimiter ';'"),
        (Csv::new().quoting(false), "csv without quoting"),
    ] {
        let text = resumed(&saved, &table(now)).unwrap_err();
        assert!(text.contains(word), "{text}");
    }

    let paths = [0, 1].map(|file| {
        let path = folder.path().join(format!("{file}.parquet"));
        let numbers = arrow::Int64Array::from((file * 10..file * 10 + 10).collect::<Vec<i64>>());
        let numbers: arrow::ArrayRef = std::sync::Arc::new(numbers);
        let batch = arrow::RecordBatch::try_from_iter([("number", numbers)]).unwrap();
        let mut writer =
            arrow::ArrowWriter::try_new(std::fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        path
    });
    let batches = |size: usize, options: ReadOptions| {
        let batches = Dataset::from_files(&paths).read(Parquet::new().batch_size(size), options);
        batches.map(|batch| Ok(column::<i64>(&batch, "number")?))
    };
    let (one, two) = (ReadOptions::default(), ReadOptions::default().cycle(2));
    let skipping = one.clone().bad_records(BadRecords::Skip(Skipped::default()));
    // The rows of files that are read one after the other are in one order.
    assert_eq!(resumed(&batches(2, one.clone()).unbatch(), &batches(3, one.clone()).unbatch()).unwrap().len(), 16);
    let refused = |make: &dyn Fn(usize) -> Dataset<Array<i64>>| {
        assert_eq!(resumed(&make(2), &make(2)).unwrap().len(), rows(&make(2)).len() - 4);
        let text = resumed(&make(2), &make(5)).unwrap_err();
        assert!(text.contains("of batches of 2") && text.contains("of batches of 5"), "{text}");
    };
    refused(&|size| batches(size, two.clone()).unbatch());
    refused(&|size| batches(size, skipping.clone()).unbatch());
    refused(&|size| batches(size, one.clone()).shuffle(9, 7).unbatch());
    refused(&|size| batches(size, one.clone()).batch(2).unbatch().unbatch());
    // A function may yield them as they are.
    let function = |size: usize| {
        let make = |_| Ok(batches(size, one.clone()));
        distribute_datasets_from_function(Topology::local(1).unwrap(), plain(), make).unwrap()
    };
    let mut pass = function(2).iter();
    pass.next().unwrap().unwrap();
    let text = function(5).iter_from(pass.position()).unwrap_err().to_string();
    assert!(text.contains("of batches of 2") && text.contains("of batches of 5"), "{text}");
}

#[test]
fn a_position_of_an_input_function_is_refused_by_another_order() {
    type Of = fn(Dataset<Array<i64>>, u64) -> Dataset<Array<i64>>;
    let distributed = |of: Of, value: u64, (workers, at): (usize, usize), replicas: usize| {
        let make = |context: distribute_input::InputContext| {
            Ok(of(Dataset::range(0..26).shard(context.num_input_pipelines, context.input_pipeline_id), value))
        };
        let topology = Topology::new(workers, at, replicas).unwrap();
        distribute_datasets_from_function(topology, plain(), make).unwrap()
    };
    let position = |of: Of| {
        let position = |at| {
            let mut pass = distributed(of, 1, (2, at), 1).iter();
            pass.next().unwrap().unwrap();
            pass.position().clone()
        };
        let text = serde_json::to_string(&InputPosition::of_all(vec![position(0), position(1)]).unwrap()).unwrap();
        serde_json::from_str::<InputPosition>(&text).unwrap()
    };
    let orders: [Of; 3] = [
        |data, seed| data.shuffle(9, seed).batch(2),
        |data, size| data.shuffle(9 + size as usize, 1).batch(2),
        |data, skipped| data.skip(skipped as usize).batch(2),
    ];
    for of in orders {
        let position = position(of);
        for at in 0..2 {
            let rest = steps(distributed(of, 1, (2, at), 1).iter_from(&position).unwrap());
            assert_eq!(rest, steps(distributed(of, 1, (2, at), 1).iter())[1..]);
            let text = distributed(of, 2, (2, at), 1).iter_from(&position).unwrap_err().to_string();
            assert!(text.contains("in the order of <") && text.contains(&format!("shard {at} of 2")), "{text}");
        }
    }
    // Workers that each read everything may do so in orders of their own.
    let all = |seeds: [u64; 2], at: usize| {
        let data = Dataset::range(0..24).shuffle(24, seeds[at]).batch(4);
        worker(&data, (2, at, 1), with(AutoShardPolicy::Off))
    };
    let positions = [0, 1].map(|at| {
        let mut pass = all([1, 2], at).iter();
        pass.next().unwrap().unwrap();
        pass.position().clone()
    });
    let position = InputPosition::of_all(positions.to_vec()).unwrap();
    assert_eq!(steps(all([1, 2], 1).iter_from(&position).unwrap()), steps(all([1, 2], 1).iter())[1..]);
    assert!(all([1, 3], 0).iter_from(&position).is_ok());
    assert!(all([1, 3], 1).iter_from(&position).unwrap_err().to_string().contains("seeds [3]"));
    // Twice as many batches of half the size, and short ones in the middle.
    let of_size = |batch: usize, replicas: usize| {
        let make = move |_| Ok(Dataset::range(0..10).batch(batch).repeat(2));
        distribute_datasets_from_function(Topology::local(replicas).unwrap(), plain(), make).unwrap()
    };
    let mut pass = of_size(4, 2).iter();
    pass.by_ref().take(2).for_each(|step| drop(step.unwrap()));
    let text = of_size(2, 4).iter_from(pass.position()).unwrap_err().to_string();
    assert!(text.contains("of batches of 4") && text.contains("of batches of 2"), "{text}");
}

/// A pass that ends with the worker that has the fewest rows loses none for how lanes are dealt.
#[test]
fn fewer_workers_resume_with_as_many_rows_each() {
    let folder = tempfile::tempdir().unwrap();
    let (paths, _) = files(folder.path(), &[6, 6, 6]);
    let data = numbers(&paths, 1).batch(3);
    for unequal in [UnequalData::Stop, UnequalData::Drop] {
        let options = plain().unequal_data(unequal);
        let mut passes: Vec<_> = (0..3).map(|at| worker(&data, (3, at, 1), options).iter()).collect();
        let position = take(&mut passes, 2, &mut BTreeMap::new());
        let rest = |at| worker(&data, (2, at, 1), options).iter_from(&position).unwrap();
        let rows = [0, 1].map(|at| flat(&steps(rest(at))).concat().len());
        assert_eq!(rows, [6, 6], "{unequal:?}");
    }
}

/// How the data of a case are made.
#[derive(Clone, Debug)]
struct Case {
    lengths: Vec<usize>,
    from_files: bool,
    shuffle: Option<u64>,
    cached: bool,
    batch: usize,
    depth: usize,
    policy: AutoShardPolicy,
    deterministic: bool,
    cycle: usize,
}

impl Case {
    fn dataset(&self, paths: &[PathBuf]) -> Dataset<Array<i64>> {
        let count: usize = self.lengths.iter().sum();
        let data = if self.from_files { numbers(paths, self.cycle) } else { Dataset::range(0..count as i64) };
        let data = if self.policy == AutoShardPolicy::Hint { data.shard_hint() } else { data };
        let data = if self.cached { data.cache() } else { data };
        let data = if let Some(seed) = self.shuffle { data.shuffle(7, seed) } else { data };
        data.batch(self.batch).prefetch(self.depth)
    }

    fn options(&self) -> InputOptions {
        let deterministic = self.deterministic && self.policy != AutoShardPolicy::Hint;
        with(self.policy).deterministic(deterministic)
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let policies = prop_oneof![
        Just(AutoShardPolicy::Auto),
        Just(AutoShardPolicy::Data),
        Just(AutoShardPolicy::Hint),
        Just(AutoShardPolicy::File)
    ];
    let lengths = prop::collection::vec(0_usize..12, 1..6);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (lengths, flags, prop::option::of(0_u64..5), 1_usize..13, 0_usize..3, policies, 1_usize..4).prop_map(
        |(lengths, (from_files, cached, deterministic), shuffle, batch, depth, policy, cycle)| {
            let from_files = from_files || policy == AutoShardPolicy::File;
            Case { lengths, from_files, shuffle, cached, batch, depth, policy, deterministic, cycle }
        },
    )
}

/// Takes up to `limit` steps on every worker, adds the examples to `seen`, and returns the joint position.
fn take(passes: &mut [WorkerIterator<Array<i64>>], limit: usize, seen: &mut BTreeMap<i64, usize>) -> InputPosition {
    for pass in passes.iter_mut() {
        for step in pass.by_ref().take(limit) {
            for row in step.unwrap().iter().flat_map(|part| part.as_slice().to_vec()) {
                *seen.entry(row).or_default() += 1;
            }
        }
    }
    InputPosition::of_all(passes.iter().map(|pass| pass.position().clone()).collect()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Tests any pipeline, policy and number of workers, stopped and resumed twice with other numbers of workers.
    #[test]
    fn every_example_is_seen_exactly_once(
        case in cases(),
        arrangements in prop::collection::vec((1_usize..5, 1_usize..3, 0_usize..4), 3),
        epoch in 0_u64..3,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (paths, all) = files(folder.path(), &case.lengths);
        let mut seen = BTreeMap::new();
        let mut position: Option<InputPosition> = None;
        for (index, (count, replicas, limit)) in arrangements.into_iter().enumerate() {
            let data: Vec<WorkerDataset<Array<i64>>> =
                (0..count).map(|at| worker(&case.dataset(&paths), (count, at, replicas), case.options())).collect();
            let mut passes: Vec<WorkerIterator<Array<i64>>> = data
                .iter()
                .map(|data| match &position {
                    Some(position) => data.iter_from(position).unwrap(),
                    None => data.iter_epoch(epoch),
                })
                .collect();
            let limit = if index == 2 { usize::MAX } else { limit };
            let at = take(&mut passes, limit, &mut seen);
            prop_assert_eq!(at.epoch(), epoch);
            position = Some(serde_json::from_str(&serde_json::to_string(&at).unwrap()).unwrap());
        }
        let expected: BTreeMap<i64, usize> = all.into_iter().map(|row| (row, 1)).collect();
        prop_assert_eq!(seen, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// The rows of every replica in every step are those of an undisturbed pass, also where the batch is not a multiple
    /// of the replicas and the larger parts rotate.
    #[test]
    fn a_resumed_pass_has_the_steps_of_an_undisturbed_one(
        case in cases(),
        count in 1_usize..5,
        replicas in 1_usize..3,
        stop in 1_usize..5,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (paths, _) = files(folder.path(), &case.lengths);
        let data: Vec<WorkerDataset<Array<i64>>> =
            (0..count).map(|at| worker(&case.dataset(&paths), (count, at, replicas), case.options())).collect();
        let whole: Vec<_> = data.iter().map(|data| steps(data.iter_epoch(1))).collect();
        // Where a worker's data end before those of the others, the others' are dealt anew.
        prop_assume!(whole.iter().all(|steps| steps.len() > stop));
        let mut passes: Vec<_> = data.iter().map(|data| data.iter_epoch(1)).collect();
        let position = take(&mut passes, stop, &mut BTreeMap::new());
        for (data, whole) in data.iter().zip(&whole) {
            let rest = steps(data.iter_from(&position).unwrap());
            prop_assert_eq!(&rest[..], &whole[stop..]);
        }
    }
}

//! The elements that a consumer yields.

use std::time::Duration;

use distribute_data_service::{DataWorker, Dispatcher, dataset};
use distribute_input::read::{Lines, ReadOptions};
use distribute_input::{Array, Dataset, Error, InputOptions, InputPosition, Topology, distribute_dataset};
use distribute_testkit::Job;

use crate::{Element, dispatcher, elements, eventually, in_order, large, options, worker};

fn all<T: Send + 'static>(data: &Dataset<T>, epoch: u64) -> Vec<T> {
    data.iter_epoch(epoch).collect::<Result<_, _>>().unwrap()
}

#[test]
fn elements_and_their_order_are_those_of_reading_here_with_one_worker_and_with_three() {
    let dispatcher = dispatcher("order");
    let served = elements();
    let mut workers: Vec<DataWorker> = Vec::new();
    for count in [1, 3] {
        while workers.len() < count {
            workers.push(worker(&dispatcher, "order").dataset("train", &served).start().unwrap());
        }
        let data: Dataset<Element> = dataset(options(&dispatcher, "order")).unwrap();
        for epoch in [0, 3] {
            let got = all(&data, epoch);
            assert_eq!(got, all(&in_order(&served, 4, 2), epoch), "{count} data workers, pass {epoch}");
            let mut numbers: Vec<i64> = got.iter().map(|(number, _)| *number.item().unwrap()).collect();
            assert_ne!(numbers, (0..40).collect::<Vec<_>>());
            numbers.sort_unstable();
            assert_eq!(numbers, (0..40).collect::<Vec<_>>());
        }
        assert_ne!(all(&data, 0), all(&data, 1));
    }
}

/// Three training workers divide the fourth split by elements.
#[test]
fn training_workers_see_every_example_once_and_resume_in_the_middle() {
    let dispatcher = dispatcher("resume");
    let served = Dataset::range(0..41).shuffle(41, 1);
    let start = || worker(&dispatcher, "resume").dataset("train", &served).start().unwrap();
    let _workers = [start(), start()];
    let numbers = |parts: Vec<Array<i64>>| parts.iter().flat_map(|part| part.as_slice().to_vec()).collect::<Vec<_>>();
    let from = |dispatcher: &Dispatcher, workers: usize, worker: usize| {
        let data: Dataset<Array<i64>> = dataset(options(dispatcher, "resume")).unwrap();
        let topology = Topology::new(workers, worker, 2).unwrap();
        distribute_dataset(&data.batch(6), topology, InputOptions::default()).unwrap()
    };
    let distributed = |workers, worker| from(&dispatcher, workers, worker);
    let others = crate::dispatcher("resume");
    let reseeded = Dataset::range(0..41).shuffle(41, 2);
    let _reseeded = worker(&others, "resume").dataset("train", &reseeded).start().unwrap();
    for count in [2, 3] {
        let (mut seen, mut positions) = (Vec::new(), Vec::new());
        let mut rest = Vec::new();
        for at in 0..count {
            let mut steps = distributed(count, at).iter_epoch(2);
            seen.extend((&mut steps).take(2).flat_map(|step| numbers(step.unwrap())));
            positions.push(steps.position().clone());
            rest.push(steps.flat_map(|step| numbers(step.unwrap())).collect::<Vec<_>>());
        }
        let position = InputPosition::of_all(positions).unwrap();
        let again = |count, at| {
            let steps = distributed(count, at).iter_from(&position).unwrap();
            steps.flat_map(|step| numbers(step.unwrap())).collect::<Vec<_>>()
        };
        let same: Vec<Vec<i64>> = (0..count).map(|at| again(count, at)).collect();
        assert_eq!(same, rest, "{count} training workers");
        let mut whole = [seen.clone(), rest.concat()].concat();
        whole.sort_unstable();
        assert_eq!(whole, (0..41).collect::<Vec<_>>(), "{count} training workers");
        // One training worker takes over from all.
        let mut whole = [seen, again(1, 0)].concat();
        whole.sort_unstable();
        assert_eq!(whole, (0..41).collect::<Vec<_>>(), "1 instead of {count} training workers");
        // In other data the position would leave out and repeat examples.
        let error = from(&others, count, 0).iter_from(&position).map(drop).unwrap_err();
        assert!(matches!(error, Error::Position { .. }), "{error}");
    }
}

#[test]
fn training_workers_of_other_names_or_other_data_have_other_settings() {
    let [one, other] = [1, 2].map(|seed| {
        let dispatcher = dispatcher("settings");
        let served = Dataset::range(0..41).shuffle(41, seed);
        let worker = worker(&dispatcher, "settings").dataset("train", &served).dataset("test", &served);
        (worker.start().unwrap(), dispatcher)
    });
    let settings = |dispatcher: &Dispatcher, name: &str| {
        let mut options = options(dispatcher, "settings");
        options.name = name.to_owned();
        let data: Dataset<Array<i64>> = dataset(options).unwrap();
        let topology = Topology::new(2, 0, 1).unwrap();
        distribute_dataset(&data.batch(6), topology, InputOptions::default()).unwrap().plan().settings()
    };
    let train = settings(&one.1, "train");
    assert_eq!(train, settings(&one.1, "train"));
    assert_ne!(train, settings(&one.1, "test"));
    assert_ne!(train, settings(&other.1, "train"));
}

#[test]
fn a_service_that_reads_other_files_has_another_name_though_its_pipeline_numbers_the_elements() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["first", "one", "other"] {
        std::fs::write(folder.path().join(name), "0\n1\n").unwrap();
    }
    let name = |last: &str| {
        let dispatcher = dispatcher("files");
        let paths = ["first", last].map(|name| folder.path().join(name));
        let numbered = Dataset::from_files(paths).read(Lines, ReadOptions::default()).enumerate().map(|(at, _)| Ok(at));
        let _worker = worker(&dispatcher, "files").dataset("train", &numbered).start().unwrap();
        let data: Dataset<Array<i64>> = dataset(options(&dispatcher, "files")).unwrap();
        let topology = Topology::new(2, 0, 1).unwrap();
        distribute_dataset(&data.batch(6), topology, InputOptions::default()).unwrap().plan().settings()
    };
    assert_eq!(name("one"), name("one"));
    assert_ne!(name("one"), name("other"));
}

#[test]
fn a_dataset_that_nobody_serves_is_refused_when_it_is_distributed() {
    let dispatcher = dispatcher("unknown");
    let options = options(&dispatcher, "unknown").worker_timeout(Duration::from_millis(100));
    let data: Dataset<Array<i64>> = dataset(options).unwrap();
    let refused = distribute_dataset(&data.batch(6), Topology::local(1).unwrap(), InputOptions::default());
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("no data worker has registered; start the data workers that serve it"), "{text}");
}

/// The body of a process that has no other threads of these names.
#[test]
#[ignore = "a process that other tests start"]
fn a_dropped_consumer() {
    let dispatcher = dispatcher("drop");
    let worker = worker(&dispatcher, "drop").dataset("train", &large()).start().unwrap();
    let data: Dataset<Array<i64>> = dataset(options(&dispatcher, "drop")).unwrap();
    let mut elements = data.iter();
    elements.next().unwrap().unwrap();
    eventually("both streams are open", || worker.streams() == 2);
    drop((elements, data));
    eventually("the streams end", || worker.streams() == 0);
    eventually("the threads that read end", || threads("split-").is_empty());
    eventually("the consumer's threads end", || threads("data-consumer").is_empty());
}

#[test]
fn a_consumer_that_is_dropped_ends_its_streams_and_threads() {
    let mut job = Job::of_test("passes::a_dropped_consumer").unwrap().start().unwrap();
    let outcome = job.wait(0, Duration::from_secs(30)).unwrap();
    assert!(outcome.passed(), "{outcome:?}");
}

fn threads(name: &str) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let comm =
        |entry: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(entry.ok()?.path().join("comm")).ok();
    tasks.filter_map(comm).filter(|comm| comm.starts_with(name)).collect()
}

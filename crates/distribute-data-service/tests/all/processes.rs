//! Data workers that are processes of their own, killed and frozen.

use std::time::{Duration, Instant};

use distribute_data_service::{DataWorker, Dispatcher, dataset};
use distribute_input::{Array, Dataset};
use distribute_testkit::{Job, Signal};

use crate::{SILENCE, dispatcher, dispatcher_at, eventually, identity, in_order, large, options};

const LIMIT: Duration = Duration::from_secs(20);

/// Serves until it is killed.
#[test]
#[ignore = "a process that other tests start"]
fn a_data_worker() {
    DataWorker::builder().dataset("train", &large()).serve().unwrap();
}

/// Starts data workers, and waits until the dispatcher knows them.
fn started(dispatcher: &Dispatcher, name: &str, count: u32) -> Job {
    let job = Job::of_test("processes::a_data_worker").unwrap().tasks(count);
    let job = job.env("DISTRIBUTE_DATA_SERVICE", dispatcher.address().to_string());
    let job = job.env("DISTRIBUTE_DATA_SERVICE_ID", identity(name).name()).start().unwrap();
    eventually("the data workers register", || dispatcher.workers().len() == count as usize);
    job
}

fn numbers(items: impl Iterator<Item = distribute_input::Result<Array<i64>>>) -> Vec<i64> {
    items.map(|item| item.unwrap().as_slice()[0]).collect()
}

/// One data worker is killed and one is frozen while elements of both are on their way; the last of three serves the
/// rest. The dispatcher is another one meanwhile.
#[test]
fn a_killed_and_a_frozen_data_worker_lose_nothing_and_change_no_order() {
    let name = "killed";
    let first = dispatcher(name);
    let address = first.address();
    let job = started(&first, name, 3);
    let data: Dataset<Array<i64>> = dataset(options(&first, name).splits(3).streams(3)).unwrap();
    let mut elements = data.iter_epoch(1);
    let mut got = numbers((&mut elements).take(9));
    job.kill(0, Signal::KILL).unwrap();
    job.kill(1, Signal::STOP).unwrap();
    drop(first);
    let begun = Instant::now();
    got.extend(numbers(&mut elements));
    assert!(begun.elapsed() >= SILENCE / 2, "no data worker was frozen: {:?}", begun.elapsed());
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    assert_eq!(got, numbers(in_order(&large(), 3, 3).iter_epoch(1)));
    // A dispatcher that is started again learns of the data worker that lives.
    let again = dispatcher_at(address, name);
    eventually("the living data worker registers again", || again.workers().len() == 1);
    assert_eq!(numbers(data.iter_epoch(2)), numbers(in_order(&large(), 3, 3).iter_epoch(2)));
}

#[test]
fn an_end_without_any_data_worker_is_an_error_in_words_within_its_bound() {
    let name = "gone";
    let dispatcher = dispatcher(name);
    let job = started(&dispatcher, name, 1);
    let data: Dataset<Array<i64>> = dataset(options(&dispatcher, name).worker_timeout(SILENCE)).unwrap();
    let mut elements = data.iter();
    elements.next().unwrap().unwrap();
    job.kill(0, Signal::KILL).unwrap();
    let begun = Instant::now();
    let text = elements.find_map(Result::err).unwrap().to_string();
    assert!(begun.elapsed() < SILENCE + Duration::from_secs(4), "{:?}", begun.elapsed());
    let address = dispatcher.address().to_string();
    for words in ["dataset \"train\"", "no data worker served split", &address, "tried: ", "start as many"] {
        assert!(text.contains(words), "{text}");
    }
    assert!(elements.next().is_none());
}

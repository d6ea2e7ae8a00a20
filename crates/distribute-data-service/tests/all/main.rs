//! Data services of several processes.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod event_loop;
mod passes;
mod processes;
mod refusals;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use distribute_cluster::JobId;
use distribute_data_service::{DataWorker, DataWorkerBuilder, Dispatcher, DispatcherOptions, ServiceOptions};
use distribute_input::{Array, Dataset};

pub(crate) type Element = (Array<i64>, (Array<String>, Array<f32>));

/// 40 shuffled elements, each of a shape of its own.
pub(crate) fn elements() -> Dataset<Element> {
    Dataset::range(0..40).shuffle(16, 7).map(|number| {
        let value = *number.item().ok_or("no scalar")?;
        let halves = Array::new([value as usize % 3, 2], vec![value as f32 / 2.0; value as usize % 3 * 2])?;
        Ok((number, (Array::scalar(format!("n°{value}")), halves)))
    })
}

/// 120 elements of 64 KiB, so that a split is neither on its way nor read ahead as a whole.
pub(crate) fn large() -> Dataset<Array<i64>> {
    Dataset::range(0..120).shuffle(50, 3).map(|number| Ok(Array::from(vec![number.as_slice()[0]; 8192])))
}

/// The elements in the documented order, read here.
pub(crate) fn in_order<T: Send + 'static>(data: &Dataset<T>, splits: usize, streams: usize) -> Dataset<T> {
    let data = data.clone();
    Dataset::from_splits(splits).interleave(streams, 1, move |split| {
        let data = data.clone();
        Ok(Dataset::from_generator(move || {
            let all = data.iter_share(split.epoch, split.count, split.index).enumerate();
            all.filter(move |(at, _)| at % split.parts == split.part).map(|(_, item)| Ok(item?))
        }))
    })
}

/// An identity for a test, so that tests which run at the same time do not meet.
pub(crate) fn identity(name: &str) -> JobId {
    JobId::new(format!("{name}-{}", std::process::id())).unwrap()
}

pub(crate) fn dispatcher(name: &str) -> Dispatcher {
    Dispatcher::start(DispatcherOptions::default().identity(Some(identity(name)))).unwrap()
}

/// Starts a dispatcher where another one was, whose socket may be open for a moment yet.
pub(crate) fn dispatcher_at(address: SocketAddr, name: &str) -> Dispatcher {
    let options = DispatcherOptions::default().bind(address.to_string()).identity(Some(identity(name)));
    let begun = Instant::now();
    loop {
        match Dispatcher::start(options.clone()) {
            Ok(dispatcher) => return dispatcher,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(10), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn worker(dispatcher: &Dispatcher, name: &str) -> DataWorkerBuilder {
    DataWorker::builder().dispatcher(dispatcher.address().to_string()).identity(identity(name))
}

/// Options with short deadlines and little read ahead.
pub(crate) fn options(dispatcher: &Dispatcher, name: &str) -> ServiceOptions {
    let options = ServiceOptions::new("train").dispatcher(dispatcher.address().to_string()).identity(identity(name));
    options.splits(4).streams(2).read_ahead_elements(2).silence(SILENCE).worker_timeout(SILENCE * 3)
}

pub(crate) const SILENCE: Duration = Duration::from_millis(1000);

/// Waits until something holds.
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

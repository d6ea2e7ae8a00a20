//! Programs whose `main` runs an event loop of its own.

use std::time::Duration;

use distribute_data_service::{DataWorker, Error, dataset};
use distribute_input::{Array, Dataset};

use crate::{dispatcher, identity, options, worker};

/// Runs as `#[tokio::main]` with one thread does.
fn within_an_event_loop(run: impl FnOnce()) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { run() });
}

#[test]
fn a_data_service_is_started_read_and_ended_within_an_event_loop() {
    within_an_event_loop(|| {
        let dispatcher = dispatcher("event-loop");
        let served: Dataset<Array<i64>> = Dataset::range(0..10).batch(2);
        let worker = worker(&dispatcher, "event-loop").dataset("train", &served).start().unwrap();
        let data: Dataset<Array<i64>> = dataset(options(&dispatcher, "event-loop")).unwrap();
        let mut all: Vec<i64> = data.iter().flat_map(|batch| batch.unwrap().as_slice().to_vec()).collect();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>());
        drop(data);
        drop(worker);
    });
}

#[test]
fn a_data_worker_that_is_not_needed_any_more_ends_within_an_event_loop() {
    within_an_event_loop(|| {
        let service = dispatcher("event-loop-end");
        let served: Dataset<Array<i64>> = Dataset::range(0..10);
        let worker = worker(&service, "event-loop-end").dataset("train", &served);
        let worker = worker.dispatcher_timeout(Duration::from_millis(100)).start().unwrap();
        drop(service);
        assert!(matches!(worker.join(), Err(Error::NoDispatcher { .. })));
    });
}

#[test]
fn a_data_worker_without_a_dispatcher_is_an_error_within_an_event_loop() {
    let ports = distribute_testkit::Ports::reserve(1).unwrap();
    let address = ports.addresses().remove(0);
    drop(ports);
    within_an_event_loop(|| {
        let served: Dataset<Array<i64>> = Dataset::range(0..10);
        let worker = DataWorker::builder().dispatcher(address).identity(identity("event-loop-none"));
        let worker = worker.dataset("train", &served).register_timeout(Duration::from_millis(10));
        assert!(matches!(worker.start(), Err(Error::NoDispatcher { .. })));
    });
}

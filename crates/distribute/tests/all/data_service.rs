//! The example data_service: a data worker and a training program, as processes, with a dispatcher in this one.

use distribute::data_service::{Dispatcher, DispatcherOptions};
use distribute_testkit::Signal;

use super::examples::{DEADLINE, example, numbers, run};

#[test]
fn a_training_reads_what_a_data_worker_serves() {
    let dispatcher = Dispatcher::start(DispatcherOptions::default()).unwrap();
    let address = dispatcher.address().to_string();
    let part = |args: &[&str]| example("data_service", args).env("DISTRIBUTE_DATA_SERVICE", &*address);
    let mut worker = part(&["serve"]).start().unwrap();
    let trained = run(part(&["CPU:0", "--epochs", "1"])).remove(0);
    assert!(numbers(&trained, "test accuracy")[0] > 0.7, "{trained:?}");
    worker.kill(0, Signal::TERM).unwrap();
    assert!(worker.wait(0, DEADLINE).unwrap().success());
}

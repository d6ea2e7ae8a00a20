use std::time::Duration;

use distribute_cluster::Membership;
use distribute_input::{Dataset, UnequalData};
use distribute_values::{Aggregation, HostTensor};

use super::*;
use crate::{CommunicationOptions, MirroredStrategy, MultiWorkerMirroredStrategy};

/// Whose variables count for each replica, and whose passes have whole steps only.
struct Counting(Strategy);

impl StrategyExtended for Counting {
    fn name(&self) -> &'static str {
        "Counting"
    }
    fn replicas(&self) -> &Replicas {
        self.0.extended().replicas()
    }
    fn describe(&self) -> String {
        self.0.describe()
    }
    fn variable_options(&self, name: &str, options: VariableOptions) -> VariableOptions {
        if name.starts_with("count") { VariableOptions::on_read(Aggregation::Sum) } else { options }
    }
    fn input_options(&self, options: InputOptions) -> InputOptions {
        options.unequal_data(UnequalData::Drop)
    }
}

#[test]
fn an_author_decides_how_variables_are_created_and_input_is_distributed() {
    let mirrored = MirroredStrategy::builder().num_replicas(2).build().unwrap();
    let counting = Strategy::new(Counting(mirrored.clone()));
    let (zero, one) = (HostTensor::scalar(0.0), HostTensor::scalar(1.0));
    for (strategy, expected) in [(&counting, true), (&mirrored, false)] {
        let count = strategy.variable("count", &zero, VariableOptions::default()).unwrap();
        let other = strategy.variable("other", &zero, VariableOptions::default()).unwrap();
        assert_eq!(count.options().synchronization == Synchronization::OnRead, expected);
        assert_eq!(other.options(), VariableOptions::default());
        let run = strategy.run_with((), |context, ()| {
            Ok::<_, Error>(count.assign(context.call_context(), distribute_values::Assignment::Add, &one)?)
        });
        // Without an aggregation a replica cannot write.
        assert_eq!(run.is_ok(), expected);
        let steps = strategy.distribute_dataset(&Dataset::range(0..9).batch(4)).unwrap().iter().count();
        assert_eq!(steps, if expected { 2 } else { 3 });
        let make = |_| Ok(Dataset::range(0..9).batch(4));
        let steps = strategy.distribute_datasets_from_function(make).unwrap().iter().count();
        assert_eq!(steps, if expected { 1 } else { 2 });
        if expected {
            let sum = strategy.with_call_context(|context| count.read_value(context)).unwrap();
            assert_eq!(sum.to_elements::<f64>().unwrap(), [2.0]);
        }
    }
}

#[test]
fn workers_that_create_variables_in_another_order_get_an_error() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let create = &|worker: u32| {
        let strategy = MultiWorkerMirroredStrategy::builder()
            .devices(["CPU:0"])
            .membership(Membership::new(worker, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(60)))
            .build()
            .unwrap();
        let names = if worker == 0 { ["a", "b"] } else { ["b", "a"] };
        let create = |name| strategy.variable(name, &HostTensor::scalar(0.0), VariableOptions::default());
        let outcome = names.into_iter().try_for_each(|name| create(name).map(drop));
        (strategy, outcome)
    };
    let [_, (_, outcome)] = std::thread::scope(|scope| {
        let workers = [0, 1].map(|worker| scope.spawn(move || create(worker)));
        workers.map(|worker| worker.join().unwrap())
    });
    // The first worker sends its values, and learns of the difference in a later call.
    let told = outcome.unwrap_err().to_string();
    assert!(told.starts_with("variable \"b\": ") && told.contains("in the same order"), "{told}");
    assert!(told.contains("called broadcast #"), "{told}");
}

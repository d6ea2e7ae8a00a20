use distribute_input::{Dataset, UnequalData};
use distribute_values::{Aggregation, HostTensor};

use super::*;
use crate::MirroredStrategy;

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

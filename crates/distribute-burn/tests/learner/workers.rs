//! Decisions of the chief that all workers follow.

use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::{EarlyStoppingStrategy, MetricEarlyStoppingStrategy, StoppingCondition};
use distribute_burn::learner::DistributedTraining;

use crate::common::*;

/// Stops after the second epoch; never asked on workers that have no events.
#[derive(Clone)]
struct AfterTwo {
    is_chief: bool,
}

impl EarlyStoppingStrategy for AfterTwo {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        assert!(self.is_chief, "a worker without events was asked");
        epoch >= 2
    }
}

#[test]
fn early_stopping_ends_all_workers_after_the_same_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let results = on_workers(2, 2, |strategy, _| {
        let (training, log) = training(folder.path(), loader(rows(64), 8), loader(rows(20), 20));
        let early = AfterTwo { is_chief: strategy.is_chief() };
        let training = training.num_epochs(50).early_stopping(early).distributed(&strategy);
        let result = training.launch(learner(Net::new(true)));
        assert_eq!(error_of(&result), "no error");
        (log.of("valid").len(), values(&result.model))
    });
    assert_eq!(results[0].0, 2, "epochs");
    assert_eq!(results[0].1, results[1].1);
}

#[test]
fn burns_early_stopping_by_a_metric_works_on_several_replicas() {
    let folder = tempfile::tempdir().unwrap();
    let (training, log) = training(folder.path(), loader(rows(64), 8), loader(rows(20), 20));
    // No epoch is better than the first by this measure.
    let early = MetricEarlyStoppingStrategy::new(
        &LossMetric::new(),
        Aggregate::Mean,
        Direction::Highest,
        Split::Valid,
        StoppingCondition::NoImprovementSince { n_epochs: 3 },
    );
    let training = training.num_epochs(50).early_stopping(early).distributed(&mirrored(2));
    let result = training.launch(learner(Net::new(false)));
    assert_eq!(error_of(&result), "no error");
    assert_eq!(log.of("valid").len(), 4, "epochs: {:?}", log.of("valid"));
}

//! Strategies that shard: the optimizer's state is in parts.

use burn::optim::{LambConfig, ModuleOptimizer, SgdConfig};
use burn::train::Learner;
use distribute_burn::learner::DistributedTraining;
use distribute_strategy::Strategy;

use crate::common::*;
use crate::files::{self, train};

/// Trains, and returns the losses of validation, the parameters, and the sizes of the optimizers' states.
fn trained(
    strategy: &Strategy,
    learner: Learner<Net>,
    accumulation: Option<usize>,
) -> (Vec<f64>, Vec<f32>, Vec<usize>) {
    let folder = tempfile::tempdir().unwrap();
    let states = learner.model().states;
    let (mut training, log) = training(folder.path(), loader(rows(50), 8), loader(rows(20), 8));
    if let Some(steps) = accumulation {
        training = training.grads_accumulation(steps);
    }
    let result = training.distributed(strategy).launch(learner);
    assert_eq!(error_of(&result), "no error");
    let sizes = states.lock().values().copied().collect();
    (log.of("valid"), values(&result.model), sizes)
}

fn by(optimizer: ModuleOptimizer) -> Learner<Net> {
    Learner::new(Net::new(true), optimizer, 0.02)
}

#[test]
fn sharded_replicas_train_as_mirrored_ones_with_parts_of_the_state() {
    for accumulation in [None, Some(2)] {
        let (losses, parameters, sizes) = trained(&sharded(2, 2), learner(Net::new(true)), accumulation);
        let (expected_losses, expected, whole) = trained(&mirrored(2), learner(Net::new(true)), accumulation);
        assert_eq!((&losses, &parameters), (&expected_losses, &expected));
        assert!(losses.last().unwrap() < &(0.7 * losses[0]), "nothing was learnt: {losses:?}");
        // Two moments for each parameter. The head's bias, and the scales of the norm, are on both.
        assert_eq!(sizes.iter().sum::<usize>(), whole[0] + 2);
        assert!(sizes.iter().all(|size| (3..=whole[0] - 2).contains(size)), "{sizes:?} of {whole:?}");
    }
    for (replicas, over) in [(3, 3), (4, 2)] {
        let (_, parameters, sizes) = trained(&sharded(replicas, over), learner(Net::new(true)), None);
        let (_, expected, whole) = trained(&mirrored(replicas), learner(Net::new(true)), None);
        assert_close(&parameters, &expected, 1e-3);
        assert!(sizes.len() == replicas && sizes.iter().all(|size| *size <= whole[0] - 2), "{sizes:?} of {whole:?}");
    }
}

/// Replicas have whole parameters, so optimizers may look at their norms.
#[test]
fn every_optimizer_of_burn_works() {
    for optimizer in [LambConfig::new().init(), SgdConfig::new().init()] {
        let (losses, parameters, _) = trained(&sharded(2, 2), by(optimizer.clone()), None);
        let (expected_losses, expected, _) = trained(&mirrored(2), by(optimizer), None);
        assert_eq!((losses, parameters), (expected_losses, expected));
    }
}

#[test]
fn checkpoints_have_the_whole_state_and_are_resumed_under_both() {
    let whole = |strategy: Strategy| train(&strategy, tempfile::tempdir().unwrap().path(), 4, None);
    let expected = whole(mirrored(2));
    assert_eq!(whole(sharded(2, 2)), expected);
    for (from, to) in [(sharded(2, 2), sharded(2, 2)), (sharded(2, 2), mirrored(2)), (mirrored(2), sharded(2, 2))] {
        let folder = tempfile::tempdir().unwrap();
        train(&from, folder.path(), 2, None);
        let resumed = files::trained(&to, folder.path(), 4, Some(2));
        assert_eq!(values(&resumed), expected);
        // Each replica takes its part of the state only.
        let sizes: usize = resumed.states.lock().values().sum();
        assert_eq!(sizes, if to.sharding().is_some() { 12 + 2 } else { 2 * 12 });
    }
}

/// Each replica forgets the state of the parameters that others update, of which it would be out of date.
#[test]
fn a_state_from_before_the_training_is_divided_too() {
    let train = |strategy: Strategy| {
        let folder = tempfile::tempdir().unwrap();
        files::trained_by(experienced(Net::new(true)), &strategy, folder.path(), 2, None);
        files::trained_by(experienced(Net::new(true)), &strategy, folder.path(), 4, Some(2))
    };
    let (sharded, mirrored) = (train(sharded(2, 2)), train(mirrored(2)));
    assert_eq!(values(&sharded), values(&mirrored));
    assert_eq!(sharded.states.lock().values().sum::<usize>(), 12 + 2);
}

#[test]
fn workers_that_shard_train_and_resume_as_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, rank: u32| folder.path().join(format!("{name}-{rank}"));
    let expected = train(&sharded(2, 2), &of("alone", 0), 4, None);
    let whole = on_sharded_workers(2, |strategy, rank| train(&strategy, &of("whole", rank), 4, None));
    assert_eq!(whole, [expected.clone(), expected.clone()]);
    on_sharded_workers(2, |strategy, rank| train(&strategy, &of("parts", rank), 2, None));
    let parts = on_sharded_workers(2, |strategy, rank| train(&strategy, &of("parts", rank), 4, Some(2)));
    assert_eq!(parts, [expected.clone(), expected]);
}

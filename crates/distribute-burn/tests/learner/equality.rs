//! The same training by burn's own strategy for one device, and under strategies of several replicas.

use burn::data::dataloader::DataLoaderBuilder;
use burn::train::{ExecutionStrategy, TrainingStrategy};
use distribute_burn::learner::{DataParallel, DistributedTraining};

use crate::common::*;

const BATCH: usize = 8;

/// Trains by burn alone, with the global batches of `replicas` replicas. Returns the losses of validation and the
/// parameters.
fn alone(all: &[Row], replicas: usize, accumulation: Option<usize>) -> (Vec<f64>, Vec<f32>) {
    let folder = tempfile::tempdir().unwrap();
    let train = loader(in_order_of_steps(all, replicas, BATCH), replicas * BATCH);
    let (mut training, log) = training(folder.path(), train, loader(rows(20), BATCH));
    if let Some(steps) = accumulation {
        training = training.grads_accumulation(steps);
    }
    let device = burn::tensor::Device::flex();
    let strategy = TrainingStrategy::Default(ExecutionStrategy::SingleDevice(device));
    let result = training.with_training_strategy(strategy).launch(learner(Net::new(false)));
    assert_eq!(error_of(&result), "no error");
    (log.of("valid"), values(&result.model))
}

fn on_replicas(all: &[Row], replicas: usize, accumulation: Option<usize>) -> (Vec<f64>, Vec<f32>) {
    let folder = tempfile::tempdir().unwrap();
    let (mut training, log) = training(folder.path(), loader(all.to_vec(), BATCH), loader(rows(20), BATCH));
    if let Some(steps) = accumulation {
        training = training.grads_accumulation(steps);
    }
    let result = training.distributed(&mirrored(replicas)).launch(learner(Net::new(false)));
    assert_eq!(error_of(&result), "no error");
    // Every replica's batch is an event.
    let batches: usize = (0..replicas)
        .map(|part| (all.len() * (part + 1) / replicas) - all.len() * part / replicas)
        .map(|rows: usize| rows.div_ceil(BATCH))
        .sum();
    assert_eq!(log.of("train").len(), 3 * batches);
    (log.of("valid"), values(&result.model))
}

#[test]
fn one_replica_gives_the_bits_of_burns_own_strategy() {
    let all = rows(50);
    assert_eq!(on_replicas(&all, 1, None), alone(&all, 1, None));
}

/// The last global batch has fewer rows, and with three replicas the first has none of them.
#[test]
fn several_replicas_train_as_burns_own_strategy_does_with_the_global_batch() {
    let all = rows(50);
    for replicas in [2, 3] {
        let (losses, parameters) = on_replicas(&all, replicas, None);
        let (expected_losses, expected) = alone(&all, replicas, None);
        assert!(expected_losses.last().unwrap() < &(0.5 * expected_losses[0]), "nothing was learnt");
        assert_all_close(&expected_losses, &losses, 1e-4);
        assert_close(&expected, &parameters, 1e-3);
    }
}

#[test]
fn gradients_accumulate_as_by_burn() {
    let all = rows(50);
    for replicas in [1, 2, 3] {
        let (losses, parameters) = on_replicas(&all, replicas, Some(2));
        let (expected_losses, expected) = alone(&all, replicas, Some(2));
        assert_all_close(&expected_losses, &losses, 1e-4);
        assert_close(&expected, &parameters, 1e-3);
    }
}

/// Two replicas in each of two workers, and the same four in one process.
#[test]
fn workers_train_as_one_process_with_as_many_replicas() {
    let all = rows(90);
    let (losses, parameters) = on_replicas(&all, 4, None);
    let folder = tempfile::tempdir().unwrap();
    let results = on_workers(2, 2, |strategy, _| {
        let (training, log) = training(folder.path(), loader(all.clone(), BATCH), loader(rows(20), BATCH));
        // Initial values are the chief's.
        let net = Net::seeded(false, if strategy.is_chief() { 11 } else { 12 });
        let result = training.distributed(&strategy).launch(learner(net));
        assert_eq!(error_of(&result), "no error");
        (log.of("valid"), values(&result.model))
    });
    assert_eq!(results[0].1, results[1].1);
    assert!(results[1].0.is_empty(), "events are the chief's");
    assert_all_close(&losses, &results[0].0, 1e-4);
    assert_close(&parameters, &results[0].1, 1e-3);
}

/// Shuffled, with loaders that have threads, and batches that differ in size between replicas.
#[test]
fn shuffled_data_are_shared_by_threads_of_loaders() {
    let folder = tempfile::tempdir().unwrap();
    let shuffled = || {
        let builder = DataLoaderBuilder::new(Rows).batch_size(BATCH).shuffle(3).num_workers(2);
        builder.build(burn::data::dataset::InMemDataset::new(rows(77)))
    };
    let results = on_workers(2, 1, |strategy, _| {
        let (training, log) = training(folder.path(), shuffled(), loader(rows(20), BATCH));
        let result = training.num_epochs(6).distributed(&strategy).launch(learner(Net::new(true)));
        assert_eq!(error_of(&result), "no error");
        (log.of("valid"), values(&result.model))
    });
    assert_eq!(results[0].1, results[1].1, "parameters and running statistics are equal");
    let losses = &results[0].0;
    assert!(losses.last().unwrap() < &(0.5 * losses[0]), "{losses:?}");
}

/// The second worker has data for one step, the first for five.
#[test]
fn workers_with_loaders_of_different_lengths_end_together() {
    let folder = tempfile::tempdir().unwrap();
    let results = on_workers(2, 2, |strategy, rank| {
        let own = if rank == 0 { rows(80) } else { rows(5) };
        let (training, log) = training(folder.path(), loader(own, BATCH), loader(rows(20), BATCH));
        let parallel = DataParallel::new(&strategy).own_loaders();
        let result = training.distributed_with(parallel).launch(learner(Net::new(true)));
        assert_eq!(error_of(&result), "no error");
        (log.of("train").len(), values(&result.model))
    });
    assert_eq!(results[0].0, 3 * 10);
    assert_eq!(results[0].1, results[1].1);
}

/// The mean over replicas of the means of equal parts is the mean of the whole.
#[test]
fn running_statistics_are_means_over_replicas_and_workers() {
    let all = rows(64);
    let folder = tempfile::tempdir().unwrap();
    let training = |train: Loader| training(folder.path(), train, loader(rows(8), BATCH)).0;
    let whole = loader(in_order_of_steps(&all, 4, BATCH), 4 * BATCH);
    let expected = training(whole).distributed(&mirrored(1)).launch(lazy(Net::new(true))).model.running_mean();
    let before = Net::new(true).running_mean();
    assert!(expected.iter().zip(&before).any(|(after, before)| (after - before).abs() > 0.01));
    let of_threads = training(loader(all.clone(), BATCH)).distributed(&mirrored(4)).launch(lazy(Net::new(true)));
    assert_close(&expected, &of_threads.model.running_mean(), 1e-5);
    let of_workers = on_workers(2, 2, |strategy, _| {
        let training = training(loader(all.clone(), BATCH)).distributed(&strategy);
        training.launch(lazy(Net::new(true))).model.running_mean()
    });
    assert_close(&expected, &of_workers[0], 1e-5);
    assert_eq!(of_workers[0], of_workers[1]);
}

#[test]
fn frozen_parameters_and_those_without_gradients_stay_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let results = on_workers(2, 2, |strategy, _| {
        let (training, _) = training(folder.path(), loader(rows(64), BATCH), loader(rows(8), BATCH));
        let result = training.distributed(&strategy).launch(learner(Net::new(true).with_frozen_hidden_layer()));
        assert_eq!(error_of(&result), "no error");
        result.model
    });
    let before = Net::new(true);
    for model in &results {
        assert_eq!(model.hidden_layer(), before.hidden_layer());
        assert_eq!(model.spare_layer(), before.spare_layer());
        assert_ne!(values(model), values(&before));
    }
}

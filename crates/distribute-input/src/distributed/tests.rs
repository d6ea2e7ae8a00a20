use proptest::prelude::*;

use super::*;
use crate::{AUTOTUNE, Array};

type Rows = Vec<i64>;

fn topology(workers: usize, worker: usize, replicas: usize) -> Topology {
    Topology::new(workers, worker, replicas).unwrap()
}

/// Returns one pass, indexed by step and local replica.
fn pass(data: &WorkerDataset<Array<i64>>) -> Vec<Vec<Rows>> {
    data.iter().map(|step| step.unwrap().iter().map(|part| part.as_slice().to_vec()).collect()).collect()
}

/// Returns one pass, indexed by worker, step and local replica; every worker builds its own pipeline, as processes do.
fn all_workers(workers: usize, replicas: usize, build: impl Fn() -> Dataset<Array<i64>>) -> Vec<Vec<Vec<Rows>>> {
    let worker = |worker| {
        let data = distribute_dataset(&build(), topology(workers, worker, replicas), InputOptions::default()).unwrap();
        pass(&data)
    };
    (0..workers).map(worker).collect()
}

fn sizes(parts: &[Vec<Rows>]) -> Vec<usize> {
    parts.concat().iter().map(Vec::len).collect()
}

#[test]
fn an_error_is_not_the_end_of_the_data() {
    let data = Dataset::range(0..8).map(|x| if x.item() == Some(&5) { Err("no such number".into()) } else { Ok(x) });
    let data = distribute_dataset(&data.batch(4), topology(1, 0, 1), InputOptions::default()).unwrap();
    let mut steps = data.iter();
    assert_eq!(steps.more(), More::Full);
    steps.next().unwrap().unwrap();
    assert_eq!(steps.more(), More::Failed);
    assert!(steps.next().unwrap().is_err());
    assert_eq!(steps.more(), More::Nothing);
}

#[test]
fn a_last_batch_fills_replicas_in_order() {
    let steps = &all_workers(1, 2, || Dataset::range(0..9).batch(2))[0];
    assert_eq!(steps.len(), 5);
    assert_eq!(steps[3], [[6], [7]]);
    assert_eq!(steps[4], [vec![8], vec![]]);
    let exact = &all_workers(1, 2, || Dataset::range(0..9).batch_exact(2))[0];
    assert_eq!(exact.last().unwrap(), &[[6], [7]]);
}

#[test]
fn a_batch_smaller_than_the_replicas_leaves_some_empty() {
    let steps = &all_workers(1, 5, || Dataset::range(0..4).batch(4))[0];
    assert_eq!(steps[0], [vec![0], vec![1], vec![2], vec![3], vec![]]);
    assert_eq!(sizes(&all_workers(1, 3, || Dataset::range(0..8).batch(4))[0]), [2, 1, 1, 2, 1, 1]);
}

#[test]
fn two_workers_of_two_replicas_share_each_batch() {
    let workers = all_workers(2, 2, || Dataset::range(0..15).batch(4));
    assert_eq!(workers[0].last().unwrap(), &[[12], [13]]);
    assert_eq!(workers[1].last().unwrap(), &[vec![14], vec![]]);
    let workers = all_workers(2, 1, || Dataset::range(0..12).batch(8));
    assert_eq!([sizes(&workers[0]), sizes(&workers[1])], [[4, 4], [4, 0]]);
}

#[test]
fn uneven_batches_rotate() {
    for build in [|| Dataset::range(0..14).batch(7), || Dataset::range(0..14).map(Ok).batch(7)] {
        let workers = all_workers(2, 2, build);
        assert_eq!(sizes(&workers[0]), [2, 2, 2, 1]);
        assert_eq!(sizes(&workers[1]), [2, 1, 2, 2]);
        assert_eq!(workers[1][1], [[10, 11], [12, 13]]);
    }
    let data = Dataset::range(0..14).batch(7);
    let data = distribute_dataset(&data, topology(2, 1, 2), InputOptions::default()).unwrap();
    assert_eq!((data.batch_sizes(0), data.batch_sizes(1)), (Some(vec![2, 1]), Some(vec![2, 2])));
    assert_eq!(data.cardinality(), Cardinality::Known(2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_example_is_seen_exactly_once(
        workers in 1_usize..5, replicas in 1_usize..4, global_batch in 1_usize..20, count in 0_i64..70, seed: u64,
        shuffled: bool, mapped: bool, depth in 0_usize..3,
    ) {
        let build = || {
            let data = Dataset::range(0..count);
            let data = if mapped { data.map(Ok) } else { data };
            let data = if shuffled { data.shuffle(16, seed) } else { data };
            data.batch(global_batch).prefetch(depth)
        };
        let global: Vec<Rows> = build().iter().map(|batch| batch.unwrap().as_slice().to_vec()).collect();
        let parts = all_workers(workers, replicas, build);
        for worker in &parts {
            prop_assert_eq!(worker.len(), global.len(), "all workers end together");
            prop_assert!(worker.iter().all(|step| step.len() == replicas));
        }
        for (step, batch) in global.iter().enumerate() {
            let joined: Rows = parts.iter().flat_map(|worker| worker[step].concat()).collect();
            prop_assert_eq!(&joined, batch);
        }
    }

    #[test]
    fn how_replicas_are_spread_over_workers_changes_nothing(per_replica in 1_usize..5, count in 0_i64..60, seed: u64) {
        let spread = |workers, replicas| {
            let build = || Dataset::range(0..count).shuffle(60, seed).batch(4 * per_replica);
            let parts = all_workers(workers, replicas, build);
            let steps = parts[0].len();
            let step = |step: usize| -> Vec<Rows> {
                parts.iter().flat_map(|worker: &Vec<Vec<Rows>>| worker[step].clone()).collect()
            };
            (0..steps).map(step).collect::<Vec<_>>()
        };
        let one = spread(1, 4);
        prop_assert_eq!(&one, &spread(2, 2));
        prop_assert_eq!(&one, &spread(4, 1));
    }
}

#[test]
fn passes_are_counted_by_the_distributed_dataset_alone() {
    let data = Dataset::range(0..40).shuffle(40, 2).batch(8);
    let peeked = data.clone();
    peeked.iter().next();
    let one = distribute_dataset(&data, topology(1, 0, 2), InputOptions::default()).unwrap();
    data.iter().count();
    let fresh = Dataset::range(0..40).shuffle(40, 2).batch(8);
    let other = distribute_dataset(
        &fresh,
        topology(1, 0, 2),
        InputOptions { per_replica_buffer_size: 0, ..InputOptions::default() },
    )
    .unwrap();
    let first = pass(&one);
    assert_eq!(first, pass(&other));
    let second = pass(&one);
    assert_ne!(first, second);
    assert_eq!(second, pass(&other));
    let again: Vec<_> = one.iter_epoch(0).map(|step| step.unwrap()[0].as_slice().to_vec()).collect();
    assert_eq!(again, first.iter().map(|step| step[0].clone()).collect::<Vec<_>>());
}

#[test]
fn a_dataset_must_be_batched() {
    for (data, words) in [
        (Dataset::range(0..9), "its cardinality is 9"),
        (Dataset::range(0..9).repeat_forever(), "its cardinality is infinite"),
    ] {
        let text = distribute_dataset(&data, topology(1, 0, 2), InputOptions::default()).unwrap_err().to_string();
        assert!(text.contains(words) && text.contains("call .batch(global_batch)"), "{text}");
        assert!(text.contains("distribute_datasets_from_function"), "{text}");
    }
    let faulty = Dataset::range(0..9).batch(0);
    assert!(matches!(distribute_dataset(&faulty, topology(1, 0, 2), InputOptions::default()), Err(Error::Zero { .. })));
}

#[test]
fn a_batch_that_grew_is_refused() {
    let data = Dataset::range(0..8).batch(2).map(|batch| Ok(Array::concat(&[batch.clone(), batch])?));
    let data = distribute_dataset(&data, topology(1, 0, 2), InputOptions::default()).unwrap();
    let error = data.iter().next().unwrap().unwrap_err();
    assert!(matches!(error, Error::OversizedBatch { step: 0, rows: 4, global_batch: 2 }), "{error}");
}

#[test]
fn tuples_are_divided_alike() {
    let labels = Array::from((0..10_i64).collect::<Vec<_>>());
    let images = Array::new([10, 3], (0..30).map(|value| value as f32).collect()).unwrap();
    let data = Dataset::from_tensor_slices((images, labels)).shuffle(10, 4).batch(4).prefetch(AUTOTUNE);
    let data = distribute_dataset(&data, topology(1, 0, 2), InputOptions::default()).unwrap();
    let mut seen = Vec::new();
    for (images, labels) in data.iter().flat_map(|step| step.unwrap()) {
        assert_eq!(images.shape(), [labels.as_slice().len(), 3]);
        for (row, label) in labels.as_slice().iter().enumerate() {
            assert_eq!(images.row(row).unwrap().as_slice()[0], (label * 3) as f32);
        }
        seen.extend_from_slice(labels.as_slice());
    }
    seen.sort();
    assert_eq!(seen, (0..10).collect::<Vec<_>>());
}

#[test]
fn elements_are_placed_ahead_of_the_reader() {
    let data = Dataset::range(0..4).batch(4);
    let data = distribute_dataset(&data, topology(1, 0, 2), InputOptions::default()).unwrap();
    let data = data.map_replicas(|replica, part| Ok((replica, std::thread::current().name().map(str::to_owned), part)));
    let step = data.iter().next().unwrap().unwrap();
    assert_eq!((step[0].0, step[1].0), (0, 1));
    assert_eq!(step[1].1.as_deref(), Some("input-prefetch"));
    assert_eq!(step[1].2.as_slice(), [2, 3]);
}

#[test]
fn a_function_makes_one_dataset_per_worker() {
    for worker in 0..2 {
        let mut calls = 0;
        let data = distribute_datasets_from_function(topology(2, worker, 2), InputOptions::default(), |context| {
            calls += 1;
            let batch = context.per_replica_batch_size(8)?;
            let base = 100 * context.input_pipeline_id as i64;
            Ok(Dataset::range(base..base + 9).batch(batch))
        });
        let data = data.unwrap();
        assert_eq!(calls, 1);
        let base = 100 * worker as i64;
        let expected = [
            vec![vec![base, base + 1], vec![base + 2, base + 3]],
            vec![vec![base + 4, base + 5], vec![base + 6, base + 7]],
            vec![vec![base + 8], vec![]],
        ];
        assert_eq!(pass(&data), expected);
        assert_eq!(data.cardinality(), Cardinality::Known(3));
        assert_eq!(data.batch_sizes(0), Some(vec![2, 2]));
    }
}

#[test]
fn what_a_function_returns_as_error_arrives() {
    let distribute = |function: fn(InputContext) -> Result<Dataset<Array<i64>>, BoxError>| {
        distribute_datasets_from_function(topology(1, 0, 3), InputOptions::default(), function).unwrap_err()
    };
    assert!(matches!(
        distribute(|context| Ok(Dataset::range(0..1).batch(context.per_replica_batch_size(4)?))),
        Error::NotDivisible { .. }
    ));
    assert_eq!(distribute(|_| Err("no file".into())).to_string(), "the input function of a dataset failed: no file");
    assert!(matches!(distribute(|_| Ok(Dataset::range(0..1).batch(0))), Error::Zero { .. }));
    // Scalars cannot be sliced to zero rows for the remaining replicas.
    let data =
        distribute_datasets_from_function(topology(1, 0, 2), InputOptions::default(), |_| Ok(Dataset::range(0..3)));
    let last = data.unwrap().iter().last().unwrap();
    assert!(matches!(last, Err(Error::Scalar { .. })));
}

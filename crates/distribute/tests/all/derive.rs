//! Structs that are passed to runs and returned from them.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use distribute::prelude::*;

fn mirrored() -> Strategy {
    MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap()
}

#[derive(ReplicaArgs)]
struct Step<'a, M, B> {
    model: M,
    batches: Vec<String>,
    batch: B,
    name: &'a str,
}

#[derive(Structure)]
struct Metrics {
    loss: Tensor,
    counts: Counts<u64>,
    by_class: BTreeMap<&'static str, Vec<f64>>,
}

#[derive(Structure, Debug, PartialEq)]
struct Counts<T>(T, Option<T>);

#[test]
fn structs_of_arguments_are_split_and_structs_of_results_reduced() {
    let strategy = mirrored();
    let model = Mirrored::new(vec![10u64, 10]);
    let step = Step {
        model: &model,
        batches: vec!["a".to_owned()],
        batch: (PerReplica::new(vec![1u64, 2]), Some(PerReplica::new(vec![3u64, 4]))),
        name: "step",
    };
    let metrics = strategy
        .run(step, |_, step| {
            assert_eq!((step.name, step.batches.len()), ("step", 1));
            let (first, second) = step.batch;
            Ok(Metrics {
                loss: Tensor::full(first as f32, 2, &Device::Cpu)?.to_dtype(DType::F32)?,
                counts: Counts(step.model + first, second),
                by_class: BTreeMap::from([("cat", vec![0.5]), ("dog", vec![])]),
            })
        })
        .unwrap();
    let sum = strategy.reduce(ReduceOp::Sum, &metrics, Axis::None).unwrap();
    assert_eq!(sum.loss.to_vec1::<f32>().unwrap(), [3.0, 3.0]);
    assert_eq!(sum.counts, Counts(23, Some(7)));
    assert_eq!(sum.by_class, BTreeMap::from([("cat", vec![1.0]), ("dog", vec![])]));
    let whole = strategy
        .run((), |context, ()| Ok(context.all_reduce(ReduceOp::Max, &Counts(context.replica_id() as u64, None))?));
    assert_eq!(whole.unwrap().values(), [Counts(1, None), Counts(1, None)]);
}

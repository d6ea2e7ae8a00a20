//! Replicas in lock step.

use distribute_hlo::{Builder, CollectiveGroups, CompareOp, ElementType, Reducer, TensorType};
use hlo_evaluator::{Error, Tensor, evaluate};

use crate::every_operation::{self, every_operation};

fn inputs(replicas: usize) -> Vec<Vec<Tensor>> {
    (0..replicas)
        .map(|replica| vec![Tensor::new([4], (0..4).map(|n| n + 10 * replica as i32).collect::<Vec<_>>())])
        .collect()
}

#[test]
fn every_operation_is_evaluated() {
    for replicas in [1, 2] {
        let program = every_operation(replicas).unwrap();
        let outputs = evaluate(&program, &every_operation::inputs(replicas)).unwrap();
        for outputs in outputs {
            let types: Vec<_> = outputs.iter().map(Tensor::ty).collect();
            assert_eq!(types, program.outputs().iter().collect::<Vec<_>>());
        }
    }
}

#[test]
fn collectives_exchange_in_the_order_of_a_group() {
    let mut b = Builder::new("groups").replicas(4);
    let x = b.parameter(TensorType::new(ElementType::I32, [4]));
    let groups = CollectiveGroups::Groups(vec![vec![2, 0], vec![1, 3]]);
    let sum = b.all_reduce(x, Reducer::Sum, &groups).unwrap();
    let gathered = b.all_gather(x, 0, &groups).unwrap();
    let part = b.reduce_scatter(x, Reducer::Max, 0, &groups).unwrap();
    let exchanged = b.all_to_all(x, 0, 0, &groups).unwrap();
    let sent = b.collective_permute(x, &[(0, 3), (3, 1)]).unwrap();
    let id = b.replica_id().unwrap();
    let program = b.finish(&[sum, gathered, part, exchanged, sent, id]).unwrap();
    let found = evaluate(&program, &inputs(4)).unwrap();
    assert_eq!(found[0][0], Tensor::new([4], vec![20, 22, 24, 26]));
    assert_eq!(found[2][1], Tensor::new([8], vec![20, 21, 22, 23, 0, 1, 2, 3]));
    assert_eq!(found[0][2], Tensor::new([2], vec![22, 23]));
    assert_eq!(found[2][2], Tensor::new([2], vec![20, 21]));
    assert_eq!(found[0][3], Tensor::new([4], vec![22, 23, 2, 3]));
    assert_eq!(found[1][4], Tensor::new([4], vec![30, 31, 32, 33]));
    assert_eq!(found[0][4], Tensor::new([4], vec![0, 0, 0, 0]));
    assert_eq!(found[3][5], Tensor::new([], vec![3u32]));
}

#[test]
fn a_collective_that_some_replicas_miss_is_an_error() {
    let mut b = Builder::new("diverged").replicas(2);
    let x = b.parameter(TensorType::new(ElementType::I32, [4]));
    let (id, zero) = (b.replica_id().unwrap(), b.scalar(0u32).unwrap());
    let first = b.compare(CompareOp::Eq, id, zero).unwrap();
    let sum = b.if_else(first, |b| Ok(vec![b.all_reduce(x, Reducer::Sum, &CollectiveGroups::All)?]), |_| Ok(vec![x]));
    let program = b.finish(&sum.unwrap()).unwrap();
    let error = evaluate(&program, &inputs(2)).unwrap_err();
    assert_eq!(error, Error::Diverged { operation: "all_reduce", reached: vec![0], group: vec![0, 1] });
}

#[test]
fn replicas_may_repeat_a_loop_without_collectives_differently() {
    let mut b = Builder::new("rounds").replicas(3);
    let (id, zero, one) = (b.replica_id().unwrap(), b.scalar(0u32).unwrap(), b.scalar(1u32).unwrap());
    let last = b.while_loop(
        &[zero],
        |b, state| b.compare(CompareOp::Lt, state[0], id),
        |b, state| Ok(vec![b.add(state[0], one)?]),
    );
    let program = b.finish(&last.unwrap()).unwrap();
    let found = evaluate(&program, &[vec![], vec![], vec![]]).unwrap();
    assert_eq!(
        found.iter().map(|outputs| outputs[0].clone()).collect::<Vec<_>>(),
        [0u32, 1, 2].map(|n| Tensor::new([], vec![n]))
    );
}

#[test]
fn a_loop_without_an_end_is_an_error() {
    let mut b = Builder::new("endless");
    let yes = b.scalar(true).unwrap();
    let last = b.while_loop(&[], |_, _| Ok(yes), |_, _| Ok(vec![])).unwrap();
    let program = b.finish(&last).unwrap();
    assert_eq!(evaluate(&program, &[vec![]]).unwrap_err(), Error::Endless { rounds: 1_000_000 });
}

#[test]
fn inputs_are_compared_with_parameters() {
    let mut b = Builder::new("inputs");
    let x = b.parameter(TensorType::new(ElementType::F32, [4]));
    let program = b.finish(&[x]).unwrap();
    for wrong in [inputs(1), vec![], vec![vec![]]] {
        let error = evaluate(&program, &wrong).unwrap_err();
        assert!(matches!(error, Error::Inputs { .. }), "{error}");
    }
}

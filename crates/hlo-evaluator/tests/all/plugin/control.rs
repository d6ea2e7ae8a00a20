//! Loops, branches and collectives.

use distribute_hlo::{CollectiveGroups, CompareOp, ElementType, Reducer, Value};
use hlo_evaluator::Tensor;

use super::agree;
use crate::case::Case;

#[test]
fn loops_and_branches() {
    agree(1, 4, |case| {
        let x = case.random(ElementType::F32, &[3]);
        let rounds = case.rng.i32(0..=4);
        let limit = case.given(Tensor::new([], vec![rounds]));
        let zero = case.b.scalar(0i32).unwrap();
        let last = case.b.while_loop(
            &[zero, x],
            |b, state| b.compare(CompareOp::Lt, state[0], limit),
            |b, state| {
                let one = b.scalar(1i32)?;
                Ok(vec![b.add(state[0], one)?, b.add(state[1], x)?])
            },
        );
        let last = last.unwrap();
        case.exact("while, its count", Ok(last[0]));
        case.close("while, its sum", Ok(last[1]));
        let pred = case.random(ElementType::Bool, &[]);
        let chosen = case.b.if_else(pred, |b| Ok(vec![b.negate(x)?, x]), |b| Ok(vec![x, b.abs(x)?])).unwrap();
        case.exact("if, first", Ok(chosen[0]));
        case.exact("if, second", Ok(chosen[1]));
        let kept = case.b.optimization_barrier(&[x, pred]).unwrap();
        case.exact("optimization_barrier", Ok(kept[0]));
    });
}

/// Puts 0 in the place of NaN.
fn without_nan(case: &mut Case, x: Value) -> Value {
    let ty = case.b.type_of(x).unwrap().clone();
    let zero = case.b.full(ty, 0).unwrap();
    let number = case.b.compare(CompareOp::Eq, x, x).unwrap();
    case.b.select(number, x, zero).unwrap()
}

/// Adds every collective over the groups.
fn collectives(case: &mut Case, groups: &CollectiveGroups, size: usize) {
    for element in ElementType::ALL {
        let x = case.random(element, &[2 * size, 3]);
        let finite = if element.is_float() { without_nan(case, x) } else { x };
        for reducer in Reducer::ALL {
            // Devices may lose NaN here.
            let lossy = element.is_float() && matches!(reducer, Reducer::Max | Reducer::Min);
            let x = if lossy { finite } else { x };
            let Ok(value) = case.b.all_reduce(x, reducer, groups) else { continue };
            case.close(format!("all_reduce {reducer:?} {groups:?}"), Ok(value));
            let value = case.b.reduce_scatter(x, reducer, 0, groups);
            case.close(format!("reduce_scatter {reducer:?} {groups:?}"), value);
        }
        let value = case.b.all_gather(x, 1, groups);
        case.exact(format!("all_gather {groups:?}"), value);
        let value = case.b.all_to_all(x, 0, 1, groups);
        case.exact(format!("all_to_all {groups:?}"), value);
        let replicas = case.replicas;
        let pairs: Vec<(usize, usize)> = (1..replicas).map(|replica| (replica, (replica * 3 + 1) % replicas)).collect();
        let mut receivers: Vec<usize> = pairs.iter().map(|pair| pair.1).collect();
        receivers.sort_unstable();
        receivers.dedup();
        if receivers.len() == pairs.len() {
            let value = case.b.collective_permute(x, &pairs);
            case.exact(format!("collective_permute {pairs:?}"), value);
        }
    }
    let value = case.b.replica_id();
    case.exact("replica_id", value);
}

#[test]
fn collectives_of_one_replica() {
    agree(1, 1, |case| collectives(case, &CollectiveGroups::All, 1));
}

#[test]
fn collectives_of_two_replicas() {
    agree(2, 1, |case| collectives(case, &CollectiveGroups::All, 2));
}

#[test]
fn collectives_of_four_replicas() {
    agree(4, 1, |case| collectives(case, &CollectiveGroups::All, 4));
}

#[test]
fn collectives_of_groups() {
    let pairs = CollectiveGroups::Groups(vec![vec![3, 0], vec![1, 2]]);
    agree(4, 1, |case| collectives(case, &pairs, 2));
}

#[test]
fn a_loop_may_have_collectives() {
    agree(2, 2, |case| {
        let x = case.random(ElementType::I32, &[3]);
        let (zero, limit) = (case.b.scalar(0i32).unwrap(), case.b.scalar(3i32).unwrap());
        let last = case.b.while_loop(
            &[zero, x],
            |b, state| b.compare(CompareOp::Lt, state[0], limit),
            |b, state| {
                let one = b.scalar(1i32)?;
                let sum = b.all_reduce(state[1], Reducer::Sum, &CollectiveGroups::All)?;
                let count = b.add(state[0], one)?;
                Ok(vec![count, b.add(sum, x)?])
            },
        );
        case.exact("sums in a loop", Ok(last.unwrap()[1]));
    });
}

//! Every reduction × data type × transport × number of ranks × length, against a naive reference.

use distribute_collectives::{ProcessGroup, Rank, ReduceOp, TransportKind};
use distribute_device::Element;
use distribute_testkit::short_or_long;
use half::{bf16, f16};

use crate::harness::{each, groups, quick};

const RANKS: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// No element, one, an odd number, and more than any internal block; none is a multiple of a vector's length.
const LENGTHS: [usize; 4] = [0, 1, 37, 9_001];

const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

/// Small integers, which every type represents exactly, as well as their sum and product over eight ranks.
fn value(rank: usize, index: usize) -> u8 {
    [1, 2, 1, 3, 1, 1, 2, 1][(rank + index) % 8]
}

fn expected(op: ReduceOp, ranks: usize, index: usize) -> f64 {
    let values = (0..ranks).map(|rank| value(rank, index));
    let sum: f64 = values.clone().map(f64::from).sum();
    match op {
        ReduceOp::Sum => sum,
        ReduceOp::Mean => sum / ranks as f64,
        ReduceOp::Min => f64::from(values.min().unwrap()),
        ReduceOp::Max => f64::from(values.max().unwrap()),
        ReduceOp::Product => values.map(f64::from).product(),
        other => panic!("{other} is not tested here"),
    }
}

fn check<T: Element>(group: &ProcessGroup, make: impl Fn(u8) -> T, read: impl Fn(T) -> f64) {
    let (me, ranks) = (group.rank().index(), group.world_size());
    // The values repeat after eight elements.
    let table = OPS.map(|op| (op, std::array::from_fn::<f64, 8, _>(|index| expected(op, ranks, index))));
    let close = |of: &(ReduceOp, [f64; 8]), index: usize, got: T| {
        let (op, want) = (of.0, of.1[index % 8]);
        // Means of integers are truncated; those of 16-bit floats are rounded.
        let tolerance = match (op, T::DTYPE.is_float()) {
            (ReduceOp::Mean, true) => want * 0.01,
            (ReduceOp::Mean, false) => 0.999,
            _ => 0.0,
        };
        let error = (read(got) - want).abs();
        assert!(error <= tolerance, "{} {op} of {ranks} at {index}: {} for {want}", T::DTYPE, read(got));
    };
    for of in &table {
        let op = of.0;
        for length in LENGTHS {
            let mine: Vec<T> = (0..length).map(|index| make(value(me, index))).collect();
            let mut values = mine.clone();
            group.all_reduce(&mut values, op).unwrap();
            values.iter().enumerate().for_each(|(index, got)| close(of, index, *got));
            let mut values = mine.clone();
            group.reduce(&mut values, op, Rank(ranks as u32 - 1)).unwrap();
            if me == ranks - 1 {
                values.iter().enumerate().for_each(|(index, got)| close(of, index, *got));
            }
            let input: Vec<T> = (0..length * ranks).map(|index| make(value(me, index))).collect();
            let mut part = mine;
            group.reduce_scatter(&input, &mut part, op).unwrap();
            part.iter().enumerate().for_each(|(index, got)| close(of, me * length + index, *got));
        }
    }
    for length in LENGTHS {
        let mut values: Vec<T> = (0..length).map(|index| make(value(me, index))).collect();
        let mut all = vec![T::default(); length * ranks];
        group.all_gather(&values, &mut all).unwrap();
        group.broadcast(&mut values, Rank(0)).unwrap();
        for index in 0..length {
            assert_eq!(read(values[index]), f64::from(value(0, index)));
            (0..ranks).for_each(|rank| assert_eq!(read(all[rank * length + index]), f64::from(value(rank, index))));
        }
        let mut swapped = vec![T::default(); length * ranks];
        group.all_to_all(&all, &mut swapped).unwrap();
        for (index, got) in swapped.iter().enumerate() {
            assert_eq!(read(*got), f64::from(value(me, index % length)));
        }
    }
}

fn check_all_types(groups: &[ProcessGroup]) {
    each(groups, |group| {
        check::<f32>(group, f32::from, f64::from);
        check::<f64>(group, f64::from, |x| x);
        check::<f16>(group, |x| f16::from_f32(f32::from(x)), f64::from);
        check::<bf16>(group, |x| bf16::from_f32(f32::from(x)), f64::from);
        check::<i8>(group, |x| x as i8, f64::from);
        check::<u8>(group, |x| x, f64::from);
        check::<i32>(group, i32::from, f64::from);
        check::<u32>(group, u32::from, f64::from);
        check::<i64>(group, i64::from, |x| x as f64);
        check::<u64>(group, u64::from, |x| x as f64);
    });
}

#[test]
fn threads_reduce_every_type() {
    for ranks in RANKS {
        check_all_types(&groups(1, ranks, &quick()));
    }
}

fn over(transport: TransportKind) {
    for ranks in short_or_long(&[2, 3, 5][..], &RANKS[1..]) {
        check_all_types(&groups(*ranks, 1, &quick().transport(transport)));
    }
}

#[test]
fn tcp_reduces_every_type() {
    over(TransportKind::Tcp);
}

#[test]
fn shared_memory_reduces_every_type() {
    over(TransportKind::Shm);
}

#[test]
fn grpc_reduces_every_type() {
    over(TransportKind::Grpc);
}

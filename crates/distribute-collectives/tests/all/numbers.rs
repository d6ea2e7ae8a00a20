//! Reductions of difficult values (limits of integers and of 16-bit floats, signed zeros, infinities, NaN) compared
//! with wide references, between threads and over all transports, with equal bits on all ranks.

use crate::harness::{each, groups, quick};
use bytemuck::bytes_of;
use distribute_collectives::{
    Algorithm, HierarchicalCopyAllReduce, ProcessGroup, Rank, ReduceOp, Reduction, ReductionToOneDevice, TransportKind,
};
use distribute_device::Element;
use half::{bf16, f16};

/// Runs `body` with groups of three ranks that communicate in every way, and with one of two processes of two ranks.
fn all_ways(body: impl Fn(&str, &[ProcessGroup])) {
    body("threads", &groups(1, 3, &quick()));
    for ops in [ReductionToOneDevice::new().into(), HierarchicalCopyAllReduce::new(1).into()] {
        let options = quick().cross_device_ops(Some(ops));
        body("threads with cross-device operations", &groups(1, 3, &options));
    }
    for algorithm in Algorithm::BUILT_IN {
        let name = format!("shared memory, {}", algorithm.name());
        body(&name, &groups(3, 1, &quick().transport(TransportKind::Shm).algorithm(algorithm)));
    }
    body("TCP", &groups(4, 1, &quick().transport(TransportKind::Tcp)));
    body("gRPC", &groups(3, 1, &quick().transport(TransportKind::Grpc)));
    body("two processes of two", &groups(2, 2, &quick()));
}

/// Checks that every rank's result of `op` by all-reduce, the root's by reduce and every rank's part by reduce-scatter,
/// also in place, are equal to `expected`, bit for bit.
fn check<T: Element>(way: &str, groups: &[ProcessGroup], op: ReduceOp, values: &[Vec<T>], expected: &[T]) {
    let ranks = groups.len();
    let results = each(groups, |group| {
        let me = group.rank().index();
        let mine = &values[me % values.len()];
        let mut all = mine.clone();
        group.all_reduce(&mut all, op).unwrap();
        let mut reduced = mine.clone();
        let root = Rank(ranks as u32 - 1);
        group.reduce(&mut reduced, op, root).unwrap();
        let repeated: Vec<T> = (0..ranks).flat_map(|_| mine.clone()).collect();
        let mut part = vec![T::default(); mine.len()];
        group.reduce_scatter(&repeated, &mut part, op).unwrap();
        let counts = vec![mine.len(); ranks];
        let in_place = group.parts(&counts).start().reduce_scatter_in_place(repeated, op).unwrap().wait().unwrap();
        let in_place = in_place[me * mine.len()..(me + 1) * mine.len()].to_vec();
        let reduced = if group.rank() == root { reduced } else { expected.to_vec() };
        [all, reduced, part, in_place]
    });
    for (rank, results) in results.iter().enumerate() {
        for (what, result) in ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter in place"].iter().zip(results)
        {
            for (index, (got, want)) in result.iter().zip(expected).enumerate() {
                assert_eq!(
                    bytes_of(got),
                    bytes_of(want),
                    "{what} by {op} of {} on rank {rank} of {ranks} over {way}, element {index}: {got:?} for {want:?}",
                    T::DTYPE
                );
            }
        }
    }
}

#[test]
fn means_are_right_where_sums_are_not_of_the_type() {
    all_ways(|way, groups| {
        let n = groups.len();
        let same = |value: f32| vec![vec![f16::from_f32(value)]; n];
        // Three times 30,000 overflows f16.
        check(way, groups, ReduceOp::Mean, &same(30_000.0), &[f16::from_f32(30_000.0)]);
        check(way, groups, ReduceOp::Mean, &same(-65_504.0), &[f16::from_f32(-65_504.0)]);
        // The smallest numbers above zero, whose thirds are zero.
        check(way, groups, ReduceOp::Mean, &same(6e-8), &[f16::from_f32(6e-8)]);
        let third = vec![vec![bf16::from_f32(1.0 / 3.0)]; n];
        check(way, groups, ReduceOp::Mean, &third, &[bf16::from_f32(1.0 / 3.0)]);
        check(way, groups, ReduceOp::Mean, &vec![vec![200u8, 255, 0]; n], &[200, 255, 0]);
        check(way, groups, ReduceOp::Mean, &vec![vec![-128i8, 127, -1]; n], &[-128, 127, -1]);
        check(way, groups, ReduceOp::Mean, &vec![vec![i32::MIN, i32::MAX]; n], &[i32::MIN, i32::MAX]);
        check(way, groups, ReduceOp::Mean, &vec![vec![u32::MAX]; n], &[u32::MAX]);
        check(way, groups, ReduceOp::Mean, &vec![vec![i64::MIN, i64::MAX, -1]; n], &[i64::MIN, i64::MAX, -1]);
        check(way, groups, ReduceOp::Mean, &vec![vec![u64::MAX, 1]; n], &[u64::MAX, 1]);
    });
}

#[test]
fn means_of_integers_are_cut_off_towards_zero() {
    all_ways(|way, groups| {
        let n = groups.len() as i64;
        let values: Vec<Vec<i64>> =
            (0..n).map(|rank| vec![rank, -rank, rank * (i64::MAX / n), -7 * rank - 1]).collect();
        let mean = |index: usize| {
            let sum: i128 = values.iter().map(|values| i128::from(values[index])).sum();
            (sum / i128::from(n)) as i64
        };
        let expected: Vec<i64> = (0..4).map(mean).collect();
        check(way, groups, ReduceOp::Mean, &values, &expected);
        let narrow: Vec<Vec<i8>> = (0..n).map(|rank| vec![rank as i8 - 2, -120 - rank as i8]).collect();
        let mean = |index: usize| (narrow.iter().map(|values| i64::from(values[index])).sum::<i64>() / n) as i8;
        check(way, groups, ReduceOp::Mean, &narrow, &[mean(0), mean(1)]);
    });
}

#[test]
fn zeros_keep_the_sign_that_the_operation_wants() {
    all_ways(|way, groups| {
        for first_is_negative in [true, false] {
            let values: Vec<Vec<f32>> = (0..groups.len())
                .map(|rank| vec![if (rank == 0) == first_is_negative { -0.0 } else { 0.0 }; 5])
                .collect();
            check(way, groups, ReduceOp::Min, &values, &[-0.0; 5]);
            check(way, groups, ReduceOp::Max, &values, &[0.0; 5]);
            let short: Vec<Vec<f16>> = values.iter().map(|v| v.iter().map(|x| f16::from_f32(*x)).collect()).collect();
            check(way, groups, ReduceOp::Min, &short, &[f16::NEG_ZERO; 5]);
            check(way, groups, ReduceOp::Max, &short, &[f16::ZERO; 5]);
        }
    });
}

#[test]
fn what_is_no_number_is_none_with_equal_bits_everywhere() {
    all_ways(|way, groups| {
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product] {
            let results = each(groups, |group| {
                // Every rank has a different pattern.
                let nan = f32::from_bits(0x7fc0_0100 + group.rank().0);
                let mut values = [nan, if group.rank().0 == 0 { nan } else { 1.0 }, f32::INFINITY];
                group.all_reduce(&mut values, op).unwrap();
                values.map(f32::to_bits)
            });
            assert!(results.iter().all(|bits| *bits == results[0]), "{op} over {way}: {results:x?}");
            let [all, one, infinite] = results[0].map(f32::from_bits);
            assert!(all.is_nan() && one.is_nan() && infinite == f32::INFINITY, "{op} over {way}");
        }
    });
}

#[test]
fn sums_of_f32_are_within_rounding_of_f64() {
    all_ways(|way, groups| {
        let ranks = groups.len();
        let value = |rank: usize, index: usize| {
            let large = if index.is_multiple_of(2) { 1e6 } else { -1e6 };
            large + (rank * 37 + index) as f32 * 0.123
        };
        let results = each(groups, |group| {
            let me = group.rank().index();
            let mut values: Vec<f32> = (0..5001).map(|index| value(me, index)).collect();
            group.all_reduce(&mut values, ReduceOp::Mean).unwrap();
            values
        });
        assert!(results.iter().all(|values| values == &results[0]), "{way}");
        for (index, got) in results[0].iter().enumerate() {
            let want = (0..ranks).map(|rank| f64::from(value(rank, index))).sum::<f64>() / ranks as f64;
            // One rounding of half a unit in the last place for each addition and the division.
            let bound = f64::from(f32::EPSILON) * 1.1e6 * ranks as f64;
            assert!((f64::from(*got) - want).abs() <= bound, "{way}: {got} for {want}");
        }
    });
}

/// Concatenates digits, which is far from commutative.
fn concatenate(a: u64, b: u64) -> u64 {
    a * 10u64.pow(b.checked_ilog10().unwrap_or(0) + 1) + b
}

#[test]
fn an_ordered_reduction_keeps_the_order_of_ranks() {
    let ordered = Reduction::ordered(concatenate);
    all_ways(|way, groups| {
        let ranks = groups.len();
        let expected = (1..=ranks as u64).reduce(concatenate).unwrap();
        for root in 0..ranks as u32 {
            each(groups, |group| {
                let mine = u64::from(group.rank().0) + 1;
                let mut values = [mine; 3];
                group.all_reduce(&mut values, &ordered).unwrap();
                assert_eq!(values, [expected; 3], "{way}");
                let mut values = [mine; 3];
                group.reduce(&mut values, &ordered, Rank(root)).unwrap();
                assert!(group.rank().0 != root || values == [expected; 3], "{way}: {values:?} at root {root}");
                let mut part = [0; 2];
                group.reduce_scatter(&vec![mine; 2 * ranks], &mut part, &ordered).unwrap();
                assert_eq!(part, [expected; 2], "{way}");
            });
        }
    });
}

#[test]
fn a_reduction_that_does_not_commute_has_equal_bits_on_all_ranks() {
    let first = Reduction::new(|a: f32, b: f32| if a.abs() >= b.abs() { a } else { b });
    all_ways(|way, groups| {
        let results = each(groups, |group| {
            let mut values = [if group.rank().0.is_multiple_of(2) { 2.0f32 } else { -2.0 }; 7];
            group.all_reduce(&mut values, &first).unwrap();
            values.map(f32::to_bits)
        });
        assert!(results.iter().all(|values| *values == results[0]), "{way}: {results:x?}");
    });
}

use std::thread;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::*;
use crate::{FusedAllReduce, FusionOptions};

const RANKS: usize = 3;
const ROWS: usize = 24;
const COLUMNS: usize = 16;

fn gradient(rank: usize, step: usize, at: usize) -> f32 {
    let x = (rank * 7919 + step * 104_729 + at * 31) % 1009;
    (x as f32 - 504.0) / 300.0
}

/// Returns for each rank its result in each step, with all tensors one after another, and its compressors' final state.
fn train(compression: &Compression, op: ReduceOp, steps: usize, ranks: usize) -> Vec<(Vec<Vec<f32>>, Vec<f32>)> {
    let tensors = [FusedTensor::new(DType::F32, [ROWS, COLUMNS]), FusedTensor::new(DType::F32, [COLUMNS])];
    let options = FusionOptions { op, compression: compression.clone(), ..FusionOptions::default() };
    let groups = ProcessGroup::local(ranks).expect("a group");
    let run = |group: ProcessGroup| {
        let fused = FusedAllReduce::new(&tensors, &options).expect("options");
        let mut results = Vec::new();
        for step in 0..steps {
            let mut begun = fused.begin();
            for (index, tensor) in tensors.iter().enumerate().rev() {
                let values =
                    (0..tensor.len()).map(|at| gradient(group.rank().index(), step, at + index * ROWS * COLUMNS));
                begun.push(&group, index, values.collect::<Vec<f32>>()).expect("planned");
            }
            results.push(begun.finish(&group).expect("all have come").concat());
        }
        // Buckets hold the last tensor first.
        let left = fused.left();
        let (bias, matrix) = left.split_at(left.len().min(COLUMNS));
        (results, [matrix, bias].concat())
    };
    thread::scope(|scope| {
        let run = &run;
        let handles: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || run(group))).collect();
        handles.into_iter().map(|handle| handle.join().expect("no panic")).collect()
    })
}

fn all() -> [Compression; 4] {
    [Compression::F16, Compression::Bf16, Compression::TopK(0.1), Compression::PowerSgd(2)]
}

#[test]
fn ranks_agree_bit_for_bit() {
    for compression in all() {
        let ranks = train(&compression, ReduceOp::Mean, 4, RANKS);
        for (results, _) in &ranks {
            let bits = |results: &[Vec<f32>]| results.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(results), bits(&ranks[0].0), "{}", compression.name());
        }
    }
}

#[test]
fn nothing_is_lost_over_many_steps() {
    let steps = 30;
    for compression in all() {
        let ranks = train(&compression, ReduceOp::Sum, steps, RANKS);
        for at in 0..ROWS * COLUMNS + COLUMNS {
            let delivered: f64 = ranks[0].0.iter().map(|step| f64::from(step[at])).sum();
            let left: f64 = ranks.iter().map(|(_, left)| f64::from(left[at])).sum();
            let given: f64 =
                (0..steps).flat_map(|step| (0..RANKS).map(move |rank| f64::from(gradient(rank, step, at)))).sum();
            // Sums of 16-bit floats are rounded once more, which no rank observes.
            let tolerance = match compression {
                Compression::F16 => 0.002 * 5.0 * steps as f64,
                Compression::Bf16 => 0.016 * 5.0 * steps as f64,
                _ => 1e-3,
            };
            let name = compression.name();
            assert!((delivered + left - given).abs() < tolerance, "{name} at {at}: {delivered} + {left} ≠ {given}");
        }
    }
}

#[test]
fn means_are_sums_divided_by_the_ranks() {
    for compression in all() {
        let sums = train(&compression, ReduceOp::Sum, 1, RANKS);
        let means = train(&compression, ReduceOp::Mean, 1, RANKS);
        // Shares of a mean in 16 bits are rounded in other places than values.
        let tolerance = match compression {
            Compression::F16 => 0.002,
            Compression::Bf16 => 0.016,
            _ => 1e-6,
        };
        for (sum, mean) in sums[0].0[0].iter().zip(&means[0].0[0]) {
            assert!((sum / RANKS as f32 - mean).abs() <= tolerance, "{}", compression.name());
        }
    }
}

#[test]
fn top_k_sends_its_share_of_greatest_magnitude() {
    let mut compressor = TopK { share: 0.34 };
    let mut values = [0.5, -3.0, 1.0, 2.0, -2.0, 0.0];
    let payload = compressor.begin(&mut values);
    let words = vec![1, 3, 4, (-3.0f32).to_bits(), 2.0f32.to_bits(), (-2.0f32).to_bits()];
    assert_eq!(payload, Payload::Gather(words));
    assert_eq!(values, [0.5, 0.0, 1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn everything_and_nothing_can_be_chosen() {
    let mut sum = [0.0; 2];
    let mut values = [1.0, 2.0];
    let mut compressor = TopK { share: 1.0 };
    let payload = compressor.begin(&mut values);
    assert_eq!(compressor.go_on(payload, &mut values, &mut sum), None);
    assert_eq!(sum, [1.0, 2.0]);
    let payload = compressor.begin(&mut []);
    assert_eq!(payload, Payload::Gather(Vec::new()));
    assert_eq!(compressor.go_on(payload, &mut [], &mut []), None);
}

#[test]
fn infinities_are_sent_once() {
    let mut compressor = Short(ShortFloat::F16);
    let mut values = [1e6, f32::NEG_INFINITY, 1.0];
    let Payload::SumF16(sent) = compressor.begin(&mut values) else { panic!("half the bytes") };
    assert_eq!(sent, [f16::INFINITY, f16::NEG_INFINITY, f16::ONE]);
    assert_eq!(values, [0.0; 3]);
}

#[test]
fn ranks_with_other_operators_are_told() {
    let tensors = [FusedTensor::new(DType::F32, [ROWS, COLUMNS])];
    for compression in all() {
        let groups = ProcessGroup::local(2).expect("a group");
        thread::scope(|scope| {
            for (group, op) in groups.iter().zip([ReduceOp::Sum, ReduceOp::Mean]) {
                let (compression, tensors) = (compression.clone(), &tensors);
                scope.spawn(move || {
                    let options = FusionOptions { op, compression, ..FusionOptions::default() };
                    let fused = FusedAllReduce::new(tensors, &options).expect("options");
                    let mut begun = fused.begin();
                    let pushed = begun.push(group, 0, vec![1.0f32; ROWS * COLUMNS]);
                    let outcome = pushed.and_then(|()| begun.finish(group).map(drop));
                    assert!(matches!(outcome, Err(Error::Mismatch { .. })), "{outcome:?}");
                });
            }
        });
    }
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let refused = |compression, op| {
        let options = FusionOptions { compression, op, ..FusionOptions::default() };
        FusedAllReduce::new(&[], &options).expect_err("refused").to_string()
    };
    assert!(refused(Compression::TopK(0.0), ReduceOp::Sum).contains("give one above 0 and at most 1"));
    assert!(refused(Compression::TopK(f64::NAN), ReduceOp::Sum).contains("give one above 0 and at most 1"));
    assert!(refused(Compression::PowerSgd(0), ReduceOp::Mean).contains("give at least 1"));
    assert!(refused(Compression::Bf16, ReduceOp::Max).contains("only be made up for in sums and means"));
}

#[test]
fn names_are_read_as_they_are_printed() {
    for (text, name) in [("none", "none"), ("f16", "f16"), ("top-k:0.01", "top-k"), ("power-sgd:2", "power-sgd")] {
        assert_eq!(text.parse::<Compression>().expect("known").name(), name);
    }
    for text in ["", "top-k", "top-k:many", "f16:2", "zip"] {
        assert!(text.parse::<Compression>().expect_err("unknown").to_string().contains("give none, f16, bf16"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn matrices_of_low_rank_are_exact(
        left in prop::collection::vec(-2.0f32..2.0, ROWS),
        right in prop::collection::vec(-2.0f32..2.0, COLUMNS),
        rank in 1usize..3,
    ) {
        let matrix: Vec<f32> = left.iter().flat_map(|a| right.iter().map(move |b| a * b)).collect();
        let mut values = matrix.clone();
        let mut sum = vec![0.0; matrix.len()];
        let mut compressor = PowerSgd::new(rank, &[FusedTensor::new(DType::F32, [ROWS, COLUMNS])]);
        let first = compressor.begin(&mut values);
        let second = compressor.go_on(first, &mut values, &mut sum).expect("two rounds");
        prop_assert_eq!(compressor.go_on(second, &mut values, &mut sum), None);
        for (sum, exact) in sum.iter().zip(&matrix) {
            prop_assert!((sum - exact).abs() < 1e-4, "{} is not {}", sum, exact);
        }
        prop_assert!(values.iter().all(|left| left.abs() < 1e-4));
    }
}

/// Returns the sum that one rank receives for a matrix, and adds what is left to `left`.
fn one_step(compressor: &mut PowerSgd, left: &mut [f32], matrix: &[f32]) -> Vec<f32> {
    left.iter_mut().zip(matrix).for_each(|(left, value)| *left += value);
    let mut sum = vec![0.0; matrix.len()];
    let first = compressor.begin(left);
    let second = compressor.go_on(first, left, &mut sum).expect("two rounds");
    assert_eq!(compressor.go_on(second, left, &mut sum), None);
    sum
}

#[test]
fn gradients_of_zeros_or_of_low_rank_do_not_keep_later_ones_from_being_sent() {
    let product = |rank: usize, scale: f32| -> Vec<f32> {
        let factor = |at: usize, of: usize| ((at * 31 + of * 17) % 23) as f32 - 11.0;
        let places = (0..ROWS).flat_map(|row| (0..COLUMNS).map(move |column| (row, column)));
        let value = |(row, column)| (0..rank).map(|of| factor(row, of) * factor(column, of + 5)).sum::<f32>();
        places.map(|place| scale * value(place)).collect()
    };
    let firsts = [("zeros", 0, 1.0), ("rank 1", 1, 1.0), ("tiny", 2, 1e-30), ("huge", 2, 1e28), ("rank 2", 2, 1.0)];
    for (name, rank, scale) in firsts {
        let mut compressor = PowerSgd::new(2, &[FusedTensor::new(DType::F32, [ROWS, COLUMNS])]);
        one_step(&mut compressor, &mut [0.0; ROWS * COLUMNS], &product(rank, scale));
        // A matrix of rank 2 is sent whole.
        let later = product(2, 1.0);
        let mut left = vec![0.0; ROWS * COLUMNS];
        let sum = one_step(&mut compressor, &mut left, &later);
        let (greatest, error) = later.iter().zip(&sum).fold((0.0f32, 0.0f32), |(greatest, error), (value, sum)| {
            (greatest.max(value.abs()), error.max((value - sum).abs()))
        });
        assert!(error < 1e-3 * greatest, "after {name}: {error} of {greatest}");
    }
}

#[test]
fn a_mean_of_large_values_does_not_overflow_16_bits() {
    let tensors = [FusedTensor::new(DType::F32, [3])];
    let options = FusionOptions { op: ReduceOp::Mean, compression: Compression::F16, ..FusionOptions::default() };
    let groups = ProcessGroup::local(2).expect("a group");
    thread::scope(|scope| {
        for group in &groups {
            let (tensors, options) = (&tensors, &options);
            scope.spawn(move || {
                let fused = FusedAllReduce::new(tensors, options).expect("options");
                let mut total = [0.0f64; 3];
                // 1.0001 is between two values of 16 bits: the error is in units of the mean.
                for _ in 0..64 {
                    let mut step = fused.begin();
                    step.push(group, 0, vec![40_000.0f32, -65_504.0, 1.0001]).expect("planned");
                    let means = step.finish(group).expect("both take part").concat();
                    assert_eq!(means[..2], [40_000.0, -65_504.0]);
                    total.iter_mut().zip(means).for_each(|(total, mean)| *total += f64::from(mean));
                }
                assert!((total[2] - 64.0 * 1.0001).abs() < 0.002, "{total:?}");
            });
        }
    });
}

#[test]
fn more_elements_than_top_k_can_number_are_refused_before_memory_is_allocated() {
    let plan = |dtype, lens: [usize; 2]| {
        let tensors = lens.map(|len| FusedTensor::new(dtype, [len]));
        let plan = crate::BucketPlan::new(&tensors, &[0, 1], usize::MAX);
        let options = FusionOptions::default().compression(Compression::TopK(0.5));
        FusedAllReduce::with_plan(plan, &options).map(drop)
    };
    let error = plan(DType::F32, [u32::MAX as usize, 1]).unwrap_err();
    let Error::Compression { problem, .. } = &error else { panic!("{error}") };
    assert!(problem.contains("a bucket has 4294967296 elements"), "{problem}");
    // Other types are sent uncompressed.
    plan(DType::F64, [u32::MAX as usize, 1]).unwrap();
}

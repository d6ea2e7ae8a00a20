use std::thread;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::*;

fn layers(lens: &[usize]) -> Vec<FusedTensor> {
    lens.iter().map(|len| FusedTensor::new(DType::F32, [*len])).collect()
}

/// Returns the result on each rank if all push in different orders.
fn reduce(lens: &[usize], ranks: usize, options: &FusionOptions, shift: usize) -> Vec<Vec<Vec<f32>>> {
    let groups = ProcessGroup::local(ranks).expect("a group");
    let tensors = layers(lens);
    let run = |group: ProcessGroup| {
        let fused = FusedAllReduce::new(&tensors, options).expect("options");
        let rank = group.rank().index();
        let mut step = fused.begin();
        for place in 0..lens.len() {
            let index = (place + rank * shift) % lens.len();
            let values = (0..lens[index]).map(|at| (index * 100 + at + rank) as f32).collect();
            step.push(&group, index, values).expect("a tensor of the plan");
        }
        step.finish(&group).expect("all tensors have come")
    };
    thread::scope(|scope| {
        let run = &run;
        let handles: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || run(group))).collect();
        handles.into_iter().map(|handle| handle.join().expect("no panic")).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn every_tensor_is_in_one_bucket_of_its_type(
        tensors in prop::collection::vec((0usize..3, 0usize..500), 0..20),
        bucket_bytes in 1usize..5000,
    ) {
        let types = [DType::F32, DType::F64, DType::BF16];
        let tensors: Vec<_> =
            tensors.iter().map(|(dtype, len)| FusedTensor::new(types[*dtype], [*len])).collect();
        let order: Vec<usize> = (0..tensors.len()).rev().collect();
        let plan = BucketPlan::new(&tensors, &order, bucket_bytes);
        let members: Vec<usize> = plan.buckets().iter().flat_map(|bucket| bucket.members.clone()).collect();
        prop_assert_eq!(members, order);
        for bucket in plan.buckets() {
            let bytes = |index: &usize| tensors[*index].len() * bucket.dtype.size_bytes();
            prop_assert!(bucket.members.iter().all(|index| tensors[*index].dtype == bucket.dtype));
            let but_last: usize = bucket.members.iter().rev().skip(1).map(bytes).sum();
            prop_assert!(but_last < bucket_bytes);
        }
    }

    #[test]
    fn ranks_that_push_in_different_orders_get_the_same_sums(
        lens in prop::collection::vec(0usize..300, 1..9),
        ranks in 1usize..4,
        shift in 0usize..5,
        bucket_bytes in 1usize..2000,
    ) {
        let options = FusionOptions { bucket_bytes, ..FusionOptions::default() };
        for got in reduce(&lens, ranks, &options, shift) {
            for (index, tensor) in got.iter().enumerate() {
                let expected = |at: usize| (0..ranks).map(|rank| (index * 100 + at + rank) as f32).sum::<f32>();
                let expected: Vec<f32> = (0..lens[index]).map(expected).collect();
                prop_assert_eq!(tensor, &expected);
            }
        }
    }
}

#[test]
fn what_is_not_in_the_plan_is_refused_in_words() {
    let group = ProcessGroup::local(1).expect("a group").remove(0);
    let fused = FusedAllReduce::new(&layers(&[2, 3]), &FusionOptions::default()).expect("options");
    let mut step = fused.begin();
    let error = |outcome: Result<()>| outcome.expect_err("refused").to_string();
    assert!(error(step.push(&group, 2, vec![1.0f32])).contains("tensor 2 of a fused all-reduce: it is in no bucket"));
    let wrong = error(step.push(&group, 0, vec![1.0f32]));
    assert!(wrong.contains("it came with 1 elements of f32, planned were 2 of f32"), "{wrong}");
    step.push(&group, 0, vec![1.0f32; 2]).expect("fits");
    assert!(error(step.push(&group, 0, vec![1.0f32; 2])).contains("it was given before"));
    let absent = step.finish(&group).expect_err("one is missing").to_string();
    assert!(absent.contains("tensor 1 of a fused all-reduce: it has not come"), "{absent}");
}

#[test]
fn a_wrong_type_is_refused() {
    let group = ProcessGroup::local(1).expect("a group").remove(0);
    let fused = FusedAllReduce::new(&layers(&[2]), &FusionOptions::default()).expect("options");
    let error = fused.begin().push(&group, 0, vec![1.0f64; 2]).expect_err("refused");
    assert!(error.to_string().contains("2 elements of f64, planned were 2 of f32"), "{error}");
}

/// Returns the outcome of a step on each of two ranks that use these plans.
fn step_with(plans: [BucketPlan; 2], compression: &Compression) -> Vec<Result<Vec<Vec<f32>>>> {
    let groups = ProcessGroup::local(2).expect("a group");
    let options = FusionOptions { compression: compression.clone(), ..FusionOptions::default() };
    let run = |group: &ProcessGroup, plan: BucketPlan| {
        let fused = FusedAllReduce::with_plan(plan, &options)?;
        let mut step = fused.begin();
        for (index, tensor) in fused.plan().tensors().iter().enumerate() {
            step.push(group, index, vec![1.0f32; tensor.len()])?;
        }
        step.finish(group)
    };
    thread::scope(|scope| {
        let run = &run;
        let ranks = groups.iter().zip(plans).map(|(group, plan)| scope.spawn(move || run(group, plan)));
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

#[test]
fn buckets_of_other_tensors_are_a_mismatch() {
    let plan = |lens: &[usize], order: &[usize]| BucketPlan::new(&layers(lens), order, 1 << 20);
    let matrix = |dims: [usize; 2]| BucketPlan::new(&[FusedTensor::new(DType::F32, dims)], &[0], 1 << 20);
    for compression in [Compression::None, Compression::F16, Compression::TopK(0.5), Compression::PowerSgd(1)] {
        let differing = [
            ("order", [plan(&[4, 4], &[0, 1]), plan(&[4, 4], &[1, 0])]),
            ("lengths", [plan(&[4, 8], &[0, 1]), plan(&[8, 4], &[0, 1])]),
            ("shape", [matrix([2, 6]), matrix([6, 2])]),
        ];
        for (what, plans) in differing {
            for outcome in step_with(plans, &compression) {
                let is_told = matches!(outcome, Err(Error::Mismatch { .. }));
                assert!(is_told, "{what}, {}: {outcome:?}", compression.name());
            }
        }
        let equal = step_with([plan(&[4, 8], &[1, 0]), plan(&[4, 8], &[1, 0])], &compression);
        assert!(equal.iter().all(Result::is_ok), "{}: {equal:?}", compression.name());
    }
}

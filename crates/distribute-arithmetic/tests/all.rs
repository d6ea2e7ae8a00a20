//! Reductions against naive ones, conversions against those of `half`, and every processor's functions against the
//! portable ones.

use bytemuck::{bytes_of, cast_slice, cast_slice_mut};
use distribute_arithmetic::{
    Combine, Keep, Reduce, ShortFloat, accumulate_mean, combine, divide, finish_mean, mean_accumulator, portable,
    reduce_in_place, reduce_to_one, round_off, widen,
};
use distribute_types::{DType, Element};
use half::{bf16, f16};
use proptest::prelude::*;

const OPS: [Combine; 7] =
    [Combine::Sum, Combine::Min, Combine::Max, Combine::Product, Combine::BitAnd, Combine::BitOr, Combine::BitXor];

fn naive(reduce: Reduce, values: &[f64]) -> f64 {
    let Reduce::Combined(op) = reduce else { return values.iter().sum::<f64>() / values.len() as f64 };
    match op {
        Combine::Sum => values.iter().sum(),
        Combine::Min => values.iter().copied().fold(f64::INFINITY, f64::min),
        Combine::Max => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        Combine::Product => values.iter().product(),
        Combine::BitAnd => values.iter().fold(u64::MAX, |acc, x| acc & *x as u64) as f64,
        Combine::BitOr => values.iter().fold(0, |acc, x| acc | *x as u64) as f64,
        Combine::BitXor => values.iter().fold(0, |acc, x| acc ^ *x as u64) as f64,
    }
}

/// Small integers are exact in every type, so results can be compared for equality.
fn check<T: Element>(reduce: Reduce, ranks: usize, len: usize, make: impl Fn(u8) -> T, read: impl Fn(T) -> f64) {
    let mut data: Vec<Vec<T>> =
        (0..ranks).map(|r| (0..len).map(|i| make(((r * 7 + i * 3) % 5) as u8)).collect()).collect();
    let expected: Vec<f64> =
        (0..len).map(|i| naive(reduce, &data.iter().map(|buffer| read(buffer[i])).collect::<Vec<_>>())).collect();

    let sources: Vec<&[u8]> = data.iter().map(|buffer| cast_slice(buffer)).collect();
    let mut one = vec![T::default(); len];
    reduce_to_one(T::DTYPE, reduce, &sources, cast_slice_mut(&mut one));

    let pairwise = pairwise(reduce, &data);

    let mut views: Vec<&mut [u8]> = data.iter_mut().map(|buffer| cast_slice_mut(buffer)).collect();
    reduce_in_place(T::DTYPE, reduce, Keep::All, &mut views);
    for (i, want) in expected.iter().enumerate() {
        let tolerance = if T::DTYPE.is_float() { want.abs() * 0.01 } else { 0.999 };
        assert!((read(one[i]) - want).abs() <= tolerance, "{reduce:?} {} {} {want}", T::DTYPE, read(one[i]));
        assert_eq!(bytes_of(&one[i]), bytes_of(&pairwise[i]));
        for buffer in &data {
            assert_eq!(bytes_of(&one[i]), bytes_of(&buffer[i]));
        }
    }
}

/// Combines one source after another, as between processes.
fn pairwise<T: Element>(reduce: Reduce, data: &[Vec<T>]) -> Vec<T> {
    let mut result = data[0].clone();
    let n = data.len() as u32;
    let (op, is_mean) = match reduce {
        Reduce::Combined(op) => (op, false),
        Reduce::Mean(_) => (Combine::Sum, true),
    };
    match mean_accumulator(T::DTYPE).filter(|_| is_mean) {
        Some((dtype, per_element)) => {
            let words = (data[0].len() * per_element * dtype.size_bytes()).div_ceil(8);
            let accumulate = |source: &Vec<T>| {
                let mut memory = vec![0u64; words];
                let len = source.len() * per_element * dtype.size_bytes();
                accumulate_mean(T::DTYPE, n, &[cast_slice(source)], &mut cast_slice_mut(&mut memory)[..len]);
                memory
            };
            let len = data[0].len() * per_element * dtype.size_bytes();
            let mut sum = accumulate(&data[0]);
            for other in &data[1..] {
                let other = accumulate(other);
                combine(dtype, Combine::Sum, &mut cast_slice_mut(&mut sum)[..len], &cast_slice(&other)[..len]);
            }
            finish_mean(T::DTYPE, n, &cast_slice(&sum)[..len], cast_slice_mut(&mut result));
        }
        None => {
            for other in &data[1..] {
                combine(T::DTYPE, op, cast_slice_mut(&mut result), cast_slice(other));
            }
            if is_mean {
                divide(T::DTYPE, cast_slice_mut(&mut result), n);
            }
        }
    }
    result
}

#[test]
fn every_nan_has_the_same_bits() {
    fn check<T: Element + PartialEq>([nan, negated]: [T; 2]) {
        for reduce in [Reduce::Combined(Combine::Sum), Reduce::Combined(Combine::Product), Reduce::Mean(2)] {
            let reduced = |first: T, second: T| {
                let (first, second, mut target) = ([first; 9], [second; 9], [T::default(); 9]);
                let sources = [cast_slice(&first), cast_slice(&second)];
                reduce_to_one(T::DTYPE, reduce, &sources, cast_slice_mut(&mut target));
                let (mut first, mut second) = (first, second);
                let mut views: [&mut [u8]; 2] = [cast_slice_mut(&mut first), cast_slice_mut(&mut second)];
                reduce_in_place(T::DTYPE, reduce, Keep::All, &mut views);
                [target, first, second].map(|all| cast_slice::<T, u8>(&all).to_vec())
            };
            let [once, again] = [reduced(nan, negated), reduced(negated, nan)];
            assert!(once.iter().chain(&again).all(|bits| *bits == once[0]), "{:?}, {reduce:?}", T::DTYPE);
        }
    }
    check([f32::NAN, -f32::NAN]);
    check([f64::NAN, -f64::NAN]);
    check([f16::NAN, -f16::NAN]);
    check([bf16::NAN, -bf16::NAN]);
}

#[test]
fn means_of_the_greatest_integers_are_the_same_on_every_way() {
    fn check<T: Element + PartialEq + std::fmt::Debug>(values: [T; 3], mean: T) {
        let data = values.map(|value| vec![value; 3]);
        let mut one = vec![T::default(); 3];
        reduce_to_one(
            T::DTYPE,
            Reduce::Mean(3),
            &data.each_ref().map(|buffer| cast_slice(buffer)),
            cast_slice_mut(&mut one),
        );
        assert_eq!([one, pairwise(Reduce::Mean(3), &data)], [vec![mean; 3], vec![mean; 3]]);
    }
    let top = 1u64 << 63;
    check([top, top + 1, top + 1], top);
    check([u64::MAX, u64::MAX, u64::MAX - 1], u64::MAX - 1);
    check([i64::MIN, i64::MIN, i64::MIN + 1], i64::MIN + 1);
    check([i64::MAX, i64::MAX, i64::MAX - 1], i64::MAX - 1);
    check([u8::MAX, u8::MAX, u8::MAX - 1], u8::MAX - 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn all_types_agree_with_a_naive_reduction(op in 0usize..8, ranks in 1usize..5, len in 0usize..2100) {
        let reduce = OPS.get(op).map_or(Reduce::Mean(ranks as u32), |op| Reduce::Combined(*op));
        if !matches!(reduce, Reduce::Combined(Combine::BitAnd | Combine::BitOr | Combine::BitXor)) {
            check::<f32>(reduce, ranks, len, f32::from, f64::from);
            check::<f64>(reduce, ranks, len, f64::from, |x| x);
            check::<f16>(reduce, ranks, len, |x| f16::from_f32(f32::from(x)), f64::from);
            check::<bf16>(reduce, ranks, len, |x| bf16::from_f32(f32::from(x)), f64::from);
        }
        check::<i8>(reduce, ranks, len, |x| x as i8, f64::from);
        check::<u8>(reduce, ranks, len, |x| x, f64::from);
        check::<i32>(reduce, ranks, len, i32::from, f64::from);
        check::<u32>(reduce, ranks, len, u32::from, f64::from);
        check::<i64>(reduce, ranks, len, i64::from, |x| x as f64);
        check::<u64>(reduce, ranks, len, u64::from, |x| x as f64);
    }
}

#[test]
fn nan_is_not_lost_in_min_and_max() {
    for op in [Combine::Min, Combine::Max] {
        for pair in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            let [mut a, mut b] = pair.map(|x| [x]);
            let mut views: [&mut [u8]; 2] = [cast_slice_mut(&mut a), cast_slice_mut(&mut b)];
            reduce_in_place(DType::F32, Reduce::Combined(op), Keep::All, &mut views);
            assert!(a[0].is_nan() && b[0].is_nan(), "{op:?} of {pair:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_processor_gives_the_same_bits(seed: u64, len in 0usize..3000, op in 0usize..4, dtype in 0usize..4) {
        let (dtype, op) = ([DType::F32, DType::F64, DType::F16, DType::BF16][dtype], OPS[op]);
        // All numbers, with denormals and NaN of both signs.
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state ^ (state >> 29)
        };
        let buffers: Vec<Vec<u64>> = (0..3).map(|_| (0..len).map(|_| random()).collect()).collect();
        let sources: Vec<&[u8]> = buffers.iter().map(|buffer| cast_slice(buffer)).collect();
        let (mut plain, mut newer) = (vec![0u64; len], vec![0u64; len]);
        portable::reduce_to_one(dtype, Reduce::Mean(3), &sources, cast_slice_mut(&mut plain));
        reduce_to_one(dtype, Reduce::Mean(3), &sources, cast_slice_mut(&mut newer));
        prop_assert!(plain == newer);
        portable::combine(dtype, op, cast_slice_mut(&mut plain), sources[1]);
        combine(dtype, op, cast_slice_mut(&mut newer), sources[1]);
        prop_assert!(plain == newer);
        let mut all = [buffers.clone(), buffers.clone()];
        let [first, second] = &mut all;
        let mut views: Vec<&mut [u8]> = first.iter_mut().map(|buffer| cast_slice_mut(buffer)).collect();
        portable::reduce_in_place(dtype, Reduce::Combined(op), Keep::All, &mut views);
        let mut views: Vec<&mut [u8]> = second.iter_mut().map(|buffer| cast_slice_mut(buffer)).collect();
        reduce_in_place(dtype, Reduce::Combined(op), Keep::All, &mut views);
        prop_assert!(first == second);
    }
}

#[test]
fn short_floats_are_converted_as_the_library_converts_them() {
    let bits: Vec<u32> = (0..=u32::MAX).step_by(16_381).collect();
    let floats: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
    let every: Vec<u16> = (0..=u16::MAX).collect();
    let float = |to: ShortFloat, bits: u16| match to {
        ShortFloat::F16 => f16::from_bits(bits).to_f32(),
        ShortFloat::Bf16 => bf16::from_bits(bits).to_f32(),
    };
    for to in [ShortFloat::F16, ShortFloat::Bf16] {
        let mut short = vec![0u16; floats.len()];
        for rounds in [round_off, portable::round_off] {
            rounds(to, &mut floats.clone(), cast_slice_mut(&mut short));
            for (x, ours) in floats.iter().zip(&short) {
                let theirs = match to {
                    ShortFloat::F16 => f16::from_f32(*x).to_bits(),
                    ShortFloat::Bf16 => bf16::from_f32(*x).to_bits(),
                };
                let is_same = *ours == theirs || (x.is_nan() && float(to, *ours).is_nan());
                assert!(is_same, "{to:?} of {:08x}: {ours:04x} {theirs:04x}", x.to_bits());
            }
        }
        let mut wide = vec![0f32; every.len()];
        for widens in [widen, portable::widen] {
            widens(to, cast_slice(&every), &mut wide);
            for (bits, ours) in every.iter().zip(&wide) {
                let theirs = float(to, *bits);
                let is_same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
                assert!(is_same, "{to:?} {bits:04x}: {ours} {theirs}");
            }
        }
    }
}

#[test]
fn integer_means_round_towards_zero_and_sums_wrap() {
    let (mut a, mut b) = ([-3i32], [0i32]);
    let mut views: [&mut [u8]; 2] = [cast_slice_mut(&mut a), cast_slice_mut(&mut b)];
    reduce_in_place(DType::I32, Reduce::Mean(2), Keep::All, &mut views);
    assert_eq!(a, [-1]);
    let (mut a, mut b) = ([200u8], [100u8]);
    reduce_in_place(DType::U8, Reduce::Combined(Combine::Sum), Keep::All, &mut [&mut a, &mut b]);
    assert_eq!(a, [44]);
}

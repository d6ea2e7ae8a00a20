//! Steps of optimizers on buckets, compared with the CPU's.

use distribute_device::cuda::{GradientChange, GradientLimit, StepTensor};
use distribute_device::{DType, DeviceBuffer};
use distribute_optim::{Real, UpdateRule};

use crate::Result;
use crate::check::{Entry, Outcome, ensure, passed};
use crate::gpu::{Gpus, get, put};
use crate::values::{Random, compare, same, wide};

pub(super) const CHECKS: [Entry; 3] = [
    ("optimizers: steps on buckets are those of the CPU", steps),
    ("optimizers: many tensors step in few launches", many),
    ("optimizers: missing slots and sums of other sizes are refused", refuse),
];

const RATE: f64 = 0.01;

fn steps(gpus: &Gpus) -> Result<Outcome> {
    let rules = [
        UpdateRule::Sgd { momentum: 0.0, nesterov: false },
        UpdateRule::Sgd { momentum: 0.9, nesterov: false },
        UpdateRule::Sgd { momentum: 0.9, nesterov: true },
        UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 },
        UpdateRule::Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-6, weight_decay: 0.1 },
        UpdateRule::Adam { beta1: 0.9, beta2: 0.999_999_9, epsilon: 1e-6, weight_decay: 0.0 },
        UpdateRule::Adagrad { initial_accumulator: 0.1, epsilon: 1e-7 },
        UpdateRule::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 },
        UpdateRule::Adadelta { rho: 0.95, epsilon: 1e-7 },
        UpdateRule::Adamax { beta1: 0.9, beta2: 0.999, epsilon: 1e-7 },
        UpdateRule::Nadam { beta1: 0.9, beta2: 0.999, epsilon: 1e-7 },
        UpdateRule::Ftrl { initial_accumulator: 0.1, l1: 0.1, l2: 0.1, l2_shrinkage: 0.1, beta: 1.0 },
    ];
    let rms_prop = [(0.0, false), (0.0, true), (0.9, false), (0.9, true)];
    let rms_prop =
        rms_prop.map(|(momentum, centered)| UpdateRule::RmsProp { rho: 0.9, momentum, epsilon: 1e-7, centered });
    for rule in rules.into_iter().chain(rms_prop) {
        for count in [1, 5, 30_001] {
            run::<f32>(gpus, rule, count)?;
            run::<f64>(gpus, rule, count)?;
        }
    }
    passed("every rule and its options in f32 and f64, three steps each")
}

fn run<T: Real>(gpus: &Gpus, rule: UpdateRule, count: usize) -> Result<()> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    let what = format!("{rule:?} of {count} {}, seed {}", T::DTYPE, random.seed);
    let start = random.elements(T::DTYPE, count);
    let parameters = put(&device, &stream, &start)?;
    let mut on_cpu: Vec<T> = elements(&start);
    let initial = |slot: &&str| vec![T::from_f64(rule.initial(slot)); count];
    let mut slots_on_cpu: Vec<Vec<T>> = rule.slots().iter().map(initial).collect();
    let placed = slots_on_cpu.iter().map(|slot| put(&device, &stream, &bytes(slot)));
    let slots = placed.collect::<Result<Vec<DeviceBuffer>>>()?;
    let slots: Vec<&DeviceBuffer> = slots.iter().collect();
    let mut reference = wide(T::DTYPE, &start);
    let initial = |slot: &&str| vec![rule.initial(slot); count];
    let mut slots_of_reference: Vec<Vec<f64>> = rule.slots().iter().map(initial).collect();
    for number in 1..=3 {
        let gradient = random.elements(T::DTYPE, count);
        let gradients = put(&device, &stream, &gradient)?;
        let tensor = StepTensor { parameters: &parameters, gradients: &gradients, slots: &slots };
        stream.step(rule.fused(number, RATE), &GradientChange::default(), T::DTYPE, &[tensor])?;
        let mut all: Vec<&mut [T]> = slots_on_cpu.iter_mut().map(Vec::as_mut_slice).collect();
        rule.update(number, RATE, &mut on_cpu, &elements::<T>(&gradient), &mut all);
        let mut all: Vec<&mut [f64]> = slots_of_reference.iter_mut().map(Vec::as_mut_slice).collect();
        rule.update(number, RATE, &mut reference, &wide(T::DTYPE, &gradient), &mut all);
    }
    let result = get(&device, &stream, &parameters)?;
    same_step(rule, &what, &result, &on_cpu)?;
    for (slot, expected) in slots.iter().zip(&slots_on_cpu) {
        same(&format!("a slot of {what}"), &get(&device, &stream, slot)?, &bytes(expected))?;
    }
    // The others divide by roots of small numbers, for which f32 has too few digits for a comparison by norms.
    if T::DTYPE == DType::F32 && !matches!(rule, UpdateRule::Sgd { .. }) {
        return Ok(());
    }
    compare(&what, T::DTYPE, &result, &reference)
}

/// Compares parameters after a step with the CPU's: bit for bit, except that LAMB adds up squares in another order.
fn same_step<T: Real>(rule: UpdateRule, what: &str, result: &[u8], on_cpu: &[T]) -> Result<()> {
    match rule {
        UpdateRule::Lamb { .. } => compare(what, T::DTYPE, result, &wide(T::DTYPE, &bytes(on_cpu))),
        _ => same(what, result, &bytes(on_cpu)),
    }
}

/// Checks tensors of all sizes, more than one launch takes, some of them unaligned to 16 bytes.
fn many(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    let adam = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };
    let lamb = UpdateRule::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };
    for (rule, count) in [(adam, 3), (adam, 70), (lamb, 71), (lamb, 700)] {
        let place = |bytes: &[u8], shift: usize| {
            let whole = put(&device, &stream, &[&vec![0; shift], bytes].concat())?;
            Ok::<_, crate::Error>(whole.slice(shift..shift + bytes.len())?)
        };
        let mut tensors = Vec::with_capacity(count);
        for at in 0..count {
            let len = if at == 1 { 20_000 } else { random.below(300) };
            let (start, gradient) = (random.elements(DType::F32, len), random.elements(DType::F32, len));
            let shift = 4 * random.below(3);
            let zeros = vec![0; 4 * len];
            let buffers = [place(&start, shift)?, place(&gradient, 0)?, place(&zeros, shift)?, place(&zeros, 0)?];
            tensors.push((start, gradient, buffers));
        }
        let slots: Vec<[&DeviceBuffer; 2]> = tensors.iter().map(|(_, _, [_, _, m, v])| [m, v]).collect();
        let all: Vec<StepTensor<'_>> = tensors
            .iter()
            .zip(&slots)
            .map(|((_, _, [parameters, gradients, ..]), slots)| StepTensor { parameters, gradients, slots })
            .collect();
        stream.step(rule.fused(1, RATE), &GradientChange::default(), DType::F32, &all)?;
        for (at, (start, gradient, [parameters, _, m, v])) in tensors.iter().enumerate() {
            let mut on_cpu: Vec<f32> = elements(start);
            let mut slots = [vec![0.0f32; on_cpu.len()], vec![0.0f32; on_cpu.len()]];
            let [first, second] = &mut slots;
            rule.update(1, RATE, &mut on_cpu, &elements::<f32>(gradient), &mut [first, second]);
            let what = format!("tensor {at} of {count}, seed {}", random.seed);
            same_step(rule, &what, &get(&device, &stream, parameters)?, &on_cpu)?;
            for (slot, expected) in [m, v].into_iter().zip(&slots) {
                same(&what, &get(&device, &stream, slot)?, &bytes(expected))?;
            }
        }
    }
    passed("up to 700 tensors")
}

fn refuse(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let buffer = put(&device, &stream, &[0; 16])?;
    let momentum = UpdateRule::Sgd { momentum: 0.9, nesterov: false }.fused(1, RATE);
    let unchanged = GradientChange::default();
    let none = StepTensor { parameters: &buffer, gradients: &buffer, slots: &[] };
    let refused = |change: &GradientChange<'_>, dtype, tensor| stream.step(momentum, change, dtype, &[tensor]).is_err();
    ensure(refused(&unchanged, DType::F32, none), || "no velocity was accepted".to_owned())?;
    let one = StepTensor { slots: &[&buffer], ..none };
    ensure(refused(&unchanged, DType::F16, one), || "16 bits were accepted".to_owned())?;
    ensure(!refused(&unchanged, DType::F32, one), || "a velocity was refused".to_owned())?;
    let sums = buffer.slice(0..8)?;
    let limit = GradientLimit::Norm { limit: 1.0, sums: &sums };
    ensure(refused(&GradientChange { divisor: 1.0, limit }, DType::F32, one), || "half a sum was accepted".to_owned())?;
    let by_zero = GradientChange { divisor: 0.0, ..unchanged };
    ensure(refused(&by_zero, DType::F32, one), || "a loss scale of 0 was accepted".to_owned())?;
    let short = stream.square_sums(DType::F32, &[&buffer, &buffer], 1.0, &buffer);
    ensure(short.is_err(), || "sums of one tensor were accepted for two".to_owned())?;
    passed("no velocity, 16 bits, sums of other sizes, a loss scale of 0")
}

pub(super) fn elements<T: Real>(bytes: &[u8]) -> Vec<T> {
    let zero = T::from_f64(0.0);
    let mut elements = vec![zero; bytes.len() / T::DTYPE.size_bytes()];
    bytemuck::cast_slice_mut(&mut elements).copy_from_slice(bytes);
    elements
}

pub(super) fn bytes<T: Real>(elements: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(elements).to_vec()
}

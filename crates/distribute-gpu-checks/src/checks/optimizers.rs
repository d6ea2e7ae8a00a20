//! Steps of optimizers on buckets, compared with the CPU's bit for bit.

use distribute_device::cuda::{FusedStep, StepTensor};
use distribute_device::{DType, DeviceBuffer};
use distribute_optim::{AdamFactors, Real, UpdateRule};

use crate::Result;
use crate::check::{Entry, Outcome, ensure, passed};
use crate::gpu::{Gpus, get, put};
use crate::values::{Random, compare, same, wide};

pub(super) const CHECKS: [Entry; 3] = [
    ("optimizers: steps on buckets are those of the CPU bit for bit", steps),
    ("optimizers: many tensors step in few launches", many),
    ("optimizers: missing slots are refused", refuse),
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
    ];
    for rule in rules {
        for count in [1, 5, 30_001] {
            run::<f32>(gpus, rule, count)?;
            run::<f64>(gpus, rule, count)?;
        }
    }
    passed("SGD, momentum, Nesterov, Adam and AdamW in f32 and f64, three steps each")
}

/// Returns the fused form of one step of a rule.
fn fused(rule: UpdateRule, number: u64) -> Option<FusedStep> {
    match rule {
        UpdateRule::Sgd { momentum, nesterov } => Some(FusedStep::Sgd { rate: RATE, momentum, nesterov }),
        UpdateRule::Adam { beta1, beta2, epsilon, weight_decay } => {
            let factors = AdamFactors::new(number, RATE, [beta1, beta2], epsilon, weight_decay);
            let AdamFactors { rate, scale, keep, beta1, rest1, beta2, rest2, epsilon } = factors;
            Some(FusedStep::Adam { rate, scale, keep, beta1, rest1, beta2, rest2, epsilon })
        }
        _ => None,
    }
}

fn run<T: Real>(gpus: &Gpus, rule: UpdateRule, count: usize) -> Result<()> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    let what = format!("{rule:?} of {count} {}, seed {}", T::DTYPE, random.seed);
    let start = random.elements(T::DTYPE, count);
    let zeros = vec![0; start.len()];
    let parameters = put(&device, &stream, &start)?;
    let slots = rule.slots().iter().map(|_| put(&device, &stream, &zeros)).collect::<Result<Vec<DeviceBuffer>>>()?;
    let slots: Vec<&DeviceBuffer> = slots.iter().collect();
    let mut on_cpu: Vec<T> = elements(&start);
    let mut slots_on_cpu: Vec<Vec<T>> = rule.slots().iter().map(|_| elements(&zeros)).collect();
    let mut reference = wide(T::DTYPE, &start);
    let mut slots_of_reference: Vec<Vec<f64>> = rule.slots().iter().map(|_| vec![0.0; count]).collect();
    for number in 1..=3 {
        let gradient = random.elements(T::DTYPE, count);
        let gradients = put(&device, &stream, &gradient)?;
        let step = fused(rule, number);
        ensure(step.is_some(), || format!("{rule:?} has no fused form"))?;
        let tensor = StepTensor { parameters: &parameters, gradients: &gradients, slots: &slots };
        step.map_or(Ok(()), |step| stream.step(step, T::DTYPE, &[tensor]))?;
        let mut all: Vec<&mut [T]> = slots_on_cpu.iter_mut().map(Vec::as_mut_slice).collect();
        rule.update(number, RATE, &mut on_cpu, &elements::<T>(&gradient), &mut all);
        let mut all: Vec<&mut [f64]> = slots_of_reference.iter_mut().map(Vec::as_mut_slice).collect();
        rule.update(number, RATE, &mut reference, &wide(T::DTYPE, &gradient), &mut all);
    }
    let result = get(&device, &stream, &parameters)?;
    same(&what, &result, &bytes(&on_cpu))?;
    for (slot, expected) in slots.iter().zip(&slots_on_cpu) {
        same(&format!("a slot of {what}"), &get(&device, &stream, slot)?, &bytes(expected))?;
    }
    // Adam divides by roots of small numbers, for which f32 has too few digits for a comparison by norms.
    if T::DTYPE == DType::F32 && matches!(rule, UpdateRule::Adam { .. }) {
        return Ok(());
    }
    compare(&what, T::DTYPE, &result, &reference)
}

/// Checks tensors of all sizes, more than one launch takes, some of them unaligned to 16 bytes.
fn many(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };
    for count in [3, 83, 84, 800] {
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
        fused(rule, 1).map_or(Ok(()), |step| stream.step(step, DType::F32, &all))?;
        for (at, (start, gradient, [parameters, _, m, v])) in tensors.iter().enumerate() {
            let mut on_cpu: Vec<f32> = elements(start);
            let mut slots = [vec![0.0f32; on_cpu.len()], vec![0.0f32; on_cpu.len()]];
            let [first, second] = &mut slots;
            rule.update(1, RATE, &mut on_cpu, &elements::<f32>(gradient), &mut [first, second]);
            let what = format!("tensor {at} of {count}, seed {}", random.seed);
            same(&what, &get(&device, &stream, parameters)?, &bytes(&on_cpu))?;
            for (slot, expected) in [m, v].into_iter().zip(&slots) {
                same(&what, &get(&device, &stream, slot)?, &bytes(expected))?;
            }
        }
    }
    passed("up to 800 tensors")
}

fn refuse(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let buffer = put(&device, &stream, &[0; 16])?;
    let momentum = FusedStep::Sgd { rate: RATE, momentum: 0.9, nesterov: false };
    let none = StepTensor { parameters: &buffer, gradients: &buffer, slots: &[] };
    ensure(stream.step(momentum, DType::F32, &[none]).is_err(), || "no velocity was accepted".to_owned())?;
    let half = stream.step(momentum, DType::F16, &[StepTensor { slots: &[&buffer], ..none }]);
    ensure(half.is_err(), || "16 bits were accepted".to_owned())?;
    passed("no velocity, and 16 bits")
}

fn elements<T: Real>(bytes: &[u8]) -> Vec<T> {
    let zero = T::from_f64(0.0);
    let mut elements = vec![zero; bytes.len() / T::DTYPE.size_bytes()];
    bytemuck::cast_slice_mut(&mut elements).copy_from_slice(bytes);
    elements
}

fn bytes<T: Real>(elements: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(elements).to_vec()
}

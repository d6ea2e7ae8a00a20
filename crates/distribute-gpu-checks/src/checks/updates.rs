//! Updates by kernels: loss scales, limits of gradients and 16 bits, compared with the CPU's formulas.

use std::sync::Arc;

use distribute_device::cuda::CudaStream;
use distribute_device::{DType, Device, DeviceBuffer, Stream};
use distribute_optim::backend::{DeviceOutcome, DeviceStep, GpuUpdater, GpuVariable};
use distribute_optim::{Clip, UpdateRule};

use super::optimizers::{bytes, elements};
use crate::Result;
use crate::check::{Entry, Outcome, ensure, passed};
use crate::gpu::{Gpus, deadline, get, put};
use crate::values::{Random, compare_terms, from_wide, same, wide};

pub(super) const CHECKS: [Entry; 3] = [
    ("optimizers: gradients are divided and limited as on the CPU", updates),
    ("optimizers: gradients that are not finite do what they do on the CPU", unfinite),
    ("optimizers: norms do not depend on the order of blocks", norms),
];

/// A variable on the GPU, and its copies on the CPU.
struct Both {
    step: u64,
    dtype: DType,
    gradient: Vec<u8>,
    /// In f32 or f64.
    parameter: Vec<u8>,
    slots: Vec<Vec<u8>>,
    /// The greatest magnitude that each element of each slot has had.
    greatest: Vec<Vec<f64>>,
    on_gpu: GpuVariable,
}

impl Both {
    /// Returns the type in which the variable is computed.
    fn computed(&self) -> DType {
        if self.dtype == DType::F64 { DType::F64 } else { DType::F32 }
    }

    /// Returns the gradient, divided by the loss scale and rounded.
    fn divided(&self, scale: f64) -> Vec<f64> {
        wide(self.dtype, &self.gradient).iter().map(|x| self.rounded(x / scale)).collect()
    }

    fn rounded(&self, x: f64) -> f64 {
        if self.computed() == DType::F64 { x } else { f64::from(x as f32) }
    }

    fn update(&mut self, step: &DeviceStep, gradient: &[f64]) {
        let gradient = from_wide(self.computed(), gradient);
        match self.computed() {
            DType::F64 => self.carry_out::<f64>(step, &gradient),
            _ => self.carry_out::<f32>(step, &gradient),
        }
    }

    fn carry_out<T: distribute_optim::Real>(&mut self, step: &DeviceStep, gradient: &[u8]) {
        let mut parameter: Vec<T> = elements(&self.parameter);
        let mut slots: Vec<Vec<T>> = self.slots.iter().map(|slot| elements(slot)).collect();
        let mut all: Vec<&mut [T]> = slots.iter_mut().map(Vec::as_mut_slice).collect();
        step.rule.update(self.step, step.learning_rate, &mut parameter, &elements::<T>(gradient), &mut all);
        self.parameter = bytes(&parameter);
        self.slots = slots.iter().map(|slot| bytes(slot)).collect();
        for (greatest, slot) in self.greatest.iter_mut().zip(&self.slots) {
            let magnitudes = greatest.iter_mut().zip(wide(T::DTYPE, slot));
            magnitudes.for_each(|(greatest, element)| *greatest = greatest.max(element.abs()));
        }
    }
}

/// The variables of a model, and what updates them.
struct Model<'a> {
    gpus: &'a Gpus,
    random: Random,
    stream: Arc<CudaStream>,
    updater: GpuUpdater,
    variables: Vec<Both>,
}

impl<'a> Model<'a> {
    /// Makes variables of all types and of several sizes, some of which have made more steps than others.
    fn new(gpus: &'a Gpus, rule: UpdateRule) -> Result<Model<'a>> {
        let (device, stream) = gpus.first()?;
        let mut random = Random::fresh();
        let types = [DType::F32, DType::F64, DType::BF16, DType::F16];
        let sizes = [5, 0, 8192, 8193, 17_000];
        let mut variables = Vec::new();
        for (at, count) in sizes.into_iter().chain((0..16).map(|at| 3 * at + 1)).enumerate() {
            let dtype = types[at % 4];
            let computed = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            let short = random.elements(dtype, count);
            let parameter = from_wide(computed, &wide(dtype, &short));
            let initial = |slot: &&str| from_wide(computed, &vec![rule.initial(slot); count]);
            let slots: Vec<Vec<u8>> = rule.slots().iter().map(initial).collect();
            let on_gpu = GpuVariable {
                step: 1 + at as u64 % 2,
                dtype,
                parameters: put(&device, &stream, &short)?,
                gradients: device.allocate(short.len())?,
                slots: slots.iter().map(|slot| put(&device, &stream, slot)).collect::<Result<Vec<DeviceBuffer>>>()?,
                master: if dtype == computed { None } else { Some(put(&device, &stream, &parameter)?) },
            };
            let greatest = slots.iter().map(|slot| wide(computed, slot).iter().map(|x| x.abs()).collect()).collect();
            variables.push(Both { step: on_gpu.step, dtype, gradient: short, parameter, slots, greatest, on_gpu });
        }
        let stream = Arc::new(device.stream()?);
        let updater = GpuUpdater::new(device, stream.clone());
        Ok(Model { gpus, random, stream, updater, variables })
    }

    /// Draws gradients, times the loss scale; `change` changes those of a variable.
    fn draw(&mut self, scale: f64, change: impl Fn(usize, &mut Vec<f64>)) -> Result<()> {
        let (device, stream) = self.gpus.first()?;
        for (at, variable) in self.variables.iter_mut().enumerate() {
            let count = variable.gradient.len() / variable.dtype.size_bytes();
            let mut drawn = wide(DType::F32, &self.random.elements(DType::F32, count));
            // f16 has 65504 as its limit.
            drawn.iter_mut().for_each(|x| *x *= scale.min(10_000.0));
            change(at, &mut drawn);
            variable.gradient = from_wide(variable.dtype, &drawn);
            variable.on_gpu.gradients = put(&device, &stream, &variable.gradient)?;
        }
        Ok(())
    }

    /// Makes a step on the GPU and on the CPU, and returns both outcomes.
    fn step(&mut self, step: &DeviceStep) -> Result<[DeviceOutcome; 2]> {
        let variables: Vec<GpuVariable> = self.variables.iter().map(|variable| variable.on_gpu.clone()).collect();
        let outcome = self.updater.apply(step, &variables, deadline())?;
        Ok([outcome, self.on_cpu(step)])
    }

    /// The formulas of the CPU's optimizers: division, finiteness, limits, then the rule.
    fn on_cpu(&mut self, step: &DeviceStep) -> DeviceOutcome {
        let square = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>();
        let scale = step.loss_scale.unwrap_or(1.0);
        let is_finite = |variable: &Both| square(&wide(variable.dtype, &variable.gradient)).is_finite();
        if step.loss_scale.is_some() && !(self.variables.iter().all(is_finite) && step.other_squares.is_finite()) {
            return DeviceOutcome { finite: false, gradient_norm: None };
        }
        let mut gradients: Vec<Vec<f64>> = self.variables.iter().map(|variable| variable.divided(scale)).collect();
        let total = gradients.iter().map(|gradient| square(gradient)).sum::<f64>() + step.other_squares;
        let gradient_norm = matches!(step.clip, Some(Clip::GlobalNorm(_))).then(|| total.sqrt());
        for (variable, gradient) in self.variables.iter_mut().zip(&mut gradients) {
            let norm = square(gradient).sqrt();
            for x in gradient.iter_mut() {
                let shrunk = |x: f64, norm: f64, limit: f64| if norm > limit { x * (limit / norm) } else { x };
                *x = variable.rounded(match step.clip {
                    Some(Clip::Value(limit)) => x.clamp(-limit, limit),
                    Some(Clip::Norm(limit)) => shrunk(*x, norm, limit),
                    Some(Clip::GlobalNorm(limit)) => shrunk(*x, total.sqrt(), limit),
                    _ => *x,
                });
            }
            variable.update(step, gradient);
        }
        DeviceOutcome { finite: true, gradient_norm }
    }

    /// Compares all variables, bit for bit if `exact`.
    fn compare(&self, what: &str, exact: bool) -> Result<()> {
        let (device, stream) = self.gpus.first()?;
        self.updater_done()?;
        for (at, variable) in self.variables.iter().enumerate() {
            let (dtype, on_gpu) = (variable.computed(), &variable.on_gpu);
            let what = format!("variable {at} of {}, {what}, seed {}", variable.dtype, self.random.seed);
            let parameter = on_gpu.master.as_ref().unwrap_or(&on_gpu.parameters);
            let pairs = [(parameter, &variable.parameter)].into_iter().chain(on_gpu.slots.iter().zip(&variable.slots));
            for (at, (found, expected)) in pairs.enumerate() {
                let found = get(&device, &stream, found)?;
                if exact {
                    same(&what, &found, expected)?;
                    continue;
                }
                let expected = wide(dtype, expected);
                // Elements may have been changed to nearly 0, with errors that are proportional to what they had been,
                // or for a parameter to the change.
                let terms: Vec<f64> = match at {
                    0 => expected.iter().map(|element| element.abs() + LARGEST_CHANGE).collect(),
                    slot => variable.greatest[slot - 1].clone(),
                };
                compare_terms(&what, dtype, &found, &expected, &terms)?;
            }
            if let Some(master) = &on_gpu.master {
                let rounded = from_wide(variable.dtype, &wide(dtype, &get(&device, &stream, master)?));
                same(&what, &get(&device, &stream, &on_gpu.parameters)?, &rounded)?;
            }
        }
        Ok(())
    }

    /// Waits for the updater's stream.
    fn updater_done(&self) -> Result<()> {
        Ok(self.stream.synchronize(deadline())?)
    }
}

const ADAM: UpdateRule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-3, weight_decay: 0.01 };

fn updates(gpus: &Gpus) -> Result<Outcome> {
    let sgd = UpdateRule::Sgd { momentum: 0.9, nesterov: false };
    let centered = UpdateRule::RmsProp { rho: 0.9, momentum: 0.9, epsilon: 1e-3, centered: true };
    let lamb = UpdateRule::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-3, weight_decay: 0.01 };
    let cases = [
        (sgd, Some(1000.0), None, 0.0),
        (ADAM, Some(1024.0), Some(Clip::Value(0.5)), 0.0),
        (centered, None, Some(Clip::Value(0.5)), 0.0),
        (ADAM, None, Some(Clip::Norm(3.0)), 0.0),
        (sgd, Some(1000.0), Some(Clip::Norm(3.0)), 0.0),
        (sgd, None, Some(Clip::GlobalNorm(10.0)), 0.0),
        (lamb, Some(1000.0), Some(Clip::GlobalNorm(10.0)), 1e5),
        (sgd, None, Some(Clip::GlobalNorm(1e6)), 0.0),
    ];
    for (rule, loss_scale, clip, other_squares) in cases {
        let mut model = Model::new(gpus, rule)?;
        let step = DeviceStep { rule, learning_rate: 0.01, loss_scale, clip, other_squares };
        for _ in 0..2 {
            model.draw(loss_scale.unwrap_or(1.0), |_, _| ())?;
            let [found, expected] = model.step(&step)?;
            let what = format!("{step:?}, seed {}", model.random.seed);
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-13 * b;
            let equal = match (found.gradient_norm, expected.gradient_norm) {
                (Some(found), Some(expected)) => close(found, expected),
                (found, expected) => found == expected,
            };
            ensure(found.finite && equal, || format!("{what}: {found:?}, not {expected:?}"))?;
            let exact = !matches!(clip, Some(Clip::Norm(_) | Clip::GlobalNorm(_))) && rule.is_elementwise();
            model.compare(&what, exact)?;
        }
    }
    passed("loss scales, every kind of limit, and all floating-point types")
}

/// Compares what is left of gradients that are infinite or NaN.
fn unfinite(gpus: &Gpus) -> Result<Outcome> {
    let rule = UpdateRule::Sgd { momentum: 0.9, nesterov: false };
    let last = |values: &mut Vec<f64>, value: f64| values.iter_mut().rev().take(1).for_each(|x| *x = value);
    let cases = [
        (f64::INFINITY, Some(4.0), Some(Clip::GlobalNorm(1.0))),
        (f64::NAN, Some(4.0), None),
        (f64::NEG_INFINITY, Some(4.0), Some(Clip::Value(1.0))),
        (f64::INFINITY, None, Some(Clip::GlobalNorm(1.0))),
        (f64::NAN, None, Some(Clip::GlobalNorm(1.0))),
        (f64::NAN, None, Some(Clip::Norm(1.0))),
        (f64::NAN, None, Some(Clip::Value(1.0))),
    ];
    for (value, loss_scale, clip) in cases {
        let mut model = Model::new(gpus, rule)?;
        // Of f32, f64 and 16 bits, in one block and in several.
        let place = [0, 2, 3, 4, 5, 20][model.random.below(6)];
        model.draw(1.0, |at, values| {
            if at == place {
                last(values, value)
            }
        })?;
        let step = DeviceStep { rule, learning_rate: 0.01, loss_scale, clip, other_squares: 0.0 };
        let [found, expected] = model.step(&step)?;
        let what = format!("{value} in variable {place}, {step:?}, seed {}", model.random.seed);
        let equal = format!("{found:?}") == format!("{expected:?}");
        ensure(equal && found.finite == loss_scale.is_none(), || format!("{what}: {found:?}, not {expected:?}"))?;
        model.updater_done()?;
        let (device, stream) = gpus.first()?;
        for (at, variable) in model.variables.iter().enumerate() {
            let parameter = variable.on_gpu.master.as_ref().unwrap_or(&variable.on_gpu.parameters);
            let found = wide(variable.computed(), &get(&device, &stream, parameter)?);
            let expected = wide(variable.computed(), &variable.parameter);
            let close = |a: f64, b: f64| (a.is_nan() && b.is_nan()) || a == b || (a - b).abs() <= 1e-6 * b.abs();
            let worse = found.iter().zip(&expected).position(|(a, b)| !close(*a, *b));
            ensure(worse.is_none(), || format!("{what}: element {worse:?} of variable {at} is another"))?;
        }
    }
    let other =
        DeviceStep { rule, learning_rate: 0.01, loss_scale: Some(2.0), clip: None, other_squares: f64::INFINITY };
    let mut model = Model::new(gpus, rule)?;
    model.draw(1.0, |_, _| ())?;
    let [found, _] = model.step(&other)?;
    ensure(!found.finite, || "a step was made though another gradient is infinite".to_owned())?;
    model.compare("another gradient is infinite", true)?;
    passed("infinities and NaN, skipped with a loss scale, and limited without one")
}

fn norms(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    for dtype in [DType::F32, DType::F64] {
        let counts: Vec<usize> = [0, 60_000, 8192].into_iter().chain((0..700).map(|_| random.below(50))).collect();
        let given: Vec<Vec<u8>> = counts.iter().map(|count| random.elements(dtype, *count)).collect();
        let tensors = given.iter().map(|bytes| put(&device, &stream, bytes)).collect::<Result<Vec<DeviceBuffer>>>()?;
        let tensors: Vec<&DeviceBuffer> = tensors.iter().collect();
        let mut first = None;
        for _ in 0..2 {
            let (sums, total) = (device.allocate(16 * counts.len())?, device.allocate(16)?);
            stream.square_sums(dtype, &tensors, 3.0, &sums)?;
            stream.total_square_sum(&sums, &total)?;
            let found = [get(&device, &stream, &sums)?, get(&device, &stream, &total)?];
            let expected: Vec<f64> = given.iter().flat_map(|bytes| squares(dtype, bytes, 3.0)).collect();
            let what = format!("sums of squares of {dtype}, seed {}", random.seed);
            let all = [0.0, expected.iter().skip(1).step_by(2).sum()];
            for (found, expected) in [(&found[0], &expected[..]), (&found[1], &all)] {
                // Sums in the order of elements are off by that much themselves.
                let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 * b;
                let found = wide(DType::F64, found);
                ensure(found.iter().zip(expected).all(close), || format!("{what}: {found:?}, not {expected:?}"))?;
            }
            let first = first.get_or_insert_with(|| found.clone());
            ensure(*first == found, || format!("{what}: another launch has another sum"))?;
        }
    }
    passed("703 tensors, twice")
}

/// Returns the sums of squares of elements, and of elements that were divided and rounded.
fn squares(dtype: DType, bytes: &[u8], divisor: f64) -> [f64; 2] {
    let given = wide(dtype, bytes);
    let divided = given.iter().map(|x| x / divisor);
    let divided: Vec<f64> = divided.map(|x| if dtype == DType::F64 { x } else { f64::from(x as f32) }).collect();
    [&given, &divided].map(|values| values.iter().map(|x| x * x).sum())
}

/// The order of magnitude by which a step changes a parameter.
const LARGEST_CHANGE: f64 = 1e-2;

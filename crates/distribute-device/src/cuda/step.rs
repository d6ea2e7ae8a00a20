//! Steps of optimizers on many tensors at once.

use super::norms::{GradientChange, check_type};
use super::stream::{CudaStream, MemoryRange};
use super::tensors::{FACTORS, SUMS_BYTES, Settings, Table, TableModule, TablePart};
use crate::{DType, DeviceBuffer, Error, Result};

/// The arithmetic of one optimizer step, with the factors of that step, which are rounded to the type of the parameters
/// once.
///
/// # Source
/// The update rules of `distribute-optim`; the results are equal bit for bit, except those of LAMB, whose norms are
/// summed in another order.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum FusedStep {
    /// p −= rate·g; with momentum v = momentum·v − rate·g, then p += v, or with Nesterov momentum p += momentum·v −
    /// rate·g.
    Sgd {
        /// The learning rate.
        rate: f64,
        /// The momentum; 0 for no velocity slot.
        momentum: f64,
        /// Whether to use Nesterov momentum.
        nesterov: bool,
    },
    /// m = beta1·m + rest1·g; v = beta2·v + rest2·g²; p = keep·p − rate·m/(√(v·scale) + epsilon).
    Adam {
        /// The learning rate, divided by the first moment's bias correction.
        rate: f64,
        /// One divided by the second moment's bias correction.
        scale: f64,
        /// The factor of weight decay on a parameter: 1 without weight decay.
        keep: f64,
        /// The decay of the first moment.
        beta1: f64,
        /// 1 − beta1.
        rest1: f64,
        /// The decay of the second moment.
        beta2: f64,
        /// 1 − beta2.
        rest2: f64,
        /// The term added to the square root.
        epsilon: f64,
    },
    /// a = a + g²; p = p − rate·g/√(a + epsilon).
    Adagrad {
        /// The learning rate.
        rate: f64,
        /// The term added to the sum of squares.
        epsilon: f64,
    },
    /// v = rho·v + rest·g²; d = rate·g/√(v + epsilon); p = p − d. If centred, m = rho·m + rest·g and max(v − m², 0)
    /// takes the place of v; with momentum, s = momentum·s + d takes the place of d.
    RmsProp {
        /// The learning rate.
        rate: f64,
        /// The decay of the averages.
        rho: f64,
        /// 1 − rho.
        rest: f64,
        /// The momentum; 0 for no slot of it.
        momentum: f64,
        /// The term added to the mean square.
        epsilon: f64,
        /// Whether there is a slot of the mean gradient.
        centered: bool,
    },
    /// m and v as in Adam; r = m·scale1/(√(v·scale2) + epsilon) + decay·p; p = p − rate·(‖p‖/‖r‖)·r, with a ratio of 1
    /// where either norm is 0. Each tensor has its own ratio.
    Lamb {
        /// The learning rate.
        rate: f64,
        /// One divided by the first moment's bias correction.
        scale1: f64,
        /// One divided by the second moment's bias correction.
        scale2: f64,
        /// The decay of the first moment.
        beta1: f64,
        /// 1 − beta1.
        rest1: f64,
        /// The decay of the second moment.
        beta2: f64,
        /// 1 − beta2.
        rest2: f64,
        /// The term added to the square root.
        epsilon: f64,
        /// The share of the parameter that is added to the direction.
        decay: f64,
    },
    /// v = rho·v + rest·g²; d = g·√(a + epsilon)/√(v + epsilon); a = rho·a + rest·d²; p = p − rate·d.
    Adadelta {
        /// The learning rate.
        rate: f64,
        /// The decay of the averages.
        rho: f64,
        /// 1 − rho.
        rest: f64,
        /// The term added to both mean squares.
        epsilon: f64,
    },
    /// m = beta1·m + rest1·g; u = max(beta2·u, |g|); p = p − rate·m/(u + epsilon).
    Adamax {
        /// The learning rate, divided by the first moment's bias correction.
        rate: f64,
        /// The decay of the first moment.
        beta1: f64,
        /// 1 − beta1.
        rest1: f64,
        /// The decay of the largest gradient.
        beta2: f64,
        /// The term added to the largest gradient.
        epsilon: f64,
    },
    /// m and v as in Adam; p = p − (of_moment·m + of_gradient·g)/(√(v·scale) + epsilon).
    Nadam {
        /// The factor of the first moment, with the learning rate in it.
        of_moment: f64,
        /// The factor of the gradient, with the learning rate in it.
        of_gradient: f64,
        /// One divided by the second moment's bias correction.
        scale: f64,
        /// The decay of the first moment.
        beta1: f64,
        /// 1 − beta1.
        rest1: f64,
        /// The decay of the second moment.
        beta2: f64,
        /// 1 − beta2.
        rest2: f64,
        /// The term added to the square root.
        epsilon: f64,
    },
    /// z = z + g + shrinkage·p − (√(n + g²) − √n)/rate·p; n = n + g²; p = (clip(z, −l1, l1) − z)/(√n/rate + flat).
    /// Nothing changes if the rate is 0.
    Ftrl {
        /// The learning rate.
        rate: f64,
        /// The strength of the L1 regularization.
        l1: f64,
        /// Twice the strength of the penalty on the magnitude.
        shrinkage: f64,
        /// The part of the divisor that all elements share.
        flat: f64,
    },
}

/// A tensor of an optimizer step.
#[derive(Clone, Copy, Debug)]
pub struct StepTensor<'a> {
    /// The parameters, which are updated in place.
    pub parameters: &'a DeviceBuffer,
    /// The gradients, of the same size.
    pub gradients: &'a DeviceBuffer,
    /// The optimizer's slots of these parameters, which are updated in place.
    pub slots: &'a [&'a DeviceBuffer],
}

const WHAT: &str = "stepping an optimizer";

impl CudaStream {
    /// Applies one optimizer step to all elements of many tensors; parameters and slots are updated in place.
    ///
    /// # Shapes
    /// `dtype` is f32 or f64; a tensor's parameters, gradients and slots have the same size. Slots: none for plain SGD,
    /// one (velocity) with momentum, two (first and second moment) for Adam and LAMB, one (sums of squares) for
    /// Adagrad; two for Adadelta (mean squares of gradients and of changes), Adamax (first moment and largest
    /// gradient), Nadam (as Adam) and FTRL (sums of squares, then z); for RMSprop the mean square, then the mean
    /// gradient if it is centred, then the momentum if there is one.
    ///
    /// # Cost
    /// One launch for up to 582 tensors, and another for each further 582; three for LAMB. Memory traffic per element
    /// in f32: SGD 12 bytes, with momentum and Adagrad 20, Adam 28, LAMB 40.
    ///
    /// # Errors
    /// [`Error::Operands`] for other shapes, and the other errors of [`CudaStream::reduce`].
    pub fn step(
        &self,
        step: FusedStep,
        change: &GradientChange<'_>,
        dtype: DType,
        tensors: &[StepTensor<'_>],
    ) -> Result<()> {
        let (kernel, needed, factors) = step.kernel();
        check_type(WHAT, dtype)?;
        let mut table = Table::new(dtype);
        for StepTensor { parameters, gradients, slots } in tensors {
            if slots.len() != needed {
                let given = slots.len();
                let problem = format!("{given} slots were given, but it keeps {needed}; give those");
                return Err(Error::Operands { operation: WHAT, problem });
            }
            table.add(self, WHAT, Some(parameters), gradients, slots)?;
        }
        let (settings, norms) = self.change(WHAT, change, tensors.len())?;
        let settings = Settings { factors, ..settings };
        let mut places = std::mem::take(&mut table.places);
        places.extend(norms.filter(|_| !tensors.is_empty()));
        let parts = table.parts(self);
        if matches!(step, FusedStep::Ftrl { rate: 0.0, .. }) {
            return Ok(());
        }
        if let FusedStep::Lamb { rate, .. } = step {
            return self.lamb(rate, &parts, settings, places);
        }
        for part in &parts {
            let kernel = (TableModule::Step, kernel);
            self.launch_table(WHAT, kernel, part.blocks, settings.for_part(part), part, &places)?;
        }
        Ok(())
    }

    /// Steps LAMB: the moments and each block's sums, each tensor's sums, then the parameters.
    fn lamb(&self, rate: f64, parts: &[TablePart<'_>], settings: Settings, places: Vec<MemoryRange<'_>>) -> Result<()> {
        let blocks = parts.iter().map(|part| part.blocks as usize).max().unwrap_or(0);
        let tensors = parts.iter().map(TablePart::len).max().unwrap_or(0);
        let scratch = self.scratch(SUMS_BYTES * (blocks + tensors))?;
        let mut places: Vec<MemoryRange<'_>> = places;
        places.push(MemoryRange::whole(&scratch));
        for part in parts {
            let (partial, sums) = (scratch.pointer, scratch.pointer + (SUMS_BYTES * blocks) as u64);
            let moments = Settings { partial, sums, ..settings.for_part(part) };
            self.launch_table(WHAT, (TableModule::Step, "lamb_moments"), part.blocks, moments, part, &places)?;
            self.launch_table(WHAT, (TableModule::Norms, "fold"), part.len() as u32, moments, part, &places)?;
            let mut factors = moments.factors;
            factors[4] = rate;
            let last = Settings { factors, ..moments };
            self.launch_table(WHAT, (TableModule::Step, "lamb"), part.blocks, last, part, &places)?;
        }
        Ok(())
    }
}

impl FusedStep {
    /// Returns the kernel, its number of slots, and its factors.
    fn kernel(self) -> (&'static str, usize, [f64; FACTORS]) {
        let factors = |given: &[f64]| {
            let mut factors = [0.0; FACTORS];
            factors.iter_mut().zip(given).for_each(|(factor, given)| *factor = *given);
            factors
        };
        match self {
            FusedStep::Sgd { rate, momentum: 0.0, .. } => ("sgd", 0, factors(&[rate])),
            FusedStep::Sgd { rate, momentum, nesterov } => {
                let kernel = if nesterov { "sgd_nesterov" } else { "sgd_momentum" };
                (kernel, 1, factors(&[rate, momentum]))
            }
            FusedStep::Adam { rate, scale, keep, beta1, rest1, beta2, rest2, epsilon } => {
                ("adam", 2, [rate, scale, keep, beta1, rest1, beta2, rest2, epsilon])
            }
            FusedStep::Adagrad { rate, epsilon } => ("adagrad", 1, factors(&[rate, epsilon])),
            FusedStep::RmsProp { rate, rho, rest, momentum, epsilon, centered } => {
                let (kernel, slots) = match (centered, momentum == 0.0) {
                    (false, true) => ("rms_prop", 1),
                    (true, true) => ("rms_prop_centered", 2),
                    (false, false) => ("rms_prop_momentum", 2),
                    (true, false) => ("rms_prop_centered_momentum", 3),
                };
                (kernel, slots, factors(&[rate, rho, rest, epsilon, momentum]))
            }
            FusedStep::Lamb { scale1, scale2, beta1, rest1, beta2, rest2, epsilon, decay, .. } => {
                ("lamb", 2, [scale1, scale2, epsilon, decay, beta1, rest1, beta2, rest2])
            }
            FusedStep::Adadelta { rate, rho, rest, epsilon } => ("adadelta", 2, factors(&[rate, rho, rest, epsilon])),
            FusedStep::Adamax { rate, beta1, rest1, beta2, epsilon } => {
                ("adamax", 2, factors(&[rate, beta1, rest1, beta2, epsilon]))
            }
            FusedStep::Nadam { of_moment, of_gradient, scale, beta1, rest1, beta2, rest2, epsilon } => {
                ("nadam", 2, [of_moment, of_gradient, scale, beta1, rest1, beta2, rest2, epsilon])
            }
            FusedStep::Ftrl { rate, l1, shrinkage, flat } => ("ftrl", 2, factors(&[rate, l1, shrinkage, flat])),
        }
    }
}

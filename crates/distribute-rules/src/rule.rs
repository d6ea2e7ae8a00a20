//! Update rules: the settings of each one, and how it changes a parameter.

use distribute_rows::simd;
use serde::{Deserialize, Serialize};

use crate::step::{Float, RowStep, Step};

mod adadelta;
mod adagrad;
mod adam;
mod adamax;
mod ftrl;
#[cfg(feature = "cuda")]
mod fused;
mod lamb;
mod nadam;
#[cfg(feature = "hlo")]
mod program;
mod rms_prop;
mod sgd;

pub use adam::AdamFactors;
#[cfg(feature = "hlo")]
pub use program::norm;

/// The arithmetic of an optimizer: how one step changes one parameter.
///
/// The settings are not checked; [`OptimizerDescription::check`](crate::OptimizerDescription::check) does that.
///
/// # Examples
/// ```
/// use distribute_rules::UpdateRule;
///
/// let rule = UpdateRule::Sgd { momentum: 0.9, nesterov: false };
/// assert_eq!(rule.slots(), ["velocity"]);
/// let (mut parameter, mut velocity) = ([1.0f32, 2.0], [rule.initial("velocity") as f32; 2]);
/// rule.update(1, 0.5, &mut parameter, &[1.0, -1.0], &mut [&mut velocity]);
/// assert_eq!((parameter, velocity), ([0.5, 2.5], [-0.5, 0.5]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum UpdateRule {
    /// Stochastic gradient descent.
    ///
    /// # Source
    /// Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013, in the form of
    /// `tf.keras.optimizers.SGD`: v = momentum·v − lr·g, and p = p + v, or p = p + momentum·v − lr·g after Nesterov.
    Sgd {
        /// The momentum, from 0 (none) to below 1.
        momentum: f64,
        /// Whether to use Nesterov momentum; it has no effect without momentum.
        nesterov: bool,
    },
    /// Adaptive moment estimation; with weight decay, AdamW.
    ///
    /// # Source
    /// Kingma and Ba, "Adam: A method for stochastic optimization", 2015, algorithm 1, and Loshchilov and Hutter,
    /// "Decoupled weight decay regularization", 2019, algorithm 2.
    Adam {
        /// The decay rate of the first moment, from 0 to below 1.
        beta1: f64,
        /// The decay rate of the second moment, from 0 to below 1.
        beta2: f64,
        /// The number that is added to the root of the second moment, above 0.
        epsilon: f64,
        /// The decoupled weight decay: a step multiplies the parameter by 1 − learning rate · `weight_decay`; 0 or
        /// more.
        weight_decay: f64,
    },
    /// Adagrad: the learning rate of each element falls with the sum of its squared gradients.
    ///
    /// # Source
    /// Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", 2011,
    /// in the form of `tf.keras.optimizers.Adagrad`: a = a + g², p = p − lr·g/√(a + ε).
    Adagrad {
        /// The initial value of the sums of squares, 0 or more.
        initial_accumulator: f64,
        /// The number that is added to the sums of squares, above 0.
        epsilon: f64,
    },
    /// RMSprop: gradients are divided by the root of a moving average of their squares.
    ///
    /// # Source
    /// Hinton, lecture 6e of "Neural networks for machine learning", 2012, in the form of
    /// `tf.keras.optimizers.RMSprop`: v = ρ·v + (1 − ρ)·g², d = lr·g/√(v + ε), p = p − d; centred, max(v − m², 0) takes
    /// the place of v, with m the running mean of g; with momentum, a running sum takes the place of d.
    RmsProp {
        /// The decay rate of the moving average, from 0 to below 1.
        rho: f64,
        /// The momentum, from 0 (none) to below 1.
        momentum: f64,
        /// The number that is added to the mean square, above 0.
        epsilon: f64,
        /// Whether to divide by the root of the variance instead of the root of the mean square.
        centered: bool,
    },
    /// LAMB: Adam whose step is scaled, for each parameter, to the norm of the parameter.
    ///
    /// # Source
    /// You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020, algorithm 2:
    /// r = m̂/(√v̂ + ε) + λ·p, p = p − lr·(‖p‖/‖r‖)·r. The ratio is 1 where either norm is 0.
    Lamb {
        /// The decay rate of the first moment, from 0 to below 1.
        beta1: f64,
        /// The decay rate of the second moment, from 0 to below 1.
        beta2: f64,
        /// The number that is added to the root of the second moment, above 0.
        epsilon: f64,
        /// The weight decay: the share of the parameter that is added to the direction, 0 or more.
        weight_decay: f64,
    },
    /// Adadelta: gradients are scaled by the ratio of the root mean squares of changes and of gradients.
    ///
    /// # Source
    /// Zeiler, "ADADELTA: an adaptive learning rate method", 2012, in the form of `tf.keras.optimizers.Adadelta`:
    /// v = ρ·v + (1 − ρ)·g², d = g·√(a + ε)/√(v + ε), a = ρ·a + (1 − ρ)·d², p = p − lr·d. The paper's rate is 1.
    Adadelta {
        /// The decay rate of the moving averages, from 0 to below 1.
        rho: f64,
        /// The number that is added to both mean squares, above 0.
        epsilon: f64,
    },
    /// Adamax: Adam whose second moment is the largest recent gradient.
    ///
    /// # Source
    /// Kingma and Ba, "Adam: A method for stochastic optimization", 2015, algorithm 2, in the form of
    /// `tf.keras.optimizers.Adamax`: u = max(beta2·u, |g|), p = p − lr/(1 − beta1ⁿ)·m/(u + ε).
    Adamax {
        /// The decay rate of the first moment, from 0 to below 1.
        beta1: f64,
        /// The decay rate of the largest gradient, from 0 to below 1.
        beta2: f64,
        /// The number that is added to the largest gradient, above 0.
        epsilon: f64,
    },
    /// Nadam: Adam with Nesterov momentum, whose momentum rises to `beta1`.
    ///
    /// # Source
    /// Dozat, "Incorporating Nesterov momentum into Adam", 2016, in the form of `tf.keras.optimizers.Nadam`: the
    /// momentum of step n is u = beta1·(1 − 0.96ⁿ/2), and the first moment m and the gradient g have the factors
    /// uₙ₊₁/(1 − u₁⋯uₙ₊₁) and (1 − uₙ)/(1 − u₁⋯uₙ).
    Nadam {
        /// The decay rate of the first moment, from 0 to below 1.
        beta1: f64,
        /// The decay rate of the second moment, from 0 to below 1.
        beta2: f64,
        /// The number that is added to the root of the second moment, above 0.
        epsilon: f64,
    },
    /// FTRL-Proximal: the minimum of all gradients so far with regularizations, for models of many sparse features.
    ///
    /// # Source
    /// McMahan et al., "Ad click prediction: a view from the trenches", 2013, algorithm 1, in the form of
    /// `tf.keras.optimizers.Ftrl` with a learning rate power of −0.5: z = z + g + 2·s·p − (√(n + g²) − √n)/lr·p,
    /// n = n + g², p = (clip(z, −λ₁, λ₁) − z)/((β + √n)/lr + 2·λ₂). A step of learning rate 0 changes nothing.
    Ftrl {
        /// The initial value of the sums of squares, above 0.
        initial_accumulator: f64,
        /// The strength λ₁ of the L1 regularization, 0 or more: parameters with weak gradients are exactly 0.
        l1: f64,
        /// The strength λ₂ of the L2 regularization, 0 or more.
        l2: f64,
        /// The strength s of a penalty on the magnitude, which acts where there is a gradient, 0 or more.
        l2_shrinkage: f64,
        /// The number β that is added to the root of the sums of squares, 0 or more.
        beta: f64,
    },
}

/// The element types that an [`UpdateRule`] computes in: f32 and f64.
pub trait Real: Float {
    /// Carries out a step of a rule. It is a method of each type, so that the arithmetic is compiled here once, and not
    /// in each crate that updates parameters.
    #[doc(hidden)]
    fn carry_out(rule: &UpdateRule, step: Step<'_, '_, Self>);
}

macro_rules! reals {
    ($($type:ty)*) => {$(
        impl Real for $type {
            fn carry_out(rule: &UpdateRule, step: Step<'_, '_, $type>) {
                simd(#[inline(always)] || rule.carry_out(step));
            }
        }
    )*};
}

reals!(f32 f64);

impl UpdateRule {
    /// Updates a parameter and its slots in place. `step` counts this parameter's updates from 1; a step without a
    /// gradient for it does not count.
    ///
    /// Factors such as 1 − beta2 and the bias corrections are computed in f64 and rounded to `T` once. A thread of a
    /// rayon pool, as a replica's is, shares long parameters with the other threads of its pool; the result is the
    /// same bit for bit.
    ///
    /// # Shapes
    /// Parameter, gradient and slots have equal lengths. The slots are those of [`slots`](UpdateRule::slots), in that
    /// order. Slices may be parts of a parameter if the rule [is elementwise](UpdateRule::is_elementwise).
    ///
    /// # Panics
    /// If the number of slots is wrong or lengths differ. Check these first if they come from a peer.
    pub fn update<T: Real>(
        &self,
        step: u64,
        learning_rate: f64,
        parameter: &mut [T],
        gradient: &[T],
        slots: &mut [&mut [T]],
    ) {
        self.check(parameter.len(), gradient.len() == parameter.len(), slots);
        let step = Step { number: step, learning_rate, parameter, gradient, slots };
        if self.is_elementwise() && shares_work() {
            return step.divided(&|part| T::carry_out(self, part));
        }
        T::carry_out(self, step);
    }

    /// Updates a parameter like [`update`](UpdateRule::update) by a gradient that has these rows, and zeros elsewhere;
    /// the result is the same bit for bit.
    ///
    /// # Shapes
    /// The parameter and its slots have rows of `row_len` elements. `values` are the gradient's rows, one for each
    /// index; indices ascend, each once.
    ///
    /// # Panics
    /// If the rule is not [elementwise](UpdateRule::is_elementwise), the number of slots is wrong, lengths differ, or
    /// an index is not that of a row. Check these first if they come from a peer.
    ///
    /// # Examples
    /// ```
    /// use distribute_rules::UpdateRule;
    ///
    /// let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    /// let mut parameter = [1.0f32; 6];
    /// rule.update_rows((1, 0.5), &mut parameter, 2, (&[2], &[1.0, 2.0]), &mut []);
    /// assert_eq!(parameter, [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]);
    /// ```
    pub fn update_rows<T: Real>(
        &self,
        (step, learning_rate): (u64, f64),
        parameter: &mut [T],
        row_len: usize,
        (indices, values): (&[i64], &[T]),
        slots: &mut [&mut [T]],
    ) {
        assert!(self.is_elementwise(), "a rule that is not elementwise needs the whole gradient");
        self.check(parameter.len(), values.len() == indices.len() * row_len, slots);
        let step = RowStep { number: step, learning_rate, parameter, row_len, first: 0, indices, values, slots };
        if self.rests_without_gradient() {
            return step.each_row(&|part| T::carry_out(self, part));
        }
        step.divided(shares_work(), &|part| T::carry_out(self, part));
    }

    /// # Panics
    /// If the number of slots is wrong, the gradient does not fit, or the length of a slot is not the parameter's.
    fn check<T>(&self, len: usize, gradient_fits: bool, slots: &[&mut [T]]) {
        assert_eq!(slots.len(), self.slots().len(), "an update rule got another number of slots than it has");
        let same = gradient_fits && slots.iter().all(|slot| slot.len() == len);
        assert!(same, "an update rule got a gradient or slots of another length than their parameter's");
    }

    /// Returns whether elements whose gradient is zero, and their slots, stay as they are.
    fn rests_without_gradient(&self) -> bool {
        match *self {
            UpdateRule::Sgd { momentum, .. } => momentum == 0.0,
            UpdateRule::Adagrad { .. } => true,
            UpdateRule::Adam { .. }
            | UpdateRule::RmsProp { .. }
            | UpdateRule::Lamb { .. }
            | UpdateRule::Adadelta { .. }
            | UpdateRule::Adamax { .. }
            | UpdateRule::Nadam { .. }
            | UpdateRule::Ftrl { .. } => false,
        }
    }

    #[inline(always)]
    fn carry_out<T: Float>(&self, step: Step<'_, '_, T>) {
        match *self {
            UpdateRule::Sgd { momentum, nesterov } => sgd::update(step, momentum, nesterov),
            UpdateRule::Adam { beta1, beta2, epsilon, weight_decay } => {
                adam::update(step, beta1, beta2, epsilon, weight_decay);
            }
            UpdateRule::Adagrad { epsilon, .. } => adagrad::update(step, epsilon),
            UpdateRule::RmsProp { rho, momentum, epsilon, centered } => {
                rms_prop::update(step, rho, momentum, epsilon, centered);
            }
            UpdateRule::Lamb { beta1, beta2, epsilon, weight_decay } => {
                lamb::update(step, beta1, beta2, epsilon, weight_decay);
            }
            UpdateRule::Adadelta { rho, epsilon } => adadelta::update(step, rho, epsilon),
            UpdateRule::Adamax { beta1, beta2, epsilon } => adamax::update(step, beta1, beta2, epsilon),
            UpdateRule::Nadam { beta1, beta2, epsilon } => nadam::update(step, beta1, beta2, epsilon),
            UpdateRule::Ftrl { l1, l2, l2_shrinkage, beta, .. } => {
                ftrl::update(step, ftrl::Penalties { l1, l2, l2_shrinkage, beta });
            }
        }
    }

    /// Returns whether the result of a step depends on its number.
    pub fn counts_steps(&self) -> bool {
        match self {
            UpdateRule::Adam { .. }
            | UpdateRule::Lamb { .. }
            | UpdateRule::Adamax { .. }
            | UpdateRule::Nadam { .. } => true,
            UpdateRule::Sgd { .. }
            | UpdateRule::Adagrad { .. }
            | UpdateRule::RmsProp { .. }
            | UpdateRule::Adadelta { .. }
            | UpdateRule::Ftrl { .. } => false,
        }
    }

    /// Returns the names of the slots that the rule keeps for each parameter.
    pub fn slots(&self) -> &'static [&'static str] {
        match *self {
            UpdateRule::Sgd { momentum, .. } if momentum > 0.0 => &["velocity"],
            UpdateRule::Sgd { .. } => &[],
            UpdateRule::Adam { .. } | UpdateRule::Lamb { .. } | UpdateRule::Nadam { .. } => &["m", "v"],
            UpdateRule::Adamax { .. } => &["m", "norm"],
            UpdateRule::Adadelta { .. } => &["mean_square", "mean_square_change"],
            UpdateRule::Ftrl { .. } => &["accumulator", "linear"],
            UpdateRule::Adagrad { .. } => &["accumulator"],
            UpdateRule::RmsProp { momentum, centered, .. } => match (centered, momentum > 0.0) {
                (false, false) => &["velocity"],
                (true, false) => &["velocity", "average_gradient"],
                (false, true) => &["velocity", "momentum"],
                (true, true) => &["velocity", "average_gradient", "momentum"],
            },
        }
    }

    /// Returns whether an element's update depends on no other element of its parameter.
    pub fn is_elementwise(&self) -> bool {
        !matches!(self, UpdateRule::Lamb { .. })
    }

    /// Returns the initial value of a slot's elements.
    pub fn initial(&self, slot: &str) -> f64 {
        match (*self, slot) {
            (
                UpdateRule::Adagrad { initial_accumulator, .. } | UpdateRule::Ftrl { initial_accumulator, .. },
                "accumulator",
            ) => initial_accumulator,
            _ => 0.0,
        }
    }
}

/// Returns whether the caller is a thread of a pool that has others.
fn shares_work() -> bool {
    rayon::current_thread_index().is_some() && rayon::current_num_threads() > 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "another number of slots")]
    fn missing_slots_are_no_step_without_them() {
        UpdateRule::Sgd { momentum: 0.9, nesterov: false }.update(1, 0.1, &mut [1.0f32], &[1.0], &mut []);
    }

    #[test]
    #[should_panic(expected = "another length")]
    fn a_short_gradient_is_no_step_of_a_part() {
        UpdateRule::Sgd { momentum: 0.0, nesterov: false }.update(1, 0.1, &mut [1.0f32; 2], &[1.0], &mut []);
    }

    /// Returns the parameter and the slots of one f32 element after some steps with one gradient, starting from the
    /// parameter 1.
    fn after(rule: UpdateRule, steps: u64, gradient: f32) -> (f32, Vec<f32>) {
        let mut parameter = [1.0f32];
        let mut memory: Vec<[f32; 1]> = rule.slots().iter().map(|slot| [rule.initial(slot) as f32]).collect();
        for step in 1..=steps {
            let mut slots: Vec<&mut [f32]> = memory.iter_mut().map(|slot| &mut slot[..]).collect();
            rule.update(step, 0.01, &mut parameter, &[gradient], &mut slots);
        }
        (parameter[0], memory.into_iter().flatten().collect())
    }

    /// Returns every rule, in its forms that differ in arithmetic.
    fn rules() -> Vec<UpdateRule> {
        let (beta1, beta2, epsilon) = (0.9, 0.999, 1e-7);
        vec![
            UpdateRule::Sgd { momentum: 0.0, nesterov: false },
            UpdateRule::Sgd { momentum: 0.9, nesterov: false },
            UpdateRule::Sgd { momentum: 0.9, nesterov: true },
            UpdateRule::Adam { beta1, beta2, epsilon, weight_decay: 0.0 },
            UpdateRule::Adam { beta1, beta2, epsilon, weight_decay: 0.1 },
            UpdateRule::Adagrad { initial_accumulator: 0.1, epsilon },
            UpdateRule::Adagrad { initial_accumulator: 0.0, epsilon },
            UpdateRule::RmsProp { rho: 0.9, momentum: 0.0, epsilon, centered: false },
            UpdateRule::RmsProp { rho: 0.9, momentum: 0.9, epsilon, centered: true },
            UpdateRule::Lamb { beta1, beta2, epsilon, weight_decay: 0.1 },
            UpdateRule::Adadelta { rho: 0.9, epsilon },
            UpdateRule::Adamax { beta1, beta2, epsilon },
            UpdateRule::Nadam { beta1, beta2, epsilon },
            UpdateRule::Ftrl { initial_accumulator: 0.1, l1: 0.001, l2: 0.01, l2_shrinkage: 0.01, beta: 0.1 },
        ]
    }

    #[test]
    fn a_step_by_rows_is_the_step_by_the_whole_gradient() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        // Rows of many tiles, rows longer than a tile, and rows in one tile.
        for (rows, row_len) in [(20_011, 7), (33, 5000), (13, 1)] {
            for rule in rules().into_iter().filter(UpdateRule::is_elementwise) {
                let start = |at: usize| ((at * 37 % 1009) as f32 - 500.0) * 0.01;
                let mut whole: Vec<f32> = (0..rows * row_len).map(start).collect();
                // Zeros of both signs stay what they are.
                (whole[1], whole[2]) = (-0.0, 0.0);
                let slot = |name: &&str| vec![rule.initial(name) as f32; whole.len()];
                let mut slots: Vec<Vec<f32>> = rule.slots().iter().map(slot).collect();
                let (mut by_rows, mut slots_by_rows) = (whole.clone(), slots.clone());
                for step in 1..=3 {
                    let indices: Vec<i64> = (0..rows as i64).filter(|row| (row * row + 3 * step) % 11 < 2).collect();
                    let values: Vec<f32> = (0..indices.len() * row_len).map(|at| start(at * 5) * 0.1).collect();
                    let mut gradient = vec![0.0; whole.len()];
                    for (index, row) in indices.iter().zip(values.chunks_exact(row_len)) {
                        gradient[*index as usize * row_len..][..row_len].copy_from_slice(row);
                    }
                    let mut all: Vec<&mut [f32]> = slots.iter_mut().map(|slot| &mut slot[..]).collect();
                    rule.update(step as u64, 0.01, &mut whole, &gradient, &mut all);
                    let mut all: Vec<&mut [f32]> = slots_by_rows.iter_mut().map(|slot| &mut slot[..]).collect();
                    let given = (&indices[..], &values[..]);
                    let mut update = || rule.update_rows((step as u64, 0.01), &mut by_rows, row_len, given, &mut all);
                    if step == 2 { pool.install(update) } else { update() }
                }
                let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(bits(&whole) == bits(&by_rows), "{rule:?}, {rows} rows of {row_len}");
                assert!(slots == slots_by_rows, "{rule:?}, {rows} rows of {row_len}");
            }
        }
    }

    #[test]
    fn threads_of_a_pool_share_a_step_with_the_same_result() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let numbers = |factor: f32| (0..100_003).map(move |at| ((at * 37 % 1009) as f32 - 500.0) * factor);
        for rule in [
            UpdateRule::Sgd { momentum: 0.0, nesterov: false },
            UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1 },
            UpdateRule::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1 },
            UpdateRule::RmsProp { rho: 0.9, momentum: 0.9, epsilon: 1e-7, centered: true },
        ] {
            let train = || {
                let (mut parameter, gradient): (Vec<f32>, Vec<f32>) =
                    (numbers(0.01).collect(), numbers(3e-4).collect());
                let mut memory = vec![vec![0.0f32; parameter.len()]; rule.slots().len()];
                for step in 1..=3 {
                    let mut slots: Vec<&mut [f32]> = memory.iter_mut().map(|slot| &mut slot[..]).collect();
                    rule.update(step, 0.01, &mut parameter, &gradient, &mut slots);
                }
                (parameter, memory)
            };
            assert!(pool.install(train) == train(), "{rule:?}");
        }
    }

    #[test]
    fn factors_are_rounded_once() {
        // In f32, 1 − 0.999 is 0.00100005 and 1 − 0.9999999 is 0.00000012: 5e-5 and 0.2 off.
        let close = |got: f32, expected: f64, what: &str| {
            assert!((f64::from(got) - expected).abs() <= 1e-7 * expected, "{what}: {got} for {expected}");
        };
        for beta2 in [0.999, 0.999_999_9] {
            for rule in [
                UpdateRule::Adam { beta1: 0.9, beta2, epsilon: 1e-8, weight_decay: 0.0 },
                UpdateRule::Lamb { beta1: 0.9, beta2, epsilon: 1e-8, weight_decay: 0.0 },
            ] {
                let (_, slots) = after(rule, 1, 1.0);
                close(slots[0], 1.0 - 0.9, "m");
                close(slots[1], 1.0 - beta2, "v");
            }
            for centered in [false, true] {
                let (_, slots) =
                    after(UpdateRule::RmsProp { rho: beta2, momentum: 0.0, epsilon: 1e-7, centered }, 1, 1.0);
                slots.iter().for_each(|slot| close(*slot, 1.0 - beta2, "v of RMSprop"));
            }
        }
    }

    #[test]
    fn averages_of_zeros_end_at_zero() {
        for rule in [
            UpdateRule::Sgd { momentum: 0.9, nesterov: false },
            UpdateRule::Sgd { momentum: 0.9, nesterov: true },
            UpdateRule::Adam { beta1: 0.9, beta2: 0.9, epsilon: 1e-8, weight_decay: 0.0 },
            UpdateRule::Lamb { beta1: 0.9, beta2: 0.9, epsilon: 1e-8, weight_decay: 0.0 },
            UpdateRule::RmsProp { rho: 0.9, momentum: 0.9, epsilon: 1e-7, centered: true },
            UpdateRule::Adadelta { rho: 0.9, epsilon: 1e-7 },
            UpdateRule::Adamax { beta1: 0.9, beta2: 0.9, epsilon: 1e-7 },
            UpdateRule::Nadam { beta1: 0.9, beta2: 0.9, epsilon: 1e-7 },
        ] {
            let mut parameter = [1.0f32];
            let mut memory = vec![[0.0f32; 1]; rule.slots().len()];
            for step in 1..=2000 {
                let mut slots: Vec<&mut [f32]> = memory.iter_mut().map(|slot| &mut slot[..]).collect();
                rule.update(step, 0.01, &mut parameter, &[if step == 1 { 1.0 } else { 0.0 }], &mut slots);
                assert!(memory.iter().all(|slot| !slot[0].is_subnormal()), "{rule:?}, step {step}: {memory:?}");
            }
            assert!(memory.iter().all(|slot| slot[0] == 0.0), "{rule:?}: {memory:?}");
        }
    }

    #[test]
    fn rounding_leaves_no_variance_below_zero() {
        for gradient in [1000.1f32, 333.3, 1.1e6] {
            for momentum in [0.0, 0.5] {
                let rule = UpdateRule::RmsProp { rho: 0.5, momentum, epsilon: 1e-7, centered: true };
                let (parameter, _) = after(rule, 40, gradient);
                assert!(parameter.is_finite(), "{gradient}: {parameter}");
            }
        }
    }

    #[test]
    fn norms_of_large_and_small_parameters_are_finite() {
        let rule = UpdateRule::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.0 };
        for length in [1e30f32, 1e-30] {
            let (mut p, mut m, mut v) = ([length; 4], [0.0f32; 4], [0.0f32; 4]);
            rule.update(1, 0.1, &mut p, &[1.0; 4], &mut [&mut m, &mut v]);
            // One step changes the parameter by a tenth of its norm.
            p.iter().for_each(|p| assert!((p / length - 0.9).abs() < 1e-5, "{p} from {length}"));
        }
    }

    #[test]
    fn only_accumulators_begin_with_something() {
        let adagrad = UpdateRule::Adagrad { initial_accumulator: 0.1, epsilon: 1e-7 };
        assert_eq!(adagrad.slots().iter().map(|slot| adagrad.initial(slot)).collect::<Vec<_>>(), [0.1]);
        let adam = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
        assert_eq!(adam.slots().iter().map(|slot| adam.initial(slot)).collect::<Vec<_>>(), [0.0; 2]);
    }
}

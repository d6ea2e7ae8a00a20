//! The outer optimizer: gradient descent with Nesterov momentum.

use crate::{Error, Result};

/// The outer optimizer of [`DilocoStrategy`](crate::DilocoStrategy): stochastic gradient descent with Nesterov
/// momentum. Its gradient is the mean of the replicas' changes, outer parameters minus inner ones.
///
/// `momentum = momentum_factor * momentum + gradient`, then `parameter -= learning_rate * (gradient + momentum_factor *
/// momentum)`. With a learning rate of 1 and a momentum of 0, parameters become the mean of all replicas' parameters.
///
/// # Examples
/// ```
/// let outer = distribute_strategy::OuterNesterov::default();
/// assert_eq!((outer.learning_rate, outer.momentum), (0.7, 0.9));
/// ```
///
/// # Source
/// Douillard and others, "DiLoCo: distributed low-communication training of language models", arXiv 2311.08105,
/// algorithm 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OuterNesterov {
    /// The learning rate, above 0. Default: 0.7.
    pub learning_rate: f64,
    /// The factor of the momentum, from 0 to below 1. Default: 0.9.
    pub momentum: f64,
}

impl Default for OuterNesterov {
    fn default() -> OuterNesterov {
        OuterNesterov { learning_rate: 0.7, momentum: 0.9 }
    }
}

impl OuterNesterov {
    /// Returns an error if a setting is out of range.
    ///
    /// # Errors
    /// [`Error::LocalUpdates`] names the setting.
    pub fn check(self) -> Result<()> {
        let OuterNesterov { learning_rate, momentum } = self;
        let problem = if !(learning_rate > 0.0 && learning_rate.is_finite()) {
            format!("the outer learning rate is {learning_rate}; give a finite one above 0, such as 0.7")
        } else if !(0.0..1.0).contains(&momentum) {
            format!("the outer momentum is {momentum}; give one from 0 to below 1, such as 0.9")
        } else {
            return Ok(());
        };
        Err(Error::LocalUpdates { problem })
    }

    /// Returns whether an outer step sets parameters to the mean of all replicas' parameters.
    pub(super) fn is_mean(self) -> bool {
        self.learning_rate == 1.0 && self.momentum == 0.0
    }

    /// Makes an outer step: equal numbers give equal results on every machine. `momentum` is needed unless the factor
    /// is 0.
    ///
    /// # Shapes
    /// All slices have one length; elements without a counterpart stay as they are.
    pub fn step(self, outer: &mut [f32], mut momentum: Option<&mut [f32]>, gradient: &[f32]) {
        let (rate, factor) = (self.learning_rate as f32, self.momentum as f32);
        for (at, (outer, gradient)) in outer.iter_mut().zip(gradient).enumerate() {
            let direction = match momentum.as_deref_mut() {
                Some(momentum) => {
                    momentum[at] = factor * momentum[at] + gradient;
                    gradient + factor * momentum[at]
                }
                None => *gradient,
            };
            *outer -= rate * direction;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_nesterov_momentum() {
        let outer = OuterNesterov { learning_rate: 0.5, momentum: 0.5 };
        let (mut parameter, mut momentum) = ([1.0], [0.0]);
        outer.step(&mut parameter, Some(&mut momentum), &[2.0]);
        assert_eq!((parameter, momentum), ([1.0 - 0.5 * 3.0], [2.0]));
        outer.step(&mut parameter, Some(&mut momentum), &[-1.0]);
        // The momentum is 0.5 * 2 - 1, and the direction -1 + 0.5 * 0.
        assert_eq!((parameter, momentum), ([-0.5 + 0.5], [0.0]));
        let plain = OuterNesterov { learning_rate: 0.25, momentum: 0.0 };
        plain.step(&mut parameter, None, &[4.0]);
        assert_eq!(parameter, [-1.0]);
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for (learning_rate, momentum) in [(0.0, 0.9), (f64::NAN, 0.9), (f64::INFINITY, 0.9), (0.7, 1.0), (0.7, -0.1)] {
            let told = OuterNesterov { learning_rate, momentum }.check().unwrap_err().to_string();
            assert!(told.starts_with("the outer "), "{told}");
        }
        OuterNesterov::default().check().unwrap();
    }
}

//! Loss scaling, for gradients that would vanish in 16 bits.

use crate::Error;
use crate::error::check;

/// By how much losses are multiplied before backward, and gradients divided before they are applied.
///
/// A dynamic scale halves, and the step is left out, whenever a gradient is not finite; it doubles after so many steps without
/// that. Replicas decide by the sums over all of them, which are the same on each, so they always agree.
///
/// # Source
/// `tf.keras.mixed_precision.LossScaleOptimizer`; Micikevicius and others, "Mixed precision training", 2018.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    initial: f64,
    /// Steps after which it doubles; `None` where it stays.
    interval: Option<u32>,
}

impl LossScale {
    /// Begins with 32768 and doubles after 2000 steps.
    pub fn dynamic() -> LossScale {
        LossScale { initial: 32768.0, interval: Some(2000) }
    }

    /// Never changes. Steps whose gradients are not finite are left out.
    pub fn fixed(scale: f64) -> LossScale {
        LossScale { initial: scale, interval: None }
    }

    /// What a dynamic scale begins with.
    pub fn initial(self, initial: f64) -> LossScale {
        LossScale { initial, ..self }
    }

    /// After how many steps a dynamic scale doubles; a fixed one becomes dynamic.
    pub fn interval(self, steps: u32) -> LossScale {
        LossScale { interval: Some(steps.max(1)), ..self }
    }

    pub(crate) fn check(self) -> Result<(), Error> {
        check("the loss scale", self.initial, self.initial >= 1.0, "at least 1, such as 32768")
    }
}

/// A scale in use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scaling {
    settings: LossScale,
    pub(crate) scale: f64,
    pub(crate) good_steps: u32,
}

impl Scaling {
    pub(crate) fn new(settings: LossScale) -> Scaling {
        Scaling { settings, scale: settings.initial, good_steps: 0 }
    }

    /// Notes whether a step's gradients were finite.
    pub(crate) fn note(&mut self, finite: bool) {
        let Some(interval) = self.settings.interval else { return };
        if !finite {
            (self.scale, self.good_steps) = ((self.scale / 2.0).max(1.0), 0);
            return;
        }
        self.good_steps += 1;
        if self.good_steps == interval {
            // Beyond this an f32 gradient has no room left.
            (self.scale, self.good_steps) = ((self.scale * 2.0).min(2f64.powi(100)), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_halves_at_once_and_doubles_after_a_while() {
        let mut scaling = Scaling::new(LossScale::dynamic().initial(8.0).interval(3));
        let scales: Vec<f64> = [true, true, true, false, true, true, false, false, false, false, false]
            .into_iter()
            .map(|finite| {
                scaling.note(finite);
                scaling.scale
            })
            .collect();
        assert_eq!(scales, [8.0, 8.0, 16.0, 8.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]);
        let mut fixed = Scaling::new(LossScale::fixed(4.0));
        fixed.note(false);
        assert_eq!(fixed.scale, 4.0);
    }

    #[test]
    fn a_scale_below_one_is_refused() {
        let text = LossScale::fixed(0.5).check().unwrap_err().to_string();
        assert_eq!(text, "the loss scale is 0.5; expected at least 1, such as 32768");
    }
}

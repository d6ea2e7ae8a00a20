//! Loss scaling, for gradients that would underflow in 16 bits.

use distribute_rules::check_setting;

use crate::Error;

/// A loss scale: losses are multiplied by it before backward, and gradients divided by it before they are applied.
///
/// When a gradient is not finite, the step is skipped and a dynamic scale halves. A dynamic scale doubles after
/// `interval` steps without this. Replicas decide by the sums over all of them, which are equal on each, so they always
/// agree.
///
/// # Source
/// `tf.keras.mixed_precision.LossScaleOptimizer`; Micikevicius and others, "Mixed precision training", 2018.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    initial: f64,
    /// The number of finite steps after which the scale doubles; `None` for a fixed scale.
    interval: Option<u32>,
}

impl LossScale {
    /// Returns a scale that begins with 32768 and doubles after 2000 steps.
    pub fn dynamic() -> LossScale {
        LossScale { initial: 32768.0, interval: Some(2000) }
    }

    /// Returns a scale that never changes. Steps whose gradients are not finite are skipped.
    pub fn fixed(scale: f64) -> LossScale {
        LossScale { initial: scale, interval: None }
    }

    /// Sets the initial value of a dynamic scale.
    pub fn initial(self, initial: f64) -> LossScale {
        LossScale { initial, ..self }
    }

    /// Sets the number of steps after which a dynamic scale doubles; a fixed scale becomes dynamic.
    pub fn interval(self, steps: u32) -> LossScale {
        LossScale { interval: Some(steps.max(1)), ..self }
    }

    pub(crate) fn check(self) -> Result<(), Error> {
        Ok(check_setting("the loss scale", self.initial, self.initial >= 1.0, "at least 1, such as 32768")?)
    }
}

/// The current value of a loss scale.
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

    /// Returns the settings, which are equal on all workers.
    pub(crate) fn settings(&self) -> LossScale {
        self.settings
    }

    /// Returns whether the scale depends on earlier steps.
    pub(crate) fn changes(&self) -> bool {
        self.settings.interval.is_some()
    }

    /// Records whether a step's gradients were finite.
    pub(crate) fn note(&mut self, finite: bool) {
        let Some(interval) = self.settings.interval else { return };
        if !finite {
            (self.scale, self.good_steps) = ((self.scale / 2.0).max(1.0), 0);
            return;
        }
        self.good_steps += 1;
        // A checkpoint may have counted towards a longer interval.
        if self.good_steps >= interval {
            // Beyond this limit an f32 gradient would overflow.
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
        let mut shortened = Scaling { good_steps: 10, ..Scaling::new(LossScale::dynamic().initial(8.0).interval(3)) };
        shortened.note(true);
        assert_eq!((shortened.scale, shortened.good_steps), (16.0, 0));
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

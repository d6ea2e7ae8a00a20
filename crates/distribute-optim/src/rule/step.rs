//! The arguments of one step of one parameter, and the types in which it is computed.

use std::ops::{Add, AddAssign, Div, Mul, Sub, SubAssign};

use distribute_device::Element;

/// The arithmetic that update rules need of an element type.
///
/// The trait is sealed, as [`Element`] is.
pub trait Float:
    Element
    + Into<f64>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + SubAssign
{
    /// Rounds to the nearest value of this type.
    fn from_f64(value: f64) -> Self;

    /// Returns the square root.
    fn sqrt(self) -> Self;

    /// Returns zero for a subnormal number.
    ///
    /// A moving average of zeros would end at one and stay there, since its product with 0.9 is rounded to itself, and
    /// a processor takes a hundred times longer to compute with one.
    fn flushed(self) -> Self;
}

macro_rules! floats {
    ($($type:ty)*) => {$(
        impl Float for $type {
            #[inline]
            fn from_f64(value: f64) -> $type {
                value as $type
            }

            #[inline]
            fn sqrt(self) -> $type {
                <$type>::sqrt(self)
            }

            #[inline]
            fn flushed(self) -> $type {
                if self < <$type>::MIN_POSITIVE && self > -<$type>::MIN_POSITIVE { 0.0 } else { self }
            }
        }
    )*};
}

floats!(f32 f64);

/// The arguments of one step of one parameter.
#[doc(hidden)]
#[derive(Debug)]
pub struct Step<'a, 'b, T> {
    /// The number of the step, from 1.
    pub(super) number: u64,
    pub(super) learning_rate: f64,
    pub(super) parameter: &'a mut [T],
    pub(super) gradient: &'a [T],
    pub(super) slots: &'a mut [&'b mut [T]],
}

/// The fewest elements that are worth another thread: about 20 µs of one.
const LEAST: usize = 16 * 1024;

impl<T: Float> Step<'_, '_, T> {
    /// Calls `f` with parts of the step, on all threads of the pool that the caller belongs to.
    pub(super) fn divided(self, f: &(impl Fn(Step<'_, '_, T>) + Sync)) {
        let Step { number, learning_rate, parameter, gradient, slots } = self;
        if parameter.len() < 2 * LEAST {
            return f(Step { number, learning_rate, parameter, gradient, slots });
        }
        // Parts begin at whole cache lines of each other.
        let middle = (parameter.len() / 2).next_multiple_of(64);
        let (parameter, other_parameter) = parameter.split_at_mut(middle);
        let (gradient, other_gradient) = gradient.split_at(middle);
        let (mut slots, mut other_slots): (Vec<_>, Vec<_>) =
            slots.iter_mut().map(|slot| slot.split_at_mut(middle)).unzip();
        let one = Step { number, learning_rate, parameter, gradient, slots: &mut slots };
        let other = Step {
            number,
            learning_rate,
            parameter: other_parameter,
            gradient: other_gradient,
            slots: &mut other_slots,
        };
        rayon::join(|| one.divided(f), || other.divided(f));
    }
}

/// Returns the bias correction of a moving average that started at 0, after `step` steps: 1 − betaⁿ.
pub(super) fn correction(beta: f64, step: u64) -> f64 {
    1.0 - beta.powi(i32::try_from(step).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn parts_of_a_step_are_short_and_have_each_element_once() {
        let (mut parameter, gradient, mut slot) = ([0.0f32; 100_003], [1.0; 100_003], [0.0; 100_003]);
        let lengths = Mutex::new(Vec::new());
        let (number, learning_rate, slots) = (1, 0.1, &mut [&mut slot[..]]);
        Step { number, learning_rate, parameter: &mut parameter, gradient: &gradient, slots }.divided(&|part| {
            lengths.lock().push(part.parameter.len());
            part.parameter.iter_mut().for_each(|p| *p += 1.0);
            part.slots.iter_mut().for_each(|slot| slot.iter_mut().for_each(|s| *s += 1.0));
        });
        assert!(parameter == gradient && slot == gradient);
        let lengths = lengths.into_inner();
        assert!(lengths.len() > 2 && lengths.iter().all(|length| *length < 2 * LEAST), "{lengths:?}");
    }
}

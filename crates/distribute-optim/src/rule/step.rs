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

/// Returns the bias correction of a moving average that started at 0, after `step` steps: 1 − betaⁿ.
pub(super) fn correction(beta: f64, step: u64) -> f64 {
    1.0 - beta.powi(i32::try_from(step).unwrap_or(i32::MAX))
}

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
    pub(crate) number: u64,
    pub(crate) learning_rate: f64,
    pub(crate) parameter: &'a mut [T],
    pub(crate) gradient: &'a [T],
    pub(crate) slots: &'a mut [&'b mut [T]],
}

/// The fewest elements that are worth another thread: about 20 µs of one.
const LEAST: usize = 16 * 1024;

impl<T: Float> Step<'_, '_, T> {
    /// Calls `f` with parts of the step, on all threads of the pool that the caller belongs to.
    pub(crate) fn divided(self, f: &(impl Fn(Step<'_, '_, T>) + Sync)) {
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

/// The arguments of one step of one parameter whose gradient has some rows, and zeros elsewhere.
pub(crate) struct RowStep<'a, 'b, T> {
    /// The number of the step, from 1.
    pub(crate) number: u64,
    pub(crate) learning_rate: f64,
    /// The parameter, or some rows of it.
    pub(crate) parameter: &'a mut [T],
    /// The number of elements of a row.
    pub(crate) row_len: usize,
    /// The index of the parameter's first row among those that the indices count.
    pub(crate) first: usize,
    /// The indices of the gradient's rows, each once, in ascending order.
    pub(crate) indices: &'a [i64],
    /// The gradient's rows.
    pub(crate) values: &'a [T],
    pub(crate) slots: &'a mut [&'b mut [T]],
}

/// The elements of a whole gradient that are in memory at once: with those of three others they fit into 64 KiB.
const TILE: usize = 4 * 1024;

impl<T: Float> RowStep<'_, '_, T> {
    /// Calls `f` with all parts of the step, on all threads of the pool that the caller belongs to if `is_shared`.
    pub(crate) fn divided(self, is_shared: bool, f: &(impl Fn(Step<'_, '_, T>) + Sync)) {
        let RowStep { number, learning_rate, parameter, row_len, first, indices, values, slots } = self;
        let rows = parameter.len() / row_len.max(1);
        if !is_shared || rows < 2 || parameter.len() < 2 * LEAST {
            return RowStep { number, learning_rate, parameter, row_len, first, indices, values, slots }.tiles(f);
        }
        let middle = first + rows / 2;
        let before = indices.partition_point(|index| *index < middle as i64);
        let (parameter, other_parameter) = parameter.split_at_mut(rows / 2 * row_len);
        let (indices, other_indices) = indices.split_at(before);
        let (values, other_values) = values.split_at(before * row_len);
        let (mut slots, mut other_slots): (Vec<_>, Vec<_>) =
            slots.iter_mut().map(|slot| slot.split_at_mut(rows / 2 * row_len)).unzip();
        let one = RowStep { number, learning_rate, parameter, row_len, first, indices, values, slots: &mut slots };
        let other = RowStep {
            number,
            learning_rate,
            parameter: other_parameter,
            row_len,
            first: middle,
            indices: other_indices,
            values: other_values,
            slots: &mut other_slots,
        };
        rayon::join(|| one.divided(true, f), || other.divided(true, f));
    }

    /// Calls `f` with one tile after another.
    fn tiles(self, f: &impl Fn(Step<'_, '_, T>)) {
        let RowStep { number, learning_rate, parameter, row_len, first, indices, values, slots } = self;
        let row_len = row_len.max(1);
        let rows = (TILE / row_len).max(1);
        let mut gradient = vec![T::default(); (rows * row_len).min(parameter.len())];
        let mut given = indices.iter().zip(values.chunks_exact(row_len)).peekable();
        for (tile, parameter) in parameter.chunks_mut(rows * row_len).enumerate() {
            let start = tile * rows * row_len;
            let end = (first + (tile + 1) * rows) as i64;
            let of_tile = given.clone();
            let place = |index: i64| (index as usize - first) * row_len - start;
            while let Some((index, row)) = given.next_if(|(index, _)| **index < end) {
                gradient[place(*index)..][..row_len].copy_from_slice(row);
            }
            let mut slots: Vec<&mut [T]> = slots.iter_mut().map(|slot| &mut slot[start..][..parameter.len()]).collect();
            let of_parameter = &gradient[..parameter.len()];
            f(Step { number, learning_rate, parameter, gradient: of_parameter, slots: &mut slots });
            for (index, _) in of_tile.take_while(|(index, _)| **index < end) {
                gradient[place(*index)..][..row_len].fill(T::default());
            }
        }
    }

    /// Calls `f` with each row of the gradient, for rules that change nothing else.
    pub(crate) fn each_row(self, f: &impl Fn(Step<'_, '_, T>)) {
        let RowStep { number, learning_rate, parameter, row_len, first, indices, values, slots } = self;
        for (index, gradient) in indices.iter().zip(values.chunks_exact(row_len.max(1))) {
            let start = (*index as usize - first) * row_len;
            let mut slots: Vec<&mut [T]> = slots.iter_mut().map(|slot| &mut slot[start..][..row_len]).collect();
            let parameter = &mut parameter[start..][..row_len];
            f(Step { number, learning_rate, parameter, gradient, slots: &mut slots });
        }
    }
}

/// Returns the bias correction of a moving average that started at 0, after `step` steps: 1 − betaⁿ.
pub(crate) fn correction(beta: f64, step: u64) -> f64 {
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

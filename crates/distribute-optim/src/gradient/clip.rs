//! The arithmetic of gradient clipping.

use distribute_device::{BufferMut, DType, Element};
use distribute_values::with_storage;

use super::Reduced;
use crate::{Clip, TensorLibrary};

impl Clip {
    /// Limits gradients in place. Returns their global norm if it was computed.
    ///
    /// # Errors
    /// The library's error if a gradient's storage cannot be accessed.
    pub fn apply<L: TensorLibrary>(self, gradients: &mut [Reduced<L>]) -> Result<Option<f64>, L::Error> {
        let square = |reduced: &Reduced<L>| square_sum::<L>(&reduced.gradient);
        let norm = self.norm(gradients, 0.0, square)?;
        self.apply_with(gradients, norm, square)?;
        Ok(norm)
    }

    /// Returns the global norm of gradients, and of others whose squares have the sum `others`, if this kind needs it.
    /// `square` returns the sum of squares of a whole gradient.
    pub(crate) fn norm<L: TensorLibrary>(
        self,
        gradients: &[Reduced<L>],
        others: f64,
        square: impl Fn(&Reduced<L>) -> Result<f64, L::Error>,
    ) -> Result<Option<f64>, L::Error> {
        let Clip::GlobalNorm(_) = self else { return Ok(None) };
        let mut sum = 0.0;
        for reduced in gradients {
            sum += square(reduced)?;
        }
        Ok(Some((sum + others).sqrt()))
    }

    /// Limits gradients in place, given their [`norm`](Clip::norm). `square` returns the sum of squares of a whole
    /// gradient.
    pub(crate) fn apply_with<L: TensorLibrary>(
        self,
        gradients: &mut [Reduced<L>],
        norm: Option<f64>,
        square: impl Fn(&Reduced<L>) -> Result<f64, L::Error>,
    ) -> Result<(), L::Error> {
        for reduced in gradients {
            let gradient = &reduced.gradient;
            match self {
                Clip::Value(limit) => change::<L>(gradient, |x| x.clamp(-limit, limit))?,
                Clip::Norm(limit) => scale_down::<L>(gradient, square(reduced)?.sqrt(), limit)?,
                Clip::GlobalNorm(limit) => scale_down::<L>(gradient, norm.unwrap_or(0.0), limit)?,
            }
        }
        Ok(())
    }
}

fn scale_down<L: TensorLibrary>(tensor: &L::Tensor, norm: f64, limit: f64) -> Result<(), L::Error> {
    if norm > limit { change::<L>(tensor, |x| x * (limit / norm)) } else { Ok(()) }
}

/// Returns the sum of squares, computed in f64 and always in the same order.
pub(crate) fn square_sum<L: TensorLibrary>(tensor: &L::Tensor) -> Result<f64, L::Error> {
    fn sum<T: Element + Into<f64>>(buffer: &BufferMut<'_>) -> f64 {
        buffer.as_slice::<T>().map_or(0.0, |all| all.iter().map(|x| (*x).into() * (*x).into()).sum())
    }
    let mut result = 0.0;
    with_storage::<L, L::Tensor>(std::slice::from_ref(tensor), &mut |buffers| {
        result = buffers
            .iter()
            .map(|buffer| if buffer.dtype() == DType::F64 { sum::<f64>(buffer) } else { sum::<f32>(buffer) })
            .sum();
    })?;
    Ok(result)
}

/// Returns whether all elements are finite.
pub(crate) fn is_finite<L: TensorLibrary>(tensor: &L::Tensor) -> Result<bool, L::Error> {
    // A NaN or an infinity makes the sum of squares NaN or infinite; gradients whose squares overflow f64 are useless
    // too.
    Ok(square_sum::<L>(tensor)?.is_finite())
}

pub(crate) fn change<L: TensorLibrary>(tensor: &L::Tensor, f: impl Fn(f64) -> f64) -> Result<(), L::Error> {
    with_storage::<L, L::Tensor>(std::slice::from_ref(tensor), &mut |buffers| {
        for buffer in buffers {
            if let Ok(all) = buffer.as_mut_slice::<f64>() {
                all.iter_mut().for_each(|x| *x = f(*x));
            } else if let Ok(all) = buffer.as_mut_slice::<f32>() {
                all.iter_mut().for_each(|x| *x = f(f64::from(*x)) as f32);
            }
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use distribute_values::{Host, HostTensor, TensorStorage};

    use super::*;

    fn gradients() -> Vec<Reduced<Host>> {
        let tensor = |values: &[f32]| HostTensor::new(&[values.len()], values.to_vec()).unwrap();
        [tensor(&[3.0, 4.0]), tensor(&[0.0, -12.0])]
            .into_iter()
            .enumerate()
            .map(|(index, gradient)| Reduced::new(index, gradient).unwrap())
            .collect()
    }

    fn clipped(clip: Clip) -> (Vec<f32>, Option<f64>) {
        let mut all = gradients();
        let norm = clip.apply(&mut all).unwrap();
        (all.iter().flat_map(|reduced| reduced.gradient.to_elements::<f32>().unwrap()).collect(), norm)
    }

    #[test]
    fn each_kind_limits_in_its_way() {
        assert_eq!(clipped(Clip::Value(3.5)), (vec![3.0, 3.5, 0.0, -3.5], None));
        assert_eq!(clipped(Clip::Norm(6.0)), (vec![3.0, 4.0, 0.0, -6.0], None));
        assert_eq!(clipped(Clip::GlobalNorm(6.5)), (vec![1.5, 2.0, 0.0, -6.0], Some(13.0)));
        assert_eq!(clipped(Clip::GlobalNorm(20.0)), (vec![3.0, 4.0, 0.0, -12.0], Some(13.0)));
    }

    #[test]
    fn a_limit_is_above_zero() {
        let text = Clip::GlobalNorm(0.0).check().unwrap_err().to_string();
        assert!(text.contains("Clip::GlobalNorm") && text.contains("above 0"), "{text}");
    }
}

//! Gradients of one replica that are accumulated for the next step.

use distribute_device::DType;
use distribute_values::TensorStorage;

use super::whole;
use crate::library::dtype;
use crate::tape::Gradient;
use crate::{TensorLibrary, is_short};

/// Sums of gradients by variable, in f32 if gradients have 16 bits: those sums would soon stop growing.
///
/// Their memory is never written, so a clone is a snapshot.
#[derive(Debug)]
pub(crate) struct Accumulated<L: TensorLibrary>(Vec<Option<Sum<L>>>);

/// The sum of a variable's gradients.
#[derive(Debug)]
struct Sum<L: TensorLibrary> {
    wide: L::Tensor,
    /// The type of the gradients.
    dtype: DType,
}

impl<L: TensorLibrary> Clone for Sum<L> {
    fn clone(&self) -> Sum<L> {
        Sum { wide: self.wide.clone(), dtype: self.dtype }
    }
}

impl<L: TensorLibrary> Sum<L> {
    /// Adds a gradient to the sum so far.
    fn add(so_far: Option<Sum<L>>, gradient: L::Tensor) -> Result<Sum<L>, L::Error> {
        let dtype = dtype::<L>(&gradient)?;
        let gradient = if is_short(dtype) { L::cast(&gradient, DType::F32)? } else { gradient };
        let wide = match so_far {
            Some(sum) => L::add(&sum.wide, &gradient)?,
            None => gradient,
        };
        Ok(Sum { wide, dtype })
    }

    /// Returns the sum in the type of the gradients.
    fn into_gradient(self) -> Result<L::Tensor, L::Error> {
        if is_short(self.dtype) { L::cast(&self.wide, self.dtype) } else { Ok(self.wide) }
    }
}

impl<L: TensorLibrary> Default for Accumulated<L> {
    fn default() -> Accumulated<L> {
        Accumulated(Vec::new())
    }
}

impl<L: TensorLibrary> Clone for Accumulated<L> {
    fn clone(&self) -> Accumulated<L> {
        Accumulated(self.0.clone())
    }
}

impl<L: TensorLibrary> Accumulated<L> {
    pub(crate) fn add(&mut self, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        let sum = Sum::add(self.0[index].take(), gradient)?;
        self.0[index] = Some(Sum { wide: L::detach(&sum.wide), ..sum });
        Ok(())
    }

    /// Returns the sum of a gradient and what was accumulated for its variable, which is removed.
    pub(crate) fn take_with(&mut self, index: usize, gradient: L::Tensor) -> Result<L::Tensor, L::Error> {
        match self.0.get_mut(index).and_then(Option::take) {
            Some(sum) => Sum::add(Some(sum), gradient)?.into_gradient(),
            None => Ok(gradient),
        }
    }

    /// Returns a sum like [`take_with`](Accumulated::take_with), or the gradient itself if nothing was accumulated.
    /// `variable` is this replica's component.
    pub(crate) fn take_with_reported(
        &mut self,
        index: usize,
        gradient: Gradient<L::Tensor>,
        variable: &L::Tensor,
    ) -> Result<Gradient<L::Tensor>, L::Error> {
        if self.0.get(index).is_none_or(Option::is_none) {
            return Ok(gradient);
        }
        self.take_with(index, whole::<L>(gradient, variable)?).map(Gradient::Whole)
    }

    /// Returns copies of the sums that remain. Reductions write in the memory they are given, and the accumulated sums
    /// must stay unchanged until the step is committed.
    pub(crate) fn into_rest(self) -> Result<Vec<(usize, L::Tensor)>, L::Error> {
        let rest = self.0.into_iter().enumerate().filter_map(|(index, gradient)| Some((index, gradient?)));
        rest.map(|(index, sum)| Ok((index, sum.into_gradient()?.copied()?))).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

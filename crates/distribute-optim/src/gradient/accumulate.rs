//! Gradients of one replica that are accumulated for the next step.

use distribute_values::TensorStorage;

use super::whole;
use crate::TensorLibrary;
use crate::tape::Gradient;

/// Sums of gradients by variable.
///
/// Their memory is never written, so a clone is a snapshot.
#[derive(Debug)]
pub(crate) struct Accumulated<L: TensorLibrary>(Vec<Option<L::Tensor>>);

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
        let sum = match self.0[index].take() {
            Some(sum) => L::add(&sum, &gradient)?,
            None => gradient,
        };
        self.0[index] = Some(L::detach(&sum));
        Ok(())
    }

    /// Returns the sum of a gradient and what was accumulated for its variable, which is removed.
    pub(crate) fn take_with(&mut self, index: usize, gradient: L::Tensor) -> Result<L::Tensor, L::Error> {
        match self.0.get_mut(index).and_then(Option::take) {
            Some(sum) => L::add(&sum, &gradient),
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
        rest.map(|(index, gradient)| Ok((index, gradient.copied()?))).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

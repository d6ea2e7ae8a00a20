//! Gradients of one replica that wait for the next step.

use distribute_values::TensorStorage;

use crate::TensorLibrary;

/// Gradients by variable, to which others are added.
///
/// Their memory is never written: a clone is what was.
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

    /// A gradient together with what has been accumulated for its variable.
    pub(crate) fn take_with(&mut self, index: usize, gradient: L::Tensor) -> Result<L::Tensor, L::Error> {
        match self.0.get_mut(index).and_then(Option::take) {
            Some(sum) => L::add(&sum, &gradient),
            None => Ok(gradient),
        }
    }

    /// Copies of what was accumulated for variables to which nothing was added: reductions write in the memory that they are
    /// given, and what was accumulated stays until the step is made.
    pub(crate) fn into_rest(self) -> Result<Vec<(usize, L::Tensor)>, L::Error> {
        let rest = self.0.into_iter().enumerate().filter_map(|(index, gradient)| Some((index, gradient?)));
        rest.map(|(index, gradient)| Ok((index, gradient.copied()?))).collect()
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

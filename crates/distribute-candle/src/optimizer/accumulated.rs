//! Gradients of one replica that wait for the next step.

use candle_core::Tensor;

/// Gradients by variable, to which others are added.
#[derive(Default)]
pub(super) struct Sum(pub(super) Vec<Option<Tensor>>);

impl From<Vec<Option<Tensor>>> for Sum {
    fn from(accumulated: Vec<Option<Tensor>>) -> Sum {
        Sum(accumulated)
    }
}

impl Sum {
    pub(super) fn add(&mut self, index: usize, gradient: Tensor) -> candle_core::Result<()> {
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        let sum = match self.0[index].take() {
            Some(sum) => (sum + gradient)?,
            None => gradient,
        };
        self.0[index] = Some(sum.detach());
        Ok(())
    }

    /// A gradient together with what has been accumulated for its variable.
    pub(super) fn take_with(&mut self, index: usize, gradient: Tensor) -> candle_core::Result<Tensor> {
        match self.0.get_mut(index).and_then(Option::take) {
            Some(sum) => sum + gradient,
            None => Ok(gradient),
        }
    }

    /// Copies of what was accumulated for variables to which nothing was added: reductions write in the memory that they are
    /// given, and what was accumulated stays until the step is made.
    pub(super) fn into_rest(self) -> candle_core::Result<Vec<(usize, Tensor)>> {
        let rest = self.0.into_iter().enumerate().filter_map(|(index, gradient)| Some((index, gradient?)));
        rest.map(|(index, gradient)| Ok((index, gradient.copy()?))).collect()
    }
}

//! The norms of gradients whose parts are on the ranks of a tensor group.

use distribute_collectives::ReduceOp;
use distribute_strategy::ReplicaContext;

use super::{Reduced, square_sum};
use crate::{Parameters, TensorLibrary};

/// The sums of squares of whole gradients of split variables, by variable, as this rank's tensor group has agreed on
/// them; empty if no rank needs them.
#[derive(Debug, Default)]
pub(crate) struct SquaresOfParts(Vec<Option<f64>>);

impl SquaresOfParts {
    /// Waits until every rank of this tensor group has all sums of its gradients, after which no rank fails before its
    /// step is committed; and sums the squares of split gradients over the ranks if `gradients` are given. Without a
    /// tensor group nothing is done.
    ///
    /// The groups of equal places fail independently of each other. A rank therefore commits a step only after its
    /// whole tensor group has got there: then all of them do, since each of those groups succeeds on all replicas or
    /// on none.
    pub(crate) fn agree<L: TensorLibrary>(
        context: &ReplicaContext,
        parameters: &Parameters<L>,
        gradients: Option<&[Reduced<L>]>,
    ) -> Result<SquaresOfParts, L::Error> {
        let Some(tensor) = context.tensor_group() else { return Ok(SquaresOfParts::default()) };
        let Some(gradients) = gradients else {
            tensor.barrier()?;
            return Ok(SquaresOfParts::default());
        };
        let is_split = |index: &usize| parameters.variables()[*index].tensor_split().is_some();
        let mut squares = vec![0.0; parameters.variables().len()];
        for reduced in gradients.iter().filter(|reduced| is_split(&reduced.index)) {
            squares[reduced.index] = square_sum::<L>(&reduced.gradient)?;
        }
        tensor.all_reduce(&mut squares, ReduceOp::Sum)?;
        // A sum of squares may have failed on a rank of another tensor group.
        context.group().barrier()?;
        let squares = squares.into_iter().enumerate();
        Ok(SquaresOfParts(squares.map(|(index, square)| Some(square).filter(|_| is_split(&index))).collect()))
    }

    /// Returns the sum of squares of a variable's whole gradient if the variable is split.
    pub(crate) fn of(&self, index: usize) -> Option<f64> {
        self.0.get(index).copied().flatten()
    }

    /// Returns whether the gradients of all split variables are finite.
    pub(crate) fn are_finite(&self) -> bool {
        self.0.iter().flatten().all(|square| square.is_finite())
    }
}

//! Limits on gradients.

use distribute_rules::check_setting;

use crate::Error;

/// A limit on gradients, set by [`Optimizer::clip`](crate::Optimizer::clip).
///
/// It applies to the sum over all replicas, so the result does not depend on the number of replicas.
///
/// # Source
/// `clipvalue`, `clipnorm` and `global_clipnorm` of tf.keras's optimizers, which clip after the reduction too.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Clip {
    /// Clips every element to the range from minus to plus this value.
    Value(f64),
    /// Scales each variable's gradient down to this norm if its own is greater.
    Norm(f64),
    /// Scales all gradients down by one factor if their global norm is greater than this.
    GlobalNorm(f64),
}

impl Clip {
    /// Returns an error unless the limit is above 0.
    ///
    /// # Errors
    /// [`Error::Setting`] if the limit is 0, negative or not finite.
    pub fn check(self) -> Result<(), Error> {
        let (what, limit) = match self {
            Clip::Value(limit) => ("the limit of Clip::Value", limit),
            Clip::Norm(limit) => ("the limit of Clip::Norm", limit),
            Clip::GlobalNorm(limit) => ("the limit of Clip::GlobalNorm", limit),
        };
        Ok(check_setting(what, limit, limit > 0.0, "above 0, such as 1.0")?)
    }

    /// Returns whether the norms of whole gradients are needed.
    pub(crate) fn needs_norms(self) -> bool {
        !matches!(self, Clip::Value(_))
    }
}

//! Optimizers that a tensor library brings.

use crate::TensorLibrary;
use crate::backend::Reduced;

/// An optimizer that a tensor library brings, with one state for each replica of this process.
///
/// [`Optimizer::of_library`](crate::Optimizer::of_library) gives it the gradients of every step, summed over all
/// replicas.
pub trait LibraryOptimizer<L: TensorLibrary>: Send + Sync {
    /// Returns its name and settings, which are compared between workers.
    fn describe(&self) -> String;

    /// Updates the parameters of one local replica, whose copies are written in place or replaced.
    ///
    /// # Errors
    /// The library's error if the update fails. The replica then gets another one's parameters and state.
    fn apply(&self, local: usize, learning_rate: f64, gradients: Vec<Reduced<L>>) -> Result<(), L::Error>;

    /// Replaces the state of one local replica by another's.
    fn copy(&self, from: usize, to: usize);

    /// Serializes the state of the first replica.
    ///
    /// # Errors
    /// The library's error if it cannot be serialized.
    fn save(&self) -> Result<Vec<u8>, L::Error>;

    /// Restores the state of all replicas.
    ///
    /// # Errors
    /// The library's error if it cannot be read; no state has then changed.
    fn load(&self, state: &[u8]) -> Result<(), L::Error>;
}

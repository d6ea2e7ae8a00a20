//! Optimizers that a tensor library brings.

use distribute_strategy::Strategy;

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

    /// Serializes the state: of the first replica, or the whole if replicas have parts of it. It is `None` in processes
    /// other than the chief's that have sent it their parts. Every process calls this, outside `run`.
    ///
    /// # Errors
    /// The library's error if it cannot be serialized; the collective's if a process is missing or fails.
    fn save(&self, strategy: &Strategy) -> Result<Option<Vec<u8>>, L::Error>;

    /// Restores the state of all replicas of this process from what [`save`](LibraryOptimizer::save) has returned,
    /// under any strategy. Replicas that have parts of the state take theirs from it.
    ///
    /// # Errors
    /// The library's error if it cannot be read; no state has then changed.
    fn load(&self, state: &[u8]) -> Result<(), L::Error>;
}

//! What the adapter of a tensor library implements and calls, from all crates. Programs that train do not need it.
//!
//! - [`TensorStorage`] lends a tensor's memory to collectives, [`Element`] makes tensors elements of datasets.
//! - [`TensorLibrary`] and what belongs to it let optimizers step tensors of the library.
//! - [`Trainee`] is what the training loop drives, [`Checkpointed`] what checkpoints keep.

pub use distribute_input::{Element, ElementSpec, Pad};
pub use distribute_optim::backend::*;
pub use distribute_train::checkpoint::Checkpointed;
pub use distribute_train::trainer::{Batching, Trainee, TrainingData};
pub use distribute_values::{TensorStorage, with_storage};

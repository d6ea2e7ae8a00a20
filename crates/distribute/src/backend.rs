//! The types and functions of all crates for adapters of tensor libraries. Programs that train do not need them.
//!
//! - [`TensorStorage`] gives collectives access to a tensor's memory; [`Element`] makes tensors elements of datasets.
//! - [`TensorLibrary`] and the types around it let optimizers step tensors of the library.
//! - The training loop drives a [`Trainee`]; checkpoints keep what is [`Checkpointed`].

pub use distribute_input::{Element, ElementSpec, Pad};
pub use distribute_optim::backend::*;
pub use distribute_train::checkpoint::Checkpointed;
pub use distribute_train::trainer::{Batching, Trainee, TrainingData};
pub use distribute_values::{TensorStorage, with_storage};

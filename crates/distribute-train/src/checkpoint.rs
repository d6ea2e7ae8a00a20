//! Checkpoints: what a run needs to go on, in files that other programs read.
//!
//! ```text
//! checkpoints/latest                     the name of the newest one
//! checkpoints/step-00012000/
//!     model.safetensors                  or model-00001-of-00003.safetensors … and model.safetensors.index.json
//!     optimizer.safetensors              slots, named VARIABLE/SLOT
//!     state.json                         step, position of the input, and whatever the program adds
//!     manifest.json                      written last: size and checksum of every file
//! ```
//!
//! Tensors are stored once, under any strategy, and restored under any other. A checkpoint is written beside, synced, and then
//! renamed: a crash at any byte leaves the ones before it. One that is damaged is named in a warning, and the one before it is
//! used.
//!
//! # Examples
//! ```
//! use distribute_strategy::Strategy;
//! use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
//! use distribute_train::BoxError;
//! use distribute_values::{DistributedVariable, Host, HostTensor, VariableOptions};
//!
//! struct Counter(DistributedVariable<HostTensor>);
//!
//! impl Checkpointed for Counter {
//!     fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
//!         snapshot.put::<Host, _>("model", self.0.name(), &self.0.save(&strategy.groups())?)?;
//!         Ok(())
//!     }
//!     fn load(&self, strategy: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
//!         let saved = snapshot.get::<Host, _>("model", self.0.name(), &self.0.components()[0])?;
//!         self.0.restore(&strategy.groups(), &saved)?;
//!         Ok(())
//!     }
//! }
//!
//! # let folder = tempfile::tempdir()?;
//! let strategy = Strategy::default_strategy()?;
//! let counter = Counter(strategy.variable("count", &HostTensor::scalar(7.0), VariableOptions::default())?);
//! let mut checkpoints = CheckpointManager::new(folder.path()).keep(3);
//! assert!(checkpoints.restore::<u32>(&strategy, &[&counter])?.is_none());
//! checkpoints.save(&strategy, 100, &[&counter], &2)?;            // the program's own state: epoch 2
//! checkpoints.finish()?;
//! assert_eq!(checkpoints.restore(&strategy, &[&counter])?, Some((100, 2)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Source
//! `tf.train.CheckpointManager`; the form of the files is Hugging Face's.

mod files;
mod manager;
mod snapshot;
mod watch;

pub use manager::{CheckpointManager, Checkpointed};
pub use snapshot::Snapshot;
pub use watch::{CheckpointWatch, FoundCheckpoint, SidecarEvaluator};

#[cfg(test)]
mod tests;

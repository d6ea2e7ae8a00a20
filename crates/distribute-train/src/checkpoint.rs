//! Checkpoints: the state from which a run resumes, in files that other programs can read.
//!
//! ```text
//! checkpoints/latest                     the name of the newest one
//! checkpoints/run                        the run that the folder belongs to
//! checkpoints/step-00012000/
//!     model.safetensors                  or model-00001-of-00003.safetensors … and model.safetensors.index.json
//!     optimizer.safetensors              slots, named VARIABLE/SLOT; averages, named VARIABLE/ema
//!     state.json                         step, position of the input, and whatever the program adds
//!     manifest.json                      written last: run, step, size and checksum of every file, and its own
//! ```
//!
//! Tensors are stored once, under any strategy, and restored under any other. A checkpoint is written to a temporary
//! folder, synced, and then renamed: a crash at any byte leaves the earlier ones intact, and one of the same step is
//! replaced atomically. A damaged checkpoint is named in a warning, and the one before it is used; if all are damaged,
//! restoring is an error.
//!
//! A folder belongs to one run, from its first step to its last, over all restarts; see [`CheckpointManager`] for how a
//! run is continued and how another is started.
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
//! `tf.train.CheckpointManager`; the file format is Hugging Face's.

mod abandoned;
mod disk;
mod draft;
mod ema;
mod export;
mod folder;
mod folders;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod inflow;
mod lock;
mod manager;
mod manifest;
mod names;
mod open;
mod optimizer;
mod origin;
mod outflow;
mod pieces;
mod read;
mod restore;
mod run;
mod snapshot;
mod stored;
mod survey;
mod task;
mod tensor_file;
mod watch;
mod write;

pub use abandoned::Abandoned;
pub use export::write_safetensors;
pub(crate) use folders::Folders;
pub(crate) use manager::Held;
pub use manager::{CheckpointManager, Checkpointed};
pub use pieces::{PutBytes, TensorPieces};
pub use run::RunId;
pub use snapshot::Snapshot;
pub(crate) use task::bounded;
pub use watch::{CheckpointWatch, FoundCheckpoint, SidecarEvaluator};

/// The file of a checkpoint that holds a model's variables, without its extension.
pub const MODEL: &str = "model";

/// The file of a checkpoint that holds optimizers' slots and averages, without its extension.
pub const OPTIMIZER: &str = "optimizer";

#[cfg(all(test, unix))]
mod simulation;
#[cfg(test)]
mod tests;

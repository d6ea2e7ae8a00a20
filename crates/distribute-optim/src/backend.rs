//! The types and functions for adapters of tensor libraries. Programs that train do not need them.
//!
//! An adapter implements [`TensorLibrary`] for its own marker type. It passes a model's variables as [`Parameters`],
//! and each variable reports its gradient to a [`Tape`] while backward runs. [`DeviceExchange`] is for tensors in an
//! accelerator's memory; libraries without such tensors use [`NoDevices`]. With the feature `cuda`, `GpuUpdater`
//! carries out its updates on NVIDIA GPUs.
//!
//! Under a strategy that shards parameters an adapter creates large variables by [`Variable::sharded`], with the
//! layout of [`ShardLayout::of`] and the parts of [`scatter_whole`]. It gathers the whole when the model uses it
//! ([`start_gather`]), drops it afterwards, and reports the whole gradient to the tape. Everything else is the
//! optimizer's: it reduces the gradient to parts, updates the replica's part, and its slots are parts too.

pub use crate::agreement::{check_and_share, compare, share};
#[cfg(feature = "cuda")]
pub use crate::gpu::{GpuUpdater, GpuVariable};
pub use crate::gradient::Reduced;
pub use crate::library::{DeviceExchange, DeviceOutcome, DeviceStep, DeviceUpdate, NoDevices, TensorLibrary, is_short};
pub use crate::optimizer::LibraryOptimizer;
#[cfg(feature = "hlo")]
pub use crate::optimizer::{ProgramOptimizer, ProgramStep, ProgramUpdate, ProgramVariable};
pub use crate::parameters::{Parameters, Variable, overwrite, overwrite_parts};
pub use crate::plan::{Plan, warn_untrained};
pub use crate::shard_layout::ShardLayout;
pub use crate::sharding::{Gathering, scatter_whole, scatter_wholes, start_gather};
pub use crate::step_counts::StepCounts;
pub use crate::tape::{Gradient, Sink, Tape};
pub use crate::tensor_split::{Pieces, TensorSplit, tensor_group_of};

//! The types and functions for adapters of tensor libraries. Programs that train do not need them.
//!
//! An adapter implements [`TensorLibrary`] for its own marker type. It passes a model's variables as [`Parameters`],
//! and each variable reports its gradient to a [`Tape`] while backward runs. [`DeviceExchange`] is for tensors in an
//! accelerator's memory; libraries without such tensors use [`NoDevices`].

pub use crate::agreement::{check_and_share, share};
pub use crate::gradient::Reduced;
pub use crate::library::{DeviceExchange, DeviceUpdate, NoDevices, TensorLibrary, is_short};
pub use crate::parameters::{Parameters, Variable, overwrite};
pub use crate::plan::{Plan, warn_untrained};
pub use crate::step_counts::StepCounts;
pub use crate::tape::{Sink, Tape};
pub use crate::tensor_split::{Pieces, TensorSplit};

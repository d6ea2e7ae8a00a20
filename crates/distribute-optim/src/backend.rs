//! What the adapter of a tensor library implements and calls. Programs that train do not need it.
//!
//! An adapter implements [`TensorLibrary`] for a marker type of its own. It hands a model's variables over as [`Parameters`],
//! and each variable reports its gradient to a [`Tape`] while backward runs. [`DeviceExchange`] is for tensors in an
//! accelerator's memory; libraries without such tensors take [`NoDevices`].

pub use crate::agreement::{check_and_share, share};
pub use crate::gradient::Reduced;
pub use crate::library::{DeviceExchange, DeviceUpdate, NoDevices, TensorLibrary, is_short};
pub use crate::parameters::{Parameters, Variable, overwrite};
pub use crate::plan::{Plan, warn_untrained};
pub use crate::step_counts::StepCounts;
pub use crate::tape::{Sink, Tape};

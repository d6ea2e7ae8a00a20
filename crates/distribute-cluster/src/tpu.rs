//! Cloud TPU: the hosts of a slice as a cluster, and its cores as devices of replicas.
//!
//! - [`TpuResolver`] finds the hosts; [`TpuTarget`] says of which TPU.
//! - [`AcceleratorType`] turns names such as `v4-32` into numbers of chips and cores.
//! - [`Topology`] and [`DeviceAssignment`] say which core of the mesh belongs to which task and replica.
//!
//! Endpoints are worker servers of this library on the hosts of a TPU VM, each of which uses the TPU of its host.
//! TensorFlow's own workers, on TPU nodes, run TensorFlow's graphs and cannot be used.

mod accelerator;
mod assignment;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod node;
mod options;
mod pci;
mod resolver;
mod ring;
mod slice;
mod source;
mod target;
mod topology;

pub use accelerator::AcceleratorType;
pub use assignment::{AssignmentOptions, DeviceAssignment, DeviceOrder};
pub use node::TpuApi;
pub use options::{Coordinator, TpuOptions};
pub use resolver::TpuResolver;
pub use target::TpuTarget;
pub use topology::{Coordinates, Topology, TpuCore};

/// The port of worker servers, as in TensorFlow.
pub const PORT: u16 = 8470;

/// Returns the number of TPU chips on this machine's PCI bus, or `None` if there are none.
///
/// Programs that open libtpu need it: without chips, libtpu must be told to ask no metadata server
/// (`TPU_SKIP_MDS_QUERY=1`).
///
/// # Examples
/// ```
/// match distribute_cluster::tpu::local_chips() {
///     Some(chips) => println!("{chips} TPU chips"),
///     None => println!("no TPU"),
/// }
/// ```
#[must_use]
pub fn local_chips() -> Option<u32> {
    pci::chips(std::path::Path::new(pci::DEVICES)).map(|(chips, _)| chips)
}

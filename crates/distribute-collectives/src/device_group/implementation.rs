//! The backends that a user can ask for.

/// Backend of collectives on devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceImplementation {
    /// The best for the devices: NCCL where every rank has a GPU of its own, kernels in the GPUs' memory where the
    /// ranks are in one process, otherwise the host.
    #[default]
    Auto,
    /// NVIDIA's collectives. Where they cannot be used, that is said once, and `Auto` chooses.
    Nccl,
    /// Kernels that read and write the memory of all GPUs of a process; between processes the host.
    Kernels,
    /// Copies to pinned memory of the host, and the collectives of [`ProcessGroup`](crate::ProcessGroup) there.
    Host,
}

//! The backends that a user can request.

/// The backend of collectives on devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceImplementation {
    /// The best for the devices: NCCL if every rank has its own GPU, kernels in the GPUs' memory if the ranks are in
    /// one process, otherwise the host.
    #[default]
    Auto,
    /// NVIDIA's collectives. If they cannot be used, this is logged once, and `Auto` chooses. Ranks that share a GPU
    /// need NCCL 2.30 or newer and `NCCL_MULTI_RANK_GPU_ENABLE=1` in every process.
    Nccl,
    /// Kernels that read and write the memory of all GPUs of a process; between processes, the host.
    Kernels,
    /// Copies to pinned host memory, and the collectives of [`ProcessGroup`](crate::ProcessGroup) there.
    Host,
}

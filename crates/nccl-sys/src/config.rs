//! Settings of a communicator.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::marker::PhantomData;
use std::ptr;

use crate::Version;

/// `ncclConfig_t`: the settings of a communicator to be created; NCCL chooses those that are not set.
///
/// A new value has the size and version of NCCL 2.18, which every newer NCCL accepts. Each setting introduced later
/// raises both, and a call with an NCCL that does not support it is an error of this crate; NCCL itself would ignore
/// the setting.
///
/// # Examples
/// ```
/// use nccl_sys::{Config, Version};
///
/// let config = Config::new().blocking(false).net_name(c"Socket");
/// assert_eq!(config.version(), Version::new(2, 18, 0));
/// assert_eq!(config.comm_name(c"gradients").version(), Version::new(2, 27, 0));
/// ```
///
/// # Source
/// `ncclConfig_t` and `NCCL_CONFIG_INITIALIZER` of nccl.h, 2.18 to 2.30.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Config<'a> {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
    graph_usage_mode: c_int,
    rma_contexts: c_int,
    max_p2p_peers: c_int,
    texts: PhantomData<&'a CStr>,
}

impl<'a> Config<'a> {
    /// `NCCL_CONFIG_UNDEF_INT`: NCCL chooses the value.
    const UNDEFINED: c_int = c_int::MIN;
    /// `NCCL_API_MAGIC`.
    const MAGIC: c_uint = 0xcafe_beef;

    /// Creates a configuration without settings.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            size: 48,
            magic: Self::MAGIC,
            version: Version::OLDEST.code() as c_uint,
            blocking: Self::UNDEFINED,
            cga_cluster_size: Self::UNDEFINED,
            min_ctas: Self::UNDEFINED,
            max_ctas: Self::UNDEFINED,
            net_name: ptr::null(),
            split_share: Self::UNDEFINED,
            traffic_class: Self::UNDEFINED,
            comm_name: ptr::null(),
            collnet_enable: Self::UNDEFINED,
            cta_policy: Self::UNDEFINED,
            shrink_share: Self::UNDEFINED,
            nvls_ctas: Self::UNDEFINED,
            channels_per_net_peer: Self::UNDEFINED,
            nvlink_centric_sched: Self::UNDEFINED,
            graph_usage_mode: Self::UNDEFINED,
            rma_contexts: Self::UNDEFINED,
            max_p2p_peers: Self::UNDEFINED,
            texts: PhantomData,
        }
    }

    /// Sets whether calls return when they are done (NCCL's default), or at once with
    /// [`Progress::InProgress`](crate::Progress).
    #[must_use]
    pub const fn blocking(mut self, blocking: bool) -> Self {
        self.blocking = blocking as c_int;
        self
    }

    /// Sets the number of blocks of a thread block cluster, 0 to 8; for compute capability 9.0 and newer.
    #[must_use]
    pub const fn cga_cluster_size(mut self, blocks: c_int) -> Self {
        self.cga_cluster_size = blocks;
        self
    }

    /// Sets the smallest and the largest number of blocks (streaming multiprocessors) of a kernel.
    ///
    /// Both are set together, because NCCL treats an unset maximum as one below the minimum.
    #[must_use]
    pub const fn ctas(mut self, min: c_int, max: c_int) -> Self {
        self.min_ctas = min;
        self.max_ctas = max;
        self
    }

    /// Sets the network, such as `Socket` or `IB`, or the name of a plugin.
    #[must_use]
    pub const fn net_name(mut self, name: &'a CStr) -> Self {
        self.net_name = name.as_ptr();
        self
    }

    /// Sets whether communicators that are split off share this one's resources.
    #[must_use]
    pub const fn split_share(mut self, share: bool) -> Self {
        self.split_share = share as c_int;
        self
    }

    /// Sets the traffic class of InfiniBand or RoCE. Since 2.26.
    #[must_use]
    pub const fn traffic_class(mut self, class: c_int) -> Self {
        self.traffic_class = class;
        self.at_least(Version::new(2, 26, 0), 48)
    }

    /// Sets a name for NCCL's logs. Since 2.27.
    #[must_use]
    pub const fn comm_name(mut self, name: &'a CStr) -> Self {
        self.comm_name = name.as_ptr();
        self.at_least(Version::new(2, 27, 0), 72)
    }

    /// Enables reductions in network switches (SHARP). Since 2.27.
    #[must_use]
    pub const fn collnet_enable(mut self, enable: bool) -> Self {
        self.collnet_enable = enable as c_int;
        self.at_least(Version::new(2, 27, 0), 72)
    }

    /// Sets `NCCL_CTA_POLICY_*`: 0 default, 1 efficiency, 2 (since 2.28) no blocks where possible. Since 2.27.
    #[must_use]
    pub const fn cta_policy(mut self, policy: c_int) -> Self {
        self.cta_policy = policy;
        self.at_least(Version::new(2, 27, 0), 72)
    }

    /// Sets whether a shrunk communicator shares this one's resources. Since 2.27.
    #[must_use]
    pub const fn shrink_share(mut self, share: bool) -> Self {
        self.shrink_share = share as c_int;
        self.at_least(Version::new(2, 27, 0), 72)
    }

    /// Sets the number of blocks of kernels that use NVLink's switch. Since 2.27.
    #[must_use]
    pub const fn nvls_ctas(mut self, ctas: c_int) -> Self {
        self.nvls_ctas = ctas;
        self.at_least(Version::new(2, 27, 0), 72)
    }

    /// Sets the number of channels to each peer over the network. Since 2.28.
    #[must_use]
    pub const fn channels_per_net_peer(mut self, channels: c_int) -> Self {
        self.channels_per_net_peer = channels;
        self.at_least(Version::new(2, 28, 0), 80)
    }

    /// Enables NVLink-centric scheduling of point-to-point operations. Since 2.28.
    #[must_use]
    pub const fn nvlink_centric_sched(mut self, enable: bool) -> Self {
        self.nvlink_centric_sched = enable as c_int;
        self.at_least(Version::new(2, 28, 0), 80)
    }

    /// Sets the use of captured graphs: 0 none, 1 one at a time, 2 several, mixed with direct calls. Since 2.29.
    #[must_use]
    pub const fn graph_usage_mode(mut self, mode: c_int) -> Self {
        self.graph_usage_mode = mode;
        self.at_least(Version::new(2, 29, 0), 88)
    }

    /// Sets the number of contexts of one-sided operations. Since 2.29.
    #[must_use]
    pub const fn rma_contexts(mut self, contexts: c_int) -> Self {
        self.rma_contexts = contexts;
        self.at_least(Version::new(2, 29, 0), 88)
    }

    /// Sets the largest number of point-to-point peers of a rank. Since 2.30.
    #[must_use]
    pub const fn max_p2p_peers(mut self, peers: c_int) -> Self {
        self.max_p2p_peers = peers;
        self.at_least(Version::new(2, 30, 0), 96)
    }

    /// Returns the oldest NCCL version that supports every setting.
    #[must_use]
    pub const fn version(&self) -> Version {
        Version::from_code(self.version as c_int)
    }

    const fn at_least(mut self, version: Version, size: usize) -> Self {
        if self.size < size {
            self.size = size;
        }
        if self.version().code() < version.code() {
            self.version = version.code() as c_uint;
        }
        self
    }
}

impl Default for Config<'_> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests;

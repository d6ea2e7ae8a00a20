//! One range of memory that CUDA manages.

use std::alloc::{Layout, dealloc};
use std::ptr;
use std::sync::Arc;

use super::window;
use crate::device::devices;
use crate::pool::Pool;

/// A live allocation.
#[derive(Clone)]
pub(crate) struct Allocation {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    /// Handle of the context that allocated it.
    pub(crate) context: usize,
    pub(crate) owner: Owner,
    /// Whether its release is queued in a stream.
    pub(crate) ending: bool,
}

#[derive(Clone)]
pub(crate) enum Owner {
    Device {
        /// Ordinal.
        device: usize,
        pool: Option<Arc<Pool>>,
    },
    /// Host memory that CUDA allocated.
    Pinned { layout: Layout, flags: u32 },
    /// Host memory that the caller allocated and registered.
    Registered { flags: u32 },
}

impl Allocation {
    /// Returns the ordinal of the device that owns the memory, if any.
    pub(crate) fn device(&self) -> Option<usize> {
        match self.owner {
            Owner::Device { device, .. } => Some(device),
            Owner::Pinned { .. } | Owner::Registered { .. } => None,
        }
    }

    pub(crate) fn end_address(&self) -> usize {
        self.start + self.bytes
    }

    /// Releases the memory. Called once, after the allocation was removed from the map.
    pub(super) fn end(&self) {
        match &self.owner {
            Owner::Device { device, pool } => {
                let device = &devices()[*device];
                device.window.unmap(self.start, self.bytes);
                let taken = window::aligned(self.bytes).expect("it was rounded up when it began") as u64;
                device.give_back(taken);
                if let Some(pool) = pool {
                    pool.count_given_back(taken);
                }
            }
            Owner::Pinned { layout, .. } => {
                // SAFETY: `host::allocate` allocated it with this layout, and it is no longer in the map.
                unsafe { dealloc(ptr::with_exposed_provenance_mut(self.start), *layout) };
            }
            Owner::Registered { .. } => {}
        }
    }
}

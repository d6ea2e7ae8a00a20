//! One range of memory that CUDA knows.

use std::alloc::{Layout, dealloc};
use std::ptr;
use std::sync::Arc;

use super::window;
use crate::pool::Pool;
use crate::simulator::simulator;

/// A live allocation.
#[derive(Clone)]
pub(crate) struct Allocation {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    /// Handle of the context that allocated it.
    pub(crate) context: usize,
    pub(crate) owner: Owner,
    /// Its end is queued in a stream.
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
    /// Ordinal of the device whose memory it is.
    pub(crate) fn device(&self) -> Option<usize> {
        match self.owner {
            Owner::Device { device, .. } => Some(device),
            Owner::Pinned { .. } | Owner::Registered { .. } => None,
        }
    }

    pub(crate) fn end_address(&self) -> usize {
        self.start + self.bytes
    }

    /// Gives the memory back. It is out of the map already, so this happens once.
    pub(super) fn end(&self) {
        match &self.owner {
            Owner::Device { device, pool } => {
                let device = &simulator().devices[*device];
                device.window.unmap(self.start, self.bytes);
                let taken = window::aligned(self.bytes).expect("it was rounded up when it began") as u64;
                device.give_back(taken);
                if let Some(pool) = pool {
                    pool.count_given_back(taken);
                }
            }
            Owner::Pinned { layout, .. } => {
                // SAFETY: `host::allocate` got it with this layout, and it is in the map no longer.
                unsafe { dealloc(ptr::with_exposed_provenance_mut(self.start), *layout) };
            }
            Owner::Registered { .. } => {}
        }
    }
}

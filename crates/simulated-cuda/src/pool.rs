//! Memory pools: access to their memory, and the amount in use.

use std::collections::BTreeSet;
use std::sync::Mutex;

use crate::error::{Code, Result};
use crate::registry::{Registry, locked};

/// A memory pool of one device. It keeps no freed memory: freed memory is available at once.
pub(crate) struct Pool {
    pub(crate) handle: usize,
    /// Ordinal of its device.
    pub(crate) device: usize,
    state: Mutex<State>,
}

struct State {
    used_bytes: u64,
    most_bytes: u64,
    release_threshold_bytes: u64,
    /// The three reuse policies, which have no effect here.
    reuse: [i32; 3],
    /// Ordinals of other devices whose kernels may access its memory.
    access: BTreeSet<usize>,
}

/// The value of an attribute: an `int` or 64 bits.
pub(crate) enum Attribute {
    Int(i32),
    Long(u64),
}

/// All pools, by handle.
pub(crate) static POOLS: Registry<Pool> = Registry::new();

impl Pool {
    pub(crate) fn new(handle: usize, device: usize) -> Self {
        let state =
            State { used_bytes: 0, most_bytes: 0, release_threshold_bytes: 0, reuse: [1; 3], access: BTreeSet::new() };
        Self { handle, device, state: Mutex::new(state) }
    }

    pub(crate) fn count_taken(&self, bytes: u64) {
        let mut state = locked(&self.state);
        state.used_bytes += bytes;
        state.most_bytes = state.most_bytes.max(state.used_bytes);
    }

    pub(crate) fn count_given_back(&self, bytes: u64) {
        locked(&self.state).used_bytes -= bytes;
    }

    /// Grants or revokes kernels of a device access to this memory.
    pub(crate) fn set_access(&self, device: usize, allowed: bool) {
        let mut state = locked(&self.state);
        if allowed {
            state.access.insert(device);
        } else {
            state.access.remove(&device);
        }
    }

    pub(crate) fn allows(&self, device: usize) -> bool {
        device == self.device || locked(&self.state).access.contains(&device)
    }

    pub(crate) fn attribute(&self, attribute: u32) -> Result<Attribute> {
        let state = locked(&self.state);
        Ok(match attribute {
            1..=3 => Attribute::Int(state.reuse[attribute as usize - 1]),
            4 => Attribute::Long(state.release_threshold_bytes),
            5 | 7 => Attribute::Long(state.used_bytes),
            6 | 8 => Attribute::Long(state.most_bytes),
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    pub(crate) fn set_attribute(&self, attribute: u32, value: &Attribute) -> Result {
        let mut state = locked(&self.state);
        match (attribute, value) {
            (1..=3, Attribute::Int(value)) => state.reuse[attribute as usize - 1] = *value,
            (4, Attribute::Long(bytes)) => state.release_threshold_bytes = *bytes,
            // The high-water marks can only be reset.
            (6 | 8, Attribute::Long(0)) => state.most_bytes = state.used_bytes,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }
}

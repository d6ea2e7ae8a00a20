//! Pinned and registered host memory.

use std::alloc::{Layout, alloc};

use super::{Allocation, Memory, Owner, POISON};
use crate::context::Context;
use crate::error::{Code, Result};

impl Memory {
    /// `cuMemHostAlloc`.
    pub(crate) fn allocate_host(&self, context: &Context, bytes: usize, flags: u32) -> Result<usize> {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let layout = Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| Code::OUT_OF_MEMORY)?;
        // SAFETY: the layout has a size, as was just checked.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return Err(Code::OUT_OF_MEMORY);
        }
        // SAFETY: it was just allocated with `bytes` bytes.
        unsafe { start.write_bytes(POISON, bytes) };
        let start = start.expose_provenance();
        let owner = Owner::Pinned { layout, flags };
        self.write().insert(start, Allocation { start, bytes, context: context.handle, owner, ending: false });
        Ok(start)
    }

    /// `cuMemHostRegister`.
    pub(crate) fn register_host(&self, context: &Context, start: usize, bytes: usize, flags: u32) -> Result {
        let end = start.checked_add(bytes).filter(|_| start != 0 && bytes != 0).ok_or(Code::INVALID_VALUE)?;
        if super::device_of(start).is_some() {
            return Err(Code::INVALID_VALUE);
        }
        let mut live = self.write();
        if live.range(..end).next_back().is_some_and(|(_, before)| before.end_address() > start) {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let owner = Owner::Registered { flags };
        live.insert(start, Allocation { start, bytes, context: context.handle, owner, ending: false });
        Ok(())
    }

    /// `cuMemFreeHost`.
    pub(crate) fn free_host(&self, start: usize) -> Result {
        let ended = self.remove_if(start, |owner| matches!(owner, Owner::Pinned { .. })).ok_or(Code::INVALID_VALUE)?;
        ended.end();
        Ok(())
    }

    /// `cuMemHostUnregister`.
    pub(crate) fn unregister_host(&self, start: usize) -> Result {
        let registered = |owner: &Owner| matches!(owner, Owner::Registered { .. });
        self.remove_if(start, registered).map(drop).ok_or(Code::HOST_MEMORY_NOT_REGISTERED)
    }

    /// Returns the flags of the host memory at an address.
    pub(crate) fn host_flags(&self, address: usize) -> Result<u32> {
        match self.live().find(address).map(|found| &found.owner) {
            Some(Owner::Pinned { flags, .. } | Owner::Registered { flags }) => Ok(*flags),
            Some(Owner::Device { .. }) | None => Err(Code::INVALID_VALUE),
        }
    }

    fn remove_if(&self, start: usize, wanted: impl Fn(&Owner) -> bool) -> Option<Allocation> {
        let mut live = self.write();
        if !wanted(&live.get(&start)?.owner) {
            return None;
        }
        live.remove(&start)
    }
}

/// Pinned memory consists of pages.
const ALIGNMENT: usize = 4096;

//! Allocations, and every access to them.

mod allocation;
mod host;
mod window;

use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::context::Context;
use crate::device::{Device, devices};
use crate::error::{Code, Result};
use crate::pool::Pool;

pub(crate) use allocation::{Allocation, Owner};
pub(crate) use window::Window;

/// The byte that new device memory is filled with, so that a kernel that reads unwritten memory computes nonsense.
pub const POISON: u8 = 0xA5;

/// All allocations, by first address. The lock is held shared while their bytes are read or written, so that none is
/// freed meanwhile.
pub(crate) struct Memory {
    live: RwLock<BTreeMap<usize, Allocation>>,
}

/// The allocations, which stay allocated while this is held.
pub(crate) struct Live<'a>(RwLockReadGuard<'a, BTreeMap<usize, Allocation>>);

/// The kind of memory that an address may point to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Memory of a device, or pinned host memory.
    Device,
    /// Memory that no device owns.
    Host,
    Any,
}

/// The memory that CUDA manages in this process.
pub(crate) static MEMORY: Memory = Memory::new();

impl Memory {
    const fn new() -> Self {
        Self { live: RwLock::new(BTreeMap::new()) }
    }

    /// Allocates on the context's device.
    pub(crate) fn allocate(&self, context: &Context, bytes: usize, pool: Option<Arc<Pool>>) -> Result<usize> {
        let device = pool.as_ref().map_or(context.device(), |pool| &devices()[pool.device]);
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let taken = window::aligned(bytes).ok_or(Code::OUT_OF_MEMORY)? as u64;
        device.take(taken)?;
        let Some(start) = device.window.map(bytes) else {
            device.give_back(taken);
            return Err(Code::OUT_OF_MEMORY);
        };
        if let Some(pool) = &pool {
            pool.count_taken(taken);
        }
        // SAFETY: the window has just mapped at least `taken` bytes there, and nothing else uses the address.
        unsafe { ptr::write_bytes(ptr::with_exposed_provenance_mut::<u8>(start), POISON, taken as usize) };
        let owner = Owner::Device { device: device.ordinal, pool };
        self.write().insert(start, Allocation { start, bytes, context: context.handle, owner, ending: false });
        Ok(start)
    }

    /// Marks a device allocation as being freed.
    ///
    /// # Errors
    /// `INVALID_VALUE` if none starts at the address, or if it is marked already.
    pub(crate) fn announce_end(&self, address: usize) -> Result {
        let mut live = self.write();
        let found = live.get_mut(&address).filter(|found| found.device().is_some() && !found.ending);
        found.ok_or(Code::INVALID_VALUE)?.ending = true;
        Ok(())
    }

    /// Frees a device allocation.
    pub(crate) fn free(&self, address: usize) -> Result {
        let mut live = self.write();
        if live.get(&address).is_none_or(|found| found.device().is_none()) {
            return Err(Code::INVALID_VALUE);
        }
        let removed = live.remove(&address);
        drop(live);
        removed.iter().for_each(Allocation::end);
        Ok(())
    }

    /// Frees the allocations of a context; memory of pools belongs to the device.
    pub(crate) fn free_all(&self, context: usize) {
        let owned = |allocation: &Allocation| {
            allocation.context == context && !matches!(allocation.owner, Owner::Device { pool: Some(_), .. })
        };
        let ended: Vec<_> =
            self.write().extract_if(.., |_, allocation| owned(allocation)).map(|(_, found)| found).collect();
        ended.iter().for_each(Allocation::end);
    }

    pub(crate) fn live(&self) -> Live<'_> {
        Live(self.live.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<usize, Allocation>> {
        self.live.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Live<'_> {
    /// Returns the allocation that contains an address.
    pub(crate) fn find(&self, address: usize) -> Option<&Allocation> {
        self.0.range(..=address).next_back().map(|(_, found)| found).filter(|found| address < found.end_address())
    }

    /// Checks that a number that may be an address may be passed to a kernel of `context`. Only addresses of devices
    /// are checked, and the end of an allocation is accepted.
    ///
    /// # Errors
    /// A description of what it points to instead.
    pub(crate) fn check_argument(&self, context: &Context, number: usize) -> std::result::Result<(), &'static str> {
        if device_of(number).is_none_or(|device| !device.window.has_used(number)) {
            return Ok(());
        }
        let found = self.0.range(..=number).next_back().map(|(_, found)| found);
        let found = found.filter(|found| number <= found.end_address());
        let reached = match &found.ok_or("memory that is not, or no longer, allocated")?.owner {
            Owner::Device { pool: Some(pool), .. } => pool.allows(context.device),
            Owner::Device { device, pool: None } => {
                *device == context.device || found.is_some_and(|found| context.has_peer(found.context))
            }
            Owner::Pinned { .. } | Owner::Registered { .. } => true,
        };
        if reached { Ok(()) } else { Err("memory of another device, which gives no access") }
    }

    /// Checks the range of an access.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the range is not within one allocation, or not in the given kind of memory.
    pub(crate) fn check(&self, address: usize, bytes: usize, place: MemoryKind) -> Result {
        let end = address.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let inside = self.find(address).is_some_and(|found| end <= found.end_address());
        let valid = match place {
            MemoryKind::Device => inside,
            MemoryKind::Host => device_of(address).is_none() && address != 0,
            MemoryKind::Any => address != 0 && (inside || device_of(address).is_none()),
        };
        if valid { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    /// Copies bytes; the ranges may overlap.
    pub(crate) fn copy(&self, to: (usize, MemoryKind), from: (usize, MemoryKind), bytes: usize) -> Result {
        self.check(to.0, bytes, to.1)?;
        self.check(from.0, bytes, from.1)?;
        let source = ptr::with_exposed_provenance::<u8>(from.0);
        // SAFETY: ranges of devices are allocated, as was just checked, and stay so while this lock is held; ranges of
        // the host are valid until the copy ends, as C callers promise. Nothing here holds a reference to either.
        unsafe { ptr::copy(source, ptr::with_exposed_provenance_mut(to.0), bytes) };
        Ok(())
    }

    /// Fills memory with a pattern of 1, 2 or 4 bytes.
    pub(crate) fn fill(&self, address: usize, pattern: &[u8], count: usize) -> Result {
        let bytes = count.checked_mul(pattern.len()).ok_or(Code::INVALID_VALUE)?;
        self.check(address, bytes, MemoryKind::Device)?;
        let start = ptr::with_exposed_provenance_mut::<u8>(address);
        if let [byte] = pattern {
            // SAFETY: the range is allocated, as was just checked, and stays so while this lock is held.
            unsafe { ptr::write_bytes(start, *byte, bytes) };
            return Ok(());
        }
        for offset in (0..bytes).step_by(pattern.len()) {
            // SAFETY: the offset is less than `bytes`, all of which are allocated.
            let place = unsafe { start.add(offset) };
            // SAFETY: a pattern fits there, and the pattern is a slice of our own.
            unsafe { ptr::copy_nonoverlapping(pattern.as_ptr(), place, pattern.len()) };
        }
        Ok(())
    }
}

/// Returns the device whose address range contains an address, whether or not memory is allocated there.
pub(crate) fn device_of(address: usize) -> Option<&'static Device> {
    devices().iter().find(|device| device.window.contains(address))
}

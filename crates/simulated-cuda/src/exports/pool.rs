//! Memory pools and stream-ordered memory.

use std::sync::Arc;

use crate::context::{CONTEXTS, Context};
use crate::device::{device, devices};
use crate::error::{Code, Result};
use crate::ffi::{Array, Out, exports};
use crate::memory::MEMORY;
use crate::pool::{Attribute, POOLS, Pool};
use crate::registry::locked;
use crate::settings::settings;
use crate::stream::{Stream, drain, stream};
use crate::work::Work;

/// `CUmemLocation`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Location {
    kind: u32,
    id: i32,
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: Location,
    flags: u32,
}

/// The beginning of `CUmemPoolProps`; the rest depends on the version.
#[repr(C)]
struct Properties {
    allocation: u32,
    handle_types: u32,
    location: Location,
}

exports! {
    fn cuDeviceGetDefaultMemPool(found: Out<usize>, ordinal: i32) {
        found.set(with_pools(device(ordinal)?)?.default_pool.handle)
    }

    fn cuDeviceGetMemPool(found: Out<usize>, ordinal: i32) {
        found.set(locked(&with_pools(device(ordinal)?)?.current_pool).handle)
    }

    fn cuDeviceSetMemPool(ordinal: i32, handle: usize) {
        let (device, pool) = (device(ordinal)?, pool(handle)?);
        if pool.device != device.ordinal {
            return Err(Code::INVALID_VALUE);
        }
        *locked(&device.current_pool) = pool;
        Ok(())
    }

    fn cuMemPoolCreate(created: Out<usize>, properties: Array<Properties>) {
        let properties = &properties.items(1)?[0];
        // Pinned memory of a device, the only kind of pool that is supported.
        if properties.allocation != 1 || properties.location.kind != DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        let ordinal = with_pools(device(properties.location.id)?)?.ordinal;
        created.set(POOLS.insert(|handle| Pool::new(handle, ordinal)).handle)
    }

    fn cuMemPoolDestroy(handle: usize) {
        let pool = pool(handle)?;
        let device = &devices()[pool.device];
        if device.default_pool.handle == handle {
            return Err(Code::INVALID_VALUE);
        }
        let mut current = locked(&device.current_pool);
        if current.handle == handle {
            *current = device.default_pool.clone();
        }
        POOLS.remove(handle);
        Ok(())
    }

    fn cuMemPoolTrimTo(handle: usize, _keep: usize) {
        pool(handle).map(drop)
    }

    fn cuMemPoolGetAttribute(handle: usize, attribute: u32, value: Out<u8>) {
        match pool(handle)?.attribute(attribute)? {
            Attribute::Int(number) => value.cast::<i32>().set(number),
            Attribute::Long(number) => value.cast::<u64>().set(number),
        }
    }

    fn cuMemPoolSetAttribute(handle: usize, attribute: u32, value: Out<u8>) {
        let value = match attribute {
            1..=3 => Attribute::Int(value.cast().value()?),
            _ => Attribute::Long(value.cast().value()?),
        };
        pool(handle)?.set_attribute(attribute, &value)
    }

    fn cuMemPoolSetAccess(handle: usize, changes: Array<Access>, count: usize) {
        let pool = pool(handle)?;
        let owner = &devices()[pool.device];
        for change in changes.items(count)? {
            if change.location.kind != DEVICE || !matches!(change.flags, NO_ACCESS | READ_AND_WRITE) {
                return Err(Code::INVALID_VALUE);
            }
            let device = device(change.location.id)?;
            let allowed = change.flags == READ_AND_WRITE;
            match device.ordinal == owner.ordinal {
                // The device itself always has access.
                true if !allowed => return Err(Code::INVALID_VALUE),
                false if allowed && !device.reaches(owner) => return Err(Code::INVALID_DEVICE),
                _ => pool.set_access(device.ordinal, allowed),
            }
        }
        Ok(())
    }

    fn cuMemPoolGetAccess(flags: Out<u32>, handle: usize, location: Out<Location>) {
        let (pool, location) = (pool(handle)?, location.value()?);
        if location.kind != DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        flags.set(if pool.allows(device(location.id)?.ordinal) { READ_AND_WRITE } else { NO_ACCESS })
    }

    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, handle: usize) {
        let stream = stream(handle)?;
        let pool = locked(&with_pools(stream.context.device())?.current_pool).clone();
        address.set(allocate(&stream, bytes, &pool)?)
    }

    fn cuMemAllocFromPoolAsync(address: Out<u64>, bytes: usize, source: usize, handle: usize) {
        let (stream, pool) = (stream(handle)?, pool(source)?);
        address.set(allocate(&stream, bytes, &pool)?)
    }

    fn cuMemFreeAsync(address: u64, handle: usize) {
        let stream = stream(handle)?;
        with_pools(stream.context.device())?;
        stream.context.check()?;
        if stream.capture().is_some() {
            stream.invalidate_capture();
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        MEMORY.announce_end(address as usize)?;
        stream.enqueue(Work::Free { address: address as usize })
    }
}

/// Allocates memory whose address is returned at once, although the device has it only in stream order: a use that is
/// too early is not detected.
fn allocate(stream: &Stream, bytes: usize, pool: &Arc<Pool>) -> Result<u64> {
    stream.context.check()?;
    if stream.capture().is_some() {
        stream.invalidate_capture();
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let allocated = match MEMORY.allocate(&stream.context, bytes, Some(pool.clone())) {
        Err(Code::OUT_OF_MEMORY) => {
            // Queued work may free enough memory, which the driver waits for as well.
            let same_device = |context: &Arc<Context>| context.device == pool.device;
            CONTEXTS.all().iter().filter(|context| same_device(context)).try_for_each(|it| drain(it))?;
            MEMORY.allocate(&stream.context, bytes, Some(pool.clone()))
        }
        other => other,
    };
    Ok(allocated? as u64)
}

fn pool(handle: usize) -> Result<Arc<Pool>> {
    POOLS.get(handle).ok_or(Code::INVALID_VALUE)
}

fn with_pools(device: &'static crate::device::Device) -> Result<&'static crate::device::Device> {
    if settings().pools { Ok(device) } else { Err(Code::NOT_SUPPORTED) }
}

const DEVICE: u32 = 1;
const NO_ACCESS: u32 = 0;
const READ_AND_WRITE: u32 = 3;

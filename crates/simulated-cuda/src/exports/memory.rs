//! Memory of devices and pinned memory of the host.

use crate::context::{CONTEXTS, current};
use crate::error::{Code, Result};
use crate::ffi::{Address, Array, Out, exports};
use crate::graph::refuse_unsafe_call;
use crate::memory::{MEMORY, Owner};
use crate::stream::drain;

exports! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = current()?;
        free.set(context.device().free_bytes() as usize)?;
        total.set(context.device().total_bytes as usize)
    }

    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        let context = current()?;
        refuse_unsafe_call()?;
        address.set(MEMORY.allocate(&context, bytes, None)? as u64)
    }

    fn cuMemFree_v2(address: u64) {
        current()?;
        refuse_unsafe_call()?;
        if address == 0 {
            return Ok(());
        }
        MEMORY.announce_end(address as usize)?;
        drain_user(address as usize)?;
        MEMORY.free(address as usize)
    }

    fn cuMemGetAddressRange_v2(start: Out<u64>, bytes: Out<usize>, address: u64) {
        current()?;
        let live = MEMORY.live();
        let found = live.find(address as usize).ok_or(Code::NOT_FOUND)?;
        start.set_if_wanted(found.start as u64);
        bytes.set_if_wanted(found.bytes);
        Ok(())
    }

    fn cuMemHostAlloc(address: Out<usize>, bytes: usize, flags: u32) {
        let context = current()?;
        refuse_unsafe_call()?;
        if flags > HOST_FLAGS {
            return Err(Code::INVALID_VALUE);
        }
        address.set(MEMORY.allocate_host(&context, bytes, flags)?)
    }

    fn cuMemAllocHost_v2(address: Out<usize>, bytes: usize) {
        let context = current()?;
        refuse_unsafe_call()?;
        address.set(MEMORY.allocate_host(&context, bytes, 0)?)
    }

    fn cuMemFreeHost(address: Address) {
        current()?;
        refuse_unsafe_call()?;
        drain_user(address)?;
        MEMORY.free_host(address)
    }

    fn cuMemHostRegister_v2(address: Address, bytes: usize, flags: u32) {
        let context = current()?;
        refuse_unsafe_call()?;
        MEMORY.register_host(&context, address, bytes, flags)
    }

    fn cuMemHostUnregister(address: Address) {
        current()?;
        refuse_unsafe_call()?;
        drain_user(address)?;
        MEMORY.unregister_host(address)
    }

    fn cuMemHostGetDevicePointer_v2(seen: Out<u64>, address: Address, flags: u32) {
        current()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        // Addresses are the same on the host and on all devices.
        MEMORY.host_flags(address)?;
        seen.set(address as u64)
    }

    fn cuMemHostGetFlags(flags: Out<u32>, address: Address) {
        current()?;
        flags.set(MEMORY.host_flags(address)?)
    }

    fn cuPointerGetAttribute(value: Out<u8>, attribute: u32, address: u64) {
        current()?;
        pointer_attribute(&value, attribute, address as usize)
    }

    fn cuPointerGetAttributes(count: u32, attributes: Array<u32>, values: Array<Out<u8>>, address: u64) {
        current()?;
        let pairs = attributes.items(count as usize)?.iter().zip(values.items(count as usize)?);
        // For unknown memory this function reports zero.
        for (&attribute, value) in pairs {
            pointer_attribute(value, attribute, address as usize).or_else(|_| value.cast::<u32>().set(0))?;
        }
        Ok(())
    }
}

/// Waits, as the driver does, for the work that may still use the memory: that of the context that allocated it.
fn drain_user(address: usize) -> Result {
    let owner = MEMORY.live().find(address).map(|found| found.context);
    owner.and_then(|owner| CONTEXTS.get(owner)).map_or(Ok(()), |context| drain(&context))
}

fn pointer_attribute(value: &Out<u8>, attribute: u32, address: usize) -> Result {
    let live = MEMORY.live();
    let found = live.find(address).ok_or(Code::INVALID_VALUE)?;
    let device = match CONTEXTS.get(found.context) {
        Some(context) => context.device,
        None => found.device().unwrap_or(0),
    };
    match attribute {
        1 => value.cast::<usize>().set(found.context),
        2 => value.cast::<u32>().set(if found.device().is_some() { 2 } else { 1 }),
        3 => value.cast::<u64>().set(address as u64),
        4 if found.device().is_none() => value.cast::<u64>().set(address as u64),
        6 | 8 => value.cast::<u8>().set(0),
        7 => value.cast::<u64>().set(found.start as u64),
        9 => value.cast::<i32>().set(found.device().unwrap_or(device) as i32),
        11 => value.cast::<u64>().set(found.start as u64),
        12 => value.cast::<usize>().set(found.bytes),
        13 => value.cast::<u8>().set(1),
        17 => match &found.owner {
            Owner::Device { pool: Some(pool), .. } => value.cast::<usize>().set(pool.handle),
            _ => value.cast::<usize>().set(0),
        },
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Portable, mapped and write-combined, combined.
const HOST_FLAGS: u32 = 7;

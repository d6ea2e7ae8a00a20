//! Copies and fills.

use std::ptr;
use std::sync::Arc;

use crate::context::{context, current};
use crate::error::{Code, Result};
use crate::ffi::{Address, exports};
use crate::graph::refuse_unsafe_call;
use crate::memory::{MEMORY, MemoryKind, device_of};
use crate::stream::{Stream, default_stream, stream};
use crate::work::{Source, Work};

exports! {
    fn cuMemcpy(to: u64, from: u64, bytes: usize) {
        copy_now((to as usize, MemoryKind::Any), (from as usize, MemoryKind::Any), bytes)
    }

    fn cuMemcpyHtoD_v2(to: u64, from: Address, bytes: usize) {
        copy_now((to as usize, MemoryKind::Device), (from, MemoryKind::Host), bytes)
    }

    fn cuMemcpyDtoH_v2(to: Address, from: u64, bytes: usize) {
        copy_now((to, MemoryKind::Host), (from as usize, MemoryKind::Device), bytes)
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy_now((to as usize, MemoryKind::Device), (from as usize, MemoryKind::Device), bytes)
    }

    fn cuMemcpyPeer(to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize) {
        check_peers((to, to_context), (from, from_context))?;
        copy_now((to as usize, MemoryKind::Device), (from as usize, MemoryKind::Device), bytes)
    }

    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, handle: usize) {
        copy(&stream(handle)?, (to as usize, MemoryKind::Any), (from as usize, MemoryKind::Any), bytes)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: Address, bytes: usize, handle: usize) {
        copy(&stream(handle)?, (to as usize, MemoryKind::Device), (from, MemoryKind::Host), bytes)
    }

    fn cuMemcpyDtoHAsync_v2(to: Address, from: u64, bytes: usize, handle: usize) {
        copy(&stream(handle)?, (to, MemoryKind::Host), (from as usize, MemoryKind::Device), bytes)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, handle: usize) {
        copy(&stream(handle)?, (to as usize, MemoryKind::Device), (from as usize, MemoryKind::Device), bytes)
    }

    fn cuMemcpyPeerAsync(
        to: u64, to_context: usize, from: u64, from_context: usize, bytes: usize, handle: usize,
    ) {
        check_peers((to, to_context), (from, from_context))?;
        copy(&stream(handle)?, (to as usize, MemoryKind::Device), (from as usize, MemoryKind::Device), bytes)
    }

    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) {
        refuse_unsafe_call()?;
        fill(&default_stream(&current()?), address, &[value], count)
    }

    fn cuMemsetD16_v2(address: u64, value: u16, count: usize) {
        refuse_unsafe_call()?;
        fill(&default_stream(&current()?), address, &value.to_ne_bytes(), count)
    }

    fn cuMemsetD32_v2(address: u64, value: u32, count: usize) {
        refuse_unsafe_call()?;
        fill(&default_stream(&current()?), address, &value.to_ne_bytes(), count)
    }

    fn cuMemsetD8Async(address: u64, value: u8, count: usize, handle: usize) {
        fill(&stream(handle)?, address, &[value], count)
    }

    fn cuMemsetD16Async(address: u64, value: u16, count: usize, handle: usize) {
        fill(&stream(handle)?, address, &value.to_ne_bytes(), count)
    }

    fn cuMemsetD32Async(address: u64, value: u32, count: usize, handle: usize) {
        fill(&stream(handle)?, address, &value.to_ne_bytes(), count)
    }
}

/// Copies synchronously.
fn copy_now(to: (usize, MemoryKind), from: (usize, MemoryKind), bytes: usize) -> Result {
    refuse_unsafe_call()?;
    let stream = default_stream(&current()?);
    copy(&stream, to, from, bytes)?;
    stream.synchronize()
}

/// Queues a copy. As in CUDA, unpinned host memory may be reused as soon as this returns.
fn copy(stream: &Arc<Stream>, to: (usize, MemoryKind), from: (usize, MemoryKind), bytes: usize) -> Result {
    stream.context.check()?;
    if bytes == 0 {
        return Ok(());
    }
    let (to_pageable, from_pageable) = {
        let live = MEMORY.live();
        live.check(to.0, bytes, to.1)?;
        live.check(from.0, bytes, from.1)?;
        // Captured copies read their source when the graph is launched.
        let pageable = |address| stream.capture().is_none() && live.find(address).is_none();
        (pageable(to.0), pageable(from.0))
    };
    let source = if from_pageable && !to_pageable {
        // SAFETY: it is memory of the host, which C callers promise to be valid for `bytes` bytes.
        Source::Staged(unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance::<u8>(from.0), bytes) }.into())
    } else {
        Source::Address(from.0, from.1)
    };
    stream.enqueue(Work::Copy { to, from: source, bytes })?;
    if to_pageable { stream.synchronize() } else { Ok(()) }
}

fn fill(stream: &Arc<Stream>, address: u64, pattern: &[u8], count: usize) -> Result {
    stream.context.check()?;
    if count == 0 {
        return Ok(());
    }
    let address = address as usize;
    let bytes = count.checked_mul(pattern.len()).ok_or(Code::INVALID_VALUE)?;
    if !address.is_multiple_of(pattern.len()) {
        return Err(Code::INVALID_VALUE);
    }
    MEMORY.live().check(address, bytes, MemoryKind::Device)?;
    stream.enqueue(Work::Fill { address, pattern: pattern.to_vec(), count })
}

/// Checks that each address belongs to its context's device.
fn check_peers(to: (u64, usize), from: (u64, usize)) -> Result {
    for (address, owner) in [to, from] {
        let owner = context(owner)?;
        if device_of(address as usize).is_none_or(|device| device.ordinal != owner.device) {
            return Err(Code::INVALID_VALUE);
        }
    }
    Ok(())
}

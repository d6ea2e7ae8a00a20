//! Contexts, primary and others.

use std::sync::atomic::Ordering;

use crate::context::{self, CONTEXTS, Context, current};
use crate::device::device;
use crate::error::{Code, Result};
use crate::ffi::{Address, Out, exports};
use crate::stream::synchronize;
use crate::teardown::end;

exports! {
    fn cuDevicePrimaryCtxRetain(context: Out<usize>, ordinal: i32) {
        context.set(device(ordinal)?.retain())
    }

    fn cuDevicePrimaryCtxRelease_v2(ordinal: i32) {
        device(ordinal)?.release(end)
    }

    fn cuDevicePrimaryCtxReset_v2(ordinal: i32) {
        end(&device(ordinal)?.primary);
        Ok(())
    }

    fn cuDevicePrimaryCtxSetFlags_v2(ordinal: i32, flags: u32) {
        device(ordinal)?.primary.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(ordinal: i32, flags: Out<u32>, active: Out<i32>) {
        let device = device(ordinal)?;
        flags.set(device.primary.flags.load(Ordering::Relaxed))?;
        active.set(i32::from(device.is_active()))
    }

    fn cuCtxCreate_v2(created: Out<usize>, flags: u32, ordinal: i32) {
        create(&created, flags, ordinal)
    }

    fn cuCtxCreate_v4(created: Out<usize>, _params: Address, flags: u32, ordinal: i32) {
        create(&created, flags, ordinal)
    }

    fn cuCtxDestroy_v2(handle: usize) {
        let context = CONTEXTS.get(handle).ok_or(Code::INVALID_CONTEXT)?;
        if context.is_primary() {
            return Err(Code::INVALID_CONTEXT);
        }
        if context::current_handle() == Some(handle) {
            context::pop_current()?;
        }
        end(&context);
        CONTEXTS.remove(handle);
        Ok(())
    }

    fn cuCtxSetCurrent(handle: usize) {
        context::set_current(handle)
    }

    fn cuCtxGetCurrent(handle: Out<usize>) {
        handle.set(context::current_handle().unwrap_or(0))
    }

    fn cuCtxPushCurrent_v2(handle: usize) {
        context::push_current(handle)
    }

    fn cuCtxPopCurrent_v2(handle: Out<usize>) {
        handle.set_if_wanted(context::pop_current()?);
        Ok(())
    }

    fn cuCtxGetDevice(ordinal: Out<i32>) {
        ordinal.set(current()?.device as i32)
    }

    fn cuCtxGetApiVersion(handle: usize, version: Out<u32>) {
        context_or_current(handle)?;
        version.set(3020)
    }

    fn cuCtxGetId(handle: usize, id: Out<u64>) {
        id.set(context_or_current(handle)?.handle as u64)
    }

    fn cuCtxGetFlags(flags: Out<u32>) {
        flags.set(current()?.flags.load(Ordering::Relaxed))
    }

    fn cuCtxSetFlags(flags: u32) {
        current()?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }

    fn cuCtxSynchronize() {
        synchronize(&*current()?)
    }

    fn cuCtxGetLimit(value: Out<usize>, limit: u32) {
        value.set(current()?.limit(limit)?)
    }

    fn cuCtxSetLimit(limit: u32, value: usize) {
        current()?.set_limit(limit, value)
    }

    fn cuCtxGetCacheConfig(config: Out<u32>) {
        current()?;
        config.set(0)
    }

    fn cuCtxSetCacheConfig(_config: u32) {
        current().map(drop)
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        current()?;
        least.set_if_wanted(super::stream::LEAST_PRIORITY);
        greatest.set_if_wanted(super::stream::GREATEST_PRIORITY);
        Ok(())
    }

    fn cuCtxEnablePeerAccess(peer: usize, flags: u32) {
        let (current, peer) = (current()?, context::context(peer)?);
        if flags == 0 { current.enable_peer(&peer) } else { Err(Code::INVALID_VALUE) }
    }

    fn cuCtxDisablePeerAccess(peer: usize) {
        current()?.disable_peer(&*context::context(peer)?)
    }
}

fn create(created: &Out<usize>, flags: u32, ordinal: i32) -> Result {
    let device = device(ordinal)?.ordinal;
    if created.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let context = CONTEXTS.insert(|handle| Context::new(handle, device));
    context.flags.store(flags, Ordering::Relaxed);
    context::push_current(context.handle)?;
    created.set(context.handle)
}

fn context_or_current(handle: usize) -> Result<std::sync::Arc<Context>> {
    if handle == 0 { current() } else { context::context(handle) }
}

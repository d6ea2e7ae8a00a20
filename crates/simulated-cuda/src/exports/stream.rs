//! Streams.

use std::ffi::c_void;

use crate::context::current;
use crate::error::Code;
use crate::event::EVENTS;
use crate::ffi::{Address, Out, exports};
use crate::stream::{STREAMS, Stream, stream};
use crate::work::{HostFunction, Work};

exports! {
    fn cuStreamCreate(created: Out<usize>, flags: u32) {
        create(&created, flags, LEAST_PRIORITY)
    }

    fn cuStreamCreateWithPriority(created: Out<usize>, flags: u32, priority: i32) {
        create(&created, flags, priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY))
    }

    fn cuStreamDestroy_v2(handle: usize) {
        let stream = STREAMS.remove(handle).ok_or(Code::INVALID_HANDLE)?;
        stream.invalidate_capture();
        stream.close();
        Ok(())
    }

    fn cuStreamQuery(handle: usize) {
        stream(handle)?.query()
    }

    fn cuStreamSynchronize(handle: usize) {
        stream(handle)?.synchronize()
    }

    fn cuStreamWaitEvent(handle: usize, event: usize, _flags: u32) {
        let event = EVENTS.get(event).ok_or(Code::INVALID_HANDLE)?;
        event.hold(&stream(handle)?)
    }

    fn cuStreamGetCtx(handle: usize, context: Out<usize>) {
        context.set(stream(handle)?.context.handle)
    }

    fn cuStreamGetDevice(handle: usize, ordinal: Out<i32>) {
        ordinal.set(stream(handle)?.context.device as i32)
    }

    fn cuStreamGetFlags(handle: usize, flags: Out<u32>) {
        flags.set(stream(handle)?.flags)
    }

    fn cuStreamGetPriority(handle: usize, priority: Out<i32>) {
        priority.set(stream(handle)?.priority)
    }

    fn cuStreamGetId(handle: usize, id: Out<u64>) {
        id.set(stream(handle)?.handle as u64)
    }

    fn cuLaunchHostFunc(handle: usize, function: Option<extern "C" fn(*mut c_void)>, data: Address) {
        let function = function.ok_or(Code::INVALID_VALUE)?;
        stream(handle)?.enqueue(Work::Call(HostFunction { function, data }))
    }
}

fn create(created: &Out<usize>, flags: u32, priority: i32) -> crate::error::Result {
    let context = current()?;
    if flags > NON_BLOCKING || created.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    created.set(Stream::create(&context, flags, priority).handle)
}

pub(super) const LEAST_PRIORITY: i32 = 0;
pub(super) const GREATEST_PRIORITY: i32 = -5;
const NON_BLOCKING: u32 = 1;

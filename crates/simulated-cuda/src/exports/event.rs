//! Events.

use std::sync::Arc;

use crate::context::{CONTEXTS, current};
use crate::error::{Code, Result};
use crate::event::{EVENTS, Event};
use crate::ffi::{Out, exports};
use crate::registry::new_handle;
use crate::stream::stream;

exports! {
    fn cuEventCreate(created: Out<usize>, flags: u32) {
        let context = current()?.handle;
        if flags > ALL_FLAGS || created.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut handle = new_handle();
        EVENTS.insert(|event| {
            handle = event;
            Event::new(context, flags & DISABLE_TIMING == 0)
        });
        created.set(handle)
    }

    fn cuEventDestroy_v2(handle: usize) {
        EVENTS.remove(handle).map(drop).ok_or(Code::INVALID_HANDLE)
    }

    fn cuEventRecord(handle: usize, on: usize) {
        event(handle)?.record(&stream(on)?)
    }

    fn cuEventRecordWithFlags(handle: usize, on: usize, flags: u32) {
        if flags != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        event(handle)?.record(&stream(on)?)
    }

    fn cuEventQuery(handle: usize) {
        let event = event(handle)?;
        check_context(&event)?;
        event.query()
    }

    fn cuEventSynchronize(handle: usize) {
        let event = event(handle)?;
        event.synchronize()?;
        check_context(&event)
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(&milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(&milliseconds, start, end)
    }
}

fn event(handle: usize) -> Result<Arc<Event>> {
    EVENTS.get(handle).ok_or(Code::INVALID_HANDLE)
}

fn check_context(event: &Event) -> Result {
    CONTEXTS.get(event.context).ok_or(Code::CONTEXT_IS_DESTROYED)?.check()
}

fn elapsed(milliseconds: &Out<f32>, start: usize, end: usize) -> Result {
    let elapsed = event(end)?.since(&*event(start)?)?;
    milliseconds.set(elapsed.as_secs_f32() * 1000.0)
}

const DISABLE_TIMING: u32 = 2;
const ALL_FLAGS: u32 = 7;

//! The end of a context.

use crate::context::Context;
use crate::event::EVENTS;
use crate::memory::MEMORY;
use crate::module::{FUNCTIONS, MODULES};
use crate::stream::{close_streams, drain};

/// Destroys a context and everything that belongs to it, after the queued work.
pub(crate) fn end(context: &Context) {
    let _ = drain(context);
    context.deactivate();
    EVENTS.retain(|event| event.context != context.handle);
    FUNCTIONS.retain(|function| function.context != context.handle);
    MODULES.retain(|module| module.context != context.handle);
    close_streams(context);
    MEMORY.free_all(context.handle);
}

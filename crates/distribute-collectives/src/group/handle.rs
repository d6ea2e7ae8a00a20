//! When a group is left: with the last of its handles and works, on the thread that drops it.

use std::ops::Deref;
use std::sync::Arc;

use super::job::JobMembership;
use crate::engine::Engine;

/// The engine as a process's group handles and works under way share it.
///
/// The I/O thread, and whoever hears of a failure from the job, hold the [`Engine`] itself for moments. If the group
/// were left only when the last of all lets go, a process could end before such a thread has told the peers, and they
/// would take it for lost.
pub(crate) struct EngineHandle {
    engine: Arc<Engine>,
    /// Held so that the members know of each other for as long as the group lives.
    job: Option<JobMembership>,
}

impl EngineHandle {
    pub(super) fn new(engine: Arc<Engine>, job: Option<JobMembership>) -> EngineHandle {
        EngineHandle { engine, job }
    }

    pub(super) fn job(&self) -> Option<&JobMembership> {
        self.job.as_ref()
    }

    /// Returns what the I/O thread holds.
    #[cfg(test)]
    pub(super) fn engine(&self) -> Arc<Engine> {
        self.engine.clone()
    }
}

impl Deref for EngineHandle {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        // No operation is under way any more: each is waited for by its handle or its work.
        if let Some(stage) = self.engine.inter_process() {
            stage.leave();
        }
    }
}

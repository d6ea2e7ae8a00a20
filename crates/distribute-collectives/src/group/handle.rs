//! Leaving a group: with the last of its handles and works, on the thread that drops it.

use std::ops::Deref;
use std::sync::Arc;

use super::job::JobMembership;
use crate::engine::Engine;

/// The engine, shared by the group handles and the works in progress of a process.
///
/// The I/O thread, and threads that are notified of failures by the job, hold the [`Engine`] itself for short times. If
/// the group were left only when the last of all these references is dropped, a process could end before such a thread
/// has notified the peers, which would then consider it lost.
pub(crate) struct EngineHandle {
    engine: Arc<Engine>,
    /// Keeps the members informed of each other as long as the group exists.
    job: Option<JobMembership>,
}

impl EngineHandle {
    pub(super) fn new(engine: Arc<Engine>, job: Option<JobMembership>) -> EngineHandle {
        EngineHandle { engine, job }
    }

    pub(super) fn job(&self) -> Option<&JobMembership> {
        self.job.as_ref()
    }

    /// Returns the engine, for those that do not keep the group.
    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.engine
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
        // No operation is in progress any more: each is waited for by its handle or its work.
        if let Some(stage) = self.engine.inter_process() {
            stage.leave(&self.engine.context);
        }
    }
}

//! The job that a group's processes belong to, and where they meet.

use std::sync::Arc;

use distribute_cluster::{FailureCause, Rendezvous};

use crate::engine::Engine;
use crate::{Error, Rank};

/// The processes of a group as members of a job.
#[derive(Clone)]
pub(crate) struct JobMembership {
    pub(super) rendezvous: Arc<dyn Rendezvous>,
    /// The job's rank of each process of the group.
    pub(super) processes: Vec<usize>,
    /// Distinguishes groups of one name that were formed one after another.
    pub(super) generation: u64,
}

impl JobMembership {
    /// Aborts the group when it is reported that one of its processes has failed.
    pub(super) fn watch(self, engine: &Arc<Engine>) {
        let (engine, processes) = (Arc::downgrade(engine), self.processes);
        self.rendezvous.on_failure(Box::new(move |failure| {
            let process = processes.iter().position(|process| *process == failure.rank as usize);
            let (Some(engine), Some(process)) = (engine.upgrade(), process) else { return };
            let context = &engine.context;
            let (peer, group) = (failure.task.to_string(), &context.name);
            let error = match &failure.cause {
                FailureCause::Lost { how, last_heard } => Error::PeerLost {
                    name: context.local_name(0),
                    peer_rank: Rank::of(process * context.local_ranks),
                    peer: peer.clone(),
                    during: "a pause between operations".to_owned(),
                    how: format!("{how} (last heard from {:.1} s ago)", last_heard.as_secs_f64()),
                },
                FailureCause::Reported(reason) => Error::aborted(group, &peer, reason, failure.kind),
                _ => Error::aborted(group, &peer, &failure.to_string(), failure.kind),
            };
            engine.abort(&peer, &error);
        }));
    }
}

//! Refuses to train alone in a process that the environment makes one of several.

use distribute_cluster::Membership;

use crate::{Error, Result};

/// Returns an error if this process is one of several and has joined none of them: each would train a copy of its own,
/// and all would seem to succeed.
pub(crate) fn refuse_lonely(strategy: &'static str) -> Result<()> {
    match Membership::not_joined()? {
        None => Ok(()),
        Some(membership) => Err(Error::Alone {
            strategy,
            described_by: membership.source,
            task: membership.task().to_string(),
            processes: membership.world_size(),
        }),
    }
}

//! Finding out how to attach to servers that may hold what an earlier coordinator has made.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use distribute_cluster::{Task, TaskType};
use futures_util::future::join_all;
use parking_lot::Mutex;

use crate::Result;
use crate::parameters::Parameters;
use crate::server::incarnation;
use crate::steps::EndedSteps;
use crate::wire::proto::{
    AttendServer, CreateShard, Description, FindRequest, Found, OptimizerOfShards, ReleaseRequest, Released,
};
use crate::wire::{Addressee, Link, OwnJob, is_lost, ps, worker};

/// The contents that servers have kept, without those that the program has made again.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// By variable.
    pub(super) shards: BTreeMap<String, Vec<(usize, CreateShard)>>,
    /// By number, ascending, and by server.
    pub(super) optimizers: BTreeMap<u32, Vec<(usize, OptimizerOfShards)>>,
}

/// Whether servers know that they have everything.
#[derive(Debug, Default)]
pub(super) struct Completion {
    pub(super) is_told: AtomicBool,
    /// One tells them at a time.
    pub(super) turn: Mutex<()>,
    pub(super) state: Mutex<Restoring>,
}

#[derive(Debug, Default)]
pub(super) struct Restoring {
    /// Whether variables were restored, so that steps are numbered anew.
    pub(super) restored: bool,
    /// Whether the next checkpoint is loaded over what the servers have kept.
    pub(super) prefers_checkpoint: bool,
}

impl Kept {
    /// Sorts what the servers describe.
    pub(super) fn of(servers: Vec<Description>) -> Kept {
        let mut kept = Kept::default();
        for (server, Description { shards, optimizers, .. }) in servers.into_iter().enumerate() {
            for shard in shards {
                kept.shards.entry(shard.variable.clone()).or_default().push((server, shard));
            }
            for optimizer in optimizers {
                kept.optimizers.entry(optimizer.optimizer).or_default().push((server, optimizer));
            }
        }
        kept.shards.values_mut().for_each(|shards| shards.sort_by_key(|(_, shard)| shard.first_row));
        kept
    }
}

/// Finds out how to attach to the servers: as which session, and what they keep.
///
/// # Errors
/// [`Error::Unreachable`] for a server that does not appear in time; the error of a server that refuses to answer.
pub(super) async fn find(
    finder: &Parameters,
    job: &OwnJob,
    workers: &[String],
    restart_in_place: bool,
    (connect_timeout, silence): (Duration, Duration),
) -> Result<AttendServer> {
    let found = find_all(finder, connect_timeout).await?;
    let greatest = |found: &[Found]| found.iter().map(|found| found.session).max().unwrap_or(0);
    let mut session = next_session(greatest(&found));
    if !restart_in_place {
        return Ok(AttendServer { session, ..AttendServer::default() });
    }
    // Workers first: what they have begun to change is then on the servers, or will be refused there.
    let limits = (silence, finder.message_timeout().saturating_add(silence));
    let released = release(job, workers, session, limits).await;
    let found = find_all(finder, connect_timeout).await?;
    let greatest = greatest(&found).max(released);
    if greatest > session {
        session = next_session(greatest);
        release(job, workers, session, limits).await;
    }
    Ok(match common(&found) {
        Ok(Some((lineage, ended))) => {
            AttendServer { session, lineage, numbered: true, steps: Some(ended.record()), again: false }
        }
        Ok(None) => AttendServer { session, numbered: true, ..AttendServer::default() },
        Err(why) => {
            tracing::warn!("the variables on the servers are not kept, and training begins as without them: {why}");
            AttendServer { session, numbered: true, ..AttendServer::default() }
        }
    })
}

/// Returns the session in which all servers' contents were made, and the steps that have ended; `None` if no server has
/// contents.
///
/// # Errors
/// The reason why the contents do not belong together.
fn common(found: &[Found]) -> Result<Option<(u64, EndedSteps)>, String> {
    let lineage = found.iter().map(|found| found.lineage).max().unwrap_or(0);
    if lineage == 0 {
        return Ok(None);
    }
    let mut ended = EndedSteps::default();
    for (server, found) in found.iter().enumerate() {
        if found.lineage == 0 {
            return Err(format!("ps:{server} was started again and holds nothing, while others hold variables"));
        }
        if found.lineage != lineage {
            return Err(format!("ps:{server} holds what another run of the coordinator has made than the others"));
        }
        if !found.complete {
            return Err(format!(
                "the coordinator before had not made, or restored, everything on ps:{server}, or it could not be \
                 restarted in place"
            ));
        }
        ended.learn(&EndedSteps::of(found.steps.as_ref()).map_err(|status| status.message().to_owned())?);
    }
    Ok(Some((lineage, ended)))
}

/// Asks all servers, each of which may take until `timeout` to appear.
async fn find_all(finder: &Parameters, timeout: Duration) -> Result<Vec<Found>> {
    let mut all = Vec::new();
    for server in 0..finder.servers() {
        let started = Instant::now();
        all.push(loop {
            match finder.link(server).call::<Found>(ps!("Find"), FindRequest {}, finder.message_timeout()).await {
                Ok(found) => break found,
                Err(status) if is_lost(&status) && started.elapsed() < timeout => {
                    tokio::time::sleep(BETWEEN_ATTEMPTS).await;
                }
                Err(status) if is_lost(&status) => {
                    return Err(finder.unreachable(server, started, &status));
                }
                Err(status) => return Err(finder.failed(server, "Find")(status)),
            }
        });
    }
    Ok(all)
}

/// Ends the hold of earlier coordinators on the workers. Returns the greatest session that one of them knows. Servers
/// refuse what a worker sends that is not reached.
async fn release(job: &OwnJob, workers: &[String], session: u64, (silence, limit): (Duration, Duration)) -> u64 {
    let calls = workers.iter().enumerate().map(async |(index, address)| {
        let task = Task::new(TaskType::Worker, index as u32);
        let addressee = Addressee { job: job.clone(), task, session };
        let link = Link::new(address, &addressee, silence)?;
        link.call::<Released>(worker!("Release"), ReleaseRequest { session }, limit).await
    });
    let mut greatest = 0;
    for (index, released) in join_all(calls).await.into_iter().enumerate() {
        match released {
            Ok(released) => greatest = greatest.max(released.session),
            Err(status) => tracing::debug!("worker:{index} was not released: {}", status.message()),
        }
    }
    greatest
}

/// Returns a number for the next coordinator, which is greater than `seen` and, on machines whose clocks agree, than
/// those of all earlier ones. Two that begin at the same time differ, and the greater one wins everywhere.
pub(super) fn next_session(seen: u64) -> u64 {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let order = seconds.max((seen >> 32) + 1).min(u64::from(u32::MAX));
    order << 32 | (incarnation() & u64::from(u32::MAX))
}

/// About the time that a task needs to start.
pub(crate) const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::StepRecord;

    fn found(lineage: u64, complete: bool, begun: u64) -> Found {
        Found { session: 9, incarnation: 1, lineage, complete, steps: Some(StepRecord { begun, open: Vec::new() }) }
    }

    #[test]
    fn contents_are_kept_if_all_servers_have_the_same() {
        assert_eq!(common(&[found(0, false, 0), found(0, false, 0)]), Ok(None));
        let (lineage, ended) = common(&[found(7, true, 3), found(7, true, 5)]).unwrap().unwrap();
        assert_eq!((lineage, ended.first()), (7, 5));
        for (all, words) in [
            ([found(7, true, 3), found(0, false, 0)], "ps:1 was started again"),
            ([found(7, true, 3), found(8, true, 3)], "ps:0 holds what another run"),
            ([found(7, true, 3), found(7, false, 3)], "on ps:1"),
        ] {
            let why = common(&all).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn sessions_rise_whatever_the_clock_says() {
        let mut seen = next_session(0);
        for _ in 0..100 {
            let next = next_session(seen);
            assert!(next > seen);
            seen = next;
        }
        let future = u64::from(u32::MAX - 7) << 32;
        assert!(next_session(future) > future);
    }
}

//! Attaching to servers that hold what an earlier coordinator has made.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use distribute_cluster::{Task, TaskType};
use distribute_optim::OptimizerDescription;
use futures_util::future::join_all;
use parking_lot::Mutex;

use super::{BETWEEN_ATTEMPTS, Inner, ParameterServerOptions, ParameterServerStrategy};
use crate::parameters::Parameters;
use crate::server::incarnation;
use crate::steps::EndedSteps;
use crate::wire::proto::{
    AttendServer, CompleteRequest, CreateShard, Description, Done, FindRequest, Found, OptimizerOfShards,
    ReleaseRequest, Released,
};
use crate::wire::{Addressee, Link, OwnJob, is_lost, ps, worker};
use crate::{Error, Result, numbers};

/// The contents that servers have kept, without those that the program has made again.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// By variable.
    shards: BTreeMap<String, Vec<(usize, CreateShard)>>,
    /// By number, ascending, and by server.
    optimizers: BTreeMap<u32, Vec<(usize, OptimizerOfShards)>>,
}

/// Whether servers know that they have everything.
#[derive(Debug, Default)]
pub(super) struct Completion {
    is_told: AtomicBool,
    /// One tells them at a time.
    turn: Mutex<()>,
    state: Mutex<Restoring>,
}

#[derive(Debug, Default)]
struct Restoring {
    /// Whether variables were restored, so that steps are numbered anew.
    restored: bool,
    /// Whether the next checkpoint is loaded over what the servers have kept.
    prefers_checkpoint: bool,
}

impl ParameterServerStrategy {
    /// Returns whether the servers have kept what an earlier coordinator has made, see
    /// [`restart_in_place`](ParameterServerOptions::restart_in_place).
    pub fn is_continued(&self) -> bool {
        self.inner.is_continued
    }

    /// Returns the step with which training continues, for
    /// [`schedule_step`](crate::ClusterCoordinator::schedule_step): all steps before it have ended. It is 0 unless the
    /// strategy [is continued](ParameterServerStrategy::is_continued).
    ///
    /// Before this call the coordinator cannot assign variables that the servers have kept, so that what a program does
    /// at its beginning does not undo the training.
    pub fn first_step(&self) -> u64 {
        self.inner.parameters.sealed.store(false, Ordering::Release);
        self.inner.ledger.first()
    }

    /// Returns whether the coordinator can be restarted in place.
    pub fn restarts_in_place(&self) -> bool {
        self.inner.options.restart_in_place
    }

    /// Records that all steps before `until` have ended, which a program knows if it has restored a checkpoint that was
    /// saved then: servers learn of the end of a step with the changes of a later one. Returns the step with which
    /// training continues, which is a later one if the servers know more. It has no effect after the first step.
    ///
    /// Checkpoints that are restored after this call take the place of what the servers have kept.
    ///
    /// # Errors
    /// [`Error::Step`] if the servers do not know of these steps, as those of another training.
    pub fn confirm_steps(&self, until: u64) -> Result<u64> {
        let confirmed = self.inner.ledger.confirm(until).map_err(|error| self.inner.failed(error))?;
        self.inner.forget_failure();
        // The program knows where it continues, so what it restores from now on is meant.
        self.prefer_checkpoint();
        Ok(confirmed)
    }

    /// Loads the next checkpoint over what the servers have kept. Otherwise a strategy that
    /// [is continued](ParameterServerStrategy::is_continued) keeps their values, which are newer than those of its
    /// checkpoints, until its first step.
    pub fn prefer_checkpoint(&self) {
        self.inner.completion.state.lock().prefers_checkpoint = true;
    }
}

impl Inner {
    /// Returns whether a checkpoint leaves the servers' values as they are.
    pub(super) fn keeps_values(&self) -> bool {
        self.is_continued && !self.ledger.has_begun() && !self.completion.state.lock().prefers_checkpoint
    }

    /// Records that all variables were restored.
    pub(super) fn note_restored(&self) {
        self.ledger.reset();
        self.hold.lock().steps = None;
        self.parameters.sealed.store(false, Ordering::Release);
        self.completion.is_told.store(false, Ordering::Release);
        *self.completion.state.lock() = Restoring { restored: true, prefers_checkpoint: false };
    }

    /// Checks that nothing is made after the first step, since a coordinator that is restarted then could not tell
    /// whether it is there.
    pub(super) fn check_not_begun(&self, name: &str) -> Result<()> {
        if self.options.restart_in_place && self.ledger.has_begun() {
            let problem = "the coordinator can be restarted in place, so all variables and optimizers must be made \
                           before the first step";
            return Err(Error::Variable { name: name.to_owned(), problem: problem.to_owned() });
        }
        Ok(())
    }

    /// Compares a variable with what the servers have kept; returns whether they have.
    ///
    /// # Errors
    /// [`Error::OtherTraining`] if they hold another one.
    pub(super) fn claim_variable(&self, name: &str, asked: &[(usize, CreateShard)]) -> Result<bool> {
        if !self.is_continued {
            return Ok(false);
        }
        let mut made = self.made.lock();
        let Some(found) = made.kept.shards.remove(name) else {
            let known: Vec<&str> = made.kept.shards.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "no others".to_owned() } else { known.join(", ") };
            return Err(other_training(format!("variable {name:?} is not on the servers, which hold {known}")));
        };
        let [found, asked] = [&found[..], asked].map(described);
        match found == asked {
            true => Ok(true),
            false => Err(other_training(format!("variable {name:?} is {found} on the servers, and {asked} here"))),
        }
    }

    /// Compares an optimizer with what the servers have kept. Returns the description that they use, with the learning
    /// rate that was set last, and whether a server does not have that yet.
    ///
    /// # Errors
    /// [`Error::OtherTraining`] if they hold another one.
    pub(super) fn claim_optimizer(
        &self,
        number: u32,
        asked: &[(usize, OptimizerOfShards)],
    ) -> Result<Option<(OptimizerDescription, bool)>> {
        if !self.is_continued {
            return Ok(None);
        }
        let found = self.made.lock().kept.optimizers.remove(&number).unwrap_or_default();
        let of = |all: &[(usize, OptimizerOfShards)]| {
            let one = |(server, about): &(usize, OptimizerOfShards)| {
                let mut shards = about.shards.clone();
                shards.sort_unstable();
                (*server, about.made_as.clone(), shards, about.contributions)
            };
            all.iter().map(one).collect::<Vec<_>>()
        };
        if of(&found) != of(asked) {
            let as_made = |all: &[(usize, OptimizerOfShards)]| {
                let first = all.first().map_or("none", |(_, about)| about.made_as.as_str());
                let shards: usize = all.iter().map(|(_, about)| about.shards.len()).sum();
                format!("{first} of {shards} shards")
            };
            let (found, asked) = (as_made(&found), as_made(asked));
            return Err(other_training(format!("optimizer {number} is {found} on the servers, and {asked} here")));
        }
        // Servers are told a new rate one after another, so that the first one has the newest.
        let Some((_, newest)) = found.first() else { return Ok(None) };
        let differs = found.iter().any(|(_, about)| about.description != newest.description);
        let description = serde_json::from_str(&newest.description);
        let unreadable = |error| other_training(format!("optimizer {number} on the servers cannot be read: {error}"));
        Ok(Some((description.map_err(unreadable)?, differs)))
    }

    /// Tells all servers that everything is made, before the first step.
    ///
    /// # Errors
    /// [`Error::OtherTraining`] if the servers hold something that the program has not made.
    pub(crate) fn complete(&self) -> Result<()> {
        let Completion { is_told, turn, state } = &self.completion;
        let is_done = || is_told.load(Ordering::Acquire) || !self.options.restart_in_place;
        if is_done() {
            return Ok(());
        }
        let _turn = turn.lock();
        if is_done() {
            return Ok(());
        }
        let restored = state.lock().restored;
        {
            let made = self.made.lock();
            let variables = made.kept.shards.keys().map(|name| format!("variable {name:?}"));
            let optimizers = made.kept.optimizers.keys().map(|number| format!("optimizer {number}"));
            let left: Vec<String> = variables.chain(optimizers).collect();
            if !left.is_empty() {
                let left = left.join(", ");
                return Err(self.failed(other_training(format!("the servers hold {left}, which this program lacks"))));
            }
        }
        for server in 0..self.parameters.servers() {
            let told = self.parameters.block_on(self.tell_complete(server, restored));
            told.map_err(|error| self.failed(error))?;
        }
        state.lock().restored = false;
        is_told.store(true, Ordering::Release);
        Ok(())
    }

    /// Tells a server that was restored that it has everything again.
    pub(crate) async fn complete_again(&self, server: usize) -> Result<()> {
        let is_told = self.completion.is_told.load(Ordering::Acquire);
        if is_told { self.tell_complete(server, false).await } else { Ok(()) }
    }

    async fn tell_complete(&self, server: usize, restored: bool) -> Result<()> {
        let parameters = &self.parameters;
        let request = CompleteRequest { session: parameters.session(), restored };
        let told = parameters.link(server).call::<Done>(ps!("Complete"), request, parameters.message_timeout()).await;
        told.map(drop).map_err(parameters.failed(server, "Complete"))
    }

    /// Learns from a server what has changed since it was found; returns whether it still holds the same training.
    pub(super) async fn find_again(&self, server: usize) -> Result<bool> {
        let parameters = &self.parameters;
        let found: Found = parameters
            .link(server)
            .call(ps!("Find"), FindRequest {}, parameters.message_timeout())
            .await
            .map_err(parameters.failed(server, "Find"))?;
        let news = EndedSteps::of(found.steps.as_ref()).map_err(parameters.failed(server, "Find"))?;
        let mut hold = self.hold.lock();
        let mut ended = EndedSteps::of(hold.steps.as_ref()).map_err(parameters.failed(server, "Find"))?;
        ended.learn(&news);
        hold.steps = Some(ended.record());
        Ok(found.complete && found.lineage == hold.lineage)
    }
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
    options: &ParameterServerOptions,
) -> Result<AttendServer> {
    let found = find_all(finder, options.connect_timeout).await?;
    let greatest = |found: &[Found]| found.iter().map(|found| found.session).max().unwrap_or(0);
    let mut session = next_session(greatest(&found));
    if !options.restart_in_place {
        return Ok(AttendServer { session, ..AttendServer::default() });
    }
    // Workers first: what they have begun to change is then on the servers, or will be refused there.
    let released = release(job, workers, session, options).await;
    let found = find_all(finder, options.connect_timeout).await?;
    let greatest = greatest(&found).max(released);
    if greatest > session {
        session = next_session(greatest);
        release(job, workers, session, options).await;
    }
    Ok(match common(&found) {
        Ok(Some((lineage, ended))) => AttendServer { session, lineage, numbered: true, steps: Some(ended.record()) },
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
async fn release(job: &OwnJob, workers: &[String], session: u64, options: &ParameterServerOptions) -> u64 {
    let limit = options.message_timeout.saturating_add(options.silence);
    let calls = workers.iter().enumerate().map(async |(index, address)| {
        let task = Task::new(TaskType::Worker, index as u32);
        let addressee = Addressee { job: job.clone(), task, session };
        let link = Link::new(address, &addressee, options.silence)?;
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

/// Describes a variable by what the servers must agree on with the program.
fn described(shards: &[(usize, CreateShard)]) -> String {
    let Some((_, first)) = shards.first() else { return "nothing".to_owned() };
    let dtype = numbers::dtype(first.dtype).map_or_else(|| "of an unknown type".to_owned(), |dtype| dtype.to_string());
    let kind = if first.trainable { "trained" } else { "untrained" };
    let place = |(server, shard): &(usize, CreateShard)| {
        let (number, rows) = (shard.shard, shard.first_row..shard.first_row.saturating_add(shard.rows));
        format!("rows {rows:?} on ps:{server} as shard {number}")
    };
    let places: Vec<String> = shards.iter().map(place).collect();
    format!("{dtype} {:?}, {kind}, {}", first.shape, places.join(", "))
}

fn other_training(problem: String) -> Error {
    Error::OtherTraining { problem }
}

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

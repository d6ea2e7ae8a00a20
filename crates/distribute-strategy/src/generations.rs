//! The generations of an elastic job: sets of members that train together.

use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::elastic::{Elastic, Met, lost};
use crate::{Error, Result, Strategy};

/// Members that have met and told each other their standing, before they form their groups: until
/// [`form`](Gathering::form), each trains by itself.
pub struct Gathering<'a> {
    strategy: &'a Strategy,
    met: Met,
}

impl Gathering<'_> {
    /// Returns the number of the generation.
    pub fn number(&self) -> u64 {
        self.met.generation.number
    }

    /// Returns this process's rank among its members.
    pub fn rank(&self) -> usize {
        self.met.coordination.membership().rank as usize
    }

    /// Returns what each member has told, by rank.
    pub fn standings(&self) -> &[Vec<u8>] {
        &self.met.standings
    }

    /// Forms the groups of all members. Every member calls this.
    ///
    /// # Errors
    /// [`Error::Collective`] if a member is missing or fails; then ask for the
    /// [next generation](Strategy::next_generation).
    pub fn form(self) -> Result<()> {
        self.strategy.replicas().join(self.met.coordination)
    }
}

impl Strategy {
    /// Returns the smallest and the largest number of processes of an elastic job; `None` if the processes of the
    /// strategy do not change.
    ///
    /// An elastic strategy trains by itself until its first generation: variables are created without communication,
    /// and get their values when the process joins the others.
    pub fn elastic(&self) -> Option<RangeInclusive<u32>> {
        self.replicas().elastic().map(Elastic::members)
    }

    /// Returns the number of the generation in which this process trains, in an elastic job that has begun.
    pub fn generation(&self) -> Option<u64> {
        self.replicas().elastic()?.generation()
    }

    /// Returns how often this process's place among all has changed: 0 for a strategy whose processes do not. For
    /// authors of optimizers, who agree on the operations of a step again after each change.
    pub fn changes(&self) -> u64 {
        self.replicas().changes()
    }

    /// Returns the number of steps that optimizers have [committed](crate::ReplicaContext::commit) under this strategy,
    /// in this process.
    pub fn commits(&self) -> u64 {
        self.replicas().commits()
    }

    /// Sets the number of [`commits`](Strategy::commits), when this process has taken over the state of another.
    pub fn set_commits(&self, count: u64) {
        self.replicas().set_commits(count);
    }

    /// Returns the newest generation in which this process had the same state as all others, as its training loop has
    /// [set](Strategy::set_settled_generation) it; 0 for none. For authors of training loops.
    pub fn settled_generation(&self) -> u64 {
        self.replicas().elastic().map_or(0, |elastic| elastic.settled.load(Ordering::Relaxed))
    }

    /// Notes that all members of a generation have the same state. Does nothing under a strategy that is not elastic.
    pub fn set_settled_generation(&self, number: u64) {
        if let Some(elastic) = self.replicas().elastic() {
            elastic.settled.store(number, Ordering::Relaxed);
        }
    }

    /// Leaves the present generation of an elastic job, waits for the next one, and tells its members this process's
    /// `standing`, of at most [`MAX_VALUE_BYTES`](distribute_cluster::Coordination::MAX_VALUE_BYTES). For authors of
    /// training loops; see `distribute_train::elastic`.
    ///
    /// A process calls this when it is ready to train, and again whenever a step has failed with an error against
    /// which a restart may help. Members that are lost meanwhile are left out.
    ///
    /// # Errors
    /// [`Error::Cluster`] if too few members are left, or a majority is needed and not there; [`Error::Fixed`] if the
    /// strategy is not elastic; [`Error::Context`] inside a run.
    pub fn next_generation(&self, standing: &[u8]) -> Result<Gathering<'_>> {
        self.outside_replicas("next_generation", "call it after run has returned")?;
        let replicas = self.replicas();
        let elastic = replicas.elastic().ok_or(Error::Fixed)?;
        let lost = replicas.coordination().map(|coordination| lost(&coordination)).unwrap_or_default();
        replicas.part()?;
        Ok(Gathering { strategy: self, met: elastic.next(&lost, standing)? })
    }

    /// Waits until all members of an elastic job have ended their training loops, so that none of them misses another
    /// that has to repeat its last step. Afterwards the members stay as they are. For authors of training loops.
    ///
    /// # Errors
    /// [`Error::Cluster`] if a member was lost or joins: then ask for the
    /// [next generation](Strategy::next_generation).
    pub fn end_job(&self) -> Result<()> {
        let replicas = self.replicas();
        let Some(elastic) = replicas.elastic() else { return Ok(()) };
        if let Some(coordination) = replicas.coordination() {
            coordination.barrier("elastic/end", END)?;
        }
        elastic.end();
        Ok(())
    }

    /// Leaves an elastic job, whose other members train on without waiting for this one. Does nothing under other
    /// strategies, and before the first generation.
    ///
    /// # Errors
    /// The errors of [`Replicas::local`](crate::Replicas::local) occur in the same cases.
    pub fn leave_job(&self) -> Result<()> {
        let Some(elastic) = self.replicas().elastic() else { return Ok(()) };
        if elastic.leave() {
            self.replicas().part()?;
        }
        Ok(())
    }
}

/// How much earlier than others a member may end its loop.
const END: Duration = Duration::from_secs(300);

//! The generations of an elastic job: sets of members that train together.

use std::ops::RangeInclusive;
use std::time::Duration;

use distribute_cluster::StateVersion;

use crate::elastic::{Elastic, Met, lost};
use crate::{Error, Result, Strategy};

/// Members that have met and told each other how new their states are. Until [`form`](Gathering::form), each of them
/// computes by itself, and none of them may make a step before it [begins](Gathering::begin).
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

    /// Returns how new the state of each member is, by rank.
    pub fn versions(&self) -> &[StateVersion] {
        &self.met.versions
    }

    /// Returns the rank of the member whose state the others take over.
    ///
    /// # Errors
    /// [`Error::Cluster`] with [`Outdated`](distribute_cluster::Error::Outdated) if no member has the state of the
    /// newest generation that has trained.
    pub fn source(&self) -> Result<usize> {
        Ok(self.met.generation.furthest(&self.met.versions)?)
    }

    /// Forms the groups of all members. Every member calls this.
    ///
    /// # Errors
    /// [`Error::Collective`] if a member is missing or fails, and that of [`source`](Gathering::source); then ask for
    /// the [next generation](Strategy::next_generation).
    pub fn form(&self) -> Result<()> {
        let (source, versions) = (self.source()?, self.versions());
        if self.rank() == source || !versions[self.rank()].lacks_any_of(&versions[source]) {
            self.hold()?;
        }
        self.strategy.replicas().join(self.met.coordination.clone())
    }

    /// Notes that this process has the state that the generation begins with, its own or that of the
    /// [source](Gathering::source), so that from now on its steps belong to the job.
    ///
    /// # Errors
    /// [`Error::Cluster`] if the generation is over; then ask for the [next one](Strategy::next_generation).
    pub fn begin(self) -> Result<()> {
        self.hold()?.begin_training(self.number())
    }

    fn hold(&self) -> Result<&Elastic> {
        let elastic = self.strategy.replicas().elastic().ok_or(Error::Fixed)?;
        elastic.hold(self.number(), &self.versions()[self.source()?], self.strategy.commits());
        Ok(elastic)
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

    /// Leaves the present generation of an elastic job, waits for the next one, and tells its members how new this
    /// process's state is: by its [commits](Strategy::commits), and by `progress`, which grows when the state changes
    /// without a step. `progress` is `None` if this process has no state. For authors of training loops; see
    /// `distribute_train::elastic`.
    ///
    /// A process calls this when it is ready to train, and again whenever a step has failed with an error against
    /// which a restart may help. Members that are lost meanwhile are left out.
    ///
    /// # Errors
    /// [`Error::Cluster`] if too few members are left, or a majority is needed and not there; [`Error::Fixed`] if the
    /// strategy is not elastic; [`Error::Context`] inside a run.
    pub fn next_generation(&self, progress: Option<u64>) -> Result<Gathering<'_>> {
        self.outside_replicas("next_generation", "call it after run has returned")?;
        let replicas = self.replicas();
        let elastic = replicas.elastic().ok_or(Error::Fixed)?;
        let lost = replicas.coordination().map(|coordination| lost(&coordination)).unwrap_or_default();
        replicas.part()?;
        let met = elastic.next(&lost, elastic.version(self.commits(), progress))?;
        Ok(Gathering { strategy: self, met })
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

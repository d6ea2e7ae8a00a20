//! The generations of an elastic job: sets of members that train together.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::Error::{Outdated, Stopped};
use distribute_cluster::{Coordination, MemberStates, Missing};
use parking_lot::Mutex;

use crate::elastic::{Elastic, Met, lost};
use crate::{Error, Result, Strategy};

mod variables;

use variables::Values;
pub(crate) use variables::Variables;

/// Members that have met and told each other how new their states are. Until [`form`](Gathering::form), each of them
/// computes by itself, and none of them may make a step before it [begins](Gathering::begin).
pub struct Gathering<'a> {
    strategy: &'a Strategy,
    coordination: Arc<Coordination>,
    states: MemberStates,
    /// The values of the source's variables, if this process lacks them.
    received: Mutex<Values>,
}

impl Gathering<'_> {
    /// Returns the number of the generation.
    pub fn number(&self) -> u64 {
        self.states.generation()
    }

    /// Returns whose state the members begin with, and what each of them takes over.
    pub fn states(&self) -> &MemberStates {
        &self.states
    }

    /// Forms the groups of all members. Every member calls this. Optimizers make no step in them before the process
    /// [begins](Gathering::begin).
    ///
    /// If a member lacks something, the values of [variables](Strategy::variable) travel from the
    /// [source](MemberStates::source) too, except the parts that replicas have of on-read sums.
    ///
    /// # Errors
    /// [`Error::Collective`] if a member is missing or fails; then ask for the
    /// [next generation](Strategy::next_generation). [`Error::Values`] if a variable cannot be read.
    pub fn form(&self) -> Result<()> {
        let (replicas, states) = (self.strategy.replicas(), &self.states);
        self.elastic()?.held().meet(states, self.strategy.commits());
        let travels = states.most_missing() > Missing::Nothing;
        let own = match travels && states.rank() == states.source() {
            true => replicas.variables.values(&replicas.groups())?,
            false => Values::default(),
        };
        replicas.join(self.coordination.clone())?;
        if travels {
            let root = states.source() * replicas.topology().replicas_per_worker();
            let lacks = states.missing(states.rank()) > Missing::Nothing;
            *self.received.lock() = own.broadcast(&replicas.groups(), root, lacks)?;
        }
        Ok(())
    }

    /// Notes that this process has the state that the generation begins with, its own or that of the
    /// [source](MemberStates::source), so that from now on its steps belong to the job. Its [variables] get the values
    /// that [`form`](Gathering::form) has received.
    ///
    /// [variables]: Strategy::variable
    ///
    /// # Errors
    /// [`Error::Cluster`] if the generation is over; then ask for the [next one](Strategy::next_generation).
    /// [`Error::Elastic`] if a variable of the source has another shape or type here, and [`Error::Values`] if one
    /// cannot be written.
    pub fn begin(self) -> Result<()> {
        let elastic = self.elastic()?;
        let received = std::mem::take(&mut *self.received.lock());
        self.strategy.replicas().variables.restore(&self.strategy.groups(), received)?;
        elastic.held().take(&self.states, self.strategy.commits());
        elastic.begin_training(self.number())?;
        self.strategy.replicas().begin();
        Ok(())
    }

    fn elastic(&self) -> Result<&Elastic> {
        self.strategy.replicas().elastic().ok_or(Error::Fixed)
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

    /// Returns an error if this process is one of several of an elastic job, and has joined none of them yet, so that
    /// it would train alone. Optimizers check this in each step; for authors of training loops that do something
    /// before.
    ///
    /// # Errors
    /// [`Error::NotJoined`] in this case.
    pub fn check_joined(&self) -> Result<()> {
        self.replicas().elastic().map_or(Ok(()), Elastic::check_joined)
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
    /// A request to [leave](crate::Request::Leave), such as by a signal, holds for this strategy until its end, also
    /// after [`leave_job`](Strategy::leave_job): the process is about to be stopped. One that is to train again builds
    /// another strategy.
    ///
    /// # Errors
    /// [`Error::Cluster`] if too few members are left, a majority is needed and not there, or no process brings the
    /// state of the newest generation that has trained within 10 s; [`Error::Stopped`] if this process has asked to
    /// [leave](crate::Request::Leave) and waits for others; [`Error::Fixed`] if the strategy is not elastic;
    /// [`Error::Context`] inside a run.
    pub fn next_generation(&self, progress: Option<u64>) -> Result<Gathering<'_>> {
        self.outside_replicas("next_generation", "call it after run has returned")?;
        let replicas = self.replicas();
        let elastic = replicas.elastic().ok_or(Error::Fixed)?;
        let mut lost = replicas.coordination().map(|coordination| lost(&coordination)).unwrap_or_default();
        replicas.part()?;
        let version = elastic.held().version(self.commits(), progress);
        let mut attempt = 1;
        loop {
            let met = elastic.next(&std::mem::take(&mut lost), version).map_err(|error| match error {
                Error::Cluster(stopped @ Stopped { .. }) => Error::Stopped(stopped),
                other => other,
            });
            let Met { generation, coordination, versions } = met?;
            match MemberStates::new(&generation, coordination.membership().rank as usize, versions) {
                Err(error @ Outdated { .. }) if attempt < ATTEMPTS => {
                    tracing::warn!("{error}");
                    drop(coordination);
                    std::thread::sleep(RETURN);
                    attempt += 1;
                }
                states => {
                    let (states, received) = (states?, Mutex::default());
                    return Ok(Gathering { strategy: self, coordination, states, received });
                }
            }
        }
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

/// The number of generations in a row without the newest state, and how long their members wait in each for a process
/// that has it: it may be frozen, and join again.
const ATTEMPTS: u32 = 20;
const RETURN: Duration = Duration::from_millis(500);

/// How much earlier than others a member may end its loop.
const END: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use distribute_cluster::{Authority, FileRegister, Membership};
    use distribute_types::ErrorClass;

    use super::*;
    use crate::MultiWorkerMirroredStrategy;

    #[test]
    fn a_process_makes_no_step_in_a_generation_before_it_begins() {
        let folder = tempfile::tempdir().unwrap();
        let mut membership = Membership::new(0, 1, "127.0.0.1:1").unwrap();
        membership.advertised_host = Some("127.0.0.1".to_owned());
        let register = FileRegister::new(folder.path(), &membership.job_id()).unwrap();
        let builder = MultiWorkerMirroredStrategy::builder().elastic(1..=2).devices(["CPU:0", "CPU:1"]);
        let strategy = builder.membership(membership).generations(Authority::Register(Arc::new(register)));
        let strategy = strategy.build().unwrap();
        let step = || strategy.run_with((), |context, ()| context.commit());
        step().unwrap();
        let gathering = strategy.next_generation(Some(0)).unwrap();
        gathering.form().unwrap();
        assert!(matches!(step(), Err(Error::NotBegun)));
        gathering.begin().unwrap();
        step().unwrap();
        assert_eq!(strategy.commits(), 2);
        strategy.leave_job().unwrap();
        step().unwrap();
    }

    #[test]
    fn a_process_of_several_makes_no_step_before_it_has_joined_others() {
        let folder = tempfile::tempdir().unwrap();
        let mut membership = Membership::new(0, 2, "127.0.0.1:1").unwrap();
        membership.advertised_host = Some("127.0.0.1".to_owned());
        let register =
            || Authority::Register(Arc::new(FileRegister::new(folder.path(), &membership.job_id()).unwrap()));
        let build = |membership: &Membership| {
            let builder = MultiWorkerMirroredStrategy::builder().elastic(1..=2).devices(["CPU:0"]);
            builder.membership(membership.clone()).generations(register()).build().unwrap()
        };
        let strategy = build(&membership);
        let step = || strategy.run_with((), |context, ()| context.commit());
        let error = step().unwrap_err();
        assert!(matches!(error, Error::NotJoined { processes: 2, .. }) && error.exit_code() == 2, "{error}");
        assert!(error.to_string().contains("worker:0 of 2") && strategy.check_joined().is_err(), "{error}");
        // What makes no step is done by each process itself.
        strategy.run_with((), |context, ()| context.barrier()).unwrap();
        let gathering = strategy.next_generation(None).unwrap();
        gathering.form().unwrap();
        gathering.begin().unwrap();
        // The job has no other member, and may have one.
        step().unwrap();
        assert_eq!((strategy.topology().workers(), strategy.generation()), (1, Some(1)));
        strategy.end_job().unwrap();
        step().unwrap();
    }

    #[test]
    fn a_process_that_was_told_to_stop_waits_for_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let membership = Membership::new(0, 2, "127.0.0.1:1").unwrap();
        let register = FileRegister::new(folder.path(), &membership.job_id()).unwrap();
        let builder = MultiWorkerMirroredStrategy::builder().elastic(2..=2).devices(["CPU:0"]);
        let own = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let membership = Membership { addresses: vec![Some(own), Some("127.0.0.1:9".to_owned())], ..membership };
        let builder = builder.membership(membership).generations(Authority::Register(Arc::new(register)));
        let strategy = builder.build().unwrap();
        let flag = strategy.request_flag(crate::Request::Leave);
        let telling = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            flag.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let began = std::time::Instant::now();
        let error = strategy.next_generation(None).err().unwrap();
        assert!(matches!(error, Error::Stopped(_)) && error.exit_code() == 143, "{error}");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        telling.join().unwrap();
    }
}

//! Building the strategy of an island.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use distribute_cluster::{ClusterResolver, Membership, SimpleResolver, Task};
use distribute_strategy::{FragmentSchedule, LocalInitial, LocalSlot, OuterNesterov, Strategy, Wire};
use parking_lot::Mutex;

use super::decoupled::{DecoupledDilocoStrategy, OnExchange, Place, Progress};
use super::event::OuterExchange;
use super::island::{Island, Times};
use crate::roles::Roles;
use crate::server::check_silence;
use crate::wire::OwnJob;
use crate::wire::proto::OuterSettings;
use crate::{Error, Result};

/// Builds a [`DecoupledDilocoStrategy`].
#[must_use]
pub struct DecoupledDilocoBuilder {
    place: Place,
    servers: Vec<String>,
    job: OwnJob,
    schedule: FragmentSchedule,
    outer: OuterNesterov,
    wire: Wire,
    quorum: usize,
    grace: Duration,
    staleness: u64,
    mixing: f64,
    examples_per_step: u64,
    times: Times,
    on_exchange: Option<OnExchange>,
}

impl DecoupledDilocoStrategy {
    /// Returns a builder for the island that this process is in a cluster: 100 inner steps, one fragment, the outer
    /// optimizer of the paper, changes in f32, more than half of the islands as quorum, a grace window of 1 s, a
    /// staleness of 8 outer steps.
    ///
    /// Call it before the strategy of the island's replicas is built, which would otherwise be refused as one that
    /// trains alone.
    ///
    /// # Errors
    /// [`Error::Cluster`] if the cluster is invalid or has no parameter servers or no workers, [`Error::WrongTask`]
    /// unless this task is its chief or a worker.
    pub fn builder(cluster: &impl ClusterResolver) -> Result<DecoupledDilocoBuilder> {
        let (job, cluster) = (OwnJob::from_env(cluster)?, SimpleResolver::of(cluster)?);
        let roles = Roles::of(&cluster.spec)?;
        let islands: Vec<Task> = cluster.spec.tasks().filter(|task| task.kind.trains()).collect();
        let own = cluster.task().and_then(|own| Some((own, islands.iter().position(|island| *island == own)?)));
        let (task, index) = own.ok_or_else(|| Error::WrongTask {
            task: cluster.task().map_or_else(|| "this process".to_owned(), |task| task.to_string()),
            problem: "islands are the chief and the workers of the cluster; parameter servers call \
                      OuterServer::start(..)?.join()"
                .to_owned(),
        })?;
        Membership::mark_joined();
        let seconds = Duration::from_secs;
        Ok(DecoupledDilocoBuilder {
            place: Place { cluster, task, index, islands: islands.len() },
            servers: roles.servers,
            job,
            schedule: FragmentSchedule { inner_steps: 100, fragments: 1 },
            outer: OuterNesterov::default(),
            wire: Wire::F32,
            quorum: islands.len() / 2 + 1,
            grace: seconds(1),
            staleness: 8,
            mixing: 0.0,
            examples_per_step: 1,
            times: Times { connect: seconds(300), silence: seconds(10), message: seconds(60), server: seconds(300) },
            on_exchange: None,
        })
    }
}

impl DecoupledDilocoBuilder {
    /// Returns the place of this island among all, from 0: for its part of the data, or its seed.
    pub fn island_index(&self) -> usize {
        self.place.index
    }

    /// Returns the number of islands.
    pub fn num_islands(&self) -> usize {
        self.place.islands
    }

    /// Sets the number of steps between two exchanges of a fragment, at least 1. Islands may have different ones.
    pub fn inner_steps(mut self, inner_steps: u64) -> Self {
        self.schedule.inner_steps = inner_steps;
        self
    }

    /// Divides the variables, in order, into this many parts of nearly equal bytes, which are exchanged one after
    /// another at equal distances, and placed on the servers by their bytes. At least 1, a divisor of the inner steps,
    /// and at most the number of trained variables. Equal on all islands.
    pub fn fragments(mut self, fragments: usize) -> Self {
        self.schedule.fragments = fragments;
        self
    }

    /// Sets the outer optimizer. Equal on all islands.
    pub fn outer(self, outer: OuterNesterov) -> Self {
        DecoupledDilocoBuilder { outer, ..self }
    }

    /// Sets how changes are sent. Outer parameters are received in f32.
    pub fn wire(self, wire: Wire) -> Self {
        DecoupledDilocoBuilder { wire, ..self }
    }

    /// Sets the number of islands whose changes make an outer step, from 1 to the number of islands. While fewer
    /// islands than these exist, no outer step is made, and each trains by itself. Equal on all islands.
    ///
    /// With 1, the changes of several islands become as many steps in place of one that is their mean, and parameters
    /// overshoot.
    pub fn quorum(self, quorum: usize) -> Self {
        DecoupledDilocoBuilder { quorum, ..self }
    }

    /// Sets for how long changes of further islands are awaited once the quorum is reached; also how long an island
    /// waits for the quorum. Up to a day. Equal on all islands.
    pub fn grace(self, grace: Duration) -> Self {
        DecoupledDilocoBuilder { grace, ..self }
    }

    /// Sets the number of outer steps by which changes may be late; later ones are refused. Equal on all islands.
    pub fn staleness(self, outer_steps: u64) -> Self {
        DecoupledDilocoBuilder { staleness: outer_steps, ..self }
    }

    /// Sets the share of an island's own parameters in its parameters after an exchange that brings newer outer ones,
    /// from 0, which replaces them, to below 1. Default: 0.
    pub fn mixing(self, share_of_own: f64) -> Self {
        DecoupledDilocoBuilder { mixing: share_of_own, ..self }
    }

    /// Sets the number of examples, or tokens, in a step of this island, by which its changes are weighted. At least 1.
    /// Default: 1, by which they are weighted by steps.
    pub fn examples_per_step(self, examples: u64) -> Self {
        DecoupledDilocoBuilder { examples_per_step: examples, ..self }
    }

    /// Sets how long the servers may take to appear at the start. Default: 5 minutes.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.times.connect = timeout;
        self
    }

    /// Sets the silence after which a server counts as lost, at least 1 s. Default: 10 s.
    pub fn silence(mut self, silence: Duration) -> Self {
        self.times.silence = silence;
        self
    }

    /// Sets how long a server's answer may take, in addition to twice the `grace`. Default: 60 s.
    pub fn message_timeout(mut self, timeout: Duration) -> Self {
        self.times.message = timeout;
        self
    }

    /// Sets for how long an island trains on by itself while a server cannot be reached; then the exchange is an error.
    /// Default: 5 minutes.
    pub fn server_timeout(mut self, timeout: Duration) -> Self {
        self.times.server = timeout;
        self
    }

    /// Passes what becomes of each exchange to a function, on the thread of the island's first replica.
    pub fn on_exchange(self, look: impl Fn(&OuterExchange) + Send + Sync + 'static) -> Self {
        DecoupledDilocoBuilder { on_exchange: Some(Arc::new(look)), ..self }
    }

    /// Attends on all servers and builds the strategy over the replicas of another one, which programs then use through
    /// this one alone. Dropping it tells the servers that this island has ended.
    ///
    /// # Errors
    /// [`Error::Strategy`] if the schedule, the outer optimizer or the other strategy does not fit, [`Error::Option`]
    /// for another setting outside its range; [`Error::Unreachable`] for a server that does not appear in time,
    /// [`Error::Refused`] if it does not accept this island, for instance because its settings are not those of the
    /// others; [`Error::Secret`] if it does not have the same secret; [`Error::Threads`].
    pub fn over(self, over: Strategy) -> Result<Strategy> {
        self.check(&over)?;
        let settings = OuterSettings {
            learning_rate: self.outer.learning_rate,
            momentum: self.outer.momentum,
            quorum: self.quorum as u32,
            grace_us: self.grace.as_micros() as u64,
            staleness: self.staleness,
            fragments: self.schedule.fragments as u32,
        };
        let island = Island::connect(&self.job, self.place.task, &self.servers, settings, self.times)?;
        let slot = |name, initial| LocalSlot { name, initial, is_own: false };
        let mut slots = vec![slot("outer", LocalInitial::Variable)];
        if self.wire == Wire::Int8 {
            slots.push(slot("residual", LocalInitial::Zeros));
        }
        Ok(Strategy::new(DecoupledDilocoStrategy {
            over,
            place: self.place,
            schedule: self.schedule,
            wire: self.wire,
            mixing: self.mixing as f32,
            examples_per_step: self.examples_per_step,
            slots,
            servers: self.servers.len(),
            island,
            has_begun: AtomicBool::new(false),
            resumed_after: AtomicU64::new(0),
            progress: Mutex::new(vec![Progress::default(); self.schedule.fragments]),
            on_exchange: self.on_exchange,
        }))
    }

    fn check(&self, over: &Strategy) -> Result<()> {
        self.schedule.check()?;
        self.outer.check()?;
        check_silence(self.times.silence)?;
        let refuse = |what, given: String, expected| Err(Error::Option { what, given, expected });
        if self.quorum == 0 || self.quorum > self.place.islands {
            let given = format!("{} of {} islands", self.quorum, self.place.islands);
            return refuse("the quorum", given, "at least 1, and at most the number of islands");
        }
        if self.grace > MAX_GRACE {
            return refuse("the grace window", format!("{:?}", self.grace), "at most a day");
        }
        if !(0.0..1.0).contains(&self.mixing) {
            return refuse("the share of own parameters", self.mixing.to_string(), "one from 0 to below 1");
        }
        if self.examples_per_step == 0 {
            return refuse("the number of examples in a step", "0".to_owned(), "at least 1");
        }
        if self.schedule.fragments > MAX_FRAGMENTS {
            return refuse("the number of fragments", self.schedule.fragments.to_string(), "at most 65536");
        }
        let why = match over.refuses_local_updates() {
            None if over.topology().workers() > 1 || over.elastic().is_some() => {
                Some("an island is one process; use MirroredStrategy or OneDeviceStrategy")
            }
            why => why,
        };
        match why {
            Some(why) => Err(distribute_strategy::Error::LocalUpdates {
                problem: format!("DecoupledDilocoStrategy cannot be used over {}: {why}", over.describe()),
            }
            .into()),
            None => Ok(()),
        }
    }
}

impl std::fmt::Debug for DecoupledDilocoBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("DecoupledDilocoBuilder");
        fields.field("task", &self.place.task).field("schedule", &self.schedule).finish_non_exhaustive()
    }
}

/// The longest grace window.
const MAX_GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// The greatest number of fragments.
const MAX_FRAGMENTS: usize = 1 << 16;

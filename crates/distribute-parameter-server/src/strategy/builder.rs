//! Building a strategy.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use distribute_cluster::threads::Threads;
use distribute_cluster::{ClusterResolver, JobSecret, JobTls, Membership, SimpleResolver, TaskType};
use distribute_device::DType;
use distribute_train::checkpoint::Abandoned;
use distribute_types::FailureKind;
use parking_lot::Mutex;

use super::attachment::{Completion, Kept, find, next_session};
use super::{Created, Inner, ParameterServerStrategy};
use crate::parameters::{Parameters, Runner};
use crate::partitioner::Partitioner;
use crate::placement::{Placement, Placer};
use crate::roles::Roles;
use crate::server::check_silence;
use crate::steps::{EndedSteps, Ledger};
use crate::updates::Updates;
use crate::wire::OwnJob;
use crate::wire::proto::AttendServer;
use crate::{Error, Result};

/// Options of a [`ParameterServerStrategy`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParameterServerOptions {
    /// How shards are distributed over servers. Default: by bytes.
    pub placement: Placement,
    /// The 16-bit type in which parameters and gradients of training are sent; `None` (default) sends them in their own
    /// type.
    pub wire: Option<DType>,
    /// How the workers' updates are combined. Default: asynchronously.
    pub updates: Updates,
    /// How long tasks may take to appear at the start. Default: 5 minutes.
    pub connect_timeout: Duration,
    /// The silence after which a task counts as lost. At least 1 s. Default: 10 s.
    pub silence: Duration,
    /// How long a server's answer may take. Default: 60 s.
    pub message_timeout: Duration,
    /// How long a lost server that can be restored may take to come back. Default: 5 minutes.
    pub server_timeout: Duration,
    /// A folder of checkpoints from which a restarted server is restored. Default: none, so that a lost server is an
    /// error.
    pub restore_servers_from: Option<PathBuf>,
    /// Whether this coordinator, if it was started again, continues with the variables that the servers hold. Default:
    /// false, so that it begins anew, and restores a checkpoint. See
    /// [`ParameterServerStrategyBuilder::restart_in_place`].
    pub restart_in_place: bool,
    /// The secret that tasks of the job prove to each other on every connection. Default: what
    /// [`JobSecret::from_env`] reads, as workers and servers do.
    pub secret: Option<JobSecret>,
    /// The certificate by which tasks of the job use TLS; all of them, or none. Default: what [`JobTls::from_env`]
    /// reads, as workers and servers do.
    pub tls: Option<JobTls>,
}

impl Default for ParameterServerOptions {
    fn default() -> ParameterServerOptions {
        ParameterServerOptions {
            placement: Placement::default(),
            wire: None,
            updates: Updates::default(),
            connect_timeout: Duration::from_secs(300),
            silence: Duration::from_secs(10),
            message_timeout: Duration::from_secs(60),
            server_timeout: Duration::from_secs(300),
            restore_servers_from: None,
            restart_in_place: false,
            secret: None,
            tls: None,
        }
    }
}

distribute_types::setters! {
    ParameterServerOptions {
        placement: Placement,
        updates: Updates,
        connect_timeout: Duration,
        silence: Duration,
        message_timeout: Duration,
        server_timeout: Duration,
        restart_in_place: bool,
    } into {
        wire: Option<DType>,
        restore_servers_from: Option<PathBuf>,
        secret: Option<JobSecret>,
        tls: Option<JobTls>,
    }
}

/// Builds a [`ParameterServerStrategy`].
pub struct ParameterServerStrategyBuilder {
    cluster: Result<(SimpleResolver, OwnJob)>,
    partitioner: Option<Box<dyn Partitioner>>,
    options: ParameterServerOptions,
}

impl ParameterServerStrategyBuilder {
    pub(super) fn new(cluster: &impl ClusterResolver) -> ParameterServerStrategyBuilder {
        let described = SimpleResolver::of(cluster).and_then(|kept| Ok((kept, OwnJob::from_env(cluster)?)));
        let cluster = described.map_err(Error::from);
        ParameterServerStrategyBuilder { cluster, partitioner: None, options: ParameterServerOptions::default() }
    }

    /// Sets the partitioner, which splits variables into shards; without one they stay whole.
    pub fn partitioner(self, partitioner: impl Partitioner + 'static) -> Self {
        ParameterServerStrategyBuilder { partitioner: Some(Box::new(partitioner)), ..self }
    }

    /// Sets how shards are distributed over servers.
    pub fn placement(self, placement: Placement) -> Self {
        self.with(|options| options.placement = placement)
    }

    /// Sends parameters and gradients of training in this 16-bit type, which halves the bytes and rounds the values.
    /// Other reads and writes of a [`ShardedVariable`](crate::ShardedVariable) keep its own type.
    pub fn wire(self, dtype: DType) -> Self {
        self.with(|options| options.wire = Some(dtype))
    }

    /// Sets how the workers' updates are combined.
    pub fn updates(self, updates: Updates) -> Self {
        self.with(|options| options.updates = updates)
    }

    /// Restores a restarted server from the newest checkpoint in this folder, instead of failing.
    pub fn restore_servers_from(self, folder: impl Into<PathBuf>) -> Self {
        self.with(|options| options.restore_servers_from = Some(folder.into()))
    }

    /// Lets a coordinator that was started again continue with the variables, optimizers and datasets of servers and
    /// workers that have outlived the one before. They wait for it for
    /// [`coordinator_timeout`](crate::ServerOptions::coordinator_timeout).
    ///
    /// The program makes the same variables and optimizers as before; they keep their values, and a difference is
    /// [`Error::OtherTraining`]. All are made before the first step. Functions that change variables are scheduled as
    /// numbered steps, by [`ClusterCoordinator::schedule_step`](crate::ClusterCoordinator::schedule_step), from
    /// [`ParameterServerStrategy::first_step`] on. Until then a checkpoint is not loaded over the values that the
    /// servers have kept, which are newer. If they hold nothing, not everything, or not the same run, training begins
    /// as without this option, with a warning.
    pub fn restart_in_place(self) -> Self {
        self.with(|options| options.restart_in_place = true)
    }

    /// Sets all options except the partitioner.
    pub fn options(self, options: ParameterServerOptions) -> Self {
        ParameterServerStrategyBuilder { options, ..self }
    }

    fn with(mut self, change: impl FnOnce(&mut ParameterServerOptions)) -> Self {
        change(&mut self.options);
        self
    }

    /// Connects to all parameter servers and builds the strategy.
    ///
    /// # Errors
    /// [`Error::Cluster`] if the cluster is invalid or has no parameter servers or no workers, [`Error::WrongTask`] on
    /// a worker, server or evaluator, [`Error::Secret`] if a server does not have the same secret,
    /// [`Error::Unreachable`] for a server that does not appear in time,
    /// [`Error::Option`] for an option outside its range, [`Error::Threads`] if the runtime cannot be started.
    pub fn build(self) -> Result<ParameterServerStrategy> {
        let (cluster, mut job) = self.cluster?;
        let roles = Roles::of(&cluster.spec)?;
        Membership::mark_joined();
        if let Some(kind @ (TaskType::Worker | TaskType::Ps | TaskType::Evaluator)) = cluster.task_type {
            return Err(Error::WrongTask {
                task: kind.to_string(),
                problem: "the chief alone coordinates; workers and parameter servers call Server::start(..)?.join()"
                    .to_owned(),
            });
        }
        let options = self.options;
        job.secret = options.secret.clone().or(job.secret);
        job.tls = options.tls.clone().or(job.tls);
        options.updates.check()?;
        check_silence(options.silence)?;
        if options.restart_in_place && options.updates.contributions() > 0 {
            return Err(Error::Option {
                what: "the way in which updates are combined",
                given: format!("{:?}, with restart_in_place", options.updates),
                expected: "Asynchronous or BoundedStaleness, since contributions to a step that is not complete would \
                           be lost with the coordinator",
            });
        }
        if let Some(wire) = options.wire.filter(|wire| !matches!(wire, DType::F16 | DType::BF16)) {
            let given = wire.to_string();
            return Err(Error::Option { what: "the type on the wire", given, expected: "f16 or bf16" });
        }
        let threads = Threads::start("coordinator", 2).map_err(Error::Threads)?;
        let limits = (options.silence, options.message_timeout);
        // Calls that belong to no session.
        let finder =
            Parameters::new(Runner::Coordinator(threads.handle().clone()), &job, &roles.servers, 0, None, limits)?;
        let found = finder.block_on(find(
            &finder,
            &job,
            &roles.workers,
            options.restart_in_place,
            (options.connect_timeout, options.silence),
        ));
        let (hold, unfound) = match found {
            Ok(hold) => (hold, None),
            Err(error) => (AttendServer { session: next_session(0), ..AttendServer::default() }, Some(error)),
        };
        let (session, is_continued) = (hold.session, hold.lineage != 0);
        let lineage = match options.restart_in_place {
            true if is_continued => hold.lineage,
            true => session,
            false => 0,
        };
        let parameters = Parameters::new(
            Runner::Coordinator(threads.handle().clone()),
            &job,
            &roles.servers,
            session,
            options.wire,
            limits,
        )?;
        parameters.sealed.store(is_continued, Ordering::Release);
        let servers = roles.servers.len();
        let placer = Placer::new(options.placement, servers);
        let inner = Inner {
            cluster,
            parameters: Arc::new(parameters),
            workers: roles.workers,
            job,
            partitioner: self.partitioner,
            hold: Mutex::new(hold),
            lineage,
            is_continued,
            ledger: Arc::new(Ledger::new()),
            completion: Completion::default(),
            restoring: tokio::sync::RwLock::default(),
            made: Mutex::new(Created {
                placer,
                names: BTreeSet::new(),
                next_shard: 0,
                shards: Vec::new(),
                optimizers: Vec::new(),
                made_as: Vec::new(),
                kept: Kept::default(),
                run: None,
                abandoned: Abandoned::default(),
            }),
            incarnations: Mutex::new(vec![0; servers]),
            attendances: Mutex::new((0..servers).map(|_| None).collect()),
            coordinator: Mutex::new(Weak::new()),
            coordinators: AtomicU64::new(0),
            verdict: Mutex::default(),
            options,
            _threads: threads,
        };
        // Recorded so that waiting workers learn whether to keep waiting.
        let failed = |error| inner.failed(error);
        if let Some(error) = unfound {
            return Err(failed(error));
        }
        for server in 0..servers {
            let attended = inner.parameters.block_on(inner.attend(server, inner.options.connect_timeout));
            let (incarnation, attendance) = attended.map_err(failed)?;
            inner.note_part(server, incarnation, attendance);
        }
        if is_continued {
            let described = inner.parameters.block_on(inner.parameters.describe()).map_err(failed)?;
            inner.made.lock().kept = Kept::of(described);
            let record = inner.hold.lock().steps.clone();
            let ended = EndedSteps::of(record.as_ref())
                .map_err(|status| failed(Error::OtherTraining { problem: status.message().to_owned() }))?;
            inner.ledger.continue_after(&ended);
            // Until something has succeeded: what the servers have kept outlives a program that fails at its beginning.
            inner.note("the coordinator ended before it continued".to_owned(), FailureKind::Retryable);
            tracing::info!("continuing with step {}, with the variables that the servers have kept", ended.first());
        }
        Ok(ParameterServerStrategy { inner: Arc::new(inner) })
    }
}

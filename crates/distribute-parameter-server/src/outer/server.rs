//! The process that holds outer parameters.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_cluster::{ClusterResolver, Membership, TaskType};

use super::checkpoint::Checkpoints;
use super::methods::OuterMethods;
use super::store::{OuterEnd, OuterStore};
use crate::roles::Roles;
use crate::server::{ServerOptions, check_silence, incarnation, serve};
use crate::serving::Serving;
use crate::signals::Signals;
use crate::wire::{Identity, OwnJob};
use crate::{Error, Result};

/// A parameter server of [`DecoupledDilocoStrategy`](crate::DecoupledDilocoStrategy): it holds fragments of the outer
/// parameters and makes outer steps. The tasks `ps` of the cluster are servers, its chief and workers islands.
///
/// It answers gRPC's health checks on its port. The secret and the certificates of the job are read as
/// [`Server`](crate::Server) reads them.
///
/// # Examples
/// ```no_run
/// use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};
/// use distribute_parameter_server::{Error, OuterServer, OuterServerOptions};
///
/// let cluster = TfConfigResolver::from_env()?;
/// if cluster.task_type() == Some(TaskType::Ps) {
///     OuterServer::start_with(&cluster, OuterServerOptions::default().checkpoints("run/outer"))?.join()?;
/// }
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// "Decoupled DiLoCo", arXiv 2604.21428.
pub struct OuterServer {
    serving: Serving,
    store: Arc<OuterStore>,
    island_timeout: Duration,
    checkpoints: Option<Saver>,
}

/// Options of an [`OuterServer`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OuterServerOptions {
    /// How long to wait for an island to come, or to come back. Default: 30 minutes.
    pub island_timeout: Duration,
    /// Silence after which an island counts as lost. At least 1 s. Default: 10 s.
    pub silence: Duration,
    /// How long a call may pause between two of its messages. Default: 60 s.
    pub message_timeout: Duration,
    /// The folder of checkpoints, of which each server uses a folder of its own, such as `ps-0`. A server that is
    /// started again, or a new run, continues from the newest one. Default: none; then a server that is started again
    /// gets its fragments from the first island that calls, without the outer momentum.
    pub checkpoints: Option<PathBuf>,
    /// The number of outer steps of the server's fragments, together, after which it saves. Default: 10.
    pub save_every: u64,
}

impl Default for OuterServerOptions {
    fn default() -> OuterServerOptions {
        OuterServerOptions {
            island_timeout: Duration::from_secs(30 * 60),
            silence: Duration::from_secs(10),
            message_timeout: Duration::from_secs(60),
            checkpoints: None,
            save_every: 10,
        }
    }
}

distribute_types::setters! {
    OuterServerOptions {
        island_timeout: Duration,
        silence: Duration,
        message_timeout: Duration,
        save_every: u64,
    }
}

impl OuterServerOptions {
    /// Sets [`checkpoints`](field@Self::checkpoints).
    #[must_use]
    pub fn checkpoints(self, folder: impl Into<PathBuf>) -> Self {
        Self { checkpoints: Some(folder.into()), ..self }
    }
}

impl OuterServer {
    /// Starts to serve as this process's task, at the address that the cluster assigns to it.
    ///
    /// # Errors
    /// [`Error::Cluster`] if the cluster is invalid or has no parameter servers or no workers, [`Error::WrongTask`]
    /// unless this task is a parameter server, [`Error::Listen`] if the port is in use or the task's own address does
    /// not resolve within 30 s, [`Error::Threads`] if the runtime cannot be started.
    pub fn start(cluster: &impl ClusterResolver) -> Result<OuterServer> {
        OuterServer::start_with(cluster, OuterServerOptions::default())
    }

    /// Starts to serve, with options.
    ///
    /// # Errors
    /// The errors of [`start`](OuterServer::start); [`Error::Option`] for a silence below 1 s, or a `save_every` of 0;
    /// [`Error::Train`] if the folder has checkpoints that cannot be read.
    pub fn start_with(cluster: &impl ClusterResolver, options: OuterServerOptions) -> Result<OuterServer> {
        check_silence(options.silence)?;
        if options.save_every == 0 {
            return Err(Error::Option {
                what: "the number of outer steps after which a server saves",
                given: "0".to_owned(),
                expected: "at least 1",
            });
        }
        Membership::mark_joined();
        let spec = cluster.cluster_spec()?;
        Roles::of(&spec)?;
        let task = cluster.task().filter(|task| task.kind == TaskType::Ps).ok_or_else(|| Error::WrongTask {
            task: cluster.task().map_or_else(|| "this process".to_owned(), |task| task.to_string()),
            problem: "parameter servers hold outer parameters; chief and workers are islands, which make a \
                      DecoupledDilocoStrategy"
                .to_owned(),
        })?;
        let job = OwnJob::from_env(cluster)?;
        let (checkpoints, restored) = match &options.checkpoints {
            Some(folder) => {
                let (checkpoints, restored) = Checkpoints::open(folder, task)?;
                (Some(checkpoints), restored)
            }
            None => Default::default(),
        };
        let (serving, listener) = Serving::new(task, &spec, &job)?;
        let islands = spec.tasks().filter(|task| task.kind.trains()).collect();
        let store = Arc::new(OuterStore::new(incarnation(), Instant::now(), islands, restored));
        let limits = ServerOptions::default().silence(options.silence).message_timeout(options.message_timeout);
        let methods = OuterMethods::new(store.clone(), options.silence);
        serving.block_on(serve(listener, methods, Identity::new(job, task), limits))?;
        let checkpoints = checkpoints.map(|checkpoints| {
            let saved = store.outer_steps();
            Saver { checkpoints, store: store.clone(), save_every: options.save_every, saved }
        });
        tracing::info!("{task} serves outer parameters at {}", serving.address());
        let island_timeout = options.island_timeout;
        Ok(OuterServer { serving, store, island_timeout, checkpoints })
    }

    /// Returns the address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.serving.address()
    }

    /// Serves until all islands of the cluster have attended and left, at least one of them after its training. Saves
    /// on this thread, meanwhile and at the end.
    ///
    /// # Errors
    /// [`Error::Stopped`] after SIGTERM or SIGINT, [`Error::NoIslands`] if no island has attended for `island_timeout`
    /// and none has ended well, [`Error::Train`] if a checkpoint cannot be written.
    pub fn join(mut self) -> Result<()> {
        let mut saver = self.checkpoints.take();
        let outcome = self.serving.block_on(self.serve_until_the_end(saver.as_mut()));
        let saved = saver.map_or(Ok(()), Saver::finish);
        self.serving.end();
        outcome.and(saved)
    }

    async fn serve_until_the_end(&self, mut saver: Option<&mut Saver>) -> Result<()> {
        let mut signals = Signals::new().map_err(Error::Threads)?;
        let mut changes = self.store.changes();
        loop {
            if let Some(saver) = &mut saver {
                saver.save_if_due()?;
            }
            let alone = match self.store.end(Instant::now(), self.island_timeout) {
                Ok(OuterEnd::Done) => return Ok(()),
                Ok(OuterEnd::Alone) => {
                    return Err(Error::NoIslands { task: self.serving.task(), waited: self.island_timeout });
                }
                Err(alone) => alone,
            };
            // While islands attend, something changes when the last one leaves or is lost.
            let left = alone.map_or(LOOK, |alone| self.island_timeout.saturating_sub(alone)).min(LOOK);
            tokio::select! {
                _ = changes.changed() => {}
                () = tokio::time::sleep(left) => {}
                signal = signals.next() => return Err(Error::Stopped { task: self.serving.task(), signal }),
            }
        }
    }
}

/// How often a server looks at its state if nothing changes.
const LOOK: Duration = Duration::from_secs(60);

impl std::fmt::Debug for OuterServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OuterServer").field("serving", &self.serving).finish_non_exhaustive()
    }
}

/// Saves a server's fragments from time to time.
struct Saver {
    checkpoints: Checkpoints,
    store: Arc<OuterStore>,
    save_every: u64,
    /// Outer steps in the newest checkpoint.
    saved: u64,
}

impl Saver {
    fn save_if_due(&mut self) -> Result<()> {
        let steps = self.store.outer_steps();
        if steps.saturating_sub(self.saved) < self.save_every {
            return Ok(());
        }
        self.saved = steps;
        self.checkpoints.save(steps, self.store.kept())
    }

    /// Saves what has changed since the newest checkpoint, and waits until it is written.
    fn finish(mut self) -> Result<()> {
        let steps = self.store.outer_steps();
        if steps > self.saved {
            self.checkpoints.save(steps, self.store.kept())?;
        }
        self.checkpoints.finish()
    }
}

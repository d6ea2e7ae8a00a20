//! The services of workers and parameter servers.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::{ClusterResolver, Incoming, Membership, TaskType};

use crate::lifetime::{End, Lifetime};
use crate::roles::Roles;
use crate::server_methods::ServerMethods;
use crate::serving::Serving;
use crate::signals::Signals;
use crate::wire::{
    HTTP_FRAME_BYTES, Identity, MAX_HEADERS_BYTES, MIN_SILENCE, Methods, OwnJob, SHORT_MESSAGE_BYTES, WINDOW_BYTES,
    service,
};
use crate::worker::WorkerMethods;
use crate::{Error, Program, Result};

/// A worker or parameter server that serves its cluster's coordinator.
///
/// It answers gRPC's health checks (`grpc.health.v1.Health`) on its port as soon as it is ready; of a job with a secret
/// these are the only calls that need no proof of it. The secret is read as [`JobSecret::from_env`] does.
///
/// [`JobSecret::from_env`]: distribute_cluster::JobSecret::from_env
///
/// # Examples
/// ```no_run
/// use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};
/// use distribute_parameter_server::{Error, Program, Server, WorkerContext};
///
/// let cluster = TfConfigResolver::from_env()?;
/// let program = Program::new().function("double", |_: &WorkerContext, x: f64| Ok::<_, Error>(2.0 * x));
/// if matches!(cluster.task_type(), Some(TaskType::Worker | TaskType::Ps)) {
///     Server::start(&cluster, program)?.join()?;
/// }
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.distribute.Server`.
pub struct Server {
    serving: Serving,
    lifetime: Arc<Lifetime>,
    coordinator_timeout: Duration,
}

/// Options of a [`Server`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerOptions {
    /// How long to wait for a coordinator to come, or to come back. Default: 30 minutes.
    pub coordinator_timeout: Duration,
    /// Silence after which the coordinator, or a parameter server that a worker calls, counts as lost. At least 1 s.
    /// Default: 10 s.
    pub silence: Duration,
    /// How long a worker waits for a parameter server's answer, and how long a call may pause between two of its
    /// messages. Default: 60 s.
    pub message_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            coordinator_timeout: Duration::from_secs(30 * 60),
            silence: Duration::from_secs(10),
            message_timeout: Duration::from_secs(60),
        }
    }
}

distribute_types::setters! {
    ServerOptions {
        coordinator_timeout: Duration,
        silence: Duration,
        message_timeout: Duration,
    }
}

impl Server {
    /// Starts to serve as this process's task, at the address that the cluster assigns to it.
    ///
    /// # Errors
    /// [`Error::Cluster`] if the cluster is invalid or has no parameter servers or no workers, [`Error::WrongTask`] for
    /// a coordinator or an evaluator, [`Error::Listen`] if the port is in use or the task's own address does not
    /// resolve within 30 s, [`Error::Threads`] if the runtime cannot be started.
    pub fn start(cluster: &impl ClusterResolver, program: Program) -> Result<Server> {
        Server::start_with(cluster, program, ServerOptions::default())
    }

    /// Starts to serve, with options.
    ///
    /// # Errors
    /// The errors of [`start`](Server::start), and [`Error::Option`] for a silence below 1 s.
    pub fn start_with(cluster: &impl ClusterResolver, program: Program, options: ServerOptions) -> Result<Server> {
        check_silence(options.silence)?;
        Membership::mark_joined();
        let spec = cluster.cluster_spec()?;
        Roles::of(&spec)?;
        let task = cluster.task().ok_or_else(|| Error::WrongTask {
            task: "this process".to_owned(),
            problem: "nothing says which task it is; set \"task\" in TF_CONFIG".to_owned(),
        })?;
        if !matches!(task.kind, TaskType::Worker | TaskType::Ps) {
            return Err(Error::WrongTask {
                task: task.to_string(),
                problem:
                    "workers and parameter servers serve; the chief makes a ParameterServerStrategy, and an evaluator \
                          reads checkpoints"
                        .to_owned(),
            });
        }
        let job = OwnJob::from_env(cluster)?;
        let (serving, listener) = Serving::new(task, &spec, &job)?;
        let lifetime = Arc::new(Lifetime::new());
        serving.block_on(async {
            let (lifetime, limits) = (lifetime.clone(), (options.silence, options.message_timeout));
            let identity = Identity::new(job, task);
            match task.kind {
                TaskType::Ps => {
                    let methods = ServerMethods::new(incarnation(), lifetime, options.silence);
                    serve(listener, methods, identity, options).await
                }
                _ => {
                    let methods = WorkerMethods::new(program, lifetime, identity.clone(), limits);
                    serve(listener, methods, identity, options).await
                }
            }
        })?;
        tracing::info!("{task} serves at {}", serving.address());
        Ok(Server { serving, lifetime, coordinator_timeout: options.coordinator_timeout })
    }

    /// Returns the address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.serving.address()
    }

    /// Serves until the coordinator ends the job.
    ///
    /// # Errors
    /// [`Error::Stopped`] after SIGTERM or SIGINT, [`Error::NoCoordinator`] if none connects, or reconnects, within
    /// `coordinator_timeout`, [`Error::JobFailed`] if the coordinator has ended with an error that another run would
    /// also meet.
    pub fn join(self) -> Result<()> {
        let task = self.serving.task();
        let outcome = self.serving.block_on(async {
            let mut signals = Signals::new().map_err(Error::Threads)?;
            tokio::select! {
                end = self.lifetime.ended(self.coordinator_timeout) => match end {
                    End::Done => Ok(()),
                    End::Failed(failure) => Err(Error::JobFailed {
                        task,
                        why: failure.message,
                        configuration: failure.configuration,
                    }),
                    End::Alone => Err(Error::NoCoordinator { task, waited: self.coordinator_timeout }),
                },
                signal = signals.next() => Err(Error::Stopped { task, signal }),
            }
        });
        self.serving.end();
        outcome
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("serving", &self.serving).finish_non_exhaustive()
    }
}

pub(crate) async fn serve<M: Methods>(
    listener: TcpListener,
    methods: M,
    identity: Identity,
    options: ServerOptions,
) -> Result<()> {
    listener.set_nonblocking(true).map_err(Error::Threads)?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(Error::Threads)?;
    let door = identity.job.door(identity.task);
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_service_status("", tonic_health::ServingStatus::Serving).await;
    health.set_service_status(M::NAME, tonic_health::ServingStatus::Serving).await;
    let server = tonic::transport::Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(2 * WINDOW_BYTES)
        .max_frame_size(HTTP_FRAME_BYTES)
        .http2_max_header_list_size(MAX_HEADERS_BYTES)
        // A caller whose host is gone, or whose process is frozen, answers no ping.
        .http2_keepalive_interval(Some(options.silence / 2))
        .http2_keepalive_timeout(Some(options.silence / 2))
        .add_service(health_service.max_decoding_message_size(SHORT_MESSAGE_BYTES))
        .add_service(service(methods, identity, door.clone(), options.message_timeout))
        .serve_with_incoming(Incoming::new(listener, STRANGER_TIMEOUT, MAX_STRANGERS).behind(door));
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!("the service ended: {error}");
        }
    });
    Ok(())
}

/// How long a connection may stay open without an admitted call.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of such connections; the oldest is closed for a new one.
const MAX_STRANGERS: usize = 128;

/// Checks that the silence is long enough to tell a slow task from a lost one.
///
/// # Errors
/// [`Error::Option`] if it is below 1 s.
pub(crate) fn check_silence(silence: Duration) -> Result<()> {
    if silence >= MIN_SILENCE {
        return Ok(());
    }
    Err(Error::Option {
        what: "the silence after which a task is lost",
        given: format!("{silence:?}"),
        expected: "at least 1 s",
    })
}

/// Draws a number that identifies this process, by the hasher's random keys and the process id.
pub(crate) fn incarnation() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) | 1
}

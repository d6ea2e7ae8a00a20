//! A process that serves datasets.

mod announce;
mod serving;
mod split;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::threads::Threads;
use distribute_cluster::{JobId, JobSecret, JobTls, look_up};
use distribute_input::Dataset;
use tokio::sync::watch;

use crate::dispatcher::threads;
use crate::wire::proto::{Registration, ServedDataset};
use crate::wire::{Identity, serve};
use crate::{Error, Result, Transfer, environment};
use announce::{Announcer, Standing};
use serving::DataWorkerMethods;
use split::{Of, Served};

/// A process of the user's program that reads and transforms datasets for the workers of a training job.
///
/// It is stateless: each call names the pass, the split and the element that it begins with. A data worker may
/// therefore end, or be started, at any time.
///
/// All data workers of a name must serve the same dataset: equal transformations, seeds and files, so that a split
/// yields the same elements everywhere. The dispatcher compares the [settings](Dataset::settings) and the first element
/// of each. A source that is not deterministic, such as a generator that reads a clock or a queue, cannot be served.
///
/// # Examples
/// ```no_run
/// use distribute_data_service::DataWorker;
/// use distribute_input::read::{Lines, ReadOptions};
/// use distribute_input::{Array, Dataset};
///
/// let lines = Dataset::list_files("train", ".txt").read(Lines, ReadOptions::default());
/// let lengths = lines.map(|line| Ok(Array::scalar(line.len() as i64)));
/// DataWorker::builder().dataset("lengths", &lengths).serve()?;
/// # Ok::<(), distribute_data_service::Error>(())
/// ```
///
/// # Source
/// `tf.data.experimental.service.WorkerServer`.
pub struct DataWorker {
    address: SocketAddr,
    methods: Arc<DataWorkerMethods>,
    standing: watch::Receiver<Standing>,
    announcer: Announcer,
    threads: Threads,
}

/// Options of a [`DataWorker`], and the datasets that it serves.
#[must_use]
pub struct DataWorkerBuilder {
    datasets: Vec<(String, Arc<dyn Served>)>,
    dispatcher: Option<String>,
    identity: Option<JobId>,
    secret: Option<JobSecret>,
    tls: Option<JobTls>,
    bind: Option<String>,
    host: Option<String>,
    max_streams: usize,
    register_timeout: Duration,
    dispatcher_timeout: Duration,
}

impl DataWorker {
    /// Begins with the default options and no dataset.
    pub fn builder() -> DataWorkerBuilder {
        DataWorkerBuilder {
            datasets: Vec::new(),
            dispatcher: None,
            identity: None,
            secret: None,
            tls: None,
            bind: None,
            host: None,
            max_streams: 256,
            register_timeout: Duration::from_secs(30),
            dispatcher_timeout: Duration::from_secs(30 * 60),
        }
    }

    /// Returns the address that it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of splits that it serves now.
    pub fn streams(&self) -> usize {
        self.methods.streams()
    }

    /// Serves until the process is told to stop by SIGTERM or SIGINT.
    ///
    /// # Errors
    /// [`Error::Refused`] if a dispatcher that was started again refuses this data worker; [`Error::NoDispatcher`] if
    /// none has answered for [`dispatcher_timeout`](DataWorkerBuilder::dispatcher_timeout); [`Error::Threads`] if
    /// signals cannot be handled.
    pub fn join(mut self) -> Result<()> {
        self.threads.block_on(async {
            tokio::select! {
                stopped = stop_signal() => stopped.map_err(Error::Threads),
                error = self.announcer.failure(&mut self.standing) => Err(error),
            }
        })
    }
}

impl DataWorkerBuilder {
    /// Adds a dataset under a name.
    pub fn dataset<T, L>(mut self, name: impl Into<String>, dataset: &Dataset<T>) -> DataWorkerBuilder
    where
        T: Transfer<L>,
        L: 'static,
    {
        self.datasets.push((name.into(), Arc::new(Of::<T, L>::new(dataset.clone()))));
        self
    }

    /// Sets the dispatcher's host:port. Default: DISTRIBUTE_DATA_SERVICE.
    pub fn dispatcher(self, address: impl Into<String>) -> DataWorkerBuilder {
        DataWorkerBuilder { dispatcher: Some(address.into()), ..self }
    }

    /// Sets the identity of the data service. Default: the one that DISTRIBUTE_DATA_SERVICE_ID names, else one that all
    /// services without a name share.
    pub fn identity(self, identity: JobId) -> DataWorkerBuilder {
        DataWorkerBuilder { identity: Some(identity), ..self }
    }

    /// Sets the secret that all processes of the data service prove to each other on every connection. Default: what
    /// DISTRIBUTE_DATA_SERVICE_SECRET_FILE or DISTRIBUTE_DATA_SERVICE_SECRET gives.
    pub fn secret(self, secret: JobSecret) -> DataWorkerBuilder {
        DataWorkerBuilder { secret: Some(secret), ..self }
    }

    /// Sets the certificate by which processes of the data service use TLS; all of them, or none. Default: what
    /// DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY give.
    pub fn tls(self, tls: JobTls) -> DataWorkerBuilder {
        DataWorkerBuilder { tls: Some(tls), ..self }
    }

    /// Sets the address to listen at. Default: a free port, of 127.0.0.1 if the dispatcher is at a loopback address,
    /// else of all interfaces.
    pub fn bind(self, address: impl Into<String>) -> DataWorkerBuilder {
        DataWorkerBuilder { bind: Some(address.into()), ..self }
    }

    /// Sets the host name or address at which consumers reach this data worker. Default: that of the interface towards
    /// the dispatcher.
    pub fn host(self, host: impl Into<String>) -> DataWorkerBuilder {
        DataWorkerBuilder { host: Some(host.into()), ..self }
    }

    /// Sets how many splits are served at once, each on a thread of its own. At least 1. Default: 256.
    pub fn max_streams(self, streams: usize) -> DataWorkerBuilder {
        DataWorkerBuilder { max_streams: streams, ..self }
    }

    /// Sets how long [`start`](DataWorkerBuilder::start) waits for the dispatcher. Default: 30 s.
    pub fn register_timeout(self, timeout: Duration) -> DataWorkerBuilder {
        DataWorkerBuilder { register_timeout: timeout, ..self }
    }

    /// Sets how long the data worker serves without a dispatcher. Default: 30 min.
    pub fn dispatcher_timeout(self, timeout: Duration) -> DataWorkerBuilder {
        DataWorkerBuilder { dispatcher_timeout: timeout, ..self }
    }

    /// Starts to serve, and registers at the dispatcher. Reads the first element of each dataset before.
    ///
    /// # Errors
    /// - [`Error::NoDataset`], [`Error::Twice`], [`Error::NoAddress`] or [`Error::Option`] for invalid options.
    /// - [`Error::Secret`] if the secret cannot be read.
    /// - [`Error::Input`] if the first element of a dataset cannot be read, [`Error::Element`] if it cannot be sent.
    /// - [`Error::Listen`] if the address cannot be used; [`Error::Threads`] if the runtime cannot be started.
    /// - [`Error::NoDispatcher`] if the dispatcher does not answer in time; [`Error::Refused`] if it refuses this data
    ///   worker.
    pub fn start(self) -> Result<DataWorker> {
        if self.max_streams == 0 {
            let (what, given, expected) = ("max_streams", "0".to_owned(), "at least 1");
            return Err(Error::Option { what, given, expected });
        }
        let dispatcher = dispatcher_address(self.dispatcher)?;
        let identity = Identity::of(self.identity, self.secret, self.tls)?;
        let mut datasets = BTreeMap::new();
        let mut served = Vec::new();
        for (name, dataset) in self.datasets {
            let settings = dataset.settings()?;
            served.push(ServedDataset { name: name.clone(), settings: settings.clone() });
            let digest = crate::registry::digest(&settings);
            if datasets.insert(name.clone(), (dataset, digest)).is_some() {
                return Err(Error::Twice { name });
            }
        }
        if datasets.is_empty() {
            return Err(Error::NoDataset);
        }
        let (listener, host) = listen(self.bind, self.host, &dispatcher)?;
        let address = listener.local_addr().map_err(Error::Threads)?;
        identity.warn_if_exposed("a data worker", &listener);
        let own = format!("{host}:{}", address.port());
        let threads = threads("data-worker")?;
        let methods = Arc::new(DataWorkerMethods::new(datasets, self.max_streams));
        let announcer = Announcer {
            dispatcher,
            registration: Registration { address: own, datasets: served },
            identity: identity.clone(),
            dispatcher_timeout: self.dispatcher_timeout,
        };
        let serving = methods.clone();
        let standing = threads.block_on(async {
            serve(listener, serving, identity, CALLER_SILENCE).map_err(Error::Threads)?;
            let mut standing = announcer.start();
            announcer.registered(&mut standing, self.register_timeout).await?;
            Ok::<_, Error>(standing)
        })?;
        tracing::info!("the data worker listens at {address} and is registered at {}", announcer.dispatcher);
        Ok(DataWorker { address, methods, standing, announcer, threads })
    }

    /// Starts to serve, and serves until the process is told to stop.
    ///
    /// # Errors
    /// The errors of [`start`](DataWorkerBuilder::start) and [`join`](DataWorker::join).
    pub fn serve(self) -> Result<()> {
        self.start()?.join()
    }
}

impl std::fmt::Debug for DataWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataWorker").field("address", &self.address).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for DataWorkerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&String> = self.datasets.iter().map(|(name, _)| name).collect();
        f.debug_struct("DataWorkerBuilder").field("datasets", &names).finish_non_exhaustive()
    }
}

/// Returns the given address of the dispatcher, or that of the environment.
///
/// # Errors
/// [`Error::NoAddress`], or [`Error::Option`] if it is not host:port.
pub(crate) fn dispatcher_address(given: Option<String>) -> Result<String> {
    let address = match given {
        Some(given) => given,
        None => environment::address()?.ok_or(Error::NoAddress)?,
    };
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
    match port {
        Some(Ok(1..)) => Ok(address),
        _ => Err(Error::Option {
            what: "the address of the dispatcher",
            given: address.escape_debug().take(80).collect(),
            expected: "host:port, such as 10.0.0.7:5050",
        }),
    }
}

/// Listens, and returns the host at which others reach the listener.
fn listen(bind: Option<String>, host: Option<String>, dispatcher: &str) -> Result<(TcpListener, String)> {
    let failed = |address: &str, source| Error::Listen { address: address.to_owned(), source };
    let target = look_up(dispatcher, RESOLVE_TIMEOUT).map_err(|source| failed(dispatcher, source))?;
    let target = target.first().copied().ok_or_else(|| failed(dispatcher, std::io::ErrorKind::NotFound.into()))?;
    let any = if target.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let bind = match (bind, target.ip().is_loopback()) {
        (Some(bind), _) => bind,
        (None, true) => SocketAddr::new(target.ip(), 0).to_string(),
        (None, false) => any.to_owned(),
    };
    let listener = TcpListener::bind(&bind).map_err(|source| failed(&bind, source))?;
    let bound = listener.local_addr().map_err(Error::Threads)?.ip();
    let host = match host {
        Some(host) => host,
        None if !bound.is_unspecified() => bound.to_string(),
        None => {
            // Chooses the interface towards the dispatcher; nothing is sent.
            let towards = UdpSocket::bind(any).and_then(|socket| {
                socket.connect(target)?;
                socket.local_addr()
            });
            towards.map_err(|source| failed(&bind, source))?.ip().to_string()
        }
    };
    // An IPv6 address is written in brackets before a port.
    let is_v6 = host.contains(':') && !host.starts_with('[');
    Ok((listener, if is_v6 { format!("[{host}]") } else { host }))
}

/// Returns when the process is told to stop.
#[cfg(unix)]
async fn stop_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

#[cfg(not(unix))]
async fn stop_signal() -> std::io::Result<()> {
    tokio::signal::ctrl_c().await
}

/// How long the lookup of the dispatcher's name may take.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Silence after which a consumer's connection is closed.
const CALLER_SILENCE: Duration = Duration::from_secs(20);

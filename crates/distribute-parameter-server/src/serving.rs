//! The port and the threads of a task that serves.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use distribute_cluster::secret::warn_if_exposed;
use distribute_cluster::threads::Threads;
use distribute_cluster::{ClusterSpec, Task, look_up};

use crate::wire::OwnJob;
use crate::{Error, Result};

/// The threads of a task that serves at its address. They end when it is dropped.
pub(crate) struct Serving {
    task: Task,
    address: SocketAddr,
    threads: Threads,
}

impl Serving {
    /// Listens at the task's address, and starts threads.
    ///
    /// # Errors
    /// [`Error::Cluster`] if the cluster does not have the task, [`Error::Listen`] if the port is in use or the task's
    /// own address does not resolve within 30 s, [`Error::Threads`] if the runtime cannot be started.
    pub(crate) fn new(task: Task, cluster: &ClusterSpec, job: &OwnJob) -> Result<(Serving, TcpListener)> {
        let listener = listen(task, cluster.task_address(task)?)?;
        let address = listener.local_addr().map_err(Error::Threads)?;
        warn_if_exposed(
            &task.to_string(),
            Some(address.ip()),
            (job.secret.as_ref(), job.tls.as_ref()),
            "DISTRIBUTE_JOB_SECRET_FILE",
        );
        let threads = Threads::start(format!("{}-{}", task.kind, task.index), 2).map_err(Error::Threads)?;
        Ok((Serving { task, address, threads }, listener))
    }

    pub(crate) fn task(&self) -> Task {
        self.task
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Runs a future on this thread.
    pub(crate) fn block_on<R>(&self, future: impl Future<Output = R>) -> R {
        self.threads.block_on(future)
    }

    /// Ends the threads. Pending answers are sent, but what never ends is not waited for.
    pub(crate) fn end(self) {
        self.block_on(async { tokio::time::sleep(Duration::from_millis(50)).await });
    }
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serving").field("task", &self.task).field("address", &self.address).finish_non_exhaustive()
    }
}

/// Listens on a task's port: on loopback only if its address is a loopback address, else on all interfaces, since the
/// name by which others call a task need not belong to this machine.
fn listen(task: Task, address: &str) -> Result<TcpListener> {
    let failed = |source| Error::Listen { task, address: address.to_owned(), source };
    let port = address.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0);
    let addresses = match look_up(address, RESOLVE_TIMEOUT) {
        Ok(addresses) => addresses,
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => return Err(failed(error)),
        // The name may be known to other machines only.
        Err(_) => Vec::new(),
    };
    let loopback = addresses.into_iter().find(|address| address.ip().is_loopback());
    match loopback {
        Some(address) => TcpListener::bind(address).map_err(failed),
        None => TcpListener::bind((IpAddr::from(Ipv6Addr::UNSPECIFIED), port))
            .or_else(|_| TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), port)))
            .map_err(failed),
    }
}

/// How long the resolution of the task's own address may take.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);

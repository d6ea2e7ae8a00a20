//! Rank 0's service: its socket, its start and its shutdown.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

use super::connection::{FIRST_MESSAGE, LINGER, serve};
use super::driver::Driver;
use super::pulse::now;
use super::service::Hub;
use super::{CoordinationOptions, listen};
use crate::net::TcpListener;
use crate::secret::{JOB_REMEDY, warn_if_exposed};
use crate::{Door, Error, Incoming, Membership, Result};

/// The length of the queue of connections that wait to be accepted; the system may limit it further.
pub(crate) const QUEUE: i32 = 4096;

/// The running service.
pub(super) struct Leader {
    hub: Arc<Hub>,
    address: String,
    serving: Mutex<Option<Serving>>,
}

struct Serving {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<()>,
}

impl Leader {
    pub(super) fn start(membership: &Membership, options: &mut CoordinationOptions, driver: &Driver) -> Result<Leader> {
        let failed = |source| Error::Listen {
            task: membership.task().to_string(),
            address: membership.leader_address.clone(),
            source,
        };
        let listener = match options.listener.take() {
            // Cloned because the caller may keep a handle of the socket.
            Some(listener) => listener.try_clone(),
            None => listen::listen(membership),
        };
        let listener = listener.map_err(failed)?;
        // The standard library's queue holds 128 connections. In a larger job that starts at once, the system drops
        // what comes on top, and each drop costs a member seconds.
        rustix::net::listen(&listener, QUEUE).map_err(|error| failed(error.into()))?;
        let address = listen::own_address(&listener).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let _guard = driver.handle().enter();
        let listener = TcpListener::from_std(listener).map_err(failed)?;
        Leader::serving(listener, address, membership, options)
    }

    /// Starts the service of a listener in the event loop that the caller has entered.
    pub(super) fn serving(
        listener: TcpListener,
        address: String,
        membership: &Membership,
        options: &CoordinationOptions,
    ) -> Result<Leader> {
        let hub = Arc::new(Hub::new(membership.clone(), options)?);
        let service = format!("{}, which leads job {},", membership.task(), membership.job_id());
        let bound = listener.local_addr().ok().map(|address| address.ip());
        let proofs = (options.secret.as_ref(), options.tls.as_ref());
        warn_if_exposed(&service, bound, proofs, "DISTRIBUTE_JOB_SECRET_FILE");
        let door = Door::new(service, options.secret.clone(), super::terms(membership), JOB_REMEDY);
        let door = Arc::new(door.tls(options.tls.clone()));
        let incoming = Incoming::from_listener(listener, FIRST_MESSAGE, membership.world_size() as usize + STRANGERS);
        let incoming = incoming.behind(door.clone());
        let (stop, stopped) = oneshot::channel::<()>();
        let ended = tokio::spawn(accept(hub.clone(), incoming, door, options.heartbeat_timeout, stopped));
        // Short enough that a silence is detected soon after its timeout.
        let period = options.heartbeat_interval.min(options.heartbeat_timeout / 8).max(Duration::from_millis(1));
        tokio::spawn(watch(hub.clone(), period));
        Ok(Leader { hub, address, serving: Mutex::new(Some(Serving { stop, ended })) })
    }

    /// Returns the incarnation that members are told.
    #[cfg(test)]
    pub(super) fn incarnation(&self) -> crate::Incarnation {
        self.hub.incarnation
    }

    /// Returns the address at which this process itself reaches the service.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Tells all members that the leader leaves, answers pending calls, and shuts the service down.
    pub(super) fn close(&self) -> impl Future<Output = ()> + Send + use<> {
        let (hub, serving) = (self.hub.clone(), self.serving.lock().take());
        async move {
            hub.close();
            if let Some(Serving { stop, mut ended }) = serving {
                let _ = stop.send(());
                if tokio::time::timeout(LINGER, &mut ended).await.is_err() {
                    ended.abort();
                }
            }
        }
    }
}

/// The number of unidentified connections that may be open in addition to one for each member.
const STRANGERS: usize = 128;

/// Accepts connections until it is stopped, and waits until those that are there have ended.
async fn accept(
    hub: Arc<Hub>,
    mut incoming: Incoming,
    door: Arc<Door>,
    timeout: Duration,
    mut stopped: oneshot::Receiver<()>,
) {
    let mut connections = JoinSet::new();
    loop {
        // Connections come last, since there may be many.
        tokio::select! {
            biased;
            _ = &mut stopped => break,
            Some(_) = connections.join_next() => {}
            connection = incoming.accept() => {
                drop(connections.spawn(serve(hub.clone(), door.clone(), connection, timeout)));
            }
        }
    }
    drop(incoming);
    while connections.join_next().await.is_some() {}
}

/// Checks periodically for members that have fallen silent.
async fn watch(hub: Arc<Hub>, period: Duration) {
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        hub.change(|inner| inner.roster.look(now()));
    }
}

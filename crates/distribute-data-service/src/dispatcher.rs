//! The dispatcher of a data service.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_cluster::threads::Threads;
use distribute_cluster::{JobId, JobSecret, JobTls};
use parking_lot::Mutex;
use tonic::Status;
use tonic::body::Body;

use crate::registry::Registry;
use crate::wire::proto::{LocateRequest, Located, Registered, Registration};
use crate::wire::{Identity, Inbox, Methods, reply, serve};
use crate::{Error, Result};

/// Knows which data workers live and which datasets they serve. It holds no elements.
///
/// Data workers announce themselves every second; one that is silent for longer than
/// [`silence`](DispatcherOptions::silence) is forgotten. The first data worker of a dataset determines its settings:
/// one that serves another dataset of the same name is refused. A dispatcher that is started again at the same address
/// learns of the data workers by their next announcement; passes under way continue meanwhile.
///
/// `distribute data-service` is the same as a program.
///
/// # Examples
/// ```
/// use distribute_data_service::{Dispatcher, DispatcherOptions};
/// let dispatcher = Dispatcher::start(DispatcherOptions::default().bind("127.0.0.1:0"))?;
/// println!("DISTRIBUTE_DATA_SERVICE={}", dispatcher.address());
/// # Ok::<(), distribute_data_service::Error>(())
/// ```
///
/// # Source
/// `tf.data.experimental.service.DispatchServer`.
pub struct Dispatcher {
    address: SocketAddr,
    methods: Arc<DispatcherMethods>,
    /// Serve until they are dropped.
    _threads: Threads,
}

/// Options of a [`Dispatcher`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DispatcherOptions {
    /// The address to listen at. Default: 127.0.0.1 and a free port.
    pub bind: String,
    /// The identity of the data service. Default: the one that DISTRIBUTE_DATA_SERVICE_ID names, else one that all
    /// services without a name share.
    pub identity: Option<JobId>,
    /// The secret that all processes of the data service prove to each other on every connection. Default: what
    /// DISTRIBUTE_DATA_SERVICE_SECRET_FILE or DISTRIBUTE_DATA_SERVICE_SECRET gives.
    pub secret: Option<JobSecret>,
    /// The certificate by which processes of the data service use TLS; all of them, or none. Default: what
    /// DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY give.
    pub tls: Option<JobTls>,
    /// Silence after which a data worker is forgotten. At least 2 s. Default: 5 s.
    pub silence: Duration,
}

impl Default for DispatcherOptions {
    fn default() -> DispatcherOptions {
        DispatcherOptions {
            bind: "127.0.0.1:0".to_owned(),
            identity: None,
            secret: None,
            tls: None,
            silence: Duration::from_secs(5),
        }
    }
}

distribute_types::setters! {
    DispatcherOptions {
        identity: Option<JobId>,
        secret: Option<JobSecret>,
        tls: Option<JobTls>,
        silence: Duration,
    } into {
        bind: String,
    }
}

impl Dispatcher {
    /// Starts to serve.
    ///
    /// # Errors
    /// [`Error::Option`] for a silence below 2 s, or if DISTRIBUTE_DATA_SERVICE_ID is malformed; [`Error::Secret`] if
    /// the secret cannot be read; [`Error::Listen`] if
    /// the address cannot be used; [`Error::Threads`] if the runtime cannot be started.
    pub fn start(options: DispatcherOptions) -> Result<Dispatcher> {
        if options.silence < MIN_SILENCE {
            return Err(Error::Option {
                what: "the silence after which a data worker is forgotten",
                given: format!("{:?}", options.silence),
                expected: "at least 2 s",
            });
        }
        let identity = Identity::of(options.identity, options.secret, options.tls)?;
        let failed = |source| Error::Listen { address: options.bind.clone(), source };
        let listener = TcpListener::bind(&options.bind).map_err(failed)?;
        let address = listener.local_addr().map_err(Error::Threads)?;
        identity.warn_if_exposed("the dispatcher of the data service", &listener);
        let threads = threads("data-dispatcher")?;
        let methods = Arc::new(DispatcherMethods { registry: Mutex::new(Registry::new(options.silence)) });
        let serving = methods.clone();
        threads.block_on(async move { serve(listener, serving, identity, CALLER_SILENCE) }).map_err(Error::Threads)?;
        tracing::info!("the dispatcher of the data service listens at {address}");
        Ok(Dispatcher { address, methods, _threads: threads })
    }

    /// Returns the address that it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the addresses of the data workers that live, sorted.
    pub fn workers(&self) -> Vec<String> {
        self.methods.registry.lock().workers(Instant::now())
    }
}

impl std::fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dispatcher").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Starts two threads of this name.
///
/// # Errors
/// [`Error::Threads`] if the system gives none.
pub(crate) fn threads(name: &str) -> Result<Threads> {
    Threads::start(name, 2).map_err(Error::Threads)
}

struct DispatcherMethods {
    registry: Mutex<Registry>,
}

impl Methods for DispatcherMethods {
    const NAME: &'static str = "distribute.v1.DataDispatcher";

    async fn call(self: Arc<Self>, method: String, mut inbox: Inbox) -> Result<Body, Status> {
        match method.as_str() {
            "Register" => {
                let registration: Registration = inbox.one().await?;
                self.registry.lock().register(registration, Instant::now()).map_err(Status::permission_denied)?;
                reply(Registered {})
            }
            "Locate" => {
                let LocateRequest { dataset } = inbox.one().await?;
                let located: Located = self.registry.lock().locate(&dataset, Instant::now());
                reply(located)
            }
            _ => Err(Status::unimplemented(format!("a dispatcher has no method {method:?}"))),
        }
    }
}

/// Twice the interval of announcements.
const MIN_SILENCE: Duration = Duration::from_secs(2);

/// Silence after which a connection of a data worker or consumer is closed.
const CALLER_SILENCE: Duration = Duration::from_secs(20);

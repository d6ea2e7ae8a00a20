//! An endpoint from which Prometheus reads the metrics of a training run.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::oneshot;

use super::{Callback, Training};
use crate::{Error, Result};

type Number = Gauge<f64, AtomicU64>;

/// Serves the metrics of a training run on the chief, at `/metrics`, until it is dropped:
///
/// ```text
/// distribute_training_epoch 3
/// distribute_training_steps_total 1407
/// distribute_training_examples_total 180000
/// distribute_training_learning_rate 0.001
/// distribute_training_value{name="val_loss"} 0.1312
/// ```
///
/// # Examples
/// ```
/// use distribute_train::callbacks::Prometheus;
/// let endpoint = Prometheus::serve("127.0.0.1:0")?;                    // a free port
/// assert_ne!(endpoint.address().port(), 0);
/// # Ok::<(), distribute_train::Error>(())
/// ```
///
/// # Source
/// The OpenMetrics text format.
#[derive(Debug)]
pub struct Prometheus {
    address: SocketAddr,
    /// Held until the training begins, which determines whether this process is the chief.
    listener: Option<TcpListener>,
    numbers: Numbers,
    server: Option<Server>,
}

#[derive(Clone, Debug, Default)]
struct Numbers {
    epoch: Gauge,
    steps: Counter,
    examples: Counter,
    learning_rate: Number,
    values: Family<Vec<(String, String)>, Number>,
}

#[derive(Debug)]
struct Server {
    /// Dropped to stop the server.
    _end: oneshot::Sender<Infallible>,
    /// Closed when the server has stopped.
    ended: mpsc::Receiver<Infallible>,
    thread: JoinHandle<()>,
}

impl Prometheus {
    /// Serves at an address of this machine, such as `0.0.0.0:9464`.
    ///
    /// # Errors
    /// [`Error::Listen`] if the address cannot be listened on.
    pub fn serve(address: &str) -> Result<Prometheus> {
        let failed = |source| Error::Listen { address: address.to_owned(), source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Prometheus { address, listener: Some(listener), numbers: Numbers::default(), server: None })
    }

    /// Returns the address of the endpoint.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Numbers {
    fn registry(&self) -> Registry {
        let mut registry = Registry::with_prefix("distribute_training");
        registry.register("epoch", "The epoch under way", self.epoch.clone());
        registry.register("steps", "Steps done", self.steps.clone());
        registry.register("examples", "Examples seen by all replicas", self.examples.clone());
        registry.register("learning_rate", "The learning rate of the next step", self.learning_rate.clone());
        registry.register("value", "Losses and metrics, by their names", self.values.clone());
        registry
    }

    fn note(&self, training: &Training<'_>) {
        let raise = |counter: &Counter, to: u64| counter.inc_by(to.saturating_sub(counter.get()));
        self.epoch.set(i64::from(training.epoch));
        raise(&self.steps, training.step);
        raise(&self.examples, training.examples);
        self.learning_rate.set(*training.learning_rate);
        for (name, value) in training.values {
            self.values.get_or_create(&vec![("name".to_owned(), name.clone())]).set(*value);
        }
    }
}

impl Callback for Prometheus {
    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        // Workers other than the chief release their port.
        let Some(listener) = self.listener.take().filter(|_| training.is_chief()) else { return Ok(()) };
        let failed = |source| Error::Listen { address: self.address.to_string(), source };
        self.server = Some(Server::start(listener, self.numbers.registry()).map_err(failed)?);
        Ok(())
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.numbers.note(training);
        Ok(())
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.numbers.note(training);
        Ok(())
    }
}

impl Server {
    fn start(listener: TcpListener, registry: Registry) -> io::Result<Server> {
        listener.set_nonblocking(true)?;
        let (_end, told) = oneshot::channel();
        let (running, ended) = mpsc::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let serve = move || {
            let _running = running;
            runtime.block_on(async {
                tokio::select! {
                    _ = told => {}
                    outcome = accept(listener, Arc::new(registry)) => {
                        if let Err(error) = outcome {
                            tracing::warn!("the endpoint for Prometheus has ended: {error}");
                        }
                    }
                }
            });
        };
        let thread = std::thread::Builder::new().name("prometheus".to_owned()).spawn(serve)?;
        Ok(Server { _end, ended, thread })
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        if let Some(Server { _end, ended, thread }) = self.server.take() {
            drop(_end);
            // The server has nothing to wait for, so the deadline is a precaution; a panic was reported when it
            // occurred.
            match ended.recv_timeout(Duration::from_secs(1)) {
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    tracing::warn!("the endpoint for Prometheus has not ended in 1 s")
                }
                _ => drop(thread.join()),
            }
        }
    }
}

async fn accept(listener: TcpListener, registry: Arc<Registry>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Most likely out of file descriptors, which may become available later.
            tokio::time::sleep(Duration::from_secs(1)).await;
            continue;
        };
        let registry = registry.clone();
        let answer = move |request| {
            let answer = answer(&registry, &request);
            async move { Ok::<_, Infallible>(answer) }
        };
        let mut server = http1::Builder::new();
        server.timer(TokioTimer::new()).header_read_timeout(Duration::from_secs(10));
        tokio::spawn(server.serve_connection(TokioIo::new(stream), hyper::service::service_fn(answer)));
    }
}

fn answer(registry: &Registry, request: &Request<hyper::body::Incoming>) -> Response<String> {
    let mut text = String::new();
    let known = request.uri().path() == "/metrics";
    let status = match known.then(|| prometheus_client::encoding::text::encode(&mut text, registry)) {
        Some(Ok(())) => StatusCode::OK,
        Some(Err(_)) => StatusCode::INTERNAL_SERVER_ERROR,
        None => StatusCode::NOT_FOUND,
    };
    let mut response = Response::new(text);
    *response.status_mut() = status;
    let format = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, format);
    response
}

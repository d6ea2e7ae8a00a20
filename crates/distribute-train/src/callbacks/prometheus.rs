//! An endpoint from which Prometheus reads the metrics of a training run.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::extract::State;
use axum::routing::get;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::{Callback, Training};
use crate::Result;
use crate::status::{OPEN_METRICS, Port, RELEASE, Routes, Server, answer};

type Number = Gauge<f64, AtomicU64>;

/// Serves the metrics of a training run on the chief, at `/metrics`, until it is dropped. In an elastic job whose chief
/// is lost, the next one serves them at the same address of its own host.
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
    /// Held until the training begins, which determines whether this process is the chief.
    port: Port,
    numbers: Numbers,
    /// That of the chief.
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

impl Prometheus {
    /// Serves at an address of this machine, such as `0.0.0.0:9464`. All workers of a host may be given the same one;
    /// the chief serves at it.
    ///
    /// # Errors
    /// [`Error::Listen`](crate::Error::Listen) if the address cannot be listened on. That another process has the port
    /// is an error of the chief's training, if it does not release it within 5 s.
    pub fn serve(address: &str) -> Result<Prometheus> {
        Ok(Prometheus { port: Port::reserve(address)?, numbers: Numbers::default(), server: None })
    }

    /// Returns the address of the endpoint.
    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }

    fn begin(&mut self) -> Result<()> {
        let routes = Routes::new().route("/metrics", get(metrics)).with_state(Arc::new(self.numbers.registry()));
        self.server = Some(Server::start(self.port.listen(RELEASE)?, routes)?);
        Ok(())
    }
}

impl Numbers {
    fn registry(&self) -> Registry {
        let mut registry = Registry::with_prefix("distribute_training");
        registry.register("epoch", "The epoch under way", self.epoch.clone());
        registry.register("steps", "Steps done", self.steps.clone());
        registry.register("examples", "Steps done, times the global batch", self.examples.clone());
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
        if training.is_chief() {
            return self.begin();
        }
        self.port.release();
        Ok(())
    }

    fn members_changed(&mut self, training: &mut Training<'_>) -> Result<()> {
        if !training.is_chief() {
            self.server = None;
        } else if self.server.is_none()
            && let Err(error) = self.begin()
        {
            distribute_notice::warn!("this process is the job's chief now, and serves no metrics: {error}");
        }
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

async fn metrics(State(registry): State<Arc<Registry>>) -> axum::response::Response {
    let mut text = String::new();
    let encoded = prometheus_client::encoding::text::encode(&mut text, &registry);
    answer(encoded.map(|()| text), OPEN_METRICS)
}

//! Metrics under other names.

use super::{Metric, Predictions};

/// A metric under another name, for several of a kind.
///
/// # Examples
/// ```
/// use distribute_train::metrics::{Metrics, Named, Precision};
/// let strict = Named::new("strict_precision", Precision { threshold: 0.9 });
/// let metrics = Metrics::new().with(Precision::default()).with(strict);
/// metrics.check_names()?;
/// # Ok::<(), distribute_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Named<M> {
    name: String,
    metric: M,
}

impl<M: Metric> Named<M> {
    /// Gives a metric a name.
    pub fn new(name: impl Into<String>, metric: M) -> Named<M> {
        Named { name: name.into(), metric }
    }
}

impl<M: Metric> Metric for Named<M> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn needs_classes(&self) -> bool {
        self.metric.needs_classes()
    }

    fn rises(&self) -> Option<bool> {
        self.metric.rises()
    }

    fn len(&self) -> usize {
        self.metric.len()
    }

    fn is_empty(&self) -> bool {
        self.metric.is_empty()
    }

    fn update(&self, sums: &mut [f64], predictions: &Predictions<'_>) {
        self.metric.update(sums, predictions);
    }

    fn result(&self, sums: &[f64]) -> f64 {
        self.metric.result(sums)
    }
}

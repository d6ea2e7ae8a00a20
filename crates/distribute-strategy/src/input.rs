//! Datasets, distributed over the replicas of a strategy.

use distribute_input::{BoxError, DataPlan, Dataset, Element, InputContext, InputOptions, InputTopology};
use distribute_values::PerReplica;

use crate::{Result, Strategy};

/// A dataset whose every step gives each replica of this process its part of the global batch.
///
/// # Source
/// `tf.distribute.DistributedDataset`.
pub struct DistributedDataset<T> {
    dataset: distribute_input::DistributedDataset<T>,
}

impl<T: Send + 'static> DistributedDataset<T> {
    /// A pass over the data; the next call begins the next pass.
    pub fn iter(&self) -> DistributedIterator<T> {
        DistributedIterator { steps: self.dataset.iter() }
    }

    /// Which worker and replica reads what: print it.
    pub fn plan(&self) -> &DataPlan {
        self.dataset.plan()
    }

    /// The number of steps of a pass, where it is known.
    pub fn steps(&self) -> Option<usize> {
        match self.dataset.cardinality() {
            distribute_input::Cardinality::Known(steps) => Some(steps),
            _ => None,
        }
    }
}

impl<T: Send + 'static> IntoIterator for DistributedDataset<T> {
    type Item = Result<PerReplica<T>>;
    type IntoIter = DistributedIterator<T>;

    fn into_iter(self) -> DistributedIterator<T> {
        self.iter()
    }
}

impl<T: Send + 'static> IntoIterator for &DistributedDataset<T> {
    type Item = Result<PerReplica<T>>;
    type IntoIter = DistributedIterator<T>;

    fn into_iter(self) -> DistributedIterator<T> {
        self.iter()
    }
}

/// One pass over a [`DistributedDataset`].
pub struct DistributedIterator<T> {
    steps: distribute_input::DistributedIter<T>,
}

impl<T: Send + 'static> Iterator for DistributedIterator<T> {
    type Item = Result<PerReplica<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.steps.next()?.map(PerReplica::new).map_err(Into::into))
    }
}

impl Strategy {
    /// Splits every global batch of a dataset over all replicas.
    ///
    /// # Errors
    /// [`distribute_input::Error`] where the dataset is not batched.
    ///
    /// # Source
    /// `tf.distribute.Strategy.experimental_distribute_dataset`.
    pub fn distribute_dataset<T, L>(&self, dataset: &Dataset<T>) -> Result<DistributedDataset<T>>
    where
        T: Element<L>,
    {
        let dataset = distribute_input::distribute_dataset(dataset, self.input_topology()?, InputOptions::default())?;
        Ok(DistributedDataset { dataset })
    }

    /// A dataset that `make` makes once for this process, batched per replica; each replica takes the next batch in turn.
    ///
    /// # Errors
    /// What `make` returns.
    ///
    /// # Source
    /// `tf.distribute.Strategy.distribute_datasets_from_function`.
    pub fn distribute_datasets_from_function<T, L>(
        &self,
        make: impl FnOnce(InputContext) -> Result<Dataset<T>, BoxError>,
    ) -> Result<DistributedDataset<T>>
    where
        T: Element<L>,
    {
        let topology = self.input_topology()?;
        let dataset = distribute_input::distribute_datasets_from_function(topology, InputOptions::default(), make)?;
        Ok(DistributedDataset { dataset })
    }

    fn input_topology(&self) -> Result<InputTopology> {
        let topology = self.topology();
        Ok(InputTopology::new(topology.workers, topology.worker, topology.replicas_per_worker)?)
    }
}

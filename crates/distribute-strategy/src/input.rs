//! Datasets, distributed over the replicas of a strategy.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use distribute_collectives::{ReduceOp, on_local_ranks};
use distribute_input::{
    BoxError, DataPlan, Dataset, Element, ElementSpec, InputContext, InputOptions, InputPosition, InputTopology, More,
    UnequalData,
};
use distribute_values::PerReplica;

use crate::{Error, Result, Strategy};

/// A dataset whose every step gives each replica of this process its part of the global batch.
///
/// # Source
/// `tf.distribute.DistributedDataset`.
pub struct DistributedDataset<T> {
    dataset: distribute_input::DistributedDataset<T>,
    strategy: Strategy,
}

impl<T: Clone + Send + 'static> DistributedDataset<T> {
    /// A pass over the data; the next call begins the next pass.
    pub fn iter(&self) -> DistributedIterator<T> {
        self.pass(self.dataset.iter())
    }

    /// The pass of a given number, from 0, without counting it: what it yields depends on that number only.
    pub fn iter_epoch(&self, epoch: u64) -> DistributedIterator<T> {
        self.pass(self.dataset.iter_epoch(epoch))
    }

    /// Goes on with the pass that a position is in, whatever number of workers it was saved under; the next call of
    /// [`iter`](DistributedDataset::iter) begins the pass after it.
    ///
    /// # Errors
    /// [`distribute_input::Error::Position`] where an input function chose the data of another number of workers.
    pub fn iter_from(&self, position: &InputPosition) -> Result<DistributedIterator<T>> {
        Ok(self.pass(self.dataset.iter_from(position)?))
    }

    fn pass(&self, steps: distribute_input::DistributedIter<T>) -> DistributedIterator<T> {
        let unequal = if self.dataset.ends_together() { None } else { Some(self.dataset.unequal_data()) };
        DistributedIterator {
            steps: Arc::new(Mutex::new(steps)),
            dataset: self.dataset.clone(),
            strategy: self.strategy.clone(),
            unequal,
            ticket: None,
            ended: false,
            waited: Duration::ZERO,
        }
    }

    /// The same, where a replica without examples in a step gets a batch without rows: for closures that count rows by
    /// themselves, and work on none. By default it gets one row that another replica has, too, which weighs nothing; see
    /// [`ReplicaContext::has_examples`](crate::ReplicaContext::has_examples).
    ///
    /// # Examples
    /// ```
    /// use distribute_input::Dataset;
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let data = strategy.distribute_dataset(&Dataset::range(0..9).batch(2))?;
    /// let last = |data: &distribute_strategy::DistributedDataset<_>| data.iter().last().ok_or(Error::NoData)?;
    /// assert_eq!(last(&data)?.values()[1].shape(), [1]);
    /// assert_eq!(last(&data.with_empty_batches())?.values()[1].shape(), [0]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn with_empty_batches(self) -> DistributedDataset<T> {
        DistributedDataset { dataset: self.dataset.without_stand_ins(), strategy: self.strategy }
    }

    /// Applies a function to each local replica's element, on the thread that reads ahead: for example a copy to the replica's
    /// device. It gets the replica's number within this process.
    pub fn map_replicas<U, F>(self, function: F) -> DistributedDataset<U>
    where
        U: Send + 'static,
        F: Fn(usize, T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        DistributedDataset { dataset: self.dataset.map_replicas(function), strategy: self.strategy }
    }

    /// The shapes and types of what each replica gets, whose rows are left open; empty where there is no data.
    ///
    /// # Errors
    /// Those of reading the first batch.
    ///
    /// # Source
    /// `tf.distribute.DistributedDataset.element_spec`.
    pub fn element_spec<L>(&self) -> Result<Vec<ElementSpec>>
    where
        T: Element<L>,
    {
        Ok(self.dataset.element_spec()?)
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

impl<T: Clone + Send + 'static> IntoIterator for DistributedDataset<T> {
    type Item = Result<PerReplica<T>>;
    type IntoIter = DistributedIterator<T>;

    fn into_iter(self) -> DistributedIterator<T> {
        self.iter()
    }
}

impl<T: Clone + Send + 'static> IntoIterator for &DistributedDataset<T> {
    type Item = Result<PerReplica<T>>;
    type IntoIter = DistributedIterator<T>;

    fn into_iter(self) -> DistributedIterator<T> {
        self.iter()
    }
}

/// One pass over a [`DistributedDataset`].
///
/// Where workers may have unequal data, they agree before each step whether there is one. That costs no operation of its own in
/// steps that an optimizer takes part in: the word travels with the gradients.
pub struct DistributedIterator<T> {
    steps: Arc<Mutex<distribute_input::DistributedIter<T>>>,
    dataset: distribute_input::DistributedDataset<T>,
    strategy: Strategy,
    /// What happens where workers have unequal data; `None` where they cannot.
    unequal: Option<UnequalData>,
    /// Under which the last step's word was given.
    ticket: Option<u64>,
    ended: bool,
    waited: Duration,
}

impl<T: Clone + Send + 'static> DistributedIterator<T> {
    /// Where all workers stand after the steps that were given out: part of a checkpoint. Where each worker reads data of its
    /// own, every one must call this.
    ///
    /// # Errors
    /// The collective's.
    pub fn position(&self) -> Result<InputPosition> {
        let own = lock(&self.steps).position().clone();
        if self.unequal.is_none() {
            return Ok(own);
        }
        let unreadable = |error: serde_json::Error| distribute_input::Error::Position { problem: error.to_string() };
        let text = serde_json::to_vec(&own).map_err(unreadable)?;
        let (groups, replicas) = (self.strategy.groups(), self.strategy.num_local_replicas());
        let lengths = on_local_ranks(&groups, |_, group| {
            group.all_gather_async(vec![text.len() as u64], vec![0; group.world_size()])
        })?;
        let [_, lengths] = lengths.unwrap_or_default();
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        let texts = on_local_ranks(&groups, |_, group| {
            group.all_gather_v_async(text.clone(), vec![0u8; lengths.iter().sum()], &lengths)
        })?;
        let [_, texts] = texts.unwrap_or_default();
        let (mut workers, mut start) = (Vec::new(), 0);
        for (rank, length) in lengths.iter().enumerate() {
            // All replicas of a worker said the same.
            if rank % replicas == 0 {
                workers.push(serde_json::from_slice(&texts[start..start + length]).map_err(unreadable)?);
            }
            start += length;
        }
        Ok(InputPosition::of_all(workers)?)
    }

    /// The next step, or nothing at the end.
    ///
    /// # Errors
    /// Those of reading the data, and the collective's.
    ///
    /// # Source
    /// `tf.distribute.DistributedIterator.get_next_as_optional`.
    pub fn get_next_as_optional(&mut self) -> Result<Option<PerReplica<T>>> {
        self.next().transpose()
    }

    /// How long [`next`](Iterator::next) has taken altogether: the time for which replicas waited for data.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The next parts of this worker's replicas, and whether each has examples.
    fn next_parts(&self) -> Result<Option<PerReplica<T>>> {
        let mut steps = lock(&self.steps);
        let Some(parts) = steps.next().transpose()? else { return Ok(None) };
        Ok(Some(self.per_replica(parts, steps.examples())))
    }

    /// Batches without rows need no weight.
    fn per_replica(&self, parts: Vec<T>, examples: &[bool]) -> PerReplica<T> {
        let parts = PerReplica::new(parts);
        if self.dataset.has_stand_ins() { parts.with_examples(examples) } else { parts }
    }

    fn step(&mut self) -> Result<Option<PerReplica<T>>> {
        let Some(unequal) = self.unequal else {
            return self.next_parts();
        };
        if self.ended {
            return Ok(None);
        }
        let word = {
            let steps = Arc::clone(&self.steps);
            move || flag(unequal, lock(&steps).more())
        };
        let steps = &self.strategy.replicas().step_word;
        let sum = match self.ticket.take().and_then(|ticket| steps.agreed(ticket)) {
            Some(sum) => sum,
            None => self.agree(word())?,
        };
        let go_on = match unequal {
            UnequalData::Pad => sum > 0,
            UnequalData::Drop | UnequalData::Stop => sum == 0,
        };
        if !go_on {
            self.ended = true;
            return Ok(None);
        }
        let parts = match self.next_parts()? {
            Some(parts) => parts,
            None => match self.dataset.empty_parts()? {
                Some(parts) => {
                    let without = vec![false; parts.len()];
                    self.per_replica(parts, &without)
                }
                None => return Err(Error::NoData),
            },
        };
        self.ticket = Some(steps.announce(Arc::new(word)));
        Ok(Some(parts))
    }

    /// Sums every worker's word, where no step has carried it.
    fn agree(&self, word: u32) -> Result<u32> {
        let sum = on_local_ranks(&self.strategy.groups(), |local, group| {
            group.all_reduce_async(vec![if local == 0 { word } else { 0 }], ReduceOp::Sum)
        })?;
        Ok(sum.map_or(0, |sum| sum[0]))
    }
}

/// A worker's word: for padding, that it has more; else, that it has not.
fn flag(unequal: UnequalData, more: More) -> u32 {
    u32::from(match unequal {
        UnequalData::Pad => more > More::Nothing,
        UnequalData::Drop => more < More::Full,
        UnequalData::Stop => more == More::Nothing,
    })
}

impl<T: Clone + Send + 'static> Iterator for DistributedIterator<T> {
    type Item = Result<PerReplica<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        let began = Instant::now();
        let step = self.step();
        self.waited += began.elapsed();
        step.transpose()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.distribute_dataset_with(dataset, InputOptions::default())
    }

    /// As [`distribute_dataset`](Strategy::distribute_dataset), with options.
    ///
    /// # Errors
    /// As [`distribute_dataset`](Strategy::distribute_dataset), and where the options do not fit.
    pub fn distribute_dataset_with<T, L>(
        &self,
        dataset: &Dataset<T>,
        options: InputOptions,
    ) -> Result<DistributedDataset<T>>
    where
        T: Element<L>,
    {
        let dataset = distribute_input::distribute_dataset(dataset, self.input_topology()?, options)?;
        Ok(DistributedDataset { dataset: dataset.with_stand_ins(), strategy: self.clone() })
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
        make: impl FnMut(InputContext) -> Result<Dataset<T>, BoxError>,
    ) -> Result<DistributedDataset<T>>
    where
        T: Element<L>,
    {
        self.distribute_datasets_from_function_with(InputOptions::default(), make)
    }

    /// As [`distribute_datasets_from_function`](Strategy::distribute_datasets_from_function), with options.
    ///
    /// # Errors
    /// What `make` returns.
    pub fn distribute_datasets_from_function_with<T, L>(
        &self,
        options: InputOptions,
        make: impl FnMut(InputContext) -> Result<Dataset<T>, BoxError>,
    ) -> Result<DistributedDataset<T>>
    where
        T: Element<L>,
    {
        let topology = self.input_topology()?;
        let dataset = distribute_input::distribute_datasets_from_function(topology, options, make)?;
        Ok(DistributedDataset { dataset: dataset.with_stand_ins(), strategy: self.clone() })
    }

    fn input_topology(&self) -> Result<InputTopology> {
        let topology = self.topology();
        Ok(InputTopology::new(topology.workers, topology.worker, topology.replicas_per_worker)?)
    }
}

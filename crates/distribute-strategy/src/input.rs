//! Datasets distributed over the replicas of a strategy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_collectives::{ReduceOp, on_local_ranks};
use distribute_device::DeviceKind;
use distribute_input::{
    BoxError, DataPlan, Dataset, Element, ElementSpec, InputContext, InputOptions, InputPosition, More, UnequalData,
    WorkerDataset, WorkerIterator,
};
use distribute_types::Topology;
use distribute_values::PerReplica;
use parking_lot::Mutex;

use crate::settings::INPUT;
use crate::step_header::Announced;
use crate::{Error, Result, Strategy};

/// A dataset of which each step gives every replica of this process its part of the global batch.
///
/// # Source
/// `tf.distribute.DistributedDataset`.
pub struct DistributedDataset<T> {
    /// The part of this process when the dataset was distributed.
    dataset: WorkerDataset<T>,
    /// Its part now, if processes have joined or left since.
    present: Mutex<Option<WorkerDataset<T>>>,
    /// Divides the dataset again; `None` if the processes do not change.
    divide: Option<Divide<T>>,
    strategy: Strategy,
}

/// Returns the part of a worker of this topology.
type Divide<T> = Arc<dyn Fn(Topology) -> distribute_input::Result<WorkerDataset<T>> + Send + Sync>;

impl<T: Clone + Send + 'static> DistributedDataset<T> {
    /// Starts the next pass over the data.
    pub fn iter(&self) -> DistributedIterator<T> {
        self.pass(|dataset| Ok(dataset.iter()))
    }

    /// Starts the pass with the given number, counted from 0, without advancing the count; its elements depend on that
    /// number only.
    pub fn iter_epoch(&self, epoch: u64) -> DistributedIterator<T> {
        self.pass(|dataset| Ok(dataset.iter_epoch(epoch)))
    }

    /// Resumes the pass that a position lies in, whatever the number of workers it was saved under. The next call of
    /// [`iter`](DistributedDataset::iter) starts the pass after it.
    ///
    /// # Errors
    /// [`distribute_input::Error::Position`] if an input function chose the data for another number of workers.
    pub fn iter_from(&self, position: &InputPosition) -> Result<DistributedIterator<T>> {
        let mut refused = None;
        let pass = self.pass(|dataset| {
            dataset.iter_from(position).inspect_err(|error| refused = Some(Error::from(error.clone())))
        });
        refused.map_or(Ok(pass), Err)
    }

    fn pass(
        &self,
        begin: impl FnOnce(&WorkerDataset<T>) -> distribute_input::Result<WorkerIterator<T>>,
    ) -> DistributedIterator<T> {
        let dataset = self.present();
        let begun = dataset.as_ref().map_err(Clone::clone).and_then(begin);
        // Without steps, it only tells the failure.
        let dataset = dataset.unwrap_or_else(|_| self.dataset.clone());
        for (name, value) in dataset.plan().settings() {
            self.strategy.declare(&format!("{INPUT}{name}"), value);
        }
        let (steps, failure) = match begun {
            Ok(steps) => (steps, None),
            Err(error) => (dataset.iter_epoch(0), Some(error.into())),
        };
        let unequal = (!dataset.ends_together(steps.position())).then(|| dataset.unequal_data());
        DistributedIterator {
            steps: Arc::new(Mutex::new(steps)),
            dataset,
            strategy: self.strategy.clone(),
            changes: self.strategy.changes(),
            failure,
            unequal,
            announced: None,
            ended: false,
            waited: Duration::ZERO,
        }
    }

    /// Returns this process's part among the present ones.
    fn present(&self) -> distribute_input::Result<WorkerDataset<T>> {
        let Some(divide) = &self.divide else { return Ok(self.dataset.clone()) };
        let topology = self.strategy.topology();
        let mut present = self.present.lock();
        match &*present {
            Some(present) if present.topology() == topology => Ok(present.clone()),
            _ => Ok(present.insert(divide(topology)?.counting_with(&self.dataset)).clone()),
        }
    }

    /// Changes this process's part, now and whenever the dataset is divided again.
    fn change<U: Send + 'static>(
        self,
        change: impl Fn(WorkerDataset<T>) -> WorkerDataset<U> + Send + Sync + 'static,
    ) -> DistributedDataset<U> {
        let change = Arc::new(change);
        let divide = self.divide.map(|divide| -> Divide<U> {
            let change = change.clone();
            Arc::new(move |topology| Ok(change(divide(topology)?)))
        });
        DistributedDataset { dataset: change(self.dataset), present: Mutex::default(), divide, strategy: self.strategy }
    }

    /// Gives a replica without examples a batch without rows, for closures that count rows themselves and work on none.
    /// By default it gets one row that another replica also has, with weight 0; see
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
        self.change(WorkerDataset::without_stand_ins)
    }

    /// Applies a function to each local replica's element on the prefetching thread, for example to copy it to the
    /// replica's device. The function is passed the replica's index within this process.
    pub fn map_replicas<U, F>(self, function: F) -> DistributedDataset<U>
    where
        U: Send + 'static,
        F: Fn(usize, T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        let function = Arc::new(function);
        self.change(move |dataset| {
            let function = function.clone();
            dataset.map_replicas(move |local, part| function(local, part))
        })
    }

    /// Combines the elements of one pass, beginning with `initial`. Every worker must call this.
    ///
    /// # Errors
    /// The first error of the pass or of `combine`.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ReduceOp;
    /// use distribute_input::Dataset;
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// use distribute_values::Axis;
    /// let strategy = MirroredStrategy::builder().num_replicas(2).build()?;
    /// let data = strategy.distribute_dataset(&Dataset::range(0..9).batch(4))?;
    /// let sum = data.reduce(0, |sum, batch| {
    ///     let parts = strategy.run_with(batch, |context, rows| {
    ///         Ok::<_, Error>(context.weight() as i64 * rows.as_slice().iter().sum::<i64>())
    ///     })?;
    ///     Ok::<_, Error>(sum + strategy.reduce(ReduceOp::Sum, &parts, Axis::None)?)
    /// })?;
    /// assert_eq!(sum, 36);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.distribute.DistributedDataset.reduce`.
    pub fn reduce<S, E: From<Error>>(
        &self,
        initial: S,
        mut combine: impl FnMut(S, PerReplica<T>) -> Result<S, E>,
    ) -> Result<S, E> {
        self.iter().try_fold(initial, |state, element| combine(state, element?))
    }

    /// Returns the shapes and types of each replica's element, with the number of rows left open; empty if there is no
    /// data.
    ///
    /// # Errors
    /// [`Error::Input`] if the first batch cannot be read.
    ///
    /// # Source
    /// `tf.distribute.DistributedDataset.element_spec`.
    pub fn element_spec<L>(&self) -> Result<Vec<ElementSpec>>
    where
        T: Element<L>,
    {
        Ok(self.dataset.element_spec()?)
    }

    /// Returns the plan of which worker and replica reads which data, as they were when the dataset was distributed;
    /// it can be printed.
    pub fn plan(&self) -> &DataPlan {
        self.dataset.plan()
    }

    /// Returns the number of steps of a pass, if it is known.
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
/// If workers may have unequal amounts of data, they agree before each step whether there is one. In steps that an
/// optimizer takes part in this costs no operation of its own: the flag travels with the gradients.
pub struct DistributedIterator<T> {
    steps: Arc<Mutex<WorkerIterator<T>>>,
    dataset: WorkerDataset<T>,
    strategy: Strategy,
    /// The strategy's [changes](Strategy::changes) when the pass began.
    changes: u64,
    /// The error of its first step.
    failure: Option<Error>,
    /// How unequal amounts of data are treated; `None` if workers always have equal ones.
    unequal: Option<UnequalData>,
    /// The flag that the steps of optimizers carry, from the last step that was returned on.
    announced: Option<Announced>,
    ended: bool,
    waited: Duration,
}

impl<T: Clone + Send + 'static> DistributedIterator<T> {
    /// Returns the position of all workers after the steps yielded so far, for a checkpoint. If each worker reads its
    /// own data, every worker must call this.
    ///
    /// # Errors
    /// [`Error::Collective`] if a worker is missing or fails; [`Error::Input`] if the positions do not belong together.
    pub fn position(&self) -> Result<InputPosition> {
        let own = self.steps.lock().position().clone();
        if self.unequal.is_none() {
            return Ok(own);
        }
        let unreadable = |error: serde_json::Error| distribute_input::Error::Position { problem: error.to_string() };
        let text = serde_json::to_vec(&own).map_err(unreadable)?;
        let (groups, replicas) = (self.strategy.groups(), self.strategy.topology().replicas_per_worker());
        let lengths = on_local_ranks(&groups, |_, group| {
            group.start().all_gather(vec![text.len() as u64], vec![0; group.world_size()])
        })?;
        let [_, lengths] = lengths.unwrap_or_default();
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        let texts = on_local_ranks(&groups, |_, group| {
            group.parts(&lengths).start().all_gather(text.clone(), vec![0u8; lengths.iter().sum()])
        })?;
        let [_, texts] = texts.unwrap_or_default();
        let (mut workers, mut start) = (Vec::new(), 0);
        for (rank, length) in lengths.iter().enumerate() {
            // All replicas of a worker sent the same position.
            if rank % replicas == 0 {
                workers.push(serde_json::from_slice(&texts[start..start + length]).map_err(unreadable)?);
            }
            start += length;
        }
        Ok(InputPosition::of_all(workers)?)
    }

    /// Returns the next step, or `None` at the end.
    ///
    /// # Errors
    /// [`Error::Input`] if the data cannot be read; [`Error::Collective`] if a worker is missing or fails;
    /// [`Error::NoData`] if this worker has no data at all while another has some.
    ///
    /// # Source
    /// `tf.distribute.DistributedIterator.get_next_as_optional`.
    pub fn get_next_as_optional(&mut self) -> Result<Option<PerReplica<T>>> {
        self.next().transpose()
    }

    /// Returns the total time spent in [`next`](Iterator::next), which is the time that replicas waited for data.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Returns the next parts of this worker's replicas, and whether each has examples.
    fn next_parts(&self) -> Result<Option<PerReplica<T>>> {
        let mut steps = self.steps.lock();
        let Some(parts) = steps.next().transpose()? else { return Ok(None) };
        Ok(Some(self.per_replica(parts, steps.examples())))
    }

    /// Batches without rows need no weight, so they carry no record of examples.
    fn per_replica(&self, parts: Vec<T>, examples: &[bool]) -> PerReplica<T> {
        let parts = PerReplica::new(parts);
        if self.dataset.has_stand_ins() { parts.with_examples(examples) } else { parts }
    }

    fn step(&mut self) -> Result<Option<PerReplica<T>>> {
        if let Some(failure) = self.failure.take() {
            self.ended = true;
            return Err(failure);
        }
        if self.ended {
            return Ok(None);
        }
        if self.changes != self.strategy.changes() {
            let problem = "processes have joined or left since this pass began, and it is divided among the earlier \
                           ones; begin it again at its position, by DistributedDataset::iter_from";
            return Err(Error::Elastic { problem: problem.to_owned() });
        }
        let Some(unequal) = self.unequal else {
            return self.next_parts();
        };
        let own = {
            let steps = Arc::clone(&self.steps);
            move || flag(unequal, steps.lock().more())
        };
        let steps = &self.strategy.replicas().step;
        let sum = match self.announced.take().and_then(|announced| announced.agreed()) {
            Some(sum) => sum,
            None => self.agree(own())?,
        };
        let continues = match unequal {
            UnequalData::Pad => sum > 0,
            UnequalData::Drop | UnequalData::Stop => sum == 0,
        };
        if !continues {
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
        self.announced = Some(steps.announce(Arc::new(own)));
        Ok(Some(parts))
    }

    /// Sums the workers' flags in an operation of its own, for steps whose reduction did not carry them.
    fn agree(&self, own: u32) -> Result<u32> {
        let mesh = self.strategy.replicas().mesh;
        let sum = on_local_ranks(&self.strategy.groups(), |local, group| {
            group.start().all_reduce(vec![if mesh.replica_of(local) == 0 { own } else { 0 }], ReduceOp::Sum)
        })?;
        Ok(sum.map_or(0, |sum| sum[0]))
    }
}

/// Returns a worker's flag: for padding, whether it has more data; otherwise, whether it lacks a step's data. An error
/// lets the step begin, and fail.
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
        let replicas = self.strategy.replicas();
        let before = replicas.waits().collectives;
        let step = self.step();
        let waited = began.elapsed();
        self.waited += waited;
        // Workers that agree on the end of their data wait for each other here, and not for data.
        let replicas = self.strategy.replicas();
        let agreeing = replicas.waits().collectives.saturating_sub(before);
        replicas.input_wait.add(waited.saturating_sub(agreeing));
        step.transpose()
    }
}

impl Strategy {
    /// Splits every global batch of a dataset over all replicas. Each part is in the memory of its replica's device.
    ///
    /// # Errors
    /// [`Error::Input`] if the dataset is not batched.
    ///
    /// # Source
    /// `tf.distribute.Strategy.experimental_distribute_dataset`.
    pub fn distribute_dataset<T, L>(&self, dataset: &Dataset<T>) -> Result<DistributedDataset<T>>
    where
        T: Element<L>,
    {
        self.distribute_dataset_with(dataset, InputOptions::default())
    }

    /// Splits every global batch of a dataset over all replicas, with options.
    ///
    /// # Errors
    /// [`Error::Input`] if the dataset is not batched, or the options do not fit it.
    pub fn distribute_dataset_with<T, L>(
        &self,
        dataset: &Dataset<T>,
        options: InputOptions,
    ) -> Result<DistributedDataset<T>>
    where
        T: Element<L>,
    {
        let mut options = self.extended().input_options(options);
        let Some(_) = self.elastic() else {
            let dataset = distribute_input::distribute_dataset(dataset, self.topology(), options)?;
            return Ok(self.with_ranks(dataset, options, None));
        };
        // Whatever a lost process would have read, another can.
        options.deterministic = true;
        let distributed = distribute_input::distribute_dataset(dataset, self.topology(), options)?;
        let dataset = dataset.clone();
        let divide = move |topology| distribute_input::distribute_dataset(&dataset, topology, options);
        Ok(self.with_ranks(distributed, options, Some(Arc::new(divide))))
    }

    /// Distributes a dataset that `make` creates once for this process, batched per replica; the replicas take its
    /// batches in turn.
    ///
    /// # Errors
    /// [`Error::Input`] with the error of `make`.
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

    /// Distributes a dataset that `make` creates once for this process, with options; see
    /// [`distribute_datasets_from_function`](Strategy::distribute_datasets_from_function).
    ///
    /// # Errors
    /// [`Error::Input`] with the error of `make`, or if the options do not fit.
    pub fn distribute_datasets_from_function_with<T, L>(
        &self,
        options: InputOptions,
        make: impl FnMut(InputContext) -> Result<Dataset<T>, BoxError>,
    ) -> Result<DistributedDataset<T>>
    where
        T: Element<L>,
    {
        if self.elastic().is_some() {
            let problem = "an input function chooses the data of a fixed number of processes, and those of an elastic \
                           job change; pass a dataset to distribute_dataset";
            return Err(Error::Elastic { problem: problem.to_owned() });
        }
        let options = self.extended().input_options(options);
        let dataset = distribute_input::distribute_datasets_from_function(self.topology(), options, make)?;
        Ok(self.with_ranks(dataset, options, None))
    }

    /// Gives each rank the part of its replica, on its device.
    fn with_ranks<T: Element<L>, L>(
        &self,
        dataset: WorkerDataset<T>,
        options: InputOptions,
        divide: Option<Divide<T>>,
    ) -> DistributedDataset<T> {
        let ranks = self.tensor_parallel();
        let gpus: Vec<bool> = self.devices().iter().map(|device| device.kind() == Some(DeviceKind::Gpu)).collect();
        let fetches = options.fetch_to_device && gpus.contains(&true);
        let strategy = self.clone();
        let distributed = DistributedDataset { dataset, present: Mutex::default(), divide, strategy: self.clone() };
        distributed.change(move |dataset| {
            let dataset = dataset.with_stand_ins();
            let dataset = if ranks == 1 { dataset } else { dataset.repeat_parts(ranks) };
            if !fetches {
                return dataset;
            }
            let (strategy, gpus) = (strategy.clone(), gpus.clone());
            dataset.fetch_parts(move |local, part| match gpus.get(local) {
                Some(true) => part.fetch_to_device(&strategy.open_device(local)?),
                _ => Ok(part),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StepHeader;

    #[test]
    fn an_error_lets_the_step_begin_in_which_it_is_returned() {
        let flags = |unequal| [More::Nothing, More::Partial, More::Full, More::Failed].map(|more| flag(unequal, more));
        // Whether a worker has more, and otherwise whether it lacks data.
        assert_eq!(flags(UnequalData::Pad), [0, 1, 1, 1]);
        assert_eq!(flags(UnequalData::Drop), [1, 1, 0, 0]);
        assert_eq!(flags(UnequalData::Stop), [1, 0, 0, 0]);
    }

    #[test]
    fn steps_after_a_pass_do_not_ask_its_data() {
        let strategy = crate::OneDeviceStrategy::builder("CPU:0").build().unwrap();
        let header = || strategy.replicas().step.header([0; 2]);
        for unequal in [UnequalData::Pad, UnequalData::Drop, UnequalData::Stop] {
            let options = InputOptions::default().unequal_data(unequal);
            let make = |_| Ok(Dataset::range(0..4).batch(1));
            // Workers that read their own data agree on its end. Here the first of two agrees with itself.
            let topology = Topology::new(2, 0, 1).unwrap();
            let own = distribute_input::distribute_datasets_from_function(topology, options, make).unwrap();
            let data = strategy.with_ranks(own, options, None);
            let left = data.iter();
            let steps = Arc::downgrade(&left.steps);
            assert_eq!(left.take(2).map(Result::unwrap).count(), 2);
            assert_eq!((header(), steps.strong_count()), (StepHeader::default(), 0), "{unequal:?}, left");
            let mut ended = data.iter();
            assert_eq!(ended.by_ref().map(Result::unwrap).count(), 4);
            assert_eq!(header(), StepHeader::default(), "{unequal:?}, ended");
            assert!(ended.next().is_none());
        }
    }
}

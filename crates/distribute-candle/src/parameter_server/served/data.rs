//! Datasets by name, which are read by workers, or by the replicas of another strategy.

use std::sync::Arc;

use distribute_input::{BoxError, Dataset, Element, InputContext};
use distribute_strategy::{DistributedDataset, Strategy};
use distribute_train::trainer::{Batching, TrainingData};

use crate::{Error, Examples, Result};

/// The function of a dataset.
#[derive(Clone)]
pub(super) struct NamedData {
    open: Arc<Open>,
    distribute: Arc<Distribute>,
}

type Open = dyn Fn(&InputContext) -> Result<Dataset<Examples>> + Send + Sync;
type Distribute = dyn Fn(&Strategy) -> Result<Distributed> + Send + Sync;
type Distributed = (DistributedDataset<ServedBatch>, usize);

impl NamedData {
    pub(super) fn new<T, L, E>(
        make: impl Fn(&InputContext) -> Result<Dataset<T>, E> + Send + Sync + 'static,
    ) -> NamedData
    where
        T: Element<L> + Into<Examples>,
        E: Into<BoxError>,
    {
        let make = Arc::new(make);
        let here = make.clone();
        let open = move |context: &InputContext| {
            let dataset = make(context).map_err(|error| failed(error.into()))?;
            Ok(dataset.map(|batch| Ok(batch.into())))
        };
        let distribute = move |strategy: &Strategy| {
            let (mut batch_size, mut cardinality) = (None, None);
            let batches = strategy.distribute_datasets_from_function(|context| {
                let dataset = here(&context).map_err(Into::into)?;
                (batch_size, cardinality) = (dataset.batch_size(), Some(dataset.cardinality()));
                Ok(dataset)
            })?;
            let batches = batches.map_replicas(|_, batch: T| Ok(ServedBatch(Kind::Examples(batch.into()))));
            // A mean over examples needs their number.
            if let (None, Some(cardinality)) = (batch_size, cardinality) {
                return Err(distribute_input::Error::NotBatched { cardinality }.into());
            }
            Ok((batches, batch_size.unwrap_or(1) * strategy.num_replicas_in_sync()))
        };
        NamedData { open: Arc::new(open), distribute: Arc::new(distribute) }
    }

    /// Creates the dataset of one input pipeline.
    pub(super) fn open(&self, context: &InputContext) -> Result<Dataset<Examples>> {
        (self.open)(context)
    }
}

/// The examples of one replica, or those that a worker is to read.
#[derive(Clone, Debug)]
pub struct ServedBatch(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Examples(Examples),
    /// The next batch of whichever worker makes the step.
    Next,
    /// All batches of a dataset.
    All(Arc<str>),
}

impl ServedBatch {
    /// Returns the examples, for a replica.
    pub(super) fn examples(self) -> Result<Examples> {
        match self.0 {
            Kind::Examples(examples) => Ok(examples),
            Kind::Next | Kind::All(_) => Err(of_another_trainer()),
        }
    }

    /// Returns the name of the dataset, of which workers read all batches.
    pub(super) fn dataset(&self) -> Result<&str> {
        match &self.0 {
            Kind::All(name) => Ok(name),
            Kind::Examples(_) | Kind::Next => Err(of_another_trainer()),
        }
    }
}

/// A dataset of a [`ServedTrainer`](super::ServedTrainer), for its validation.
#[derive(Clone)]
pub struct ServedData(Source);

#[derive(Clone)]
enum Source {
    Here(NamedData),
    OnWorkers(Arc<str>),
}

impl ServedData {
    pub(super) fn here(data: &NamedData) -> ServedData {
        ServedData(Source::Here(data.clone()))
    }

    pub(super) fn on_workers(name: &str) -> ServedData {
        ServedData(Source::OnWorkers(name.into()))
    }
}

impl TrainingData<ServedBatch, Error> for ServedData {
    fn distribute(&self, strategy: &Strategy, batching: Batching) -> Result<Distributed> {
        check_batch_size(batching)?;
        match &self.0 {
            Source::Here(data) => (data.distribute)(strategy),
            Source::OnWorkers(name) => Ok((repeated(strategy, 1, Kind::All(name.clone()))?, 1)),
        }
    }
}

/// The steps of an epoch, each on the next batch of the worker that makes it.
pub(super) struct Steps {
    pub(super) count: u64,
    /// The examples of a batch.
    pub(super) batch_size: usize,
}

impl TrainingData<ServedBatch, Error> for Steps {
    fn distribute(&self, strategy: &Strategy, batching: Batching) -> Result<Distributed> {
        check_batch_size(batching)?;
        Ok((repeated(strategy, self.count, Kind::Next)?, self.batch_size))
    }
}

/// Returns `count` equal batches.
fn repeated(strategy: &Strategy, count: u64, batch: Kind) -> Result<DistributedDataset<ServedBatch>> {
    let numbers = Dataset::range(0..i64::try_from(count).unwrap_or(i64::MAX)).batch(1);
    Ok(strategy.distribute_dataset(&numbers)?.map_replicas(move |_, _| Ok(ServedBatch(batch.clone()))))
}

fn check_batch_size(Batching { batch_size: given, is_set, .. }: Batching) -> Result<()> {
    if !is_set {
        return Ok(());
    }
    let problem = format!("a batch size of {given} has no effect on datasets; batch them in their functions");
    Err(Error::Served { problem })
}

fn of_another_trainer() -> Error {
    let problem = "the data are of another trainer; take them from the one that uses them, by its method data";
    Error::Served { problem: problem.to_owned() }
}

fn failed(source: BoxError) -> Error {
    distribute_input::Error::User { stage: "function", source: source.into() }.into()
}

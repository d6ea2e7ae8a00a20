//! The tensor libraries whose models the scenarios train.

use distribute::backend::{Checkpointed, TensorLibrary, TensorStorage, Trainee, TrainingData, Variable};
use distribute::collectives::schedule::part;
use distribute::device::DType;
use distribute::optim::{Optimizer, ReplicaOptimizer, Trainable};
use distribute::prelude::{PerReplica, ReplicaContext, Strategy};
use distribute::train::history::History;
use distribute::train::metrics::Metrics;
use distribute::train::trainer;

use crate::check::Stop;

mod burn;
mod candle;

pub(crate) use burn::Burn;
pub(crate) use candle::Candle;

/// A tensor library, with the models of the scenarios.
pub(crate) trait Library: Sized + 'static {
    type Tensors: TensorLibrary<Error: std::error::Error + Into<distribute::Error>>;
    type Model: Trainable<Library = Self::Tensors> + Checkpointed;
    type Trainer: Trainee;
    /// A batched dataset.
    type Data: TrainingData<ExamplesOf<Self>, FitError<Self>> + Clone + 'static;
    /// Variables without layers.
    type Bag: Trainable<Library = Self::Tensors>;

    fn model(strategy: &Strategy, kind: Kind, seed: u64, dtype: DType) -> distribute::Result<Self::Model>;

    /// Excludes variables from training; returns their number.
    fn freeze(model: &mut Self::Model, frozen: impl Fn(&str) -> bool) -> distribute::Result<usize>;

    /// Calls `body` on every replica, with a function that computes the replica's share of the mean loss over a number
    /// of examples from its own. Returns the values of the losses that `body` returns.
    fn run(
        strategy: &Strategy,
        model: &Self::Model,
        optimizer: &OptimizerOf<Self>,
        body: impl Fn(&ReplicaContext, &ReplicaOptimizer<'_, Self::Tensors>, &Mean<'_, Self>) -> Run<Self> + Sync,
    ) -> distribute::Result<PerReplica<f64>>;

    /// Computes the gradients of one replica's share of the mean loss over `examples`, by the library alone: with these
    /// values of the variables of `like`, in their order.
    fn gradients(
        kind: Kind,
        like: &Self::Model,
        values: &[Vec<f32>],
        own: &Batch,
        examples: usize,
    ) -> Result<Vec<Vec<f32>>, Stop>;

    /// Returns each replica's share of a penalty.
    fn penalty(strategy: &Strategy, penalty: f32) -> distribute::Result<PerReplica<f32>>;

    /// Builds variables of `len` elements from their names and initial values.
    fn bag(strategy: &Strategy, of: &[(&'static str, f64)], len: usize, dtype: DType) -> distribute::Result<Self::Bag>;

    /// Makes a step. A replica's loss is the sum of its variables' products with the slopes of `slopes`, by the
    /// variable's index; it does not depend on variables without.
    fn step(
        strategy: &Strategy,
        bag: &Self::Bag,
        optimizer: &OptimizerOf<Self>,
        slopes: impl Fn(&ReplicaContext, usize) -> Option<Vec<f64>> + Sync,
    ) -> distribute::Result<()>;

    fn trainer(
        strategy: &Strategy,
        model: Self::Model,
        build: Build<Self>,
        metrics: Metrics,
    ) -> distribute::Result<Self::Trainer>;

    /// Returns a trainer's model.
    fn trained(trainer: &Self::Trainer) -> &Self::Model;

    /// Returns batches of examples, in a new order in each pass if `shuffled`.
    fn data(examples: &Batch, batch: usize, shuffled: bool) -> distribute::Result<Self::Data>;

    fn fit(trainer: &mut Self::Trainer, data: &Self::Data, fit: FitOf<Self>) -> distribute::Result<History>;

    /// Fits to examples in memory, with their weights.
    fn fit_weighted(
        trainer: &mut Self::Trainer,
        examples: &Batch,
        weights: &[f32],
        fit: FitOf<Self>,
    ) -> distribute::Result<History>;

    fn evaluate(trainer: &Self::Trainer, data: &Self::Data) -> distribute::Result<Vec<(String, f64)>>;

    /// Returns the outputs for the inputs of examples.
    fn predict(trainer: &Self::Trainer, examples: &Batch, batch: usize) -> distribute::Result<Vec<f32>>;
}

/// Computes a replica's share of the mean loss over a number of examples from its own.
pub(crate) type Mean<'a, L> = dyn Fn(&Batch, usize) -> distribute::Result<LossOf<L>> + 'a;

/// The result of a body of [`Library::run`]: the loss.
pub(crate) type Run<L> = distribute::Result<LossOf<L>>;

pub(crate) type OptimizerOf<L> = Optimizer<<L as Library>::Tensors>;
pub(crate) type LossOf<L> = <<L as Library>::Tensors as TensorLibrary>::Loss;
pub(crate) type ErrorOf<L> = <<L as Library>::Tensors as TensorLibrary>::Error;
pub(crate) type Build<L> = fn(&<L as Library>::Model) -> Result<OptimizerOf<L>, ErrorOf<L>>;
pub(crate) type ExamplesOf<L> = <<L as Library>::Trainer as Trainee>::Examples;
pub(crate) type FitError<L> = <<L as Library>::Trainer as Trainee>::Error;
pub(crate) type FitOf<L> = trainer::Fit<ExamplesOf<L>, FitError<L>>;

/// The number of numbers of one example.
pub(crate) const INPUTS: usize = 16;
pub(crate) const CLASSES: usize = 3;
/// The number of words of [`Kind::Vocabulary`], and of the elements of each: more than a megabyte.
pub(crate) const WORDS: [usize; 2] = [17_000, 16];

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Dense,
    Convolutional,
    Embedded,
    /// An embedding of which a step uses few rows.
    Vocabulary,
    Recurrent,
    LongShort,
    /// Two inputs through one layer.
    Siamese,
    /// Batch normalisation over the global batch; of candle's only.
    Normed,
    /// Batch normalisation over each replica's own batch.
    NormedApart,
    /// A dense model that fails for batches without rows: the size of the last dimension cannot be inferred from a
    /// tensor without elements.
    Reshaped,
}

/// Examples of one step.
#[derive(Clone)]
pub(crate) struct Batch {
    pub(crate) x: Vec<f32>,
    pub(crate) y: Vec<u32>,
}

impl Batch {
    pub(crate) fn new(step: usize, examples: usize) -> Batch {
        let number = |at: usize, modulus: usize| (at * 7919 + step * 104_729 + 13) % modulus;
        let x = (0..examples * INPUTS).map(|at| number(at, 1009) as f32 / 1009.0 - 0.5).collect();
        let y = (0..examples).map(|at| (number(at * 31, 1013) % CLASSES) as u32).collect();
        Batch { x, y }
    }

    /// Returns one of several parts of as equal a size as possible.
    pub(crate) fn part(&self, parts: usize, index: usize) -> Batch {
        let rows = part(self.y.len(), parts, index);
        let x = self.x[rows.start * INPUTS..rows.end * INPUTS].to_vec();
        Batch { x, y: self.y[rows].to_vec() }
    }

    /// Returns a replica's part.
    pub(crate) fn share(&self, context: &ReplicaContext) -> Batch {
        self.part(context.num_replicas_in_sync(), context.replica_id())
    }
}

/// Returns the variables of a model.
pub(crate) fn variables<M: Trainable>(model: &M) -> &[Variable<M::Library>] {
    model.parameters().variables()
}

/// Returns the elements of one replica's component: of a sharded variable, those of the whole. Every process calls this
/// for the same variables.
pub(crate) fn elements<T>(strategy: &Strategy, variable: &Variable<T>, replica: usize) -> Result<Vec<f64>, Stop>
where
    T: TensorLibrary<Error: std::error::Error>,
{
    let component = match variable.layout() {
        Some(_) => variable.whole(strategy)?,
        None => variable.components()[replica].clone(),
    };
    Ok(T::cast(&component, DType::F64)?.to_elements::<f64>()?)
}

//! Models with one copy per replica.

use std::any::Any;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use distribute_optim::Trainable;
use distribute_optim::backend::{Parameters, Tape};
use distribute_strategy::{Recoverable, ReplicaArgs, Strategy, counted};
use distribute_types::ErrorClass;
use parking_lot::Mutex;

use crate::device::candle_device;
use crate::dropout::{self, Streams};
use crate::sharded::{self, Blocks};
use crate::statistics::Statistics;
use crate::{Candle, Error, Result, Variable, statistics};

mod backend;

use backend::{Registry, ReplicaBackend};

/// Construction of candle models under a strategy.
pub trait CandleStrategy {
    /// Builds a model once per replica of this process. All replicas get equal initial values: with several workers,
    /// the chief's.
    ///
    /// `build` takes a candle `VarBuilder` and returns the model. Initial values are drawn from the seed 0 and each
    /// variable's path; [`scope_seeded`](CandleStrategy::scope_seeded) takes another seed.
    ///
    /// # Errors
    /// [`Error::Optim`] with [`ModelDiffers`](distribute_optim::Error::ModelDiffers) if workers build different models,
    /// and [`Error::Candle`] if `build` fails; if it fails on one worker, the others get an error with its reason.
    fn scope<M>(&self, build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>) -> Result<Model<M>> {
        self.scope_seeded(0, build)
    }

    /// Builds a model like [`scope`](CandleStrategy::scope), with a seed for the initial values.
    ///
    /// # Errors
    /// The errors of [`scope`](CandleStrategy::scope) occur in the same cases.
    fn scope_seeded<M>(
        &self,
        seed: u64,
        build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<Model<M>> {
        self.scope_with(ScopeOptions { seed, ..ScopeOptions::default() }, build)
    }

    /// Builds a model like [`scope`](CandleStrategy::scope), with options.
    ///
    /// # Errors
    /// The errors of [`scope`](CandleStrategy::scope) occur in the same cases.
    fn scope_with<M>(
        &self,
        options: ScopeOptions,
        build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<Model<M>>;
}

/// Options for building a model.
///
/// # Examples
/// Mixed precision: the model computes in 16 bits, [`Optimizer`](crate::Optimizer)s update in f32.
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::linear;
/// use distribute_candle::{Adam, CandleContext, CandleStrategy, Error, LossScale, ScopeOptions};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let half = ScopeOptions::default().dtype(DType::F16);
/// let model = strategy.scope_with(half, |vb| linear(3, 1, vb.pp("fc")))?;
/// let optimizer = Adam::new(0.1).build(&model)?.scale_losses(LossScale::dynamic())?;
/// strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
///     let y = model.forward(&Tensor::ones((2, 3), DType::F16, &Device::Cpu)?)?.to_dtype(DType::F32)?;
///     optimizer.minimize(context, &context.average_loss(&y.sqr()?, 4)?)
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScopeOptions {
    /// The seed from which initial values are drawn, together with each variable's path. Default: 0.
    pub seed: u64,
    /// The type of the variables, which is the `VarBuilder`'s. Default: f32.
    pub dtype: DType,
}

impl Default for ScopeOptions {
    fn default() -> ScopeOptions {
        ScopeOptions { seed: 0, dtype: DType::F32 }
    }
}

distribute_types::setters! {
    ScopeOptions {
        seed: u64,
        dtype: DType,
    }
}

impl CandleStrategy for Strategy {
    fn scope_with<M>(
        &self,
        options: ScopeOptions,
        mut build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<Model<M>> {
        self.declare("seed of initial values", options.seed);
        let built = self.within(|| {
            let tapes: Vec<Arc<Tape<Tensor>>> = (0..self.num_local_replicas()).map(|_| Tape::new()).collect();
            let registry: Arc<Mutex<Registry>> = Arc::default();
            let blocks = self.sharding().map(|_| Arc::new(Blocks::new(tapes.len())));
            let mut replicas = Vec::with_capacity(tapes.len());
            let (mut common, mut streams) = (Vec::new(), Streams::default());
            for (replica, tape) in tapes.iter().enumerate() {
                let (registry, tape, shared) = (registry.clone(), tape.clone(), self.shares_variables());
                let part = blocks.as_ref().and_then(|blocks| blocks.replica(replica).cloned());
                let (strategy, seed, tensor_ranks) = (self.clone(), options.seed, self.tensor_parallel());
                let blocks = part.clone();
                let backend = ReplicaBackend { strategy, registry, replica, tape, shared, seed, tensor_ranks, blocks };
                let device = candle_device(self, replica)?;
                let vb = VarBuilder::from_backend(Box::new(backend), options.dtype, device);
                let ((built, of_all), drawn) =
                    dropout::building(seed, || statistics::building(|| sharded::building(part, || build(vb))));
                replicas.push(built?);
                common.extend(of_all);
                streams.add(drawn);
            }
            let variables = std::mem::take(&mut registry.lock().variables);
            distribute_optim::backend::check_and_share(self, &variables)?;
            let statistics = Statistics::of(&variables, &common, tapes.len()).map(Arc::new);
            if let Some(statistics) = &statistics {
                let statistics: Arc<dyn Recoverable> = statistics.clone();
                self.recover(Arc::downgrade(&statistics));
            }
            if let Some(blocks) = &blocks {
                let blocks: Arc<dyn Recoverable> = blocks.clone();
                self.recover(Arc::downgrade(&blocks));
            }
            // The strategy's runs record statistics, and reset blocks, as long as this lives.
            let held: Arc<dyn Any + Send + Sync> = Arc::new((statistics, blocks.clone()));
            let parameters = Arc::new(Parameters::new(self, variables, tapes, Some(held)));
            Ok(Model { replicas, parameters, blocks, streams })
        });
        told(self, built)
    }
}

/// Reports a failure of this worker to the others, which wait for its variables.
fn told<M>(strategy: &Strategy, built: Result<M>) -> Result<M> {
    match built {
        // All workers have it.
        Err(Error::Optim(distribute_optim::Error::ModelDiffers { .. })) => built,
        built => strategy.report_failure_as(built, ErrorClass::failure_kind),
    }
}

/// A model with one copy per replica of this process.
///
/// Pass a reference to it to `run`; each replica then gets its own copy.
pub struct Model<M> {
    replicas: Vec<M>,
    /// The blocks whose parameters are gathered when they run, under a strategy that shards parameters.
    blocks: Option<Arc<Blocks>>,
    pub(crate) parameters: Arc<Parameters<Candle>>,
    /// The random streams of its dropout layers.
    pub(crate) streams: Streams,
}

impl<M> Trainable for Model<M> {
    type Library = Candle;

    fn parameters(&self) -> &Arc<Parameters<Candle>> {
        &self.parameters
    }
}

impl<M> Model<M> {
    /// Returns the copy of one local replica. After training all copies are equal, up to statistics.
    pub fn replica(&self, local: usize) -> Option<&M> {
        self.replicas.get(local)
    }

    /// Returns the copy of this process's first replica.
    pub fn first(&self) -> &M {
        &self.replicas[0]
    }

    /// Returns the variables, in the order in which the model created them.
    pub fn variables(&self) -> &[Variable] {
        self.parameters.variables()
    }

    /// Compares the variables of all replicas in all processes, bit for bit, except running statistics. They are equal
    /// unless the program has written one of them without the optimizer. Every process calls this, outside `run`.
    ///
    /// Checkpoints and optimizers also make this comparison: before every checkpoint, and in some steps
    /// ([`Optimizer::audit_every`](crate::Optimizer::audit_every)).
    ///
    /// # Errors
    /// [`Error::Optim`] with [`Diverged`](distribute_optim::Error::Diverged) for the first variable that differs;
    /// [`Error::Collective`] if a process is missing or fails.
    ///
    /// # Cost
    /// Every process reads all its copies once; eight bytes per variable are exchanged.
    pub fn audit(&self, strategy: &Strategy) -> Result<()> {
        distribute_optim::audit(strategy, &self.parameters)
    }

    /// Excludes the variables whose names `frozen` accepts from training: no optimizer updates them, and their
    /// gradients are not exchanged. Returns their number. Call it while the model has no optimizer, with the same
    /// effect on every worker.
    ///
    /// # Errors
    /// [`Error::FrozenLate`] while the model has an optimizer.
    ///
    /// # Examples
    /// ```
    /// use candle_nn::linear;
    /// use distribute_candle::{Adam, CandleStrategy, Error};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().build()?;
    /// let mut model = strategy.scope(|vb| Ok((linear(3, 4, vb.pp("body"))?, linear(4, 1, vb.pp("head"))?)))?;
    /// assert_eq!(model.freeze(|name| name.starts_with("body."))?, 2);
    /// let optimizer = Adam::new(0.1).build(&model)?;           // trains the head only
    /// // … and then all variables, at a lower learning rate:
    /// drop(optimizer);
    /// assert_eq!(model.unfreeze(|_| true)?, 2);
    /// let optimizer = Adam::new(0.01).build(&model)?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `trainable = False` of tf.keras's layers.
    pub fn freeze(&mut self, frozen: impl Fn(&str) -> bool) -> Result<usize> {
        self.set_trainable(true, frozen)
    }

    /// Includes frozen variables whose names `thawed` accepts in training again. Returns their number. Call it while
    /// the model has no optimizer, with the same effect on every worker.
    ///
    /// # Errors
    /// [`Error::FrozenLate`] while the model has an optimizer: drop it, call this, and build another one.
    ///
    /// # Examples
    /// See [`freeze`](Model::freeze).
    pub fn unfreeze(&mut self, thawed: impl Fn(&str) -> bool) -> Result<usize> {
        self.set_trainable(false, thawed)
    }

    /// Inverts `trainable` of those chosen variables for which it equals `from`.
    fn set_trainable(&mut self, from: bool, chosen: impl Fn(&str) -> bool) -> Result<usize> {
        let parameters = Arc::get_mut(&mut self.parameters).ok_or(Error::FrozenLate)?;
        Ok(parameters.set_trainable(from, chosen))
    }

    /// Returns the number of elements of all trainable variables.
    pub fn num_parameters(&self) -> usize {
        let trainable = self.variables().iter().filter(|variable| variable.is_trainable());
        trainable.map(|variable| variable.shape().iter().product::<usize>()).sum()
    }

    /// Returns the most bytes of gathered parameters that a replica of this process has had in memory at once, of all
    /// [`Sharded`](crate::Sharded) blocks together; 0 if parameters are not sharded.
    pub fn peak_gathered_bytes(&self) -> usize {
        self.blocks.as_ref().map_or(0, |blocks| blocks.peak())
    }
}

impl<'a, M: Sync> ReplicaArgs for &'a Model<M> {
    type Local = &'a M;

    fn split(self, replicas: usize) -> distribute_strategy::Result<Vec<&'a M>> {
        counted(self.replicas.iter().collect(), replicas)
    }
}

/// Returns whether a variable is a running statistic. Normalisation layers write these themselves; they need a plain
/// variable and get no gradient.
pub(crate) fn is_statistic(name: &str) -> bool {
    ["running_mean", "running_var"].iter().any(|statistic| name.ends_with(statistic))
}

#[cfg(test)]
mod tests;

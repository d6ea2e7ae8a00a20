//! Models with one copy per replica.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use distribute_optim::Trainable;
use distribute_optim::backend::{Parameters, ShardLayout, Tape, TensorSplit};
use distribute_strategy::{Recoverable, ReplicaArgs, Strategy, counted};
use parking_lot::Mutex;

use crate::gpu::candle_device;
use crate::hook::{hooked, hooked_at_rest};
use crate::sharded::{self, Blocks, Leaf, Replica};
use crate::statistics::Statistics;
use crate::tensor_parallel::{Request, take_request};
use crate::{Candle, Error, Result, Variable, initial, statistics};

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
    /// and [`Error::Candle`] if `build` fails.
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
        self.within(|| {
            let tapes: Vec<Arc<Tape<Tensor>>> = (0..self.num_local_replicas()).map(|_| Tape::new()).collect();
            let registry: Arc<Mutex<Registry>> = Arc::default();
            let blocks = self.sharding().map(|_| Arc::new(Blocks::new(tapes.len())));
            let mut replicas = Vec::with_capacity(tapes.len());
            let mut common = Vec::new();
            for (replica, tape) in tapes.iter().enumerate() {
                let (registry, tape, shared) = (registry.clone(), tape.clone(), self.shares_variables());
                let part = blocks.as_ref().and_then(|blocks| blocks.replica(replica).cloned());
                let (strategy, seed, tensor_ranks) = (self.clone(), options.seed, self.tensor_parallel());
                let blocks = part.clone();
                let backend = ReplicaBackend { strategy, registry, replica, tape, shared, seed, tensor_ranks, blocks };
                let device = candle_device(self, replica)?;
                let vb = VarBuilder::from_backend(Box::new(backend), options.dtype, device);
                let (built, of_all) = statistics::building(|| sharded::building(part, || build(vb)));
                replicas.push(built?);
                common.extend(of_all);
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
            Ok(Model { replicas, parameters, blocks })
        })
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

/// The variables that the replicas of a model have created so far.
#[derive(Default)]
struct Registry {
    variables: Vec<Variable>,
    by_name: HashMap<String, usize>,
    /// The sharded variables as models have them, by index and replica.
    leaves: HashMap<(usize, usize), Arc<Leaf>>,
    /// The parts of sharded variables for the replicas that are still to be built, by index, the last replica's first.
    parts: HashMap<usize, Vec<Tensor>>,
}

/// The backend that gives one replica of a model its copies of the variables.
struct ReplicaBackend {
    strategy: Strategy,
    registry: Arc<Mutex<Registry>>,
    replica: usize,
    tape: Arc<Tape<Tensor>>,
    shared: bool,
    seed: u64,
    /// The number of ranks of each tensor group.
    tensor_ranks: usize,
    /// The replica's blocks, under a strategy that shards parameters.
    blocks: Option<Arc<Replica>>,
}

impl ReplicaBackend {
    fn split(&self, name: &str, whole: &Shape, request: Request) -> candle_core::Result<TensorSplit> {
        let split = TensorSplit::new(name, whole.dims(), request.axis, request.blocks, self.tensor_ranks);
        split.map_err(candle_core::Error::wrap)
    }
}

impl SimpleBackend for ReplicaBackend {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let request = take_request().filter(|_| self.tensor_ranks > 1);
        if request.is_some() && self.blocks.is_some() {
            candle_core::bail!(
                "variable {name:?} is split among the ranks of a tensor group, and the strategy shards parameters too; \
                 candle models do one of both: use MirroredStrategy with tensor_parallel, or plain layers"
            );
        }
        let mut registry = self.registry.lock();
        if let Some(sharded) = self.sharded(&mut registry, &shape, name, init, dtype, device)? {
            return Ok(sharded);
        }
        let index = match registry.by_name.get(name) {
            Some(index) => *index,
            None => {
                let index = registry.variables.len();
                let variable = match request {
                    Some(request) => Variable::split_among(name, self.split(name, &shape, request)?),
                    None => Variable::new(name, is_statistic(name)),
                };
                registry.by_name.insert(name.to_owned(), index);
                registry.variables.push(variable);
                index
            }
        };
        let variable = &mut registry.variables[index];
        let split = variable.tensor_split();
        if split != request.map(|request| self.split(name, &shape, request)).transpose()? {
            return Err(candle_core::Error::wrap(distribute_optim::Error::SplitDiffers { name: name.to_owned() }));
        }
        let of_rank: Shape = split.map_or_else(|| shape.clone(), |split| split.part_shape(shape.dims()).into());
        if let Some(tensor) = variable.components().get(self.replica) {
            check_shape(name, tensor.shape(), &of_rank)?;
            return Ok(tensor.clone());
        }
        if let (true, true, Some(first)) =
            (self.shared, variable.is_trainable(), variable.components().first().cloned())
        {
            check_shape(name, first.shape(), &shape)?;
            variable.push(first.clone());
            return Ok(first);
        }
        if let Some(first) = variable.components().first() {
            check_shape(name, first.shape(), &of_rank)?;
        }
        // The component with the same values: the first, or that of the same place in the first tensor group.
        let place = self.replica % self.tensor_ranks;
        let values = match variable.components().get(split.map_or(0, |_| place)) {
            // The copy goes through the host, which can copy to every device.
            Some(same) => same.detach().copy()?.to_device(&Device::Cpu)?.to_device(device)?,
            None => {
                let drawn = |device| initial::initial(self.seed, name, init, &shape, dtype, device);
                match split {
                    Some(split) => own_part(&drawn(&Device::Cpu)?, split, place)?.to_device(device)?,
                    None => drawn(device)?.contiguous()?,
                }
            }
        };
        let tensor = match variable.is_trainable() {
            true if !self.shared => hooked(&values, index, &self.tape)?,
            _ => Var::from_tensor(&values)?.as_tensor().clone(),
        };
        variable.push(tensor.clone());
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let registry = self.registry.lock();
        let known = registry.by_name.get(name).and_then(|index| registry.leaves.get(&(*index, self.replica)));
        if let Some(leaf) = known {
            if let Some(unit) = sharded::current_unit() {
                unit.add(leaf);
            }
            return Ok(leaf.whole().clone());
        }
        let variable = registry.by_name.get(name).map(|index| &registry.variables[*index]);
        let tensor = variable.and_then(|variable| variable.components().get(self.replica));
        tensor.cloned().ok_or_else(|| candle_core::Error::wrap(Error::UnknownVariable { name: name.to_owned() }))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.registry.lock().by_name.contains_key(name)
    }
}

/// Returns the part of a whole value on the host that the rank at `place` of a tensor group has.
fn own_part(whole: &Tensor, split: TensorSplit, place: usize) -> candle_core::Result<Tensor> {
    let shape = whole.dims();
    macro_rules! cut {
        ($($dtype:ident => $t:ty),*) => {
            match whole.dtype() {
                $(DType::$dtype => {
                    let part = split.cut(&whole.flatten_all()?.to_vec1::<$t>()?, shape, place);
                    Tensor::from_vec(part, split.part_shape(shape), &Device::Cpu)
                })*
                other => candle_core::bail!("a variable of {other:?} cannot be split among tensor ranks; give floats"),
            }
        };
    }
    cut!(F32 => f32, F64 => f64, F16 => distribute_device::f16, BF16 => distribute_device::bf16)
}

impl ReplicaBackend {
    /// Returns a variable of a block whose parameters are sharded; `None` for all others.
    fn sharded(
        &self,
        registry: &mut Registry,
        shape: &Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Option<Tensor>> {
        let (Some(blocks), unit) = (&self.blocks, sharded::current_unit()) else { return Ok(None) };
        let known = registry.by_name.get(name).copied();
        if let Some(leaf) = known.and_then(|index| registry.leaves.get(&(index, self.replica))) {
            check_shape(name, leaf.whole().shape(), shape)?;
            if let Some(unit) = unit {
                unit.add(leaf);
            }
            return Ok(Some(leaf.whole().clone()));
        }
        let is_sharded = known.is_some_and(|index| registry.variables[index].layout().is_some());
        let (Some(unit), true) = (unit, is_sharded || known.is_none()) else { return Ok(None) };
        let is_float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
        let layout = ShardLayout::of(&self.strategy, shape.dims()).filter(|_| is_float && !is_statistic(name));
        let Some(layout) = layout else { return Ok(None) };
        let index = match known {
            Some(index) => {
                check_shape(name, &Shape::from(registry.variables[index].shape()), shape)?;
                index
            }
            None => {
                let index = registry.variables.len();
                let whole = initial::initial(self.seed, name, init, shape, dtype, &Device::Cpu)?.flatten_all()?;
                let mut parts = Vec::new();
                for local in (0..self.strategy.num_local_replicas()).rev() {
                    let range = layout.range(layout.part_of(local));
                    let part = whole.narrow(0, range.start, range.len())?;
                    parts.push(part.pad_with_zeros(0, 0, layout.part_len() - range.len())?.force_contiguous()?);
                }
                registry.by_name.insert(name.to_owned(), index);
                registry.variables.push(Variable::sharded(name, layout.clone()));
                registry.parts.insert(index, parts);
                index
            }
        };
        let missing =
            || candle_core::Error::Msg(format!("variable {name:?} was made more often than for each replica"));
        let part = registry.parts.get_mut(&index).and_then(Vec::pop).ok_or_else(missing)?.to_device(device)?;
        let slot: Arc<OnceLock<(Weak<Leaf>, Weak<Replica>)>> = Arc::default();
        let fired = {
            let slot = slot.clone();
            Box::new(move || {
                let (leaf, replica) = slot.get().map(|(leaf, replica)| (leaf.upgrade(), replica.upgrade())).unzip();
                match (leaf.flatten(), replica.flatten()) {
                    (Some(leaf), Some(replica)) => leaf.fired(&replica),
                    _ => Ok(()),
                }
            })
        };
        let whole = hooked_at_rest((dtype, shape, device), index, &self.tape, fired)?;
        sharded::rest(&whole)?;
        let leaf = Leaf::new(name, layout, part.clone(), whole.clone());
        // No other function sets it.
        let _ = slot.set((Arc::downgrade(&leaf), Arc::downgrade(blocks)));
        registry.variables[index].push(part);
        registry.leaves.insert((index, self.replica), leaf.clone());
        blocks.add(leaf.clone());
        unit.add(&leaf);
        Ok(Some(whole))
    }
}

/// Returns whether a variable is a running statistic. Normalisation layers write these themselves; they need a plain
/// variable and get no gradient.
pub(crate) fn is_statistic(name: &str) -> bool {
    ["running_mean", "running_var"].iter().any(|statistic| name.ends_with(statistic))
}

fn check_shape(name: &str, held: &Shape, asked: &Shape) -> candle_core::Result<()> {
    if held == asked {
        return Ok(());
    }
    let problem =
        format!("variable {name:?} has shape {held:?}, but {asked:?} was asked for; give layers different paths");
    Err(candle_core::Error::Msg(problem))
}

//! Optimizers over all replicas of a model.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use distribute_collectives::{Compression, FusedAllReduce, FusionOptions};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_strategy::Strategy;
use distribute_values::DistributedVariable;
use serde::{Deserialize, Serialize};

use self::slots::StateMemory;
use self::states::States;
use crate::exchange::SlotShard;
use crate::gradient::{LossScale, Scaling};
use crate::library::{bytes, len, wide};
use crate::row_share::SparseGradients;
use crate::settings::FixedSettings;
use crate::step_counts::SavedCounts;
use crate::{Clip, Error, Parameters, ShardLayout, StepCounts, TensorLibrary, Trainable, Variable, tensor_split};

mod agreed;
mod backward;
mod builders;
mod gradients;
mod library;
mod local;
mod local_slots;
mod masters;
mod memory;
#[cfg(feature = "hlo")]
mod program;
mod replica;
mod sharded_state;
mod slots;
mod states;
mod step;

pub use builders::{Adadelta, Adagrad, Adam, AdamW, Adamax, Ftrl, Lamb, Nadam, RmsProp, Sgd};
pub use library::LibraryOptimizer;
pub use memory::MemoryReport;
#[cfg(feature = "hlo")]
pub use program::{ProgramOptimizer, ProgramStep, ProgramUpdate, ProgramVariable};
pub use replica::ReplicaOptimizer;

/// An optimizer that was built for a model. Its slots are distributed variables with one component per replica.
///
/// Parameters of 16 bits are trained in mixed precision: gradients are exchanged in 16 bits, and all later computation
/// is in f32, on a copy of the parameter in f32, which is its last slot. See [`LossScale`].
///
/// Pass a reference to it to `run`; each replica then gets its [`ReplicaOptimizer`].
pub struct Optimizer<L: TensorLibrary> {
    rule: UpdateRule,
    parameters: Arc<Parameters<L>>,
    /// Each variable's slots, followed by its f32 copy if it has 16 bits; empty for variables that are not trained.
    slots: Arc<[Vec<DistributedVariable<L::Tensor>>]>,
    /// The tensor library's own optimizer, which takes the place of the rule.
    library: Option<Arc<dyn LibraryOptimizer<L>>>,
    learning_rate: AtomicU64,
    clip: Option<Clip>,
    compression: Compression,
    /// Whether each replica keeps only its part of the slots.
    sharded: bool,
    /// How gradients of which few rows differ from zero are reduced.
    sparse_gradients: SparseGradients,
    /// The number of steps between comparisons of the copies of parameters, after the first; 0 for no comparisons.
    audit_every: u64,
    /// The settings, fixed in the first step after one of them was set.
    fixed: OnceLock<Arc<FixedSettings>>,
    states: Arc<States<L>>,
}

/// See [`Optimizer::audit_every`].
const AUDIT_EVERY: u64 = 500;

/// The state of an optimizer that a checkpoint keeps in addition to its slots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerState {
    pub(crate) steps: u64,
    learning_rate: f64,
    loss_scale: Option<f64>,
    good_steps: u32,
    #[serde(default, skip_serializing_if = "SavedCounts::is_empty")]
    pub(crate) counts: SavedCounts,
}

/// The time that one replica has spent in steps, summed over its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Time in `minimize`.
    pub total: Duration,
    /// The part of it spent in collectives: starting them, working on them, waiting for other replicas.
    pub communication: Duration,
}

impl<L: TensorLibrary> Optimizer<L> {
    /// Creates an optimizer that reduces gradients as all do, and updates parameters by the tensor library's own
    /// optimizer. Clipping, compression, loss scaling, accumulation and audits work as always; parameters of 16 bits
    /// are the library's affair.
    ///
    /// # Errors
    /// The library's error if a setting is out of range.
    pub fn of_library(
        model: &impl Trainable<Library = L>,
        learning_rate: f64,
        library: Arc<dyn LibraryOptimizer<L>>,
    ) -> Result<Optimizer<L>, L::Error> {
        let description =
            OptimizerDescription { learning_rate, rule: UpdateRule::Sgd { momentum: 0.0, nesterov: false } };
        let parameters = model.parameters().clone();
        Optimizer::of_parameters(description, Some(library), parameters, StateMemory::OfVariables)
    }

    /// Builds the optimizer of a description for a model, as `build` of its builder does.
    ///
    /// # Errors
    /// [`Error::Setting`] for a setting out of range; the library's error if a slot cannot be created.
    ///
    /// # Examples
    /// ```
    /// use distribute_optim::{HostError, HostModel, Optimizer, OptimizerDescription, UpdateRule};
    /// use distribute_strategy::OneDeviceStrategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = OneDeviceStrategy::builder("CPU:0").build()?;
    /// let model = HostModel::new(&strategy, [("slope", HostTensor::new(&[1], vec![0.0])?)])?;
    /// let rule = UpdateRule::Sgd { momentum: 0.9, nesterov: false };
    /// let optimizer = Optimizer::from_description(&model, OptimizerDescription { learning_rate: 0.1, rule })?;
    /// assert_eq!(optimizer.learning_rate(), 0.1);
    /// # Ok::<(), HostError>(())
    /// ```
    pub fn from_description(
        model: &impl Trainable<Library = L>,
        description: OptimizerDescription,
    ) -> Result<Optimizer<L>, L::Error> {
        Optimizer::build(description, model, StateMemory::OfVariables)
    }

    fn build(
        description: OptimizerDescription,
        model: &impl Trainable<Library = L>,
        memory: StateMemory,
    ) -> Result<Optimizer<L>, L::Error> {
        Optimizer::of_parameters(description, None, model.parameters().clone(), memory)
    }

    fn of_parameters(
        description: OptimizerDescription,
        library: Option<Arc<dyn LibraryOptimizer<L>>>,
        parameters: Arc<Parameters<L>>,
        memory: StateMemory,
    ) -> Result<Optimizer<L>, L::Error> {
        description.check().map_err(Error::from)?;
        let OptimizerDescription { learning_rate, rule } = description;
        if !rule.is_elementwise() && parameters.variables().iter().any(|variable| variable.tensor_split().is_some()) {
            let (what, other) = ("this optimizer", "variables that are split among tensor ranks");
            let why = "it looks at the norms of whole variables; use AdamW";
            return Err(Error::Combination { what, other, why }.into());
        }
        let slots = match &library {
            Some(_) => vec![Vec::new(); parameters.variables().len()],
            None => memory.slots(&parameters, rule)?,
        };
        let states = States::new(&parameters, &slots, library.clone());
        let optimizer = Optimizer {
            rule,
            parameters,
            slots: slots.into(),
            library,
            learning_rate: AtomicU64::new(learning_rate.to_bits()),
            clip: None,
            compression: Compression::None,
            sharded: false,
            sparse_gradients: SparseGradients::Auto,
            audit_every: AUDIT_EVERY,
            fixed: OnceLock::new(),
            states,
        };
        match optimizer.library.is_none() && optimizer.has_large_whole_variables() {
            true => optimizer.zero1(),
            false => Ok(optimizer.combined()?),
        }
    }

    /// Returns whether a strategy that shards parameters has not sharded some that are large enough.
    fn has_large_whole_variables(&self) -> bool {
        let whole = |variable: &&Variable<L>| variable.is_trainable() && variable.layout().is_none();
        let variables = self.parameters.variables().iter().filter(whole);
        self.parameters.sharding.is_some_and(|sharding| {
            variables.into_iter().any(|variable| sharding.shards(len::<L>(&variable.components()[0])))
        })
    }

    /// Limits the gradients after they are summed over all replicas and before they are applied.
    ///
    /// # Errors
    /// [`Error::Setting`] if the limit is not above 0.
    pub fn clip(self, clip: Clip) -> Result<Optimizer<L>, L::Error> {
        clip.check()?;
        Ok(Optimizer { clip: Some(clip), ..self }.combined()?)
    }

    /// Multiplies losses by a scale before backward, and divides gradients by it before they are clipped and applied.
    ///
    /// # Errors
    /// [`Error::Setting`] if the scale is below 1; [`Error::Combination`] for a scale that changes, with
    /// [`compress`](Optimizer::compress).
    ///
    /// # Examples
    /// ```
    /// use distribute_optim::{Adam, HostError, HostModel, LossScale};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = MirroredStrategy::builder().build()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[3], vec![0.5; 3])?)])?;
    /// let optimizer = Adam::new(0.1).build(&model)?.scale_losses(LossScale::dynamic())?;
    /// assert_eq!(optimizer.loss_scale(), 32768.0);
    /// # Ok::<(), HostError>(())
    /// ```
    pub fn scale_losses(self, scale: LossScale) -> Result<Optimizer<L>, L::Error> {
        scale.check()?;
        for state in &self.states.each {
            state.lock().standing.scaling = Some(Scaling::new(scale));
        }
        Ok(self.combined()?)
    }

    /// Returns the factor by which the next loss is multiplied.
    pub fn loss_scale(&self) -> f64 {
        self.states.first(|state| state.standing.scaling).flatten().map_or(1.0, |scaling| scaling.scale)
    }

    /// Shards the optimizer's state (ZeRO stage 1): each replica keeps the slots of its part of every bucket only,
    /// reduce-scatters gradients, updates its own part, and gathers the other parts of the parameters. The number of
    /// bytes moved stays the same, the state takes 1/n of the memory on each of n replicas, and parameters get the same
    /// values.
    ///
    /// Under tensor parallelism, the state of a rank's parts is sharded over the replicas.
    ///
    /// Every variable that ever gets a gradient must get one in the first step, on at least one replica. Parameters of
    /// 16 bits are gathered in 16 bits; their copies in f32 are sharded like the slots. On GPUs gradients are copied to
    /// host memory, where the state is, and parameters are copied back.
    ///
    /// Under a strategy that shards parameters this is the default, as ZeRO stage 2, if the model has large variables
    /// of which every replica has the whole.
    ///
    /// # Errors
    /// [`Error::Combination`] with LAMB or [`Clip::Norm`], which need whole variables, with compression, and if
    /// replicas share one copy of all variables.
    ///
    /// # Examples
    /// ```
    /// use distribute_optim::{Adam, HostError, HostLoss, HostModel};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[8], vec![0.5; 8])?)])?;
    /// let optimizer = Adam::new(0.1).build(&model)?.zero1()?;
    /// strategy.run_with(&optimizer, |context, optimizer| {
    ///     let gradient = HostTensor::new(&[8], vec![0.25; 8])?;
    ///     optimizer.minimize(context, &HostLoss(vec![Some(gradient)]))
    /// })?;
    /// assert_eq!(optimizer.state_bytes(), 2 * 8 * 4 / 2);      // two slots of eight parameters, on two replicas
    /// # Ok::<(), HostError>(())
    /// ```
    ///
    /// # Source
    /// Rajbhandari and others, "ZeRO: memory optimizations toward training trillion parameter models", 2020, section
    /// 5.1.
    pub fn zero1(self) -> Result<Optimizer<L>, L::Error> {
        // Whole slots are no longer needed.
        let slots = self.parameters.variables().iter().zip(&*self.slots);
        let kept = slots.map(|(variable, slots)| if variable.layout().is_some() { slots.clone() } else { Vec::new() });
        let slots: Arc<[_]> = kept.collect();
        self.states.shard();
        Ok(Optimizer { sharded: true, slots, ..self }.combined()?)
    }

    /// Sets how the gradients of large embeddings are reduced. Default: [`SparseGradients::Auto`].
    ///
    /// In such a gradient only the rows of the words in the batch differ from zero.
    /// [`Rows`](SparseGradients::Rows) all-reduces these rows with their indices if all replicas together have rows for
    /// at most a quarter of the matrix, and the whole matrix otherwise. Every replica then has the same sums, and the
    /// update is that by the whole gradient, bit for bit.
    ///
    /// The first step looks at gradients of f32 or f64 with at least two dimensions and a megabyte, and chooses those
    /// with few rows; later steps look at these only. Gradients are reduced as a whole with `zero1`, with compression,
    /// on GPUs and for sharded variables. A library may report a gradient by its rows (`backend::Gradient`), as
    /// `Embedding` of `distribute::candle` does: then nothing needs to be looked for.
    ///
    /// # Examples
    /// ```
    /// use distribute_optim::{Adam, HostModel, SparseGradients};
    /// use distribute_strategy::Strategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = Strategy::default_strategy()?;
    /// let model = HostModel::new(&strategy, [("words", HostTensor::new(&[8, 2], vec![0.5; 16])?)])?;
    /// let optimizer = Adam::new(0.1).build(&model)?.sparse_gradients(SparseGradients::Whole);
    /// # Ok::<(), distribute_optim::HostError>(())
    /// ```
    ///
    /// # Source
    /// The reduction of `tf.IndexedSlices` by tf.distribute, which also gathers them.
    pub fn sparse_gradients(self, sparse_gradients: SparseGradients) -> Optimizer<L> {
        Optimizer { sparse_gradients, ..self }.with_new_settings()
    }

    /// Returns whether the gradient of the variable with this index is [reduced by
    /// rows](Optimizer::sparse_gradients); false before the first step.
    pub fn reduces_rows(&self, index: usize) -> bool {
        self.states.plan().is_some_and(|plan| plan.reduces_rows(index))
    }

    /// Returns the size in bytes of the optimizer state that the first replica of this process keeps, on its device or
    /// in host memory. Sharded state exists from the first step on.
    pub fn state_bytes(&self) -> usize {
        let of_slot = |slot: &DistributedVariable<L::Tensor>| slot.components().first().map_or(0, bytes::<L>);
        let whole: usize = self.slots.iter().flatten().map(of_slot).sum();
        let shards = self.states.first(|state| state.shards.iter().map(SlotShard::bytes).sum::<usize>());
        whole + shards.unwrap_or(0)
    }

    /// Returns the optimizer with a setting that has changed, if its settings can be combined.
    fn combined(self) -> Result<Optimizer<L>, Error> {
        let optimizer = self.with_new_settings();
        optimizer.check_combined()?;
        Ok(optimizer)
    }

    /// Returns the optimizer with a setting that has changed: the next step compares all anew.
    fn with_new_settings(self) -> Optimizer<L> {
        Optimizer { fixed: OnceLock::new(), ..self }
    }

    /// Checks whether the settings can be combined.
    fn check_combined(&self) -> Result<(), Error> {
        if matches!(self.compression, Compression::TopK(_) | Compression::Custom(_))
            && self.parameters.variables().iter().any(|variable| variable.tensor_split().is_some())
        {
            // Gradients that are not split would be rounded differently on each rank.
            let (what, other) = ("compression of whole buckets", "variables that are split among tensor ranks");
            let why = "what a bucket loses depends on the parts in it; use Compression::Bf16, F16 or PowerSgd";
            return Err(Error::Combination { what, other, why });
        }
        let scaling = self.states.first(|state| state.standing.scaling).flatten();
        if !matches!(self.compression, Compression::None) && scaling.is_some_and(|scaling| scaling.changes()) {
            let (what, other) = ("compress", "a loss scale that changes");
            let why = "the rest of a gradient that a later step sends is of another scale; use LossScale::fixed, or \
                       bf16 parameters without a scale";
            return Err(Error::Combination { what, other, why });
        }
        if self.parameters.local_updates {
            self.check_local_settings()?;
        }
        if self.parameters.elastic {
            let refuse = |what, why| Err(Error::Combination { what, other: "an elastic strategy", why });
            if self.sharded {
                return refuse("zero1", "a lost process's part of the state would be lost with it; leave zero1 out");
            }
            if self.parameters.local_updates {
                return refuse("local updates", "replicas differ between synchronizations; leave one of them out");
            }
        }
        if self.parameters.variables().iter().any(|variable| variable.layout().is_some()) {
            let refuse = |what, why| Err(Error::Combination { what, other: "a strategy that shards parameters", why });
            match self.clip {
                Some(Clip::Norm(_)) => {
                    return refuse("Clip::Norm", "a replica sees parts of variables; use Clip::GlobalNorm");
                }
                _ if !self.rule.is_elementwise() => {
                    return refuse("this optimizer", "it looks at the norms of whole variables; use AdamW");
                }
                _ if !matches!(self.compression, Compression::None) => {
                    return refuse("compress", "gradients of sharded variables are reduced as they are; leave it out");
                }
                _ => {}
            }
        }
        let what = if self.parameters.sharding.is_some() { "FullyShardedStrategy" } else { "zero1" };
        let refuse = |other, why| Err(Error::Combination { what, other, why });
        match self.clip {
            _ if !self.sharded => Ok(()),
            _ if self.library.is_some() => refuse(
                "the tensor library's own optimizer",
                "its state is whole on every replica; use one of this crate",
            ),
            Some(Clip::Norm(_)) => refuse("Clip::Norm", "a replica sees parts of variables; use Clip::GlobalNorm"),
            _ if !self.rule.is_elementwise() => {
                refuse("this optimizer", "it looks at the norms of whole variables; use AdamW")
            }
            _ if !matches!(self.compression, Compression::None) => {
                refuse("compress", "compressed gradients come whole; leave one of them out")
            }
            _ if self.parameters.shared => {
                refuse("a strategy whose replicas share variables", "there is one copy of the state already")
            }
            _ => Ok(()),
        }
    }

    /// Compresses the gradients that are exchanged. The rounding error of one step is added to the gradients of the
    /// next.
    ///
    /// Replicas stay equal bit for bit, but their values differ from those without compression. Gradients of `f64` are
    /// not compressed. On GPUs f16 and bf16 are the compressions there are; others are an error of the first step.
    ///
    /// Checkpoints do not keep what was not sent yet: a run that is restored continues without it, so its values differ
    /// from those of a run that was not interrupted. All members of an elastic job drop it when they change.
    ///
    /// # Errors
    /// [`distribute_collectives::Error::Compression`], in the library's error, if the settings are invalid;
    /// [`Error::Combination`] with a [loss scale](Optimizer::scale_losses) that changes.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::Compression;
    /// use distribute_optim::{HostError, HostModel, Sgd};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[3], vec![0.5; 3])?)])?;
    /// let optimizer = Sgd::new(0.1).build(&model)?.compress(Compression::Bf16)?;
    /// # Ok::<(), HostError>(())
    /// ```
    ///
    /// # Source
    /// The communication hooks of torch's `DistributedDataParallel`.
    pub fn compress(self, compression: Compression) -> Result<Optimizer<L>, L::Error> {
        let options = FusionOptions::default().compression(compression);
        // Checks the settings now, and not in the first step.
        FusedAllReduce::new(&[], &options)?;
        Ok(Optimizer { compression: options.compression, ..self }.combined()?)
    }

    /// Sets after how many steps the parameters of all replicas in all processes are compared, bit for bit; the first
    /// step is always followed by a comparison. [`minimize`](ReplicaOptimizer::minimize) fails on all replicas if
    /// copies differ, which happens when a program writes a parameter on one replica alone. 0 turns comparisons off.
    /// Default: 500.
    ///
    /// # Cost
    /// Each replica reads its parameters once, on a GPU through host memory; eight bytes per variable are exchanged.
    /// With the default this is less than 0.5 % of training time (docs/benchmarks.md).
    ///
    /// # Examples
    /// ```
    /// use distribute_optim::{Adam, HostError, HostModel};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[3], vec![0.5; 3])?)])?;
    /// let optimizer = Adam::new(0.1).build(&model)?.audit_every(20);
    /// # Ok::<(), HostError>(())
    /// ```
    pub fn audit_every(self, steps: u64) -> Optimizer<L> {
        Optimizer { audit_every: steps, ..self }.with_new_settings()
    }

    /// Returns the global norm of the last step's gradients before clipping, if [`Clip::GlobalNorm`] is set.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.states.first(|state| state.standing.gradient_norm).flatten()
    }

    /// Returns the learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        f64::from_bits(self.learning_rate.load(Ordering::Acquire))
    }

    /// Sets the learning rate. Call it between steps, with the same value on every worker. A step with a rate below 0,
    /// or one that is not finite, is refused with [`Error::Setting`].
    pub fn set_learning_rate(&self, learning_rate: f64) {
        self.learning_rate.store(learning_rate.to_bits(), Ordering::Release);
    }

    /// Returns the state that a checkpoint keeps in addition to the slots.
    pub fn state(&self) -> OptimizerState {
        let standing = self.states.first(|state| {
            let standing = &state.standing;
            let trained =
                self.parameters.variables().iter().enumerate().filter(|(_, variable)| variable.is_trainable());
            let names = trained.map(|(index, variable)| (index, variable.name()));
            let counts = standing.counts.saved(names, standing.steps);
            (standing.steps, standing.scaling, counts)
        });
        let (steps, scaling, counts) = standing.unwrap_or_default();
        let (loss_scale, good_steps) = scaling.map_or((None, 0), |scaling| (Some(scaling.scale), scaling.good_steps));
        OptimizerState { steps, learning_rate: self.learning_rate(), loss_scale, good_steps, counts }
    }

    /// Restores the state of a checkpoint. Slots are restored separately, by
    /// [`restore_slots`](Optimizer::restore_slots) or [`set_sharded_slots`](Optimizer::set_sharded_slots).
    pub fn set_state(&self, state: &OptimizerState) {
        self.set_learning_rate(state.learning_rate);
        self.states.restored();
        for replica in &self.states.each {
            let standing = &mut replica.lock().standing;
            standing.steps = state.steps;
            let names = self.parameters.variables().iter().map(Variable::name);
            standing.counts = StepCounts::restored(names, state.steps, &state.counts);
            // A fixed scale is that of this program.
            let dynamic = standing.scaling.as_mut().filter(|scaling| scaling.changes());
            if let (Some(scaling), Some(scale)) = (dynamic, state.loss_scale) {
                (scaling.scale, scaling.good_steps) = (scale, state.good_steps);
            }
        }
    }

    /// Restores all slots except [sharded ones](Optimizer::sharded_slots) from whole values. `saved` returns the value
    /// of a slot from its name, a tensor of its library and type, and its whole shape.
    ///
    /// # Errors
    /// The errors of `saved`, and [`distribute_values::Error::Tensor`] if a slot cannot be written.
    pub fn restore_slots<E: From<distribute_values::Error>>(
        &self,
        mut saved: impl FnMut(&str, &L::Tensor, &[usize]) -> Result<L::Tensor, E>,
    ) -> Result<(), E> {
        for (variable, slots) in self.parameters.variables().iter().zip(&*self.slots) {
            for slot in slots {
                let value = saved(slot.name(), &slot.components()[0], &variable.shape())?;
                variable.overwrite_slot(slot.components(), &value)?;
            }
        }
        Ok(())
    }

    /// Returns the names of all slots if they are sharded, each with a tensor of its shape and type.
    ///
    /// # Errors
    /// The library's error if a tensor cannot be converted.
    pub fn sharded_slots(&self) -> Result<Vec<(String, L::Tensor)>, L::Error> {
        let is_flat = |variable: &&Variable<L>| variable.is_trainable() && variable.layout().is_none();
        let trainable = self.parameters.variables().iter().filter(|variable| self.sharded && is_flat(variable));
        let mut all = Vec::new();
        for variable in trainable {
            let whole = tensor_split::whole::<L, _>(variable.components(), variable.tensor_split())?;
            let like = wide::<L>(&whole)?;
            all.extend(self.slot_names(variable)?.into_iter().map(|name| (name, like.clone())));
        }
        Ok(all)
    }

    /// Restores whole slots. Each replica takes its parts from them in the next step, because only then the parts are
    /// agreed on.
    pub fn set_sharded_slots(&self, whole: HashMap<String, L::Tensor>) {
        let whole = Arc::new(whole);
        for replica in &self.states.each {
            let mut replica = replica.lock();
            (replica.shards, replica.restored) = (Vec::new(), Some(whole.clone()));
        }
    }

    /// Returns the names of the model's variables, in order of creation, of those that are not trained too.
    pub fn variable_names(&self) -> impl Iterator<Item = &str> {
        self.parameters.variables().iter().map(Variable::name)
    }

    /// Returns the optimizer's own variables: `fc1.weight/m` and so on. Those of a sharded variable are sharded too:
    /// their components are the replicas' parts, in host memory if the optimizer was built by
    /// [`build_offloaded`](Adam::build_offloaded).
    pub fn slots(&self) -> impl Iterator<Item = &DistributedVariable<L::Tensor>> {
        self.slots.iter().flatten()
    }

    /// Returns the state of the tensor library's own optimizer, if this is one; of parts that replicas have, the whole,
    /// in the chief's process only. Every process calls this, outside `run`.
    ///
    /// # Errors
    /// [`Error::Torn`] if a failed step has left no replica with complete state; the library's error if the state
    /// cannot be serialized; the collective's if a process is missing or fails.
    pub fn library_state(&self, strategy: &Strategy) -> Result<Option<Vec<u8>>, L::Error> {
        self.states.check()?;
        self.library.as_ref().map_or(Ok(None), |library| library.save(strategy))
    }

    /// Restores the state of the tensor library's own optimizer on all replicas of this process.
    ///
    /// # Errors
    /// The library's error if the state cannot be read.
    pub fn set_library_state(&self, state: &[u8]) -> Result<(), L::Error> {
        self.library.as_ref().map_or(Ok(()), |library| library.load(state))
    }

    /// Returns the optimizer's own variables, each with the layout of its variable if that is sharded.
    /// [`overwrite_parts`](crate::backend::overwrite_parts) restores either kind from a whole value.
    pub fn slots_with_layouts(&self) -> impl Iterator<Item = (&DistributedVariable<L::Tensor>, Option<&ShardLayout>)> {
        let variables = self.parameters.variables().iter().zip(&*self.slots);
        variables.flat_map(|(variable, slots)| slots.iter().map(|slot| (slot, variable.layout())))
    }

    /// Returns the time that this process's first replica has spent in steps.
    pub fn times(&self) -> StepTimes {
        self.states.first(|state| state.times).unwrap_or_default()
    }
}

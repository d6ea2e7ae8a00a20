//! The variables of a model, with one component per replica.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use distribute_strategy::{LocalSlot, LocalUpdates, Sharding, Strategy};
use distribute_types::with_dtype;
use distribute_values::{TensorStorage, with_storage};

use crate::tape::{Gradient, Sink, Tape};
use crate::tensor_split::{self, TensorSplit};
use crate::{Error, ShardLayout, TensorLibrary};

/// The variables of a model, as optimizers and checkpoints need them.
#[derive(Debug)]
pub struct Parameters<L: TensorLibrary> {
    variables: Vec<Variable<L>>,
    /// The tapes of the local replicas.
    pub(crate) tapes: Vec<Arc<Tape<L::Tensor>>>,
    /// Whether replicas share the variables. Shared variables do not report gradients.
    pub(crate) shared: bool,
    /// Whether all replicas are in this process.
    pub(crate) alone: bool,
    /// The replicas that the model was built for.
    counts: ReplicaCounts,
    /// The number of ranks of each tensor group.
    pub(crate) tensor_ranks: usize,
    /// How the strategy shards parameters, if it does.
    pub(crate) sharding: Option<Sharding>,
    /// Whether a failure has left no replica with complete parameters; reset when values are loaded.
    torn: AtomicBool,
    /// For each local replica, whether it has updated its copies by its own gradients since all copies were equal.
    apart: Vec<AtomicBool>,
    /// Whether replicas update their copies by their own gradients.
    pub(crate) local_updates: bool,
    /// Whether processes may be lost while others train on.
    pub(crate) elastic: bool,
    /// The slots that the strategy keeps for each trained variable.
    pub(crate) local_slots: Vec<LocalSlot>,
    /// The number of times that values were loaded into all replicas.
    loads: AtomicU64,
    /// How often values were written into the variables of all replicas: loaded, or swapped by [`Ema`](crate::Ema).
    writes: AtomicU64,
    /// An object that must live as long as the model.
    #[expect(dead_code, reason = "held for its owner only")]
    held: Option<Arc<dyn Any + Send + Sync>>,
}

/// The replicas of a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReplicaCounts {
    local: usize,
    in_sync: usize,
    workers: usize,
}

impl ReplicaCounts {
    fn of(strategy: &Strategy) -> ReplicaCounts {
        let (local, in_sync) = (strategy.num_local_replicas(), strategy.num_replicas_in_sync());
        ReplicaCounts { local, in_sync, workers: strategy.topology().workers() }
    }
}

impl fmt::Display for ReplicaCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReplicaCounts { local, in_sync, workers } = self;
        write!(f, "{in_sync} replicas in {workers} processes, on {local} devices of this one")
    }
}

/// A variable of a model, with one component per local replica.
#[derive(Debug)]
pub struct Variable<L: TensorLibrary> {
    name: String,
    components: Vec<L::Tensor>,
    trainable: bool,
    statistic: bool,
    /// How it is split among the ranks of each tensor group; `None` if every rank has the whole of it.
    split: Option<TensorSplit>,
    /// How it is divided among replicas; `None` if every replica has the whole of it.
    layout: Option<ShardLayout>,
}

impl<L: TensorLibrary> Clone for Variable<L> {
    fn clone(&self) -> Variable<L> {
        let Variable { name, components, trainable, statistic, split, layout } = self;
        let (name, components, layout) = (name.clone(), components.clone(), layout.clone());
        Variable { name, components, trainable: *trainable, statistic: *statistic, split: *split, layout }
    }
}

impl<L: TensorLibrary> Variable<L> {
    /// Creates a variable that has no components yet. A `statistic` is a variable that a layer writes itself, from its
    /// replica's examples; it is never trained.
    pub fn new(name: impl Into<String>, statistic: bool) -> Variable<L> {
        Variable {
            name: name.into(),
            components: Vec::new(),
            trainable: !statistic,
            statistic,
            split: None,
            layout: None,
        }
    }

    /// Creates a variable that is split among the ranks of each tensor group, and has no components yet. The component
    /// of a rank is its part.
    pub fn split_among(name: impl Into<String>, split: TensorSplit) -> Variable<L> {
        Variable { split: Some(split), ..Variable::new(name, false) }
    }

    /// Shards the parts of a variable that is split among tensor ranks: `layout` is that of one rank's part, and the
    /// component of a rank is the part of it that its replica has. The gradient that a rank reports is that of its part
    /// of the split variable.
    #[must_use]
    pub fn with_sharded_parts(self, layout: ShardLayout) -> Variable<L> {
        Variable { layout: Some(layout), ..self }
    }

    /// Returns how the variable is split among the ranks of each tensor group; `None` if every rank has the whole of
    /// it.
    pub fn tensor_split(&self) -> Option<TensorSplit> {
        self.split
    }

    /// Creates a sharded variable that has no components yet. Each replica's component is its part, with its padding:
    /// a tensor of any shape with as many elements as the layout's
    /// [`part_len`](crate::backend::ShardLayout::part_len).
    ///
    /// While backward runs, its *whole* gradient is reported to the [`Tape`](crate::backend::Tape), in the whole shape
    /// or any other with as many elements; the optimizer reduces it to parts at once.
    pub fn sharded(name: impl Into<String>, layout: ShardLayout) -> Variable<L> {
        Variable { layout: Some(layout), ..Variable::new(name, false) }
    }

    /// Returns how the variable is divided among replicas; `None` if every replica has the whole of it.
    pub fn layout(&self) -> Option<&ShardLayout> {
        self.layout.as_ref()
    }

    /// Returns the shape of the whole variable.
    pub fn shape(&self) -> Vec<usize> {
        match (&self.layout, self.split) {
            (Some(layout), Some(split)) => split.whole_shape(layout.shape()),
            (Some(layout), None) => layout.shape().to_vec(),
            (None, Some(split)) => split.whole_shape(&self.components[0].shape()),
            (None, None) => self.components[0].shape(),
        }
    }

    /// Adds the component of the next local replica. Replicas that share a variable pass handles on one storage.
    pub fn push(&mut self, component: L::Tensor) {
        self.components.push(component);
    }

    /// Returns the variable's path, such as `fc1.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Excludes the variable from training.
    pub fn freeze(&mut self) {
        self.trainable = false;
    }

    /// Returns the components of this process's replicas. They are live handles, which the next step changes; copy one
    /// to keep its values.
    pub fn components(&self) -> &[L::Tensor] {
        &self.components
    }

    /// Returns whether optimizers update it; they skip running statistics of normalisation layers and frozen variables.
    pub fn is_trainable(&self) -> bool {
        self.trainable
    }

    /// Returns whether its layer writes it, from each replica's examples.
    pub fn is_statistic(&self) -> bool {
        self.statistic
    }

    /// Writes a value of the same type and of the whole [`shape`](Variable::shape) to all components: to those of a
    /// split or sharded variable, their parts of it.
    ///
    /// # Errors
    /// [`distribute_values::Error::Tensor`] if the storage cannot be written;
    /// [`distribute_values::Error::Device`] if a sharded variable's value has another number of elements.
    pub fn overwrite(&self, value: &L::Tensor) -> distribute_values::Result<()> {
        self.overwrite_slot(&self.components, value)
    }

    /// Writes a whole value to components that are divided as those of this variable, such as those of its slots.
    pub(crate) fn overwrite_slot(&self, components: &[L::Tensor], value: &L::Tensor) -> distribute_values::Result<()> {
        match (self.split, &self.layout) {
            (Some(split), Some(layout)) => {
                let ranks = split.parts();
                for place in 0..ranks {
                    let part = tensor_split::part::<L, _>(split, value, layout.shape(), place)?;
                    let of_place = components.iter().enumerate().skip(place).step_by(ranks);
                    overwrite_shards::<L>(of_place, layout, &part)?;
                }
                Ok(())
            }
            (Some(split), None) => tensor_split::overwrite_parts::<L, _>(components, split, value),
            (None, layout) => overwrite_parts::<L>(components, layout.as_ref(), value),
        }
    }
}

impl<L: TensorLibrary> Parameters<L> {
    /// Collects the variables of a model under a strategy, in order of creation. `tapes` has one tape per local
    /// replica, to which the components of trainable variables report; it is empty if replicas share the variables, or
    /// if the library has no hook during backward. `held` is kept alive as long as the parameters.
    pub fn new(
        strategy: &Strategy,
        variables: Vec<Variable<L>>,
        tapes: Vec<Arc<Tape<L::Tensor>>>,
        held: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Parameters<L> {
        let (shared, counts) = (strategy.shares_variables(), ReplicaCounts::of(strategy));
        let alone = counts.workers == 1;
        let mut tapes = tapes;
        tapes.resize_with(strategy.num_local_replicas(), Tape::new);
        let (tensor_ranks, sharding) = (strategy.tensor_parallel(), strategy.sharding());
        let updates = strategy.extended().local_updates();
        let local_slots = updates.map_or_else(Vec::new, |updates| LocalUpdates::slots(updates).to_vec());
        let (local_updates, loads, writes) = (updates.is_some(), AtomicU64::new(0), AtomicU64::new(0));
        let elastic = strategy.elastic().is_some();
        let apart = tapes.iter().map(|_| AtomicBool::new(false)).collect();
        let torn = AtomicBool::new(false);
        Parameters {
            variables,
            tapes,
            shared,
            alone,
            counts,
            tensor_ranks,
            sharding,
            torn,
            apart,
            local_updates,
            elastic,
            local_slots,
            loads,
            writes,
            held,
        }
    }

    /// Returns the variables, in order of creation.
    pub fn variables(&self) -> &[Variable<L>] {
        &self.variables
    }

    /// Inverts `trainable` of the variables for which it equals `from` and whose names `chosen` accepts; returns their
    /// number.
    pub fn set_trainable(&mut self, from: bool, chosen: impl Fn(&str) -> bool) -> usize {
        let changeable = self.variables.iter_mut().filter(|variable| !variable.statistic && variable.trainable == from);
        changeable.filter(|variable| chosen(&variable.name)).map(|variable| variable.trainable = !from).count()
    }

    /// Returns an error unless a strategy has the replicas that the model was built for. Members of an elastic job come
    /// and go, so that only their own replicas count.
    pub(crate) fn check_strategy(&self, strategy: &Strategy) -> Result<(), Error> {
        let (built, given) = (self.counts, ReplicaCounts::of(strategy));
        let is_same = if self.elastic { built.local == given.local } else { built == given };
        if is_same { Ok(()) } else { Err(Error::OtherStrategy { built: built.to_string(), given: given.to_string() }) }
    }

    /// Returns an error if a failed step has left no replica with whole parameters.
    ///
    /// # Errors
    /// [`Error::Torn`] until values are loaded into all replicas.
    pub fn check_whole(&self) -> Result<(), Error> {
        if self.torn.load(Ordering::Acquire) { Err(Error::Torn) } else { Ok(()) }
    }

    /// Returns an error unless every replica has whole parameters, and all have equal ones as far as they have been
    /// synchronized.
    ///
    /// # Errors
    /// [`Error::Torn`] as [`check_whole`](Parameters::check_whole); [`Error::Apart`] if replicas have updated their own
    /// copies since they were synchronized.
    pub fn check_equal(&self) -> Result<(), Error> {
        self.check_whole()?;
        if self.are_apart() { Err(Error::Apart) } else { Ok(()) }
    }

    /// Sets whether a failure has left no replica with complete parameters; false after values were loaded into all of
    /// them.
    pub fn set_torn(&self, torn: bool) {
        self.torn.store(torn, Ordering::Release);
        if !torn {
            self.note_loaded();
            (0..self.apart.len()).for_each(|local| self.set_apart(local, false));
        }
    }

    /// Notes that values were loaded into all replicas, which begin a new training: the [slots of local
    /// updates](distribute_strategy::LocalUpdates::slots) are created again.
    pub fn note_loaded(&self) {
        self.loads.fetch_add(1, Ordering::AcqRel);
        self.note_written();
    }

    /// Notes that values were written into the variables of all replicas; f32 copies of 16-bit ones follow them.
    pub(crate) fn note_written(&self) {
        self.writes.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the number of times that values were written into the variables of all replicas.
    pub(crate) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Acquire)
    }

    /// Returns the number of times that values were loaded into all replicas.
    pub(crate) fn loads(&self) -> u64 {
        self.loads.load(Ordering::Acquire)
    }

    /// Returns whether replicas have updated their own copies since these were equal.
    pub(crate) fn are_apart(&self) -> bool {
        self.apart.iter().any(|apart| apart.load(Ordering::Acquire))
    }

    /// Sets whether a replica has updated its own copies since all were equal.
    pub(crate) fn set_apart(&self, local: usize, apart: bool) {
        self.apart[local].store(apart, Ordering::Release);
    }

    /// Calls `backward` on one replica and passes each gradient that variables report meanwhile to `sink`.
    pub(crate) fn reported(
        &self,
        local: usize,
        sink: Sink<L::Tensor>,
        backward: impl FnOnce() -> Result<(), L::Error>,
    ) -> Result<(), L::Error> {
        self.tapes[local].record(sink, backward).0
    }

    /// Runs backward on one replica and passes each gradient to `sink`: as soon as it is complete if variables report
    /// it, else at the end, the last layer's first.
    pub(crate) fn backward(&self, local: usize, sink: Sink<L::Tensor>, loss: &L::Loss) -> Result<(), L::Error> {
        let (gradients, sink) = self.tapes[local].record(sink, || L::backward(loss));
        let (gradients, Some(mut sink)) = (gradients?, sink) else { return Ok(()) };
        for (index, variable) in self.variables.iter().enumerate().rev().filter(|(_, variable)| variable.trainable) {
            if let Some(gradient) = L::gradient(&gradients, index, &variable.components[local]) {
                sink(index, Gradient::Whole(gradient));
            }
        }
        Ok(())
    }
}

/// A model that optimizers can be built for.
pub trait Trainable {
    /// The library of the model's tensors.
    type Library: TensorLibrary;

    /// Returns the model's variables, with one component per replica of this process.
    fn parameters(&self) -> &Arc<Parameters<Self::Library>>;
}

/// Writes a value of the same type and shape to the components of a variable or a slot.
///
/// # Errors
/// [`distribute_values::Error::Tensor`] if the storage cannot be written.
pub fn overwrite<L: TensorLibrary>(components: &[L::Tensor], value: &L::Tensor) -> distribute_values::Result<()> {
    for component in components {
        with_storage::<L, L::Tensor>(&[component.clone(), value.clone()], &mut |buffers| {
            if let [component, value] = buffers {
                component.as_bytes_mut().copy_from_slice(value.as_bytes());
            }
        })?;
    }
    Ok(())
}

/// Writes a whole value of the same type to the components of a variable or a slot that may be sharded.
///
/// # Errors
/// [`distribute_values::Error::Tensor`] if the storage cannot be written; [`distribute_values::Error::Device`] if the
/// value of a sharded one has another number of elements.
pub fn overwrite_parts<L: TensorLibrary>(
    components: &[L::Tensor],
    layout: Option<&ShardLayout>,
    value: &L::Tensor,
) -> distribute_values::Result<()> {
    let Some(layout) = layout else { return overwrite::<L>(components, value) };
    overwrite_shards::<L>(components.iter().enumerate(), layout, value)
}

/// Writes their parts of a whole value to components, given with their indices in the process.
fn overwrite_shards<'c, L: TensorLibrary>(
    components: impl Iterator<Item = (usize, &'c L::Tensor)>,
    layout: &ShardLayout,
    value: &L::Tensor,
) -> distribute_values::Result<()> {
    let given: usize = value.shape().iter().product();
    if given != layout.len() {
        return Err(distribute_device::Error::OutOfRange { start: 0, end: layout.len(), len: given }.into());
    }
    with_dtype!(value.dtype()?, T => {
        let whole = value.to_elements::<T>()?;
        for (local, component) in components {
            let part = layout.cut(&whole, layout.part_of(local));
            let mut outcome = Ok(());
            component.write(&mut |mut buffer| {
                outcome = buffer.as_mut_slice::<T>().map(|own| own.iter_mut().zip(&part).for_each(|(a, b)| *a = *b));
            })?;
            outcome?;
        }
    });
    Ok(())
}

/// Formats a variable's name, shape and type, as they are compared between workers.
pub(crate) fn describe<L: TensorLibrary>(variable: &Variable<L>) -> String {
    let dtype = variable.components[0].dtype().map_or_else(|error| error.to_string(), |dtype| format!("{dtype:?}"));
    let split = variable.split.map_or_else(String::new, |split| format!(" on {} tensor ranks", split.parts()));
    let sharded = variable.layout().map_or_else(String::new, |layout| format!(" in {} parts", layout.parts()));
    format!("{} {:?} {dtype}{split}{sharded}", variable.name, variable.shape())
}

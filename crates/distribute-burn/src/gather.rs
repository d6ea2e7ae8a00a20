//! Sharded weights: gathered when the model uses them, dropped after the use, and gathered again in backward.
//!
//! The weight that follows in the order of the step before is gathered ahead. All replicas must gather in the same
//! order, so whether something is gathered ahead depends on that order alone, never on time.
//!
//! Some of burn's operations keep a weight from forward to backward, others let it be gathered again, and which one
//! burn takes can depend on the size of the batch, of which replicas may have different ones. So replicas compare what
//! they keep before each backward. A weight that only some of them keep is gathered at once for the others.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::retro_forward::RetroForward;
use burn_autodiff::checkpoint::state::BackwardStates;
use burn_flex::{FlexTensor, Layout};
use distribute_collectives::{Error as CollectiveError, ReduceOp};
use distribute_device::BufferRef;
use distribute_optim::backend::{Gathering, ShardLayout, start_gather};
use distribute_strategy::{ShardGroups, get_replica_context, raise};
use distribute_types::with_dtype;
use distribute_values::TensorStorage;
use parking_lot::Mutex;

use crate::hook::{Copy, Use};
use crate::spare::Spare;
use crate::tensor::{burn_type, made};
use crate::{Error, Result};

/// The most gathers that are remembered, of forward passes that no backward follows.
const LONGEST: usize = 1 << 16;

/// The gathers of one replica.
#[derive(Default)]
pub(crate) struct Gathers {
    order: Mutex<Order>,
    /// The memory of weights that were dropped.
    spare: Arc<Spare>,
}

#[derive(Default)]
struct Order {
    /// The variables that the step before has gathered, in order.
    last: Vec<usize>,
    /// The position in it that follows the newest gather; `None` if that was not as expected.
    expected: Option<usize>,
    now: Vec<usize>,
    ahead: Option<Ahead>,
    copies: Vec<Weak<Copy>>,
    /// The weights that forward has gathered, for graphs of which backward may yet run on some replica.
    live: Vec<Live>,
    /// The weights that backward may ask for and that are not gathered then, once for each use.
    held: HashMap<usize, Vec<FlexTensor>>,
    /// Whether a warning has named weights that forward keeps.
    warned: bool,
}

/// A weight that forward has gathered, whether or not it is still in memory.
struct Live {
    copy: Weak<Copy>,
    memory: Weak<burn_backend::Bytes>,
    used: Weak<Use>,
}

impl Live {
    /// Returns whether backward may yet run through its use on this replica.
    fn is_awaited(&self) -> bool {
        self.used.upgrade().is_some_and(|used| used.is_awaited())
    }
}

/// A weight that is being gathered before it is used.
struct Ahead {
    index: usize,
    /// The version of the part that was sent.
    version: u64,
    pending: Pending,
}

type Pending = Box<dyn FnOnce() -> Result<FlexTensor, CollectiveError> + Send>;

impl Gathers {
    /// Sets the replica's copies, by variable.
    pub(crate) fn set_copies(&self, copies: Vec<Weak<Copy>>) {
        self.order.lock().copies = copies;
    }

    /// Returns the whole of a weight: in a replica from all replicas, outside from the parts of this process. If it is
    /// for a use in a graph, it should be gone before backward.
    ///
    /// A failure ends the replica: burn's interface has no place for an error.
    pub(crate) fn whole(&self, copy: &Arc<Copy>, layout: &ShardLayout, used: Option<&Arc<Use>>) -> FlexTensor {
        let Some(context) = get_replica_context() else { return assembled(copy, layout) };
        let Some(groups) = context.shard_groups() else { return assembled(copy, layout) };
        if used.is_none()
            && let Some(held) = self.order.lock().held.get_mut(&copy.index).and_then(Vec::pop)
        {
            return held;
        }
        match self.gathered(copy, layout, &groups) {
            Ok(whole) => {
                if let Some(used) = used {
                    let (copy, memory) = (Arc::downgrade(copy), Arc::downgrade(&whole.data_arc()));
                    self.order.lock().live.push(Live { copy, memory, used: Arc::downgrade(used) });
                }
                whole
            }
            Err(error) => raise(error),
        }
    }

    fn gathered(
        &self,
        copy: &Arc<Copy>,
        layout: &ShardLayout,
        groups: &ShardGroups,
    ) -> distribute_strategy::Result<FlexTensor> {
        let pending = {
            let mut order = self.order.lock();
            let spare = self.spare_of(groups);
            let pending = match order.ahead.take() {
                Some(ahead) if ahead.index == copy.index && ahead.version == copy.value.version() => ahead.pending,
                // Something else is used than was expected.
                _ => start(copy, layout, groups, &spare)?,
            };
            if let Some(next) = order.advance(copy.index)
                && let Some(layout) = &next.layout
                && groups.overlap()
            {
                let (index, version) = (next.index, next.value.version());
                order.ahead = Some(Ahead { index, version, pending: start(&next, layout, groups, &spare)? });
            }
            pending
        };
        Ok(pending()?)
    }

    /// Returns where the memory of weights goes when they are dropped: if nothing overlaps, nowhere, for least memory.
    fn spare_of(&self, groups: &ShardGroups) -> Arc<Spare> {
        if groups.overlap() { self.spare.clone() } else { Arc::default() }
    }

    /// Prepares backward, for which all replicas must keep the same weights: see the module's documentation.
    ///
    /// A failure ends the replica: burn's interface has no place for an error.
    pub(crate) fn begin_backward(&self) {
        let groups = get_replica_context().and_then(|context| context.shard_groups());
        if let Some(groups) = groups
            && let Err(error) = self.agree_on_kept(&groups)
        {
            raise(error);
        }
        self.warn_of_kept();
    }

    /// Gathers the weights that some replicas keep and others do not.
    fn agree_on_kept(&self, groups: &ShardGroups) -> distribute_strategy::Result<()> {
        let mut order = self.order.lock();
        // All replicas have gathered the same weights in the same order.
        let live: Vec<_> = order.live.iter().map(|live| (live.copy.upgrade(), live.memory.upgrade())).collect();
        if live.is_empty() {
            return Ok(());
        }
        let is_kept = |is: bool| live.iter().map(move |(_, memory)| u8::from(memory.is_some() == is));
        let is_awaited = order.live.iter().map(|live| u8::from(live.is_awaited()));
        let flags: Vec<u8> = is_awaited.chain(is_kept(true)).chain(is_kept(false)).collect();
        let some = groups.gathers().start().all_reduce(flags, ReduceOp::Max)?.wait()?;
        let (awaited, kept_or_dropped) = some.split_at(live.len());
        let (kept, dropped) = kept_or_dropped.split_at(live.len());
        // Replicas free their graphs at different times, and keep the same list.
        let mut is_awaited = awaited.iter();
        order.live.retain(|_| is_awaited.next() == Some(&1));
        for (at, (copy, memory)) in live.iter().enumerate() {
            if [awaited[at], kept[at], dropped[at]] != [1, 1, 1] {
                continue;
            }
            let Some((copy, layout)) = copy.as_ref().and_then(|copy| Some((copy, copy.layout.as_ref()?))) else {
                continue;
            };
            let gathered = start(copy, layout, groups, &self.spare_of(groups))?()?;
            let weight = match memory {
                Some(memory) => {
                    let (shape, dtype) = (Layout::contiguous(layout.shape().to_vec().into()), gathered.dtype());
                    FlexTensor::from_arc(memory.clone(), shape, dtype)
                }
                None => gathered,
            };
            order.held.entry(copy.index).or_default().push(weight);
        }
        Ok(())
    }

    /// Ends a step: its order is what the next one is expected to repeat. Nothing that was gathered before an update is
    /// used after it.
    pub(crate) fn end_step(&self) {
        let mut order = self.order.lock();
        // A backward of another model gathers nothing.
        if !order.now.is_empty() {
            order.last = std::mem::take(&mut order.now);
        }
        (order.expected, order.ahead) = (None, None);
        order.held.clear();
    }

    /// Returns whether forward has gathered weights for graphs of which backward may yet run.
    pub(crate) fn has_live(&self) -> bool {
        !self.order.lock().live.is_empty()
    }

    /// Forgets the gathers of a run that has failed, and what its group was about to gather.
    pub(crate) fn forget(&self) {
        let mut order = self.order.lock();
        (order.expected, order.ahead) = (None, None);
        order.now.clear();
        order.live.clear();
        order.held.clear();
    }

    /// Warns about weights that are still in memory at the end of the forward pass.
    fn warn_of_kept(&self) {
        let mut order = self.order.lock();
        let kept = order.live.iter().filter(|live| live.memory.strong_count() > 0 && live.is_awaited());
        let mut names: Vec<String> = kept.filter_map(|live| Some(live.copy.upgrade()?.name.clone())).collect();
        names.dedup();
        if !names.is_empty() && !std::mem::replace(&mut order.warned, true) {
            distribute_notice::warn!(
                "{} stay in memory from forward to backward, because an operation keeps them: one that burn does not \
                 compute again, such as an explicit transpose before a matmul. They take the memory that sharding was \
                 to save; let the operation use the weight itself, or enable gradient_checkpointing on the device",
                names.join(", ")
            );
        }
    }
}

impl Order {
    /// Records a gather, and returns the copy that is expected to be gathered next.
    fn advance(&mut self, index: usize) -> Option<Arc<Copy>> {
        let at = match self.expected {
            Some(at) if self.last.get(at) == Some(&index) => Some(at),
            // A forward pass begins, also after one without backward.
            _ if self.last.first() == Some(&index) => {
                self.now.clear();
                Some(0)
            }
            _ => None,
        };
        if self.now.len() >= LONGEST {
            self.now.clear();
        }
        self.now.push(index);
        self.expected = at.map(|at| at + 1);
        let next = *self.last.get(self.expected?)?;
        self.copies.get(next)?.upgrade()
    }
}

/// Starts to gather the whole of a weight.
fn start(
    copy: &Copy,
    layout: &ShardLayout,
    groups: &ShardGroups,
    spare: &Arc<Spare>,
) -> distribute_strategy::Result<Pending> {
    let part = copy.value.flex();
    let (dtype, whole) = (copy.value.dtype()?, Layout::contiguous(layout.shape().to_vec().into()));
    let spare = spare.clone();
    with_dtype!(dtype, T => {
        let memory = spare.take(layout.len());
        let gathering: Gathering<T> = start_gather(groups, &copy.name, layout, part.storage::<T>(), memory)?;
        Ok(Box::new(move || Ok(FlexTensor::new(spare.bytes(gathering.wait()?), whole, burn_type(dtype)))))
    })
}

/// Returns the whole of a weight from the parts of this process, if it has all.
fn assembled(copy: &Copy, layout: &ShardLayout) -> FlexTensor {
    let whole = || -> Result<FlexTensor> {
        if copy.parts.is_empty() {
            return Err(Error::OutsideRun { name: copy.name.clone() });
        }
        with_dtype!(copy.value.dtype()?, T => {
            let mut whole: Vec<T> = Vec::with_capacity(layout.len());
            for part in &copy.parts {
                whole.extend(part.to_elements::<T>()?);
            }
            whole.truncate(layout.len());
            Ok(made(layout.shape(), BufferRef::from(&whole[..]))?)
        })
    };
    #[expect(clippy::panic, reason = "the interface of burn has no place for an error, and burn panics too")]
    whole().unwrap_or_else(|error| panic!("{error}"))
}

/// Gathers a weight again when backward needs it.
#[derive(Debug)]
pub(crate) struct Regather(pub(crate) Arc<Copy>);

impl RetroForward for Regather {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        if let Some(layout) = &self.0.layout {
            states.save(out, self.0.uses.gathers.whole(&self.0, layout, None));
        }
    }
}

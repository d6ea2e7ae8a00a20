//! The blocks of a model whose parameters are sharded: which are in memory, and which come next.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use candle_core::{CpuStorage, DType, Tensor};
use distribute_collectives::Error as CollectiveError;
use distribute_device::{bf16, f16};
use distribute_optim::backend::{Gathering, ShardLayout, start_gather};
use distribute_strategy::{Recoverable, RecoveryError, ShardGroups, get_replica_context, raise};
use distribute_values::TensorStorage;
use parking_lot::Mutex;

use super::ops::{replace, resting};
use crate::Candle;

type Result<T, E = candle_core::Error> = std::result::Result<T, E>;

/// The blocks of a model on all replicas of this process.
#[derive(Debug)]
pub(crate) struct Blocks(Vec<Arc<Replica>>);

/// The blocks of one replica's model.
#[derive(Debug, Default)]
pub(crate) struct Replica {
    units: Mutex<Vec<Weak<Unit>>>,
    leaves: Mutex<Vec<Arc<Leaf>>>,
    order: Mutex<RunOrder>,
    /// Bytes of parameters in memory, and the most there were.
    bytes: AtomicUsize,
    peak: AtomicUsize,
}

/// The order in which blocks run.
#[derive(Debug, Default)]
struct RunOrder {
    /// In the present forward pass.
    present: Vec<Arc<Unit>>,
    /// In the one before.
    before: Vec<Arc<Unit>>,
}

/// The sharded parameters of one block, on one replica.
#[derive(Debug)]
pub(crate) struct Unit {
    name: String,
    replica: Weak<Replica>,
    leaves: Mutex<Vec<Arc<Leaf>>>,
}

/// A sharded parameter of one replica.
#[derive(Debug)]
pub(crate) struct Leaf {
    name: String,
    layout: ShardLayout,
    /// This replica's part.
    part: Tensor,
    /// The parameter as the model has it, in its whole shape.
    whole: Tensor,
    state: Mutex<LeafState>,
}

#[derive(Debug, Default)]
struct LeafState {
    /// The number of runs that need the whole; it is in memory if there are any.
    users: usize,
    /// The whole, on its way.
    coming: Option<Coming>,
}

/// A parameter on its way, by type.
#[derive(Debug)]
enum Coming {
    F32(Gathering<f32>),
    F64(Gathering<f64>),
    F16(Gathering<f16>),
    BF16(Gathering<bf16>),
}

impl Coming {
    fn wait(self) -> Result<CpuStorage, CollectiveError> {
        Ok(match self {
            Coming::F32(gathering) => CpuStorage::F32(gathering.wait()?),
            Coming::F64(gathering) => CpuStorage::F64(gathering.wait()?),
            Coming::F16(gathering) => CpuStorage::F16(gathering.wait()?),
            Coming::BF16(gathering) => CpuStorage::BF16(gathering.wait()?),
        })
    }
}

impl Blocks {
    pub(crate) fn new(replicas: usize) -> Blocks {
        Blocks((0..replicas).map(|_| Arc::default()).collect())
    }

    pub(crate) fn replica(&self, local: usize) -> Option<&Arc<Replica>> {
        self.0.get(local)
    }

    /// Returns the most bytes of gathered parameters that a replica has had in memory.
    pub(crate) fn peak(&self) -> usize {
        self.0.iter().map(|replica| replica.peak.load(Ordering::Relaxed)).max().unwrap_or(0)
    }
}

/// A run, and whatever follows a failed one, begins with no block in memory.
impl Recoverable for Blocks {
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        CURRENT.with_borrow_mut(|current| {
            current.retain(|replica| replica.strong_count() > 0);
            if let Some(replica) = self.0.get(local)
                && !current.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(replica)))
            {
                current.push(Arc::downgrade(replica));
            }
        });
        self.take_back(local)
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        Ok(self.0.get(local).map_or(Ok(()), |replica| replica.reset())?)
    }

    fn commit(&self, _: usize, _: bool) -> Result<(), RecoveryError> {
        Ok(())
    }
}

thread_local! {
    /// The blocks of the models that run on this replica's thread.
    static CURRENT: RefCell<Vec<Weak<Replica>>> = const { RefCell::new(Vec::new()) };
}

/// Drops the parameters of this thread's blocks that are still in memory, after a backward.
pub(crate) fn reset_current() -> Result<()> {
    let current = CURRENT.with_borrow(|current| current.iter().filter_map(Weak::upgrade).collect::<Vec<_>>());
    current.iter().try_for_each(|replica| replica.reset())
}

/// Returns a sentence about an error of candle if a parameter that is not in memory has caused it, or a result that was
/// dropped.
pub(crate) fn explain(error: &candle_core::Error) -> Option<String> {
    use candle_core::Error as E;
    let has = |dtype: DType| match error {
        E::DTypeMismatchBinaryOp { lhs, rhs, .. } => [lhs, rhs].contains(&&dtype),
        E::UnsupportedDTypeForOp(of, _) => *of == dtype,
        E::UnexpectedDType { got, .. } => *got == dtype,
        _ => false,
    };
    if let E::WithBacktrace { inner, .. } = error {
        return explain(inner);
    }
    if has(DType::F4) {
        return Some(format!(
            "an intermediate result of a recomputed block was read after the block's run ({error}); return it from the \
             closure that Sharded::recompute calls, or call Sharded::run"
        ));
    }
    let current = CURRENT.with_borrow(|current| current.iter().filter_map(Weak::upgrade).collect::<Vec<_>>());
    let names: Vec<String> = current.iter().flat_map(|replica| replica.unit_names()).collect();
    let (shown, more) = (names.iter().take(4).cloned().collect::<Vec<_>>().join(", "), names.len() > 4);
    has(DType::F8E8M0).then(|| {
        format!(
            "a parameter of a sharded block was read while it was not in memory ({error}); read the parameters of \
             {shown}{} inside Sharded::run only",
            if more { " and so on" } else { "" }
        )
    })
}

impl Replica {
    pub(crate) fn add(&self, leaf: Arc<Leaf>) {
        self.leaves.lock().push(leaf);
    }

    fn unit_names(&self) -> Vec<String> {
        let units = self.units.lock();
        units.iter().filter_map(Weak::upgrade).filter(|unit| !unit.is_empty()).map(|unit| unit.name.clone()).collect()
    }

    /// Drops everything that is in memory or on its way, and ends the present forward pass.
    fn reset(&self) -> Result<()> {
        let leaves = self.leaves.lock().clone();
        for leaf in leaves {
            leaf.forget(self);
            leaf.fired(self)?;
        }
        let mut order = self.order.lock();
        let present = std::mem::take(&mut order.present);
        if !present.is_empty() {
            order.before = present;
        }
        Ok(())
    }

    /// Records that a block runs. Returns the ones before it and after it, the latter as in the pass before.
    fn runs(&self, unit: &Arc<Unit>) -> (Option<Arc<Unit>>, Option<Arc<Unit>>) {
        let mut order = self.order.lock();
        let previous = order.present.last().cloned();
        order.present.push(unit.clone());
        let at = order.present.len();
        let is_as_before = order.before.get(at - 1).is_some_and(|before| Arc::ptr_eq(before, unit));
        (previous, order.before.get(at).filter(|_| is_as_before).cloned())
    }
}

impl Leaf {
    pub(crate) fn new(name: &str, layout: ShardLayout, part: Tensor, whole: Tensor) -> Arc<Leaf> {
        Arc::new(Leaf { name: name.to_owned(), layout, part, whole, state: Mutex::default() })
    }

    pub(crate) fn whole(&self) -> &Tensor {
        &self.whole
    }

    fn bytes(&self) -> usize {
        self.layout.len() * self.part.dtype().size_in_bytes()
    }

    /// Starts to gather the whole, unless it is in memory or on its way.
    fn start(&self, replica: &Replica, groups: &ShardGroups) -> Result<(), distribute_strategy::Error> {
        let mut state = self.state.lock();
        if state.users > 0 || state.coming.is_some() {
            return Ok(());
        }
        macro_rules! start {
            ($($type:ident),*) => {
                match self.part.dtype() {
                    $(DType::$type => {
                        let part = TensorStorage::<Candle>::to_elements(&self.part)?;
                        Coming::$type(start_gather(groups, &self.name, &self.layout, &part, Vec::new())?)
                    })*
                    // Other types are not sharded.
                    _ => return Ok(()),
                }
            };
        }
        state.coming = Some(start!(F32, F64, F16, BF16));
        let bytes = replica.bytes.fetch_add(self.bytes(), Ordering::Relaxed) + self.bytes();
        replica.peak.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Waits for the whole and puts it into the model's tensor.
    fn take(&self) -> Result<(), distribute_strategy::Error> {
        let mut state = self.state.lock();
        if let Some(coming) = state.coming.take() {
            let whole = coming.wait()?;
            replace(&self.whole, whole).map_err(|error| distribute_values::Error::Tensor {
                action: "put a gathered parameter in its place",
                source: Box::new(error),
            })?;
        }
        state.users += 1;
        Ok(())
    }

    /// Drops the whole after the last of its runs.
    fn leave(&self, replica: &Replica) -> Result<()> {
        let users = {
            let mut state = self.state.lock();
            state.users = state.users.saturating_sub(1);
            state.users
        };
        if users == 0 { self.drop_whole(replica) } else { Ok(()) }
    }

    /// Drops the whole after its gradient is complete: backward has then passed all operations that read it.
    pub(crate) fn fired(&self, replica: &Replica) -> Result<()> {
        let users = std::mem::take(&mut self.state.lock().users);
        if users > 0 { self.drop_whole(replica) } else { Ok(()) }
    }

    /// Drops the whole that is on its way.
    fn forget(&self, replica: &Replica) {
        if self.state.lock().coming.take().is_some() {
            replica.bytes.fetch_sub(self.bytes(), Ordering::Relaxed);
        }
    }

    fn drop_whole(&self, replica: &Replica) -> Result<()> {
        replica.bytes.fetch_sub(self.bytes(), Ordering::Relaxed);
        replace(&self.whole, resting())
    }
}

impl Unit {
    pub(crate) fn new(name: String, replica: &Arc<Replica>) -> Arc<Unit> {
        let unit = Arc::new(Unit { name, replica: Arc::downgrade(replica), leaves: Mutex::default() });
        replica.units.lock().push(Arc::downgrade(&unit));
        unit
    }

    /// Adds a parameter that the block reads, which other blocks may read too.
    pub(crate) fn add(&self, leaf: &Arc<Leaf>) {
        let mut leaves = self.leaves.lock();
        if !leaves.iter().any(|known| Arc::ptr_eq(known, leaf)) {
            leaves.push(leaf.clone());
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.leaves.lock().is_empty()
    }

    fn leaves(&self) -> Vec<Arc<Leaf>> {
        self.leaves.lock().clone()
    }

    /// Brings the parameters into memory.
    fn hold(&self, replica: &Replica, groups: &ShardGroups) -> Result<(), distribute_strategy::Error> {
        self.start(replica, groups)?;
        self.leaves().iter().try_for_each(|leaf| leaf.take())
    }

    /// Starts to bring the parameters of the block that is used next into memory.
    fn prefetch(&self, replica: &Replica, groups: &ShardGroups) -> Result<(), distribute_strategy::Error> {
        if groups.overlap() { self.start(replica, groups) } else { Ok(()) }
    }

    fn start(&self, replica: &Replica, groups: &ShardGroups) -> Result<(), distribute_strategy::Error> {
        self.leaves().iter().try_for_each(|leaf| leaf.start(replica, groups))
    }

    /// Brings the parameters into memory for backward, which drops each after its gradient is complete, and starts to
    /// bring those of the block before.
    fn begin_backward(&self, previous: Option<&Arc<Unit>>) -> Result<()> {
        let (replica, groups) = self.here()?;
        let outcome = self
            .hold(&replica, &groups)
            .and_then(|()| previous.map_or(Ok(()), |previous| previous.prefetch(&replica, &groups)));
        // An error of candle would lose the class of this one.
        outcome.or_else(|error| raise(error))
    }

    /// Returns the replica of this thread, and the groups of its strategy.
    fn here(&self) -> Result<(Arc<Replica>, Arc<ShardGroups>)> {
        let groups = get_replica_context().and_then(|context| context.shard_groups());
        match (self.replica.upgrade(), groups) {
            (Some(replica), Some(groups)) => Ok((replica, groups)),
            _ => candle_core::bail!(
                "block {:?} is sharded and was run outside the run of its strategy, or after its model was dropped; \
                 run the model inside Strategy::run",
                self.name
            ),
        }
    }
}

/// A run of a block whose parameters were gathered for it.
pub(super) struct Gathered {
    unit: Arc<Unit>,
    /// The block that ran before.
    previous: Option<Arc<Unit>>,
}

impl Gathered {
    pub(super) fn name(&self) -> &str {
        &self.unit.name
    }

    /// Gathers the parameters for the backward of the run.
    pub(super) fn begin_backward(&self) -> Result<()> {
        self.unit.begin_backward(self.previous.as_ref())
    }
}

/// Runs a block with its parameters in memory.
pub(super) fn run(unit: &Arc<Unit>, forward: impl FnOnce() -> Result<Tensor>) -> Result<(Tensor, Gathered)> {
    let (replica, groups) = unit.here()?;
    let (previous, next) = replica.runs(unit);
    let held = unit.hold(&replica, &groups).and_then(|()| next.map_or(Ok(()), |next| next.prefetch(&replica, &groups)));
    if let Err(error) = held {
        raise(error)
    }
    let y = forward();
    unit.leaves().iter().try_for_each(|leaf| leaf.leave(&replica))?;
    Ok((y?, Gathered { unit: unit.clone(), previous }))
}

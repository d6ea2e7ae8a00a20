//! Recomputation of a block: its intermediate results are dropped after its run, and computed again before its
//! backward.
//!
//! The graph of candle stays as it is. Only the storages of the tensors that the block's run has made are emptied. A
//! second run, on a copy of the input, makes a second graph of the same form, whose storages are put into the tensors
//! of the first; the second graph is then dropped. Backward therefore goes through one graph, in the order that it
//! always has, and adds the same gradients in the same order.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::iter;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use candle_core::{CpuStorage, DType, Device, Layout, Result, Tensor, Var};
use distribute_values::TensorStorage;

use super::blocks::{self, Unit};
use super::ops::{Output, dropped, swap};
use crate::Candle;
use crate::dropout::Stream;
use crate::relay;
use crate::tensor::is_whole;

/// A block's run, as often as it is needed.
pub(super) type Forward = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

/// The run of a block whose intermediate results are computed again in backward.
pub(super) struct Recomputed {
    /// The block's path.
    name: String,
    /// The input, detached.
    x: Tensor,
    is_tracked: bool,
    forward: Forward,
    /// The state that the block's layers change, and a second run must not.
    changes: Changes,
    /// The numbers of uses of their random streams before the first run.
    uses: Vec<u64>,
    made: Made,
    /// The numbers of the first tensor that the run has made, and of the result.
    first: usize,
    last: OnceLock<usize>,
    /// Whether the intermediate results are in memory.
    is_present: AtomicBool,
}

/// The state that a run of a block changes in addition to its result.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    /// The running statistics of its layers.
    pub(super) statistics: Vec<Tensor>,
    /// The random streams of its layers.
    pub(super) streams: Vec<Arc<Stream>>,
}

/// The tensors that a run has made and backward reads, in the order of backward: those of candle's graph, and behind
/// each relay the result that it stands for and what its operation keeps.
struct Made {
    nodes: Vec<Node>,
    storages: Vec<Storage>,
}

/// One of them. Two runs are the same if these are.
#[derive(PartialEq)]
struct Node {
    layout: Layout,
    dtype: DType,
    /// The index of its storage; `None` for a view of what existed before, such as a parameter's transpose.
    storage: Option<usize>,
}

struct Storage {
    /// A tensor with the storage.
    tensor: Tensor,
    /// Whether another block's backward may precede the last operation that reads it.
    is_late: bool,
}

thread_local! {
    /// The recomputed blocks of this thread's graphs.
    static ALIVE: RefCell<Vec<Weak<Recomputed>>> = const { RefCell::new(Vec::new()) };
}

/// Runs a block, and drops all that it has computed except its result.
pub(super) fn run(
    (name, changes): (&str, &Changes),
    unit: Option<&Arc<Unit>>,
    x: &Tensor,
    forward: Forward,
) -> Result<Tensor> {
    if !x.device().is_cpu() {
        candle_core::bail!(
            "block {name:?} is on a GPU, where candle keeps no empty tensors, so that nothing can be dropped; use \
             Sharded::run"
        );
    }
    let (first, uses) = (next_number()?, changes.uses());
    let (y, gathered) = match unit {
        Some(unit) => blocks::run(unit, || forward(x)).map(|(y, gathered)| (y, Some(gathered)))?,
        None => (forward(x)?, None),
    };
    if !y.track_op() || !y.dtype().is_float() {
        // No backward runs through it.
        return Ok(y.detach());
    }
    let made = Made::new(&y, first)?;
    let storage = made.take_result(&y)?;
    made.drop_all()?;
    let recomputed = Arc::new(Recomputed {
        name: name.to_owned(),
        x: x.detach(),
        is_tracked: x.track_op() && x.dtype().is_float(),
        forward,
        changes: changes.clone(),
        uses,
        made,
        first,
        last: OnceLock::new(),
        is_present: AtomicBool::new(false),
    });
    let result = y.apply_op1(Output::recomputed(storage, gathered, recomputed.clone()))?;
    // No other function sets it.
    let _ = recomputed.last.set(number(&result));
    ALIVE.with_borrow_mut(|alive| alive.push(Arc::downgrade(&recomputed)));
    Ok(result)
}

/// Drops the results that this thread's blocks have computed again, after a backward.
pub(crate) fn drop_recomputed() -> Result<()> {
    alive().iter().filter(|block| block.is_present()).try_for_each(|block| block.leave(true))
}

impl Recomputed {
    /// Computes the intermediate results again, before the backward of the block.
    pub(super) fn begin_backward(&self, result: &Tensor) -> Result<()> {
        // Backward has left all blocks but those that this one is a part of.
        let others = alive();
        others.iter().filter(|other| other.is_present() && !other.contains(result)).try_for_each(|o| o.leave(false))?;
        if self.is_present() {
            return Ok(());
        }
        let x = if self.is_tracked { Var::from_tensor(&self.x)?.into_inner() } else { self.x.clone() };
        let first = next_number()?;
        let y = self.changes.again(&self.uses, || (self.forward)(&x))?;
        if !same_elements(&y, result)? {
            candle_core::bail!(
                "block {:?} computed another result before its backward than in forward, from the same input; a \
                 recomputed block draws no random numbers of its own, as dropout of candle does, and reads nothing \
                 that changes: use this crate's dropout, or draw outside and move what was drawn, or a copy of the \
                 generator, into the closure",
                self.name
            );
        }
        let made = Made::new(&y, first)?;
        if self.made.nodes != made.nodes {
            candle_core::bail!(
                "block {:?} computed its result by other operations before its backward than in forward ({} and {} \
                 results); its closure must do the same whenever it is called",
                self.name,
                made.nodes.len(),
                self.made.nodes.len()
            );
        }
        for (old, new) in self.made.storages.iter().zip(&made.storages) {
            swap(&old.tensor, swap(&new.tensor, dropped())?)?;
        }
        self.is_present.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn is_present(&self) -> bool {
        self.is_present.load(Ordering::Relaxed)
    }

    /// Returns whether a tensor was made by this block's run; if it is another block's result, that one is a part of
    /// this one.
    fn contains(&self, tensor: &Tensor) -> bool {
        let last = self.last.get().copied().unwrap_or(usize::MAX);
        (self.first..last).contains(&number(tensor))
    }

    /// Drops the intermediate results that backward has passed, or all of them.
    fn leave(&self, all: bool) -> Result<()> {
        self.is_present.store(false, Ordering::Relaxed);
        let passed = self.made.storages.iter().filter(|storage| all || !storage.is_late);
        passed.map(|storage| &storage.tensor).try_for_each(|tensor| swap(tensor, dropped()).map(drop))
    }
}

impl Made {
    /// Finds the tensors in the graph of `y` from the one with the number `first` on.
    fn new(y: &Tensor, first: usize) -> Result<Made> {
        let graph = y.sorted_nodes();
        let results: HashSet<usize> = alive().iter().filter_map(|block| block.last.get().copied()).collect();
        let is_before = |tensor: &&&Tensor| number(tensor) < first;
        let before: HashSet<usize> = graph.iter().filter(is_before).map(|tensor| address(tensor)).collect();
        let mut made = Made { nodes: Vec::new(), storages: Vec::new() };
        let (mut indices, mut is_late) = (HashMap::new(), false);
        for tensor in graph {
            let number = number(tensor);
            if number < first {
                is_late |= results.contains(&number);
                continue;
            }
            for tensor in iter::once(tensor.clone()).chain(relay::behind(tensor)) {
                let address = address(&tensor);
                let storage = (!before.contains(&address)).then(|| {
                    let index = *indices.entry(address).or_insert(made.storages.len());
                    // The last one is the tensor that the storage was made for. The others are views, some of which
                    // have elements twice, and candle writes in none of these.
                    let kept = Storage { tensor: tensor.detach(), is_late };
                    match made.storages.get_mut(index) {
                        Some(storage) => *storage = kept,
                        None => made.storages.push(kept),
                    }
                    index
                });
                made.nodes.push(Node { layout: tensor.layout().clone(), dtype: tensor.dtype(), storage });
            }
        }
        Ok(made)
    }

    /// Returns the elements of the block's result: its own storage if it is all of one, else a copy.
    fn take_result(&self, y: &Tensor) -> Result<CpuStorage> {
        let is_made = self.storages.iter().any(|storage| address(&storage.tensor) == address(y));
        if is_made && is_whole(y) {
            return swap(y, dropped());
        }
        swap(&y.detach().force_contiguous()?, dropped())
    }

    fn drop_all(&self) -> Result<()> {
        self.storages.iter().try_for_each(|storage| swap(&storage.tensor, dropped()).map(drop))
    }
}

/// Returns the recomputed blocks of this thread's graphs.
fn alive() -> Vec<Arc<Recomputed>> {
    ALIVE.with_borrow_mut(|alive| {
        alive.retain(|block| block.strong_count() > 0);
        alive.iter().filter_map(Weak::upgrade).collect()
    })
}

impl Changes {
    fn uses(&self) -> Vec<u64> {
        self.streams.iter().map(|stream| stream.uses()).collect()
    }

    /// Runs `forward` again, with the random numbers that followed `uses`, and restores what it has changed.
    fn again(&self, uses: &[u64], forward: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let copy = |statistic: &Tensor| statistic.detach().copy();
        let before = self.statistics.iter().map(copy).collect::<Result<Vec<Tensor>>>()?;
        let now = self.uses();
        let set = |uses: &[u64]| self.streams.iter().zip(uses).for_each(|(stream, uses)| stream.set_uses(*uses));
        set(uses);
        let y = forward();
        set(&now);
        for (statistic, before) in self.statistics.iter().zip(before) {
            Var::from_tensor(statistic)?.set(&before)?;
        }
        y
    }
}

/// Returns whether two tensors have the same bits.
fn same_elements(one: &Tensor, other: &Tensor) -> Result<bool> {
    let mut are_same = false;
    let mut compared = Ok(());
    let read = TensorStorage::<Candle>::read(&one.detach(), &mut |one| {
        compared = TensorStorage::<Candle>::read(&other.detach(), &mut |other| {
            are_same = one.as_bytes() == other.as_bytes();
        });
    });
    read.and(compared).map_err(candle_core::Error::wrap)?;
    Ok(are_same && one.shape() == other.shape() && one.dtype() == other.dtype())
}

/// Returns the address of a tensor's storage. Two living tensors have the same one if they are views of one storage.
fn address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref(&*storage).addr()
}

/// Returns a number that is greater than those of all tensors that this thread has made before.
fn next_number() -> Result<usize> {
    Ok(number(&Tensor::zeros((), DType::U8, &Device::Cpu)?))
}

/// Returns the number of a tensor. candle counts the tensors that it makes, and the hash of an id is that of its count.
fn number(tensor: &Tensor) -> usize {
    let mut written = Written(0);
    tensor.id().hash(&mut written);
    written.0
}

struct Written(usize);

impl Hasher for Written {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | usize::from(*byte));
    }

    fn write_usize(&mut self, number: usize) {
        self.0 = number;
    }

    fn finish(&self) -> u64 {
        self.0 as u64
    }
}

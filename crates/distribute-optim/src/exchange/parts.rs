//! The exchange of sharded variables' gradients: each is reduce-scattered as soon as it is complete, so that a replica
//! keeps no more than its part of it.
//!
//! All replicas of a shard group must reduce in one order, which need not be the one in which their gradients become
//! complete. In the first step the first of them announces the order, gradient by gradient; later steps follow it.
//! Gradients that a replica does not have when their turn comes hold up those that follow, until its backward ends.

use std::collections::BTreeMap;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use distribute_collectives::{OwnedBuffers, ProcessGroup, Rank, ReduceOp, Work};
use distribute_device::Element;
use distribute_strategy::{ReplicaContext, ShardGroups};
use distribute_types::with_dtype;
use distribute_values::TensorStorage;

use super::{Payload, StepFlags};
use crate::gradient::Reduced;
use crate::library::{bytes, dtype};
use crate::shard_layout::tag;
use crate::sharding::elsewhere;
use crate::{Parameters, ShardLayout, TensorLibrary, Variable};

/// The order in which sharded variables' gradients are reduced, by index; equal on all replicas.
pub(crate) type PartsOrder = Arc<Vec<usize>>;

/// One step's gradients of sharded variables.
pub(crate) struct PartsStep<L: TensorLibrary> {
    context: ReplicaContext,
    groups: Arc<ShardGroups>,
    parameters: Arc<Parameters<L>>,
    /// By variable, a tensor of the shape of this replica's part, in the memory in which its gradient is to be.
    targets: Vec<L::Tensor>,
    order: Order,
    /// Gradients that wait for their turn, by variable.
    waiting: BTreeMap<usize, L::Tensor>,
    /// The variables whose reduction was started, in order.
    launched: Vec<(usize, Box<dyn Reduction<L>>)>,
    /// The announcements of this replica.
    told: Vec<Work<Vec<u32>>>,
    /// The number of reductions, from the first on, whose whole gradient is freed.
    settled: usize,
    /// Whether this step waits if too many whole gradients are in memory.
    waits: bool,
}

enum Order {
    /// That of an earlier step.
    Known(PartsOrder),
    /// That in which the first replica of the shard group announces the variables.
    Announced(Turn),
}

/// The next announcement, as far as a replica knows it.
enum Turn {
    /// It has not arrived.
    Pending(Work<Vec<u32>>),
    /// This variable is next.
    Of(usize),
    /// There are no more; or this replica announces them itself.
    Over,
}

impl Turn {
    fn announced(announcement: &[u32]) -> Turn {
        match announcement.first() {
            Some(index) if *index != END => Turn::Of(*index as usize),
            _ => Turn::Over,
        }
    }
}

/// Ends the announcements.
const END: u32 = u32::MAX;

/// Number of whole gradients that may be on their way while the next is computed, if communication overlaps with that;
/// more would let a fast backward keep all of them.
const ON_THE_WAY: usize = 1;

/// Bytes of whole gradients that may be on their way at once if they are more than [`ON_THE_WAY`].
const BYTES_ON_THE_WAY: usize = 16 << 20;

/// The time for which a step waits because too many gradients are in memory. A peer whose backward does not produce one
/// of them may wait for this replica meanwhile, so the memory bound yields to progress: after a wait in vain, a step
/// waits no more.
const PATIENCE: Duration = Duration::from_secs(2);

impl<L: TensorLibrary> PartsStep<L> {
    /// Begins a step; `None` if the model has no sharded variables. `targets` returns for each variable a tensor of the
    /// shape of this replica's part, in the memory in which its gradient is to be.
    pub(crate) fn begin(
        context: &ReplicaContext,
        parameters: &Arc<Parameters<L>>,
        order: Option<PartsOrder>,
        targets: impl FnOnce() -> Vec<L::Tensor>,
    ) -> Result<Option<PartsStep<L>>, L::Error> {
        let Some(first) = parameters.variables().iter().find(|variable| is_exchanged(variable)) else {
            return Ok(None);
        };
        let groups = context.shard_groups().ok_or_else(|| elsewhere(first.name()))?;
        let order = match order {
            Some(order) => Order::Known(order),
            None => Order::Announced(Turn::Over),
        };
        let mut step = PartsStep {
            context: context.clone(),
            groups,
            parameters: parameters.clone(),
            targets: targets(),
            order,
            waiting: BTreeMap::new(),
            launched: Vec::new(),
            told: Vec::new(),
            settled: 0,
            waits: true,
        };
        step.listen()?;
        Ok(Some(step))
    }

    /// Returns whether a variable's gradient was pushed.
    pub(crate) fn has(&self, index: usize) -> bool {
        self.waiting.contains_key(&index) || self.launched.iter().any(|(launched, _)| *launched == index)
    }

    /// Returns whether any gradient was pushed.
    pub(crate) fn has_any(&self) -> bool {
        !self.waiting.is_empty() || !self.launched.is_empty()
    }

    /// Adds a whole gradient, and starts to reduce it when it is its turn.
    pub(crate) fn push(&mut self, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        if self.is_announcing() {
            self.announce(index as u32)?;
            self.launch(index, Some(gradient))?;
        } else {
            self.waiting.insert(index, gradient);
            if matches!(self.order, Order::Announced(Turn::Pending(_))) {
                self.hear()?;
            }
            while let Some(next) = self.next(false)?.filter(|next| self.waiting.contains_key(next)) {
                let gradient = self.waiting.remove(&next);
                self.launch(next, gradient)?;
                self.listen()?;
            }
        }
        self.make_room()
    }

    /// Starts the reductions that remain in the order, with zeros for the gradients that this replica does not have.
    /// Call it after backward, and [`has`](PartsStep::has) before.
    pub(crate) fn drain(&mut self) -> Result<(), L::Error> {
        if self.is_announcing() {
            return self.announce(END);
        }
        while let Some(next) = self.next(true)? {
            let gradient = self.waiting.remove(&next);
            self.launch(next, gradient)?;
            self.listen()?;
        }
        Ok(())
    }

    /// Reduces the gradients that came on some replica and were not in the order, and waits for all. Returns this
    /// replica's parts of the summed gradients, and the order of later steps. `flags` are those of all replicas.
    pub(crate) fn finish(&mut self, flags: &StepFlags) -> Result<(Vec<Reduced<L>>, PartsOrder), L::Error> {
        let count = self.parameters.variables().len();
        let launched: Vec<usize> = self.launched.iter().map(|(index, _)| *index).collect();
        let late = (0..count).filter(|index| flags.came(*index) && !launched.contains(index));
        for index in late.filter(|index| is_exchanged(&self.parameters.variables()[*index])).collect::<Vec<_>>() {
            let gradient = self.waiting.remove(&index);
            self.launch(index, gradient)?;
        }
        let is_first = matches!(self.order, Order::Announced(_));
        if is_first {
            // Shard groups may have announced different orders, so mirrors cannot follow them.
            self.launched.sort_by_key(|(index, _)| *index);
        }
        for announcement in self.told.drain(..) {
            announcement.wait()?;
        }
        let mirrors = self.groups.mirrors();
        for (_, reduction) in &mut self.launched {
            reduction.settle()?;
            if let Some(mirrors) = mirrors {
                reduction.mirror(mirrors)?;
            }
        }
        let order: Vec<usize> = match &self.order {
            Order::Known(order) => order.iter().copied().chain(self.unordered(order)).collect(),
            Order::Announced(_) if mirrors.is_none() => {
                launched.iter().copied().chain(self.unordered(&launched)).collect()
            }
            Order::Announced(_) => {
                // That of the first replica of all.
                let late = self.unordered(&launched).collect::<Vec<_>>();
                let mut order: Vec<u32> = launched.iter().chain(&late).map(|index| *index as u32).collect();
                self.context.group().broadcast(&mut order, Rank(0))?;
                order.into_iter().map(|index| index as usize).collect()
            }
        };
        let mut reduced = Vec::with_capacity(self.launched.len());
        for (index, reduction) in self.launched.drain(..) {
            let variable = &self.parameters.variables()[index];
            let part_len = variable.layout().map_or(0, ShardLayout::part_len);
            let gradient = reduction.finish(&self.targets[index], part_len)?;
            if flags.came(index) {
                reduced.push(Reduced::new(index, gradient)?);
            }
        }
        reduced.sort_by_key(|reduced| reduced.index);
        Ok((reduced, Arc::new(order)))
    }

    /// Returns the launched variables that are not in `order`, by index.
    fn unordered<'a>(&'a self, order: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        self.launched.iter().map(|(index, _)| *index).filter(|index| !order.contains(index))
    }

    /// Returns the variable whose turn it is; `None` if there is none, or, unless `wait` is set, if it is not known
    /// yet.
    fn next(&mut self, wait: bool) -> Result<Option<usize>, L::Error> {
        let turn = match &mut self.order {
            Order::Known(order) => return Ok(order.get(self.launched.len()).copied()),
            Order::Announced(turn) => turn,
        };
        if let Turn::Pending(work) = turn {
            if !wait && !work.is_done() {
                return Ok(None);
            }
            let Turn::Pending(work) = std::mem::replace(turn, Turn::Over) else { return Ok(None) };
            *turn = Turn::announced(&work.wait()?);
        }
        Ok(match turn {
            Turn::Of(index) => Some(*index),
            _ => None,
        })
    }

    /// Waits a while for the announcement of the next variable if too many gradients wait for it.
    fn hear(&mut self) -> Result<(), L::Error> {
        let is_much = self.is_much(self.waiting.len(), self.waiting.values().map(bytes::<L>).sum());
        if let Order::Announced(turn) = &mut self.order
            && let Turn::Pending(work) = turn
            && is_much
            && self.waits
        {
            match poll_until(work, Some(Instant::now() + PATIENCE)) {
                Some(announced) => *turn = Turn::announced(&announced?),
                None => self.waits = false,
            }
        }
        Ok(())
    }

    /// Returns whether a number of whole gradients, of these bytes, is more than this step should keep in memory.
    fn is_much(&self, count: usize, bytes: usize) -> bool {
        match self.groups.overlap() {
            true => count > ON_THE_WAY && bytes > BYTES_ON_THE_WAY,
            false => count > 0,
        }
    }

    /// Waits for the announcement of the next variable, on replicas other than the first, while the program continues.
    fn listen(&mut self) -> Result<(), L::Error> {
        if let Order::Announced(turn) = &mut self.order
            && self.groups.reductions().rank() != Rank(0)
        {
            *turn = Turn::Pending(self.groups.reductions().start().broadcast(vec![END], Rank(0))?);
        }
        Ok(())
    }

    /// Tells the other replicas of the shard group which gradient is next.
    fn announce(&mut self, index: u32) -> Result<(), L::Error> {
        // They hear of it when they look, which may be after their backward.
        self.told.push(self.groups.reductions().start().broadcast(vec![index], Rank(0))?);
        Ok(())
    }

    fn is_announcing(&self) -> bool {
        matches!(self.order, Order::Announced(_)) && self.groups.reductions().rank() == Rank(0)
    }

    /// Starts the reduction of a gradient, or of zeros.
    fn launch(&mut self, index: usize, gradient: Option<L::Tensor>) -> Result<(), L::Error> {
        let variable = &self.parameters.variables()[index];
        let layout = variable.layout().ok_or_else(|| elsewhere(variable.name()))?;
        let reduction: Box<dyn Reduction<L>> = with_dtype!(dtype::<L>(&variable.components()[0])?, T => {
            let whole = match gradient {
                Some(gradient) => Payload::<L, T>::whole(gradient)?,
                None => Payload::Elements(vec![T::default(); layout.len()]),
            };
            Box::new(Stage::begin(self.groups.reductions(), tag(variable.name()), layout, whole)?)
        });
        self.launched.push((index, reduction));
        Ok(())
    }

    /// Frees the memory of gradients whose reduction is done, and waits a while if too many are on their way.
    fn make_room(&mut self) -> Result<(), L::Error> {
        // In the first step mirrors wait for a common order.
        let mirrors = match self.order {
            Order::Known(_) => self.groups.mirrors(),
            Order::Announced(_) => None,
        };
        while let Some((_, reduction)) = self.launched.get_mut(self.settled) {
            let is_settled = reduction.settle_until(None)?;
            let on_the_way = &self.launched[self.settled..];
            let bytes: usize = on_the_way.iter().map(|(_, reduction)| reduction.bytes()).sum();
            let may_wait = self.waits && self.is_much(on_the_way.len(), bytes);
            let Some((_, reduction)) = self.launched.get_mut(self.settled) else { break };
            if !is_settled {
                if !may_wait {
                    break;
                }
                if !reduction.settle_until(Some(Instant::now() + PATIENCE))? {
                    self.waits = false;
                    break;
                }
            }
            if let Some(mirrors) = mirrors {
                reduction.mirror(mirrors)?;
            }
            self.settled += 1;
        }
        Ok(())
    }
}

/// Returns whether a variable's gradient is reduced to parts.
pub(crate) fn is_exchanged<L: TensorLibrary>(variable: &Variable<L>) -> bool {
    variable.layout().is_some() && variable.is_trainable()
}

/// The reduction of one variable's gradient, of any type.
trait Reduction<L: TensorLibrary>: Send {
    /// Returns the size of the whole gradient while it is kept, else 0.
    fn bytes(&self) -> usize;

    /// Waits for the sum over the shard group, at most until then; frees the whole gradient when it is done, and
    /// returns whether it is.
    fn settle_until(&mut self, deadline: Option<Instant>) -> Result<bool, distribute_collectives::Error>;

    /// Waits for the sum over the shard group.
    fn settle(&mut self) -> Result<(), distribute_collectives::Error>;

    /// Starts the sum over the mirrors, unless it was started.
    fn mirror(&mut self, mirrors: &ProcessGroup) -> Result<(), distribute_collectives::Error>;

    /// Waits for the sum, and returns it as a tensor of the shape of `target`, in the same memory.
    fn finish(self: Box<Self>, target: &L::Tensor, part_len: usize) -> Result<L::Tensor, L::Error>;
}

/// The stages of a reduction.
enum Stage<L: TensorLibrary, T: Element> {
    /// The sum over the shard group is on its way; this replica's part will be in `own`.
    Scattering { work: Work<Payload<L, T>>, own: Range<usize>, bytes: usize },
    /// This replica's part of it.
    Settled(Vec<T>),
    /// The sum over mirrors is on its way.
    Mirroring(Work<Vec<T>>),
    /// An operation has failed.
    Failed,
}

impl<L: TensorLibrary, T: Element> Stage<L, T> {
    fn begin(
        group: &ProcessGroup,
        tag: u32,
        layout: &ShardLayout,
        whole: Payload<L, T>,
    ) -> Result<Stage<L, T>, distribute_collectives::Error> {
        let bytes = layout.len() * size_of::<T>();
        let work = group.parts(&layout.counts()).tag(tag).start().reduce_scatter_in_place(whole, ReduceOp::Sum)?;
        Ok(Stage::Scattering { work, own: layout.range(group.rank().index()), bytes })
    }
}

impl<L: TensorLibrary, T: Element> Reduction<L> for Stage<L, T> {
    fn bytes(&self) -> usize {
        if let Stage::Scattering { bytes, .. } = self { *bytes } else { 0 }
    }

    fn settle_until(&mut self, deadline: Option<Instant>) -> Result<bool, distribute_collectives::Error> {
        let Stage::Scattering { work, own, .. } = self else { return Ok(true) };
        let Some(outcome) = poll_until(work, deadline) else { return Ok(false) };
        *self = Stage::Settled(outcome?.elements(own.clone()));
        Ok(true)
    }

    fn settle(&mut self) -> Result<(), distribute_collectives::Error> {
        *self = match std::mem::replace(self, Stage::Failed) {
            Stage::Scattering { work, own, .. } => Stage::Settled(work.wait()?.elements(own)),
            later => later,
        };
        Ok(())
    }

    fn mirror(&mut self, mirrors: &ProcessGroup) -> Result<(), distribute_collectives::Error> {
        Reduction::<L>::settle(self)?;
        *self = match std::mem::replace(self, Stage::Failed) {
            Stage::Settled(own) => Stage::Mirroring(mirrors.start().all_reduce(own, ReduceOp::Sum)?),
            later => later,
        };
        Ok(())
    }

    fn finish(mut self: Box<Self>, target: &L::Tensor, part_len: usize) -> Result<L::Tensor, L::Error> {
        Reduction::<L>::settle(&mut *self)?;
        let mut own = match *self {
            Stage::Settled(own) => own,
            Stage::Mirroring(work) => work.wait()?,
            // `settle` has left none of these.
            Stage::Scattering { .. } | Stage::Failed => Vec::new(),
        };
        own.resize(part_len, T::default());
        Ok(target.of_elements(&target.shape(), own)?)
    }
}

/// Waits for an operation, at most until then; `None` if it is not done, at once without a deadline.
fn poll_until<B: OwnedBuffers>(
    work: &mut Work<B>,
    deadline: Option<Instant>,
) -> Option<Result<B, distribute_collectives::Error>> {
    if deadline.is_none() && !work.is_done() {
        return None;
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match Pin::new(&mut *work).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(outcome) => return Some(outcome),
            Poll::Pending => match deadline?.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => std::thread::park_timeout(left),
                _ => return None,
            },
        }
    }
}

/// Wakes the thread that polls.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[cfg(test)]
mod tests {
    use distribute_strategy::FullyShardedStrategy;
    use distribute_values::{Host, HostTensor};

    use super::*;

    #[test]
    fn a_reduction_is_waited_for_no_longer_than_allowed() {
        let strategy = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).mirror_below(1).build().unwrap();
        let layout = ShardLayout::of(&strategy, &[3]).unwrap();
        let run = strategy.run_with((), |context, ()| {
            let groups = context.shard_groups().ok_or(distribute_strategy::Error::NoData)?;
            let whole = vec![1.0f32, 2.0, 3.0];
            if context.replica_id() == 1 {
                context.barrier()?;
            }
            let whole = Payload::Elements(whole);
            let mut stage = Stage::<Host, f32>::begin(groups.reductions(), 7, &layout, whole)?;
            let reduction: &mut dyn Reduction<Host> = &mut stage;
            if context.replica_id() == 0 {
                assert_eq!(reduction.bytes(), 12);
                assert!(!reduction.settle_until(None)?);
                assert!(!reduction.settle_until(Some(Instant::now() + Duration::from_millis(20)))?);
                context.barrier()?;
            }
            assert!(reduction.settle_until(Some(Instant::now() + Duration::from_secs(60)))?);
            assert_eq!(reduction.bytes(), 0);
            let part = HostTensor::new(&[2], vec![0.0f32; 2])?;
            let own = Reduction::<Host>::finish(Box::new(stage), &part, 2).map_err(|error| match error {
                crate::HostError::Values(error) => distribute_strategy::Error::Values(error),
                _ => distribute_strategy::Error::NoData,
            })?;
            Ok::<_, distribute_strategy::Error>(own.to_elements::<f32>()?)
        });
        // The last part is padded.
        assert_eq!(run.unwrap().values(), [[2.0, 4.0], [6.0, 0.0]]);
    }
}

//! ZeRO stage 1: each replica keeps the optimizer state of one part of every bucket and updates that part for all.
//!
//! The gradients of a bucket are laid out one after another; replica r owns the r-th part of them, which may cross
//! variables. Gradients are reduce-scattered instead of all-reduced, so the bytes moved are those of an all-reduce:
//! half before the update, and half after it, when the updated parts of the parameters are gathered.

use std::ops::Range;
use std::sync::Arc;

use distribute_collectives::schedule::part;
use distribute_collectives::{Bucket, ProcessGroup, ReduceOp, Work};
use distribute_device::{DType, Element, bf16, f16};
use distribute_rules::{Real, UpdateRule};
use distribute_values::{TensorStorage, with_storage};

use super::{Exchange, StepFlags, Summed};
use crate::library::{dtype, len};
use crate::plan::Plan;
use crate::{Clip, Error, Parameters, StepCounts, TensorLibrary};

/// The slots of one replica's part of one bucket.
#[derive(Debug)]
pub(crate) enum SlotShard {
    F32(Vec<Vec<f32>>),
    F64(Vec<Vec<f64>>),
}

/// One replica's part of one bucket's gradients, summed over all replicas.
pub(crate) enum GradientShard {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

/// A bucket whose reduction was started, in the type of its variables.
enum Launched {
    F32(Work<[Vec<f32>; 2]>),
    F64(Work<[Vec<f64>; 2]>),
    F16(Work<[Vec<f16>; 2]>),
    BF16(Work<[Vec<bf16>; 2]>),
}

/// The type of a parameter, and that in which it is updated.
trait Stored: Element {
    type Wide: Real;

    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;

    /// Returns the elements themselves if they are updated in their own type.
    fn in_place(all: &mut [Self]) -> Option<&mut [Self::Wide]>;
}

macro_rules! stored {
    ($($type:ty => $wide:ty, $widen:expr, $narrow:expr, $in_place:expr;)*) => {$(
        impl Stored for $type {
            type Wide = $wide;

            #[inline]
            fn widen(self) -> $wide {
                $widen(self)
            }

            #[inline]
            fn narrow(wide: $wide) -> $type {
                $narrow(wide)
            }

            fn in_place(all: &mut [$type]) -> Option<&mut [$wide]> {
                $in_place(all)
            }
        }
    )*};
}

stored! {
    f32 => f32, std::convert::identity, std::convert::identity, Some;
    f64 => f64, std::convert::identity, std::convert::identity, Some;
    f16 => f32, f16::to_f32, f16::from_f32, |_| None;
    bf16 => f32, bf16::to_f32, bf16::from_f32, |_| None;
}

/// One step's gradients, on the way to the replicas that own their parts.
pub(crate) struct ShardedStep<L: TensorLibrary> {
    plan: Arc<Plan>,
    waiting: Vec<Vec<Option<L::Tensor>>>,
    missing: Vec<usize>,
    launched: Vec<Launched>,
}

impl<L: TensorLibrary> ShardedStep<L> {
    pub(crate) fn new(plan: &Arc<Plan>) -> ShardedStep<L> {
        let buckets = || plan.gradients().iter().map(|bucket| bucket.members.len());
        ShardedStep {
            plan: plan.clone(),
            waiting: buckets().map(|members| vec![None; members]).collect(),
            missing: buckets().collect(),
            launched: Vec::with_capacity(buckets().count()),
        }
    }

    fn launch(&mut self, group: &ProcessGroup) -> Result<(), L::Error> {
        let index = self.launched.len();
        let tensors: Vec<L::Tensor> = self.waiting[index].iter_mut().filter_map(Option::take).collect();
        self.launched.push(match self.plan.gradients()[index].dtype {
            DType::F64 => Launched::F64(scatter(group, flat::<L, _>(&tensors)?)?),
            DType::F16 => Launched::F16(scatter(group, flat::<L, _>(&tensors)?)?),
            DType::BF16 => Launched::BF16(scatter(group, flat::<L, _>(&tensors)?)?),
            _ => Launched::F32(scatter(group, flat::<L, _>(&tensors)?)?),
        });
        Ok(())
    }
}

impl<L: TensorLibrary> Exchange<L> for ShardedStep<L> {
    fn has(&self, index: usize) -> bool {
        let Some((bucket, place)) = self.plan.buckets.position(index) else { return false };
        bucket < self.launched.len()
            || self.waiting.get(bucket).is_some_and(|waiting| waiting.get(place).is_some_and(Option::is_some))
    }

    fn push(&mut self, group: &ProcessGroup, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        let Some((bucket, place)) = self.plan.buckets.position(index) else { return Ok(()) };
        if self.waiting[bucket][place].replace(gradient).is_none() {
            self.missing[bucket] -= 1;
        }
        while self.missing.get(self.launched.len()) == Some(&0) {
            self.launch(group)?;
        }
        Ok(())
    }

    fn finish(self: Box<Self>, group: &ProcessGroup, flags: StepFlags) -> Result<(Summed<L>, StepFlags), L::Error> {
        let flags = group.start().all_reduce(flags.into_words(), ReduceOp::Sum)?;
        let mut shards = Vec::new();
        for launched in self.launched {
            shards.push(match launched {
                Launched::F32(work) => {
                    let [_, own] = work.wait()?;
                    GradientShard::F32(own)
                }
                Launched::F64(work) => {
                    let [_, own] = work.wait()?;
                    GradientShard::F64(own)
                }
                Launched::F16(work) => GradientShard::F32(work.wait()?[1].iter().map(|x| x.to_f32()).collect()),
                Launched::BF16(work) => GradientShard::F32(work.wait()?[1].iter().map(|x| x.to_f32()).collect()),
            });
        }
        let flags = StepFlags::from_words(flags.wait()?);
        Ok((Summed::Sharded(shards, flags.clone()), flags))
    }
}

/// The inputs of a step besides its gradients.
pub(crate) struct Update<'a, L: TensorLibrary> {
    pub(crate) group: &'a ProcessGroup,
    pub(crate) plan: &'a Plan,
    pub(crate) parameters: &'a Parameters<L>,
    pub(crate) rule: UpdateRule,
    pub(crate) local: usize,
    /// The step counts, including this step.
    pub(crate) counts: &'a StepCounts,
    pub(crate) learning_rate: f64,
    pub(crate) flags: StepFlags,
}

impl<L: TensorLibrary> Update<'_, L> {
    /// Returns the sums of the squares of this replica's parts: of variables that every rank of a tensor group has the
    /// whole of, and of those that are split.
    pub(crate) fn squares(&self, shards: &[GradientShard]) -> [f64; 2] {
        let mut squares = [0.0; 2];
        for (bucket, shard) in self.plan.gradients().iter().zip(shards) {
            let len = self.members(bucket).last().map_or(0, |(_, range)| range.end);
            let mine = part(len, self.group.world_size(), self.group.rank().index());
            for (index, range) in self.members(bucket) {
                let (start, end) = (range.start.max(mine.start), range.end.min(mine.end));
                if start < end {
                    let is_split = self.parameters.variables()[index].tensor_split().is_some();
                    squares[usize::from(is_split)] += shard.square_sum_of(start - mine.start..end - mine.start);
                }
            }
        }
        squares
    }

    /// Limits the gradients as [`Clip`] describes, with their global norm if it needs that.
    pub(crate) fn clip(&self, clip: Clip, shards: &mut [GradientShard], norm: Option<f64>) {
        let factor = match (clip, norm) {
            (Clip::GlobalNorm(limit), Some(norm)) if norm > limit => limit / norm,
            _ => 1.0,
        };
        for shard in shards {
            match clip {
                Clip::Value(limit) => shard.change(|x| x.clamp(-limit, limit)),
                _ if factor < 1.0 => shard.change(|x| x * factor),
                _ => {}
            }
        }
    }

    /// Updates this replica's parts and starts to gather all replicas' parts.
    pub(crate) fn own_part(
        &self,
        gradients: Vec<GradientShard>,
        slots: &mut Vec<SlotShard>,
    ) -> Result<Vec<Gathering>, L::Error> {
        let mut gathering: Vec<Gathering> = Vec::new();
        for (index, gradient) in gradients.into_iter().enumerate() {
            let bucket = &self.plan.gradients()[index];
            gathering.push(match gradient {
                GradientShard::F32(gradient) => {
                    if slots.len() == index {
                        let mut initial = self.initial(gradient.len());
                        match bucket.dtype {
                            DType::F16 => initial.push(self.master::<f16>(bucket)?),
                            DType::BF16 => initial.push(self.master::<bf16>(bucket)?),
                            _ => {}
                        }
                        slots.push(SlotShard::F32(initial));
                    }
                    let SlotShard::F32(slots) = &mut slots[index] else { return Err(Error::NoGradient.into()) };
                    match bucket.dtype {
                        DType::F16 => Gathering::F16(self.update(bucket, &gradient, slots)?),
                        DType::BF16 => Gathering::BF16(self.update(bucket, &gradient, slots)?),
                        _ => Gathering::F32(self.update(bucket, &gradient, slots)?),
                    }
                }
                GradientShard::F64(gradient) => {
                    if slots.len() == index {
                        slots.push(SlotShard::F64(self.initial(gradient.len())));
                    }
                    let SlotShard::F64(slots) = &mut slots[index] else { return Err(Error::NoGradient.into()) };
                    Gathering::F64(self.update(bucket, &gradient, slots)?)
                }
            });
        }
        Ok(gathering)
    }

    /// Waits for all replicas' parts and copies them into the parameters.
    pub(crate) fn gather(&self, gathering: Vec<Gathering>) -> Result<(), L::Error> {
        for (bucket, gathering) in self.plan.gradients().iter().zip(gathering) {
            match gathering {
                Gathering::F32(work) => self.spread(bucket, &work.wait()?[1])?,
                Gathering::F64(work) => self.spread(bucket, &work.wait()?[1])?,
                Gathering::F16(work) => self.spread(bucket, &work.wait()?[1])?,
                Gathering::BF16(work) => self.spread(bucket, &work.wait()?[1])?,
            }
        }
        Ok(())
    }

    fn initial<T: Real>(&self, len: usize) -> Vec<Vec<T>> {
        self.rule.slots().iter().map(|slot| vec![T::from_f64(self.rule.initial(slot)); len]).collect()
    }

    /// Returns the copy in f32 of this replica's part of a bucket of 16 bits, which is its last slot.
    fn master<T: Stored<Wide = f32>>(&self, bucket: &Bucket) -> Result<Vec<f32>, L::Error> {
        let len = self.members(bucket).last().map_or(0, |(_, range)| range.end);
        let mine = part(len, self.group.world_size(), self.group.rank().index());
        let mut master = Vec::with_capacity(mine.len());
        for (index, range) in self.members(bucket) {
            let (start, end) = (range.start.max(mine.start), range.end.min(mine.end));
            if start < end {
                self.write::<T>(index, |parameter| {
                    let own = &parameter[start - range.start..end - range.start];
                    master.extend(own.iter().map(|x| x.widen()));
                })?;
            }
        }
        Ok(master)
    }

    /// Updates this replica's part of one bucket in its copies of the parameters, and starts to gather all parts. The
    /// last slot of 16-bit parameters is their copy in f32.
    fn update<T: Stored>(
        &self,
        bucket: &Bucket,
        gradient: &[T::Wide],
        slots: &mut [Vec<T::Wide>],
    ) -> Result<Work<[Vec<T>; 2]>, L::Error> {
        let (slots, masters) = slots.split_at_mut(self.rule.slots().len().min(slots.len()));
        let len = self.members(bucket).last().map_or(0, |(_, range)| range.end);
        let (ranks, rank) = (self.group.world_size(), self.group.rank().index());
        let mine = part(len, ranks, rank);
        let mut updated = vec![T::default(); mine.len()];
        for (index, range) in self.members(bucket) {
            let (start, end) = (range.start.max(mine.start), range.end.min(mine.end));
            if start >= end {
                continue;
            }
            let (within, own) = (start - range.start..end - range.start, start - mine.start..end - mine.start);
            // A variable without a gradient on any replica keeps its value and its slots.
            let has_gradient = self.flags.came(index);
            self.write::<T>(index, |parameter| {
                let parameter = &mut parameter[within.clone()];
                if has_gradient {
                    let mut slots: Vec<&mut [T::Wide]> = slots.iter_mut().map(|slot| &mut slot[own.clone()]).collect();
                    let (step, gradient) = (self.counts.of(index), &gradient[own.clone()]);
                    if let Some(master) = masters.first_mut() {
                        let master = &mut master[own.clone()];
                        self.rule.update(step, self.learning_rate, master, gradient, &mut slots);
                        parameter.iter_mut().zip(master).for_each(|(own, master)| *own = T::narrow(*master));
                    } else if let Some(parameter) = T::in_place(parameter) {
                        self.rule.update(step, self.learning_rate, parameter, gradient, &mut slots);
                    }
                }
                updated[own.clone()].copy_from_slice(parameter);
            })?;
        }
        let counts: Vec<usize> = (0..ranks).map(|rank| part(len, ranks, rank).len()).collect();
        Ok(self.group.parts(&counts).start().all_gather(updated, vec![T::default(); len])?)
    }

    fn spread<T: Element>(&self, bucket: &Bucket, all: &[T]) -> Result<(), L::Error> {
        for (index, range) in self.members(bucket) {
            self.write::<T>(index, |parameter| parameter.copy_from_slice(&all[range.clone()]))?;
        }
        Ok(())
    }

    fn members<'b>(&self, bucket: &'b Bucket) -> impl Iterator<Item = (usize, Range<usize>)> + use<'_, 'b, L> {
        members(self.plan, bucket)
    }

    fn write<T: Element>(&self, index: usize, mut change: impl FnMut(&mut [T])) -> Result<(), L::Error> {
        let component = &self.parameters.variables()[index].components()[self.local];
        let mut outcome = Ok(());
        component.write(&mut |mut buffer| {
            outcome = buffer.as_mut_slice::<T>().map(&mut change);
        })?;
        Ok(outcome.map_err(distribute_values::Error::from)?)
    }
}

/// Returns the variables of a bucket, each with its range in it.
fn members<'p, 'b>(plan: &'p Plan, bucket: &'b Bucket) -> impl Iterator<Item = (usize, Range<usize>)> + use<'p, 'b> {
    let tensors = plan.buckets.tensors();
    bucket.members.iter().scan(0, move |start, index| {
        let range = *start..*start + tensors[*index].len();
        *start = range.end;
        Some((*index, range))
    })
}

/// Copies every part from the replica that owns it, for a single process whose replicas could not gather the parts.
/// Each rank of a tensor group gets those of the ranks at its place.
pub(crate) fn complete<L: TensorLibrary>(plan: &Plan, parameters: &Parameters<L>) -> Result<(), L::Error> {
    let (all, ranks) = (parameters.tapes.len(), parameters.tensor_ranks);
    for bucket in plan.gradients() {
        let len = members(plan, bucket).last().map_or(0, |(_, range)| range.end);
        for (index, range) in members(plan, bucket) {
            let components = parameters.variables()[index].components();
            for owner in 0..all {
                let owned = part(len, all / ranks, owner / ranks);
                let (start, end) = (range.start.max(owned.start), range.end.min(owned.end));
                if start >= end {
                    continue;
                }
                let size = dtype::<L>(&components[owner])?.size_bytes();
                let within = (start - range.start) * size..(end - range.start) * size;
                let at_place = (owner % ranks..all).step_by(ranks);
                for other in at_place.filter(|other| *other != owner) {
                    let pair = [&components[other], &components[owner]].map(L::detach);
                    with_storage::<L, L::Tensor>(&pair, &mut |buffers| {
                        if let [other, owner] = buffers {
                            other.as_bytes_mut()[within.clone()].copy_from_slice(&owner.as_bytes()[within.clone()]);
                        }
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// The gathering of a bucket's parts.
pub(crate) enum Gathering {
    F32(Work<[Vec<f32>; 2]>),
    F64(Work<[Vec<f64>; 2]>),
    F16(Work<[Vec<f16>; 2]>),
    BF16(Work<[Vec<bf16>; 2]>),
}

impl GradientShard {
    pub(crate) fn square_sum(&self) -> f64 {
        match self {
            GradientShard::F32(all) => all.iter().map(|x| f64::from(*x) * f64::from(*x)).sum(),
            GradientShard::F64(all) => all.iter().map(|x| x * x).sum(),
        }
    }

    fn square_sum_of(&self, range: Range<usize>) -> f64 {
        match self {
            GradientShard::F32(all) => all[range].iter().map(|x| f64::from(*x) * f64::from(*x)).sum(),
            GradientShard::F64(all) => all[range].iter().map(|x| x * x).sum(),
        }
    }

    pub(crate) fn change(&mut self, f: impl Fn(f64) -> f64) {
        match self {
            GradientShard::F32(all) => all.iter_mut().for_each(|x| *x = f(f64::from(*x)) as f32),
            GradientShard::F64(all) => all.iter_mut().for_each(|x| *x = f(*x)),
        }
    }
}

impl SlotShard {
    /// Returns a copy of one slot.
    pub(crate) fn slot<T: Element>(&self, slot: usize) -> distribute_values::Result<Vec<T>> {
        let bytes: &[u8] = match self {
            SlotShard::F32(slots) => bytemuck::cast_slice(&slots[slot]),
            SlotShard::F64(slots) => bytemuck::cast_slice(&slots[slot]),
        };
        let buffer =
            distribute_device::BufferRef::from_bytes(T::DTYPE, bytes).and_then(|buffer| buffer.as_slice::<T>());
        Ok(buffer?.to_vec())
    }

    pub(crate) fn bytes(&self) -> usize {
        match self {
            SlotShard::F32(slots) => slots.iter().map(|slot| size_of_val(&slot[..])).sum(),
            SlotShard::F64(slots) => slots.iter().map(|slot| size_of_val(&slot[..])).sum(),
        }
    }
}

fn flat<L: TensorLibrary, T: Element>(tensors: &[L::Tensor]) -> Result<Vec<T>, L::Error> {
    let mut all = Vec::with_capacity(tensors.iter().map(len::<L>).sum());
    for tensor in tensors {
        all.extend(tensor.to_elements::<T>()?);
    }
    Ok(all)
}

fn scatter<T: Element>(group: &ProcessGroup, gradients: Vec<T>) -> distribute_collectives::Result<Work<[Vec<T>; 2]>> {
    let (len, ranks) = (gradients.len(), group.world_size());
    let counts: Vec<usize> = (0..ranks).map(|rank| part(len, ranks, rank).len()).collect();
    let own = vec![T::default(); counts[group.rank().index()]];
    group.parts(&counts).start().reduce_scatter(gradients, own, ReduceOp::Sum)
}

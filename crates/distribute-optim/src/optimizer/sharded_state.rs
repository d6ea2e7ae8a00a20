//! Conversion of sharded state to whole tensors for checkpoints, and back.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;

use distribute_collectives::schedule::part;
use distribute_collectives::{Bucket, ProcessGroup, on_each_local_rank};
use distribute_device::{BufferRef, DType, Element};
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;

use super::Optimizer;
use super::slots::filled_like;
use crate::exchange::SlotShard;
use crate::library::{dtype, wide};
use crate::plan::Plan;
use crate::sharding::whole_on_chief;
use crate::{Error, TensorLibrary, Variable, is_short, tensor_split};

/// The whole slots of one variable, in the order of [`UpdateRule::slots`](crate::UpdateRule::slots).
type Slots<L> = Vec<<L as TensorLibrary>::Tensor>;

impl<L: TensorLibrary> Optimizer<L> {
    /// Returns the names of one variable's slots, with that of its copy in f32 if it has 16 bits.
    pub(super) fn slot_names(&self, variable: &Variable<L>) -> Result<Vec<String>, L::Error> {
        let master = is_short(dtype::<L>(&variable.components()[0])?).then_some("master");
        let slots = self.rule.slots().iter().copied().chain(master);
        Ok(slots.map(|slot| format!("{}/{slot}", variable.name())).collect())
    }

    /// Calls `visit` with the name of every slot and with the whole of it, one after another, until it breaks. Slots of
    /// sharded variables are gathered by the chief: in other processes `visit` gets `None` for them. Every process
    /// calls this, outside `run`, and visits the same slots in the same order; if `visit` breaks, it must do so in all
    /// of them.
    ///
    /// # Cost
    /// One whole slot is in memory at a time; with `zero1`, those of the variables that are exchanged together.
    ///
    /// # Errors
    /// [`Error::Torn`] if a failed step has left no replica with complete state; the collective's error if a process is
    /// missing or fails.
    ///
    /// # Examples
    /// ```
    /// use std::ops::ControlFlow;
    /// use distribute_optim::{HostError, HostModel, Sgd};
    /// use distribute_strategy::Strategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = Strategy::default_strategy()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[3], vec![0.5; 3])?)])?;
    /// let optimizer = Sgd::new(0.1).momentum(0.9).build(&model)?;
    /// let mut names = Vec::new();
    /// let visited = optimizer.visit_whole_slots(&strategy, |name, slot| match slot {
    ///     Some(_) => { names.push(name.to_owned()); ControlFlow::Continue(()) }
    ///     None => ControlFlow::Break("the chief has it"),
    /// })?;
    /// assert!(visited.is_continue() && names == ["w/velocity"]);
    /// # Ok::<(), HostError>(())
    /// ```
    pub fn visit_whole_slots<B>(
        &self,
        strategy: &Strategy,
        mut visit: impl FnMut(&str, Option<L::Tensor>) -> ControlFlow<B>,
    ) -> Result<ControlFlow<B>, L::Error> {
        self.states.check()?;
        if self.sharded
            && let ControlFlow::Break(broken) = self.visit_gathered_slots(&strategy.groups(), &mut visit)?
        {
            return Ok(ControlFlow::Break(broken));
        }
        for (variable, slots) in self.parameters.variables().iter().zip(&*self.slots) {
            for slot in slots {
                let (name, components) = (slot.name(), slot.components());
                let split = variable.tensor_split();
                let whole = match variable.layout() {
                    None => Some(tensor_split::whole::<L, _>(components, split)?),
                    Some(layout) => whole_on_chief::<L>(strategy, name, (layout, split), components)?,
                };
                if let ControlFlow::Break(broken) = visit(name, whole) {
                    return Ok(ControlFlow::Break(broken));
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Visits the slots of which every replica has a part (`zero1`), gathered bucket by bucket.
    fn visit_gathered_slots<B>(
        &self,
        groups: &[ProcessGroup],
        visit: &mut impl FnMut(&str, Option<L::Tensor>) -> ControlFlow<B>,
    ) -> Result<ControlFlow<B>, L::Error> {
        let mut visit_all = |variable: &Variable<L>, tensors: Vec<L::Tensor>| {
            for (name, tensor) in self.slot_names(variable)?.iter().zip(tensors) {
                if let ControlFlow::Break(broken) = visit(name, Some(tensor)) {
                    return Ok::<_, L::Error>(ControlFlow::Break(broken));
                }
            }
            Ok(ControlFlow::Continue(()))
        };
        // Of a checkpoint, until a step divides them: the same in all processes.
        let restored = self.states.each.first().and_then(|replica| replica.lock().restored.clone());
        let mut seen = HashSet::new();
        if let Some(plan) = self.states.plan().filter(|_| restored.is_none()) {
            for (index, bucket) in plan.gradients().iter().enumerate() {
                let slots = match bucket.dtype {
                    DType::F64 => self.gather_bucket::<f64>(groups, &plan, index)?,
                    _ => self.gather_bucket::<f32>(groups, &plan, index)?,
                };
                for (index, tensors) in slots {
                    seen.insert(index);
                    let visited = visit_all(&self.parameters.variables()[index], tensors)?;
                    if visited.is_break() {
                        return Ok(visited);
                    }
                }
            }
        }
        let variables = self.parameters.variables().iter().enumerate();
        let flat = variables.filter(|(_, variable)| variable.is_trainable() && variable.layout().is_none());
        // Those that are restored, or have not got a gradient.
        for (_, variable) in flat.filter(|(index, _)| !seen.contains(index)) {
            let slots: Slots<L> = match &restored {
                Some(whole) => {
                    let names = self.slot_names(variable)?;
                    let slots: Option<Slots<L>> = names.iter().map(|name| whole.get(name).cloned()).collect();
                    slots.ok_or(Error::NoGradient)?
                }
                None => {
                    let component = &tensor_split::whole::<L, _>(variable.components(), variable.tensor_split())?;
                    let slot = |slot: &&str| filled_like::<L>(component, self.rule.initial(slot));
                    let master = is_short(dtype::<L>(component)?).then(|| wide::<L>(component));
                    self.rule.slots().iter().map(slot).chain(master).collect::<Result<_, _>>()?
                }
            };
            let visited = visit_all(variable, slots)?;
            if visited.is_break() {
                return Ok(visited);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Returns the slots of the variables of one bucket.
    fn gather_bucket<T: Element>(
        &self,
        groups: &[ProcessGroup],
        plan: &Plan,
        index: usize,
    ) -> Result<Vec<(usize, Slots<L>)>, L::Error> {
        let bucket = &plan.gradients()[index];
        let tensors = plan.buckets.tensors();
        let len: usize = bucket.members.iter().map(|member| tensors[*member].len()).sum();
        // By slot, and by the place of the rank whose parts they are.
        let mut whole: Vec<Vec<Vec<T>>> = Vec::new();
        for slot in 0..self.slots_of(bucket.dtype) {
            let gathered = on_each_local_rank::<_, L::Error>(groups, |local, group| {
                let shards = &self.states.each[local].lock().shards;
                let own = shards.get(index).map(|shard| shard.slot::<T>(slot)).transpose()?;
                let counts: Vec<usize> =
                    (0..group.world_size()).map(|rank| part(len, group.world_size(), rank).len()).collect();
                let own = own.ok_or(Error::NoGradient)?;
                Ok(group.parts(&counts).start().all_gather(own, vec![T::default(); len])?)
            })?;
            whole.push(gathered.into_iter().take(self.parameters.tensor_ranks).map(|[_, all]| all).collect());
        }
        let mut start = 0;
        let mut slots = Vec::new();
        for member in &bucket.members {
            let range = start..start + tensors[*member].len();
            start = range.end;
            let variable = &self.parameters.variables()[*member];
            let component = &variable.components()[0];
            let part = |all: &Vec<T>| component.beside(&component.shape(), BufferRef::from(&all[range.clone()]));
            let tensor = |places: &Vec<Vec<T>>| {
                let parts = places.iter().map(part).collect::<distribute_values::Result<Vec<_>>>()?;
                tensor_split::whole::<L, _>(&parts, variable.tensor_split())
            };
            slots.push((*member, whole.iter().map(tensor).collect::<distribute_values::Result<Vec<_>>>()?));
        }
        Ok(slots)
    }

    /// Returns a local replica's parts of whole slots, which are given for all variables by their names.
    pub(super) fn shards_of(
        &self,
        local: usize,
        plan: &Plan,
        group: &ProcessGroup,
        whole: &HashMap<String, L::Tensor>,
    ) -> Result<Vec<SlotShard>, L::Error> {
        let mut shards = Vec::new();
        for bucket in plan.gradients() {
            shards.push(match bucket.dtype {
                DType::F64 => SlotShard::F64(self.cut(local, bucket, group, whole)?),
                _ => SlotShard::F32(self.cut(local, bucket, group, whole)?),
            });
        }
        Ok(shards)
    }

    /// Returns the number of slots of variables of this type, with their copies in f32.
    fn slots_of(&self, dtype: DType) -> usize {
        self.rule.slots().len() + usize::from(is_short(dtype))
    }

    fn cut<T: Element>(
        &self,
        local: usize,
        bucket: &Bucket,
        group: &ProcessGroup,
        whole: &HashMap<String, L::Tensor>,
    ) -> Result<Vec<Vec<T>>, L::Error> {
        (0..self.slots_of(bucket.dtype))
            .map(|slot| {
                let mut all: Vec<T> = Vec::new();
                for member in &bucket.members {
                    let variable = &self.parameters.variables()[*member];
                    let tensor = whole.get(&self.slot_names(variable)?[slot]).ok_or(Error::NoGradient)?;
                    let place = local % self.parameters.tensor_ranks;
                    all.extend(match variable.tensor_split() {
                        Some(split) => {
                            let shape = variable.components()[local].shape();
                            tensor_split::part::<L, _>(split, tensor, &shape, place)?.to_elements::<T>()?
                        }
                        None => tensor.to_elements::<T>()?,
                    });
                }
                Ok(all[part(all.len(), group.world_size(), group.rank().index())].to_vec())
            })
            .collect()
    }
}

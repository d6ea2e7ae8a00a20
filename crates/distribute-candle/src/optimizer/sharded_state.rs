//! Sharded state as whole tensors, for checkpoints, and back.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use distribute_collectives::schedule::part;
use distribute_collectives::{ProcessGroup, on_local_ranks};
use distribute_device::{DType, Element};
use distribute_values::TensorStorage;

use super::{Optimizer, lock};
use crate::plan::Plan;
use crate::shards::SlotShard;
use crate::{Candle, Error, Result};

impl Optimizer {
    /// The names of the slots of one variable.
    pub(super) fn slot_names(&self, variable: &str) -> Vec<String> {
        self.rule.slots().iter().map(|slot| format!("{variable}/{slot}")).collect()
    }

    /// Every slot as one tensor, gathered from the replicas that have its parts. Every process calls this.
    pub(super) fn gathered_slots(&self, groups: &[ProcessGroup]) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        let mut gathered: HashMap<usize, Vec<Tensor>> = HashMap::new();
        if let Some(plan) = self.states.plan.get() {
            for (index, bucket) in plan.buckets.buckets().iter().enumerate() {
                let slots = match bucket.dtype {
                    DType::F32 => self.gather_bucket::<f32>(groups, plan, index)?,
                    DType::F64 => self.gather_bucket::<f64>(groups, plan, index)?,
                    _ => continue,
                };
                for (variable, tensors) in slots {
                    gathered.insert(variable, tensors);
                }
            }
        }
        for (index, variable) in self.parts.variables.iter().enumerate().filter(|(_, variable)| variable.trainable) {
            let component = &variable.components[0];
            let initial = || -> Result<Vec<Tensor>> {
                // No gradient has come for it.
                let slot = |slot: &&str| Ok(component.zeros_like()?.affine(0.0, self.rule.initial(slot))?);
                self.rule.slots().iter().map(slot).collect()
            };
            let tensors = gathered.remove(&index).map_or_else(initial, Ok)?;
            all.extend(self.slot_names(&variable.name).into_iter().zip(tensors));
        }
        Ok(all)
    }

    /// The slots of the variables of one bucket.
    fn gather_bucket<T: Element + candle_core::WithDType>(
        &self,
        groups: &[ProcessGroup],
        plan: &Plan,
        index: usize,
    ) -> Result<Vec<(usize, Vec<Tensor>)>> {
        let bucket = &plan.buckets.buckets()[index];
        let tensors = plan.buckets.tensors();
        let len: usize = bucket.members.iter().map(|member| tensors[*member].len()).sum();
        let mut whole: Vec<Vec<T>> = Vec::new();
        for slot in 0..self.rule.slots().len() {
            let gathered = on_local_ranks::<_, Error>(groups, |local, group| {
                let shards = &lock(&self.states.each[local]).shards;
                let own = shards.get(index).map(|shard| shard.slot::<T>(slot)).transpose()?;
                let counts: Vec<usize> =
                    (0..group.world_size()).map(|rank| part(len, group.world_size(), rank).len()).collect();
                let own = own.ok_or(Error::NoGradient)?;
                Ok(group.all_gather_v_async(own, vec![T::default(); len], &counts)?)
            })?;
            let [_, all] = gathered.unwrap_or_default();
            whole.push(all);
        }
        let mut start = 0;
        let mut slots = Vec::new();
        for member in &bucket.members {
            let range = start..start + tensors[*member].len();
            start = range.end;
            let shape = self.parts.variables[*member].components[0].shape();
            let tensor = |all: &Vec<T>| Tensor::from_slice(&all[range.clone()], shape, &Device::Cpu);
            slots.push((*member, whole.iter().map(tensor).collect::<candle_core::Result<Vec<_>>>()?));
        }
        Ok(slots)
    }

    /// One replica's parts of whole slots, which are those of all variables by their names.
    pub(super) fn shards_of(
        &self,
        plan: &Plan,
        group: &ProcessGroup,
        whole: &HashMap<String, Tensor>,
    ) -> Result<Vec<SlotShard>> {
        let mut shards = Vec::new();
        for bucket in plan.buckets.buckets() {
            shards.push(match bucket.dtype {
                DType::F32 => SlotShard::F32(self.cut(&bucket.members, group, whole)?),
                DType::F64 => SlotShard::F64(self.cut(&bucket.members, group, whole)?),
                _ => continue,
            });
        }
        Ok(shards)
    }

    fn cut<T: Element>(
        &self,
        members: &[usize],
        group: &ProcessGroup,
        whole: &HashMap<String, Tensor>,
    ) -> Result<Vec<Vec<T>>> {
        (0..self.rule.slots().len())
            .map(|slot| {
                let mut all: Vec<T> = Vec::new();
                for member in members {
                    let name = &self.slot_names(&self.parts.variables[*member].name)[slot];
                    let tensor = whole.get(name).ok_or(Error::NoGradient)?;
                    all.extend(TensorStorage::<Candle>::to_elements::<T>(tensor)?);
                }
                Ok(all[part(all.len(), group.world_size(), group.rank().index())].to_vec())
            })
            .collect()
    }
}

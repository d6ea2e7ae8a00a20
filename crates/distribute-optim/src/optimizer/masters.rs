//! Copies in f32 of parameters of 16 bits, after values have been written into the model.

use distribute_collectives::ProcessGroup;
use distribute_collectives::schedule::part;
use distribute_device::{BufferRef, DType, bf16, f16};
use distribute_values::{DistributedVariable, TensorStorage};

use super::Optimizer;
use super::local_slots::has_master;
use super::states::States;
use crate::exchange::SlotShard;
use crate::library::{dtype, wide};
use crate::plan::Plan;
use crate::{Parameters, TensorLibrary, is_short};

impl<L: TensorLibrary> Optimizer<L> {
    /// Gives the copies of a replica's parameters the values that have been written into the model since its last step;
    /// an update would overwrite these otherwise. Where a copy is rounded to the parameter, as in a checkpoint of both,
    /// it stays.
    pub(super) fn renew_masters(&self, local: usize) -> Result<(), L::Error> {
        renew_masters(&self.parameters, &self.slots, &self.states, local)
    }

    /// Does the same for a replica's parts of sharded slots.
    pub(super) fn renew_shards(
        &self,
        local: usize,
        plan: &Plan,
        group: &ProcessGroup,
        shards: &mut [SlotShard],
    ) -> Result<(), L::Error> {
        for (bucket, shard) in plan.gradients().iter().zip(shards) {
            let (true, SlotShard::F32(slots)) = (is_short(bucket.dtype), shard) else { continue };
            let Some(master) = slots.last_mut() else { continue };
            let mut parameters: Vec<f32> = Vec::new();
            for member in &bucket.members {
                let component = &self.parameters.variables()[*member].components()[local];
                parameters.extend(wide::<L>(component)?.to_elements::<f32>()?);
            }
            let own = part(parameters.len(), group.world_size(), group.rank().index());
            renew(bucket.dtype, master, &parameters[own]);
        }
        Ok(())
    }
}

#[cfg(feature = "hlo")]
impl<L: TensorLibrary> super::program::ProgramOptimizer<L> {
    /// Gives the f32 copies of parameters of 16 bits the values that have been written into the model since the last
    /// step. Call it before the slots are passed to a program that makes a step.
    ///
    /// # Errors
    /// The library's error if a parameter cannot be read, or a copy written.
    pub fn renew_masters(&self) -> Result<(), L::Error> {
        let renew = |local| renew_masters(&self.parameters, &self.slots, &self.states, local);
        (0..self.states.each.len()).try_for_each(renew)
    }
}

fn renew_masters<L: TensorLibrary>(
    parameters: &Parameters<L>,
    slots: &[Vec<DistributedVariable<L::Tensor>>],
    states: &States<L>,
    local: usize,
) -> Result<(), L::Error> {
    let writes = parameters.writes();
    if states.each[local].lock().writes == writes {
        return Ok(());
    }
    // The first replica writes what all share.
    if !parameters.shared || local == 0 {
        for (variable, slots) in parameters.variables().iter().zip(slots) {
            let Some(master) = slots.last().filter(|_| variable.is_trainable() && has_master(variable)) else {
                continue;
            };
            let (parameter, master) = (&variable.components()[local], &master.components()[local]);
            let mut elements: Vec<f32> = master.to_elements()?;
            if renew(dtype::<L>(parameter)?, &mut elements, &wide::<L>(parameter)?.to_elements()?) {
                master.overwrite(BufferRef::from(&elements[..]))?;
            }
        }
    }
    let mut state = states.each[local].lock();
    (state.writes, state.has_old_shards) = (writes, true);
    Ok(())
}

/// Replaces those elements of a copy that are not rounded to the parameter's. Returns whether there were any.
fn renew(dtype: DType, master: &mut [f32], parameter: &[f32]) -> bool {
    let rounded = |master: f32| match dtype {
        DType::F16 => f16::from_f32(master).to_f32(),
        _ => bf16::from_f32(master).to_f32(),
    };
    let mut any = false;
    for (master, parameter) in master.iter_mut().zip(parameter) {
        if rounded(*master).to_bits() != parameter.to_bits() {
            (*master, any) = (*parameter, true);
        }
    }
    any
}

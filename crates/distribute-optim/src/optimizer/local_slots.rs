//! The slots of local updates: state of a strategy for each trained variable.

use std::collections::HashMap;
use std::sync::Arc;

use distribute_device::DType;
use distribute_strategy::{LocalInitial, LocalSlot, LocalUpdates, LocalVariable, Strategy};
use distribute_values::{HostTensor, TensorStorage};

use super::Optimizer;
use crate::{Error, TensorLibrary, Variable, is_short};

/// One replica's slots of local updates.
#[derive(Debug, Default)]
pub(super) struct LocalSlots {
    /// By trained variable, then by slot; `None` before their first use.
    values: Option<Vec<Vec<Vec<f32>>>>,
    /// The number of times that values had been loaded into the model when the slots were created.
    loads: u64,
    /// The slots of a checkpoint, until this replica takes them.
    restored: Option<Arc<HashMap<String, Vec<f32>>>>,
}

impl LocalSlots {
    /// Returns the slots of a trained variable.
    pub(super) fn of(&mut self, index: usize) -> Option<&mut Vec<Vec<f32>>> {
        self.values.as_mut()?.get_mut(index)
    }

    /// Returns all slots, by trained variable.
    pub(super) fn all(&mut self) -> &mut [Vec<Vec<f32>>] {
        self.values.as_deref_mut().unwrap_or_default()
    }

    /// Returns their size.
    pub(super) fn bytes(&self) -> usize {
        let slots = self.values.iter().flatten().flatten();
        slots.map(|slot| size_of_val(&slot[..])).sum()
    }

    /// Copies the slots of another replica.
    pub(super) fn copy_from(&mut self, other: &LocalSlots) {
        self.values.clone_from(&other.values);
        (self.loads, self.restored) = (other.loads, other.restored.clone());
    }
}

/// Returns whether the last slot of a trained variable is its copy in f32.
pub(super) fn has_master<L: TensorLibrary>(variable: &Variable<L>) -> bool {
    variable.components()[0].dtype().is_ok_and(is_short)
}

impl<L: TensorLibrary> Optimizer<L> {
    /// Returns a replica's trained variables in the form in which they are updated: those of 16 bits as their copies in
    /// f32.
    pub(super) fn updated(&self, local: usize) -> impl Iterator<Item = (&Variable<L>, L::Tensor)> {
        let all = self.parameters.variables().iter().zip(&*self.slots);
        all.filter(|(variable, _)| variable.is_trainable()).map(move |(variable, slots)| {
            let updated = match slots.last().filter(|_| has_master(variable)) {
                Some(master) => &master.components()[local],
                None => &variable.components()[local],
            };
            (variable, L::detach(updated))
        })
    }

    /// Describes the trained variables to a strategy.
    pub(super) fn local_variables(&self, local: usize) -> distribute_values::Result<Vec<LocalVariable>> {
        let described = |(variable, tensor): (&Variable<L>, L::Tensor)| {
            let (name, len) = (variable.name().to_owned(), tensor.shape().iter().product());
            Ok(LocalVariable { name, dtype: tensor.dtype()?, len })
        };
        self.updated(local).map(described).collect()
    }

    /// Creates a replica's slots if there are none yet, from those of a checkpoint or from initial values; also if
    /// values have been loaded into the model since they were created. Where each step is that of summed gradients,
    /// slots are not part of it, so they always have the initial values.
    pub(super) fn prepare_local_slots(&self, updates: &dyn LocalUpdates, local: usize) -> Result<(), L::Error> {
        let wanted = &self.parameters.local_slots;
        let loads = self.parameters.loads();
        let restored = {
            let state = self.states.each[local].lock();
            let is_initial = updates.averages_every_step() && self.is_linear();
            let is_fresh = state.local.values.is_some() && state.local.loads == loads && !is_initial;
            if wanted.is_empty() || (is_fresh && state.local.restored.is_none()) {
                return Ok(());
            }
            state.local.restored.clone().filter(|_| !is_initial).unwrap_or_default()
        };
        updates.check_variables(&self.local_variables(local)?)?;
        let mut values = Vec::new();
        for (variable, tensor) in self.updated(local) {
            let of_variable = wanted.iter().map(|slot| initial::<L>(variable, &tensor, slot, &restored));
            values.push(of_variable.collect::<Result<_, L::Error>>()?);
        }
        let in_progress = {
            let mut state = self.states.each[local].lock();
            state.local = LocalSlots { values: Some(values), loads, restored: None };
            state.in_progress.take()
        };
        drop(in_progress);
        Ok(())
    }

    /// Returns the slots that the strategy keeps for each trained variable, by their names in checkpoints, such as
    /// `fc1.weight/outer`: those of this process's first replica. Empty if the strategy keeps none.
    ///
    /// All replicas have equal ones after [`synchronize_to_save`](Optimizer::synchronize_to_save).
    ///
    /// # Errors
    /// The library's error if a variable cannot be read, and the strategy's if it does not accept one.
    pub fn local_slots(&self, strategy: &Strategy) -> Result<Vec<(String, HostTensor<f32>)>, L::Error> {
        let Some(updates) = strategy.extended().local_updates() else { return Ok(Vec::new()) };
        self.renew_masters(0)?;
        self.prepare_local_slots(updates, 0)?;
        let mut state = self.states.each[0].lock();
        let mut all = Vec::new();
        for ((name, shape), slot) in self.local_slot_names().into_iter().zip(state.local.all().iter().flatten()) {
            all.push((name, HostTensor::new(&shape, slot.clone())?));
        }
        Ok(all)
    }

    /// Returns the names of the slots that the strategy keeps for each trained variable, with their shapes.
    pub fn local_slot_names(&self) -> Vec<(String, Vec<usize>)> {
        let trained = self.parameters.variables().iter().filter(|variable| variable.is_trainable());
        let names = trained.flat_map(|variable| {
            let of_slot = |slot: &LocalSlot| (format!("{}/{}", variable.name(), slot.name), variable.shape());
            self.parameters.local_slots.iter().map(of_slot)
        });
        names.collect()
    }

    /// Restores the slots that the strategy keeps for each trained variable, by their names. Those that are missing get
    /// their initial values.
    ///
    /// # Errors
    /// [`Error::LocalSlot`] if one has another number of elements than its variable.
    pub fn set_local_slots(&self, saved: HashMap<String, Vec<f32>>) -> Result<(), Error> {
        for (name, shape) in self.local_slot_names() {
            let expected: usize = shape.iter().product();
            match saved.get(&name) {
                Some(values) if values.len() != expected => {
                    let problem = format!("{} elements were given, and its variable has {expected}", values.len());
                    return Err(Error::LocalSlot { name, problem });
                }
                _ => {}
            }
        }
        let saved = Arc::new(saved);
        for state in &self.states.each {
            state.lock().local.restored = Some(saved.clone());
        }
        Ok(())
    }
}

/// Returns a variable's slot of a checkpoint, or its initial values.
fn initial<L: TensorLibrary>(
    variable: &Variable<L>,
    tensor: &L::Tensor,
    slot: &LocalSlot,
    restored: &HashMap<String, Vec<f32>>,
) -> Result<Vec<f32>, L::Error> {
    match (restored.get(&format!("{}/{}", variable.name(), slot.name)), slot.initial) {
        (Some(saved), _) => Ok(saved.clone()),
        (None, LocalInitial::Zeros) => Ok(vec![0.0; tensor.shape().iter().product()]),
        (None, LocalInitial::Variable) if tensor.dtype()? == DType::F32 => Ok(tensor.to_elements()?),
        (None, LocalInitial::Variable) => {
            let problem = format!("its variable is of {}, and slots of local updates are of f32", tensor.dtype()?);
            Err(Error::LocalSlot { name: format!("{}/{}", variable.name(), slot.name), problem }.into())
        }
    }
}

#[cfg(test)]
mod tests;

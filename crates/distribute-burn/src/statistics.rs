//! Running statistics of a model's layers, which write them during the forward pass.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use distribute_optim::backend::Variable;
use distribute_strategy::{Recoverable, RecoveryError};
use parking_lot::Mutex;

use crate::tensor::{flex_of, refused, tensor_on};
use crate::visit::describe;
use crate::{Burn, BurnTensor, Result};

/// The statistics of all replicas of this process, and a snapshot of them for failed runs.
pub(crate) struct Statistics<M> {
    replicas: Arc<Vec<M>>,
    /// The components by statistic, and by replica.
    components: Vec<Vec<BurnTensor>>,
    /// Each replica's ids of its statistics.
    ids: Vec<Vec<ParamId>>,
    /// Each replica's snapshots.
    saved: Vec<Mutex<Saved>>,
}

/// A replica's snapshots, by statistic.
#[derive(Default)]
struct Saved {
    /// The values that a failure restores; empty before the first run.
    before: Vec<FlexTensor>,
    /// The values before a batch without examples that began within a run; empty if there is none.
    before_batch: Vec<FlexTensor>,
}

impl<M: Module + Sync + 'static> Statistics<M> {
    /// Collects the statistics among a model's variables; `None` if it has none.
    pub(crate) fn of(replicas: &Arc<Vec<M>>, variables: &[Variable<Burn>]) -> Option<Statistics<M>> {
        let statistics = variables.iter().filter(|variable| variable.is_statistic());
        let components: Vec<Vec<BurnTensor>> = statistics.map(|variable| variable.components().to_vec()).collect();
        let ids = |model: &M| {
            let described = describe(model).unwrap_or_default();
            // Clones of a layer share their statistics, which are one variable.
            let mut seen = HashSet::new();
            let of_statistics = described.into_iter().filter(|one| one.is_statistic && seen.insert(one.id));
            of_statistics.map(|one| one.id).collect::<Vec<ParamId>>()
        };
        let (ids, saved) = (replicas.iter().map(ids).collect(), replicas.iter().map(|_| Mutex::default()).collect());
        (!components.is_empty()).then(|| Statistics { replicas: replicas.clone(), components, ids, saved })
    }

    /// Copies the layers' values to the variables.
    pub(crate) fn read_all(&self) -> Result<()> {
        for local in 0..self.replicas.len() {
            for (value, components) in self.values(local)?.into_iter().zip(&self.components) {
                components[local].replace(value);
            }
        }
        Ok(())
    }

    /// Copies the variables' values to the layers.
    pub(crate) fn write_all(&self) {
        for local in 0..self.replicas.len() {
            let values: Vec<FlexTensor> = self.components.iter().map(|components| components[local].flex()).collect();
            self.set(local, &values);
        }
    }

    /// Returns the ids of the first replica's statistics.
    #[cfg(feature = "pjrt")]
    pub(crate) fn ids_of_first(&self) -> &[ParamId] {
        &self.ids[0]
    }

    /// Returns the values of one replica's layers.
    fn values(&self, local: usize) -> distribute_values::Result<Vec<FlexTensor>> {
        values_of(&self.replicas[local], &self.ids[local])
    }

    fn set(&self, local: usize, values: &[FlexTensor]) {
        set_values(&self.replicas[local], &self.ids[local], values);
    }
}

/// Returns the values of a model's statistics.
pub(crate) fn values_of<M: Module>(model: &M, ids: &[ParamId]) -> distribute_values::Result<Vec<FlexTensor>> {
    merge_updates(model);
    let mut values = Values { ids, found: ids.iter().map(|_| None).collect() };
    model.visit(&mut values);
    let missing = || refused("read a running statistic", "its layer is missing".to_owned());
    values.found.into_iter().map(|found| found.unwrap_or_else(|| Err(missing()))).collect()
}

/// Replaces the values of a model's statistics.
pub(crate) fn set_values<M: Module>(model: &M, ids: &[ParamId], values: &[FlexTensor]) {
    // An update that has not been merged would replace the value later.
    merge_updates(model);
    // The layers share their statistics with the copy that is mapped here.
    let _ = model.clone().map(&mut Setter { ids, values });
}

/// Merges the updates of the last forward passes into the statistics' values, which burn does when it reads them next.
pub(crate) fn merge_updates<M: Module>(model: &M) {
    let _ = model.valid();
}

impl Saved {
    /// Returns the values that a batch without examples must leave as they were.
    fn batch(&self) -> &[FlexTensor] {
        if self.before_batch.is_empty() { &self.before } else { &self.before_batch }
    }
}

impl<M: Module + Sync + 'static> Recoverable for Statistics<M> {
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        *self.saved[local].lock() = Saved { before: self.values(local)?, before_batch: Vec::new() };
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        let saved = self.saved[local].lock();
        if !saved.before.is_empty() {
            self.set(local, &saved.before);
        }
        Ok(())
    }

    fn begin_batch(&self, local: usize, had_examples: bool, has_examples: bool) -> Result<(), RecoveryError> {
        let mut saved = self.saved[local].lock();
        if !had_examples {
            self.set(local, saved.batch());
        }
        saved.before_batch = if has_examples { Vec::new() } else { self.values(local)? };
        Ok(())
    }

    /// Restores the statistics of a replica without examples, and those that a batch has made NaN or infinite.
    fn commit(&self, local: usize, has_examples: bool) -> Result<(), RecoveryError> {
        let mut saved = self.saved[local].lock();
        let (mut values, mut is_changed) = match has_examples {
            true => (self.values(local)?, false),
            false => (saved.batch().to_vec(), true),
        };
        for (value, before) in values.iter_mut().zip(&saved.before) {
            if !is_finite(value)? {
                *value = before.clone();
                is_changed = true;
            }
        }
        if is_changed {
            self.set(local, &values);
        }
        *saved = Saved { before: values, before_batch: Vec::new() };
        Ok(())
    }
}

fn is_finite(value: &FlexTensor) -> distribute_values::Result<bool> {
    let wide: Vec<f64> = burn_backend::TensorData::convert::<f64>(value.clone().into_data())
        .try_into_vec()
        .map_err(|error| refused("read a running statistic", format!("{error:?}")))?;
    Ok(wide.iter().all(|element| element.is_finite()))
}

struct Values<'a> {
    ids: &'a [ParamId],
    found: Vec<Option<distribute_values::Result<FlexTensor>>>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(index) = self.ids.iter().position(|id| *id == param.id) {
            self.found[index] = Some(flex_of(param.base()));
        }
    }
}

struct Setter<'a> {
    ids: &'a [ParamId],
    values: &'a [FlexTensor],
}

impl ModuleMapper for Setter<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.ids.iter().position(|id| *id == param.id) {
            Some(index) => {
                let device = param.lazy_device();
                param.map(|_| tensor_on(self.values[index].clone(), &device))
            }
            None => param,
        }
    }
}

/// The running statistics of a model, in records.
#[cfg(feature = "pjrt")]
#[derive(Clone, Copy)]
pub(crate) struct OfModel<'a> {
    /// The number of the model.
    pub(crate) number: u64,
    pub(crate) ids: &'a [ParamId],
    /// The indices of their variables among all.
    pub(crate) variables: &'a [usize],
    pub(crate) all: &'a [Variable<Burn>],
}

/// Makes the statistics of a model tensors of the record that is being made.
#[cfg(feature = "pjrt")]
pub(crate) fn record<M: Module>(model: &M, statistics: OfModel<'_>) {
    // The layers share their statistics with the copy that is mapped here.
    let _ = model.clone().map(&mut Recorder { statistics, autodiff: false });
}

/// Returns the ids of the statistics in the record, after the model has run.
#[cfg(feature = "pjrt")]
pub(crate) fn recorded<M: Module>(model: &M, statistics: OfModel<'_>) -> Result<Vec<burn_capture::TensorId>> {
    // `train` merges updates, and needs values with automatic differentiation, as updates are; the forward pass needs
    // them without.
    let _ = model.clone().map(&mut Recorder { statistics, autodiff: true }).train();
    let ids = statistics.ids;
    let mut found = Recorded { ids, found: ids.iter().map(|_| None).collect() };
    model.visit(&mut found);
    let missing = || crate::Error::from(refused("read a running statistic", "its layer is missing".to_owned()));
    found.found.into_iter().map(|found| found.unwrap_or_else(|| Err(missing()))).collect()
}

#[cfg(feature = "pjrt")]
struct Recorder<'a> {
    statistics: OfModel<'a>,
    autodiff: bool,
}

#[cfg(feature = "pjrt")]
impl ModuleMapper for Recorder<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let OfModel { number, ids, variables, all } = self.statistics;
        let Some(place) = ids.iter().position(|id| *id == param.id) else { return param };
        let (index, component) = (variables[place], &all[variables[place]].components()[0]);
        match crate::pjrt::traced_parameter((number, index), component, false, self.autodiff) {
            Some(traced) => param.map(|_| traced),
            None => param,
        }
    }
}

#[cfg(feature = "pjrt")]
struct Recorded<'a> {
    ids: &'a [ParamId],
    found: Vec<Option<Result<burn_capture::TensorId>>>,
}

#[cfg(feature = "pjrt")]
impl ModuleVisitor for Recorded<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(place) = self.ids.iter().position(|id| *id == param.id) {
            self.found[place] = Some(crate::pjrt::float_id(param.base()));
        }
    }
}

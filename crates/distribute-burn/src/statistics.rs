//! Running statistics of a model's layers, which write them during the forward pass.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use distribute_optim::backend::Variable;
use distribute_strategy::{Recoverable, RecoveryError};
use parking_lot::Mutex;

use crate::tensor::{flex_of, refused, tensor_on};
use crate::{Burn, BurnTensor, Result};

/// The statistics of all replicas of this process, and a snapshot of them for failed runs.
pub(crate) struct Statistics<M> {
    replicas: Arc<Vec<M>>,
    /// The components by statistic, and by replica.
    components: Vec<Vec<BurnTensor>>,
    places: Places,
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
    /// Collects the statistics among a model's variables; `None` if it has none. `of_visits` has the index of the
    /// variable of each floating-point value that burn visits.
    pub(crate) fn of(
        replicas: &Arc<Vec<M>>,
        variables: &[Variable<Burn>],
        of_visits: &[usize],
    ) -> Option<Statistics<M>> {
        let statistics = || (0..variables.len()).filter(|index| variables[*index].is_statistic());
        let components: Vec<_> = statistics().map(|index| variables[index].components().to_vec()).collect();
        let places = of_visits.iter().map(|index| statistics().position(|statistic| statistic == *index)).collect();
        let saved = replicas.iter().map(|_| Mutex::default()).collect();
        (!components.is_empty()).then(|| Statistics { replicas: replicas.clone(), components, places, saved })
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

    #[cfg(feature = "pjrt")]
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// Returns the values of one replica's layers.
    fn values(&self, local: usize) -> distribute_values::Result<Vec<FlexTensor>> {
        values_of(&self.replicas[local], self.places.next())
    }

    fn set(&self, local: usize, values: &[FlexTensor]) {
        set_values(&self.replicas[local], self.places.next(), values);
    }
}

/// The number of each statistic, by the visits of floating-point values, of which the others have none. Clones of a
/// layer share their statistics, which have one number; layers that were loaded from one record have equal ids, but
/// statistics of their own.
#[derive(Debug)]
pub(crate) struct Places(Vec<Option<usize>>);

impl FromIterator<Option<usize>> for Places {
    fn from_iter<I: IntoIterator<Item = Option<usize>>>(places: I) -> Places {
        Places(places.into_iter().collect())
    }
}

impl Places {
    /// Returns a function that is called in each visit of a model.
    pub(crate) fn next(&self) -> impl Place {
        let mut places = self.0.iter();
        move |_| places.next().copied().flatten()
    }
}

/// Returns the number of a statistic that is visited.
pub(crate) trait Place: FnMut(ParamId) -> Option<usize> {}

impl<F: FnMut(ParamId) -> Option<usize>> Place for F {}

/// Finds statistics by their ids.
#[cfg(feature = "learner")]
pub(crate) fn by_id(ids: &[ParamId]) -> impl Place {
    |id| ids.iter().position(|other| *other == id)
}

/// Returns the values of a model's statistics, in the order of their numbers.
pub(crate) fn values_of<M: Module>(model: &M, place: impl Place) -> distribute_values::Result<Vec<FlexTensor>> {
    merge_updates(model);
    let mut values = Values { place, found: BTreeMap::new() };
    model.visit(&mut values);
    values.found.into_values().collect()
}

/// Replaces the values of a model's statistics.
pub(crate) fn set_values<M: Module>(model: &M, place: impl Place, values: &[FlexTensor]) {
    // An update that has not been merged would replace the value later.
    merge_updates(model);
    // The layers share their statistics with the copy that is mapped here.
    let _ = model.clone().map(&mut Setter { place, values });
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

struct Values<F> {
    place: F,
    found: BTreeMap<usize, distribute_values::Result<FlexTensor>>,
}

impl<F: Place> ModuleVisitor for Values<F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(index) = (self.place)(param.id) {
            self.found.insert(index, flex_of(param.base()));
        }
    }
}

struct Setter<'a, F> {
    place: F,
    values: &'a [FlexTensor],
}

impl<F: Place> ModuleMapper for Setter<'_, F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match (self.place)(param.id) {
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
    /// `None` if it has no statistics.
    pub(crate) places: Option<&'a Places>,
    /// The indices of their variables among all.
    pub(crate) variables: &'a [usize],
    pub(crate) all: &'a [Variable<Burn>],
}

/// Makes the statistics of a model tensors of the record that is being made.
#[cfg(feature = "pjrt")]
pub(crate) fn record<M: Module>(model: &M, statistics: OfModel<'_>) {
    // The layers share their statistics with the copy that is mapped here.
    statistics.record(model, false);
}

/// Returns the ids of the statistics in the record, after the model has run.
#[cfg(feature = "pjrt")]
pub(crate) fn recorded<M: Module>(model: &M, statistics: OfModel<'_>) -> Result<Vec<burn_capture::TensorId>> {
    // `train` merges updates, and needs values with automatic differentiation, as updates are; the forward pass needs
    // them without.
    let Some((recorded, places)) = statistics.record(model, true).zip(statistics.places) else { return Ok(Vec::new()) };
    let _ = recorded.train();
    let mut found = Recorded { place: places.next(), found: BTreeMap::new() };
    model.visit(&mut found);
    found.found.into_values().collect()
}

#[cfg(feature = "pjrt")]
impl OfModel<'_> {
    /// Returns a copy that shares its statistics with the model, after they were made tensors of the record; `None` if
    /// there are none.
    fn record<M: Module>(self, model: &M, autodiff: bool) -> Option<M> {
        let place = self.places?.next();
        Some(model.clone().map(&mut Recorder { statistics: self, place, autodiff }))
    }
}

#[cfg(feature = "pjrt")]
struct Recorder<'a, F> {
    statistics: OfModel<'a>,
    place: F,
    autodiff: bool,
}

#[cfg(feature = "pjrt")]
impl<F: Place> ModuleMapper for Recorder<'_, F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let OfModel { number, variables, all, .. } = self.statistics;
        let Some(place) = (self.place)(param.id) else { return param };
        let (index, component) = (variables[place], &all[variables[place]].components()[0]);
        match crate::pjrt::traced_parameter((number, index), component, false, self.autodiff) {
            Some(traced) => param.map(|_| traced),
            None => param,
        }
    }
}

#[cfg(feature = "pjrt")]
struct Recorded<F> {
    place: F,
    found: BTreeMap<usize, Result<burn_capture::TensorId>>,
}

#[cfg(feature = "pjrt")]
impl<F: Place> ModuleVisitor for Recorded<F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(place) = (self.place)(param.id) {
            self.found.insert(place, crate::pjrt::float_id(param.base()));
        }
    }
}

//! The floating-point values of a model, by parameter and visit.
//!
//! Clones of a parameter share its id, and are values of their own: burn's optimizer updates only the one that is
//! visited first, and a clone may be frozen. So a value belongs to an id and to the number of earlier visits of that
//! id.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor};
use burn_flex::FlexTensor;

use crate::Result;
use crate::hook::replaced;
use crate::tensor::{flex_of, tensor_on};
use crate::visit::each_float;

/// An id, and the number of earlier visits of that id.
pub(super) type Place = (ParamId, usize);

/// A value, and whether it is trained.
pub(super) type Value = (FlexTensor, bool);

/// Counts the visits of ids.
#[derive(Default)]
pub(super) struct Visits(HashMap<ParamId, usize>);

impl Visits {
    /// Returns the place of a visit.
    pub(super) fn next(&mut self, id: ParamId) -> Place {
        let count = self.0.entry(id).or_default();
        *count += 1;
        (id, *count - 1)
    }
}

/// Returns the values at the places that are chosen.
pub(super) fn values<M: Module>(model: &M, is_chosen: impl Fn(Place) -> bool) -> Result<HashMap<Place, Value>> {
    let mut values = Values { is_chosen, visits: Visits::default(), found: Ok(HashMap::new()) };
    model.visit(&mut values);
    values.found
}

/// Returns the model with these values; on `device`, or where they are.
pub(super) fn with_values<M: Module>(model: M, values: HashMap<Place, Value>, device: Option<&Device>) -> M {
    model.map(&mut Load { values, visits: Visits::default(), device })
}

/// Returns the path of a place.
pub(super) fn path_of<M: Module>(model: &M, place: Place) -> String {
    let (mut visits, mut found) = (Visits::default(), String::new());
    each_float(model, |path, id, _| {
        if visits.next(id) == place {
            path.clone_into(&mut found);
        }
    });
    found
}

struct Values<F> {
    is_chosen: F,
    visits: Visits,
    found: Result<HashMap<Place, Value>>,
}

impl<F: Fn(Place) -> bool> ModuleVisitor for Values<F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let place = self.visits.next(param.id);
        let Ok(found) = &mut self.found else { return };
        if (self.is_chosen)(place) {
            let value = param.base();
            let is_trained = value.is_require_grad();
            match flex_of(value) {
                Ok(value) => drop(found.insert(place, (value, is_trained))),
                Err(error) => self.found = Err(error.into()),
            }
        }
    }
}

struct Load<'a> {
    values: HashMap<Place, Value>,
    visits: Visits,
    device: Option<&'a Device>,
}

impl ModuleMapper for Load<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values.remove(&self.visits.next(param.id)) {
            Some((value, is_trained)) => {
                let device = self.device.cloned().unwrap_or_else(|| param.lazy_device());
                replaced(param, tensor_on(value, &device).set_require_grad(is_trained))
            }
            None => param,
        }
    }
}

//! The ids of parameters, which burn draws at random in each process.
//!
//! An optimizer and a scheduler may have groups of parameters by id, which are those of the model that the program has
//! built. So each worker keeps its own ids, and what another worker sends is translated: between workers a parameter is
//! named by its place.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Bytes, Int, Tensor};

use crate::Result;
use crate::optimizer::state::State;

/// The paths and ids of a model's parameters, in the order in which burn visits them.
#[derive(Clone, Debug, Default)]
pub(super) struct Ids(Vec<(String, u64)>);

impl Ids {
    pub(super) fn of<M: Module>(model: &M) -> Ids {
        let mut listed = Listed::default();
        model.visit(&mut listed);
        listed.ids
    }

    /// Returns the places of the parameters as ids, which are equal on all workers: of clones, the first one's.
    pub(super) fn places(&self) -> Ids {
        let mut first: HashMap<u64, u64> = HashMap::new();
        let place =
            |(place, (path, id)): (usize, &(String, u64))| (path.clone(), *first.entry(*id).or_insert(place as u64));
        Ids(self.0.iter().enumerate().map(place).collect())
    }

    /// Returns a model's record with these ids.
    pub(super) fn of_model(&self, record: &[u8]) -> Result<Vec<u8>> {
        let of_path: HashMap<&str, u64> = self.0.iter().map(|(path, id)| (path.as_str(), *id)).collect();
        let record = State::read(Bytes::from_bytes_vec(record.to_vec()))?;
        Ok(record.with_ids_of_tensors(|path| of_path.get(path).copied()).write()?.to_vec())
    }

    /// Returns an optimizer's state that has these ids with those of `to`, a list of the same parameters. Entries of
    /// other parameters remain as they are.
    pub(super) fn translated(&self, state: &[u8], to: &Ids) -> Result<Vec<u8>> {
        let mut of_id: HashMap<u64, u64> = HashMap::new();
        for ((_, from), (_, to)) in self.0.iter().zip(&to.0) {
            of_id.entry(*from).or_insert(*to);
        }
        let state = State::read(Bytes::from_bytes_vec(state.to_vec()))?;
        Ok(state.with_ids(|id| of_id.get(&id).copied().unwrap_or(id)).write()?.to_vec())
    }
}

#[derive(Default)]
struct Listed {
    path: Vec<String>,
    ids: Ids,
}

impl Listed {
    fn add(&mut self, id: ParamId) {
        self.ids.0.push((self.path.join("."), id.val()));
    }
}

impl ModuleVisitor for Listed {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(param.id);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param.id);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param.id);
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
    use burn::tensor::Device;

    use super::*;

    /// The second layer is a clone of the first, as its record says too.
    #[derive(Module, Debug)]
    struct Layers {
        first: Linear,
        clone: Linear,
        last: Linear,
    }

    fn layers() -> Layers {
        let layer = || LinearConfig::new(2, 2).with_bias(false).init(&Device::flex().autodiff());
        let first = layer();
        let _ = first.weight.val();
        Layers { clone: first.clone(), first, last: layer() }
    }

    #[test]
    fn models_and_states_of_another_process_get_own_ids() {
        let (own, other) = (layers(), layers());
        let (of_own, of_other) = (Ids::of(&own), Ids::of(&other));
        let places: Vec<u64> = of_other.places().0.into_iter().map(|(_, place)| place).collect();
        assert_eq!(places, [0, 0, 2]);
        let record = of_own.of_model(&other.clone().into_record().into_bytes().unwrap()).unwrap();
        let record = burn::store::ModuleRecord::from_bytes(Bytes::from_bytes_vec(record)).unwrap();
        let loaded = own.clone().load_record(record);
        assert_eq!(loaded.last.weight.id, own.last.weight.id);
        assert_eq!(loaded.last.weight.val().into_data(), other.last.weight.val().into_data());

        let mut optimizer: ModuleOptimizer = AdamConfig::new().init();
        let loss = other.first.forward(other.last.weight.val()).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &other);
        let _ = optimizer.step(0.1, other, gradients);
        let state = optimizer.into_bytes().unwrap();
        let common = of_other.translated(&state, &of_other.places()).unwrap();
        let translated = of_own.places().translated(&common, &of_own).unwrap();
        let names = crate::optimizer::state::names(Bytes::from_bytes_vec(translated.clone())).unwrap();
        for id in [own.first.weight.id, own.last.weight.id] {
            assert!(names.iter().any(|name| name.starts_with(&format!("{}.", id.val()))), "{names:?}");
        }
        let back = of_own.translated(&translated, &of_own.places()).unwrap();
        assert_eq!(back, common);
    }
}

//! The variables of a model that was just built.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use distribute_device::BufferRef;
use distribute_optim::backend::{ShardLayout, Variable, scatter_whole};
use distribute_strategy::Strategy;
use distribute_types::with_dtype;
use distribute_values::TensorStorage;

use crate::hook::{placeholder, replaced};
use crate::tensor::{flex_of, made};
use crate::visit::Described;
use crate::{Burn, BurnTensor, Result};

/// The index of each path's variable: several paths have the same one if weights are tied.
type OfPath = HashMap<String, usize>;

/// Moves the values of a model's parameters into variables, one after another, so that only one whole value of a
/// sharded variable exists at a time. Every process calls this, with the model of its first replica.
pub(crate) fn extract<M: Module>(
    strategy: &Strategy,
    model: M,
    described: &[Described],
) -> Result<(M, Vec<Variable<Burn>>, OfPath)> {
    let mut extract = Extract {
        strategy,
        described: described.iter(),
        variables: Vec::new(),
        of_path: HashMap::new(),
        of_id: HashMap::new(),
        outcome: Ok(()),
    };
    let model = model.map(&mut extract);
    let Extract { variables, of_path, outcome, .. } = extract;
    outcome.map(|()| (model, variables, of_path))
}

struct Extract<'a> {
    strategy: &'a Strategy,
    described: std::slice::Iter<'a, Described>,
    variables: Vec<Variable<Burn>>,
    of_path: OfPath,
    of_id: HashMap<ParamId, usize>,
    outcome: Result<()>,
}

impl ModuleMapper for Extract<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (true, Some(described)) = (self.outcome.is_ok(), self.described.next()) else { return param };
        let known = self.of_id.get(&described.id).copied();
        let index = known.unwrap_or(self.variables.len());
        self.of_path.insert(described.path.clone(), index);
        self.of_id.insert(described.id, index);
        let (device, value) = (param.lazy_device(), param.base());
        let is_trained = value.is_require_grad();
        let flex = match flex_of(value) {
            Ok(flex) => flex,
            Err(error) => {
                self.outcome = Err(error.into());
                return param;
            }
        };
        let (shape, dtype) = (param.lazy_shape(), flex.dtype());
        if known.is_none() {
            match variable(self.strategy, described, flex, is_trained) {
                Ok(variable) => self.variables.push(variable),
                Err(error) => self.outcome = Err(error),
            }
        }
        if described.is_statistic {
            return param;
        }
        replaced(param, placeholder::<D>(shape.as_slice(), dtype, &device).set_require_grad(is_trained))
    }
}

/// Creates a variable with the value of the first replica: of a sharded one, with the chief's.
fn variable(strategy: &Strategy, described: &Described, value: FlexTensor, is_trained: bool) -> Result<Variable<Burn>> {
    let shape = value.layout().shape().as_slice().to_vec();
    let layout = if described.is_statistic { None } else { ShardLayout::of(strategy, &shape) };
    let mut variable = match layout {
        Some(layout) => {
            let mut variable = Variable::sharded(described.path.clone(), layout.clone());
            let value = BurnTensor::new(value);
            with_dtype!(value.dtype()?, T => {
                let whole: Vec<T> = if strategy.is_chief() { value.to_elements()? } else { Vec::new() };
                drop(value);
                for part in scatter_whole(strategy, &described.path, &layout, whole)? {
                    variable.push(BurnTensor::new(made(&[part.len()], BufferRef::from(&part[..]))?));
                }
            });
            variable
        }
        None => {
            let mut variable = Variable::new(described.path.clone(), described.is_statistic);
            let value = BurnTensor::new(value);
            let is_shared = strategy.shares_variables() && !described.is_statistic;
            for local in 0..strategy.num_local_replicas() {
                variable.push(if local == 0 || is_shared { value.clone() } else { value.copied()? });
            }
            variable
        }
    };
    if !is_trained {
        variable.freeze();
    }
    Ok(variable)
}

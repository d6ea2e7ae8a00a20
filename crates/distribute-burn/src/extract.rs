//! The variables of a model that was just built.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use distribute_device::BufferRef;
use distribute_optim::backend::{ShardLayout, TensorSplit, Variable, scatter_whole, scatter_wholes};
use distribute_strategy::Strategy;
use distribute_types::with_dtype;
use distribute_values::TensorStorage;

use crate::backend::{has_same_bits, is_one};
use crate::hook::{placeholder, replaced};
use crate::tensor::{flex_of, made};
use crate::tensor_parallel::Request;
use crate::visit::Described;
use crate::{Burn, BurnTensor, Result};

/// The index of each path's variable: several paths have the same one if weights are tied, as clones of a parameter are
/// that are trained alike and have equal values. A frozen clone, such as the teacher of a student, and a parameter that
/// was loaded from a record with ids of others, have variables of their own.
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
        visits: visits(described),
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
    of_id: HashMap<ParamId, Vec<First>>,
    /// The number of paths of each id that were not visited yet.
    visits: HashMap<ParamId, usize>,
    outcome: Result<()>,
}

/// The first path of a variable.
struct First {
    index: usize,
    /// The split that it asks for.
    split: Option<Request>,
    is_trained: bool,
    /// The value, which further paths of the same id are compared with.
    value: FlexTensor,
}

impl First {
    /// Returns whether another path of the same id is tied to this one. Clones of a layer share a running statistic,
    /// and so its memory; those of layers that were loaded from equal records do not.
    fn is_tied(&self, described: &Described, is_trained: bool, value: &FlexTensor) -> bool {
        match described.is_statistic {
            true => is_one(&self.value, value),
            false => self.is_trained == is_trained && has_same_bits(&self.value, value),
        }
    }
}

/// Returns the number of paths of each id.
fn visits(described: &[Described]) -> HashMap<ParamId, usize> {
    let mut visits = HashMap::new();
    for one in described {
        *visits.entry(one.id).or_default() += 1;
    }
    visits
}

impl Extract<'_> {
    /// Returns the index of the variable of a path, and whether it is a new one.
    fn index(
        &mut self,
        described: &Described,
        (split, is_trained): (Option<Request>, bool),
        value: &FlexTensor,
    ) -> Result<(usize, bool)> {
        let firsts = self.of_id.entry(described.id).or_default();
        let known = firsts.iter().find(|first| first.is_tied(described, is_trained, value));
        let found = match known {
            Some(first) if first.split != split => {
                let name = described.path.clone();
                return Err(distribute_optim::Error::SplitDiffers { name }.into());
            }
            Some(first) => (first.index, false),
            None => {
                let index = self.variables.len();
                firsts.push(First { index, split, is_trained, value: value.clone() });
                (index, true)
            }
        };
        let left = self.visits.entry(described.id).or_default();
        *left = left.saturating_sub(1);
        if *left == 0 {
            // The values are needed no longer.
            self.of_id.remove(&described.id);
        }
        Ok(found)
    }
}

impl ModuleMapper for Extract<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (true, Some(described)) = (self.outcome.is_ok(), self.described.next()) else { return param };
        let split = described.split.filter(|_| self.strategy.tensor_parallel() > 1);
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
        let (index, is_new) = match self.index(described, (split, is_trained), &flex) {
            Ok(found) => found,
            Err(error) => {
                self.outcome = Err(error);
                return param;
            }
        };
        self.of_path.insert(described.path.clone(), index);
        if is_new {
            match variable(self.strategy, described, split, flex, is_trained) {
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
fn variable(
    strategy: &Strategy,
    described: &Described,
    split: Option<Request>,
    value: FlexTensor,
    is_trained: bool,
) -> Result<Variable<Burn>> {
    let shape = value.layout().shape().as_slice().to_vec();
    let ranks = strategy.tensor_parallel();
    let split = split.map(|split| TensorSplit::new(&described.path, &shape, split.axis, split.blocks, ranks));
    let split = split.transpose()?;
    let of_rank = split.map_or_else(|| shape.clone(), |split| split.part_shape(&shape));
    let layout = if described.is_statistic { None } else { ShardLayout::of(strategy, &of_rank) };
    let value = BurnTensor::new(value);
    let mut variable = match (layout, split) {
        (Some(layout), split) => sharded(strategy, described, (layout, split), value)?,
        (None, Some(split)) => divided(strategy, described, split, value)?,
        (None, None) => {
            let mut variable = Variable::new(described.path.clone(), described.is_statistic);
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

/// Creates a variable of which each replica has a part; if it is split among tensor ranks, each rank has a part of its
/// slice.
fn sharded(
    strategy: &Strategy,
    described: &Described,
    (layout, split): (ShardLayout, Option<TensorSplit>),
    value: BurnTensor,
) -> Result<Variable<Burn>> {
    let (name, shape) = (described.path.as_str(), value.shape());
    let mut variable = match split {
        Some(split) => Variable::split_among(name, split),
        None => Variable::new(name, false),
    };
    with_dtype!(value.dtype()?, T => {
        let whole = if strategy.is_chief() { value.into_elements::<T>()? } else { Vec::new() };
        let parts = match split {
            Some(split) => {
                let slice = |place| if whole.is_empty() { Vec::new() } else { split.cut(&whole, &shape, place) };
                let slices = (0..split.parts()).map(slice).collect();
                drop(whole);
                scatter_wholes(strategy, name, &layout, slices)?
            }
            None => scatter_whole(strategy, name, &layout, whole)?,
        };
        variable = variable.with_sharded_parts(layout);
        for part in parts {
            variable.push(BurnTensor::new(made(&[part.len()], BufferRef::from(&part[..]))?));
        }
    });
    Ok(variable)
}

/// Creates a variable of which each rank of a tensor group has a part.
fn divided(
    strategy: &Strategy,
    described: &Described,
    split: TensorSplit,
    value: BurnTensor,
) -> Result<Variable<Burn>> {
    let shape = value.shape();
    let mut variable = Variable::split_among(described.path.clone(), split);
    with_dtype!(value.dtype()?, T => {
        let whole = value.into_elements::<T>()?;
        for local in 0..strategy.num_local_replicas() {
            let part = split.cut(&whole, &shape, local % split.parts());
            variable.push(BurnTensor::new(made(&split.part_shape(&shape), BufferRef::from(&part[..]))?));
        }
    });
    Ok(variable)
}

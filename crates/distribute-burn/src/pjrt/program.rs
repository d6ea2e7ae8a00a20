//! The program of a step, from a record of the model.

use std::borrow::Cow;
use std::collections::BTreeMap;

use burn_backend::ops::IntTensorOps;
use burn_backend::{DType as BurnType, Slice, TensorData};
use burn_flex::{Flex, FlexTensor};
use burn_ir::{
    BaseOperationIr, CastOpIr, EmbeddingOpIr, GatherOpIr, ModuleOperationIr, OperationIr, ScatterOpIr,
    SelectAssignOpIr, SelectOpIr, ShapeOpIr, SliceOpIr, TensorId,
};
use distribute_burn_hlo::{Lowering, element_type};
use distribute_hlo::{Builder, ElementType, Literal, Program, TensorType, Value};
use distribute_optim::backend::{ProgramStep, ProgramVariable};

use super::Leaf;
use super::trace::Trace;
use crate::{Error, Result};

/// A variable of a program: a parameter or a running statistic.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) shape: Vec<usize>,
    pub(super) dtype: BurnType,
    /// The types of its slots, if an optimizer updates it.
    pub(super) slots: Vec<BurnType>,
}

/// A program, with what its parameters and outputs are.
///
/// Parameters: the variables of [`variables`](Planned::variables), the slots of those that are trained, the
/// statistics that change, the random state, the numbers of the step, and the tensors of the batch. Outputs: the
/// new values of trained variables, of their slots, of the statistics and of the random state; the norm; then those of
/// the record.
pub(super) struct Planned {
    pub(super) program: Program,
    /// The variables that the program reads, by index, in order.
    pub(super) variables: Vec<usize>,
    /// The variables that it trains.
    pub(super) trained: Vec<usize>,
    /// The statistics that it replaces.
    pub(super) replaced: Vec<usize>,
    pub(super) has_norm: bool,
    pub(super) checks: Vec<Check>,
}

impl Planned {
    /// Returns whether both programs are equal and of the same variables.
    pub(super) fn is_same(&self, other: &Planned) -> bool {
        let of = |planned: &Planned| (planned.variables.clone(), planned.trained.clone(), planned.checks.clone());
        self.program.text() == other.program.text() && of(self) == of(other) && self.replaced == other.replaced
    }
}

/// Builds the program of a record. `step` is the optimizer's part; `statistics` are the new values of running
/// statistics.
pub(super) fn plan(
    name: &str,
    trace: &Trace,
    known: &dyn Fn(usize) -> Result<Known>,
    statistics: &BTreeMap<usize, TensorId>,
    step: Option<&ProgramStep>,
    replicas: usize,
) -> Result<Planned> {
    let mut b = Builder::new(name).replicas(replicas);
    let trained: Vec<usize> = match step {
        Some(_) => trace.gradients.keys().copied().collect(),
        None => Vec::new(),
    };
    let replaced: Vec<usize> = statistics.keys().copied().collect();
    let variables: Vec<usize> = trace.parameters.keys().copied().collect();
    let mut values: BTreeMap<usize, Value> = BTreeMap::new();
    let mut slots: Vec<Vec<Value>> = Vec::new();
    for index in &variables {
        let Known { shape, dtype, .. } = known(*index)?;
        let ty = typed(&shape, dtype)?;
        let is_donated = trained.contains(index) || replaced.contains(index);
        values.insert(*index, if is_donated { b.donated_parameter(ty) } else { b.parameter(ty) });
    }
    for index in &trained {
        let Known { shape, slots: types, .. } = known(*index)?;
        let own = types.iter().map(|dtype| Ok(b.donated_parameter(typed(&shape, *dtype)?))).collect::<Result<_>>()?;
        slots.push(own);
    }
    let state = b.donated_parameter(TensorType::new(ElementType::U64, [2]));
    let per_variable = step.map_or(0, ProgramStep::numbers_per_variable);
    let numbers = b.parameter(TensorType::new(ElementType::F32, [trained.len() * per_variable]));
    let inputs: Vec<Value> = trace
        .inputs
        .iter()
        .map(|(_, Leaf { shape, dtype, .. })| Ok(b.parameter(typed(shape, *dtype)?)))
        .collect::<Result<_>>()?;
    let mut constants = Vec::with_capacity(trace.constants.len());
    for (id, data) in &trace.constants {
        let ty = typed(data.shape().as_slice(), data.dtype())?;
        constants.push((
            *id,
            b.constant(Literal::from_bytes(ty, one_byte_each(data.dtype(), data.as_bytes()).into_owned())?)?,
        ));
    }
    let mut lowering = Lowering::new(&mut b);
    lowering.set_random_state(state);
    for (index, id) in &trace.parameters {
        lowering.bind(*id, values[index]);
    }
    for ((id, _), value) in trace.inputs.iter().zip(&inputs) {
        lowering.bind(*id, *value);
    }
    for (id, value) in constants {
        lowering.bind(id, value);
    }
    let needed: Vec<TensorId> = trace
        .outputs
        .iter()
        .chain(trained.iter().map(|index| &trace.gradients[index]))
        .chain(statistics.values())
        .copied()
        .collect();
    lowering.lower(&trace.operations, &needed)?;
    let of_record = trace.outputs.iter().map(|id| lowering.value(*id)).collect::<Result<Vec<_>, _>>()?;
    let gradients =
        trained.iter().map(|index| lowering.value(trace.gradients[index])).collect::<Result<Vec<_>, _>>()?;
    let new_statistics = statistics.values().map(|id| lowering.value(*id)).collect::<Result<Vec<_>, _>>()?;
    let after = lowering.random_state().unwrap_or(state);
    let mut outputs = Vec::new();
    let mut norm = None;
    if let Some(step) = step {
        let in_program: Vec<ProgramVariable> = trained
            .iter()
            .zip(gradients)
            .zip(&slots)
            .map(|((index, gradient), slots)| ProgramVariable {
                parameter: values[index],
                gradient,
                slots: slots.clone(),
            })
            .collect();
        let update = step.add(&mut b, numbers, &in_program)?;
        for (variable, (value, _)) in in_program.iter().zip(&update.updated) {
            b.alias(variable.parameter, outputs.len())?;
            outputs.push(*value);
        }
        for (variable, (_, new)) in in_program.iter().zip(&update.updated) {
            for (slot, new) in variable.slots.iter().zip(new) {
                b.alias(*slot, outputs.len())?;
                outputs.push(*new);
            }
        }
        norm = update.gradient_norm;
    }
    for (index, value) in replaced.iter().zip(new_statistics) {
        b.alias(values[index], outputs.len())?;
        outputs.push(value);
    }
    b.alias(state, outputs.len())?;
    outputs.push(after);
    outputs.extend(norm);
    outputs.extend(of_record);
    let has_norm = norm.is_some();
    let mut checks = trace.checks.iter().map(|check| Check::new(*check, trace)).collect::<Result<Vec<_>>>()?;
    for check in trace.operations.iter().filter_map(|operation| Check::of_indices(operation, trace)) {
        // Such as the gather of a loss whose targets are compared already.
        if !checks.iter().any(|known| known.is_as(&check)) {
            checks.push(check);
        }
    }
    Ok(Planned { program: b.finish(&outputs)?, variables, trained, replaced, has_norm, checks })
}

/// Indices that must be below a number: a program reads something else where one is not.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Check {
    /// The place of the input that has them.
    pub(super) input: usize,
    /// The operations between the input and the loss, or the operation that uses them, up to the last slice: reshaping
    /// leaves elements in their order.
    views: Vec<View>,
    below: usize,
    names: Names,
}

/// The things that indices name.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Names {
    /// Classes, as the targets of a loss.
    Classes,
    /// Rows of an embedding.
    Words,
    /// Places in this dimension of a tensor.
    Places(usize),
}

/// An operation that changes the shape of an input, or takes a part of it.
#[derive(Clone, Debug, PartialEq)]
enum View {
    Reshape(Vec<usize>),
    Slice(Vec<Slice>),
}

impl Check {
    fn new((targets, classes): (TensorId, usize), trace: &Trace) -> Result<Check> {
        let problem = "the loss got targets that the model computed; give the batch's own targets to it, or parts of \
            them";
        let found = source(targets, trace).ok_or_else(|| Error::Trace { problem: problem.to_owned() })?;
        Ok(Check { input: found.0, views: found.1, below: classes, names: Names::Classes })
    }

    /// Returns the check of the indices of an operation; `None` if the model computes them, and for operations without
    /// indices.
    fn of_indices(operation: &OperationIr, trace: &Trace) -> Option<Check> {
        use BaseOperationIr::{Gather, Scatter, Select, SelectAssign};
        let (tensor, dim, indices, names) = match operation {
            OperationIr::Module(ModuleOperationIr::Embedding(EmbeddingOpIr { weights, indices, .. })) => {
                (weights, 0, indices, Names::Words)
            }
            OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base) => match base {
                Select(SelectOpIr { tensor, dim, indices, .. })
                | SelectAssign(SelectAssignOpIr { tensor, dim, indices, .. })
                | Gather(GatherOpIr { tensor, dim, indices, .. })
                | Scatter(ScatterOpIr { tensor, dim, indices, .. }) => (tensor, *dim, indices, Names::Places(*dim)),
                _ => return None,
            },
            _ => return None,
        };
        let (input, views) = source(indices.id, trace)?;
        Some(Check { input, views, below: tensor.shape.as_slice().get(dim).copied()?, names })
    }

    /// Returns whether both compare the same indices with the same number.
    fn is_as(&self, other: &Check) -> bool {
        (self.input, &self.views, self.below) == (other.input, &other.views, other.below)
    }

    /// Compares the indices of an input.
    ///
    /// # Errors
    /// [`Error::Class`], [`Error::Word`] and [`Error::Place`] for the first one that is outside.
    pub(super) fn check(&self, leaf: &Leaf) -> Result<()> {
        let (indices, below) = (self.indices(leaf)?, self.below);
        let outside = |index: &i64| usize::try_from(*index).map_or(true, |index| index >= below);
        let Some(at) = indices.iter().position(outside) else { return Ok(()) };
        let index = indices[at];
        Err(match self.names {
            Names::Classes => Error::Class { at, class: index, classes: below },
            Names::Words => Error::Word { at, index, vocabulary: below },
            Names::Places(dim) => Error::Place { at, index, dim, len: below },
        })
    }

    /// Returns the indices of an input.
    fn indices(&self, leaf: &Leaf) -> Result<Vec<i64>> {
        let bytes = leaf.memory.as_bytes().to_vec();
        let mut data = TensorData::from_bytes_vec(bytes, leaf.shape.clone(), leaf.dtype);
        if !self.views.is_empty() {
            let view = |tensor: FlexTensor, view: &View| match view {
                View::Reshape(shape) => tensor.reshape(shape.clone().into()),
                View::Slice(ranges) => Flex::int_slice(tensor, ranges),
            };
            data = self.views.iter().fold(FlexTensor::from_data(data), view).to_contiguous().into_data();
        }
        crate::data::numbers(data)
    }
}

/// Finds the place of the input that a tensor is a view of, and the operations between them, up to the last slice.
fn source(tensor: TensorId, trace: &Trace) -> Option<(usize, Vec<View>)> {
    let (mut id, mut views) = (tensor, Vec::new());
    for operation in trace.operations.iter().rev() {
        let source = match operation {
            OperationIr::BaseInt(BaseOperationIr::Reshape(ShapeOpIr { input, out })) if out.id == id => {
                views.push(View::Reshape(out.shape.to_vec()));
                input
            }
            OperationIr::BaseInt(BaseOperationIr::Slice(SliceOpIr { tensor, ranges, out })) if out.id == id => {
                views.push(View::Slice(ranges.clone()));
                tensor
            }
            OperationIr::BaseInt(BaseOperationIr::Cast(CastOpIr { input, out })) if out.id == id => input,
            _ => continue,
        };
        id = source.id;
    }
    let after_slices = views.iter().position(|view| matches!(view, View::Slice(_))).unwrap_or(views.len());
    views.drain(..after_slices);
    views.reverse();
    let place = trace.inputs.iter().position(|(input, _)| *input == id)?;
    Some((place, views))
}

/// Returns the type of a tensor in programs.
pub(super) fn typed(shape: &[usize], dtype: BurnType) -> Result<TensorType> {
    let element = element_type(dtype).ok_or_else(|| Error::Trace {
        problem: format!("a tensor is of type {dtype:?}, which programs do not have"),
    })?;
    Ok(TensorType::new(element, shape))
}

/// Returns the bytes of elements, of which truth values have one each.
pub(super) fn one_byte_each(dtype: BurnType, bytes: &[u8]) -> Cow<'_, [u8]> {
    match dtype {
        BurnType::Bool(_) => {
            bytes.chunks_exact(dtype.size()).map(|one| u8::from(one.iter().any(|b| *b != 0))).collect()
        }
        _ => Cow::Borrowed(bytes),
    }
}

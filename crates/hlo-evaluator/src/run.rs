//! Evaluation of regions.

use distribute_hlo::{OpKind, Operation, Program, Region, TensorType, ValueId};

use crate::number::Num;
use crate::{Error, Result, Tensor, collectives, contraction, elementwise, indexing, movement, random, reduction};

/// Runs a program for all its replicas, which go through its operations together. `inputs` has the parameters of each
/// replica; the result has the outputs of each.
///
/// # Errors
/// [`Error::Inputs`] if inputs are not those of the program; [`Error::Diverged`] if only some replicas of a group reach
/// a collective; [`Error::Endless`] if a loop runs a million times.
pub fn evaluate(program: &Program, inputs: &[Vec<Tensor>]) -> Result<Vec<Vec<Tensor>>> {
    if inputs.len() != program.replicas() {
        return Err(Error::Inputs {
            problem: format!("inputs of {} replicas were given for a program of {}", inputs.len(), program.replicas()),
        });
    }
    let mut run = Run { program, values: vec![vec![None; program.types().len()]; inputs.len()] };
    for (replica, inputs) in inputs.iter().enumerate() {
        let types: Vec<&TensorType> = inputs.iter().map(Tensor::ty).collect();
        if types != program.parameters().iter().map(|parameter| &parameter.ty).collect::<Vec<_>>() {
            return Err(Error::Inputs {
                problem: format!("the inputs of replica {replica} are {types:?}; expected {:?}", program.parameters()),
            });
        }
        for (&id, input) in program.body().parameters.iter().zip(inputs) {
            run.set(replica, id, input.clone());
        }
    }
    let all: Vec<usize> = (0..inputs.len()).collect();
    run.region(program.body(), &all)?;
    all.iter().map(|&replica| run.all(replica, &program.body().results)).collect()
}

/// The most rounds of a loop.
const MOST_ROUNDS: usize = 1_000_000;

/// An evaluation: the values of each replica, by their numbers.
struct Run<'a> {
    program: &'a Program,
    values: Vec<Vec<Option<Tensor>>>,
}

impl Run<'_> {
    /// Runs a region for the replicas that have reached it.
    fn region(&mut self, region: &Region, active: &[usize]) -> Result<()> {
        for operation in &region.operations {
            match operation.kind {
                OpKind::While => self.repeat(operation, active)?,
                OpKind::If => self.branch(operation, active)?,
                ref kind if kind.is_collective() => {
                    let inputs: Vec<Tensor> = active
                        .iter()
                        .map(|&replica| self.one(replica, operation.operands[0]).cloned())
                        .collect::<Result<_>>()?;
                    let results = collectives::exchange(kind, active, &inputs, self.program.replicas())?;
                    for (&replica, result) in active.iter().zip(results) {
                        self.set(replica, operation.results[0], result);
                    }
                }
                _ => {
                    for &replica in active {
                        for (&id, result) in operation.results.iter().zip(self.compute(operation, replica)?) {
                            self.set(replica, id, result);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Runs a loop. Replicas for which the condition is false wait for the others.
    fn repeat(&mut self, operation: &Operation, active: &[usize]) -> Result<()> {
        let [condition, body] = &operation.regions[..] else { return Ok(()) };
        let mut running = active.to_vec();
        for &replica in active {
            self.pass(replica, &operation.operands, &condition.parameters)?;
        }
        for _ in 0..MOST_ROUNDS {
            self.region(condition, &running)?;
            let mut further = Vec::new();
            for &replica in &running {
                if self.one(replica, condition.results[0])?.number(0).truth() {
                    further.push(replica);
                } else {
                    self.pass(replica, &condition.parameters, &operation.results)?;
                }
            }
            running = further;
            if running.is_empty() {
                return Ok(());
            }
            for &replica in &running {
                self.pass(replica, &condition.parameters, &body.parameters)?;
            }
            self.region(body, &running)?;
            for &replica in &running {
                self.pass(replica, &body.results, &condition.parameters)?;
            }
        }
        Err(Error::Endless { rounds: MOST_ROUNDS })
    }

    /// Runs the branch that each replica takes.
    fn branch(&mut self, operation: &Operation, active: &[usize]) -> Result<()> {
        for (place, region) in operation.regions.iter().enumerate() {
            let mut taken = Vec::new();
            for &replica in active {
                if self.one(replica, operation.operands[0])?.number(0).truth() == (place == 0) {
                    taken.push(replica);
                }
            }
            if taken.is_empty() {
                continue;
            }
            self.region(region, &taken)?;
            for &replica in &taken {
                self.pass(replica, &region.results, &operation.results)?;
            }
        }
        Ok(())
    }

    /// Computes an operation of one replica.
    fn compute(&self, operation: &Operation, replica: usize) -> Result<Vec<Tensor>> {
        let operands: Vec<&Tensor> =
            operation.operands.iter().map(|&id| self.one(replica, id)).collect::<Result<_>>()?;
        let x = &operands[..];
        let result = |place: usize| &self.program.types()[operation.results[place].index()];
        Ok(vec![match &operation.kind {
            OpKind::Constant(literal) => Tensor::from_literal(literal),
            OpKind::Iota { dimension } => movement::iota(result(0), *dimension),
            OpKind::Unary(op) => elementwise::unary(*op, x[0]),
            OpKind::Binary(op) => elementwise::binary(*op, x[0], x[1]),
            OpKind::Compare { relation, total_order } => elementwise::compare(*relation, *total_order, x[0], x[1]),
            OpKind::Select => elementwise::select(x[0], x[1], x[2]),
            OpKind::Clamp => elementwise::clamp(x[0], x[1], x[2]),
            OpKind::Convert => elementwise::convert(x[0], result(0).element),
            OpKind::BitcastConvert => elementwise::bitcast(x[0], result(0)),
            OpKind::BroadcastInDim { dimensions } => movement::broadcast(x[0], result(0), dimensions),
            OpKind::Reshape => movement::reshape(x[0], &result(0).dims),
            OpKind::Transpose { permutation } => movement::transpose(x[0], permutation),
            OpKind::Reverse { dimensions } => movement::reverse(x[0], dimensions),
            OpKind::Slice { start, limit, strides } => movement::slice(x[0], start, limit, strides),
            OpKind::DynamicSlice { sizes } => movement::dynamic_slice(x[0], &x[1..], sizes),
            OpKind::DynamicUpdateSlice => movement::dynamic_update_slice(x[0], x[1], &x[2..]),
            OpKind::Pad { low, interior, .. } => movement::pad(x[0], x[1], result(0), low, interior),
            OpKind::Concatenate { dimension } => movement::concatenate(x, *dimension),
            OpKind::Gather(dimensions) => indexing::gather(x[0], x[1], dimensions, result(0)),
            OpKind::Scatter { dimensions, combiner, .. } => indexing::scatter(x[0], x[1], x[2], dimensions, *combiner),
            OpKind::DotGeneral { dimensions, .. } => contraction::dot_general(x[0], x[1], dimensions, result(0)),
            OpKind::Convolution { convolution, .. } => contraction::convolution(x[0], x[1], convolution, result(0)),
            OpKind::Reduce { reducer, dimensions } => reduction::reduce(x[0], x[1], *reducer, dimensions, result(0)),
            OpKind::ArgReduce { largest, dimension } => {
                return Ok(reduction::arg_reduce(x[0], x[1], *largest, *dimension).into());
            }
            OpKind::ReduceWindow { reducer, window } => {
                reduction::reduce_window(x[0], x[1], *reducer, window, result(0))
            }
            OpKind::SelectAndScatter { window } => reduction::select_and_scatter(x[0], x[1], x[2], window),
            OpKind::Sort { dimension, order, .. } => return Ok(reduction::sort(x, *dimension, *order)),
            OpKind::RngBitGenerator { algorithm } => {
                return Ok(random::rng_bit_generator(*algorithm, x[0], result(1)).into());
            }
            OpKind::ReplicaId => Tensor::generate(result(0).clone(), |_| Num::Int(replica as i128)),
            OpKind::OptimizationBarrier => return Ok(operands.into_iter().cloned().collect()),
            // Regions and exchange concern several replicas; `region` has taken them.
            OpKind::While
            | OpKind::If
            | OpKind::AllReduce { .. }
            | OpKind::AllGather { .. }
            | OpKind::ReduceScatter { .. }
            | OpKind::CollectivePermute { .. }
            | OpKind::AllToAll { .. } => return Ok(Vec::new()),
        }])
    }

    /// Sets a value.
    fn set(&mut self, replica: usize, id: ValueId, tensor: Tensor) {
        debug_assert_eq!(tensor.ty(), &self.program.types()[id.index()], "value {}", id.index());
        self.values[replica][id.index()] = Some(tensor);
    }

    /// Returns a value.
    fn one(&self, replica: usize, id: ValueId) -> Result<&Tensor> {
        self.values[replica][id.index()].as_ref().ok_or(Error::Undefined { value: id.index() })
    }

    /// Returns values.
    fn all(&self, replica: usize, ids: &[ValueId]) -> Result<Vec<Tensor>> {
        ids.iter().map(|&id| self.one(replica, id).cloned()).collect()
    }

    /// Copies values.
    fn pass(&mut self, replica: usize, from: &[ValueId], to: &[ValueId]) -> Result<()> {
        for (tensor, &id) in self.all(replica, from)?.into_iter().zip(to) {
            self.set(replica, id, tensor);
        }
        Ok(())
    }
}

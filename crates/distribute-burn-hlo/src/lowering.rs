//! The state of lowering one graph.

use std::collections::{HashMap, HashSet};

use burn_ir::{OperationIr, ScalarIr, TensorId, TensorIr};
use distribute_hlo::{Builder, ElementType, Literal, TensorType, Value};

use crate::{Error, Result, activation, base, boolean, element_type, float, int, module, numeric};

/// Adds recorded operations of burn to a program.
///
/// Bind the tensors that the graph reads and does not make, then lower its operations, then ask for results.
pub struct Lowering<'b> {
    pub(crate) builder: &'b mut Builder,
    values: HashMap<TensorId, Value>,
    /// The state of the random stream, if the program has one.
    random: Option<Value>,
    /// The name of the operation that is being lowered.
    operation: String,
}

impl<'b> Lowering<'b> {
    /// Creates a lowering into a builder.
    pub fn new(builder: &'b mut Builder) -> Lowering<'b> {
        Lowering { builder, values: HashMap::new(), random: None, operation: String::new() }
    }

    /// Sets the state from which operations draw random numbers: two numbers of type u64. Without it, operations that
    /// draw are errors.
    pub fn set_random_state(&mut self, state: Value) {
        self.random = Some(state);
    }

    /// Returns the state of the random stream after the operations so far.
    pub fn random_state(&self) -> Option<Value> {
        self.random
    }

    /// Binds a tensor of the graph to a value of the program.
    pub fn bind(&mut self, tensor: TensorId, value: Value) {
        self.values.insert(tensor, value);
    }

    /// Binds a tensor of the graph to a constant, such as the data of an initialized tensor.
    ///
    /// # Errors
    /// [`Error::Hlo`] if the constant is too large.
    pub fn bind_constant(&mut self, tensor: TensorId, literal: Literal) -> Result<()> {
        let value = self.build(|b| b.constant(literal))?;
        self.bind(tensor, value);
        Ok(())
    }

    /// Returns the value of a tensor.
    ///
    /// # Errors
    /// [`Error::Unbound`] if it was neither bound nor made by a lowered operation.
    pub fn value(&self, tensor: TensorId) -> Result<Value> {
        let missing = || Error::Unbound { operation: self.operation.clone(), tensor: tensor.value() };
        self.values.get(&tensor).copied().ok_or_else(missing)
    }

    /// Lowers the operations on which `outputs` depend, in order.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an operation without a lowering; [`Error::Unbound`] if one reads a tensor that has no
    /// value; [`Error::TypeDiffers`] if a bound value has another type than the graph says; [`Error::Hlo`] if the
    /// builder refuses an operation.
    pub fn lower(&mut self, operations: &[OperationIr], outputs: &[TensorId]) -> Result<()> {
        let mut needed: HashSet<TensorId> = outputs.iter().copied().collect();
        let mut live: Vec<&OperationIr> = Vec::new();
        for operation in operations.iter().rev() {
            if operation.outputs().any(|out| needed.contains(&out.id) && !self.values.contains_key(&out.id)) {
                needed.extend(operation.inputs().map(|input| input.id));
                live.push(operation);
            }
        }
        for operation in live.into_iter().rev() {
            self.operation = name_of(operation);
            self.one(operation)?;
        }
        self.operation = "output".to_owned();
        Ok(())
    }

    fn one(&mut self, operation: &OperationIr) -> Result<()> {
        match operation {
            OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => base::lower(self, op),
            OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => numeric::lower(self, op),
            OperationIr::Bool(op) => boolean::lower(self, op),
            OperationIr::Int(op) => int::lower(self, op),
            OperationIr::Float(_, op) => float::lower(self, op),
            OperationIr::Module(op) => module::lower(self, op),
            OperationIr::Activation(op) => activation::lower(self, op),
            // The value of an initialized tensor is bound.
            OperationIr::Init(op) => self.value(op.out.id).map(drop),
            OperationIr::Drop(_) => Ok(()),
            OperationIr::Custom(op) => Err(self.unsupported(&format!("{:?} is an operation of another crate", op.id))),
            OperationIr::Distributed(_) => Err(self.unsupported("replicas of a program reduce by its own collectives")),
        }
    }

    /// Returns the value of an operand, checked against the graph's type.
    pub(crate) fn operand(&self, tensor: &TensorIr) -> Result<Value> {
        let value = self.value(tensor.id)?;
        let (given, expected) = (self.builder.type_of(value).map_err(|error| self.hlo(error))?, self.type_of(tensor)?);
        if *given == expected {
            return Ok(value);
        }
        let (given, expected) = (given.short().to_string(), expected.short().to_string());
        Err(Error::TypeDiffers { operation: self.operation.clone(), tensor: tensor.id.value(), given, expected })
    }

    /// Returns the type that the graph says a tensor has.
    pub(crate) fn type_of(&self, tensor: &TensorIr) -> Result<TensorType> {
        Ok(TensorType::new(self.element(tensor)?, tensor.shape.as_slice()))
    }

    pub(crate) fn element(&self, tensor: &TensorIr) -> Result<ElementType> {
        element_type(tensor.dtype).ok_or_else(|| self.unsupported("quantized numbers have no type in a program"))
    }

    /// Sets the result of an operation. It must have the type that the graph says.
    pub(crate) fn set(&mut self, out: &TensorIr, value: Value) -> Result<()> {
        self.values.insert(out.id, value);
        self.operand(out).map(drop)
    }

    /// Calls the builder. Its error names the operation that is being lowered.
    pub(crate) fn build<T>(&mut self, call: impl FnOnce(&mut Builder) -> distribute_hlo::Result<T>) -> Result<T> {
        call(self.builder).map_err(|source| Error::Hlo { operation: self.operation.clone(), source })
    }

    /// Returns a scalar of the graph, repeated to a type.
    pub(crate) fn full(&mut self, scalar: ScalarIr, ty: TensorType) -> Result<Value> {
        let result = match (scalar, ty.element) {
            (ScalarIr::Float(value), _) => self.builder.full(ty, value),
            (ScalarIr::Int(value), _) => self.builder.full(ty, value),
            (ScalarIr::UInt(value), _) => self.builder.full(ty, value),
            (ScalarIr::Bool(value), _) => self.builder.full(ty, value),
        };
        result.map_err(|error| self.hlo(error))
    }

    /// Takes the state of the random stream, to be replaced by [`set_random_state`](Lowering::set_random_state).
    pub(crate) fn draw(&mut self) -> Result<Value> {
        self.random.ok_or_else(|| self.unsupported("the program has no random state"))
    }

    pub(crate) fn unsupported(&self, problem: &str) -> Error {
        Error::Unsupported { operation: self.operation.clone(), problem: problem.to_owned() }
    }

    pub(crate) fn hlo(&self, source: distribute_hlo::Error) -> Error {
        Error::Hlo { operation: self.operation.clone(), source }
    }
}

/// Returns the name of an operation: its variants, without operands, such as `NumericFloat(Add)`.
pub(crate) fn name_of(operation: &OperationIr) -> String {
    let text = format!("{operation:?}");
    let end = text.find([' ', '{']).unwrap_or(text.len());
    let text = text[..end].trim_end_matches('(').replace("F32, ", "");
    text
}

//! The state of lowering one graph.

use std::collections::HashMap;
use std::fmt::{self, Write as _};

use burn_ir::{OperationIr, ScalarIr, ScalarOpIr, TensorId, TensorIr};
use distribute_hlo::{Builder, ElementType, Literal, Number, TensorType, Value};

use crate::{Error, Result, element_type};

/// Adds recorded operations of burn to a program.
///
/// Bind the tensors that the graph reads and does not make, then lower its operations, then ask for results.
pub struct Lowering<'b> {
    pub(crate) builder: &'b mut Builder,
    values: HashMap<TensorId, Value>,
    /// The factors of products of batches of matrices, by the product.
    pub(crate) products: HashMap<TensorId, [Value; 2]>,
    /// The state of the random stream, if the program has one.
    random: Option<Value>,
    /// The name of the operation that is being lowered.
    operation: String,
}

impl<'b> Lowering<'b> {
    /// Creates a lowering into a builder.
    pub fn new(builder: &'b mut Builder) -> Lowering<'b> {
        let (values, products) = (HashMap::new(), HashMap::new());
        Lowering { builder, values, products, random: None, operation: String::new() }
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

    /// Returns whether a tensor has a value.
    pub(crate) fn has_value(&self, tensor: TensorId) -> bool {
        self.values.contains_key(&tensor)
    }

    /// Sets the name of the operation that errors name from now on.
    pub(crate) fn begin(&mut self, operation: String) {
        self.operation = operation;
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

    /// Lowers an operation with one operand.
    pub(crate) fn unary(
        &mut self,
        input: &TensorIr,
        out: &TensorIr,
        function: impl FnOnce(&mut Builder, Value) -> distribute_hlo::Result<Value>,
    ) -> Result<()> {
        let operand = self.operand(input)?;
        let result = self.build(|b| function(b, operand))?;
        self.set(out, result)
    }

    /// Lowers an operation with two operands, of which sizes of 1 are repeated to those of the result.
    pub(crate) fn binary(
        &mut self,
        (lhs, rhs): (&TensorIr, &TensorIr),
        out: &TensorIr,
        function: impl FnOnce(&mut Builder, [Value; 2]) -> distribute_hlo::Result<Value>,
    ) -> Result<()> {
        let operands = [self.operand(lhs)?, self.operand(rhs)?];
        let dims = out.shape.as_slice();
        let result = self.build(|b| {
            let operands = [b.broadcast(operands[0], dims)?, b.broadcast(operands[1], dims)?];
            function(b, operands)
        })?;
        self.set(out, result)
    }

    /// Lowers an operation with a number as its second operand. It is of the type of the first, and has its sizes.
    pub(crate) fn with_scalar(
        &mut self,
        op: &ScalarOpIr,
        function: impl FnOnce(&mut Builder, [Value; 2]) -> distribute_hlo::Result<Value>,
    ) -> Result<()> {
        let operand = self.operand(&op.lhs)?;
        let number = self.full(op.rhs, self.type_of(&op.lhs)?)?;
        let result = self.build(|b| function(b, [operand, number]))?;
        self.set(&op.out, result)
    }

    /// Sets the result of an operation to a value with as many elements, in the sizes that the graph says.
    pub(crate) fn set_reshaped(&mut self, out: &TensorIr, value: Value) -> Result<()> {
        let value = self.build(|b| b.reshape(value, out.shape.as_slice()))?;
        self.set(out, value)
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

    /// Returns a scalar of the graph, repeated to a type. A fraction is cut off for integers, as burn does.
    pub(crate) fn full(&mut self, scalar: ScalarIr, ty: TensorType) -> Result<Value> {
        let number = self.number(scalar, ty.element)?;
        self.build(|b| b.full(ty, number))
    }

    /// Returns a scalar of the graph as a number of an element type.
    pub(crate) fn number(&self, scalar: ScalarIr, element: ElementType) -> Result<Number> {
        let number = match scalar {
            ScalarIr::Float(value) => Number::Float(value),
            ScalarIr::Int(value) => Number::Integer(value.into()),
            ScalarIr::UInt(value) => Number::Integer(value.into()),
            ScalarIr::Bool(value) => Number::Integer(value.into()),
        };
        let number = match number {
            Number::Float(value) if element == ElementType::Bool => Number::Bool(value != 0.0),
            Number::Integer(value) if element == ElementType::Bool => Number::Bool(value != 0),
            Number::Float(value) if element.is_integer() && value.is_finite() => Number::Integer(value as i128),
            number => number,
        };
        match Literal::splat(TensorType::scalar(element), number) {
            Ok(_) => Ok(number),
            Err(_) => Err(self.unsupported(&format!(
                "the number {scalar:?} does not fit into {}; cast the tensor to a wider type first",
                element.name()
            ))),
        }
    }

    /// Draws random numbers: `draw` gets the state of the random stream and returns the next one and the numbers.
    pub(crate) fn draw(
        &mut self,
        draw: impl FnOnce(&mut Builder, Value) -> distribute_hlo::Result<(Value, Value)>,
    ) -> Result<Value> {
        let missing = "the program has no random state; call Lowering::set_random_state first";
        let state = self.random.ok_or_else(|| self.unsupported(missing))?;
        let (next, numbers) = self.build(|b| draw(b, state))?;
        self.random = Some(next);
        Ok(numbers)
    }

    pub(crate) fn unsupported(&self, problem: &str) -> Error {
        Error::Unsupported { operation: self.operation.clone(), problem: problem.to_owned() }
    }

    pub(crate) fn hlo(&self, source: distribute_hlo::Error) -> Error {
        Error::Hlo { operation: self.operation.clone(), source }
    }
}

/// Returns the name of an operation: its variants, without types and operands, such as `NumericFloat(Add)`.
pub(crate) fn name_of(operation: &OperationIr) -> String {
    let (group, inner): (&str, &dyn fmt::Debug) = match operation {
        OperationIr::BaseFloat(op) => ("BaseFloat", op),
        OperationIr::BaseInt(op) => ("BaseInt", op),
        OperationIr::BaseBool(op) => ("BaseBool", op),
        OperationIr::NumericFloat(_, op) => ("NumericFloat", op),
        OperationIr::NumericInt(_, op) => ("NumericInt", op),
        OperationIr::Bool(op) => ("Bool", op),
        OperationIr::Int(op) => ("Int", op),
        OperationIr::Float(_, op) => ("Float", op),
        OperationIr::Module(op) => ("Module", op),
        OperationIr::Activation(op) => ("Activation", op),
        OperationIr::Distributed(op) => ("Distributed", op),
        OperationIr::Init(_) => return "Init".to_owned(),
        OperationIr::Drop(_) => return "Drop".to_owned(),
        OperationIr::Custom(op) => return format!("Custom({})", op.id),
    };
    let mut variant = Head(String::new());
    // It ends with an error at the operands, which would take long to print.
    let _ = write!(variant, "{inner:?}");
    format!("{group}({})", variant.0)
}

/// Keeps the text before the first bracket.
struct Head(String);

impl fmt::Write for Head {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = text.find(['(', '{', ' ']);
        self.0.push_str(&text[..end.unwrap_or(text.len())]);
        if end.is_some() { Err(fmt::Error) } else { Ok(()) }
    }
}

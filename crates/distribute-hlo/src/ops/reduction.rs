//! Reductions over dimensions.

use crate::literal::integer_range;
use crate::shape::{distinct, in_range, others};
use crate::{Builder, ElementType, Number, OpKind, Reducer, Result, TensorType, Value};

impl Builder {
    /// Combines the elements along dimensions, which the result lacks. The order of combination is not defined, so that
    /// sums of floating-point numbers depend on the device in their last digits. Over no elements it is the reducer's
    /// initial value.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if a dimension does not exist or is named twice, or the reducer is
    /// not defined for the element type.
    pub fn reduce(&mut self, operand: Value, reducer: Reducer, dimensions: &[usize]) -> Result<Value> {
        let [ty] = self.types("reduce", [operand])?;
        distinct("dimensions", dimensions, ty.ndim())
            .and_then(|()| reducible(reducer, ty.element))
            .map_err(|problem| self.refuse("reduce", &[("operand", operand)], problem))?;
        let initial = self.initial(reducer, ty.element)?;
        let dims: Vec<usize> = others(ty.ndim(), dimensions).into_iter().map(|dim| ty.dims[dim]).collect();
        let mut dimensions = dimensions.to_vec();
        dimensions.sort_unstable();
        self.push(OpKind::Reduce { reducer, dimensions }, &[operand, initial], ty.with_dims(dims))
    }

    /// Returns the largest element along a dimension and its index, as values and indices of type `index`. Of equal
    /// elements the first counts; if there is NaN, the first NaN is the result. −0 and 0 are equal.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the dimension does not exist or has size 0, or `index` cannot
    /// hold its indices.
    pub fn argmax(&mut self, operand: Value, dimension: usize, index: ElementType) -> Result<(Value, Value)> {
        self.arg_reduce("argmax", operand, true, dimension, index)
    }

    /// Returns the smallest element along a dimension and its index, with the rules of [`Builder::argmax`].
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the dimension does not exist or has size 0, or `index` cannot
    /// hold its indices.
    pub fn argmin(&mut self, operand: Value, dimension: usize, index: ElementType) -> Result<(Value, Value)> {
        self.arg_reduce("argmin", operand, false, dimension, index)
    }

    /// Adds a reduction of values and indices.
    fn arg_reduce(
        &mut self,
        operation: &'static str,
        operand: Value,
        largest: bool,
        dimension: usize,
        index: ElementType,
    ) -> Result<(Value, Value)> {
        let [ty] = self.types(operation, [operand])?;
        let (_, highest) = integer_range(index);
        let problem = match in_range("the dimension", dimension, ty.ndim()) {
            Err(problem) => Some(problem),
            Ok(()) if ty.dims[dimension] == 0 => Some(format!("dimension {dimension} has no elements")),
            Ok(()) if !index.is_integer() || ty.dims[dimension] as i128 - 1 > highest => {
                Some(format!("indices of dimension {dimension} do not fit into {}; use i32 or i64", index.name()))
            }
            Ok(()) => None,
        };
        if let Some(problem) = problem {
            return Err(self.refuse(operation, &[("operand", operand)], problem));
        }
        let indices = self.iota(ty.with_element(index), dimension)?;
        let reducer = if largest { Reducer::Max } else { Reducer::Min };
        let initial = self.initial(reducer, ty.element)?;
        // The highest index loses against an element of the same value.
        let no_index = self.full(TensorType::scalar(index), Number::Integer(highest))?;
        let dims: Vec<usize> = others(ty.ndim(), &[dimension]).into_iter().map(|dim| ty.dims[dim]).collect();
        let results = vec![ty.with_dims(dims.clone()), TensorType::new(index, dims)];
        let kind = OpKind::ArgReduce { largest, dimension };
        let results = self.push_all(kind, &[operand, indices, initial, no_index], results, Vec::new())?;
        match results[..] {
            [value, place] => Ok((value, place)),
            _ => Err(self.refuse(operation, &[("operand", operand)], "it has two results")),
        }
    }

    /// Adds the value from which a reduction starts.
    pub(super) fn initial(&mut self, reducer: Reducer, element: ElementType) -> Result<Value> {
        let (low, high) = integer_range(element);
        let number = if element == ElementType::Bool {
            Number::Bool(matches!(reducer, Reducer::Min | Reducer::And))
        } else {
            match reducer {
                Reducer::Sum | Reducer::Or => Number::Integer(0),
                Reducer::Prod => Number::Integer(1),
                Reducer::Max if element.is_float() => Number::Float(f64::NEG_INFINITY),
                Reducer::Min if element.is_float() => Number::Float(f64::INFINITY),
                Reducer::Max => Number::Integer(low),
                Reducer::Min => Number::Integer(high),
                // All bits are 1.
                Reducer::And if element.is_signed_integer() => Number::Integer(-1),
                Reducer::And => Number::Integer(high),
            }
        };
        self.full(TensorType::scalar(element), number)
    }
}

/// Checks that a reducer is defined for an element type.
pub(super) fn reducible(reducer: Reducer, element: ElementType) -> Result<(), String> {
    let truth = element == ElementType::Bool;
    let (fits, expected) = match reducer {
        Reducer::Sum | Reducer::Prod => (!truth, "numbers; for truth values use And and Or"),
        Reducer::Max | Reducer::Min => (true, ""),
        Reducer::And | Reducer::Or => (truth || element.is_integer(), "truth values or integers"),
    };
    if fits { Ok(()) } else { Err(format!("{reducer:?} expects {expected}")) }
}

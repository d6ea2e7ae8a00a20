//! Movement of elements to fixed places.

use crate::shape::{distinct, in_range, length, padded};
use crate::{Builder, OpKind, Result, TensorType, Value};

impl Builder {
    /// Repeats elements to the sizes `dims`. Dimension `i` of the operand becomes `dimensions[i]` of the result, where
    /// it has the same size or is repeated from 1; along all other dimensions the whole operand is repeated.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if dimensions or sizes do not match.
    pub fn broadcast_in_dim(&mut self, operand: Value, dims: &[usize], dimensions: &[usize]) -> Result<Value> {
        let [ty] = self.types("broadcast_in_dim", [operand])?;
        let checked = length("dimensions", dimensions, ty.ndim())
            .and_then(|()| distinct("dimensions", dimensions, dims.len()))
            .and_then(|()| {
                let mut pairs = dimensions.iter().zip(&ty.dims).enumerate();
                match pairs.find(|(_, (to, size))| **size != 1 && **size != dims[**to]) {
                    Some((from, (&to, size))) => Err(format!(
                        "dimension {from} of size {size} cannot become dimension {to} of size {} of {dims:?}; give \
                         the same size, or 1 in the operand",
                        dims[to]
                    )),
                    None => Ok(()),
                }
            });
        checked.map_err(|problem| self.refuse("broadcast_in_dim", &[("operand", operand)], problem))?;
        let kind = OpKind::BroadcastInDim { dimensions: dimensions.to_vec() };
        self.push(kind, &[operand], ty.with_dims(dims))
    }

    /// Repeats elements to the sizes `dims` by the rules of numpy: last dimensions belong together, sizes of 1 and
    /// missing leading dimensions are repeated. A tensor that has the sizes is returned as it is.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if sizes do not match, or the operand has more dimensions.
    pub fn broadcast(&mut self, operand: Value, dims: &[usize]) -> Result<Value> {
        let [ty] = self.types("broadcast", [operand])?;
        if ty.dims == dims {
            return Ok(operand);
        }
        let Some(leading) = dims.len().checked_sub(ty.ndim()) else {
            let problem = format!("it has more dimensions than {dims:?}; reshape it first");
            return Err(self.refuse("broadcast", &[("operand", operand)], problem));
        };
        let dimensions: Vec<usize> = (leading..dims.len()).collect();
        self.broadcast_in_dim(operand, dims, &dimensions)
    }

    /// Gives the elements other sizes, in row-major order.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the number of elements differs.
    pub fn reshape(&mut self, operand: Value, dims: &[usize]) -> Result<Value> {
        let [ty] = self.types("reshape", [operand])?;
        let result = ty.with_dims(dims);
        if ty.elements() != result.elements() {
            let problem = format!("sizes {dims:?} do not have as many elements; give sizes with the same product");
            return Err(self.refuse("reshape", &[("operand", operand)], problem));
        }
        self.push(OpKind::Reshape, &[operand], result)
    }

    /// Reorders dimensions: dimension `i` of the result is dimension `permutation[i]` of the operand.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the permutation does not name each dimension once.
    pub fn transpose(&mut self, operand: Value, permutation: &[usize]) -> Result<Value> {
        let [ty] = self.types("transpose", [operand])?;
        length("permutation", permutation, ty.ndim())
            .and_then(|()| distinct("permutation", permutation, ty.ndim()))
            .map_err(|problem| self.refuse("transpose", &[("operand", operand)], problem))?;
        let dims: Vec<usize> = permutation.iter().map(|&dim| ty.dims[dim]).collect();
        let kind = OpKind::Transpose { permutation: permutation.to_vec() };
        self.push(kind, &[operand], ty.with_dims(dims))
    }

    /// Reverses the order of elements along dimensions.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if a dimension does not exist or is named twice.
    pub fn reverse(&mut self, operand: Value, dimensions: &[usize]) -> Result<Value> {
        let [ty] = self.types("reverse", [operand])?;
        distinct("dimensions", dimensions, ty.ndim())
            .map_err(|problem| self.refuse("reverse", &[("operand", operand)], problem))?;
        self.push(OpKind::Reverse { dimensions: dimensions.to_vec() }, &[operand], ty)
    }

    /// Takes the elements from `start` up to, not including, `limit` in steps of `strides`.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if a part does not lie in the operand, or a stride is 0.
    pub fn slice(&mut self, operand: Value, start: &[usize], limit: &[usize], strides: &[usize]) -> Result<Value> {
        let [ty] = self.types("slice", [operand])?;
        let checked = length("start", start, ty.ndim())
            .and_then(|()| length("limit", limit, ty.ndim()))
            .and_then(|()| length("strides", strides, ty.ndim()))
            .and_then(|()| {
                let mut dims = Vec::with_capacity(ty.ndim());
                for (dim, &size) in ty.dims.iter().enumerate() {
                    let (from, to, step) = (start[dim], limit[dim], strides[dim]);
                    if from > to || to > size {
                        return Err(format!("{from}..{to} does not lie in dimension {dim} of size {size}"));
                    }
                    if step == 0 {
                        return Err(format!("the stride of dimension {dim} is 0; give 1 or more"));
                    }
                    dims.push((to - from).div_ceil(step));
                }
                Ok(dims)
            });
        let dims = checked.map_err(|problem| self.refuse("slice", &[("operand", operand)], problem))?;
        let kind = OpKind::Slice { start: start.to_vec(), limit: limit.to_vec(), strides: strides.to_vec() };
        self.push(kind, &[operand], ty.with_dims(dims))
    }

    /// Takes the elements `start..limit` of one dimension, and all of the others.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the dimension does not exist, or the elements do not lie in it.
    pub fn slice_in_dim(&mut self, operand: Value, dimension: usize, start: usize, limit: usize) -> Result<Value> {
        let [ty] = self.types("slice", [operand])?;
        in_range("the sliced dimension", dimension, ty.ndim())
            .map_err(|problem| self.refuse("slice", &[("operand", operand)], problem))?;
        let (mut from, mut to) = (vec![0; ty.ndim()], ty.dims.clone());
        (from[dimension], to[dimension]) = (start, limit);
        self.slice(operand, &from, &to, &vec![1; ty.ndim()])
    }

    /// Puts copies of the scalar `value` before (`low`), after (`high`) and between (`interior`) the elements of each
    /// dimension. A negative number at an edge removes elements, after those between were added.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if more elements are removed than there are, or `value` is not a
    /// scalar of the same element type.
    pub fn pad(
        &mut self,
        operand: Value,
        value: Value,
        low: &[i64],
        high: &[i64],
        interior: &[usize],
    ) -> Result<Value> {
        let [ty, padding] = self.types("pad", [operand, value])?;
        let checked = length("low", low, ty.ndim())
            .and_then(|()| length("high", high, ty.ndim()))
            .and_then(|()| length("interior", interior, ty.ndim()))
            .and_then(|()| match padding == TensorType::scalar(ty.element) {
                true => Ok(()),
                false => Err("value must be a scalar of the operand's element type".to_owned()),
            })
            .and_then(|()| {
                let mut dims = Vec::with_capacity(ty.ndim());
                for (dim, &size) in ty.dims.iter().enumerate() {
                    let gap = interior[dim].checked_add(1);
                    let inner = gap.and_then(|gap| crate::shape::dilated(size, gap));
                    let padded = inner.and_then(|inner| padded(inner, low[dim], high[dim]));
                    let size = padded.and_then(|size| usize::try_from(size).ok());
                    dims.push(size.ok_or_else(|| {
                        format!(
                            "padding ({}, {}) of dimension {dim} removes too much or overflows",
                            low[dim], high[dim]
                        )
                    })?);
                }
                Ok(dims)
            });
        let dims = checked.map_err(|problem| self.refuse("pad", &[("operand", operand), ("value", value)], problem))?;
        let kind = OpKind::Pad { low: low.to_vec(), high: high.to_vec(), interior: interior.to_vec() };
        self.push(kind, &[operand, value], ty.with_dims(dims))
    }

    /// Puts tensors one after another along a dimension.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if none is given, or element types or other sizes differ.
    pub fn concatenate(&mut self, operands: &[Value], dimension: usize) -> Result<Value> {
        self.check("concatenate", operands)?;
        let Some((&first, rest)) = operands.split_first() else {
            return Err(self.refuse("concatenate", &[], "give at least one tensor"));
        };
        let [mut result] = self.types("concatenate", [first])?;
        in_range("the dimension", dimension, result.ndim())
            .map_err(|problem| self.refuse("concatenate", &[("operand", first)], problem))?;
        for &other in rest {
            let [ty] = self.types("concatenate", [other])?;
            let mut expected = result.clone();
            expected.dims[dimension] = ty.dims.get(dimension).copied().unwrap_or(0);
            let sum = result.dims[dimension].checked_add(expected.dims[dimension]);
            let Some(sum) = sum.filter(|_| ty == expected) else {
                let problem = format!("element types and all sizes but that of dimension {dimension} must be the same");
                return Err(self.refuse("concatenate", &[("first", first), ("other", other)], problem));
            };
            result.dims[dimension] = sum;
        }
        self.push(OpKind::Concatenate { dimension }, operands, result)
    }
}

//! Reductions of windows.

use super::reduction::reducible;
use crate::shape::{in_range, windowed};
use crate::{Builder, OpKind, Reducer, Result, Value, Window};

impl Builder {
    /// Combines the elements of each window. Padding has the reducer's initial value.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the window has not one entry for each dimension or a 0, or the
    /// reducer is not defined for the element type.
    pub fn reduce_window(&mut self, operand: Value, reducer: Reducer, window: &Window) -> Result<Value> {
        let [ty] = self.types("reduce_window", [operand])?;
        let dims = reducible(reducer, ty.element)
            .and_then(|()| windowed(&ty.dims, window))
            .map_err(|problem| self.refuse("reduce_window", &[("operand", operand)], problem))?;
        let initial = self.initial(reducer, ty.element)?;
        let kind = OpKind::ReduceWindow { reducer, window: window.clone() };
        self.push(kind, &[operand, initial], ty.with_dims(dims))
    }

    /// Adds each element of `source` to the place of the largest element of its window of `operand`, the first of equal
    /// ones, in a tensor of zeros with the sizes of `operand`: the gradient of a maximum over windows. If a window has
    /// NaN, the place depends on the device.
    ///
    /// TPUs compile it only if at least two dimensions have windows of size 1: give images of four dimensions.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if `source` does not have one element for each window, the window
    /// has dilations, or elements are truth values.
    pub fn select_and_scatter(&mut self, operand: Value, source: Value, window: &Window) -> Result<Value> {
        let [ty, updates] = self.types("select_and_scatter", [operand, source])?;
        let checked = reducible(Reducer::Sum, ty.element).and_then(|()| windowed(&ty.dims, window)).and_then(|dims| {
            if window.base_dilations.iter().chain(&window.window_dilations).any(|&dilation| dilation != 1) {
                return Err("the window has dilations, which this operation lacks".to_owned());
            }
            let expected = ty.with_dims(dims);
            match updates == expected {
                true => Ok(()),
                false => Err(format!("source must be {}, one element for each window", expected.short())),
            }
        });
        checked.map_err(|problem| {
            self.refuse("select_and_scatter", &[("operand", operand), ("source", source)], problem)
        })?;
        let initial = self.initial(Reducer::Sum, ty.element)?;
        let kind = OpKind::SelectAndScatter { window: window.clone() };
        self.push(kind, &[operand, source, initial], ty)
    }

    /// Combines each element with all before it along a dimension, or with all after it if `reverse`.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the dimension does not exist, or the reducer is not defined for
    /// the element type.
    pub fn cumulative(&mut self, operand: Value, reducer: Reducer, dimension: usize, reverse: bool) -> Result<Value> {
        let [ty] = self.types("cumulative", [operand])?;
        in_range("the dimension", dimension, ty.ndim())
            .and_then(|()| reducible(reducer, ty.element))
            .map_err(|problem| self.refuse("cumulative", &[("operand", operand)], problem))?;
        let size = ty.dims[dimension];
        if size == 0 {
            return Ok(operand);
        }
        let mut dims = vec![1; ty.ndim()];
        dims[dimension] = size;
        let before = i64::try_from(size - 1);
        let before = before.map_err(|_| crate::Error::TooLarge { operation: "cumulative", ty: ty.clone() })?;
        let mut window = Window::new(dims);
        window.padding[dimension] = if reverse { (0, before) } else { (before, 0) };
        self.reduce_window(operand, reducer, &window)
    }

    /// Adds to each element all before it along a dimension.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the dimension does not exist, or elements are truth values.
    pub fn cumsum(&mut self, operand: Value, dimension: usize) -> Result<Value> {
        self.cumulative(operand, Reducer::Sum, dimension, false)
    }

    /// Multiplies each element by all before it along a dimension.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the dimension does not exist, or elements are truth values.
    pub fn cumprod(&mut self, operand: Value, dimension: usize) -> Result<Value> {
        self.cumulative(operand, Reducer::Prod, dimension, false)
    }

    /// Returns the largest of each element and all before it along a dimension.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the dimension does not exist.
    pub fn cummax(&mut self, operand: Value, dimension: usize) -> Result<Value> {
        self.cumulative(operand, Reducer::Max, dimension, false)
    }

    /// Returns the smallest of each element and all before it along a dimension.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the dimension does not exist.
    pub fn cummin(&mut self, operand: Value, dimension: usize) -> Result<Value> {
        self.cumulative(operand, Reducer::Min, dimension, false)
    }
}

//! Scatter.

use super::indexing::Indexed;
use crate::{Builder, OpKind, Reducer, Result, ScatterDimensions, TensorType, Value};

impl Builder {
    /// Combines slices of `updates` into the operand at the places that `indices` names. `None` replaces elements;
    /// where two updates of one place replace each other, the result is either. Updates that do not lie inside are
    /// left out.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if dimensions, sizes or element types do not match each other, or
    /// the combiner is not defined for the element type.
    ///
    /// # Source
    /// `scatter` of the StableHLO specification.
    pub fn scatter(
        &mut self,
        operand: Value,
        indices: Value,
        updates: Value,
        dimensions: &ScatterDimensions,
        combiner: Option<Reducer>,
    ) -> Result<Value> {
        self.scattered([operand, indices, updates], dimensions, combiner, false)
    }

    /// Scatters as [`Builder::scatter`], with the promise that no place is updated twice, which some devices use. The
    /// result is not defined if the promise is broken.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the arguments do not match, as in [`Builder::scatter`].
    pub fn scatter_unique(
        &mut self,
        operand: Value,
        indices: Value,
        updates: Value,
        dimensions: &ScatterDimensions,
        combiner: Option<Reducer>,
    ) -> Result<Value> {
        self.scattered([operand, indices, updates], dimensions, combiner, true)
    }

    /// Adds a scatter.
    fn scattered(
        &mut self,
        operands: [Value; 3],
        dimensions: &ScatterDimensions,
        combiner: Option<Reducer>,
        unique_indices: bool,
    ) -> Result<Value> {
        let [operand, indices, updates] = operands;
        let [ty, index, update] = self.types("scatter", operands)?;
        let checked = check(&ty, &index, &update, dimensions).and_then(|()| match combiner {
            Some(reducer) => super::reduction::reducible(reducer, ty.element),
            None => Ok(()),
        });
        checked.map_err(|problem| {
            self.refuse("scatter", &[("operand", operand), ("indices", indices), ("updates", updates)], problem)
        })?;
        let kind = OpKind::Scatter { dimensions: dimensions.clone(), combiner, unique_indices };
        self.push(kind, &operands, ty)
    }
}

/// Checks the sizes of a scatter.
fn check(
    operand: &TensorType,
    indices: &TensorType,
    updates: &TensorType,
    dims: &ScatterDimensions,
) -> Result<(), String> {
    let batch = Indexed {
        operand,
        indices,
        collapsed: &dims.inserted_window_dims,
        operand_batching: &dims.input_batching_dims,
        indices_batching: &dims.scatter_indices_batching_dims,
        index_map: &dims.scatter_dims_to_operand_dims,
        index_vector_dim: dims.index_vector_dim,
        offsets: &dims.update_window_dims,
    }
    .batch_dims()?;
    if updates.element != operand.element {
        return Err("operand and updates must have one element type; convert one of them".to_owned());
    }
    if updates.ndim() != batch.len() + dims.update_window_dims.len() {
        return Err(format!(
            "updates must have {} dimensions: those of the indices and of a slice",
            batch.len() + dims.update_window_dims.len()
        ));
    }
    let others = crate::shape::others(updates.ndim(), &dims.update_window_dims);
    if let Some((&dim, size)) = others.iter().zip(batch).find(|(dim, size)| updates.dims[**dim] != *size) {
        return Err(format!("dimension {dim} of the updates has {}, and the indices {size}", updates.dims[dim]));
    }
    let in_slice = (0..operand.ndim())
        .filter(|dim| !dims.inserted_window_dims.contains(dim) && !dims.input_batching_dims.contains(dim));
    for (dim, &window) in in_slice.zip(&dims.update_window_dims) {
        if updates.dims[window] > operand.dims[dim] {
            return Err(format!(
                "dimension {window} of the updates has {}, and dimension {dim} of the operand {}",
                updates.dims[window], operand.dims[dim]
            ));
        }
    }
    Ok(())
}

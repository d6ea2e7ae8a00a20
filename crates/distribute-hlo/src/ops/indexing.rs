//! Slices at places that are computed, and gather.

use crate::shape::{ascending, distinct, in_range, length};
use crate::{Builder, ElementType, GatherDimensions, OpKind, Result, TensorType, Value};

impl Builder {
    /// Takes a part of these sizes from the place `starts`, one integer scalar for each dimension. A part that would
    /// not lie inside is moved into the tensor.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if a size exceeds the operand's, or starts are not integer scalars
    /// of one type.
    pub fn dynamic_slice(&mut self, operand: Value, starts: &[Value], sizes: &[usize]) -> Result<Value> {
        let [ty] = self.types("dynamic_slice", [operand])?;
        self.check_starts("dynamic_slice", operand, starts)?;
        let checked = length("sizes", sizes, ty.ndim()).and_then(|()| smaller("sizes", sizes, &ty.dims));
        checked.map_err(|problem| self.refuse("dynamic_slice", &[("operand", operand)], problem))?;
        let mut operands = vec![operand];
        operands.extend_from_slice(starts);
        self.push(OpKind::DynamicSlice { sizes: sizes.to_vec() }, &operands, ty.with_dims(sizes))
    }

    /// Replaces the part at the place `starts` by `update`, at the place that [`Builder::dynamic_slice`] would read.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the update is larger or has another element type, or starts are
    /// not integer scalars of one type.
    pub fn dynamic_update_slice(&mut self, operand: Value, update: Value, starts: &[Value]) -> Result<Value> {
        let [ty, part] = self.types("dynamic_update_slice", [operand, update])?;
        self.check_starts("dynamic_update_slice", operand, starts)?;
        let checked = length("update", &part.dims, ty.ndim())
            .and_then(|()| smaller("update", &part.dims, &ty.dims))
            .and_then(|()| match part.element == ty.element {
                true => Ok(()),
                false => Err("the element types differ; convert one of them".to_owned()),
            });
        checked.map_err(|problem| {
            self.refuse("dynamic_update_slice", &[("operand", operand), ("update", update)], problem)
        })?;
        let mut operands = vec![operand, update];
        operands.extend_from_slice(starts);
        self.push(OpKind::DynamicUpdateSlice, &operands, ty)
    }

    /// Checks that starts are one integer scalar for each dimension.
    fn check_starts(&self, operation: &'static str, operand: Value, starts: &[Value]) -> Result<()> {
        self.check(operation, starts)?;
        let ndim = self.typed(operation, operand)?.ndim();
        length("starts", starts, ndim).map_err(|problem| self.refuse(operation, &[("operand", operand)], problem))?;
        let Some(&first) = starts.first() else { return Ok(()) };
        let expected = self.typed(operation, first)?;
        for &start in starts {
            let ty = self.typed(operation, start)?;
            if ty != expected || ty.ndim() != 0 || !ty.element.is_integer() {
                let problem = "starts must be integer scalars of one type";
                return Err(self.refuse(operation, &[("the first start", first), ("another", start)], problem));
            }
        }
        Ok(())
    }

    /// Takes slices of the operand at the places that `indices` names. A slice that would not lie inside is moved into
    /// the operand.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if dimensions or sizes do not match each other.
    ///
    /// # Source
    /// `gather` of the StableHLO specification.
    pub fn gather(&mut self, operand: Value, indices: Value, dimensions: &GatherDimensions) -> Result<Value> {
        let [ty, index] = self.types("gather", [operand, indices])?;
        let dims = gathered(&ty, &index, dimensions)
            .map_err(|problem| self.refuse("gather", &[("operand", operand), ("indices", indices)], problem))?;
        self.push(OpKind::Gather(dimensions.clone()), &[operand, indices], ty.with_dims(dims))
    }

    /// Takes the slices of one dimension that `indices` names, as numpy's `take`. The result has the sizes of the
    /// indices in place of that dimension. An index out of range reads the first or the last slice.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the dimension does not exist or has size 0, or indices are not
    /// integers.
    pub fn take(&mut self, operand: Value, indices: Value, dimension: usize) -> Result<Value> {
        let [ty, index] = self.types("take", [operand, indices])?;
        let given = [("operand", operand), ("indices", indices)];
        in_range("the dimension", dimension, ty.ndim()).map_err(|problem| self.refuse("take", &given, problem))?;
        if ty.dims[dimension] == 0 {
            return Err(self.refuse("take", &given, "the dimension has size 0, so that nothing can be taken"));
        }
        let mut slice_sizes = ty.dims.clone();
        slice_sizes[dimension] = 1;
        let ndim = index.ndim();
        let dimensions = GatherDimensions {
            offset_dims: (0..dimension).chain(dimension + ndim..ty.ndim() + ndim - 1).collect(),
            collapsed_slice_dims: vec![dimension],
            start_index_map: vec![dimension],
            index_vector_dim: ndim,
            slice_sizes,
            ..GatherDimensions::default()
        };
        self.gather(operand, indices, &dimensions)
    }
}

/// Checks that sizes do not exceed those of an operand.
fn smaller(what: &str, sizes: &[usize], dims: &[usize]) -> Result<(), String> {
    match sizes.iter().zip(dims).position(|(size, dim)| size > dim) {
        Some(dim) => Err(format!("{what} has {} in dimension {dim}, and the operand {}", sizes[dim], dims[dim])),
        None => Ok(()),
    }
}

/// Checks the rules that gather and scatter share, and returns the sizes of the indices without the dimension of their
/// components.
pub(super) struct Indexed<'a> {
    pub(super) operand: &'a TensorType,
    pub(super) indices: &'a TensorType,
    /// Dimensions of the operand that a slice has with size 1 and the result lacks.
    pub(super) collapsed: &'a [usize],
    pub(super) operand_batching: &'a [usize],
    pub(super) indices_batching: &'a [usize],
    pub(super) index_map: &'a [usize],
    pub(super) index_vector_dim: usize,
    /// Dimensions of the result, or the updates, along which a slice lies.
    pub(super) offsets: &'a [usize],
}

impl Indexed<'_> {
    /// Checks the dimensions.
    pub(super) fn batch_dims(&self) -> Result<Vec<usize>, String> {
        let ndim = self.operand.ndim();
        if !self.indices.element.is_integer() || self.indices.element == ElementType::Bool {
            return Err("indices must be integers".to_owned());
        }
        if self.index_vector_dim > self.indices.ndim() {
            return Err(format!(
                "index_vector_dim is {}, and the indices have {} dimensions",
                self.index_vector_dim,
                self.indices.ndim()
            ));
        }
        let components = self.indices.dims.get(self.index_vector_dim).copied().unwrap_or(1);
        if components != self.index_map.len() {
            return Err(format!(
                "an index has {components} components, and {} dimensions of the operand are named for them",
                self.index_map.len()
            ));
        }
        distinct("the dimensions of an index's components", self.index_map, ndim)?;
        let lacking: Vec<usize> = self.collapsed.iter().chain(self.operand_batching).copied().collect();
        distinct("the dimensions that slices lack", &lacking, ndim)?;
        ascending("the dimensions of size 1 that slices lack", self.collapsed)?;
        ascending("the operand's batching dimensions", self.operand_batching)?;
        if let Some(dim) = self.operand_batching.iter().find(|dim| self.index_map.contains(dim)) {
            return Err(format!("dimension {dim} is a batching dimension and that of an index's component"));
        }
        if self.operand_batching.len() != self.indices_batching.len() {
            return Err("operand and indices must have as many batching dimensions".to_owned());
        }
        distinct("the indices' batching dimensions", self.indices_batching, self.indices.ndim())?;
        for (&dim, &other) in self.operand_batching.iter().zip(self.indices_batching) {
            if other == self.index_vector_dim || self.operand.dims[dim] != self.indices.dims[other] {
                return Err(format!(
                    "batching dimensions {dim} of the operand and {other} of the indices do not match"
                ));
            }
        }
        let in_slice = ndim - lacking.len();
        if self.offsets.len() != in_slice {
            return Err(format!("{} dimensions are named for the {in_slice} of a slice", self.offsets.len()));
        }
        ascending("the dimensions of a slice", self.offsets)?;
        let dims = self.indices.dims.iter().enumerate();
        let batch: Vec<usize> = dims.filter(|(dim, _)| *dim != self.index_vector_dim).map(|(_, &size)| size).collect();
        distinct("the dimensions of a slice", self.offsets, batch.len() + in_slice)?;
        Ok(batch)
    }
}

/// Returns the sizes of a gather's result.
fn gathered(operand: &TensorType, indices: &TensorType, dims: &GatherDimensions) -> Result<Vec<usize>, String> {
    let batch = Indexed {
        operand,
        indices,
        collapsed: &dims.collapsed_slice_dims,
        operand_batching: &dims.operand_batching_dims,
        indices_batching: &dims.start_indices_batching_dims,
        index_map: &dims.start_index_map,
        index_vector_dim: dims.index_vector_dim,
        offsets: &dims.offset_dims,
    }
    .batch_dims()?;
    length("slice_sizes", &dims.slice_sizes, operand.ndim())?;
    smaller("slice_sizes", &dims.slice_sizes, &operand.dims)?;
    let lacking = |dim: &usize| dims.collapsed_slice_dims.contains(dim) || dims.operand_batching_dims.contains(dim);
    if let Some(dim) = (0..operand.ndim()).find(|dim| lacking(dim) && dims.slice_sizes[*dim] != 1) {
        return Err(format!("the result lacks dimension {dim}, so slice_sizes must have 1 there"));
    }
    let mut sizes = (0..operand.ndim()).filter(|dim| !lacking(dim)).map(|dim| dims.slice_sizes[dim]);
    let mut batch = batch.into_iter();
    let ndim = sizes.clone().count() + batch.len();
    Ok((0..ndim).filter_map(|dim| if dims.offset_dims.contains(&dim) { sizes.next() } else { batch.next() }).collect())
}

//! Exchange between replicas.
//!
//! Every replica must run the same collectives in the same order: all run one program, so this holds outside of loops
//! and branches by itself.

use super::reduction::reducible;
use crate::shape::{group_size, in_range};
use crate::{Builder, CollectiveGroups, ElementType, Error, OpKind, Reducer, Result, TensorType, Value};

impl Builder {
    /// Combines the operands of all replicas of a group. Every one gets the result.
    ///
    /// Devices may lose NaN in [`Reducer::Max`] and [`Reducer::Min`] between replicas, as XLA does on CPUs.
    ///
    /// # Errors
    /// [`Error::Operation`] if groups do not name each replica once or have several sizes, or the reducer is not
    /// defined for the element type.
    pub fn all_reduce(&mut self, operand: Value, reducer: Reducer, groups: &CollectiveGroups) -> Result<Value> {
        let [ty] = self.types("all_reduce", [operand])?;
        exchangeable(reducer, ty.element)
            .and_then(|()| group_size(groups, self.num_replicas()))
            .map_err(|problem| self.refuse("all_reduce", &[("operand", operand)], problem))?;
        self.push(OpKind::AllReduce { reducer, groups: groups.clone() }, &[operand], ty)
    }

    /// Puts the operands of the replicas of a group one after another along a dimension.
    ///
    /// # Errors
    /// [`Error::Operation`] if the dimension does not exist, or groups are wrong as in [`Builder::all_reduce`].
    pub fn all_gather(&mut self, operand: Value, dimension: usize, groups: &CollectiveGroups) -> Result<Value> {
        let [mut ty] = self.types("all_gather", [operand])?;
        let size = in_range("the gathered dimension", dimension, ty.ndim())
            .and_then(|()| group_size(groups, self.num_replicas()))
            .map_err(|problem| self.refuse("all_gather", &[("operand", operand)], problem))?;
        let gathered = ty.dims[dimension].checked_mul(size);
        ty.dims[dimension] = gathered.ok_or(Error::TooLarge { operation: "all_gather", ty: ty.clone() })?;
        self.push(OpKind::AllGather { dimension, groups: groups.clone() }, &[operand], ty)
    }

    /// Combines the operands of the replicas of a group and gives each replica its part along a dimension. NaN may be
    /// lost as in [`Builder::all_reduce`].
    ///
    /// # Errors
    /// [`Error::Operation`] if the dimension does not exist or cannot be divided, the reducer is not defined for the
    /// element type, or groups are wrong as in [`Builder::all_reduce`].
    pub fn reduce_scatter(
        &mut self,
        operand: Value,
        reducer: Reducer,
        dimension: usize,
        groups: &CollectiveGroups,
    ) -> Result<Value> {
        let [mut ty] = self.types("reduce_scatter", [operand])?;
        ty.dims = exchangeable(reducer, ty.element)
            .and_then(|()| group_size(groups, self.num_replicas()))
            .and_then(|size| divided("the scattered dimension", &ty, dimension, size))
            .map_err(|problem| self.refuse("reduce_scatter", &[("operand", operand)], problem))?;
        self.push(OpKind::ReduceScatter { reducer, dimension, groups: groups.clone() }, &[operand], ty)
    }

    /// Divides the operand along `split_dimension` among the replicas of a group, and puts the parts that a replica
    /// gets one after another along `concat_dimension`.
    ///
    /// # Errors
    /// [`Error::Operation`] if a dimension does not exist, the first cannot be divided, or groups are wrong as in
    /// [`Builder::all_reduce`].
    pub fn all_to_all(
        &mut self,
        operand: Value,
        split_dimension: usize,
        concat_dimension: usize,
        groups: &CollectiveGroups,
    ) -> Result<Value> {
        let [mut ty] = self.types("all_to_all", [operand])?;
        let (size, dims) = in_range("concat_dimension", concat_dimension, ty.ndim())
            .and_then(|()| group_size(groups, self.num_replicas()))
            .and_then(|size| Ok((size, divided("split_dimension", &ty, split_dimension, size)?)))
            .map_err(|problem| self.refuse("all_to_all", &[("operand", operand)], problem))?;
        let before = ty.clone();
        ty.dims = dims;
        let joined = ty.dims[concat_dimension].checked_mul(size);
        ty.dims[concat_dimension] = joined.ok_or(Error::TooLarge { operation: "all_to_all", ty: before })?;
        let kind = OpKind::AllToAll { split_dimension, concat_dimension, groups: groups.clone() };
        self.push(kind, &[operand], ty)
    }

    /// Sends operands from replicas to others, by pairs of a sender and a receiver. A replica to which none sends gets
    /// zeros.
    ///
    /// # Errors
    /// [`Error::Operation`] if a replica does not exist, or sends or receives twice.
    pub fn collective_permute(&mut self, operand: Value, pairs: &[(usize, usize)]) -> Result<Value> {
        let [ty] = self.types("collective_permute", [operand])?;
        let replicas = self.num_replicas();
        for (place, &(sender, receiver)) in pairs.iter().enumerate() {
            let earlier = &pairs[..place];
            let problem = if sender >= replicas || receiver >= replicas {
                format!("{sender} sends to {receiver}, and the program has {replicas} replicas")
            } else if earlier.iter().any(|&(other, _)| other == sender) {
                format!("replica {sender} sends twice; name each sender once")
            } else if earlier.iter().any(|&(_, other)| other == receiver) {
                format!("replica {receiver} receives twice; name each receiver once")
            } else {
                continue;
            };
            return Err(self.refuse("collective_permute", &[("operand", operand)], problem));
        }
        self.push(OpKind::CollectivePermute { pairs: pairs.to_vec() }, &[operand], ty)
    }

    /// Returns the number of this replica, as a scalar of type u32.
    ///
    /// # Errors
    /// [`Error::TooLarge`], which a scalar never is.
    pub fn replica_id(&mut self) -> Result<Value> {
        self.push(OpKind::ReplicaId, &[], TensorType::scalar(ElementType::U32))
    }
}

/// Checks that a reducer is defined for an element type, and that devices can exchange it: none combines the bits of
/// integers of several replicas.
fn exchangeable(reducer: Reducer, element: ElementType) -> Result<(), String> {
    match reducer {
        Reducer::And | Reducer::Or if element != ElementType::Bool => {
            Err(format!("{reducer:?} expects truth values between replicas; devices do not exchange bits of integers"))
        }
        _ => reducible(reducer, element),
    }
}

/// Returns sizes with one dimension divided.
fn divided(what: &str, ty: &TensorType, dimension: usize, parts: usize) -> Result<Vec<usize>, String> {
    in_range(what, dimension, ty.ndim())?;
    let mut dims = ty.dims.clone();
    if !dims[dimension].is_multiple_of(parts.max(1)) {
        return Err(format!("{what} {dimension} of size {} cannot be divided among {parts} replicas", dims[dimension]));
    }
    dims[dimension] /= parts.max(1);
    Ok(dims)
}

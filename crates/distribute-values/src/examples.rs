//! Exclusion of replicas without examples from reductions.

use distribute_collectives::{ProcessGroup, ReduceOp, on_local_ranks};
use distribute_device::BufferRef;
use distribute_types::with_dtype;

use crate::elements::Arithmetic;
use crate::{Axis, IndexedRows, Leaves, PerReplica, Result, Structure, TensorStorage};

/// Returns the values to pass to [`reduce_structure`](crate::reduce_structure), one per replica of this process, so
/// that those of replicas without examples do not change the result. If one process of the group calls this, every
/// process must.
///
/// A mean over replicas becomes one over the replicas that have examples.
///
/// # Errors
/// [`Error::Axis`](crate::Error::Axis) if a value does not have the axis;
/// [`Error::Collective`](crate::Error::Collective) if a replica is missing or fails;
/// [`Error::Tensor`](crate::Error::Tensor) or [`Error::Device`](crate::Error::Device) if a value cannot be read or a
/// new one cannot be created.
pub fn weighed<M, S: Structure<M>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &PerReplica<S>,
    axis: &Axis,
) -> Result<Vec<S>> {
    let mut factor = 1.0;
    if op == ReduceOp::Mean && *axis == Axis::None {
        let with = on_local_ranks(groups, |local, group| {
            group.start().all_reduce(vec![u32::from(values.has_examples(local))], ReduceOp::Sum)
        })?;
        let all = groups.first().map_or(1, ProcessGroup::world_size);
        factor = all as f64 / f64::from(with.map_or(1, |with| with[0]).max(1));
    }
    let change = |local: usize, value: &S| match (op, axis) {
        (ReduceOp::Mean, Axis::None) if values.has_examples(local) => S::combine(&[value], &mut Times(factor)),
        // Not a product with 0, which is NaN for a value that is.
        (ReduceOp::Mean, Axis::None) => S::combine(&[value], &mut Neutral(ReduceOp::Sum)),
        _ if values.has_examples(local) => S::combine(&[value], &mut Times(1.0)),
        // A mean over an axis counts rows.
        (ReduceOp::Mean, axis) => S::combine(&[value], &mut Without(axis.axes())),
        _ => S::combine(&[value], &mut Neutral(op)),
    };
    values.iter().enumerate().map(|(local, value)| change(local, value)).collect()
}

/// Returns the values to pass to [`gather_structure`](crate::gather_structure), so that replicas without examples add
/// no rows.
///
/// # Errors
/// [`Error::Tensor`](crate::Error::Tensor) or [`Error::Device`](crate::Error::Device) if a value cannot be read or a
/// new one cannot be created.
pub fn with_rows<M, S: Structure<M>>(values: &PerReplica<S>, axis: usize) -> Result<Vec<S>> {
    let change = |(local, value): (usize, &S)| match values.has_examples(local) {
        true => S::combine(&[value], &mut Times(1.0)),
        false => S::combine(&[value], &mut Without(vec![axis])),
    };
    values.iter().enumerate().map(change).collect()
}

/// Multiplies every leaf.
struct Times(f64);

/// Replaces every element by a value that does not change the reduction.
struct Neutral(ReduceOp);

/// Removes all rows from every leaf, along some axes.
struct Without(Vec<usize>);

impl Leaves for Times {
    fn combine<L, T: TensorStorage<L>>(&mut self, parts: &[&T]) -> Result<T> {
        let value = parts[0];
        if self.0.to_bits() == 1f64.to_bits() {
            return Ok(value.clone());
        }
        with_dtype!(value.dtype()?, E => {
            let elements: Vec<E> = value.to_elements::<E>()?.into_iter().map(|element| element.times(self.0)).collect();
            value.beside(&value.shape(), BufferRef::from(&elements[..]))
        })
    }

    fn combine_rows<L, T: TensorStorage<L>>(&mut self, parts: &[&IndexedRows<T>]) -> Result<IndexedRows<T>> {
        let rows = self.combine::<L, T>(&[&parts[0].rows])?;
        Ok(IndexedRows { indices: parts[0].indices.clone(), rows })
    }
}

impl Leaves for Neutral {
    fn combine<L, T: TensorStorage<L>>(&mut self, parts: &[&T]) -> Result<T> {
        let value = parts[0];
        with_dtype!(value.dtype()?, E => {
            let elements = vec![<E as Arithmetic>::neutral(self.0); value.shape().iter().product()];
            value.beside(&value.shape(), BufferRef::from(&elements[..]))
        })
    }

    fn combine_rows<L, T: TensorStorage<L>>(&mut self, parts: &[&IndexedRows<T>]) -> Result<IndexedRows<T>> {
        parts[0].without_rows()
    }
}

impl Leaves for Without {
    fn combine<L, T: TensorStorage<L>>(&mut self, parts: &[&T]) -> Result<T> {
        let mut shape = parts[0].shape();
        for axis in &self.0 {
            // An axis out of range is reported by the operation itself.
            if let Some(extent) = shape.get_mut(*axis) {
                *extent = 0;
            }
        }
        if !shape.contains(&0) {
            return Ok(parts[0].clone());
        }
        with_dtype!(parts[0].dtype()?, E => parts[0].beside(&shape, BufferRef::from(&[] as &[E])))
    }

    fn combine_rows<L, T: TensorStorage<L>>(&mut self, parts: &[&IndexedRows<T>]) -> Result<IndexedRows<T>> {
        parts[0].without_rows()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostTensor, gather_structure, reduce_structure};

    /// Returns the values of three replicas, of which the last has no examples.
    fn values() -> PerReplica<(HostTensor, f64)> {
        let rows = |first: f64| HostTensor::new(&[2], vec![first, first + 1.0]).unwrap();
        PerReplica::new(vec![(rows(1.0), 2.0), (rows(3.0), 4.0), (rows(f64::NAN), 100.0)])
            .with_examples(&[true, true, false])
    }

    fn reduced(op: ReduceOp, axis: Axis) -> f64 {
        let groups = ProcessGroup::local(3).unwrap();
        let numbers = values()
            .map(|(_, number)| HostTensor::new(&[1], vec![*number]).unwrap())
            .with_examples(&[true, true, false]);
        let weighed = weighed(&groups, op, &numbers, &axis).unwrap();
        let result = reduce_structure(&groups, op, &weighed.iter().collect::<Vec<_>>(), &axis).unwrap();
        result.to_elements::<f64>().unwrap()[0]
    }

    #[test]
    fn replicas_without_examples_change_no_reduction() {
        for (op, expected) in [
            (ReduceOp::Sum, 6.0),
            (ReduceOp::Mean, 3.0),
            (ReduceOp::Max, 4.0),
            (ReduceOp::Min, 2.0),
            (ReduceOp::Product, 8.0),
        ] {
            assert_eq!(reduced(op, Axis::None), expected, "{op}");
        }
        assert_eq!(reduced(ReduceOp::Sum, Axis::At(0)), 6.0);
        assert_eq!(reduced(ReduceOp::Mean, Axis::At(0)), 3.0);
    }

    #[test]
    fn replicas_without_examples_add_no_rows() {
        let groups = ProcessGroup::local(3).unwrap();
        let rows = PerReplica::new(values().into_values().into_iter().map(|(rows, _)| rows).collect::<Vec<_>>())
            .with_examples(&[true, true, false]);
        let rows = with_rows(&rows, 0).unwrap();
        let joined = gather_structure(&groups, &rows.iter().collect::<Vec<_>>(), 0).unwrap();
        assert_eq!(joined.to_elements::<f64>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn a_value_that_is_no_number_is_left_out_too() {
        let groups = ProcessGroup::local(3).unwrap();
        for (op, expected) in [(ReduceOp::Sum, (vec![4.0, 6.0], 6.0)), (ReduceOp::Mean, (vec![2.0, 3.0], 3.0))] {
            let weighed = weighed(&groups, op, &values(), &Axis::None).unwrap();
            let (rows, number) =
                reduce_structure(&groups, op, &weighed.iter().collect::<Vec<_>>(), &Axis::None).unwrap();
            assert_eq!((rows.to_elements::<f64>().unwrap(), number), expected, "{op}");
        }
    }
}

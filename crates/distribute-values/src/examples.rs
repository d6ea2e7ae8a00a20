//! Exclusion of replicas without examples from reductions.

use distribute_collectives::{ProcessGroup, ReduceOp, on_local_ranks};
use distribute_device::BufferRef;
use distribute_types::with_dtype;

use crate::elements::{Arithmetic, Wide};
use crate::structure::reduce_leaves;
use crate::{Axis, IndexedRows, Leaves, PerReplica, Result, Structure, TensorStorage};

/// Reduces the structures of all replicas of all processes, one for each local replica, without those of replicas that
/// have no examples. If one process of the group calls this, every process must.
///
/// A mean over replicas is one over the replicas that have examples; it is computed in f64 if any has none.
///
/// # Errors
/// The errors of [`reduce_structure`](crate::reduce_structure).
pub fn reduce_examples<M, S: Structure<M>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &PerReplica<S>,
    axis: &Axis,
) -> Result<S> {
    let (mut counted, axes) = (None, axis.axes());
    if op == ReduceOp::Mean && axes.is_empty() {
        let with = on_local_ranks(groups, |local, group| {
            group.start().all_reduce(vec![u32::from(values.has_examples(local))], ReduceOp::Sum)
        })?;
        let all = groups.first().map_or(1, ProcessGroup::world_size);
        counted = with.map(|with| with[0].max(1)).filter(|with| *with as usize != all).map(f64::from);
    }
    let change = |(local, value): (usize, &S)| match op {
        _ if values.has_examples(local) => S::combine(&[value], &mut Same),
        ReduceOp::Mean if axes.is_empty() => S::combine(&[value], &mut Neutral(ReduceOp::Sum)),
        // A mean over an axis counts rows.
        ReduceOp::Mean => S::combine(&[value], &mut Without(axes.clone())),
        _ => S::combine(&[value], &mut Neutral(op)),
    };
    let values = values.iter().enumerate().map(change).collect::<Result<Vec<S>>>()?;
    reduce_leaves(groups, op, &values.iter().collect::<Vec<_>>(), axis, counted)
}

/// Returns the values to pass to [`gather_structure`](crate::gather_structure), so that replicas without examples add
/// no rows.
///
/// # Errors
/// [`Error::Tensor`](crate::Error::Tensor) or [`Error::Device`](crate::Error::Device) if a value cannot be read or a
/// new one cannot be created.
pub fn with_rows<M, S: Structure<M>>(values: &PerReplica<S>, axis: usize) -> Result<Vec<S>> {
    let change = |(local, value): (usize, &S)| match values.has_examples(local) {
        true => S::combine(&[value], &mut Same),
        false => S::combine(&[value], &mut Without(vec![axis])),
    };
    values.iter().enumerate().map(change).collect()
}

/// Keeps every leaf.
struct Same;

/// Replaces every element by a value that does not change the reduction.
struct Neutral(ReduceOp);

/// Removes all rows from every leaf, along some axes.
struct Without(Vec<usize>);

impl Leaves for Same {
    fn combine<L, T: TensorStorage<L>>(&mut self, parts: &[&T]) -> Result<T> {
        Ok(parts[0].clone())
    }

    fn combine_rows<L, T: TensorStorage<L>>(&mut self, parts: &[&IndexedRows<T>]) -> Result<IndexedRows<T>> {
        Ok(parts[0].clone())
    }
}

impl Leaves for Neutral {
    fn combine<L, T: TensorStorage<L>>(&mut self, parts: &[&T]) -> Result<T> {
        let value = parts[0];
        with_dtype!(value.dtype()?, E => {
            let elements = vec![E::narrow(<E as Arithmetic>::Wide::identity(self.0)); value.shape().iter().product()];
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
    use crate::elements::F16;
    use crate::{HostTensor, gather_structure};

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
        reduce_examples(&groups, op, &numbers, &axis).unwrap().to_elements::<f64>().unwrap()[0]
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
            assert_eq!(reduced(op, Axis::Over(Vec::new())), expected, "{op}");
        }
        assert_eq!(reduced(ReduceOp::Sum, Axis::At(0)), 6.0);
        assert_eq!(reduced(ReduceOp::Mean, Axis::At(0)), 3.0);
    }

    #[test]
    fn integers_are_combined_bit_by_bit_without_replicas_that_have_no_examples() {
        let groups = ProcessGroup::local(3).unwrap();
        for (op, expected) in [(ReduceOp::BitAnd, 0b0100), (ReduceOp::BitOr, 0b1110), (ReduceOp::BitXor, 0b1010)] {
            let values = PerReplica::new(vec![0b1100_u32, 0b0110, 0b0001]).with_examples(&[true, true, false]);
            assert_eq!(reduce_examples(&groups, op, &values, &Axis::None).unwrap(), expected, "{op}");
        }
    }

    #[test]
    fn a_mean_in_16_bits_without_some_replicas_neither_overflows_nor_rounds_twice() {
        let groups = ProcessGroup::local(3).unwrap();
        let half = |value: f64| HostTensor::new(&[1], vec![F16::from_f64(value)]).unwrap();
        for (first, second, mean) in [(60000.0, 60000.0, 60000.0), (1.0, 1.0, 1.0), (50000.0, 30000.0, 40000.0)] {
            let values =
                PerReplica::new(vec![half(first), half(second), half(7.0)]).with_examples(&[true, true, false]);
            let got = reduce_examples(&groups, ReduceOp::Mean, &values, &Axis::None).unwrap();
            assert_eq!(got.to_elements::<F16>().unwrap(), [F16::from_f64(mean)]);
        }
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
            let (rows, number) = reduce_examples(&groups, op, &values(), &Axis::None).unwrap();
            assert_eq!((rows.to_elements::<f64>().unwrap(), number), expected, "{op}");
        }
    }
}

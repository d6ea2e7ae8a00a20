//! Many components to one value.

use distribute_collectives::{ProcessGroup, Rank, ReduceOp, on_local_ranks};
use distribute_device::{BufferRef, DType};

use crate::elements::{Arithmetic, place, sum_axes, with_type};
use crate::structure::Pending;
use crate::{Error, PerReplica, Result, TensorStorage};

/// Which axes of a value a reduction goes over, besides going over replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Axis {
    /// Over replicas only.
    #[default]
    None,
    /// Over replicas and one axis, such as the batch.
    At(usize),
    /// Over replicas and several axes.
    Over(Vec<usize>),
}

impl Axis {
    pub(crate) fn axes(&self) -> Vec<usize> {
        match self {
            Axis::None => Vec::new(),
            Axis::At(axis) => vec![*axis],
            Axis::Over(axes) => {
                let mut axes = axes.clone();
                axes.sort_unstable();
                axes.dedup();
                axes
            }
        }
    }
}

/// Reduces the components of all replicas, of every process, to one value.
///
/// Without an axis, components are combined as they are: `Mean` is the plain mean of the replicas' values, which must have
/// equal shapes. With an axis, each component is first summed over it; `Mean` then divides the total by the number of
/// summed elements on all replicas, so replicas with unequal batches still give the true mean.
///
/// `groups` holds the local ranks of a group in which every process calls this.
///
/// # Errors
/// [`Error::Shape`], [`Error::Axis`], and the collective's errors.
///
/// # Source
/// `tf.distribute.Strategy.reduce`.
pub fn reduce_values<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &PerReplica<T>,
    axis: &Axis,
) -> Result<T> {
    begin_reduce(groups, op, &values.values().iter().collect::<Vec<_>>(), axis)?()
}

/// Begins what [`reduce_values`] does.
pub(crate) fn begin_reduce<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &[&T],
    axis: &Axis,
) -> Result<Pending<T>> {
    let first = check_components(groups, values)?;
    let axes = axis.axes();
    for value in values {
        let shape = value.shape();
        if let Some(axis) = axes.iter().find(|axis| **axis >= shape.len()) {
            return Err(Error::Axis { axis: *axis, shape });
        }
    }
    with_type!(first.dtype()?, E => reduce_typed::<E, L, T>(groups, op, values, &axes, first.clone()))
}

fn reduce_typed<E: Arithmetic, L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &[&T],
    axes: &[usize],
    first: T,
) -> Result<Pending<T>> {
    let weighted = !axes.is_empty() && op == ReduceOp::Mean;
    let mut summed = Vec::new();
    for (replica, value) in values.iter().enumerate() {
        let full = value.shape();
        let count: u64 = axes.iter().map(|axis| full[*axis] as u64).product();
        let elements = value.to_elements::<E>()?;
        let (kept, sums) = if axes.is_empty() { (full, elements) } else { sum_axes(&elements, &full, axes) };
        summed.push((kept, sums, count));
        if summed[replica].0 != summed[0].0 {
            let (got, expected) = (summed[replica].0.clone(), summed[0].0.clone());
            let remedy = "reduce over the axis in which the replicas differ";
            return Err(Error::Shape { what: "reduce", replica, got, expected, remedy });
        }
    }
    let shape = summed[0].0.clone();
    let mut works = Vec::new();
    let mut counts = Vec::new();
    for (group, (_, sums, count)) in groups.iter().zip(summed) {
        works.push(group.all_reduce_async(sums, if weighted { ReduceOp::Sum } else { op })?);
        if weighted {
            counts.push(group.all_reduce_async(vec![count], ReduceOp::Sum)?);
        }
    }
    Ok(Box::new(move || {
        let mut result = Vec::new();
        for work in works {
            result = work.wait()?;
        }
        let mut total = 0;
        for count in counts {
            total = count.wait()?.first().copied().unwrap_or(0);
        }
        if total > 0 {
            result.iter_mut().for_each(|sum| *sum = sum.ratio(total));
        }
        first.beside(&shape, BufferRef::from(&result[..]))
    }))
}

/// Concatenates the components of all replicas, of every process, along an axis.
///
/// Shapes may differ in that axis only. `groups` holds the local ranks of a group in which every process calls this.
///
/// # Errors
/// [`Error::Shape`], [`Error::Axis`], and the collective's errors.
///
/// # Source
/// `tf.distribute.Strategy.gather`.
pub fn gather_values<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    values: &PerReplica<T>,
    axis: usize,
) -> Result<T> {
    begin_gather(groups, &values.values().iter().collect::<Vec<_>>(), axis)?()
}

/// Begins what [`gather_values`] does; shapes are exchanged at once.
pub(crate) fn begin_gather<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    values: &[&T],
    axis: usize,
) -> Result<Pending<T>> {
    let first = check_components(groups, values)?;
    let ndim = first.shape().len();
    if axis >= ndim {
        return Err(Error::Axis { axis, shape: first.shape() });
    }
    let shapes = gather_shapes(groups, values)?;
    for (replica, shape) in shapes.iter().enumerate() {
        let equal = shape.len() == ndim && (0..ndim).all(|dim| dim == axis || shape[dim] == shapes[0][dim]);
        if !equal {
            let remedy = "shapes may differ in the gathered axis only";
            return Err(Error::Shape {
                what: "gather",
                replica,
                got: shape.clone(),
                expected: shapes[0].clone(),
                remedy,
            });
        }
    }
    with_type!(first.dtype()?, E => gather_typed::<E, L, T>(groups, values, axis, shapes, first.clone()))
}

/// The shapes of all replicas' values, in rank order.
fn gather_shapes<L, T: TensorStorage<L>>(groups: &[ProcessGroup], values: &[&T]) -> Result<Vec<Vec<usize>>> {
    let gathered = on_local_ranks(groups, |local, group| {
        let shape = values[local].shape();
        let mut encoded = vec![0u64; MAX_NDIM + 1];
        encoded[0] = shape.len() as u64;
        for (slot, length) in encoded[1..].iter_mut().zip(&shape) {
            *slot = *length as u64;
        }
        group.all_gather_async(encoded, vec![0u64; (MAX_NDIM + 1) * group.world_size()])
    })?;
    let [_, all] = gathered.unwrap_or_default();
    let decode =
        |encoded: &[u64]| encoded[1..].iter().take(encoded[0] as usize).map(|length| *length as usize).collect();
    Ok(all.chunks_exact(MAX_NDIM + 1).map(decode).collect())
}

fn gather_typed<E: Arithmetic, L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    values: &[&T],
    axis: usize,
    shapes: Vec<Vec<usize>>,
    first: T,
) -> Result<Pending<T>> {
    // Every rank contributes as many elements as the largest: collectives move equal counts.
    let largest = shapes.iter().map(|shape| shape.iter().product::<usize>()).max().unwrap_or(0);
    let mut works = Vec::new();
    for (group, value) in groups.iter().zip(values) {
        let mut elements: Vec<E> = value.to_elements()?;
        elements.resize(largest, E::default());
        works.push(group.all_gather_async(elements, vec![E::default(); largest * group.world_size()])?);
    }
    Ok(Box::new(move || {
        let mut all: Vec<E> = Vec::new();
        for work in works {
            let [_, gathered] = work.wait()?;
            all = gathered;
        }
        let inner: usize = shapes[0][axis + 1..].iter().product();
        let mut shape = shapes[0].clone();
        shape[axis] = shapes.iter().map(|shape| shape[axis]).sum();
        let mut joined = vec![E::default(); shape.iter().product()];
        let mut at = 0;
        for (rank, part) in shapes.iter().enumerate() {
            let len: usize = part.iter().product();
            let source = &all[rank * largest..rank * largest + len];
            place(&mut joined, shape[axis], at..at + part[axis], inner, source);
            at += part[axis];
        }
        first.beside(&shape, BufferRef::from(&joined[..]))
    }))
}

/// The first process's `value`, on every process.
///
/// Shapes and types must be alike on all. `groups` holds the local ranks of a group in which every process calls this.
///
/// # Errors
/// The collective's.
pub fn broadcast_value<L, T: TensorStorage<L>>(groups: &[ProcessGroup], value: &T) -> Result<T> {
    with_type!(value.dtype()?, E => {
        let elements = on_local_ranks::<_, Error>(groups, |_, group| {
            Ok(group.broadcast_async(value.to_elements::<E>()?, Rank(0))?)
        })?;
        value.beside(&value.shape(), BufferRef::from(&elements.unwrap_or_default()[..]))
    })
}

/// Most dimensions a gathered value may have; candle and burn stay below.
const MAX_NDIM: usize = 8;

fn check_components<'a, L, T: TensorStorage<L>>(groups: &[ProcessGroup], values: &[&'a T]) -> Result<&'a T> {
    if values.len() != groups.len() {
        return Err(Error::Components { what: "the value", got: values.len(), expected: groups.len() });
    }
    let none = Error::Components { what: "the value", got: 0, expected: groups.len() };
    values.first().copied().ok_or(none)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostTensor;

    fn pair(a: HostTensor, b: HostTensor) -> PerReplica<HostTensor> {
        PerReplica::new(vec![a, b])
    }

    fn reduce(op: ReduceOp, values: &PerReplica<HostTensor>, axis: Axis) -> Result<(Vec<usize>, Vec<f64>)> {
        let groups = ProcessGroup::local(2)?;
        let value = reduce_values(&groups, op, values, &axis)?;
        Ok((value.shape(), value.to_elements()?))
    }

    #[test]
    fn a_mean_over_an_axis_is_weighted_by_counts() {
        let values =
            pair(HostTensor::new(&[3], vec![1.0, 2.0, 3.0]).unwrap(), HostTensor::new(&[1], vec![10.0]).unwrap());
        assert_eq!(reduce(ReduceOp::Mean, &values, Axis::At(0)).unwrap(), (vec![], vec![4.0]));
        assert_eq!(reduce(ReduceOp::Sum, &values, Axis::At(0)).unwrap(), (vec![], vec![16.0]));
        let error = reduce(ReduceOp::Sum, &values, Axis::None).unwrap_err().to_string();
        assert!(error.contains("[1]") && error.contains("[3]"), "{error}");
    }

    #[test]
    fn axes_of_the_reference_example() {
        let make = || HostTensor::new(&[2, 2], vec![1.0, 2.0, 3.0, 4.0]).unwrap();
        let values = pair(make(), make());
        assert_eq!(reduce(ReduceOp::Mean, &values, Axis::At(0)).unwrap(), (vec![2], vec![2.0, 3.0]));
        assert_eq!(reduce(ReduceOp::Mean, &values, Axis::Over(vec![0, 1])).unwrap(), (vec![], vec![2.5]));
        assert_eq!(reduce(ReduceOp::Sum, &values, Axis::At(0)).unwrap(), (vec![2], vec![8.0, 12.0]));
        assert_eq!(reduce(ReduceOp::Mean, &values, Axis::None).unwrap().1, [1.0, 2.0, 3.0, 4.0]);
        assert!(matches!(reduce(ReduceOp::Sum, &values, Axis::At(2)), Err(Error::Axis { axis: 2, .. })));
    }

    #[test]
    fn gather_joins_along_any_axis() {
        let groups = ProcessGroup::local(2).unwrap();
        let values = pair(
            HostTensor::new(&[2, 1], vec![1.0, 2.0]).unwrap(),
            HostTensor::new(&[2, 2], vec![3.0, 4.0, 5.0, 6.0]).unwrap(),
        );
        let joined = gather_values(&groups, &values, 1).unwrap();
        assert_eq!(joined.shape(), [2, 3]);
        assert_eq!(joined.to_elements::<f64>().unwrap(), [1.0, 3.0, 4.0, 2.0, 5.0, 6.0]);
        let groups = ProcessGroup::local(2).unwrap();
        assert!(matches!(gather_values(&groups, &values, 0), Err(Error::Shape { .. })));
    }
}

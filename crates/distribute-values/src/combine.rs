//! Reductions and concatenations of the replicas' values.

use distribute_collectives::{ProcessGroup, Rank, ReduceOp, on_local_ranks};
use distribute_device::{BufferRef, DType};
use distribute_types::{FNV32, fnv1a_32, with_dtype};

use crate::elements::{Arithmetic, Wide, fold_axes, place};
use crate::{Error, PerReplica, Result, TensorStorage};

/// The axes that a reduction goes over, besides the replicas.
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

/// Reduces the components of all replicas of all processes to one value.
///
/// Without an axis, components are combined element by element, so they must have equal shapes; `Mean` is the plain
/// mean of the replicas' values. With an axis, `op` is applied over the axis and over the replicas, whose lengths along
/// it may differ or be 0: `Mean` divides by the number of elements on all replicas, so replicas with unequal batches
/// give the true mean. `Min` and `Max` are NaN if any element is NaN, and -0 is less than 0.
///
/// Reductions over an axis of floating-point values compute in f64 and round once. Over no elements at all, `Sum` is 0,
/// `Product` 1, `Mean` NaN, `Max` the least value of the type (-∞ for floating-point types) and `Min` the greatest.
/// Sums and products of integers wrap.
///
/// A mean of integers is an error, because it is not an integer: convert the values to f64 first.
///
/// `groups` holds the local ranks of a group in which every process calls this.
///
/// # Errors
/// - [`Error::Components`] if there is not one value per local replica.
/// - [`Error::Shape`] if shapes differ, and [`Error::Axis`] if an axis is outside the values' shape.
/// - [`Error::Reduction`] for a mean of integers and bitwise operations on floating-point values.
/// - [`Error::Collective`] if a replica is missing or fails.
/// - [`Error::Tensor`] or [`Error::Device`] if a value cannot be read or the result cannot be created.
/// # Source
/// `tf.distribute.Strategy.reduce`, which gives the mean of integers as a floating-point number.
pub fn reduce_values<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &PerReplica<T>,
    axis: &Axis,
) -> Result<T> {
    begin_reduce(groups, op, &values.iter().collect::<Vec<_>>(), axis, (None, Form::BARE))?()
}

/// Waits for an operation that was started, and returns its result.
pub(crate) type Pending<T> = Box<dyn FnOnce() -> Result<T>>;

/// Starts the reduction of [`reduce_values`]; a mean without an axis divides by `with_examples` if given, and by the
/// number of replicas otherwise.
pub(crate) fn begin_reduce<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &[&T],
    axis: &Axis,
    (with_examples, form): (Option<f64>, Form),
) -> Result<Pending<T>> {
    let first = check_components(groups, values)?;
    check_op(op, first.dtype()?)?;
    let axes = axis.axes();
    for value in values {
        let shape = value.shape();
        if let Some(axis) = axes.iter().find(|axis| **axis >= shape.len()) {
            return Err(Error::Axis { axis: *axis, shape });
        }
    }
    let divisor = with_examples.filter(|_| op == ReduceOp::Mean);
    with_dtype!(first.dtype()?, E => match axes.is_empty() && divisor.is_none() {
        true => reduce_whole::<E, L, T>(groups, op, values, first.clone(), form),
        false => reduce_over::<E, L, T>(groups, (op, divisor), values, &axes, first.clone(), form),
    })
}

/// Checks, before anything is sent, that an operation is defined for values of a type.
fn check_op(op: ReduceOp, dtype: DType) -> Result<()> {
    let remedy = match op {
        ReduceOp::Mean if !dtype.is_float() => {
            "a mean of integers is not an integer; convert the values to f64 first, or reduce with Sum and divide"
        }
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor if dtype.is_float() => {
            "bitwise operations take integers; convert the values, or use Min, Max, Sum or Product"
        }
        ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Min | ReduceOp::Max | ReduceOp::Product => return Ok(()),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => return Ok(()),
        // An operator of a later version.
        _ => return Ok(()),
    };
    Err(Error::Reduction { op, dtype, remedy })
}

/// Combines values of equal shapes, element by element.
fn reduce_whole<E: Arithmetic, L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &[&T],
    first: T,
    form: Form,
) -> Result<Pending<T>> {
    let shape = first.shape();
    check_shapes(values.iter().map(|value| value.shape()))?;
    let tag = form.tag(&shape);
    let elements = values.iter().map(|value| value.to_elements::<E>()).collect::<Result<Vec<_>>>()?;
    let works = groups.iter().zip(elements).map(|(group, elements)| group.start().tag(tag).all_reduce(elements, op));
    let works = works.collect::<Result<Vec<_>, _>>()?;
    Ok(Box::new(move || {
        let mut result = Vec::new();
        for work in works {
            result = work.wait()?;
        }
        first.beside(&shape, BufferRef::from(&result[..]))
    }))
}

/// Reduces values over axes in the wide type, and rounds once. A mean divides by `divisor`, or by the number of
/// elements.
fn reduce_over<E: Arithmetic, L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    (op, divisor): (ReduceOp, Option<f64>),
    values: &[&T],
    axes: &[usize],
    first: T,
    form: Form,
) -> Result<Pending<T>> {
    let mut folded = Vec::with_capacity(values.len());
    let mut counts = Vec::new();
    for value in values {
        let full = value.shape();
        counts.push(axes.iter().map(|axis| full[*axis] as f64).product::<f64>());
        folded.push(fold_axes(op, &value.to_elements::<E>()?, &full, axes));
    }
    check_shapes(folded.iter().map(|(kept, _)| kept.clone()))?;
    let shape = folded[0].0.clone();
    let tag = form.tag(&shape);
    let over_replicas = if op == ReduceOp::Mean { ReduceOp::Sum } else { op };
    let (mut works, mut counted) = (Vec::new(), Vec::new());
    for ((group, (_, partial)), count) in groups.iter().zip(folded).zip(counts) {
        works.push(group.start().tag(tag).all_reduce(partial, over_replicas)?);
        if op == ReduceOp::Mean && divisor.is_none() {
            counted.push(group.start().tag(tag).all_reduce(vec![count], ReduceOp::Sum)?);
        }
    }
    Ok(Box::new(move || {
        let mut result = Vec::new();
        for work in works {
            result = work.wait()?;
        }
        let mut total = divisor;
        for count in counted {
            total = count.wait()?.first().copied();
        }
        let rounded: Vec<E> = match total {
            Some(total) => result.into_iter().map(|sum| E::narrow(sum.mean(total))).collect(),
            None => result.into_iter().map(E::narrow).collect(),
        };
        first.beside(&shape, BufferRef::from(&rounded[..]))
    }))
}

fn check_shapes(shapes: impl IntoIterator<Item = Vec<usize>>) -> Result<()> {
    let mut shapes = shapes.into_iter();
    let Some(expected) = shapes.next() else { return Ok(()) };
    match (1..).zip(shapes).find(|(_, got)| *got != expected) {
        None => Ok(()),
        Some((replica, got)) => {
            let remedy = "reduce over the axis in which the replicas differ";
            Err(Error::Shape { what: "reduce", replica, got, expected, remedy })
        }
    }
}

/// Concatenates the components of all replicas of all processes along an axis.
///
/// Shapes may differ in that axis only. `groups` holds the local ranks of a group in which every process calls this.
///
/// # Errors
/// - [`Error::Components`] if there is not one value per local replica.
/// - [`Error::Shape`] if shapes differ in another axis, and [`Error::Axis`] if the axis is outside the values' shape.
/// - [`Error::Collective`] if a replica is missing or fails.
/// - [`Error::Tensor`] or [`Error::Device`] if a value cannot be read or the result cannot be created.
///
/// # Source
/// `tf.distribute.Strategy.gather`.
pub fn gather_values<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    values: &PerReplica<T>,
    axis: usize,
) -> Result<T> {
    begin_gather(groups, &values.iter().collect::<Vec<_>>(), axis, Form::BARE)?()
}

/// Starts the concatenation of [`gather_values`]; shapes are exchanged at once.
pub(crate) fn begin_gather<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    values: &[&T],
    axis: usize,
    form: Form,
) -> Result<Pending<T>> {
    let first = check_components(groups, values)?;
    let ndim = first.shape().len();
    if axis >= ndim {
        return Err(Error::Axis { axis, shape: first.shape() });
    }
    let shapes = gather_shapes(groups, values, form)?;
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
    with_dtype!(first.dtype()?, E => gather_typed::<E, L, T>(groups, values, axis, shapes, first.clone()))
}

/// Returns the shapes of all replicas' values, in rank order.
fn gather_shapes<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    values: &[&T],
    form: Form,
) -> Result<Vec<Vec<usize>>> {
    // The number of dimensions, and the first ones; zeros if there are fewer.
    let exchange = |ndim: usize| {
        let gathered = on_local_ranks(groups, |local, group| {
            let shape = values[local].shape();
            let mut encoded = vec![0u64; ndim + 1];
            encoded[0] = shape.len() as u64;
            for (slot, length) in encoded[1..].iter_mut().zip(&shape) {
                *slot = *length as u64;
            }
            group.start().tag(form.tag(&[])).all_gather(encoded, vec![0u64; (ndim + 1) * group.world_size()])
        })?;
        let [_, all] = gathered.unwrap_or_default();
        Ok::<_, Error>(all)
    };
    let mut ndim = USUAL_NDIM;
    let mut all = exchange(ndim)?;
    let largest = all.iter().step_by(ndim + 1).max().map_or(0, |largest| *largest as usize);
    if largest > ndim {
        // Known to all replicas.
        ndim = largest;
        all = exchange(ndim)?;
    }
    let decode =
        |encoded: &[u64]| encoded[1..].iter().take(encoded[0] as usize).map(|length| *length as usize).collect();
    Ok(all.chunks_exact(ndim + 1).map(decode).collect())
}

fn gather_typed<E: Arithmetic, L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    values: &[&T],
    axis: usize,
    shapes: Vec<Vec<usize>>,
    first: T,
) -> Result<Pending<T>> {
    // Every rank contributes as many elements as the largest, since the collective moves equal counts.
    let largest = shapes.iter().map(|shape| shape.iter().product::<usize>()).max().unwrap_or(0);
    let mut works = Vec::new();
    for (group, value) in groups.iter().zip(values) {
        let mut elements: Vec<E> = value.to_elements()?;
        elements.resize(largest, E::default());
        works.push(group.start().all_gather(elements, vec![E::default(); largest * group.world_size()])?);
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

/// The form of a nest up to one of its leaves: the kinds, keys and lengths of the containers that were entered before;
/// or the name of a variable.
///
/// Calls of collectives are tagged with it and the value's shape, since values of equal number and type would be
/// combined with each other otherwise, whatever they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form(u32);

impl Form {
    /// The form of a value that is not in a nest.
    pub(crate) const BARE: Form = Form(FNV32);

    /// Returns the form after a container was entered.
    pub(crate) fn within(self, container: &str) -> Form {
        Form(fnv1a_32(self.0, container.bytes().chain([0])))
    }

    /// Returns the form of a variable's value, which values of other variables do not have.
    pub(crate) fn of_variable(name: &str) -> Form {
        Form::BARE.within("variable").within(name)
    }

    pub(crate) fn tag(self, shape: &[usize]) -> u32 {
        fnv1a_32(self.0, shape.iter().flat_map(|extent| (*extent as u64).to_le_bytes()))
    }
}

/// Copies the first process's `value` to every process.
///
/// Shapes and types must be equal on all. `groups` holds the local ranks of a group in which every process calls this.
///
/// # Errors
/// [`Error::Collective`] if shapes or types differ, or a process is missing or fails; [`Error::Tensor`] or
/// [`Error::Device`] if the value cannot be read or the result cannot be created.
pub fn broadcast_value<L, T: TensorStorage<L>>(groups: &[ProcessGroup], value: &T) -> Result<T> {
    broadcast_from(groups, value, Rank(0))
}

/// Copies the `value` of a rank to every rank, as [`broadcast_value`] does that of the first one.
///
/// # Errors
/// The errors of [`broadcast_value`].
pub fn broadcast_from<L, T: TensorStorage<L>>(groups: &[ProcessGroup], value: &T, root: Rank) -> Result<T> {
    broadcast_as(groups, value, root, Form::BARE)
}

/// Copies a value of this form, as [`broadcast_from`] does one that is not in a nest.
pub(crate) fn broadcast_as<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    value: &T,
    root: Rank,
    form: Form,
) -> Result<T> {
    let shape = value.shape();
    let tag = form.tag(&shape);
    with_dtype!(value.dtype()?, E => {
        let elements = on_local_ranks::<_, Error>(groups, |_, group| {
            Ok(group.start().tag(tag).broadcast(value.to_elements::<E>()?, root)?)
        })?;
        value.beside(&shape, BufferRef::from(&elements.unwrap_or_default()[..]))
    })
}

/// Number of dimensions up to which the shapes of gathered values are exchanged at once.
const USUAL_NDIM: usize = 8;

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

    /// Reduces rows of unequal numbers on two replicas over the rows.
    fn over_rows<T: distribute_device::Element>(op: ReduceOp, a: Vec<T>, b: Vec<T>) -> Result<T> {
        let rows = |of: Vec<T>| HostTensor::new(&[of.len()], of);
        let groups = ProcessGroup::local(2)?;
        let value = reduce_values(&groups, op, &PerReplica::new(vec![rows(a)?, rows(b)?]), &Axis::At(0))?;
        assert_eq!(value.shape(), [0usize; 0]);
        Ok(value.to_elements::<T>()?[0])
    }

    #[test]
    fn every_operation_is_applied_over_the_axis() {
        use ReduceOp::{BitAnd, BitOr, BitXor, Max, Mean, Min, Product, Sum};
        for (op, float, whole) in
            [(Sum, 9.0, 9), (Mean, 1.8, 0), (Min, -4.0, -4), (Max, 7.0, 7), (Product, -168.0, -168)]
        {
            assert_eq!(over_rows(op, vec![3.0f64, -4.0, 2.0], vec![1.0, 7.0]).unwrap(), float, "{op}");
            let narrow = over_rows(op, vec![3.0f32, -4.0, 2.0], vec![1.0, 7.0]).unwrap();
            assert_eq!(narrow, float as f32, "{op} of f32");
            if op != Mean {
                assert_eq!(over_rows(op, vec![3i32, -4, 2], vec![1, 7]).unwrap(), whole, "{op} of i32");
            }
        }
        for (op, expected) in [(BitAnd, 4u8), (BitOr, 15), (BitXor, 11)] {
            assert_eq!(over_rows(op, vec![6u8, 12], vec![5, 4]).unwrap(), expected, "{op}");
        }
        let values = pair(
            HostTensor::new(&[2, 2], vec![1.0, 2.0, 3.0, 4.0]).unwrap(),
            HostTensor::new(&[1, 2], vec![-5.0, 9.0]).unwrap(),
        );
        assert_eq!(reduce(ReduceOp::Max, &values, Axis::At(0)).unwrap(), (vec![2], vec![3.0, 9.0]));
        assert_eq!(reduce(ReduceOp::Min, &values, Axis::Over(vec![0, 1])).unwrap(), (vec![], vec![-5.0]));
    }

    #[test]
    fn a_replica_without_rows_changes_nothing() {
        for (op, expected, of_none) in [
            (ReduceOp::Sum, -3.0f32, 0.0f32),
            (ReduceOp::Product, 2.0, 1.0),
            (ReduceOp::Min, -2.0, f32::INFINITY),
            (ReduceOp::Max, -1.0, f32::NEG_INFINITY),
        ] {
            assert_eq!(over_rows(op, vec![], vec![-1.0f32, -2.0]).unwrap(), expected, "{op}");
            assert_eq!(over_rows::<f32>(op, vec![], vec![]).unwrap(), of_none, "{op} of nothing");
        }
        assert_eq!(over_rows(ReduceOp::Mean, vec![], vec![-1.0f32, -2.0]).unwrap(), -1.5);
        assert!(over_rows::<f32>(ReduceOp::Mean, vec![], vec![]).unwrap().is_nan());
        assert_eq!(over_rows(ReduceOp::Max, vec![], vec![-7i32]).unwrap(), -7);
        assert_eq!(over_rows(ReduceOp::Min, vec![], vec![9u8]).unwrap(), 9);
    }

    #[test]
    fn hard_values_over_an_axis() {
        use distribute_device::{bf16, f16};
        let halves = |of: &[f32]| of.iter().map(|x| f16::from_f32(*x)).collect::<Vec<f16>>();
        // The sum of these exceeds f16; their mean does not.
        let mean = over_rows(ReduceOp::Mean, halves(&[60000.0, 60000.0]), halves(&[30000.0])).unwrap();
        assert_eq!(mean, f16::from_f32(50000.0));
        // A little more than half way between 2048 and 2050, by less than f32 has, and the same for bf16.
        let sum = over_rows(ReduceOp::Sum, halves(&[2048.0, 1.0]), halves(&[2f32.powi(-24)])).unwrap();
        assert_eq!(sum, f16::from_f32(2050.0));
        let short = |of: &[f32]| of.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<bf16>>();
        let sum = over_rows(ReduceOp::Sum, short(&[256.0, 1.0]), short(&[2f32.powi(-30)])).unwrap();
        assert_eq!(sum, bf16::from_f32(258.0));
        // Added one by one in f32, the small ones would be lost.
        let mut many = vec![1e8f32];
        many.extend(vec![1.0; 999]);
        assert_eq!(over_rows(ReduceOp::Sum, many.clone(), many).unwrap(), 200_001_998.0);
        let small = vec![bf16::from_f32(1.0); 1000];
        assert_eq!(over_rows(ReduceOp::Sum, small.clone(), small).unwrap(), bf16::from_f32(2000.0));
        for rows in [[0.0f32, -0.0], [-0.0, 0.0]] {
            let [least, greatest] =
                [ReduceOp::Min, ReduceOp::Max].map(|op| over_rows(op, rows.to_vec(), rows.to_vec()).unwrap());
            assert!(least.is_sign_negative() && greatest.is_sign_positive(), "{rows:?}");
        }
        for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Product] {
            assert!(over_rows(op, vec![1.0f32, f32::NAN], vec![2.0]).unwrap().is_nan(), "{op}");
        }
        assert_eq!(over_rows(ReduceOp::Min, vec![i32::MIN, 5], vec![i32::MAX]).unwrap(), i32::MIN);
        assert_eq!(over_rows(ReduceOp::Max, vec![u64::MAX - 1], vec![u64::MAX]).unwrap(), u64::MAX);
    }

    #[test]
    fn a_negative_zero_on_one_replica_is_less_than_a_zero_on_another() {
        for rows in [[0.0f32, -0.0], [-0.0, 0.0]] {
            let [least, greatest] =
                [ReduceOp::Min, ReduceOp::Max].map(|op| over_rows(op, vec![rows[0]], vec![rows[1]]).unwrap());
            assert!(least.is_sign_negative() && greatest.is_sign_positive(), "{rows:?}");
        }
    }

    #[test]
    fn what_is_not_defined_is_a_sentence_on_any_axis() {
        for axis in [Axis::None, Axis::At(0)] {
            let says = |op, values: PerReplica<HostTensor<i32>>| {
                let groups = ProcessGroup::local(1).unwrap();
                reduce_values(&groups, op, &values, &axis).unwrap_err().to_string()
            };
            // The mean of 4 and 5 is 4.5, which is not an i32.
            let whole = || PerReplica::new(vec![HostTensor::new(&[2], vec![4i32, 5]).unwrap()]);
            let error = says(ReduceOp::Mean, whole());
            assert!(error.contains("mean of i32") && error.contains("convert the values to f64"), "{error}");
            let float = PerReplica::new(vec![HostTensor::new(&[1], vec![1.0]).unwrap()]);
            let groups = ProcessGroup::local(1).unwrap();
            let error = reduce_values(&groups, ReduceOp::BitXor, &float, &axis).unwrap_err().to_string();
            assert!(error.contains("bxor of f64") && error.contains("take integers"), "{error}");
        }
    }

    #[test]
    fn values_of_many_dimensions_are_gathered() {
        for ndim in [8, 9, 12] {
            let mut shape = vec![1; ndim];
            let part = |rows: usize, shape: &mut Vec<usize>| {
                (shape[ndim - 2], shape[ndim - 1]) = (rows, 2);
                HostTensor::new(shape, (0..2 * rows).map(|at| at as f64).collect()).unwrap()
            };
            let values = pair(part(1, &mut shape), part(2, &mut shape));
            let joined = gather_values(&ProcessGroup::local(2).unwrap(), &values, ndim - 2).unwrap();
            (shape[ndim - 2], shape[ndim - 1]) = (3, 2);
            assert_eq!(
                (joined.shape(), joined.to_elements::<f64>().unwrap()),
                (shape, vec![0.0, 1.0, 0.0, 1.0, 2.0, 3.0])
            );
        }
        let values = pair(HostTensor::new(&[1; 10], vec![1.0]).unwrap(), HostTensor::new(&[1; 9], vec![1.0]).unwrap());
        let error = gather_values(&ProcessGroup::local(2).unwrap(), &values, 0).unwrap_err();
        assert!(
            matches!(&error, Error::Shape { got, expected, .. } if got.len() == 9 && expected.len() == 10),
            "{error}"
        );
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

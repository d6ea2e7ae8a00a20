//! The differentiable operations on tensor groups.
//!
//! Outside the split layers of a model all ranks of a tensor group hold equal activations, and backward gives each of
//! them the whole gradient of these. Inside, each rank has a part of the features. The operations lie between: their
//! backward passes keep both properties, so that gradients of variables that are not split are equal on all ranks, and
//! count once.
//!
//! burn runs the operations of backward by their depth in the graph, and those of one depth in the order in which a
//! search from the loss finds them. Both follow from the structure of the graph alone, which is the same on all ranks
//! of a group, so their collectives meet in the same order. None is repeated by gradient checkpointing: the operations
//! are compute-bound.

use std::sync::Arc;

use burn::tensor::{GradientCheckpointingStrategy, Tensor};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::TensorData;
use burn_flex::{Flex, FlexTensor};
use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_optim::backend::Pieces;
use distribute_types::with_dtype;

use super::or_end;
use crate::backend::{DiffTensor, whole};
use crate::tensor::{dtype_of, node_of, not_flex, on_device_of, refused};
use crate::{Error, Result};

/// Returns a copy of `x`, which is equal on all ranks of the group, for operations in which each rank computes a part.
/// Backward sums the ranks' gradients, each of which comes from one rank's part.
///
/// Use it also on a variable that is not split and is combined with a part, such as a scale of a column-parallel
/// layer's output: otherwise each rank has a part of its gradient only, and the copies of the variable diverge.
///
/// # Shapes
/// Any shape, equal on all ranks; the result has the same one.
///
/// # Ordering
/// If one rank runs backward through the result, all must, in the same order with other calls in the group. A failure
/// in backward ends the replica.
///
/// # Errors
/// [`Error::Values`] if the tensor is not on burn's Flex backend.
///
/// # Examples
/// ```
/// use burn::tensor::Tensor;
/// use distribute_burn::{BurnContext, Error, copy_to_tensor_group, sum_over_tensor_group};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// strategy.run_with((), |context, ()| {
///     let group = context.tensor_group().expect("the strategy has tensor groups");
///     let device = context.burn_device()?;
///     let x = Tensor::<1>::from_floats([1.0, 2.0], &device).require_grad();  // the same on both ranks
///     let part = copy_to_tensor_group(&group, x.clone())?.mul_scalar(1 + context.tensor_rank() as i32);
///     let y = sum_over_tensor_group(&group, part)?;                          // 1 x + 2 x
///     assert_eq!(y.to_data().try_into_vec::<f32>().ok(), Some(vec![3.0, 6.0]));
///     let gradient = x.grad(&y.sum().backward()).expect("the loss depends on x");
///     assert_eq!(gradient.into_data().try_into_vec::<f32>().ok(), Some(vec![3.0, 3.0]));
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// The operator f of Shoeybi and others, 2019, figure 3; `copy_to_tensor_model_parallel_region` of Megatron-LM.
pub fn copy_to_tensor_group<const D: usize>(group: &Arc<ProcessGroup>, x: Tensor<D>) -> Result<Tensor<D>> {
    exchanged(group, Kind::Copy, x)
}

/// Returns the sum of every rank's `x`, which is one term of it on each rank, on every rank. Backward gives each rank's
/// term the gradient of the sum, because all ranks compute the same from it.
///
/// # Shapes
/// Any shape, equal on all ranks; the result has the same one.
///
/// # Ordering
/// Every rank must call this, in the same order with other calls in the group.
///
/// # Errors
/// [`Error::Collective`] if a rank is missing or fails, and the error of [`copy_to_tensor_group`].
///
/// # Examples
/// See [`copy_to_tensor_group`].
///
/// # Source
/// The operator g of Shoeybi and others, 2019, figure 3; `reduce_from_tensor_model_parallel_region` of Megatron-LM.
pub fn sum_over_tensor_group<const D: usize>(group: &Arc<ProcessGroup>, x: Tensor<D>) -> Result<Tensor<D>> {
    exchanged(group, Kind::Sum, x)
}

/// Returns the concatenation along the last axis of every rank's `x`, in the order of ranks, on every rank. Backward
/// gives each rank its slice of the gradient, because all ranks compute the same from the whole.
///
/// # Shapes
/// (…, part), equal on all ranks; the result has (…, ranks × part).
///
/// # Ordering
/// Every rank must call this, in the same order with other calls in the group.
///
/// # Errors
/// [`Error::Collective`] if a rank is missing or fails, and the error of [`copy_to_tensor_group`].
///
/// # Examples
/// ```
/// use burn::tensor::{Device, Tensor};
/// use distribute_burn::{Error, gather_from_tensor_group, scatter_to_tensor_group};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// strategy.run_with((), |context, ()| {
///     let group = context.tensor_group().expect("the strategy has tensor groups");
///     let x = Tensor::<2>::from_floats([[1.0, 2.0, 3.0, 4.0]], &Device::flex());
///     let part = scatter_to_tensor_group(&group, x.clone())?;
///     let expected = [[1.0f32, 2.0], [3.0, 4.0]][context.tensor_rank()].to_vec();
///     assert_eq!(part.to_data().try_into_vec::<f32>().ok(), Some(expected));
///     assert_eq!(gather_from_tensor_group(&group, part)?.into_data(), x.into_data());
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `gather_from_tensor_model_parallel_region` of Megatron-LM.
pub fn gather_from_tensor_group<const D: usize>(group: &Arc<ProcessGroup>, x: Tensor<D>) -> Result<Tensor<D>> {
    gather_blocks(group, x, 1)
}

/// Returns this rank's slice, along the last axis, of `x`, which is equal on all ranks. Backward gathers the ranks'
/// gradients of their slices.
///
/// # Shapes
/// (…, whole), where `whole` is a multiple of the number of ranks; the result has (…, whole / ranks).
///
/// # Ordering
/// If one rank runs backward through the result, all must, in the same order with other calls in the group. A failure
/// in backward ends the replica.
///
/// # Errors
/// [`Error::Undivided`] if the last axis cannot be divided, and the error of [`copy_to_tensor_group`].
///
/// # Examples
/// See [`gather_from_tensor_group`].
///
/// # Source
/// `scatter_to_tensor_model_parallel_region` of Megatron-LM.
pub fn scatter_to_tensor_group<const D: usize>(group: &Arc<ProcessGroup>, x: Tensor<D>) -> Result<Tensor<D>> {
    let (shape, ranks) = (x.dims(), group.world_size());
    match shape.last() {
        Some(whole) if whole.is_multiple_of(ranks) => exchanged(group, Kind::Scatter { width: whole / ranks }, x),
        _ => Err(Error::Undivided { shape: shape.to_vec(), ranks }),
    }
}

/// Gathers like [`gather_from_tensor_group`], where each rank has its pieces of `blocks` blocks.
pub(super) fn gather_blocks<const D: usize>(
    group: &Arc<ProcessGroup>,
    x: Tensor<D>,
    blocks: usize,
) -> Result<Tensor<D>> {
    let part = x.dims().last().copied().unwrap_or(1);
    exchanged(group, Kind::Gather { width: part / blocks.max(1) }, x)
}

/// Returns the greatest of every rank's elements, outside the graph.
pub(super) fn greatest<const D: usize>(group: &ProcessGroup, x: Tensor<D>) -> Result<Tensor<D>> {
    let greatest = reduced(group, flex(x.without_autodiff())?, ReduceOp::Max)?;
    Ok(Tensor::from_primitive::<Flex>(greatest))
}

/// An operation whose backward is its conjugate.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// The identity; its conjugate sums.
    Copy,
    /// Sums; its conjugate is the identity.
    Sum,
    /// Concatenates parts that have `width` elements in each block; its conjugate cuts them out.
    Gather { width: usize },
    /// Cuts the own part out; its conjugate concatenates.
    Scatter { width: usize },
}

impl Kind {
    fn conjugate(self) -> Kind {
        match self {
            Kind::Copy => Kind::Sum,
            Kind::Sum => Kind::Copy,
            Kind::Gather { width } => Kind::Scatter { width },
            Kind::Scatter { width } => Kind::Gather { width },
        }
    }

    fn apply(self, group: &ProcessGroup, tensor: FlexTensor) -> Result<FlexTensor> {
        match self {
            Kind::Copy => Ok(tensor),
            Kind::Sum => reduced(group, tensor, ReduceOp::Sum),
            Kind::Gather { width } => {
                let (tensor, pieces) = (whole(tensor), Pieces { parts: group.world_size(), width });
                let shape = scaled(&tensor, |part| part * pieces.parts);
                with_dtype!(dtype_of(tensor.dtype())?, E => {
                    let own = tensor.storage::<E>();
                    let mut all = vec![E::default(); own.len() * pieces.parts];
                    group.all_gather(own, &mut all)?;
                    Ok(FlexTensor::from_data(TensorData::new(pieces.join(&all), shape)))
                })
            }
            Kind::Scatter { width } => {
                let (tensor, pieces) = (whole(tensor), Pieces { parts: group.world_size(), width });
                let shape = scaled(&tensor, |whole| whole / pieces.parts);
                with_dtype!(dtype_of(tensor.dtype())?, E => {
                    let part = pieces.cut(tensor.storage::<E>(), group.rank().index());
                    Ok(FlexTensor::from_data(TensorData::new(part, shape)))
                })
            }
        }
    }
}

/// Returns the shape of a tensor with another length of the last axis.
fn scaled(tensor: &FlexTensor, len: impl FnOnce(usize) -> usize) -> Vec<usize> {
    let mut shape = tensor.layout().shape().as_slice().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = len(*last);
    }
    shape
}

/// Reduces the elements of a tensor over the ranks of a group. Elements that another tensor shares are copied first.
fn reduced(group: &ProcessGroup, tensor: FlexTensor, op: ReduceOp) -> Result<FlexTensor> {
    let mut tensor = whole(tensor);
    with_dtype!(dtype_of(tensor.dtype())?, E => group.all_reduce(tensor.storage_mut::<E>(), op)?);
    Ok(tensor)
}

/// Returns the elements of a tensor outside the graph.
fn flex<const D: usize>(x: Tensor<D>) -> Result<FlexTensor> {
    Ok(x.try_into_primitive::<Flex>().map_err(|error| refused(ACTION, not_flex(error)))?)
}

const ACTION: &str = "exchange a tensor";

/// Applies an operation, and records it in the graph if the tensor has one.
fn exchanged<const D: usize>(group: &Arc<ProcessGroup>, kind: Kind, x: Tensor<D>) -> Result<Tensor<D>> {
    if !x.is_autodiff() {
        return Ok(Tensor::from_primitive::<Flex>(kind.apply(group, flex(x)?)?));
    }
    let device = x.device();
    let x = node_of(x).map_err(|problem| refused(ACTION, problem))?;
    let result = match device.gradient_checkpointing_strategy() {
        Some(GradientCheckpointingStrategy::Balanced) => recorded::<BalancedCheckpointing>(group, kind, x)?,
        _ => recorded::<NoCheckpointing>(group, kind, x)?,
    };
    Ok(on_device_of(result, &device))
}

fn recorded<C: CheckpointStrategy>(group: &Arc<ProcessGroup>, kind: Kind, x: DiffTensor) -> Result<DiffTensor> {
    let node = x.node();
    let result = kind.apply(group, x.into_primitive())?;
    Ok(match Exchanged.prepare::<C>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish((group.clone(), kind), result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    })
}

/// An operation in the graph, with its group.
#[derive(Debug)]
struct Exchanged;

impl Backward<Flex, 1> for Exchanged {
    type State = (Arc<ProcessGroup>, Kind);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Flex>(&ops.node);
        let (group, kind) = &ops.state;
        if let Some(parent) = &ops.parents[0] {
            gradients.register::<Flex>(parent.id, or_end(kind.conjugate().apply(group, gradient)));
        }
    }
}

//! The differentiable operations on tensor groups.
//!
//! Outside the split layers of a model all ranks of a tensor group hold equal activations, and backward gives each of
//! them the whole gradient of these. Inside, each rank has a part of the features. The operations lie between: their
//! backward passes keep both properties, so that gradients of variables that are not split are equal on all ranks, and
//! count once.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor};
use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_optim::backend::Pieces;

use crate::all_reduce::reduced;
use crate::gpu::{copied, uploaded};

/// Returns a copy of `x`, which is equal on all ranks of the group, for operations in which each rank computes a part.
/// Backward sums the ranks' gradients, each of which comes from one rank's part.
///
/// Use it also on a variable that is not split and is combined with a part, such as a scale of a column-parallel
/// layer's output: otherwise each rank has a part of its gradient only, and the copies of the variable diverge.
///
/// # Shapes
/// Any shape of f32, f64, f16 or bf16, equal on all ranks; the result has the same one.
///
/// # Ordering
/// If one rank runs backward through the result, all must, in the same order with other calls in the group.
///
/// # Errors
/// [`candle_core::Error`] if candle refuses the tensor; in backward it wraps the collective's error if a rank is
/// missing or fails.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use distribute_candle::{Error, copy_to_tensor_group, sum_over_tensor_group};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// strategy.run_with((), |context, ()| {
///     let group = context.tensor_group().expect("the strategy has tensor groups");
///     let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;                     // the same on both ranks
///     let part = (copy_to_tensor_group(&group, &x)? * (1.0 + context.tensor_rank() as f64))?;
///     let y = sum_over_tensor_group(&group, &part)?;                     // 1 x + 2 x
///     assert_eq!(y.to_vec1::<f32>()?, [3.0, 6.0]);
///     let gradients = y.sum_all()?.backward()?;
///     assert_eq!(gradients.get(&x).map(|g| g.to_vec1()).transpose()?, Some(vec![3f32, 3.0]));
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// The operator f of Shoeybi and others, 2019, figure 3; `copy_to_tensor_model_parallel_region` of Megatron-LM.
pub fn copy_to_tensor_group(group: &Arc<ProcessGroup>, x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op1(Copy(group.clone()))
}

/// Returns the sum of every rank's `x`, which is one term of it on each rank, on every rank. Backward gives each rank's
/// term the gradient of the sum, because all ranks compute the same from it.
///
/// # Shapes
/// Any shape of f32, f64, f16 or bf16, equal on all ranks; the result has the same one.
///
/// # Ordering
/// Every rank must call this, in the same order with other calls in the group.
///
/// # Errors
/// [`candle_core::Error`] if candle refuses the tensor; it wraps the collective's error if a rank is missing or fails.
///
/// # Examples
/// See [`copy_to_tensor_group`].
///
/// # Source
/// The operator g of Shoeybi and others, 2019, figure 3; `reduce_from_tensor_model_parallel_region` of Megatron-LM.
pub fn sum_over_tensor_group(group: &Arc<ProcessGroup>, x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op1(Sum(group.clone()))
}

/// Returns the concatenation along the last axis of every rank's `x`, in the order of ranks, on every rank. Backward
/// gives each rank its slice of the gradient, because all ranks compute the same from the whole.
///
/// # Shapes
/// (…, part) of f32, f64, f16 or bf16, equal on all ranks; the result has (…, ranks × part).
///
/// # Ordering
/// Every rank must call this, in the same order with other calls in the group.
///
/// # Errors
/// [`candle_core::Error`] if candle refuses the tensor or it has no axis; it wraps the collective's error if a rank is
/// missing or fails.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use distribute_candle::{Error, gather_from_tensor_group, scatter_to_tensor_group};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// strategy.run_with((), |context, ()| {
///     let group = context.tensor_group().expect("the strategy has tensor groups");
///     let x = Tensor::new(&[[1f32, 2.0, 3.0, 4.0]], &Device::Cpu)?;
///     let part = scatter_to_tensor_group(&group, &x)?;
///     assert_eq!(part.to_vec2::<f32>()?, [[1.0, 2.0], [3.0, 4.0]][context.tensor_rank()..][..1]);
///     assert_eq!(gather_from_tensor_group(&group, &part)?.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `gather_from_tensor_model_parallel_region` of Megatron-LM.
pub fn gather_from_tensor_group(group: &Arc<ProcessGroup>, x: &Tensor) -> Result<Tensor> {
    gather_blocks(group, x, 1)
}

/// Returns this rank's slice, along the last axis, of `x`, which is equal on all ranks. Backward gathers the ranks'
/// gradients of their slices.
///
/// # Shapes
/// (…, whole) of f32, f64, f16 or bf16, where `whole` is a multiple of the number of ranks; the result has (…, whole /
/// ranks).
///
/// # Ordering
/// If one rank runs backward through the result, all must, in the same order with other calls in the group.
///
/// # Errors
/// [`candle_core::Error`] if candle refuses the tensor or its last axis cannot be divided; in backward it wraps the
/// collective's error if a rank is missing or fails.
///
/// # Examples
/// See [`gather_from_tensor_group`].
///
/// # Source
/// `scatter_to_tensor_model_parallel_region` of Megatron-LM.
pub fn scatter_to_tensor_group(group: &Arc<ProcessGroup>, x: &Tensor) -> Result<Tensor> {
    let ranks = group.world_size();
    match x.dims().last() {
        Some(whole) if whole.is_multiple_of(ranks) => x.contiguous()?.apply_op1(Scatter::new(group, whole / ranks)),
        _ => candle_core::bail!(
            "scatter_to_tensor_group: the input has shape {:?}, whose last axis cannot be divided among {ranks} tensor \
             ranks; give (…, a multiple of {ranks})",
            x.dims()
        ),
    }
}

/// Gathers like [`gather_from_tensor_group`], where each rank has its pieces of `blocks` blocks.
pub(super) fn gather_blocks(group: &Arc<ProcessGroup>, x: &Tensor, blocks: usize) -> Result<Tensor> {
    match x.dims().last() {
        Some(part) if part.is_multiple_of(blocks) => x.contiguous()?.apply_op1(Gather::new(group, part / blocks)),
        _ => candle_core::bail!(
            "gather_from_tensor_group: the input has shape {:?}; give one whose last axis is a part",
            x.dims()
        ),
    }
}

/// Identity; backward sums.
struct Copy(Arc<ProcessGroup>);

/// Sums; backward is the identity.
struct Sum(Arc<ProcessGroup>);

/// Concatenates parts that have `width` elements in each block; backward cuts them out.
struct Gather {
    group: Arc<ProcessGroup>,
    width: usize,
}

/// Cuts the own part out; backward concatenates.
struct Scatter {
    group: Arc<ProcessGroup>,
    width: usize,
}

impl Gather {
    fn new(group: &Arc<ProcessGroup>, width: usize) -> Gather {
        Gather { group: group.clone(), width }
    }
}

impl Scatter {
    fn new(group: &Arc<ProcessGroup>, width: usize) -> Scatter {
        Scatter { group: group.clone(), width }
    }
}

/// Applies a function of elements to those of a contiguous tensor of floats.
macro_rules! on_floats {
    ($name:expr, $storage:expr, $layout:expr, $function:expr) => {{
        let Some((start, end)) = $layout.contiguous_offsets() else {
            candle_core::bail!("{}: the tensor is not contiguous", $name)
        };
        match $storage {
            CpuStorage::F32(all) => CpuStorage::F32($function(&all[start..end])?),
            CpuStorage::F64(all) => CpuStorage::F64($function(&all[start..end])?),
            CpuStorage::F16(all) => CpuStorage::F16($function(&all[start..end])?),
            CpuStorage::BF16(all) => CpuStorage::BF16($function(&all[start..end])?),
            _ => candle_core::bail!("{}: give a tensor of f32, f64, f16 or bf16", $name),
        }
    }};
}

/// Copies through the host.
fn on_host(
    storage: &CudaStorage,
    layout: &Layout,
    forward: impl Fn(&CpuStorage, &Layout) -> Result<(CpuStorage, Shape)>,
) -> Result<(CudaStorage, Shape)> {
    let (result, shape) = forward(&storage.to_cpu_storage()?, layout)?;
    Ok((uploaded(storage.device(), result)?, shape))
}

impl CustomOp1 for Copy {
    fn name(&self) -> &'static str {
        "copy-to-tensor-group"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let copied = on_floats!("copy_to_tensor_group", storage, layout, |own: &[_]| Result::Ok(own.to_vec()));
        Ok((copied, layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((copied(storage, layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        // The sum takes part in no further backward pass.
        Ok(Some(gradient.contiguous()?.apply_op1_no_bwd(&Sum(self.0.clone()))?))
    }
}

impl CustomOp1 for Sum {
    fn name(&self) -> &'static str {
        "sum-over-tensor-group"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((reduced("sum_over_tensor_group", &self.0, ReduceOp::Sum, storage, layout)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        on_host(storage, layout, |storage, layout| self.cpu_fwd(storage, layout))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(gradient.clone()))
    }
}

impl CustomOp1 for Gather {
    fn name(&self) -> &'static str {
        "gather-from-tensor-group"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let parts = self.group.world_size();
        let pieces = Pieces { parts, width: self.width };
        let whole = on_floats!("gather_from_tensor_group", storage, layout, |own: &[_]| {
            let mut all = vec![Default::default(); own.len() * parts];
            self.group.all_gather(own, &mut all).map_err(candle_core::Error::wrap)?;
            Result::Ok(pieces.join(&all))
        });
        let mut shape = layout.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last *= parts;
        }
        Ok((whole, shape.into()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        on_host(storage, layout, |storage, layout| self.cpu_fwd(storage, layout))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(gradient.contiguous()?.apply_op1_no_bwd(&Scatter::new(&self.group, self.width))?))
    }
}

impl CustomOp1 for Scatter {
    fn name(&self) -> &'static str {
        "scatter-to-tensor-group"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (parts, place) = (self.group.world_size(), self.group.rank().index());
        let pieces = Pieces { parts, width: self.width };
        let part = on_floats!("scatter_to_tensor_group", storage, layout, |whole: &[_]| {
            Result::Ok(pieces.cut(whole, place))
        });
        let mut shape = layout.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last /= parts;
        }
        Ok((part, shape.into()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        on_host(storage, layout, |storage, layout| self.cpu_fwd(storage, layout))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(gradient.contiguous()?.apply_op1_no_bwd(&Gather::new(&self.group, self.width))?))
    }
}

//! Cross-entropy of logits whose classes are split among ranks.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, D, Layout, Result, Shape, Tensor};
use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_strategy::get_replica_context;

use super::{sum_over_tensor_group, within_part};
use crate::all_reduce::reduced;
use crate::context::{check_classes, cross_entropy_per_example};
use crate::gpu::uploaded;
use crate::losses::at_least_32_bits;

/// Computes the cross-entropy of each example's logits and target, in f32 or f64, from each rank's part of the logits.
/// All ranks of the tensor group get the same losses, and the logits are never gathered: the greatest logit and two
/// sums of each example are reduced. Outside tensor groups it is
/// [`cross_entropy_per_example`](crate::cross_entropy_per_example).
///
/// # Shapes
/// `logits_part`: (examples, classes / ranks), the logits of this rank's part of the classes, as a
/// [`ColumnParallelLinear`](crate::ColumnParallelLinear) without `gather_output` computes them; `targets`: (examples),
/// u32, i64 or u8, indices among all classes, equal on all ranks. Result: (examples), equal on all ranks.
///
/// # Ordering
/// Every rank of the tensor group must call this, in the same order with layers.
///
/// # Cost
/// Three numbers for each example are reduced over the ranks in forward, and nothing in backward.
///
/// # Errors
/// [`candle_core::Error`] if shapes or types do not fit or, on a CPU, a target is not a class; it wraps the
/// collective's error if a rank is missing or fails.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use distribute_candle::{Error, vocab_parallel_cross_entropy_per_example};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// let logits = [[[0f32, 0.0]], [[0.0, 0.0]]];                             // four classes, two on each rank
/// let losses = strategy.run_with((), |context, ()| {
///     let part = Tensor::new(&logits[context.tensor_rank()], &Device::Cpu)?;
///     let losses = vocab_parallel_cross_entropy_per_example(&part, &Tensor::new(&[3u32], &Device::Cpu)?)?;
///     Ok::<_, Error>(losses.to_vec1::<f32>()?[0])
/// })?;
/// assert!(losses.values().iter().all(|loss| (loss - 4f32.ln()).abs() < 1e-6));
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Shoeybi and others, "Megatron-LM", 2019, section 3; `vocab_parallel_cross_entropy` of Megatron-LM.
pub fn vocab_parallel_cross_entropy_per_example(logits_part: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let Some(group) = get_replica_context().and_then(|context| context.tensor_group()) else {
        return cross_entropy_per_example(logits_part, targets);
    };
    let logits = at_least_32_bits(logits_part)?;
    let (examples, part) = logits.dims2()?;
    if targets.dims() != [examples] {
        candle_core::bail!(
            "vocab_parallel_cross_entropy_per_example: the logits have {examples} examples, and the targets shape \
             {:?}; give (examples, classes / ranks) and (examples)",
            targets.dims()
        );
    }
    if examples == 0 {
        // All ranks of the group are without examples.
        return logits.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1);
    }
    if targets.device().is_cpu() {
        check_classes("the target of example", targets, part * group.world_size())?;
    }
    // A constant that is subtracted from all logits of an example does not change its loss, so it needs no gradient.
    let greatest = logits.detach().max_keepdim(D::Minus1)?.contiguous()?.apply_op1_no_bwd(&Greatest(group.clone()))?;
    let shifted = logits.broadcast_sub(&greatest)?;
    let (local, inside) = within_part(targets, part, &group)?;
    let of_target = shifted.gather(&local.unsqueeze(1)?, D::Minus1)?.squeeze(D::Minus1)?;
    let of_target = inside.where_cond(&of_target, &of_target.zeros_like()?)?;
    // Both sums travel together. Each rank's losses depend on all terms, and all ranks compute the same losses.
    let terms = Tensor::stack(&[&shifted.exp()?.sum(D::Minus1)?, &of_target], 0)?;
    let sums = sum_over_tensor_group(&group, &terms)?;
    sums.get(0)?.log()? - sums.get(1)?
}

/// The greatest of every rank's numbers.
struct Greatest(Arc<ProcessGroup>);

impl CustomOp1 for Greatest {
    fn name(&self) -> &'static str {
        "greatest-of-tensor-group"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let name = "vocab_parallel_cross_entropy_per_example";
        Ok((reduced(name, &self.0, ReduceOp::Max, storage, layout)?, layout.shape().clone()))
    }

    /// Copies through the host.
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (greatest, shape) = self.cpu_fwd(&storage.to_cpu_storage()?, layout)?;
        Ok((uploaded(storage.device(), greatest)?, shape))
    }
}

//! Cross-entropy of logits whose classes are split among ranks.

use burn::tensor::{Int, Tensor};
use distribute_strategy::get_replica_context;

use super::operations::greatest;
use super::{sum_over_tensor_group, within_part};
use crate::Result;
use crate::losses::{at_least_32_bits, check_classes, check_rows, cross_entropy_per_example, no_losses};

/// Computes the cross-entropy of each example's logits and target, in f32 or f64, from each rank's part of the logits.
/// All ranks of the tensor group get the same losses, and the logits are never gathered: the greatest logit and two
/// sums of each example are reduced. Outside tensor groups it is
/// [`cross_entropy_per_example`](crate::cross_entropy_per_example).
///
/// # Shapes
/// `logits_part`: (examples, classes / ranks), the logits of this rank's part of the classes, as a
/// [`ColumnParallelLinear`](crate::ColumnParallelLinear) without `gather_output` computes them; `targets`: (examples),
/// indices among all classes, equal on all ranks. Result: (examples), equal on all ranks.
///
/// # Ordering
/// Every rank of the tensor group must call this, in the same order with layers.
///
/// # Cost
/// Three numbers for each example are reduced over the ranks in forward, and nothing in backward.
///
/// # Errors
/// [`Error::Shapes`](crate::Error::Shapes) if there are not as many targets as rows of logits;
/// [`Error::Class`](crate::Error::Class) for the first target that is not a class;
/// [`Error::Collective`](crate::Error::Collective) if a rank is missing or fails.
///
/// # Examples
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use distribute_burn::{Error, vocab_parallel_cross_entropy_per_example};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// let losses = strategy.run_with((), |_, ()| {
///     let part = Tensor::<2>::zeros([1, 2], &Device::flex());                // four classes, two on each rank
///     let target = Tensor::<1, Int>::from_ints([3], &Device::flex());
///     Ok::<_, Error>(vocab_parallel_cross_entropy_per_example(part, target)?.into_scalar::<f32>())
/// })?;
/// assert!(losses.values().iter().all(|loss| (loss - 4f32.ln()).abs() < 1e-6));
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Shoeybi and others, "Megatron-LM", 2019, section 3; `vocab_parallel_cross_entropy` of Megatron-LM.
pub fn vocab_parallel_cross_entropy_per_example(logits_part: Tensor<2>, targets: Tensor<1, Int>) -> Result<Tensor<1>> {
    let Some(group) = get_replica_context().and_then(|context| context.tensor_group()) else {
        return cross_entropy_per_example(logits_part, targets);
    };
    let [examples, part] = logits_part.dims();
    check_rows(&logits_part, &targets)?;
    if examples == 0 {
        // All ranks of the group are without examples.
        return Ok(no_losses(logits_part));
    }
    check_classes(&targets, part * group.world_size())?;
    let logits = at_least_32_bits(logits_part);
    // A constant that is subtracted from all logits of an example does not change its loss, so it needs no gradient.
    let shifted = logits.clone() - greatest(&group, logits.without_autodiff().max_dim(1))?;
    let (local, outside) = within_part(targets.reshape([examples, 1]), part, &group);
    let of_target = shifted.clone().gather(1, local).mask_fill(outside, 0.0);
    // Both sums travel together. Each rank's losses depend on all terms, and all ranks compute the same losses.
    let sums = sum_over_tensor_group(&group, Tensor::cat(vec![shifted.exp().sum_dim(1), of_target], 1))?;
    Ok((sums.clone().narrow(1, 0, 1).log() - sums.narrow(1, 1, 1)).reshape([examples]))
}

//! A differentiable sum over replicas.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor};
use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_strategy::ReplicaContext;

/// Returns the elementwise sum of every replica's `x` on every replica. Backward sums the replicas' gradients in the
/// same way, because each replica's `x` contributes to the losses of all.
///
/// Every replica must call this. If one replica runs backward through the result, all must.
///
/// # Errors
/// [`candle_core::Error`] if candle refuses the tensor; it wraps the collective's error if a replica is missing or
/// fails.
///
/// # Examples
/// ```
/// use candle_core::{Device, Var};
/// use distribute_candle::{Error, sum_over_replicas};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// strategy.run_with((), |context, ()| {
///     let x = Var::new(context.replica_id() as f32 + 1.0, &Device::Cpu)?;
///     let y = sum_over_replicas(context, &x)?;                  // 1 + 2 on both
///     assert_eq!(y.to_scalar::<f32>()?, 3.0);
///     let gradients = y.sqr()?.backward()?;                     // each loss is y², so both depend on x
///     assert_eq!(gradients.get(&x).map(|g| g.to_scalar::<f32>()).transpose()?, Some(12.0));
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.distribute.ReplicaContext.all_reduce`, whose gradient is an all-reduce too.
pub fn sum_over_replicas(context: &ReplicaContext, x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op1(SumOverReplicas(context.clone()))
}

struct SumOverReplicas(ReplicaContext);

impl CustomOp1 for SumOverReplicas {
    fn name(&self) -> &'static str {
        "sum-over-replicas"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let group = self.0.graph_group().map_err(candle_core::Error::wrap)?;
        Ok((reduced("sum_over_replicas", &group, ReduceOp::Sum, storage, layout)?, layout.shape().clone()))
    }

    /// Copies through the host.
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (sum, shape) = self.cpu_fwd(&storage.to_cpu_storage()?, layout)?;
        Ok((storage.device().storage_from_cpu_storage_owned(sum)?, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(sum_over_replicas(&self.0, gradient)?))
    }
}

/// Returns the elements of a contiguous tensor of floats, reduced over the ranks of a group.
pub(crate) fn reduced(
    name: &'static str,
    group: &ProcessGroup,
    op: ReduceOp,
    storage: &CpuStorage,
    layout: &Layout,
) -> Result<CpuStorage> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("{name}: the tensor is not contiguous")
    };
    macro_rules! reduce {
        ($($variant:ident),*) => {
            match storage {
                $(CpuStorage::$variant(all) => {
                    let mut values = all[start..end].to_vec();
                    group.all_reduce(&mut values, op).map_err(candle_core::Error::wrap)?;
                    CpuStorage::$variant(values)
                })*
                _ => candle_core::bail!("{name}: give a tensor of f32, f64, f16 or bf16"),
            }
        };
    }
    Ok(reduce!(F32, F64, F16, BF16))
}

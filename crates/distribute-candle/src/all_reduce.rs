//! Differentiable sums, means and concatenations over replicas.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor};
use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_strategy::ReplicaContext;

use crate::exchange::Exchange;
use crate::gpu;

/// Returns the elementwise sum of every replica's `x` on every replica. Backward sums the replicas' gradients in the
/// same way, because each replica's `x` contributes to the losses of all.
///
/// Every replica must call this, with `x` on its own device. If one replica runs backward through the result, all must.
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
    over_replicas(context, x, ReduceOp::Sum, Exchange::UNNAMED)
}

/// Returns the elementwise mean of every replica's `x` on every replica. Backward averages the replicas' gradients in
/// the same way.
///
/// Every replica counts once, also one without examples. Every replica must call this. If one replica runs backward
/// through the result, all must.
///
/// # Errors
/// [`candle_core::Error`] if candle refuses the tensor; it wraps the collective's error if a replica is missing or
/// fails.
///
/// # Examples
/// ```
/// use candle_core::{Device, Var};
/// use distribute_candle::{Error, mean_over_replicas};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// strategy.run_with((), |context, ()| {
///     let x = Var::new(context.replica_id() as f32 + 1.0, &Device::Cpu)?;
///     let y = mean_over_replicas(context, &x)?;                 // (1 + 2) / 2 on both
///     assert_eq!(y.to_scalar::<f32>()?, 1.5);
///     let gradients = y.sqr()?.backward()?;                     // 2 y on both, whose mean is the gradient of x
///     assert_eq!(gradients.get(&x).map(|g| g.to_scalar::<f32>()).transpose()?, Some(3.0));
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.distribute.ReplicaContext.all_reduce` with `ReduceOp.MEAN`.
pub fn mean_over_replicas(context: &ReplicaContext, x: &Tensor) -> Result<Tensor> {
    over_replicas(context, x, ReduceOp::Mean, Exchange::UNNAMED)
}

/// Returns the sum over replicas of what a layer exchanges.
pub(crate) fn sum_of_layer(context: &ReplicaContext, x: &Tensor, exchange: Exchange) -> Result<Tensor> {
    over_replicas(context, x, ReduceOp::Sum, exchange)
}

fn over_replicas(context: &ReplicaContext, x: &Tensor, op: ReduceOp, exchange: Exchange) -> Result<Tensor> {
    x.contiguous()?.apply_op1(OverReplicas { context: context.clone(), op, exchange })
}

/// A sum or a mean.
struct OverReplicas {
    context: ReplicaContext,
    op: ReduceOp,
    exchange: Exchange,
}

impl CustomOp1 for OverReplicas {
    fn name(&self) -> &'static str {
        if self.op == ReduceOp::Mean { "mean_over_replicas" } else { "sum_over_replicas" }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        // Every replica asks where it is reduced, also one in host memory.
        self.context.graph_device_group().map_err(candle_core::Error::wrap)?;
        let group = self.context.graph_group().map_err(candle_core::Error::wrap)?;
        Ok((exchanged(self.name(), (&group, self.exchange), self.op, storage, layout)?, layout.shape().clone()))
    }

    /// Reduces in the memory of the GPUs; through the host if a replica is not on a GPU.
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let on_gpus = gpu::reduced(&self.context, (self.op, self.exchange), storage, layout);
        if let Some(sum) = on_gpus.map_err(candle_core::Error::wrap)? {
            return Ok((sum, layout.shape().clone()));
        }
        let (sum, shape) = self.cpu_fwd(&storage.to_cpu_storage()?, layout)?;
        Ok((gpu::uploaded(storage.device(), sum)?, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(over_replicas(&self.context, gradient, self.op, self.exchange)?))
    }
}

/// Returns every replica's `x`, concatenated along an axis in the order of replicas, on every replica. Backward sums
/// the replicas' gradients and returns the part that belongs to this replica's `x`.
///
/// Every replica must call this. If one replica runs backward through the result, all must. The row that stands for the
/// examples of a replica without any is concatenated as well.
///
/// # Shapes
/// Shapes may differ in that axis only.
///
/// # Errors
/// [`candle_core::Error`] if candle refuses the tensor, there is no such axis or shapes differ in another one; it wraps
/// the collective's error if a replica is missing or fails.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use distribute_candle::{Error, gather_over_replicas};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// strategy.run_with((), |context, ()| {
///     let x = Var::new(&[context.replica_id() as f32 + 1.0], &Device::Cpu)?;
///     let y = gather_over_replicas(context, &x, 0)?;
///     assert_eq!(y.to_vec1::<f32>()?, [1.0, 2.0]);
///     let weights = Tensor::new(&[3f32, 5.0], &Device::Cpu)?;
///     let gradients = (y * weights)?.sum_all()?.backward()?;    // the losses of both replicas depend on x
///     let expected = [6.0, 10.0][context.replica_id()];
///     assert_eq!(gradients.get(&x).map(|g| g.to_vec1::<f32>()).transpose()?, Some(vec![expected]));
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.distribute.ReplicaContext.all_gather` and its gradient.
pub fn gather_over_replicas(context: &ReplicaContext, x: &Tensor, axis: usize) -> Result<Tensor> {
    if axis >= x.rank() {
        candle_core::bail!("gather_over_replicas: there is not an axis {axis} in a tensor of shape {:?}", x.shape());
    }
    let x = x.transpose(0, axis)?.contiguous()?;
    let group = context.graph_group().map_err(candle_core::Error::wrap)?;
    let mut shapes = vec![0u64; x.rank() * group.world_size()];
    let own: Vec<u64> = x.dims().iter().map(|extent| *extent as u64).collect();
    group.all_gather(&own, &mut shapes).map_err(candle_core::Error::wrap)?;
    if let Some(other) = shapes.chunks_exact(x.rank()).find(|other| other[1..] != own[1..]) {
        candle_core::bail!("gather_over_replicas: shapes {own:?} and {other:?} differ in more than axis {axis}");
    }
    let rows = shapes.iter().step_by(x.rank()).map(|rows| *rows as usize).collect();
    let gather = GatherOverReplicas { context: context.clone(), rows, exchange: Exchange::UNNAMED };
    x.apply_op1(gather)?.transpose(0, axis)?.contiguous()
}

/// Returns the numbers of all replicas, one row each, without a gradient. All have equally many.
pub(crate) fn gather_numbers(context: &ReplicaContext, own: &Tensor, exchange: Exchange) -> Result<Tensor> {
    let rows = vec![1; context.num_replicas_in_sync()];
    own.detach().unsqueeze(0)?.contiguous()?.apply_op1(GatherOverReplicas { context: context.clone(), rows, exchange })
}

/// A concatenation along the first axis.
struct GatherOverReplicas {
    context: ReplicaContext,
    /// The rows of each replica.
    rows: Vec<usize>,
    exchange: Exchange,
}

impl CustomOp1 for GatherOverReplicas {
    fn name(&self) -> &'static str {
        "gather_over_replicas"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.context.graph_device_group().map_err(candle_core::Error::wrap)?;
        let group = self.context.graph_group().map_err(candle_core::Error::wrap)?;
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("{}: the tensor is not contiguous", self.name())
        };
        let mut dims = layout.dims().to_vec();
        let row_len: usize = dims[1..].iter().product();
        let lens: Vec<usize> = self.rows.iter().map(|rows| rows * row_len).collect();
        dims[0] = self.rows.iter().sum();
        macro_rules! gather {
            ($($variant:ident),*) => {
                match storage {
                    $(CpuStorage::$variant(own) => {
                        CpuStorage::$variant(self.exchange.all_gather(&group, &own[start..end], &lens)?)
                    })*
                    _ => candle_core::bail!("{}: give a tensor of f32, f64, f16 or bf16", self.name()),
                }
            };
        }
        let gathered = gather!(F32, F64, F16, BF16);
        Ok((gathered, Shape::from(dims)))
    }

    /// Gathers in the memory of the GPUs; through the host if a replica is not on a GPU, or numbers of rows differ.
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        if self.rows.iter().all(|rows| *rows == self.rows[0]) {
            let on_gpus = gpu::gathered(&self.context, self.exchange, storage, layout);
            if let Some(all) = on_gpus.map_err(candle_core::Error::wrap)? {
                let mut dims = layout.dims().to_vec();
                dims[0] = self.rows.iter().sum();
                return Ok((all, Shape::from(dims)));
            }
        }
        let (all, shape) = self.cpu_fwd(&storage.to_cpu_storage()?, layout)?;
        Ok((gpu::uploaded(storage.device(), all)?, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let replica = self.context.replica_id();
        let (before, own) = (self.rows[..replica].iter().sum(), self.rows[replica]);
        Ok(Some(sum_over_replicas(&self.context, gradient)?.narrow(0, before, own)?))
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
    exchanged(name, (group, Exchange::UNNAMED), op, storage, layout)
}

fn exchanged(
    name: &'static str,
    (group, exchange): (&ProcessGroup, Exchange),
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
                    CpuStorage::$variant(exchange.all_reduce(group, all[start..end].to_vec(), op)?)
                })*
                _ => candle_core::bail!("{name}: give a tensor of f32, f64, f16 or bf16"),
            }
        };
    }
    Ok(reduce!(F32, F64, F16, BF16))
}

//! Blocks of a model whose parameters are gathered while the block runs, and dropped afterwards.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

mod blocks;
mod ops;
mod recompute;

pub(crate) use blocks::{Blocks, Leaf, Replica, Unit, explain, reset_current};
pub(crate) use ops::rest;
pub(crate) use recompute::drop_recomputed;

use ops::Output;
use recompute::Changes;

use crate::dropout::Stream;

/// A block of a model, such as a transformer's layer, whose parameters are in memory only while it runs (ZeRO stage 3).
///
/// Under a [`FullyShardedStrategy`](distribute_strategy::FullyShardedStrategy) each replica keeps a part of every large
/// parameter of the block. [`run`](Sharded::run) gathers the whole from all replicas, runs the block and drops it
/// again; backward gathers it once more, before that of the block. Gradients are reduced to parts as soon as they are
/// complete. The next block, in backward the previous one, is gathered meanwhile, so that no more than two are in
/// memory.
/// Parameters with fewer elements than the strategy's limit are kept whole. Under other strategies it is a plain block.
///
/// Parameters may be shared between blocks, and a block may run several times in a step. A parameter is read inside
/// `run` only.
///
/// All replicas must run the same blocks in the same order, and as often, also for gradients that they
/// [accumulate](distribute_optim::ReplicaOptimizer::accumulate); otherwise the run fails on all of them, at the latest
/// at the deadline of the gathers.
///
/// A parameter leaves memory when its gradient is complete. In a backward that does not reach it, or reaches it last
/// because the parameter is the left operand of its operation, it stays until the end of the backward.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{Linear, linear};
/// use distribute_candle::{Adam, CandleContext, CandleStrategy, Error, Sharded};
/// use distribute_strategy::FullyShardedStrategy;
///
/// let strategy = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let model = strategy.scope(|vb| {
///     let layer = |index: usize| Sharded::new(vb.pp(format!("layers.{index}")), |vb| linear(64, 64, vb));
///     (0..4).map(layer).collect::<candle_core::Result<Vec<Sharded<Linear>>>>()
/// })?;
/// let optimizer = Adam::new(0.1).build(&model)?;
/// strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
///     let mut x = Tensor::ones((2, 64), DType::F32, &Device::Cpu)?;
///     for layer in model {
///         x = layer.run(&x, |layer, x| layer.forward(x)?.relu())?;
///     }
///     optimizer.minimize(context, &context.average_loss(&x.sqr()?.mean(1)?, 4)?)
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `torch.distributed.fsdp.fully_shard`, applied to a block.
#[derive(Debug)]
pub struct Sharded<M> {
    block: Arc<M>,
    /// The block's path.
    name: String,
    /// The state that its layers change when they run.
    changes: Changes,
    /// The block's sharded parameters; `None` if there are none.
    unit: Option<Arc<Unit>>,
}

impl<M> Sharded<M> {
    /// Builds a block of a model, with the `VarBuilder` of its path, inside
    /// [`scope`](crate::CandleStrategy::scope).
    ///
    /// # Errors
    /// [`candle_core::Error`] if `build` fails.
    pub fn new<'a>(vb: VarBuilder<'a>, build: impl FnOnce(VarBuilder<'a>) -> Result<M>) -> Result<Sharded<M>> {
        let name = vb.prefix();
        let unit = BUILDING.with_borrow(|replica| replica.as_ref().map(|replica| Unit::new(name.clone(), replica)));
        let (outer, outer_changes) = (UNIT.replace(unit.clone()), CHANGES.replace(Some(Changes::default())));
        let built = build(vb);
        UNIT.replace(outer);
        let changes = CHANGES.replace(outer_changes).unwrap_or_default();
        changes.statistics.iter().for_each(note_statistic);
        changes.streams.iter().for_each(note_stream);
        Ok(Sharded { block: Arc::new(built?), name, changes, unit: unit.filter(|unit| !unit.is_empty()) })
    }

    /// Runs the block on `x`, with its parameters in memory. Call it on a replica's thread.
    ///
    /// # Errors
    /// [`candle_core::Error`] if `forward` fails, or if it is called outside the strategy's run. If a parameter cannot
    /// be gathered, because a replica is missing or fails, the replica ends with that error.
    ///
    /// # Cost
    /// A copy of the result.
    pub fn run(&self, x: &Tensor, forward: impl FnOnce(&M, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let Some(unit) = &self.unit else { return forward(&self.block, x) };
        let (y, gathered) = blocks::run(unit, || forward(&self.block, x))?;
        if y.track_op() { y.contiguous()?.apply_op1(Output::copied(gathered)) } else { Ok(y) }
    }

    /// Runs the block on `x` like [`run`](Sharded::run), and computes it again in backward: its intermediate results
    /// are not kept in memory between the two. It does so under every strategy, also under one that shards nothing.
    ///
    /// Backward calls `forward` a second time, with a copy of `x` and with the parameters in memory, and then runs
    /// through the results of that call. Losses, gradients and running statistics are those of [`run`](Sharded::run),
    /// bit for bit. Values that `forward` takes from outside get their gradients too.
    ///
    /// `forward` must do the same in both calls. The result of the second is compared with that of the first, bit for
    /// bit, so that a block that draws random numbers is an error. [`Dropout`](crate::Dropout) drops the same elements
    /// in both calls. Another generator is drawn from outside, and copied:
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::linear;
    /// use distribute_candle::{Adam, CandleContext, CandleStrategy, Error, Sharded};
    /// use distribute_strategy::MirroredStrategy;
    /// use rand_chacha::rand_core::Rng;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = strategy.scope(|vb| Sharded::new(vb.pp("layers.0"), |vb| linear(64, 64, vb)))?;
    /// let (optimizer, random) = (Adam::new(0.1).build(&model)?, strategy.random(7));
    /// strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
    ///     let generator = random.next(context);
    ///     let y = model.recompute(&Tensor::ones((2, 64), DType::F32, &Device::Cpu)?, move |layer, x| {
    ///         let mut generator = generator.clone();
    ///         let mut kept = || if generator.next_u32() % 10 == 0 { 0f32 } else { 1.0 / 0.9 };
    ///         let mask = Tensor::from_vec((0..128).map(|_| kept()).collect(), (2, 64), x.device())?;
    ///         layer.forward(x)?.relu()? * mask
    ///     })?;
    ///     optimizer.minimize(context, &context.average_loss(&y.sqr()?.mean(1)?, 4)?)
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// All results that gradients pass through are dropped, and what this crate's operations keep for backward.
    /// Tensors outside the graph, such as a mask that `forward` computes and an operation keeps, stay in memory. So do
    /// `x` and the result. Layers with running statistics, and dropout, are built by the block's `VarBuilder`.
    ///
    /// Blocks may be nested. Collectives of the block, such as those of tensor-parallel layers, run again in backward;
    /// all replicas must therefore recompute the same blocks.
    ///
    /// # Errors
    /// The errors of [`run`](Sharded::run), and [`candle_core::Error`] if the block is on a GPU. In backward,
    /// [`candle_core::Error`] if the second call fails, or computes another result or by other operations.
    ///
    /// # Cost
    /// The block's forward runs twice. In backward, a copy of `x` and a comparison of the result; in forward, a walk
    /// over the graph before the block.
    ///
    /// # Source
    /// `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`.
    pub fn recompute(
        &self,
        x: &Tensor,
        forward: impl Fn(&M, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor>
    where
        M: Send + Sync + 'static,
    {
        let block = self.block.clone();
        let forward = Box::new(move |x: &Tensor| forward(&block, x));
        recompute::run((&self.name, &self.changes), self.unit.as_ref(), x, forward)
    }
}

thread_local! {
    /// The replica whose model is being built on this thread, under a strategy that shards parameters.
    static BUILDING: RefCell<Option<Arc<Replica>>> = const { RefCell::new(None) };
    /// The block that is being built.
    static UNIT: RefCell<Option<Arc<Unit>>> = const { RefCell::new(None) };
    /// The running statistics and the random streams that were created for it.
    static CHANGES: RefCell<Option<Changes>> = const { RefCell::new(None) };
}

/// Builds a replica's model; blocks in it belong to `replica`.
pub(crate) fn building<R>(replica: Option<Arc<Replica>>, build: impl FnOnce() -> R) -> R {
    let outer = BUILDING.replace(replica);
    let outer_unit = UNIT.replace(None);
    let built = build();
    BUILDING.replace(outer);
    UNIT.replace(outer_unit);
    built
}

/// Returns the block that is being built on this thread.
pub(crate) fn current_unit() -> Option<Arc<Unit>> {
    UNIT.with_borrow(Clone::clone)
}

/// Notes a running statistic that was created for the block that is being built on this thread, if one is.
pub(crate) fn note_statistic(statistic: &Tensor) {
    CHANGES.with_borrow_mut(|changes| {
        if let Some(changes) = changes {
            changes.statistics.push(statistic.clone());
        }
    });
}

/// Notes a random stream that was created for the block that is being built on this thread, if one is.
pub(crate) fn note_stream(stream: &Arc<Stream>) {
    CHANGES.with_borrow_mut(|changes| {
        if let Some(changes) = changes {
            changes.streams.push(stream.clone());
        }
    });
}

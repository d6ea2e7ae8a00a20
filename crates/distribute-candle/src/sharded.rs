//! Blocks of a model whose parameters are gathered while the block runs, and dropped afterwards.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

mod blocks;
mod ops;

pub(crate) use blocks::{Blocks, Leaf, Replica, Unit, explain, reset_current};
pub(crate) use ops::rest;

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
    block: M,
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
        let Some(replica) = BUILDING.with_borrow(Clone::clone) else {
            return Ok(Sharded { block: build(vb)?, unit: None });
        };
        let unit = Unit::new(vb.prefix(), &replica);
        let outer = UNIT.replace(Some(unit.clone()));
        let built = build(vb);
        UNIT.replace(outer);
        Ok(Sharded { block: built?, unit: Some(unit).filter(|unit| !unit.is_empty()) })
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
        match &self.unit {
            None => forward(&self.block, x),
            Some(unit) => blocks::run(unit, || forward(&self.block, x)),
        }
    }
}

thread_local! {
    /// The replica whose model is being built on this thread, under a strategy that shards parameters.
    static BUILDING: RefCell<Option<Arc<Replica>>> = const { RefCell::new(None) };
    /// The block that is being built.
    static UNIT: RefCell<Option<Arc<Unit>>> = const { RefCell::new(None) };
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

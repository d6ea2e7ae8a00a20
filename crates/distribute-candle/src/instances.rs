//! Generic code of the crates below, compiled here for candle's types.
//!
//! Without optimisation, rustc takes a function from a crate that has it (`-Z share-generics`, the default at levels 0
//! and 1). Without this module, every program and every test would compile some 10,000 functions of optimizers,
//! reductions, datasets and checkpoints anew.

use candle_core::Tensor;
use distribute_collectives::{Compression, ReduceOp};
use distribute_input::Dataset;
use distribute_strategy::Strategy;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed};
use distribute_values::{Axis, PerReplica};

use crate::{CandleStrategy, Clip, Error, LossScale, Model, Optimizer, Result, Sgd};

type Pair = (Tensor, Tensor);

/// The compiler begins at statics, and reaches what programs call from this one.
#[used]
static PROGRAM: fn(&Strategy, &Dataset<Pair>, &mut CheckpointManager) -> Result<()> = program;

/// Calls what programs call.
fn program(strategy: &Strategy, data: &Dataset<Pair>, checkpoints: &mut CheckpointManager) -> Result<()> {
    let model: Model<()> = strategy.scope(|_| Ok(()))?;
    let optimizer = Sgd::new(0.1).build(&model)?.clip(Clip::Value(1.0))?.scale_losses(LossScale::dynamic())?;
    let optimizer = optimizer.compress(Compression::None)?.audit_every(1).zero1()?;
    train(strategy, &optimizer, data)?;
    let parts: [&dyn Checkpointed; 2] = [&model, &optimizer];
    let saved = checkpoints.restore::<u64>(strategy, &parts).and_then(|_| checkpoints.save(strategy, 1, &parts, &1u64));
    Ok(saved.map_err(candle_core::Error::wrap)?)
}

fn train(strategy: &Strategy, optimizer: &Optimizer, data: &Dataset<Pair>) -> Result<()> {
    let data = data.clone().shuffle(1, 1).batch(1).repeat(2).prefetch(1);
    for batch in &strategy.distribute_dataset(&data)? {
        let losses: PerReplica<Tensor> =
            strategy.run_with((optimizer, batch?), |context, (optimizer, (loss, _))| {
                optimizer.minimize(context, &loss)?;
                Ok::<_, Error>(loss)
            })?;
        strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?;
    }
    Ok(())
}

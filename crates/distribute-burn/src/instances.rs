//! Generic code of the crates below, compiled here for burn's types.
//!
//! Without optimisation, rustc takes a function from a crate that has it (`-Z share-generics`, the default at levels 0
//! and 1). Without this module, every program and every test would compile the code of optimizers, reductions and
//! checkpoints anew.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use distribute_collectives::Compression;
use distribute_strategy::Strategy;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed};

use crate::{BurnStrategy, Clip, LossScale, Model, Result, Sgd};

/// The compiler begins at statics, and reaches what programs call from this one.
#[used]
static PROGRAM: fn(&Strategy, &Tensor<1>, &mut CheckpointManager) -> Result<()> = program;

/// Calls what programs call.
fn program(strategy: &Strategy, loss: &Tensor<1>, checkpoints: &mut CheckpointManager) -> Result<()> {
    let model: Model<Linear> = strategy.scope(|device| LinearConfig::new(1, 1).init(device))?;
    let optimizer = Sgd::new(0.1).build(&model)?.clip(Clip::Value(1.0))?.scale_losses(LossScale::dynamic())?;
    let optimizer = optimizer.compress(Compression::None)?.audit_every(1).zero1()?;
    strategy.run_with(&optimizer, |context, optimizer| optimizer.minimize(context, loss))?;
    let parts: [&dyn Checkpointed; 2] = [&model, &optimizer];
    let saved = checkpoints.restore::<u64>(strategy, &parts).and_then(|_| checkpoints.save(strategy, 1, &parts, &1u64));
    Ok(saved?)
}

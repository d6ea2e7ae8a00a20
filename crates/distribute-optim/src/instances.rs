//! Generic code of this crate, compiled here for models in host memory.
//!
//! Without optimisation, rustc takes a function from a crate that has it (`-Z share-generics`, the default at levels 0
//! and 1). Without this module, every program and every test with such a model would compile this code anew.

use distribute_strategy::{ReplicaContext, Strategy};
use distribute_values::Host;

use crate::{Clip, HostLoss, HostModel, LossScale, Optimizer, ReplicaOptimizer, Sgd};

type Result<T> = std::result::Result<T, crate::HostError>;

/// The compiler begins at statics, and reaches what programs call from this one.
#[used]
static PROGRAM: fn(&Strategy, &HostModel) -> Result<Optimizer<Host>> = program;

/// Calls what programs call.
fn program(strategy: &Strategy, model: &HostModel) -> Result<Optimizer<Host>> {
    let optimizer = Sgd::new(0.1).build(model)?.clip(Clip::Value(1.0))?.scale_losses(LossScale::dynamic())?.zero1()?;
    strategy.run_with(&optimizer, step)?;
    Ok(optimizer)
}

fn step(context: &ReplicaContext, optimizer: ReplicaOptimizer<'_, Host>) -> Result<()> {
    optimizer.minimize(context, &HostLoss(Vec::new()))
}

//! Models written with burn, on CPUs.
//!
//! Programs import [`prelude`], which has the names of [`crate::prelude`] for burn instead of candle: both libraries'
//! traits have a method `scope`, so one program imports one of the two.
//!
//! # Examples
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Tensor, activation::relu};
//! use distribute::burn::prelude::*;
//! use distribute::input::Array;
//!
//! #[derive(Module, Debug)]
//! struct Mlp { fc1: Linear, fc2: Linear }                        // independent of distribution
//!
//! impl Mlp {
//!     fn new(device: &Device) -> Self {
//!         Mlp { fc1: LinearConfig::new(4, 8).init(device), fc2: LinearConfig::new(8, 2).init(device) }
//!     }
//!     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
//!         self.fc2.forward(relu(self.fc1.forward(x)))
//!     }
//! }
//!
//! fn train(strategy: &Strategy) -> distribute::Result<()> {      // one function for every strategy
//!     let global_batch = 4 * strategy.num_replicas_in_sync();
//!     let (images, labels) = (Array::new([20, 4], vec![1f32; 80])?, Array::from(vec![0u32; 20]));
//!     let data = Dataset::from_tensor_slices((images, labels)).shuffle(20, 42).batch(global_batch).prefetch(AUTOTUNE);
//!     let model = strategy.scope(Mlp::new)?;
//!     let optimizer = Adam::new(1e-3).build(&model)?;
//!     for batch in strategy.distribute_dataset(&data)? {
//!         let losses = strategy.run((&model, &optimizer, batch?), |ctx, (model, optimizer, (x, y))| {
//!             let logits = model.forward(ctx.tensor(&x)?);
//!             let loss = ctx.average_loss(cross_entropy_per_example(logits, ctx.int_tensor(&y)?)?, global_batch);
//!             optimizer.minimize(ctx, &loss)?;                   // backward, all-reduce, apply
//!             Ok(loss.inner())
//!         })?;
//!         assert!(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.into_scalar::<f32>() > 0.0);
//!     }
//!     Ok(())
//! }
//!
//! train(&MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?)?;
//! # Ok::<(), distribute::Error>(())
//! ```

pub use distribute_burn::*;

/// The names that programs with burn models import: strategies, datasets, optimizers, and the traits that add methods
/// to them.
pub mod prelude {
    pub use crate::derive::{ReplicaArgs, Structure};
    pub use distribute_burn::{
        Adam, AdamW, BurnContext, BurnStrategy, Items, Sgd, ToArray, Trainer, cross_entropy_per_example,
    };
    pub use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};
    pub use distribute_collectives::{ProcessGroup, ReduceOp};
    pub use distribute_input::{AUTOTUNE, Dataset, InputContext};
    pub use distribute_strategy::{
        CommunicationOptions, FullyShardedStrategy, MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy,
        ReplicaArgs, ReplicaContext, Strategy, get_replica_context, get_strategy,
    };
    pub use distribute_train::checkpoint::CheckpointManager;
    pub use distribute_values::{Axis, Mirrored, PerReplica, Structure};
}

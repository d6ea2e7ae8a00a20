//! What programs import.

#[cfg(feature = "candle")]
pub use distribute_candle::{
    Adagrad, Adam, AdamW, BinaryCrossentropy, CandleContext, CandleStrategy, CategoricalCrossentropy, Clip, Ema, Fit,
    Hinge, Huber, KlDivergence, Lamb, Loss, LossScale, MeanAbsolute, MeanSquared, Model, Optimizer, RmsProp,
    ScopeOptions, Sgd, SparseCategoricalCrossentropy, SyncBatchNorm, Trainer, cross_entropy_per_example,
    nll_per_example, sum_over_replicas, sync_batch_norm,
};
pub use distribute_collectives::{Compression, ProcessGroup, ReduceOp};
pub use distribute_derive::{ReplicaArgs, Structure};
pub use distribute_input::{AUTOTUNE, Dataset, InputContext};
pub use distribute_strategy::{
    CentralStorageStrategy, CommunicationOptions, Implementation, MirroredStrategy, MultiWorkerMirroredStrategy,
    OneDeviceStrategy, ReplicaArgs, ReplicaContext, Strategy, get_replica_context, get_strategy, has_strategy,
    in_cross_replica_context, set_strategy,
};
pub use distribute_train::checkpoint::CheckpointManager;
pub use distribute_values::{Axis, Mirrored, PerReplica, Structure};

pub use crate::{Error, Run};

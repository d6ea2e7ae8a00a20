//! The names that programs import: strategies, datasets, optimizers, and the traits that add methods to them.
//!
//! Names that a program may define itself, such as `Model`, `Loss`, `Error` or `Program`, are in the modules of this
//! crate instead: `distribute::candle::Model`, `distribute::Error`, `distribute::parameter_server::Program`.

pub use crate::derive::{ReplicaArgs, Structure};
#[cfg(feature = "candle")]
pub use distribute_candle::{
    Adam, AdamW, CandleContext, CandleStrategy, Sgd, Trainer, cross_entropy_per_example, nll_per_example,
};
#[cfg(all(feature = "candle", feature = "parameter-server"))]
pub use distribute_candle::{CandleParameterServer, CandleWorker, ServedTraining};
pub use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};
pub use distribute_collectives::{ProcessGroup, ReduceOp};
pub use distribute_input::{AUTOTUNE, Dataset, InputContext};
#[cfg(feature = "parameter-server")]
pub use distribute_parameter_server::{
    ClusterCoordinator, MinSizePartitioner, ParameterServerStrategy, PerWorkerIterator, WorkerContext,
};
pub use distribute_strategy::{
    CentralStorageStrategy, CommunicationOptions, FullyShardedStrategy, MirroredStrategy, MultiWorkerMirroredStrategy,
    OneDeviceStrategy, ReplicaArgs, ReplicaContext, Strategy, get_replica_context, get_strategy,
};
pub use distribute_train::checkpoint::CheckpointManager;
pub use distribute_values::{Axis, Mirrored, PerReplica, Structure};

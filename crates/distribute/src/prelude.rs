//! What programs import.

#[cfg(feature = "candle")]
pub use distribute_candle::{
    Adagrad, Adam, AdamW, BinaryCrossentropy, CandleContext, CandleStrategy, CategoricalCrossentropy, Clip, Ema, Fit,
    Hinge, Huber, KlDivergence, Lamb, Loss, LossScale, MeanAbsolute, MeanSquared, Model, Optimizer, RmsProp,
    ScopeOptions, Sgd, SparseCategoricalCrossentropy, SyncBatchNorm, Trainer, cross_entropy_per_example,
    nll_per_example, sum_over_replicas, sync_batch_norm,
};
#[cfg(all(feature = "candle", feature = "parameter-server"))]
pub use distribute_candle::{CandleParameterServer, CandleWorker, ShardedEmbedding, sharded_embedding};
pub use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};
pub use distribute_collectives::{Compression, ProcessGroup, ReduceOp};
pub use distribute_derive::{ReplicaArgs, Structure};
#[cfg(feature = "estimator")]
pub use distribute_estimator::{
    Categorical, DnnClassifier, DnnRegressor, Estimator, EstimatorModel, EstimatorSpec, EvalSpec, FeatureColumns,
    InputLayer, Labels, LinearClassifier, LinearModel, LinearRegressor, Mode, Numeric, RunConfig, TrainSpec, Until,
    train_and_evaluate,
};
pub use distribute_input::{AUTOTUNE, Dataset, InputContext};
#[cfg(feature = "parameter-server")]
pub use distribute_parameter_server::{
    ClusterCoordinator, EvaluationShard, FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner,
    ParameterServerStrategy, PerWorkerIterator, Program, RemoteValue, Server, Updates, WorkerContext,
};
pub use distribute_strategy::{
    CentralStorageStrategy, CommunicationOptions, Implementation, MirroredStrategy, MultiWorkerMirroredStrategy,
    OneDeviceStrategy, ReplicaArgs, ReplicaContext, Strategy, get_replica_context, get_strategy, has_strategy,
    in_cross_replica_context, set_strategy,
};
pub use distribute_train::checkpoint::CheckpointManager;
pub use distribute_values::{Axis, Mirrored, PerReplica, Structure};

pub use crate::Error;

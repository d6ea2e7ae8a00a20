//! What programs import.

#[cfg(feature = "candle")]
pub use distribute_candle::{
    Adagrad, Adam, AdamW, BinaryCrossentropy, CandleContext, CandleParameterServer, CandleStrategy, CandleWorker,
    Categorical, CategoricalCrossentropy, Clip, DnnClassifier, DnnRegressor, Ema, Estimator, EstimatorModel,
    EstimatorSpec, EvalSpec, FeatureColumns, Fit, Hinge, Huber, InputLayer, KlDivergence, Labels, Lamb,
    LinearClassifier, LinearModel, LinearRegressor, Loss, LossScale, MeanAbsolute, MeanSquared, Mode, Model, Numeric,
    Optimizer, RmsProp, RunConfig, ScopeOptions, Sgd, ShardedEmbedding, SparseCategoricalCrossentropy, SyncBatchNorm,
    TrainSpec, Trainer, Until, cross_entropy_per_example, nll_per_example, sharded_embedding, sum_over_replicas,
    sync_batch_norm, train_and_evaluate,
};
pub use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};
pub use distribute_collectives::{Compression, ProcessGroup, ReduceOp};
pub use distribute_derive::{ReplicaArgs, Structure};
pub use distribute_input::{AUTOTUNE, Dataset, InputContext};
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

pub use crate::{Error, Run};

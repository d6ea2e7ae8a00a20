//! Strategies: where the replicas of a program run, and how their values are combined.
//!
//! One concrete handle, [`Strategy`], stands for all of them, so programs never become generic over strategies:
//!
//! - [`Strategy::default_strategy`] and [`OneDeviceStrategy`]: one replica.
//! - [`MirroredStrategy`]: several replicas in this process, each with its own copy of every variable.
//! - [`CentralStorageStrategy`]: several replicas in this process that share one copy of every variable.
//! - [`MultiWorkerMirroredStrategy`]: mirrored over several processes.
//! - [`DilocoStrategy`]: replicas of another strategy that train apart for many steps, for slow networks.
//! - [`FullyShardedStrategy`]: replicas in one or several processes, each with a part of every large parameter.
//!
//! Code inside [`Strategy::run_with`] uses a [`ReplicaContext`]; code outside is in the cross-replica context and uses
//! [`Strategy`] itself. Authors of strategies implement [`StrategyExtended`]; replicas that
//! do not sum their gradients follow [`LocalUpdates`].
//!
//! The crate depends on no tensor library: values enter through [`distribute_values::TensorStorage`].
//!
//! # Examples
//! ```
//! use distribute_collectives::ReduceOp;
//! use distribute_strategy::{Error, MirroredStrategy};
//! use distribute_values::{Axis, HostTensor};
//!
//! let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
//! let losses = strategy.run_with((), |context, ()| {
//!     Ok::<_, Error>(HostTensor::scalar(context.replica_id() as f64))
//! })?;
//! let loss = strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?;
//! assert_eq!(distribute_values::TensorStorage::to_elements::<f64>(&loss)?, [1.0]);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Invariants
//! - The replicas of a run are on threads of their own, all at the same time.
//! - If a replica fails or panics, all others stop waiting, and `run` returns the first failure.
//! - A failed run leaves the state of all replicas as it was when its last step was committed ([`Recoverable`]).
//! - Strategies can be created and dropped repeatedly within one process. The only one that stays is the default
//!   strategy of [`get_strategy`], once that was asked for it.

mod agreement;
mod alone;
mod args;
mod central_storage;
mod chosen;
mod communication;
mod context;
mod devices;
mod diloco;
mod elastic;
mod error;
mod fully_sharded;
mod generations;
mod input;
mod intra_op;
mod local_updates;
mod merge;
mod mesh;
mod mirrored;
mod moving_average;
mod multi_worker;
mod one_device;
#[cfg(feature = "pjrt")]
mod pjrt_replicas;
mod raise;
mod random;
mod recoverable;
mod recovery;
mod replica_threads;
mod replicas;
mod run;
mod running;
mod settings;
mod sharding;
mod step_header;
mod strategy;
#[cfg(feature = "pjrt")]
mod tpu;
mod waits;
mod workers;

pub use args::{Examples, ReplicaArgs, counted};
pub use central_storage::{CentralStorageBuilder, CentralStorageStrategy};
pub use communication::{CommunicationOptions, Implementation};
pub use context::{
    ReplicaContext, get_replica_context, get_strategy, has_strategy, in_cross_replica_context, set_strategy,
};
pub use diloco::{DilocoBuilder, DilocoStrategy, FragmentSchedule, Int8Blocks, OuterNesterov, Wire};
pub use distribute_cluster::{MemberStates, Missing};
pub use distribute_types::{Topology, Waits};
pub use error::{Error, Result};
pub use fully_sharded::{FullyShardedBuilder, FullyShardedStrategy};
pub use generations::Gathering;
pub use input::{DistributedDataset, DistributedIterator};
pub use local_updates::{
    ChangeSlots, LocalExtent, LocalInitial, LocalOccasion, LocalReplica, LocalSlot, LocalUpdates, LocalVariable,
    ReadSlots,
};
pub use mirrored::{MirroredBuilder, MirroredStrategy};
pub use moving_average::MovingAverage;
pub use multi_worker::{MultiWorkerMirroredBuilder, MultiWorkerMirroredStrategy};
pub use one_device::{OneDeviceBuilder, OneDeviceStrategy};
#[cfg(feature = "pjrt")]
pub use pjrt_replicas::PjrtReplicas;
pub use raise::raise;
pub use random::{RandomState, ReplicaRandom};
pub use recoverable::{Recoverable, RecoveryError};
pub use replicas::Replicas;
pub use run::FailsWith;
pub use sharding::{ShardGroups, Sharding};
pub use step_header::{Request, Requests, StepHeader};
pub use strategy::{Strategy, StrategyExtended, ValueContext};
#[cfg(feature = "pjrt")]
pub use tpu::{TpuBuilder, TpuStrategy};
pub use waits::WeakStrategy;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

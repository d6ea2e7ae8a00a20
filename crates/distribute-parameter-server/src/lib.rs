//! Training against parameter servers: variables live on servers, workers compute gradients, and a coordinator
//! schedules the work.
//!
//! - [`Server`]: the service of workers and parameter servers, with the [`Program`] whose functions are called by name.
//! - [`ParameterServerStrategy`]: creates variables on servers, split by a [`Partitioner`]; [`ShardedVariable`] reads
//!   and writes one as a whole.
//! - [`ClusterCoordinator`]: schedules functions on workers, whose results are [`RemoteValue`]s.
//! - [`WorkerContext`]: the context of a function: variables, its dataset, objects kept between calls.
//! - [`DecoupledDilocoStrategy`]: an island that trains apart from others, for many steps at a time, and exchanges
//!   parameters with the [`OuterServer`]s, without a coordinator.
//! - [`Updates`]: whether gradients are applied asynchronously, with bounded staleness, or synchronously.
//!
//! The crate depends on no tensor library: gradients and values are elements in host memory. Optimizers run on the
//! servers, with the same arithmetic as everywhere ([`distribute_rules::UpdateRule`]).
//!
//! # Examples
//! Server, worker and coordinator in one process; usually each is a process of its own, with TF_CONFIG:
//! ```
//! use distribute_cluster::{ClusterSpec, SimpleResolver, TaskType};
//! use distribute_parameter_server::{ClusterCoordinator, Error, ParameterServerStrategy};
//! use distribute_parameter_server::{Program, Server, WorkerContext};
//! use distribute_values::{HostTensor, TensorStorage};
//!
//! fn count(worker: &WorkerContext, by: f64) -> Result<usize, Error> {
//!     worker.assign_add(&worker.variable("total")?, &HostTensor::scalar(by))?;
//!     Ok(worker.worker_index())
//! }
//!
//! # let free = || Ok::<_, std::io::Error>(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string());
//! # let (ps, worker) = (free().unwrap(), free().unwrap());
//! let spec = ClusterSpec::new().with_job(TaskType::Ps, [ps])?.with_job(TaskType::Worker, [worker])?;
//! let program = Program::new().function("count", count);
//! let task = |kind| {
//!     let (spec, task_type) = (spec.clone(), Some(kind));
//!     SimpleResolver { spec, task_type, task_id: Some(0), ..Default::default() }
//! };
//! let server = Server::start(&task(TaskType::Ps), program.clone())?;
//! let worker = Server::start(&task(TaskType::Worker), program.clone())?;
//!
//! let strategy = ParameterServerStrategy::builder(&task(TaskType::Chief)).build()?;
//! let total = strategy.untrained("total", &HostTensor::scalar(0.0))?;
//! let coordinator = ClusterCoordinator::new(&strategy, program)?;
//! for _ in 0..4 {
//!     coordinator.schedule("count", &0.5)?;
//! }
//! coordinator.join()?;
//! assert_eq!(total.read::<f64>()?.to_elements::<f64>()?, [2.0]);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Invariants
//! - When `join` returns `Ok`, all scheduled closures have run. With [`Delivery::EffectivelyOnce`] each of their
//!   changes was made exactly once on every server that has kept its variables.
//! - A lost worker does not delay others, and what it still sends after it was given up changes nothing.
//! - Every wait ends: with an answer, with an error that names the task, or with the coordinator.

mod checkout;
mod context;
mod coordinator;
mod dispatch;
mod error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod lifetime;
mod message;
mod numbers;
mod outer;
mod parameters;
mod partitioner;
mod placement;
mod program;
mod progress;
mod queue;
mod remote_value;
mod roles;
mod server;
mod server_methods;
mod serving;
mod signals;
mod steps;
mod store;
mod strategy;
mod updates;
mod variable;
mod wire;
mod worker;

pub use context::{PerWorkerIterator, WorkerContext};
pub use coordinator::{
    ClusterCoordinator, CoordinatorOptions, Delivery, EvaluationShard, PerWorkerDataset, WorkerState,
};
pub use error::{BoxError, Error, Result};
pub use outer::{
    DecoupledDilocoBuilder, DecoupledDilocoStrategy, OuterExchange, OuterOutcome, OuterServer, OuterServerOptions,
};
pub use parameters::{Gradient, ShardInfo, Traffic, VariableInfo, Versions};
pub use partitioner::{FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner, Partitioner};
pub use placement::Placement;
pub use program::Program;
pub use remote_value::{RemoteValue, RemoteValueStatus};
pub use server::{Server, ServerOptions};
pub use strategy::{ParameterServerOptions, ParameterServerStrategy, ParameterServerStrategyBuilder};
pub use updates::Updates;
pub use variable::ShardedVariable;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

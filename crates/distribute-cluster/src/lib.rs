//! Cluster specifications, resolvers and the coordination service of a distributed program.
//!
//! - [`ClusterSpec`]: the jobs of a cluster and the addresses of their tasks; a [`Task`] is printed `worker:3`.
//! - [`ClusterResolver`]: a source of cluster specifications: [`TfConfigResolver`], [`SlurmResolver`],
//!   [`SageMakerResolver`], [`SimpleResolver`] and [`UnionResolver`]; with the Cargo features `gce`, `tpu` and
//!   `kubernetes` also [`GceResolver`], [`tpu::TpuResolver`] and [`KubernetesResolver`].
//! - [`Membership`]: this process's rank among the processes that train together, from TF_CONFIG, RANK and WORLD_SIZE,
//!   or the variables of other launchers.
//! - [`JobId`]: the identity of a job, which members verify when they connect; [`Incarnation`]: one start of it.
//! - [`JobSecret`]: a secret that all processes of a job prove to each other on every connection; [`secret`] has the
//!   exchange.
//! - [`JobTls`]: the certificate by which a process takes part in mutual TLS; [`tls`] has the handshake. Cargo feature
//!   `tls`.
//! - [`Coordination`]: a service by which the members join, exchange small values, and learn of each other's failures.
//!   Cargo feature `coordination`, enabled by default.
//! - [`ElasticJob`]: decides which processes form a job, anew when one fails, joins or leaves. Cargo feature
//!   `coordination`.
//! - [`Rendezvous`]: what a process group needs to form: [`Coordination`], or a [`Store`] that all members reach, such
//!   as a [`FileStore`] in a shared folder, through [`StoreRendezvous`].
//! - [`grpc`]: calls between tasks with large payloads. Cargo feature `grpc`.
//! - [`threads`]: threads for such calls, which any thread can wait for. Cargo feature `grpc`.
//!
//! The crate moves no tensors and does not depend on devices. Everything but the meeting itself, [`look_up`] and
//! requests to clouds and to Kubernetes is a pure function of the variables that it is given.
//!
//! # Examples
//! ```
//! use distribute_cluster::{Membership, TfConfigResolver};
//!
//! let json = r#"{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 1}}"#;
//! let resolver = TfConfigResolver::from_json(json)?;
//! let membership = Membership::from_resolver(&resolver)?.expect("there is a cluster");
//! assert_eq!((membership.rank, membership.world_size()), (1, 2));
//! assert_eq!(membership.leader_address, "10.0.0.1:2222");
//! # Ok::<(), distribute_cluster::Error>(())
//! ```

// Hosted documentation has all features; without some, links to what they add lead nowhere.
#![cfg_attr(
    not(all(
        feature = "coordination",
        feature = "gce",
        feature = "grpc",
        feature = "kubernetes",
        feature = "tls",
        feature = "tpu"
    )),
    allow(rustdoc::broken_intra_doc_links)
)]

mod bounded_file;
#[cfg(feature = "coordination")]
mod coordination;
#[cfg(feature = "coordination")]
mod elastic;
mod environment;
mod error;
mod failure;
#[cfg(feature = "coordination")]
mod frames;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
#[cfg(feature = "gce")]
mod gce;
#[cfg(feature = "grpc")]
pub mod grpc;
mod het_step;
mod host;
mod hostlist;
#[cfg(any(feature = "gce", feature = "tpu"))]
mod http;
#[cfg(feature = "coordination")]
mod incoming;
mod interface;
mod job;
mod json;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod local_place;
mod membership;
#[cfg(feature = "coordination")]
mod messages;
#[cfg(any(feature = "gce", feature = "tpu"))]
mod metadata;
mod names;
#[cfg(feature = "coordination")]
mod net;
#[cfg(any(feature = "gce", feature = "tpu"))]
mod place;
mod planted;
mod process_manager;
mod rendezvous;
mod resolver;
mod rules;
mod sage_maker;
pub mod secret;
mod slurm;
mod spec;
mod store;
mod task;
mod text;
mod tf_config;
#[cfg(feature = "grpc")]
pub mod threads;
pub mod tls;
#[cfg(feature = "tpu")]
pub mod tpu;
mod union;

#[cfg(feature = "coordination")]
pub use coordination::{Coordination, CoordinationOptions, Progress, Waiting};
pub use distribute_types::{FailureKind, Scope};
#[cfg(feature = "coordination")]
pub use elastic::{
    Authority, ElasticJob, ElasticMember, ElasticOptions, FileRegister, Generation, HeldState, MemberStates, Missing,
    Register, StateVersion,
};
pub use error::{Error, Result};
pub use failure::{Failure, FailureCause};
#[cfg(feature = "gce")]
pub use gce::{GceEvent, GceMaintenance, GceOptions, GceResolver};
pub use host::{HostDecision, LocalHost};
#[cfg(any(feature = "gce", feature = "tpu"))]
pub use http::{AccessToken, RequestOptions};
#[cfg(feature = "coordination")]
pub use incoming::{Acquaintance, Connection, Door, Incoming};
pub use interface::InterfaceChoice;
pub use job::{Incarnation, JobId};
#[cfg(all(feature = "coordination", feature = "kubernetes"))]
pub use kubernetes::LeaseRegister;
#[cfg(feature = "kubernetes")]
pub use kubernetes::{KubernetesAccess, KubernetesLocation, KubernetesOptions, KubernetesResolver};
pub use local_place::LocalPlace;
pub use membership::Membership;
pub use names::look_up;
#[cfg(any(feature = "gce", feature = "tpu"))]
pub use place::OwnTask;
pub use rendezvous::{Rendezvous, StoreRendezvous};
pub use resolver::{ClusterResolver, SimpleResolver};
pub use rules::{collective_leader, coordination_leader, id_in_cluster, is_chief, worker_count};
pub use sage_maker::SageMakerResolver;
pub use secret::JobSecret;
pub use slurm::{SlurmOptions, SlurmResolver};
pub use spec::ClusterSpec;
pub use store::{FileStore, Store};
pub use task::{Task, TaskType};
pub use text::printable;
pub use tf_config::{TfConfigOverrides, TfConfigResolver};
pub use tls::JobTls;
pub use union::UnionResolver;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

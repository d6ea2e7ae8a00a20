//! Derives for structs that go into distributed runs and come out of them.
//!
//! # Examples
//! The result of a run, reduced field by field:
//! ```
//! use distribute::prelude::*;
//!
//! #[derive(Structure)]
//! struct Metrics {
//!     loss: f64,
//!     correct: u64,
//! }
//!
//! let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
//! let metrics = strategy.run((), |context, ()| Ok(Metrics { loss: 0.5, correct: context.replica_id() as u64 }))?;
//! let sum = strategy.reduce(ReduceOp::Sum, &metrics, Axis::None)?;
//! assert_eq!((sum.loss, sum.correct), (1.0, 1));
//! # Ok::<(), distribute::Error>(())
//! ```
//!
//! The arguments of a run, of which each replica gets its part:
//! ```
//! use distribute::prelude::*;
//!
//! #[derive(ReplicaArgs)]
//! struct Step<W, B> {
//!     weight: W,
//!     batch: B,
//!     epoch: usize,
//! }
//!
//! let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
//! let weight = Mirrored::new(vec![0.5, 0.5]);
//! let step = Step { weight: &weight, batch: PerReplica::new(vec![2.0, 4.0]), epoch: 1 };
//! // Each replica gets a Step<&f64, f64>.
//! let results = strategy.run(step, |_, step| Ok(step.weight * step.batch))?;
//! assert_eq!(results.values(), [1.0, 2.0]);
//! # Ok::<(), distribute::Error>(())
//! ```

pub use distribute_derive::{ReplicaArgs, Structure};

//! Test harness of the distribute workspace: processes, ports, deadlines and data.
//!
//! - [`Job`] starts a program several times, like the tasks of a distributed job. It captures their output, kills,
//!   stops and continues them, and waits for lines and exits with a deadline.
//! - [`Ports`] reserves loopback ports, [`target_binary`] finds programs built by cargo, and [`within`] sets a time
//!   limit for a test.
//! - `certificates` (feature `certificates`) makes authorities and certificates, also such as are refused.
//! - `digits` (feature `digits`) draws handwritten digits, for programs that train something.
//! - [`Family`] tracks every process that descends from a command, even if it was orphaned, and checks that none is
//!   left.
//! - [`skipped`] shows why a test was skipped, also where its output is captured; [`show_skips`] passes on such lines
//!   of a program that a test has started.
//! - [`show_log`] has a test that fails show what the workspace has logged.
//! - [`short_or_long`] chooses between the form of a test that `cargo test` runs and that of `cargo xtask ci`.
//! - [`apart`] measures how far results are from what is expected; NaN and missing results are infinitely far.
//! - [`CountingAllocator`] counts the bytes that a process uses.
//! - [`replay`] runs a fuzz target on its corpus and on changes of it, without a fuzzer.
//! - [`simulation`] runs scenarios that follow from seeds, and shortens those in which something is wrong.
//! - [`Slurm`] starts Slurm's daemons on this machine, where they are installed.
//! - [`with_object_server`] runs a test against an S3 server, over a [`Relay`] that cuts and delays connections.
//!
//! The harness does not depend on clusters: the test sets the environment variables of its tasks. It supports Linux
//! only, whose `/proc` it reads.
//!
//! # Examples
//!
//! ```
//! use std::time::Duration;
//! use distribute_testkit::{Job, Signal};
//!
//! # fn main() -> Result<(), distribute_testkit::Error> {
//! let mut job = Job::builder("sh")
//!     .args(["-c", "echo ready $RANK; exec sleep 60"])
//!     .tasks(2)
//!     .task_env(|rank| vec![("RANK".into(), rank.to_string())])
//!     .start()?;
//! let second = Duration::from_secs(10);
//! assert_eq!(job.wait_for_line(1, "ready", second)?, "ready 1");
//! job.kill(0, Signal::KILL)?;
//! job.kill(1, Signal::TERM)?;
//! let outcomes = job.wait_all(second)?;
//! assert_eq!((outcomes[0].signal, outcomes[1].signal), (Some(9), Some(15)));
//! # Ok(())
//! # }
//! ```
//!
//! # Invariants
//!
//! Every wait ends at a deadline. A job that is dropped leaves no process, and neither does a test process that is
//! killed.

mod apart;
mod binary;
mod capture;
#[cfg(feature = "certificates")]
pub mod certificates;
mod corpus;
mod counting_allocator;
mod deadline;
#[cfg(feature = "digits")]
pub mod digits;
mod error;
mod family;
mod hook;
mod job;
mod length;
mod log;
mod object_server;
mod ports;
pub mod simulation;
mod skip;
mod slurm;

pub use apart::apart;
pub use binary::target_binary;
pub use corpus::{FuzzTarget, replay};
pub use counting_allocator::CountingAllocator;
pub use deadline::within;
pub use error::Error;
pub use family::Family;
pub use job::{Job, JobBuilder, Outcome};
pub use length::short_or_long;
pub use log::show_log;
pub use object_server::{Relay, RelayFault, with_object_server};
pub use ports::Ports;
pub use rustix::process::Signal;
pub use skip::{show_skips, skipped};
pub use slurm::Slurm;

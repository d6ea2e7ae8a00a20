//! The state of a running job, as a page, as JSON and for Prometheus.
//!
//! A [`Job`] is a model: it takes what is known of tasks (their processes from the launcher, their steps from
//! [messages](crate::progress::Message)) and returns a [`View`]. It does no input or output. A [`Board`] shares it
//! between threads, and a [`Server`] serves it:
//!
//! | path | answer |
//! |---|---|
//! | `/` | a page that updates itself every second |
//! | `/status.json` | the [`View`] as JSON |
//! | `/metrics` | the same numbers in the OpenMetrics text format |
//!
//! `distribute run --status` and [`callbacks::StatusPage`](crate::callbacks::StatusPage) combine these.
//!
//! # Examples
//! ```
//! use distribute_train::status::{Board, Job, Server};
//!
//! let mut job = Job::new("mnist");
//! job.expect("worker:0");
//! let board = Board::new(job);
//! let server = Server::serve("127.0.0.1:0", &board)?;                  // a free port
//! board.update(|job, now| job.start("worker:0", 4711, now));
//! println!("http://{}", server.address());
//! # Ok::<(), distribute_train::Error>(())
//! ```

mod board;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod job;
mod metrics;
mod pages;
mod reports;
mod server;
mod view;

pub use board::Board;
pub use job::{End, Job};
pub use server::Server;
pub use view::{JobView, State, Story, TaskView, Value, View};

#[cfg(feature = "checkpoint")]
pub(crate) use pages::routes;
#[cfg(feature = "checkpoint")]
pub(crate) use server::bind;
#[cfg(feature = "prometheus")]
pub(crate) use server::{OPEN_METRICS, Routes, answer};

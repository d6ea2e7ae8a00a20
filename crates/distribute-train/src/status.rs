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
//! A [`Collector`] takes the tasks' reports, and a [`Place`] asks a running job, as `distribute top` does.
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
mod client;
mod collector;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod job;
mod metrics;
mod pages;
#[cfg(feature = "checkpoint")]
mod port;
#[cfg(unix)]
mod private;
mod reports;
mod server;
mod view;

pub use board::Board;
pub use client::Place;
pub use collector::Collector;
pub use job::{End, Job};
#[cfg(unix)]
pub use private::Private;
pub use server::Server;
pub use view::{CollectiveView, JobView, RankView, State, Story, TaskView, Value, View};

#[cfg(feature = "checkpoint")]
pub(crate) use pages::routes;
#[cfg(feature = "checkpoint")]
pub(crate) use port::{Port, RELEASE};
#[cfg(feature = "prometheus")]
pub(crate) use server::{OPEN_METRICS, Routes, answer};

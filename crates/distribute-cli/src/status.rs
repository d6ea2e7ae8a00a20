//! The status page of a job: what the tasks report of themselves, and what the launcher knows of their processes.

#[cfg(not(feature = "status"))]
mod absent;
#[cfg(feature = "status")]
mod page;

#[cfg(not(feature = "status"))]
pub(crate) use absent::{Options, Status};
#[cfg(feature = "status")]
pub(crate) use page::{Options, Status};

//! The state of a job, for `distribute top` and on a page: what the tasks report of themselves, and what the launcher
//! knows of their processes.

#[cfg(not(feature = "status"))]
mod absent;
#[cfg(feature = "status")]
mod page;

#[cfg(not(feature = "status"))]
pub(crate) use absent::{Options, Status};
#[cfg(feature = "status")]
pub(crate) use page::{Options, Status};

/// Where the tasks are that report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reports {
    OfThisHost,
    OfAllHosts,
}

#[cfg(feature = "status")]
impl Reports {
    /// Returns the address to listen on.
    fn address(self) -> &'static str {
        match self {
            Reports::OfThisHost => "127.0.0.1:0",
            Reports::OfAllHosts => "0.0.0.0:0",
        }
    }
}

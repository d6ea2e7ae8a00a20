//! The launcher's side of the reports, and the questions of its user.

use std::net::SocketAddr;

#[cfg(unix)]
use super::private::Private;
use super::server::{Background, address_of, bind};
use super::{Board, reports};
use crate::Result;

/// Takes the reports of tasks until it is dropped, which waits at most a second; with a [`Private`] socket, it also
/// answers the user of the job there.
///
/// # Examples
/// ```
/// use distribute_train::status::{Board, Collector, Job};
///
/// let mut job = Job::new("mnist");
/// job.expect("worker:0");
/// let collector = Collector::start("127.0.0.1:0", None, &Board::new(job))?;
/// println!("DISTRIBUTE_STATUS_ADDR={}", collector.reports_address());
/// # Ok::<(), distribute_train::Error>(())
/// ```
#[derive(Debug)]
pub struct Collector {
    reports: SocketAddr,
    _background: Background,
}

/// A socket where there is none.
#[cfg(not(unix))]
type Private = std::convert::Infallible;

impl Collector {
    /// Takes reports at an address of this machine: that for the tasks' `DISTRIBUTE_STATUS_ADDR`. Port 0 is a free one.
    ///
    /// # Errors
    /// [`Error::Listen`](crate::Error::Listen) if the address cannot be listened on;
    /// [`Error::Thread`](crate::Error::Thread) if the thread cannot be started.
    pub fn start(reports: &str, private: Option<Private>, board: &Board) -> Result<Collector> {
        let listener = bind(reports)?;
        let reports = address_of(&listener)?;
        let board = board.clone();
        let serve = async move || {
            let answer = async {
                match private {
                    #[cfg(unix)]
                    Some(private) => private.serve(&board).await,
                    #[cfg(not(unix))]
                    Some(private) => match private {},
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                outcome = reports::collect(listener, board.clone()) => outcome,
                outcome = answer => outcome,
            }
        };
        Ok(Collector { reports, _background: Background::start("collector", serve)? })
    }

    /// Returns the address at which tasks report.
    pub fn reports_address(&self) -> SocketAddr {
        self.reports
    }
}

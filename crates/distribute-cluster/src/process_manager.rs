//! The process manager of MPICH and Intel MPI (Hydra), which is asked for the name of the job and the host of rank 0.
//!
//! The manager leaves each process a socket, whose number is PMI_FD, and speaks version 1 of the process management
//! interface on it: lines of `key=value`, one answer to each request.
//!
//! # Source
//! *PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems* (Balaji et al., EuroMPI 2010), and
//! `simple_pmi.c` of MPICH.

use std::sync::Mutex;

use crate::{Error, Result};

#[cfg(unix)]
mod socket;

#[cfg(not(unix))]
use self::absent as converse;
#[cfg(unix)]
use self::socket::converse;

/// The manager's knowledge of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Meeting {
    /// A name that no other job of the manager's host has.
    pub(crate) job: String,
    /// The host of rank 0; `None` if all processes share this one.
    pub(crate) host: Option<String>,
}

/// Asks the manager of this process, once: a second conversation is not possible.
///
/// If the job has several hosts, this waits until all of its processes ask.
pub(crate) fn ask(variable: &dyn Fn(&str) -> Option<String>) -> Result<Meeting> {
    static ASKED: Mutex<Option<Meeting>> = Mutex::new(None);
    let mut asked = ASKED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(meeting) = &*asked {
        return Ok(meeting.clone());
    }
    let meeting = converse(variable)?;
    Ok(asked.insert(meeting).clone())
}

/// Returns an error: without the process's own environment there is no manager to ask.
pub(crate) fn absent(_: &dyn Fn(&str) -> Option<String>) -> Result<Meeting> {
    Err(failed("MASTER_ADDR is not set, and the process manager is asked by the program itself", "no MASTER_ADDR"))
}

fn failed(problem: &str, given: &str) -> Error {
    Error::config(
        "the process manager of PMI_RANK and PMI_SIZE",
        problem,
        given,
        "an answer, as from mpiexec of MPICH",
        "Set MASTER_ADDR and MASTER_PORT on every process, such as with mpiexec -genv MASTER_ADDR HOST.",
    )
}

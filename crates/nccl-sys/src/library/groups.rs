//! Groups: calls that are launched together. A group belongs to the thread that opened it.

use super::{Library, Progress};
use crate::{Error, SimInfo};

impl Library {
    /// Calls `ncclGroupStart`: calls of this thread from here to the matching [`group_end`](Self::group_end) are
    /// launched together. Groups nest; only the outermost one launches.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    pub fn group_start(&self) -> Result<(), Error> {
        let _: Progress = call!(self, ncclGroupStart())?;
        Ok(())
    }

    /// Calls `ncclGroupEnd`: launches the calls of the group. Returns [`Progress::InProgress`] if one of its
    /// communicators is non-blocking.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error, including one from a call within the group.
    pub fn group_end(&self) -> Result<Progress, Error> {
        call!(self, ncclGroupEnd())
    }

    /// Calls `ncclGroupSimulateEnd`: launches nothing and returns the estimated cost of the group. Since 2.22.
    ///
    /// # Errors
    /// [`Error::Missing`] with an older NCCL, [`Error::Call`] if NCCL returns an error.
    pub fn group_simulate_end(&self) -> Result<SimInfo, Error> {
        let mut info = SimInfo::new();
        let _: Progress = call!(self, ncclGroupSimulateEnd(&mut info))?;
        Ok(info)
    }
}

//! Groups: calls that are launched together. A group belongs to the thread that opened it.

use super::{Library, Progress};
use crate::{Error, SimInfo};

impl Library {
    /// `ncclGroupStart`: what this thread calls from here to the matching [`group_end`](Self::group_end) is launched
    /// together. Groups nest; the outermost counts.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn group_start(&self) -> Result<(), Error> {
        let _: Progress = call!(self, ncclGroupStart())?;
        Ok(())
    }

    /// `ncclGroupEnd`: launches what the group has collected. [`Progress::InProgress`] where one of its communicators is
    /// non-blocking.
    ///
    /// # Errors
    /// [`Error::Call`], also with what a call within the group did wrong.
    pub fn group_end(&self) -> Result<Progress, Error> {
        call!(self, ncclGroupEnd())
    }

    /// `ncclGroupSimulateEnd`: launches nothing, and tells what the group would cost. From 2.22 on.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Call`].
    pub fn group_simulate_end(&self) -> Result<SimInfo, Error> {
        let mut info = SimInfo::new();
        let _: Progress = call!(self, ncclGroupSimulateEnd(&mut info))?;
        Ok(info)
    }
}

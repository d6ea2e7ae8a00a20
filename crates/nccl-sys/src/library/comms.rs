//! Communicators: creation, queries and destruction.

use std::ffi::c_int;
use std::ptr;

use super::{Comm, Library, Progress};
use crate::{Code, Config, Error, UniqueId};

impl Library {
    /// The colour of a rank that joins no communicator of a [`comm_split`](Self::comm_split).
    pub const NO_COLOR: c_int = -1;
    /// The flag of [`comm_shrink`](Self::comm_shrink) that first aborts the parent's operations, for use after the loss
    /// of a peer.
    pub const SHRINK_ABORT: c_int = 1;

    /// Calls `ncclCommInitRank`: joins as `rank` of `ranks`. Waits for all other ranks without a time limit, so several
    /// ranks of one thread must join within a group.
    ///
    /// # Errors
    /// [`Error::Call`] if there is no device or driver, two ranks use one device, or the process that created the id
    /// has ended.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `comm` is valid for writes.
    pub unsafe fn comm_init_rank(
        &self,
        comm: *mut Comm,
        ranks: c_int,
        id: UniqueId,
        rank: c_int,
    ) -> Result<Progress, Error> {
        call!(self, ncclCommInitRank(comm, ranks, id, rank))
    }

    /// Calls `ncclCommInitRankConfig`: joins as `rank` of `ranks` with settings, such as non-blocking calls.
    ///
    /// # Errors
    /// [`Error::ConfigTooNew`] if this NCCL would ignore a setting; [`Error::Call`] if a setting's value is invalid, or
    /// as for [`comm_init_rank`](Self::comm_init_rank).
    ///
    /// # Safety
    /// The requirements of [`Library`]; `comm` is valid for writes, for a non-blocking communicator until it is no
    /// longer in progress.
    pub unsafe fn comm_init_rank_config(
        &self,
        comm: *mut Comm,
        ranks: c_int,
        id: UniqueId,
        rank: c_int,
        config: &Config<'_>,
    ) -> Result<Progress, Error> {
        let mut config = self.readable(config)?;
        call!(self, ncclCommInitRankConfig(comm, ranks, id, rank, &mut config))
    }

    /// Calls `ncclCommInitAll`: creates the communicators of `count` devices of this process, one rank each.
    ///
    /// # Errors
    /// [`Error::Call`] if a device does not exist or is given twice.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `comms` is valid for `count` writes; `devices` has `count` entries, or is null
    /// for the first `count` devices.
    pub unsafe fn comm_init_all(
        &self,
        comms: *mut Comm,
        count: c_int,
        devices: *const c_int,
    ) -> Result<Progress, Error> {
        call!(self, ncclCommInitAll(comms, count, devices))
    }

    /// Calls `ncclCommFinalize`: waits for issued operations and ends the communication;
    /// [`comm_destroy`](Self::comm_destroy) then frees the remaining resources.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; no operation is issued afterwards.
    pub unsafe fn comm_finalize(&self, comm: Comm) -> Result<Progress, Error> {
        call!(self, ncclCommFinalize(comm))
    }

    /// Calls `ncclCommDestroy`: frees a communicator, finalizing it first if necessary. May wait for other ranks of the
    /// machine, without a time limit for one that has died.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; the communicator is not used afterwards.
    pub unsafe fn comm_destroy(&self, comm: Comm) -> Result<Progress, Error> {
        call!(self, ncclCommDestroy(comm))
    }

    /// Calls `ncclCommAbort`: aborts running operations and frees the communicator. Any thread may call it, even while
    /// another thread waits in a call on it.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; the communicator is not used afterwards.
    pub unsafe fn comm_abort(&self, comm: Comm) -> Result<Progress, Error> {
        call!(self, ncclCommAbort(comm))
    }

    /// Calls `ncclCommGetAsyncError`: returns the communicator's state: [`Code::SUCCESS`], [`Code::IN_PROGRESS`] while
    /// a non-blocking one is busy, or the error that broke it, such as [`Code::REMOTE_ERROR`], after which only
    /// [`comm_abort`](Self::comm_abort) is allowed.
    ///
    /// # Errors
    /// [`Error::Call`] if the query itself fails.
    ///
    /// # Safety
    /// The requirements of [`Library`].
    pub unsafe fn comm_async_error(&self, comm: Comm) -> Result<Code, Error> {
        let mut state = Code::SUCCESS;
        let _: Progress = call!(self, ncclCommGetAsyncError(comm, &mut state))?;
        Ok(state)
    }

    /// Calls `ncclCommSplit`: creates a communicator of the ranks that pass the same `color`, ordered by `key`, then by
    /// rank; null for [`NO_COLOR`](Self::NO_COLOR). Every rank must call it. Without a configuration it inherits the
    /// parent's.
    ///
    /// # Errors
    /// [`Error::ConfigTooNew`] if this NCCL would ignore a setting, [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `new` is valid for writes, for a non-blocking communicator until it is no
    /// longer in progress.
    pub unsafe fn comm_split(
        &self,
        comm: Comm,
        color: c_int,
        key: c_int,
        new: *mut Comm,
        config: Option<&Config<'_>>,
    ) -> Result<Progress, Error> {
        let mut config = config.map(|config| self.readable(config)).transpose()?;
        let config = config.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        call!(self, ncclCommSplit(comm, color, key, new, config))
    }

    /// Calls `ncclCommShrink`: creates a communicator of all ranks but `excluded`, which do not call it. Since 2.27.
    ///
    /// # Errors
    /// [`Error::Missing`] with an older NCCL: create a new communicator instead. [`Error::ConfigTooNew`] if this NCCL
    /// would ignore a setting, [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `new` is valid for writes, for a non-blocking communicator until it is no
    /// longer in progress.
    pub unsafe fn comm_shrink(
        &self,
        comm: Comm,
        excluded: &[c_int],
        new: *mut Comm,
        config: Option<&Config<'_>>,
        flags: c_int,
    ) -> Result<Progress, Error> {
        let mut config = config.map(|config| self.readable(config)).transpose()?;
        let config = config.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        let mut excluded = excluded.to_vec();
        let count = c_int::try_from(excluded.len()).unwrap_or(c_int::MAX);
        call!(self, ncclCommShrink(comm, excluded.as_mut_ptr(), count, new, config, flags))
    }

    /// Calls `ncclCommCount`: returns the number of ranks.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`].
    pub unsafe fn comm_count(&self, comm: Comm) -> Result<c_int, Error> {
        let mut count = 0;
        let _: Progress = call!(self, ncclCommCount(comm, &mut count))?;
        Ok(count)
    }

    /// Calls `ncclCommCuDevice`: returns the CUDA device ordinal.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`].
    pub unsafe fn comm_device(&self, comm: Comm) -> Result<c_int, Error> {
        let mut device = 0;
        let _: Progress = call!(self, ncclCommCuDevice(comm, &mut device))?;
        Ok(device)
    }

    /// Calls `ncclCommUserRank`: returns the caller's rank.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`].
    pub unsafe fn comm_rank(&self, comm: Comm) -> Result<c_int, Error> {
        let mut rank = 0;
        let _: Progress = call!(self, ncclCommUserRank(comm, &mut rank))?;
        Ok(rank)
    }

    /// Returns a copy for NCCL, whose pointer parameter is mutable, after checking the version.
    fn readable<'a>(&self, config: &Config<'a>) -> Result<Config<'a>, Error> {
        match config.version() <= self.version() {
            true => Ok(*config),
            false => Err(Error::ConfigTooNew { needs: config.version(), found: self.version() }),
        }
    }
}

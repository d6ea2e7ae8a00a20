//! Communicators: how they are made, asked and ended.

use std::ffi::c_int;
use std::ptr;

use super::{Comm, Library, Progress};
use crate::{Code, Config, Error, UniqueId};

impl Library {
    /// The colour of a rank that will not be part of any communicator after [`comm_split`](Self::comm_split).
    pub const NO_COLOR: c_int = -1;
    /// The flag of [`comm_shrink`](Self::comm_shrink) that ends the parent's operations first, as after a peer's end.
    pub const SHRINK_ABORT: c_int = 1;

    /// `ncclCommInitRank`: joins as `rank` of `ranks`. Waits for all others without a limit, so several ranks of one thread
    /// join within a group.
    ///
    /// # Errors
    /// [`Error::Call`]: no device or driver, two ranks on one device, or an id whose process has ended.
    ///
    /// # Safety
    /// As [`Library`] says; `comm` may be written to.
    pub unsafe fn comm_init_rank(
        &self,
        comm: *mut Comm,
        ranks: c_int,
        id: UniqueId,
        rank: c_int,
    ) -> Result<Progress, Error> {
        call!(self, ncclCommInitRank(comm, ranks, id, rank))
    }

    /// `ncclCommInitRankConfig`: joins as `rank` of `ranks` with settings, such as non-blocking.
    ///
    /// # Errors
    /// [`Error::ConfigTooNew`] for a setting that this NCCL would ignore; [`Error::Call`] as for
    /// [`comm_init_rank`](Self::comm_init_rank), or for a setting's value.
    ///
    /// # Safety
    /// As [`Library`] says; `comm` may be written to, for a non-blocking one until it is no longer in progress.
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

    /// `ncclCommInitAll`: makes the communicators of `count` devices of this process, one rank each.
    ///
    /// # Errors
    /// [`Error::Call`]: no such device, or one named twice.
    ///
    /// # Safety
    /// As [`Library`] says; `comms` may be written `count` times; `devices` has as many entries, or is null for the first
    /// `count` devices.
    pub unsafe fn comm_init_all(
        &self,
        comms: *mut Comm,
        count: c_int,
        devices: *const c_int,
    ) -> Result<Progress, Error> {
        call!(self, ncclCommInitAll(comms, count, devices))
    }

    /// `ncclCommFinalize`: waits for what was issued, and ends the communication; [`comm_destroy`](Self::comm_destroy) frees
    /// the rest then.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; nothing is issued afterwards.
    pub unsafe fn comm_finalize(&self, comm: Comm) -> Result<Progress, Error> {
        call!(self, ncclCommFinalize(comm))
    }

    /// `ncclCommDestroy`: frees a communicator, which it finalises where that was not done. May wait for other ranks of the
    /// machine, and without a limit for one that has gone.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; the communicator is gone afterwards.
    pub unsafe fn comm_destroy(&self, comm: Comm) -> Result<Progress, Error> {
        call!(self, ncclCommDestroy(comm))
    }

    /// `ncclCommAbort`: ends what is running, and frees the communicator. Any thread may call it, also while another waits
    /// in a call with it.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; the communicator is gone afterwards.
    pub unsafe fn comm_abort(&self, comm: Comm) -> Result<Progress, Error> {
        call!(self, ncclCommAbort(comm))
    }

    /// `ncclCommGetAsyncError`: the communicator's state. [`Code::SUCCESS`], [`Code::IN_PROGRESS`] while a non-blocking one
    /// is at it, or what has broken it, such as [`Code::REMOTE_ERROR`]; only [`comm_abort`](Self::comm_abort) is left then.
    ///
    /// # Errors
    /// [`Error::Call`] where the question itself failed.
    ///
    /// # Safety
    /// As [`Library`] says.
    pub unsafe fn comm_async_error(&self, comm: Comm) -> Result<Code, Error> {
        let mut state = Code::SUCCESS;
        let _: Progress = call!(self, ncclCommGetAsyncError(comm, &mut state))?;
        Ok(state)
    }

    /// `ncclCommSplit`: makes a communicator of the ranks that give the same `color`, ordered by `key`, then by rank; null
    /// for [`NO_COLOR`](Self::NO_COLOR). Every rank calls it. Without a configuration it has the parent's.
    ///
    /// # Errors
    /// [`Error::ConfigTooNew`], [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `new` may be written to, for a non-blocking one until it is no longer in progress.
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

    /// `ncclCommShrink`: makes a communicator of all ranks but `excluded`, which do not call it. From 2.27 on.
    ///
    /// # Errors
    /// [`Error::Missing`]: make a new communicator. [`Error::ConfigTooNew`], [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `new` may be written to, for a non-blocking one until it is no longer in progress.
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

    /// `ncclCommCount`: the number of ranks.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says.
    pub unsafe fn comm_count(&self, comm: Comm) -> Result<c_int, Error> {
        let mut count = 0;
        let _: Progress = call!(self, ncclCommCount(comm, &mut count))?;
        Ok(count)
    }

    /// `ncclCommCuDevice`: the number of the device.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says.
    pub unsafe fn comm_device(&self, comm: Comm) -> Result<c_int, Error> {
        let mut device = 0;
        let _: Progress = call!(self, ncclCommCuDevice(comm, &mut device))?;
        Ok(device)
    }

    /// `ncclCommUserRank`: the own rank.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says.
    pub unsafe fn comm_rank(&self, comm: Comm) -> Result<c_int, Error> {
        let mut rank = 0;
        let _: Progress = call!(self, ncclCommUserRank(comm, &mut rank))?;
        Ok(rank)
    }

    /// A copy for NCCL, which is handed a pointer that it could write to.
    fn readable<'a>(&self, config: &Config<'a>) -> Result<Config<'a>, Error> {
        match config.version() <= self.version() {
            true => Ok(*config),
            false => Err(Error::ConfigTooNew { needs: config.version(), found: self.version() }),
        }
    }
}

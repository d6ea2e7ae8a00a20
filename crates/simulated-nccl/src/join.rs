//! How a rank joins the others.

use nccl_sys::{Code, UniqueId};

use crate::comm::Member;
use crate::failure::Failure;
use crate::link::{Ended, Link};
use crate::wire::{Membership, Request};
use crate::{hub, settings};

/// Waits for all ranks, limited only by the caller.
pub(crate) fn join(
    id: &UniqueId,
    ranks: u32,
    rank: u32,
    device: Option<String>,
    give_up: &dyn Fn() -> bool,
) -> Result<Member, Failure> {
    let (port, token) = hub::address(id).ok_or_else(|| Failure::argument("the unique id is not one"))?;
    let shared_devices = settings::ranks_may_share_a_device();
    let hello = Request::Hello { token, ranks, rank, device, shared_devices, process: std::process::id() };
    let link = Link::connect(port, token, &hello).map_err(|error| {
        Failure::new(Code::SYSTEM_ERROR, format!("the process that made the unique id cannot be reached: {error}"))
    })?;
    match link.hello(give_up) {
        Ok(group) => Ok(Member { link: link.into(), place: Membership { group, rank, ranks } }),
        Err(Ended::Broken(failure)) => Err(failure),
        Err(Ended::GivenUp) => Err(aborted()),
    }
}

/// Returns the failure of a call whose communicator was aborted meanwhile.
pub(crate) fn aborted() -> Failure {
    Failure::new(Code::INTERNAL_ERROR, "the communicator was aborted")
}

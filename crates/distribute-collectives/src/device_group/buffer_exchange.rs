//! Exchange of buffer handles between the ranks of one process.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use distribute_device::cuda::CudaStream;
use distribute_device::{Device, DeviceBuffer, Event};

use crate::ProcessGroup;
use crate::sync::lock;

/// The buffers of all ranks of one process in the current call and the next one.
pub(super) struct BufferExchange {
    /// Slots in rank order. One rank can be one call ahead of another, so calls alternate between two sets of slots.
    slots: [Mutex<Vec<Slot>>; 2],
    members: Mutex<Vec<Option<Member>>>,
    /// The first rank's handle on the group of the first ranks of all processes, if there are several processes.
    leader: Mutex<Option<Arc<ProcessGroup>>>,
    users: Mutex<Users>,
    /// Notified when `users.enqueuing` becomes 0.
    idle: Condvar,
}

/// A rank's device, and the stream of its work on the buffers of all ranks.
#[derive(Clone)]
struct Member {
    device: Arc<dyn Device>,
    stream: Arc<CudaStream>,
}

#[derive(Default)]
struct Users {
    /// The number of ranks that are enqueuing work on the buffers.
    enqueuing: usize,
    /// Set when a call has failed: the caller of the failed call may free its buffers.
    closed: bool,
}

/// The buffers of one rank in a call.
#[derive(Clone)]
pub(super) struct Offer {
    pub(super) input: DeviceBuffer,
    pub(super) output: DeviceBuffer,
    /// The event after the work that the caller enqueued earlier.
    pub(super) ready: Arc<dyn Event>,
}

#[derive(Default)]
struct Slot {
    offer: Option<Offer>,
    /// The event after the rank's part of the work.
    done: Option<Arc<dyn Event>>,
}

impl BufferExchange {
    /// Returns the exchange that the ranks of this process in `group` share.
    pub(super) fn of(group: &ProcessGroup) -> Arc<BufferExchange> {
        let ranks = group.local_world_size();
        group.shared_state(|| BufferExchange {
            slots: [0, 1].map(|_| Mutex::new((0..ranks).map(|_| Slot::default()).collect())),
            members: Mutex::new((0..ranks).map(|_| None).collect()),
            leader: Mutex::default(),
            users: Mutex::default(),
            idle: Condvar::new(),
        })
    }

    pub(super) fn introduce(&self, rank: usize, device: &Arc<dyn Device>, stream: &Arc<CudaStream>) {
        let member = Member { device: Arc::clone(device), stream: Arc::clone(stream) };
        lock(&self.members)[rank] = Some(member);
    }

    /// Lets every rank of the process abort the group of the first ranks.
    pub(super) fn introduce_leader(&self, leader: &Arc<ProcessGroup>) {
        *lock(&self.leader) = Some(Arc::clone(leader));
    }

    /// Returns the first rank's handle on the group of the first ranks, after a barrier.
    pub(super) fn leader(&self) -> Option<Arc<ProcessGroup>> {
        lock(&self.leader).clone()
    }

    /// Returns the devices of the ranks that have registered; after a barrier, of all ranks.
    pub(super) fn devices(&self) -> Vec<Arc<dyn Device>> {
        lock(&self.members).iter().flatten().map(|member| Arc::clone(&member.device)).collect()
    }

    /// Runs a function that enqueues work on the buffers of all ranks; `None` after a call has failed.
    pub(super) fn enqueuing<R>(&self, enqueue: impl FnOnce() -> R) -> Option<R> {
        {
            let mut users = lock(&self.users);
            if users.closed {
                return None;
            }
            users.enqueuing += 1;
        }
        // Also after a panic.
        let _ending = Enqueuing(self);
        Some(enqueue())
    }

    /// Refuses further work on the buffers, and returns the streams that have some, once no rank is enqueuing any more
    /// or the timeout has passed.
    pub(super) fn close(&self, timeout: Duration) -> Vec<Arc<CudaStream>> {
        let mut users = lock(&self.users);
        users.closed = true;
        let waited = self.idle.wait_timeout_while(users, timeout, |users| users.enqueuing > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        lock(&self.members).iter().flatten().map(|member| Arc::clone(&member.stream)).collect()
    }

    pub(super) fn offer(&self, call: u64, rank: usize, offer: Offer) {
        lock(self.slots(call))[rank] = Slot { offer: Some(offer), done: None };
    }

    /// Returns the buffers that ranks have offered; after a barrier, those of all ranks.
    pub(super) fn offers(&self, call: u64) -> Vec<Offer> {
        lock(self.slots(call)).iter().filter_map(|slot| slot.offer.clone()).collect()
    }

    pub(super) fn finish(&self, call: u64, rank: usize, done: Arc<dyn Event>) {
        lock(self.slots(call))[rank].done = Some(done);
    }

    /// Returns the completion events of all ranks' parts, once all have finished, and releases this rank's memory.
    pub(super) fn ends(&self, call: u64, rank: usize) -> Vec<Arc<dyn Event>> {
        let mut slots = lock(self.slots(call));
        slots[rank].offer = None;
        slots.iter().filter_map(|slot| slot.done.clone()).collect()
    }

    fn slots(&self, call: u64) -> &Mutex<Vec<Slot>> {
        &self.slots[(call % 2) as usize]
    }
}

/// Counts a rank that is enqueuing work, until it is dropped.
struct Enqueuing<'a>(&'a BufferExchange);

impl Drop for Enqueuing<'_> {
    fn drop(&mut self) {
        let mut users = lock(&self.0.users);
        users.enqueuing -= 1;
        if users.enqueuing == 0 {
            self.0.idle.notify_all();
        }
    }
}

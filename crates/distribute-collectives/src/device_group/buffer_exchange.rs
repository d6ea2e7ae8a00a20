//! Exchange of buffer handles between the ranks of one process.

use std::sync::{Arc, Mutex};

use distribute_device::{Device, DeviceBuffer, Event};

use crate::ProcessGroup;
use crate::sync::lock;

/// The buffers of all ranks of one process in the current call and the next one.
pub(super) struct BufferExchange {
    /// Slots in rank order. One rank can be one call ahead of another, so calls alternate between two sets of slots.
    slots: [Mutex<Vec<Slot>>; 2],
    devices: Mutex<Vec<Option<Arc<dyn Device>>>>,
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
            devices: Mutex::new((0..ranks).map(|_| None).collect()),
        })
    }

    pub(super) fn introduce(&self, rank: usize, device: &Arc<dyn Device>) {
        lock(&self.devices)[rank] = Some(Arc::clone(device));
    }

    /// Returns the devices of the ranks that have registered; after a barrier, of all ranks.
    pub(super) fn devices(&self) -> Vec<Arc<dyn Device>> {
        lock(&self.devices).iter().flatten().cloned().collect()
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

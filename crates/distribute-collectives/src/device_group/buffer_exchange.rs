//! Where the ranks of one process show each other their buffers.

use std::sync::{Arc, Mutex};

use distribute_device::{Device, DeviceBuffer, Event};

use crate::ProcessGroup;
use crate::sync::lock;

/// What each rank has brought to a call.
pub(super) struct BufferExchange {
    /// In the order of ranks. A rank can be one call ahead of another one, so calls take turns with two places.
    places: [Mutex<Vec<Slot>>; 2],
    devices: Mutex<Vec<Option<Arc<dyn Device>>>>,
}

/// What one rank brings to a call.
#[derive(Clone)]
pub(super) struct Offer {
    pub(super) input: DeviceBuffer,
    pub(super) output: DeviceBuffer,
    /// When what the caller enqueued before has ended.
    pub(super) ready: Arc<dyn Event>,
}

#[derive(Default)]
struct Slot {
    offer: Option<Offer>,
    /// When the rank's part of the work has ended.
    done: Option<Arc<dyn Event>>,
}

impl BufferExchange {
    /// The one of the ranks of this process in `group`.
    pub(super) fn of(group: &ProcessGroup) -> Arc<BufferExchange> {
        let ranks = group.local_world_size();
        group.shared_state(|| BufferExchange {
            places: [0, 1].map(|_| Mutex::new((0..ranks).map(|_| Slot::default()).collect())),
            devices: Mutex::new((0..ranks).map(|_| None).collect()),
        })
    }

    pub(super) fn introduce(&self, rank: usize, device: &Arc<dyn Device>) {
        lock(&self.devices)[rank] = Some(Arc::clone(device));
    }

    /// The devices of those that have introduced themselves: of all, once all have met.
    pub(super) fn devices(&self) -> Vec<Arc<dyn Device>> {
        lock(&self.devices).iter().flatten().cloned().collect()
    }

    pub(super) fn offer(&self, call: u64, rank: usize, offer: Offer) {
        lock(self.places(call))[rank] = Slot { offer: Some(offer), done: None };
    }

    /// What all ranks have offered: of all, once all have met.
    pub(super) fn offers(&self, call: u64) -> Vec<Offer> {
        lock(self.places(call)).iter().filter_map(|place| place.offer.clone()).collect()
    }

    pub(super) fn finish(&self, call: u64, rank: usize, done: Arc<dyn Event>) {
        lock(self.places(call))[rank].done = Some(done);
    }

    /// The ends of all ranks' parts, once all have finished; this rank's memory is let go of.
    pub(super) fn ends(&self, call: u64, rank: usize) -> Vec<Arc<dyn Event>> {
        let mut places = lock(self.places(call));
        places[rank].offer = None;
        places.iter().filter_map(|place| place.done.clone()).collect()
    }

    fn places(&self, call: u64) -> &Mutex<Vec<Slot>> {
        &self.places[(call % 2) as usize]
    }
}

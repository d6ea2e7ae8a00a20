//! Engines that end with another one: those of the pairs in which ranks of a group send and receive.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};

use super::Engine;
use crate::sync::lock;

/// The engines that end with one engine, as far as they still exist.
#[derive(Default)]
pub(super) struct Dependents(Mutex<Vec<Dependent>>);

#[derive(Clone)]
struct Dependent {
    engine: Weak<Engine>,
    /// For each of its local ranks the local rank of the other engine that it is.
    ranks: Vec<usize>,
}

impl Engine {
    /// Makes another engine end with this one, and know which ranks make no calls. `ranks` holds, for each of its local
    /// ranks, the local rank of this engine that it is.
    pub(crate) fn add_dependent(&self, engine: &Arc<Engine>, ranks: Vec<usize>) {
        {
            let mut dependents = lock(&self.dependents.0);
            dependents.retain(|known| known.engine.strong_count() > 0);
            for (local, rank) in ranks.iter().enumerate() {
                engine.set_idle(local, self.idle[*rank].load(Ordering::SeqCst));
            }
            dependents.push(Dependent { engine: Arc::downgrade(engine), ranks });
        }
        // An abort that did not find the dependent in the list has recorded its cause before.
        if let Some((origin, error)) = self.context.cause() {
            engine.abort(&origin, &error);
        }
    }

    /// Calls `action` with every dependent engine and its ranks.
    pub(super) fn each_dependent(&self, action: impl Fn(&Engine, &[usize])) {
        // A copy, because the last reference to an engine may be dropped here.
        let dependents = lock(&self.dependents.0).clone();
        for Dependent { engine, ranks } in dependents {
            if let Some(engine) = engine.upgrade() {
                action(&engine, &ranks);
            }
        }
    }
}

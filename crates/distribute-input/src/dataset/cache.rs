//! Keeping what was read.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Dataset, Facts, Items, Opener, Order, Pass, Picks};
use crate::Result;

impl<T: Clone + Send + 'static> Dataset<T> {
    /// Keeps the elements in memory as they are read; later passes, and clones, read them there.
    ///
    /// What is kept is pass 0 of what comes before, so a shuffle before `cache` is frozen, and one after it is not.
    /// The source is read once, even when passes are left early or overlap. An error empties the cache, and the next
    /// pass reads anew.
    ///
    /// # Source
    /// `tf.data.Dataset.cache`.
    pub fn cache(self) -> Dataset<T> {
        let prefetched = self.facts.prefetch > 0;
        let facts = Facts { prefetch: 0, ..self.facts };
        match self.picks.filter(|_| !prefetched) {
            // The rows are in memory already: only their order has to be frozen.
            Some(Picks { source, order: Order::Rows(open) }) => {
                let order = Order::Rows(Arc::new(move |pass| open(pass.first())));
                Dataset::picked(Picks { source, order }, facts)
            }
            _ => {
                let (upstream, caches) = (self.open, Mutex::new(HashMap::new()));
                let open: Opener<T> = Arc::new(move |pass| {
                    // Each share of a distribution is another sequence.
                    let mut caches = caches.lock().unwrap_or_else(PoisonError::into_inner);
                    let new =
                        || Arc::new(Cache { open: Arc::clone(&upstream), pass: pass.first(), state: Mutex::default() });
                    let cache = Arc::clone(caches.entry(pass.share()).or_insert_with(new));
                    let mut position = 0;
                    Box::new(std::iter::from_fn(move || {
                        position += 1;
                        cache.item(position - 1)
                    })) as Items<T>
                });
                Dataset::new(open, facts)
            }
        }
    }
}

struct Cache<T> {
    open: Opener<T>,
    pass: Pass,
    state: Mutex<State<T>>,
}

struct State<T> {
    items: Vec<T>,
    /// The one pass over the source, while it is not at its end.
    source: Option<Items<T>>,
    complete: bool,
}

impl<T: Clone> Cache<T> {
    /// The item at a position, read from the source if it has not been yet.
    ///
    /// The lock is held while the source is read: another pass waits for the very item, as it would without a cache.
    fn item(&self, position: usize) -> Option<Result<T>> {
        let mut guard = self.state.lock().unwrap_or_else(|poisoned| {
            // The source panicked half-way; what it yielded before is kept by nobody's promise.
            self.state.clear_poison();
            let mut guard = poisoned.into_inner();
            *guard = State::default();
            guard
        });
        let state = &mut *guard;
        while state.items.len() <= position && !state.complete {
            match state.source.get_or_insert_with(|| (self.open)(self.pass)).next() {
                Some(Ok(item)) => state.items.push(item),
                Some(Err(error)) => {
                    *state = State::default();
                    return Some(Err(error));
                }
                None => {
                    state.source = None;
                    state.complete = true;
                }
            }
        }
        state.items.get(position).cloned().map(Ok)
    }
}

impl<T> Default for State<T> {
    fn default() -> Self {
        State { items: Vec::new(), source: None, complete: false }
    }
}

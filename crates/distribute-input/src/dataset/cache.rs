//! Caching in memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Dataset, Facts, Items, Opener, Order, Pass, Picks};
use crate::Result;

impl<T: Clone + Send + 'static> Dataset<T> {
    /// Keeps the elements in memory as they are read; later passes, and clones, read them from there.
    ///
    /// The cache holds pass 0 of the preceding pipeline: the order of a shuffle before `cache` is fixed, that of a
    /// shuffle after it changes with each pass, and results of an [unordered](crate::Parallel::unordered) map are kept
    /// in order. The source is read once, even if passes end early or overlap. An error empties the cache, and the next
    /// pass reads the source again.
    ///
    /// # Source
    /// `tf.data.Dataset.cache`.
    pub fn cache(self) -> Dataset<T> {
        let prefetched = self.facts.prefetch > 0;
        let mut facts = Facts { prefetch: 0, ..self.facts };
        facts.keeps_order("cache");
        match self.picks.filter(|_| !prefetched) {
            // The rows are in memory already: only their order has to be fixed.
            Some(Picks { source, order: Order::Rows(open) }) => {
                let order = Order::Rows(Arc::new(move |pass| open(pass.first())));
                Dataset::picked(Picks { source, order }, facts)
            }
            _ => {
                let (upstream, caches) = (self.open, Mutex::new(HashMap::new()));
                let open: Opener<T> = Arc::new(move |pass| {
                    // Each share of a distribution is a different sequence.
                    let mut caches = caches.lock().unwrap_or_else(PoisonError::into_inner);
                    let new = || {
                        Arc::new(Cache {
                            open: Arc::clone(&upstream),
                            pass: pass.clone().first().in_order(),
                            state: Mutex::default(),
                        })
                    };
                    let cache = Arc::clone(caches.entry(pass.sequence()).or_insert_with(new));
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
    /// The only pass over the source, until it ends.
    source: Option<Items<T>>,
    complete: bool,
}

impl<T: Clone> Cache<T> {
    /// Returns the item at a position, reading the source if necessary.
    ///
    /// The lock is held while the source is read: other passes wait for the same item, as they would without a cache.
    fn item(&self, position: usize) -> Option<Result<T>> {
        let mut guard = self.state.lock().unwrap_or_else(|poisoned| {
            // The source panicked while it was read, so the items read before are discarded.
            self.state.clear_poison();
            let mut guard = poisoned.into_inner();
            *guard = State::default();
            guard
        });
        let state = &mut *guard;
        while state.items.len() <= position && !state.complete {
            match state.source.get_or_insert_with(|| (self.open)(self.pass.clone())).next() {
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

//! A signal that something has changed.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Tells all who listen of changes. It wakes them in the order in which they came to wait: the order of a
/// `tokio::sync::watch` is random, and a simulation that follows from its seed must not depend on it.
#[derive(Default)]
pub(super) struct Signal {
    changes: AtomicU64,
    changed: Notify,
}

/// One who listens to a [`Signal`].
pub(super) struct Listener<'a> {
    signal: &'a Signal,
    seen: u64,
}

impl Signal {
    pub(super) fn change(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_waiters();
    }

    /// Listens to the changes from now on.
    pub(super) fn listen(&self) -> Listener<'_> {
        Listener { signal: self, seen: self.changes.load(Ordering::Acquire) }
    }
}

impl Listener<'_> {
    /// Waits for a change since the last one that was seen here. Cancel safe.
    pub(super) async fn changed(&mut self) {
        loop {
            // Created before the count is read, so that no change is missed in between.
            let next = self.signal.changed.notified();
            let changes = self.signal.changes.load(Ordering::Acquire);
            if changes != self.seen {
                self.seen = changes;
                return;
            }
            next.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_listener_sees_a_change_once_in_the_order_in_which_it_waits() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let signal: &'static Signal = Box::leak(Box::default());
        let woken: &'static parking_lot::Mutex<Vec<usize>> = Box::leak(Box::default());
        runtime.block_on(async {
            for listener in 0..20 {
                tokio::spawn(async move {
                    let mut changes = signal.listen();
                    changes.changed().await;
                    woken.lock().push(listener);
                    changes.changed().await;
                    woken.lock().push(100);
                });
            }
            let mut early = signal.listen();
            tokio::time::sleep(Duration::from_millis(1)).await;
            signal.change();
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(*woken.lock(), (0..20).collect::<Vec<_>>());
            // A change that came before it waits is seen, and only once.
            early.changed().await;
            let again = tokio::time::timeout(Duration::from_secs(1), early.changed()).await;
            assert!(again.is_err());
        });
    }
}

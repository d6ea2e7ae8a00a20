//! Mutual exclusion of writers in a folder, which managers of one process may share: they work in the order in which
//! they have asked.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::disk::Disk;
use crate::Result;

/// The turns in a folder.
#[derive(Default)]
struct Turns {
    /// The number of the next turn.
    next: u64,
    /// The turns that are not over, in their order. The first one's owner may work.
    waiting: VecDeque<u64>,
    /// The disk of the one who works.
    holder: Option<Disk>,
}

/// A turn to work on a folder. It is taken on the thread that decides the order, before the work gets a thread of its
/// own: sequence numbers of checkpoints are drawn in the order of turns, and so the newest one is that of the last
/// call.
pub(super) struct Turn {
    place: Arc<Mutex<Turns>>,
    number: u64,
}

impl Turn {
    /// Takes the next turn in a folder. Later ones wait until this one has worked, or is dropped.
    pub(super) fn take(root: &Path) -> Turn {
        let place = place_of(root);
        let mut turns = place.lock();
        let number = turns.next;
        turns.next += 1;
        turns.waiting.push_back(number);
        drop(turns);
        Turn { place, number }
    }

    /// Waits for the turn, and works. A waiting thread adopts the operation of the one who works, so that it waits as
    /// long as that one's disk makes progress.
    pub(super) fn work<T>(self, disk: &Disk, work: impl FnOnce() -> Result<T>) -> Result<T> {
        while !self.begins(disk) {
            thread::sleep(BETWEEN_LOOKS);
        }
        work()
    }

    fn begins(&self, disk: &Disk) -> bool {
        let mut turns = self.place.lock();
        if turns.waiting.front() == Some(&self.number) {
            turns.holder = Some(disk.clone());
            return true;
        }
        if let Some(holder) = &turns.holder {
            disk.wait_with(holder);
        }
        false
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut turns = self.place.lock();
        if turns.waiting.front() == Some(&self.number) {
            turns.holder = None;
        }
        turns.waiting.retain(|number| *number != self.number);
    }
}

/// Works on a folder while no other thread of this process does, in a turn that is taken now.
pub(super) fn exclusively<T>(disk: &Disk, root: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    Turn::take(root).work(disk, work)
}

/// Returns the name by which a folder is told from others.
pub(super) fn absolute(root: &Path) -> PathBuf {
    std::path::absolute(root).unwrap_or_else(|_| root.to_owned())
}

fn place_of(root: &Path) -> Arc<Mutex<Turns>> {
    static PLACES: LazyLock<Mutex<HashMap<PathBuf, Arc<Mutex<Turns>>>>> = LazyLock::new(Mutex::default);
    let root = absolute(root);
    let mut places = PLACES.lock();
    // Those without a turn are dropped.
    places.retain(|_, place| Arc::strong_count(place) > 1);
    places.entry(root).or_default().clone()
}

/// Short compared with writing a checkpoint.
const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_follow_each_other_and_one_that_is_dropped_is_over() {
        let root = Path::new("turns of a test");
        let (first, dropped, last) = (Turn::take(root), Turn::take(root), Turn::take(root));
        let order = Arc::new(Mutex::new(Vec::new()));
        let start = |turn: Turn, name: &'static str| {
            let order = Arc::clone(&order);
            thread::spawn(move || {
                let note = || {
                    order.lock().push(name);
                    Ok(())
                };
                turn.work(&Disk::default(), note).unwrap();
            })
        };
        // The last one asks before the others.
        let last = start(last, "last");
        assert!(!dropped.begins(&Disk::default()));
        drop(dropped);
        start(first, "first").join().unwrap();
        last.join().unwrap();
        assert_eq!(*order.lock(), ["first", "last"]);
    }
}

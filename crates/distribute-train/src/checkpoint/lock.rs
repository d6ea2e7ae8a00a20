//! Mutual exclusion of writers in a folder, which managers of one process may share.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::disk::Disk;
use crate::Result;

/// A folder's lock, and the disk of its holder.
#[derive(Default)]
struct FolderLock {
    lock: Mutex<()>,
    holder: Mutex<Option<Disk>>,
}

/// Works on a folder while no other thread of this process does. A waiting thread adopts the holder's operation, so
/// that it waits as long as the holder's disk makes progress.
pub(super) fn exclusively<T>(disk: &Disk, root: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let place = place_of(root);
    let _guard = loop {
        if let Some(guard) = place.lock.try_lock() {
            break guard;
        }
        if let Some(holder) = &*place.holder.lock() {
            disk.wait_with(holder);
        }
        thread::sleep(BETWEEN_LOOKS);
    };
    *place.holder.lock() = Some(disk.clone());
    let outcome = work();
    *place.holder.lock() = None;
    outcome
}

fn place_of(root: &Path) -> Arc<FolderLock> {
    static PLACES: LazyLock<Mutex<HashMap<PathBuf, Arc<FolderLock>>>> = LazyLock::new(Mutex::default);
    let root = std::path::absolute(root).unwrap_or_else(|_| root.to_owned());
    let mut places = PLACES.lock();
    // Unused locks are dropped.
    places.retain(|_, place| Arc::strong_count(place) > 1);
    places.entry(root).or_default().clone()
}

/// Short compared with writing a checkpoint.
const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

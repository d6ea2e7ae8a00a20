//! Signals that a handler takes, and their default effect when none does.
//!
//! An unregistered action leaves its signal without any effect: signal-hook does not restore the default. So an action
//! that has the default effect stays registered for each signal that was ever taken, and is off while a handler lives.

use std::collections::btree_map::{BTreeMap, Entry};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use signal_hook::consts::FORBIDDEN;
use signal_hook::{SigId, flag, low_level};

/// A signal that a handler takes, until this is dropped.
#[derive(Debug)]
pub(super) struct Taken {
    signal: i32,
    actions: Vec<SigId>,
}

/// A signal that has been taken in this process.
#[derive(Debug)]
struct Known {
    /// Whether it has its default effect. The signal's action reads it.
    has_default: Arc<AtomicBool>,
    /// Whether it had its default effect before it was first taken, and not one that the program, or the one that
    /// started it, has chosen.
    had_default: bool,
    /// The number of handlers that take it.
    takers: usize,
}

impl Taken {
    /// Lets a signal set both flags. It ends the process if the first one is set already.
    pub(super) fn take(signal: i32, seen: &Arc<AtomicBool>, request: Arc<AtomicBool>) -> io::Result<Taken> {
        if FORBIDDEN.contains(&signal) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the system lets no program handle it"));
        }
        let mut all = KNOWN.lock();
        if let Entry::Vacant(place) = all.entry(signal) {
            let (has_default, had_default) = (Arc::new(AtomicBool::new(false)), !is_handled(signal));
            flag::register_conditional_default(signal, Arc::clone(&has_default))?;
            place.insert(Known { has_default, had_default, takers: 0 });
        }
        let mut taken = Taken { signal, actions: Vec::new() };
        // Registered in this order, the first signal sets the flags, and the second one finds them set.
        let actions: [&dyn Fn() -> io::Result<SigId>; 3] = [
            &|| flag::register_conditional_default(signal, Arc::clone(seen)),
            &|| flag::register(signal, Arc::clone(seen)),
            &|| flag::register(signal, Arc::clone(&request)),
        ];
        let outcome = actions.iter().try_for_each(|register| register().map(|action| taken.actions.push(action)));
        if let Some(known) = all.get_mut(&signal) {
            // Not earlier: a signal would have no effect in between.
            known.takers += 1;
            known.has_default.store(false, Ordering::SeqCst);
        }
        // What was registered is dropped with an error, which takes the lock.
        drop(all);
        outcome.map(|()| taken)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(known) = KNOWN.lock().get_mut(&self.signal) {
            known.takers -= 1;
            if known.takers == 0 && known.had_default {
                known.has_default.store(true, Ordering::SeqCst);
            }
        }
        // Not earlier, for the same reason.
        for action in self.actions.drain(..) {
            low_level::unregister(action);
        }
    }
}

/// The signals that have been taken.
static KNOWN: Mutex<BTreeMap<i32, Known>> = Mutex::new(BTreeMap::new());

/// Returns whether the process handles or ignores a signal, as far as the system tells: on Linux.
fn is_handled(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let has_signal = |mask: &str| {
        let bit = u32::try_from(signal - 1).ok().and_then(|bit| 1u64.checked_shl(bit)).unwrap_or(0);
        u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & bit != 0)
    };
    let mut masks = status.lines().filter_map(|line| line.strip_prefix("SigCgt:").or(line.strip_prefix("SigIgn:")));
    masks.any(has_signal)
}

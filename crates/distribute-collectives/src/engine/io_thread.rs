//! The engine's own thread, which serves operations that no other thread waits for.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Maximum sleep of the thread between two checks that the engine still exists.
pub(super) const MAX_IDLE: Duration = Duration::from_millis(500);

/// A thread that does rounds of work when it is woken. The first wake-up starts it.
pub(super) struct IoThread {
    sender: OnceLock<SyncSender<()>>,
    round: Arc<Round>,
}

/// One round. Returns the longest sleep before the next one, or `None` if the thread is to end.
type Round = dyn Fn() -> Option<Duration> + Send + Sync;

impl IoThread {
    pub(super) fn new(round: impl Fn() -> Option<Duration> + Send + Sync + 'static) -> IoThread {
        IoThread { sender: OnceLock::new(), round: Arc::new(round) }
    }

    /// Requests a round, and starts the thread if necessary.
    pub(super) fn wake(&self) {
        let sender = self.sender.get_or_init(|| {
            let (sender, receiver) = sync_channel(1);
            let round = self.round.clone();
            // Without the thread, operations still make progress when a rank waits for them.
            let _ = std::thread::Builder::new().name("distribute-io".to_owned()).spawn(move || run(&receiver, &*round));
            sender
        });
        // A full channel means that a round has been requested already.
        let _ = sender.try_send(());
    }

    /// Requests a round if the thread has been started.
    pub(super) fn wake_if_started(&self) {
        if let Some(sender) = self.sender.get() {
            let _ = sender.try_send(());
        }
    }
}

fn run(wake_ups: &Receiver<()>, round: &Round) {
    let mut sleep = MAX_IDLE;
    loop {
        match wake_ups.recv_timeout(sleep) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        match round() {
            Some(longest) => sleep = longest.min(MAX_IDLE),
            None => return,
        }
    }
}

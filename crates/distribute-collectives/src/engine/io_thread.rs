//! The engine's own thread, which serves operations that nobody waits for.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Longest sleep of the thread between two looks at whether the engine still lives.
pub(super) const MAX_IDLE: Duration = Duration::from_millis(500);

/// A thread that does rounds of work when it is woken; started by the first wake-up.
pub(super) struct IoThread {
    sender: OnceLock<SyncSender<()>>,
    round: Arc<Round>,
}

/// One round: returns the longest sleep before the next one, or `None` where the thread is to end.
type Round = dyn Fn() -> Option<Duration> + Send + Sync;

impl IoThread {
    pub(super) fn new(round: impl Fn() -> Option<Duration> + Send + Sync + 'static) -> IoThread {
        IoThread { sender: OnceLock::new(), round: Arc::new(round) }
    }

    /// Makes the thread do a round, and starts it where there is none yet.
    pub(super) fn wake(&self) {
        let sender = self.sender.get_or_init(|| {
            let (sender, receiver) = sync_channel(1);
            let round = self.round.clone();
            // Without the thread, operations still make progress when somebody waits for them.
            let _ = std::thread::Builder::new().name("distribute-io".to_owned()).spawn(move || run(&receiver, &*round));
            sender
        });
        // A full channel means that a round is due already.
        let _ = sender.try_send(());
    }

    /// Makes the thread do a round, if it has been started.
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

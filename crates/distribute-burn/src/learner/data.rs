//! Each replica's part of the training data, and its batches.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use burn::data::dataloader::DataLoader;
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use burn::train::Interrupter;
use distribute_strategy::Strategy;

use super::DataParallel;
use crate::{Error, Result};

/// The interval at which a wait for data looks for a failure of another worker.
const LOOK: Duration = Duration::from_millis(100);

/// Cuts a loader into one for each replica of this process.
///
/// All parts are cut, in the same order on every worker, so that the seeds of their shuffles do not depend on how
/// replicas are spread over processes.
pub(super) fn shares<I: 'static>(
    training: &DataParallel,
    loader: &Arc<dyn DataLoader<I>>,
    device: &Device,
) -> Vec<Arc<dyn DataLoader<I>>> {
    let topology = training.strategy.topology();
    let local = topology.replicas_per_worker();
    let (parts, first) = match training.has_own_loaders {
        true => (local, 0),
        false => (topology.num_replicas(), topology.first_replica()),
    };
    if parts == 1 {
        return vec![loader.to_device(device)];
    }
    let items = loader.num_items();
    // In 128 bits, where the product of two numbers of 64 bits cannot overflow.
    let start = |part: usize| (items as u128 * part as u128 / parts as u128) as usize;
    let all = (0..parts).map(|part| loader.slice(start(part), start(part + 1)));
    let own: Vec<_> = all.collect::<Vec<_>>().into_iter().skip(first).take(local).collect();
    own.into_iter().map(|part| part.to_device(device)).collect()
}

/// A batch of one replica.
pub(super) struct Batch<I> {
    pub(super) input: I,
    /// At least 1.
    pub(super) rows: u64,
}

/// The batches of one replica in one epoch, which a thread of its own reads ahead by one.
///
/// The thread is not joined: after a failure it may be inside the program's loader, which has no deadline. It ends with
/// the batch that it is reading when the feed is dropped.
pub(super) struct Feed<I> {
    replica: usize,
    batches: Receiver<Result<Batch<I>, Failure>>,
}

/// The end of a feed before the end of its data.
enum Failure {
    Dataset(DatasetError),
    Panicked(String),
}

impl<I: Send + 'static> Feed<I> {
    pub(super) fn start(loader: Arc<dyn DataLoader<I>>, replica: usize) -> Result<Feed<I>> {
        let (sender, batches) = sync_channel(1);
        let read = move || {
            // A panic of the loader must not look like the end of its data.
            let ended = catch_unwind(AssertUnwindSafe(|| send_all(&*loader, &sender)));
            if let Err(panic) = ended {
                sender.send(Err(Failure::Panicked(message_of(panic.as_ref())))).ok();
            }
        };
        let thread = std::thread::Builder::new().name(format!("data-{replica}"));
        let started = thread.spawn(read);
        started.map_err(|source| distribute_strategy::Error::Thread { replica, source })?;
        Ok(Feed { replica, batches })
    }

    /// Returns the next batch, or `None` at the end of the epoch.
    ///
    /// # Errors
    /// [`Error::Learner`] if the loader fails, of which the interrupter is told too, and the error of a worker that
    /// fails meanwhile.
    pub(super) fn next(&self, strategy: &Strategy, interrupter: &Interrupter) -> Result<Option<Batch<I>>> {
        loop {
            match self.batches.recv_timeout(LOOK) {
                Ok(Ok(batch)) => return Ok(Some(batch)),
                Ok(Err(failure)) => {
                    let problem = match failure {
                        Failure::Dataset(error) => {
                            let problem = error.to_string();
                            interrupter.fail(error);
                            problem
                        }
                        Failure::Panicked(message) => format!("the loader panicked: {message}"),
                    };
                    return Err(Error::Learner {
                        what: format!("the training data of replica {}", self.replica),
                        problem,
                    });
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(failure) = strategy.groups().first().and_then(|group| group.failure()) {
                        return Err(failure.into());
                    }
                }
            }
        }
    }
}

/// Sends the batches of a loader until its end or the receiver's.
fn send_all<I>(loader: &dyn DataLoader<I>, sender: &SyncSender<Result<Batch<I>, Failure>>) {
    let mut batches = loader.iter();
    let mut read = 0;
    while let Some(batch) = batches.next() {
        let is_last = batch.is_err();
        let processed = batches.progress().items_processed;
        // A loader whose progress stands still weighs all of its batches alike.
        let rows = processed.saturating_sub(read).max(1) as u64;
        read = processed;
        let batch = batch.map(|input| Batch { input, rows }).map_err(Failure::Dataset);
        if sender.send(batch).is_err() || is_last {
            return;
        }
    }
}

/// Returns the message of a panic.
pub(super) fn message_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".to_owned())
}

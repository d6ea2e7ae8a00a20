//! The elements of one split, in order.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};
use distribute_input::{BoxError, Split};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use super::stream::Stream;
use super::{Consumer, outside};
use crate::{Error, Result, Transfer};

/// An item of a stream.
pub(super) enum Item<T> {
    /// An element, and the room that it takes until it is read.
    Element(T, [OwnedSemaphorePermit; 2]),
    Ended,
    Failed(Error),
}

/// Reads a split. The stream ends with its reader.
pub(super) struct SplitReader<T> {
    /// `None` after the end.
    items: Option<Receiver<Item<T>>>,
    task: Option<JoinHandle<()>>,
    name: String,
    split: u64,
    patience: Duration,
    /// Keeps the runtime of the stream.
    _consumer: Arc<Consumer>,
}

impl<T: Send + 'static> SplitReader<T> {
    /// Starts to read ahead.
    pub(super) fn start<L>(consumer: &Arc<Consumer>, split: Split) -> SplitReader<T>
    where
        T: Transfer<L>,
        L: 'static,
    {
        // The room for elements bounds what is queued.
        let (sender, items) = unbounded();
        let options = &consumer.options;
        // The stream reports an error before; this is for a stream that hangs itself.
        let signs = options.silence.saturating_mul(2).saturating_add(MARGIN);
        let patience = options.element_timeout.saturating_add(options.worker_timeout).saturating_add(signs);
        let task = match consumer.runtime() {
            Ok(runtime) => Some(runtime.spawn(Stream::new(consumer, split).run::<T, L>(sender))),
            Err(error) => {
                // Fails only if the receiver is gone, which is here.
                let _ = sender.send(Item::Failed(error));
                None
            }
        };
        let (name, split) = (options.name.clone(), split.index as u64);
        SplitReader { items: Some(items), task, name, split, patience, _consumer: Arc::clone(consumer) }
    }

    fn read(&mut self) -> Result<Option<T>> {
        let Some(items) = &self.items else { return Ok(None) };
        let failed = match items.recv_timeout(self.patience) {
            Ok(Item::Element(element, room)) => {
                drop(room);
                return Ok(Some(element));
            }
            Ok(Item::Ended) => None,
            Ok(Item::Failed(error)) => Some(error),
            Err(RecvTimeoutError::Timeout) => Some(Error::Stalled {
                dataset: self.name.clone(),
                split: self.split,
                waited: self.patience,
                tried: "its stream stands still".to_owned(),
            }),
            Err(RecvTimeoutError::Disconnected) => {
                Some(Error::Panicked { dataset: self.name.clone(), split: self.split })
            }
        };
        self.items = None;
        failed.map_or(Ok(None), Err)
    }
}

impl<T: Send + 'static> Iterator for SplitReader<T> {
    type Item = Result<T, BoxError>;

    fn next(&mut self) -> Option<Result<T, BoxError>> {
        self.read().map_err(outside).transpose()
    }
}

impl<T> Drop for SplitReader<T> {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

const MARGIN: Duration = Duration::from_secs(10);

//! The elements of a data service in a training program.

mod directory;
mod reader;
mod stream;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::bounded;
use distribute_cluster::threads::Threads;
use distribute_input::{BoxError, Dataset, Split};
use distribute_types::Classified;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::data_worker::dispatcher_address;
use crate::dispatcher::threads;
use crate::wire::Identity;
use crate::{Error, Result, ServiceOptions, Transfer};
use directory::Directory;
use reader::SplitReader;

/// Returns the dataset that data workers serve under a name.
///
/// It is batched, distributed and resumed as any other dataset: when it is distributed, each training worker reads
/// splits of its own. The dispatcher is asked which data the name stands for when the dataset is distributed: training
/// workers that read other data are refused, and so is the resumption of a pass over other data. The data workers are
/// called when a pass begins.
///
/// # Ordering
/// A pass has [`splits`](ServiceOptions::splits) splits. Split `s` holds the elements of
/// [`iter_share(pass, splits, s)`](Dataset::iter_share) of the served dataset, in that order. Of a training worker's
/// splits, [`streams`](ServiceOptions::streams) are open at a time, and one element is taken from each in turn, as
/// [`interleave`](Dataset::interleave) does. The order depends neither on the number of data workers nor on their loss.
///
/// # Cost
/// A data worker reads a split from its beginning, also when it resumes one that another has begun, and leaves out what
/// was seen. If the served dataset is neither read from a list of files nor divided by
/// [`shard_hint`](Dataset::shard_hint), each split is a pass over the whole source, of which the other elements are
/// left out after all transformations; give few splits then, or put `shard_hint` before the expensive ones. Each split
/// that is being read has the buffers of the pipeline, such as that of a shuffle, in a data worker's memory.
///
/// # Errors
/// [`Error::Option`](crate::Error::Option) for an option out of its range or an address that is not host:port,
/// [`Error::NoAddress`](crate::Error::NoAddress) if there is none. Distributing the dataset fails, and its passes end,
/// with [`distribute_input::Error::External`], whose source is the [error of this crate](crate::Error): `Refused`,
/// `Changed`, or `Unknown` if no data worker has served it within `worker_timeout`; for passes also `NoWorker`,
/// `Stalled`, `Pipeline`, `Damaged`, or `ElementType` if another type is served.
///
/// # Examples
/// ```
/// use distribute_data_service::{DataWorker, Dispatcher, DispatcherOptions, ServiceOptions, dataset};
/// use distribute_input::{Array, Dataset, InputOptions, Topology, distribute_dataset};
///
/// let dispatcher = Dispatcher::start(DispatcherOptions::default())?;
/// let address = dispatcher.address().to_string();
/// let _worker = DataWorker::builder().dispatcher(&address).dataset("train", &Dataset::range(0..640)).start()?;
///
/// let data: Dataset<Array<i64>> = dataset(ServiceOptions::new("train").dispatcher(&address))?;
/// let second = distribute_dataset(&data.batch(64), Topology::new(2, 1, 1)?, InputOptions::default())?;
/// assert!(second.plan().to_string().contains("its own splits"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `tf.data.experimental.service.from_dataset_id` and `distribute`.
pub fn dataset<T, L>(options: ServiceOptions) -> Result<Dataset<T>>
where
    T: Transfer<L>,
    L: 'static,
{
    options.check()?;
    let dispatcher = dispatcher_address(options.dispatcher.clone())?;
    let identity = Identity::of(options.identity.clone(), options.secret.clone(), options.tls.clone())?;
    let (splits, streams) = (options.splits, options.streams);
    let directory = Directory::new(dispatcher, &options, identity.clone());
    let consumer = Arc::new(Consumer { options, identity, directory, threads: Mutex::new(None) });
    let named = Arc::clone(&consumer);
    let read = move |split: Split| {
        let consumer = Arc::clone(&consumer);
        Ok(Dataset::from_generator(move || SplitReader::<T>::start::<L>(&consumer, split)))
    };
    let named = move || Consumer::name_of_data(&named).map_err(outside);
    Ok(Dataset::from_splits(splits).named_by(named).interleave(streams, 1, read))
}

/// Returns an error of this crate as one of a dataset.
fn outside(error: Error) -> BoxError {
    distribute_input::Error::external(Classified::new(error)).into()
}

/// The state that the passes of a dataset share.
pub(super) struct Consumer {
    options: ServiceOptions,
    identity: Identity,
    directory: Directory,
    /// Started when the dataset is distributed, or by its first pass.
    threads: Mutex<Option<Threads>>,
}

impl Consumer {
    /// Returns the runtime of all streams.
    ///
    /// # Errors
    /// [`Error::Threads`](crate::Error::Threads).
    fn runtime(&self) -> Result<Handle> {
        let mut started = self.threads.lock();
        let running = match started.take() {
            Some(running) => running,
            None => threads("data-consumer")?,
        };
        Ok(started.insert(running).handle().clone())
    }

    /// Asks the dispatcher which data the name stands for; returns them in words.
    ///
    /// # Errors
    /// [`Error::Unknown`] after `worker_timeout`, [`Error::Refused`], [`Error::Changed`] and [`Error::Threads`].
    fn name_of_data(consumer: &Arc<Consumer>) -> Result<String> {
        let (sender, answer) = bounded(1);
        let (asking, begun) = (Arc::clone(consumer), Instant::now());
        // The caller may be a thread of another runtime, which cannot wait for this one.
        consumer.runtime()?.spawn(async move {
            // Fails only if the caller has given up.
            let _ = sender.send(asking.digest().await);
        });
        let digest = answer.recv_timeout(consumer.options.worker_timeout.saturating_add(MARGIN));
        let digest = digest.unwrap_or_else(|_| Err(consumer.unknown(begun)))?;
        let mut name = format!("the data {:?} of settings ", consumer.options.name);
        // Writing to a string cannot fail.
        digest.iter().for_each(|byte| write!(name, "{byte:02x}").unwrap_or_default());
        Ok(name)
    }

    /// Waits until the dispatcher knows the dataset; returns the digest of its settings.
    async fn digest(&self) -> Result<Bytes> {
        let begun = Instant::now();
        loop {
            if let Some(digest) = self.directory.digest().await? {
                return Ok(digest);
            }
            let left = self.options.worker_timeout.checked_sub(begun.elapsed()).ok_or_else(|| self.unknown(begun))?;
            tokio::time::sleep(AGAIN.min(left)).await;
        }
    }

    fn unknown(&self, begun: Instant) -> Error {
        Error::Unknown {
            dispatcher: self.directory.dispatcher.clone(),
            dataset: self.options.name.clone(),
            waited: begun.elapsed(),
            problem: self.directory.problem().unwrap_or_else(|| "it does not answer".to_owned()),
        }
    }
}

/// The pause between two questions for a dataset that the dispatcher does not know yet.
const AGAIN: Duration = Duration::from_millis(100);

/// The time that a wait for the dispatcher's answer may take beyond its own limit.
const MARGIN: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;

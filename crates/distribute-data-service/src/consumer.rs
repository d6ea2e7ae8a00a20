//! The elements of a data service in a training program.

mod directory;
mod reader;
mod stream;

use std::sync::Arc;

use distribute_input::{Dataset, Split};
use parking_lot::Mutex;
use tokio::runtime::{Handle, Runtime};

use crate::data_worker::dispatcher_address;
use crate::dispatcher::runtime;
use crate::wire::Identity;
use crate::{Result, ServiceOptions, Transfer};
use directory::Directory;
use reader::SplitReader;

/// Returns the dataset that data workers serve under a name.
///
/// It is batched, distributed and resumed as any other dataset: when it is distributed, each training worker reads
/// splits of its own. The dispatcher and the data workers are called when a pass begins.
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
/// [`Error::NoAddress`](crate::Error::NoAddress) if there is none. The passes of the dataset end with
/// [`distribute_input::Error::External`], whose source is the [error of this crate](crate::Error): `Refused`,
/// `NoWorker`, `Stalled`, `Pipeline`, `Changed`, `Damaged`, or `ElementType` if another type is served.
///
/// # Examples
/// ```
/// use distribute_data_service::{ServiceOptions, dataset};
/// use distribute_input::{Array, Dataset, InputOptions, Topology, distribute_dataset};
///
/// let options = ServiceOptions::new("train").dispatcher("10.0.0.7:5050");
/// let data: Dataset<(Array<f32>, Array<i64>)> = dataset(options)?;
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
    let consumer = Arc::new(Consumer { options, identity, directory, runtime: Mutex::new(None) });
    let read = move |split: Split| {
        let consumer = Arc::clone(&consumer);
        Ok(Dataset::from_generator(move || SplitReader::<T>::start::<L>(&consumer, split)))
    };
    Ok(Dataset::from_splits(splits).interleave(streams, 1, read))
}

/// The state that the passes of a dataset share.
pub(super) struct Consumer {
    options: ServiceOptions,
    identity: Identity,
    directory: Directory,
    /// Started by the first pass.
    runtime: Mutex<Option<Runtime>>,
}

impl Consumer {
    /// Returns the runtime of all streams.
    ///
    /// # Errors
    /// [`Error::Threads`](crate::Error::Threads).
    fn runtime(&self) -> Result<Handle> {
        let mut started = self.runtime.lock();
        let running = match started.take() {
            Some(running) => running,
            None => runtime("data-consumer")?,
        };
        Ok(started.insert(running).handle().clone())
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.lock().take() {
            // Does not wait: the last owner may be dropped on a thread of another runtime.
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests;

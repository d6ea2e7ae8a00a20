//! Reads splits of a dataset into chunks.

use std::marker::PhantomData;
use std::sync::Arc;

use distribute_input::Dataset;
use parking_lot::Mutex;
use prost::Message as _;
use tokio::sync::mpsc;
use tonic::Status;

use crate::transfer::encode;
use crate::wire::proto::{Chunk, ElementComponents, Setting};
use crate::{Components, Result, Transfer};

/// The elements to read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) epoch: u64,
    pub(super) splits: usize,
    pub(super) split: usize,
    pub(super) part: u64,
    pub(super) parts: u64,
    pub(super) first: u64,
    pub(super) max_bytes: usize,
}

/// A dataset whose elements can be sent, without their type.
pub(super) trait Served: Send + Sync {
    /// Returns the settings that must be equal on all data workers. Reads the first element.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) and [`Error::Element`](crate::Error::Element).
    fn settings(&self) -> Result<Vec<Setting>>;

    /// Reads the elements of a request. Returns early if the consumer is gone.
    ///
    /// # Errors
    /// `aborted` with the error of the pipeline, `out_of_range` for an element that is too large, `data_loss` if the
    /// split is shorter than the consumer has seen.
    fn produce(&self, request: &Request, sink: &mut Sink) -> Result<(), Status>;
}

/// A dataset of elements of one type.
pub(super) struct Of<T, L> {
    dataset: Dataset<T>,
    library: PhantomData<fn() -> L>,
}

impl<T, L> Of<T, L> {
    pub(super) fn new(dataset: Dataset<T>) -> Of<T, L> {
        Of { dataset, library: PhantomData }
    }
}

impl<T: Transfer<L>, L: 'static> Served for Of<T, L> {
    fn settings(&self) -> Result<Vec<Setting>> {
        let setting = |name: &str, value: String| Setting { name: name.to_owned(), value };
        let settings = self.dataset.settings()?;
        let mut settings: Vec<_> = settings.into_iter().map(|(name, value)| setting(name, value)).collect();
        let first = self.dataset.iter_share(0, 1, 0).next().transpose()?;
        let (element, digest) = match first {
            Some(first) => {
                let components = components(&first)?;
                let described = components.describe();
                (described, format!("{:08x}", crc32c::crc32c(&encode(vec![components.into_message()]))))
            }
            None => ("none".to_owned(), "none".to_owned()),
        };
        settings.push(setting("first element", element));
        settings.push(setting("first element's checksum", digest));
        Ok(settings)
    }

    fn produce(&self, request: &Request, sink: &mut Sink) -> Result<(), Status> {
        let mut total = 0;
        for (number, item) in (0_u64..).zip(self.dataset.iter_share(request.epoch, request.splits, request.split)) {
            let at = || format!("element {number} of split {} of pass {}", request.split, request.epoch);
            let item = item.map_err(|error| Status::aborted(format!("{}: {error}", at())))?;
            total = number + 1;
            if number < request.first || number % request.parts != request.part {
                if sink.is_closed() {
                    return Ok(());
                }
                continue;
            }
            let components = components(&item).map_err(|error| Status::aborted(format!("{}: {error}", at())))?;
            let message = components.into_message();
            let bytes = message.encoded_len();
            if bytes > request.max_bytes {
                return Err(Status::out_of_range(format!(
                    "{} has {bytes} bytes, and the consumer takes at most {}; raise max_element_bytes",
                    at(),
                    request.max_bytes
                )));
            }
            if !sink.push(message, bytes) {
                return Ok(());
            }
        }
        // The element before the first wanted one was seen, unless the reading begins with the split.
        if let Some(seen) = request.first.checked_sub(request.parts).filter(|seen| *seen >= total) {
            return Err(Status::data_loss(format!(
                "split {} of pass {} has {total} elements on this data worker, and element {seen} came from another; \
                 give all data workers the same files",
                request.split, request.epoch
            )));
        }
        sink.end();
        Ok(())
    }
}

fn components<T: Transfer<L>, L>(element: &T) -> Result<Components> {
    let mut components = Components::new();
    element.send(&mut components)?;
    Ok(components)
}

/// Puts elements into chunks: as many as there are while the connection is busy, up to a size.
pub(super) struct Sink {
    sender: mpsc::Sender<Result<Chunk, Status>>,
    waiting: Waiting,
}

/// The elements of a [`Sink`] that are in no chunk yet. It is shared with the task that sends chunks.
#[derive(Clone)]
pub(super) struct Waiting(Arc<Mutex<Next>>);

/// The next chunk.
struct Next {
    elements: Vec<ElementComponents>,
    bytes: usize,
    /// The number of the first element that waits, or of the next one.
    first: u64,
    parts: u64,
}

impl Waiting {
    /// Returns a chunk of the elements that wait; `None` if there are none.
    pub(super) fn take(&self) -> Option<Chunk> {
        self.chunk(false)
    }

    /// Adds an element; returns the number of bytes that wait.
    fn add(&self, element: ElementComponents, bytes: usize) -> usize {
        let mut next = self.0.lock();
        next.elements.push(element);
        next.bytes += bytes;
        next.bytes
    }

    fn bytes(&self) -> usize {
        self.0.lock().bytes
    }

    /// Returns a chunk of the elements that wait, if there are any or it is the last one.
    fn chunk(&self, ended: bool) -> Option<Chunk> {
        let (elements, first) = {
            let mut next = self.0.lock();
            if next.elements.is_empty() && !ended {
                return None;
            }
            let (elements, first) = (std::mem::take(&mut next.elements), next.first);
            next.bytes = 0;
            next.first = first.saturating_add(next.parts.saturating_mul(elements.len() as u64));
            (elements, first)
        };
        let count = elements.len() as u32;
        let payload = encode(elements);
        Some(Chunk { first, count, ended, crc: crc32c::crc32c(&payload), payload })
    }
}

impl Sink {
    /// Creates a sink, and a handle on the elements that it has put into no chunk yet.
    pub(super) fn new(sender: mpsc::Sender<Result<Chunk, Status>>, request: &Request) -> (Sink, Waiting) {
        let (first, parts, part) = (request.first, request.parts, request.part);
        // The first wanted number of this part.
        let first = first.saturating_add((part + parts - first % parts) % parts);
        let next = Next { elements: Vec::new(), bytes: 0, first, parts };
        let waiting = Waiting(Arc::new(Mutex::new(next)));
        (Sink { sender, waiting: waiting.clone() }, waiting)
    }

    /// Returns whether the consumer is gone.
    fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Adds an element; returns whether the consumer still exists.
    fn push(&mut self, element: ElementComponents, bytes: usize) -> bool {
        if self.waiting.bytes() + bytes > CHUNK_BYTES && !self.flush(false) {
            return false;
        }
        let waiting = self.waiting.add(element, bytes);
        // A task that takes the last chunk after this looks for what waits.
        let is_idle = self.sender.capacity() == self.sender.max_capacity();
        (!is_idle && waiting < CHUNK_BYTES) || self.flush(false)
    }

    #[cfg(test)]
    pub(super) fn push_scalar(&mut self, number: i64) -> bool {
        let message = components(&distribute_input::Array::scalar(number)).unwrap().into_message();
        let bytes = message.encoded_len();
        self.push(message, bytes)
    }

    /// Sends what waits, and the end.
    fn end(&mut self) {
        // A consumer that is gone needs no end.
        let _ = self.flush(false) && self.flush(true);
    }

    /// Sends what waits, and the error that follows it.
    pub(super) fn fail(&mut self, status: Status) {
        // A consumer that is gone needs no error.
        let _ = self.flush(false) && self.sender.blocking_send(Err(status)).is_ok();
    }

    fn flush(&mut self, ended: bool) -> bool {
        self.waiting.chunk(ended).is_none_or(|chunk| self.sender.blocking_send(Ok(chunk)).is_ok())
    }
}

/// A chunk has at most this many bytes, or one element.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

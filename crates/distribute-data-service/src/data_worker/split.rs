//! Reads splits of a dataset into chunks.

use std::marker::PhantomData;

use distribute_input::Dataset;
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
    waiting: Vec<ElementComponents>,
    waiting_bytes: usize,
    /// The number of the first element that waits, or of the next one.
    first: u64,
    parts: u64,
}

impl Sink {
    pub(super) fn new(sender: mpsc::Sender<Result<Chunk, Status>>, request: &Request) -> Sink {
        let (first, parts, part) = (request.first, request.parts, request.part);
        // The first wanted number of this part.
        let first = first.saturating_add((part + parts - first % parts) % parts);
        Sink { sender, waiting: Vec::new(), waiting_bytes: 0, first, parts }
    }

    /// Returns whether the consumer is gone.
    fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Adds an element; returns whether the consumer still exists.
    fn push(&mut self, element: ElementComponents, bytes: usize) -> bool {
        if self.waiting_bytes + bytes > CHUNK_BYTES && !self.flush(false) {
            return false;
        }
        self.waiting.push(element);
        self.waiting_bytes += bytes;
        let is_idle = self.sender.capacity() == self.sender.max_capacity();
        (!is_idle && self.waiting_bytes < CHUNK_BYTES) || self.flush(false)
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
        let count = self.waiting.len();
        if count == 0 && !ended {
            return true;
        }
        let payload = encode(std::mem::take(&mut self.waiting));
        self.waiting_bytes = 0;
        let first = self.first;
        self.first = first.saturating_add(self.parts.saturating_mul(count as u64));
        let chunk = Chunk { first, count: count as u32, ended, crc: crc32c::crc32c(&payload), payload };
        self.sender.blocking_send(Ok(chunk)).is_ok()
    }
}

/// A chunk has at most this many bytes, or one element.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

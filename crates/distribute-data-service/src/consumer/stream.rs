//! Streams a split from one data worker after another.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backon::{BackoffBuilder as _, ExponentialBuilder};
use bytes::Bytes;
use crossbeam_channel::Sender;
use distribute_input::Split;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Code, Status};

use super::Consumer;
use super::reader::Item;
use crate::transfer::decode;
use crate::wire::proto::{Chunk, ReadRequest};
use crate::wire::{Link, MAX_HEAD_BYTES, READ, is_lost};
use crate::{Components, Error, Result, Transfer};

/// A split that is being read, and how far it is.
pub(super) struct Stream {
    consumer: Arc<Consumer>,
    split: Split,
    room: Room,
    /// The number of the next element within the split.
    next: u64,
    /// The time at which the last element came.
    heard: Instant,
    /// The time since which no data worker is at work.
    alone_since: Option<Instant>,
    /// The number of times in a row that elements were damaged.
    damaged: u32,
    /// The last failures.
    tried: VecDeque<String>,
}

/// How the reading from one data worker ended.
enum End {
    /// The split is complete.
    Complete,
    /// The reader is gone.
    Unwanted,
    /// Another data worker may do better.
    Lost(String),
    /// The same would happen elsewhere.
    Failed(Error),
}

impl Stream {
    pub(super) fn new(consumer: &Arc<Consumer>, split: Split) -> Stream {
        let options = &consumer.options;
        Stream {
            consumer: Arc::clone(consumer),
            split,
            room: Room::new(options.read_ahead_elements, options.read_ahead_bytes),
            next: split.part as u64,
            heard: Instant::now(),
            alone_since: Some(Instant::now()),
            damaged: 0,
            tried: VecDeque::new(),
        }
    }

    /// Reads the split to its end, or to the first error that another data worker would not avoid.
    pub(super) async fn run<T, L>(mut self, items: Sender<Item<T>>)
    where
        T: Transfer<L>,
    {
        let last = match self.read::<T, L>(&items).await {
            Ok(()) => Item::Ended,
            Err(error) => Item::Failed(error),
        };
        // Fails only if the reader is gone.
        let _ = items.send(last);
    }

    async fn read<T, L>(&mut self, items: &Sender<Item<T>>) -> Result<()>
    where
        T: Transfer<L>,
    {
        loop {
            let (worker, digest) = self.worker().await?;
            let lost = match self.read_from::<T, L>(&worker, digest, items).await {
                End::Complete | End::Unwanted => return Ok(()),
                End::Failed(error) => return Err(error),
                End::Lost(why) => why,
            };
            tracing::warn!(
                "split {} of dataset {:?}: the data worker at {worker} is left at element {}: {lost}",
                self.split.index,
                self.consumer.options.name,
                self.next
            );
            self.consumer.directory.failed(&worker);
            self.tried.push_back(format!("{worker}: {lost}"));
            if self.tried.len() > MOST_TRIED {
                self.tried.pop_front();
            }
            self.alone_since.get_or_insert_with(Instant::now);
            self.check_stalled()?;
        }
    }

    /// Waits for a data worker to read from.
    async fn worker(&mut self) -> Result<(String, Bytes)> {
        let (options, directory) = (&self.consumer.options, &self.consumer.directory);
        let since = *self.alone_since.get_or_insert_with(Instant::now);
        let pauses = ExponentialBuilder::default().with_min_delay(SHORTEST).with_max_delay(LONGEST);
        let mut pauses = pauses.without_max_times().build();
        loop {
            // The dispatcher's answer takes some time; what it names first is always tried.
            if let Some(chosen) = directory.choose(self.split.index + self.split.part).await?
                && (since.elapsed() < options.worker_timeout || self.tried.is_empty())
            {
                return Ok(chosen);
            }
            let Some(left) = options.worker_timeout.checked_sub(since.elapsed()) else {
                return Err(Error::NoWorker {
                    dispatcher: directory.dispatcher.clone(),
                    dataset: options.name.clone(),
                    split: self.split.index as u64,
                    waited: since.elapsed(),
                    tried: self.tried(),
                });
            };
            tokio::time::sleep(pauses.next().unwrap_or(LONGEST).min(left)).await;
        }
    }

    async fn read_from<T, L>(&mut self, worker: &str, digest: Bytes, items: &Sender<Item<T>>) -> End
    where
        T: Transfer<L>,
    {
        let consumer = Arc::clone(&self.consumer);
        let options = &consumer.options;
        let Split { epoch, count, index, part, parts } = self.split;
        let request = ReadRequest {
            dataset: options.name.clone(),
            digest,
            epoch,
            splits: count as u64,
            split: index as u64,
            part: part as u64,
            parts: parts as u64,
            first: self.next,
            max_bytes: options.max_element_bytes as u64,
        };
        // A connection of its own: streams of one connection share its flow control, so that splits that are read ahead
        // would hold up the one that is needed next.
        let link = match Link::new(worker, &consumer.identity, options.silence) {
            Ok(link) => link,
            Err(status) => return End::Lost(status.message().to_owned()),
        };
        let limit = options.max_element_bytes.max(MAX_HEAD_BYTES) + MAX_HEAD_BYTES;
        let mut chunks = match link.ask(READ, request, limit, options.silence).await {
            Ok(chunks) => chunks,
            Err(status) => return self.failed(worker, &status),
        };
        loop {
            let chunk: Chunk = match chunks.next().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return End::Lost("it ended before the split did".to_owned()),
                Err(status) => return self.failed(worker, &status),
            };
            self.alone_since = None;
            let ended = chunk.ended;
            let elements = match self.open(chunk) {
                Ok(elements) => elements,
                Err(problem) => return self.damage(worker, problem),
            };
            if elements.is_empty() && !ended {
                if let Err(error) = self.check_stalled() {
                    return End::Failed(error);
                }
                continue;
            }
            consumer.directory.works(worker);
            for (components, bytes) in elements {
                let Some(room) = self.room.take(bytes).await else { return End::Unwanted };
                let element = match components.receive::<T, L>() {
                    Ok(element) => element,
                    Err(error) => return End::Failed(error),
                };
                if items.send(Item::Element(element, room)).is_err() {
                    return End::Unwanted;
                }
                self.next += parts as u64;
                (self.heard, self.damaged) = (Instant::now(), 0);
            }
            if ended {
                return End::Complete;
            }
        }
    }

    /// Checks a chunk, and returns its elements, each with its share of the bytes.
    ///
    /// # Errors
    /// A sentence about what does not match.
    fn open(&self, chunk: Chunk) -> Result<Vec<(Components, usize)>, String> {
        let Chunk { first, count, ended, crc, payload } = chunk;
        if count == 0 && !ended {
            return if payload.is_empty() { Ok(Vec::new()) } else { Err("a sign of life has a payload".to_owned()) };
        }
        if first != self.next {
            return Err(format!("element {first} came, where {} was expected", self.next));
        }
        if crc32c::crc32c(&payload) != crc {
            return Err(format!("the checksum of {} bytes does not match", payload.len()));
        }
        let bytes = payload.len() / (count.max(1) as usize);
        let elements = decode(payload)?;
        if elements.len() != count as usize {
            return Err(format!("{} elements came, where {count} were announced", elements.len()));
        }
        Ok(elements.into_iter().map(|components| (components, bytes)).collect())
    }

    fn damage(&mut self, worker: &str, problem: String) -> End {
        self.damaged += 1;
        if self.damaged < MOST_DAMAGED {
            return End::Lost(problem);
        }
        End::Failed(Error::Damaged {
            dataset: self.consumer.options.name.clone(),
            worker: worker.to_owned(),
            times: self.damaged,
            problem,
        })
    }

    /// Decides what the status of a call means.
    fn failed(&mut self, worker: &str, status: &Status) -> End {
        let message = status.message().to_owned();
        match status.code() {
            Code::Aborted | Code::DataLoss | Code::OutOfRange => End::Failed(Error::Pipeline {
                dataset: self.consumer.options.name.clone(),
                worker: worker.to_owned(),
                message,
            }),
            // The message is not one of this protocol, or longer than any that was asked for.
            Code::InvalidArgument => self.damage(worker, message),
            _ if is_lost(status) => End::Lost(message),
            _ => End::Lost(format!("it refused: {message}")),
        }
    }

    fn check_stalled(&self) -> Result<()> {
        let options = &self.consumer.options;
        if self.heard.elapsed() < options.element_timeout {
            return Ok(());
        }
        Err(Error::Stalled {
            dataset: options.name.clone(),
            split: self.split.index as u64,
            waited: self.heard.elapsed(),
            tried: self.tried(),
        })
    }

    /// Lists the last failures.
    fn tried(&self) -> String {
        let all: Vec<String> =
            self.consumer.directory.problem().into_iter().chain(self.tried.iter().cloned()).collect();
        if all.is_empty() { "nothing".to_owned() } else { all.join("; ") }
    }
}

/// The room for elements that are read ahead, in elements and in KiB.
struct Room {
    elements: Arc<Semaphore>,
    kibibytes: Arc<Semaphore>,
    all_kibibytes: u32,
}

impl Room {
    fn new(elements: usize, bytes: usize) -> Room {
        let most = u32::try_from(Semaphore::MAX_PERMITS).unwrap_or(u32::MAX);
        let all_kibibytes = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).clamp(1, most);
        let kibibytes = Arc::new(Semaphore::new(all_kibibytes as usize));
        Room { elements: Arc::new(Semaphore::new(elements)), kibibytes, all_kibibytes }
    }

    /// Waits for room, which the reader makes; an element that is larger than all of it takes all. Returns `None` never
    /// while the stream lives, whose end drops the semaphores.
    async fn take(&self, bytes: usize) -> Option<[OwnedSemaphorePermit; 2]> {
        let kibibytes = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(self.all_kibibytes);
        let element = Arc::clone(&self.elements).acquire_owned().await.ok()?;
        let bytes = Arc::clone(&self.kibibytes).acquire_many_owned(kibibytes).await.ok()?;
        Some([element, bytes])
    }
}

/// The pauses between two looks for a data worker.
const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(1);

/// The failures that an error lists.
const MOST_TRIED: usize = 4;

/// How often elements may be damaged in a row.
const MOST_DAMAGED: u32 = 3;

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    /// Polled once: there is room, or there is not.
    fn take(room: &Room, bytes: usize) -> Option<[OwnedSemaphorePermit; 2]> {
        room.take(bytes).now_or_never().flatten()
    }

    #[test]
    fn reading_ahead_ends_at_its_limits_of_elements_and_of_bytes() {
        let room = Room::new(3, 10 << 10);
        let held: Vec<_> = [1, 1, 1].into_iter().map_while(|bytes| take(&room, bytes)).collect();
        assert!(held.len() == 3 && take(&room, 1).is_none(), "three elements");
        drop(held);
        let large = take(&room, 9 << 10);
        assert!(large.is_some() && take(&room, 2 << 10).is_none(), "9 of 10 KiB are taken");
        assert!(take(&room, 1 << 10).is_some());
        drop(large);
        // One that is larger than all of the room has it alone.
        let alone = take(&room, 1 << 20);
        assert!(alone.is_some() && take(&room, 1).is_none());
    }
}

//! Answers consumers.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::Status;
use tonic::body::Body;

use super::split::{Request, Served, Sink, Waiting};
use crate::wire::proto::{Chunk, ReadRequest};
use crate::wire::{Inbox, Methods, Outbox, outbox};

/// The datasets of a data worker, each with the digest of its settings.
pub(super) struct DataWorkerMethods {
    datasets: BTreeMap<String, (Arc<dyn Served>, [u8; 16])>,
    max_streams: usize,
    /// One permit for each split that can be served besides those that are. A split has its permit until its thread has
    /// ended, too: the thread of one whose source hangs outlives the consumer.
    room: Arc<Semaphore>,
}

impl DataWorkerMethods {
    pub(super) fn new(
        datasets: BTreeMap<String, (Arc<dyn Served>, [u8; 16])>,
        max_streams: usize,
    ) -> DataWorkerMethods {
        let max_streams = max_streams.min(Semaphore::MAX_PERMITS);
        DataWorkerMethods { datasets, max_streams, room: Arc::new(Semaphore::new(max_streams)) }
    }

    /// Returns the number of splits that are served.
    pub(super) fn streams(&self) -> usize {
        self.max_streams.saturating_sub(self.room.available_permits())
    }

    /// Checks a request; returns the dataset and what to read of it.
    fn check(&self, request: ReadRequest) -> Result<(Arc<dyn Served>, Request), Status> {
        let ReadRequest { dataset, digest, epoch, splits, split, part, parts, first, max_bytes } = request;
        let Some((served, own)) = self.datasets.get(&dataset) else {
            return Err(Status::not_found(format!("this data worker serves no dataset {dataset:?}")));
        };
        if own[..] != digest[..] {
            let problem = format!("this data worker serves another dataset {dataset:?} than the dispatcher knows");
            return Err(Status::failed_precondition(problem));
        }
        let number = |number: u64| usize::try_from(number).ok();
        match (number(splits), number(split), number(max_bytes)) {
            (Some(splits), Some(split), Some(max_bytes)) if split < splits && part < parts => {
                let request = Request { epoch, splits, split, part, parts, first, max_bytes };
                Ok((Arc::clone(served), request))
            }
            _ => {
                let problem = format!("there is no split {split} of {splits}, or no part {part} of {parts} of it");
                Err(Status::invalid_argument(problem))
            }
        }
    }

    /// Reads a split on a thread of its own, and returns the body of the reply.
    fn read(&self, request: ReadRequest) -> Result<Body, Status> {
        let (served, request) = self.check(request)?;
        let full = || {
            let most = self.max_streams;
            Status::resource_exhausted(format!("this data worker serves {most} splits already, as max_streams says"))
        };
        let permit = Arc::new(Arc::clone(&self.room).try_acquire_owned().map_err(|_| full())?);
        let (sender, chunks) = mpsc::channel(QUEUED_CHUNKS);
        let (mut sink, waiting) = Sink::new(sender, &request);
        let of_thread = Arc::clone(&permit);
        let produce = move || {
            let _room = of_thread;
            let produced = catch_unwind(AssertUnwindSafe(|| served.produce(&request, &mut sink)));
            match produced {
                Ok(Ok(())) => {}
                Ok(Err(status)) => sink.fail(status),
                Err(_) => sink.fail(Status::aborted("the pipeline panicked; the data worker's log says where")),
            }
        };
        let thread = std::thread::Builder::new().name(format!("split-{}", request.split));
        thread.spawn(produce).map_err(|error| Status::resource_exhausted(format!("no thread: {error}")))?;
        let (outbox, body) = outbox(QUEUED_CHUNKS);
        tokio::spawn(forward(chunks, waiting, outbox, permit));
        Ok(body)
    }
}

impl Methods for DataWorkerMethods {
    const NAME: &'static str = "distribute.v1.DataWorker";

    async fn call(self: Arc<Self>, method: String, mut inbox: Inbox) -> Result<Body, Status> {
        match method.as_str() {
            "Read" => {
                let request = inbox.one().await?;
                self.read(request)
            }
            _ => Err(Status::unimplemented(format!("a data worker has no method {method:?}"))),
        }
    }
}

/// Sends chunks as they come, and signs of life while none comes. It ends with the consumer, and the thread that reads
/// ends with it.
async fn forward(
    mut chunks: mpsc::Receiver<Result<Chunk, Status>>,
    waiting: Waiting,
    outbox: Outbox,
    _room: Arc<OwnedSemaphorePermit>,
) {
    loop {
        // Elements that were added while the connection was busy are not to wait for those after them.
        let early = if chunks.is_empty() { waiting.take() } else { None };
        let next = match early {
            Some(chunk) => Ok(Some(Ok(chunk))),
            None => tokio::select! {
                () = outbox.closed() => return,
                next = tokio::time::timeout(ALIVE, chunks.recv()) => next,
            },
        };
        match next {
            // Where there is no room for it, something else is under way.
            Err(_) => {
                if !outbox.offer(Chunk::default()) {
                    return;
                }
            }
            Ok(Some(Ok(chunk))) => {
                if !outbox.send(chunk).await {
                    return;
                }
            }
            Ok(Some(Err(status))) => return outbox.end(&status).await,
            Ok(None) => return outbox.end(&Status::ok("")).await,
        }
    }
}

/// Chunks that wait between the thread and the connection.
const QUEUED_CHUNKS: usize = 2;

/// The interval of signs of life.
const ALIVE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use distribute_input::{Array, Dataset};
    use tokio::runtime::Runtime;
    use tonic::Code;

    use super::super::split::Of;
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(10);

    fn runtime() -> Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
    }

    fn request() -> ReadRequest {
        ReadRequest {
            dataset: "train".to_owned(),
            digest: vec![0; 16].into(),
            splits: 1,
            parts: 1,
            max_bytes: 1024,
            ..ReadRequest::default()
        }
    }

    fn eventually(what: &str, holds: impl Fn() -> bool) {
        let begun = std::time::Instant::now();
        while !holds() {
            assert!(begun.elapsed() < DEADLINE, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns methods of which one split at a time is read, whose elements are those of the channel.
    fn methods() -> (DataWorkerMethods, crossbeam_channel::Sender<i64>) {
        let (sender, receiver) = crossbeam_channel::unbounded();
        let dataset = Dataset::from_generator(move || {
            let receiver = receiver.clone();
            std::iter::from_fn(move || receiver.recv().ok().map(|number| Ok(Array::scalar(number))))
        });
        let served: Arc<dyn Served> = Arc::new(Of::new(dataset));
        (DataWorkerMethods::new(BTreeMap::from([("train".to_owned(), (served, [0; 16]))]), 1), sender)
    }

    #[test]
    fn a_thread_whose_source_hangs_takes_the_place_of_a_split_though_its_consumer_is_gone() {
        let (runtime, (methods, elements)) = (runtime(), methods());
        let _entered = runtime.enter();
        drop(methods.read(request()).unwrap());
        eventually("no chunks are forwarded", || runtime.metrics().num_alive_tasks() == 0);
        assert_eq!(methods.streams(), 1);
        let refused = methods.read(request()).map(drop).unwrap_err();
        assert!(refused.code() == Code::ResourceExhausted && refused.message().contains("max_streams"), "{refused}");
        elements.send(7).unwrap();
        eventually("the thread has ended", || methods.streams() == 0);
        drop(methods.read(request()).unwrap());
        drop(elements);
        eventually("the second thread has ended", || methods.streams() == 0);
    }

    #[test]
    fn elements_that_were_read_while_the_connection_was_busy_do_not_wait_for_more() {
        let (runtime, (methods, _elements)) = (runtime(), methods());
        let (_, request) = methods.check(request()).unwrap();
        let (sender, chunks) = mpsc::channel(QUEUED_CHUNKS);
        let (mut sink, waiting) = Sink::new(sender, &request);
        // The first is a chunk of its own, and the others wait for it to be sent.
        (0..3).for_each(|number| assert!(sink.push_scalar(number)));
        let permit = Arc::new(Arc::clone(&methods.room).try_acquire_owned().unwrap());
        let (outbox, body) = outbox(QUEUED_CHUNKS);
        runtime.spawn(forward(chunks, waiting, outbox, permit));
        let mut inbox = Inbox::new(body, 1 << 20);
        let seen = runtime.block_on(async {
            let mut seen = Vec::new();
            // Signs of life would come while elements wait.
            for _ in 0..2 {
                let chunk = tokio::time::timeout(DEADLINE, inbox.next::<Chunk>()).await.unwrap().unwrap().unwrap();
                seen.push((chunk.first, chunk.count));
            }
            seen
        });
        assert_eq!(seen, [(0, 1), (1, 2)]);
        assert!(sink.push_scalar(3));
    }
}

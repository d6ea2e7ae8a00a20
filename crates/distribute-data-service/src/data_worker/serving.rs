//! Answers consumers.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::Status;
use tonic::body::Body;

use super::split::{Request, Served, Sink};
use crate::wire::proto::{Chunk, ReadRequest};
use crate::wire::{Inbox, Methods, Outbox, outbox};

/// The datasets of a data worker, each with the digest of its settings.
pub(super) struct DataWorkerMethods {
    datasets: BTreeMap<String, (Arc<dyn Served>, [u8; 16])>,
    max_streams: usize,
    /// One permit for each split that can be served besides those that are.
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
        let permit = Arc::clone(&self.room).try_acquire_owned().map_err(|_| full())?;
        let (sender, chunks) = mpsc::channel(QUEUED_CHUNKS);
        let produce = move || {
            let mut sink = Sink::new(sender, &request);
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
        tokio::spawn(forward(chunks, outbox, permit));
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
async fn forward(mut chunks: mpsc::Receiver<Result<Chunk, Status>>, outbox: Outbox, _room: OwnedSemaphorePermit) {
    loop {
        let next = tokio::select! {
            () = outbox.closed() => return,
            next = tokio::time::timeout(ALIVE, chunks.recv()) => next,
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

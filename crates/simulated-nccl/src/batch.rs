//! Operations that are launched together on one stream.
#![expect(unsafe_code, reason = "the driver carries a pointer to the thread of the stream")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use nccl_sys::Stream;

use crate::cuda::{Cuda, cuda};
use crate::failure::Failure;
use crate::operation::Operation;

/// Operations of a group on one stream.
pub(crate) struct Batch {
    operations: Vec<Operation>,
    replays: AtomicU64,
}

impl Batch {
    pub(crate) fn new(operations: Vec<Operation>) -> Self {
        Self { operations, replays: AtomicU64::new(0) }
    }

    /// Every operation is posted before any is waited for, since they may depend on each other.
    fn run(&self, impatient: bool) -> Result<(), Failure> {
        let replay = self.replays.fetch_add(1, Ordering::Relaxed);
        let running = |operation: &&Operation| !operation.comm.stops();
        let posted: Vec<_> =
            self.operations.iter().filter(running).map(|operation| (operation, operation.post(replay))).collect();
        let ended = posted.into_iter().map(|(operation, tag)| operation.finish(tag, impatient));
        ended.fold(Ok(()), Result::and)
    }

    /// Runs on the calling thread if the stream is null or there is no CUDA; otherwise enqueues on the stream.
    pub(crate) fn launch(self, stream: Stream) -> Result<(), Failure> {
        match stream_driver(stream) {
            Some(driver) => self.enqueue(driver, stream),
            None => self.run(true),
        }
    }

    fn enqueue(self, driver: &Cuda, stream: Stream) -> Result<(), Failure> {
        let captured = self.operations.iter().any(|operation| operation.captured);
        let function = if captured { replay } else { run_once };
        if !captured {
            self.each(|operation| operation.comm.operation_begins());
        }
        let batch = Box::into_raw(Box::new(self));
        let launched = driver.launch(stream, function, batch.cast());
        if launched.is_err() && !captured {
            // SAFETY: the driver has refused it, so this function still owns it.
            let batch = unsafe { Box::from_raw(batch) };
            batch.each(|operation| operation.comm.operation_ends());
        }
        launched
    }

    fn each(&self, act: impl Fn(&Operation)) {
        self.operations.iter().for_each(act);
    }
}

/// Returns the driver that runs a stream.
pub(crate) fn stream_driver(stream: Stream) -> Option<&'static Cuda> {
    cuda().filter(|_| !stream.is_null())
}

unsafe extern "C" fn run_once(batch: *mut c_void) {
    // SAFETY: it is the pointer that `enqueue` passed to the driver, which calls this once.
    let batch = unsafe { Box::from_raw(batch.cast::<Batch>()) };
    // A stream cannot return the error; the communicator's state has it.
    let _ = batch.run(false);
    batch.each(|operation| operation.comm.operation_ends());
}

unsafe extern "C" fn replay(batch: *mut c_void) {
    // SAFETY: it is the pointer that `enqueue` passed to the driver; it is never freed, since the graph's destruction
    // is not reported.
    let batch = unsafe { &*batch.cast::<Batch>() };
    let _ = batch.run(false);
}

//! Groups of calls, which a thread collects and launches together.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::thread;

use nccl_sys::{Code, Stream};

use crate::batch::{Batch, stream_driver};
use crate::comm::Comm;
use crate::failure::Failure;
use crate::operation::Operation;

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

#[derive(Default)]
struct Group {
    depth: u32,
    operations: Vec<(Stream, Operation)>,
    jobs: Vec<Job>,
    failure: Option<Failure>,
}

/// An operation that waits for other ranks: the creation of a communicator.
pub(crate) struct Job {
    /// Communicators that are in progress meanwhile, and broken if it fails.
    pub(crate) comms: Vec<Arc<Comm>>,
    pub(crate) blocking: bool,
    pub(crate) run: Box<dyn FnOnce() -> Result<(), Failure> + Send>,
}

pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Returns whether the calling thread has an open group.
pub(crate) fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

/// Records that a call within the group has failed, so that the group launches nothing.
pub(crate) fn spoil(failure: &Failure) {
    GROUP.with_borrow_mut(|group| {
        group.failure.get_or_insert_with(|| failure.clone());
    });
}

/// Launches what the outermost group has collected.
pub(crate) fn end() -> Result<Code, Failure> {
    let Some(mut group) = close()? else { return Ok(Code::SUCCESS) };
    if let Some(failure) = group.failure.take() {
        group.jobs.into_iter().for_each(|job| job.comms.iter().for_each(|comm| comm.job_ends()));
        return Err(failure);
    }
    let made = run(group.jobs)?;
    let launched = launch(group.operations)?;
    Ok(if [made, launched].contains(&Code::IN_PROGRESS) { Code::IN_PROGRESS } else { Code::SUCCESS })
}

/// Discards what the outermost group has collected and returns its number of operations.
pub(crate) fn discard() -> Result<usize, Failure> {
    Ok(close()?.map_or(0, |group| group.operations.len()))
}

/// Launches an operation, or adds it to the open group.
pub(crate) fn enqueue(stream: Stream, operation: Operation) -> Result<Code, Failure> {
    match is_open() {
        true => {
            GROUP.with_borrow_mut(|group| group.operations.push((stream, operation)));
            Ok(Code::SUCCESS)
        }
        false => launch(vec![(stream, operation)]),
    }
}

/// Runs a job, or adds it to the open group.
pub(crate) fn submit(job: Job) -> Result<Code, Failure> {
    job.comms.iter().for_each(|comm| comm.job_begins());
    match is_open() {
        true => {
            GROUP.with_borrow_mut(|group| group.jobs.push(job));
            Ok(Code::SUCCESS)
        }
        false => run(vec![job]),
    }
}

/// Closes one level and returns the group if that was the outermost.
fn close() -> Result<Option<Group>, Failure> {
    GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(Failure::new(Code::INVALID_USAGE, "ncclGroupEnd: not in a group call.")),
        1 => Ok(Some(mem::take(group))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    })
}

fn launch(operations: Vec<(Stream, Operation)>) -> Result<Code, Failure> {
    let comms: Vec<_> = operations.iter().map(|(_, operation)| Arc::clone(&operation.comm)).collect();
    let mut streams = BTreeMap::<_, (_, Vec<_>)>::new();
    for (stream, operation) in operations {
        // All operations on the calling thread form one batch; its key is 0, and it runs last.
        let stream = if stream_driver(stream).is_some() { stream } else { ptr::null_mut() };
        streams.entry(stream.addr()).or_insert((stream, Vec::new())).1.push(operation);
    }
    for (stream, operations) in streams.into_values().rev() {
        Batch::new(operations).launch(stream)?;
    }
    comms.iter().for_each(|comm| comm.issued());
    Ok(if comms.iter().all(|comm| comm.blocking) { Code::SUCCESS } else { Code::IN_PROGRESS })
}

/// Runs jobs concurrently. Waits for the blocking ones, and leaves the others running.
fn run(jobs: Vec<Job>) -> Result<Code, Failure> {
    let (mut waited, mut all_block, mut result) = (Vec::new(), true, Ok(()));
    let alone = jobs.len() == 1;
    for job in jobs {
        let Job { comms, blocking, run } = job;
        all_block &= blocking;
        let work = move || {
            let result = run();
            for comm in &comms {
                if let Err(failure) = &result {
                    comm.fail(failure.clone());
                }
                comm.job_ends();
            }
            result
        };
        if alone && blocking {
            result = work();
            continue;
        }
        let spawned = thread::Builder::new().name("nccl-job".into()).spawn(work);
        match spawned {
            Ok(thread) if blocking => waited.push(thread),
            Ok(_) => {}
            Err(error) => result = Err(Failure::new(Code::SYSTEM_ERROR, format!("no thread: {error}"))),
        }
    }
    for thread in waited {
        let ended = thread.join();
        let failure = Failure::new(Code::INTERNAL_ERROR, "a thread of the simulation panicked");
        result = result.and(ended.unwrap_or(Err(failure)));
    }
    result?;
    Ok(if all_block { Code::SUCCESS } else { Code::IN_PROGRESS })
}

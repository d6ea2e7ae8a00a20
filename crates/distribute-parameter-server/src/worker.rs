//! The methods of a worker, which runs the closures of its coordinator one at a time.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_cluster::threads::EventLoop;
use distribute_input::InputContext;
use parking_lot::{Mutex, RwLock};
use tokio::sync::oneshot;
use tonic::Status;
use tonic::body::Body;

use crate::checkout::Checkout;
use crate::lifetime::Lifetime;
use crate::parameters::{Parameters, Runner};
use crate::program::Failed;
use crate::store::TAKEN_OVER;
use crate::wire::proto::{
    AttendWorker, Closure, Done, LeaveRequest, Outcome, Problem, ReleaseRequest, Released, Resource as ResourceRequest,
    WorkerState,
};
use crate::wire::{
    Identity, Inbox, MAX_HEAD_BYTES, MAX_MESSAGE_BYTES, Methods, OwnJob, Parts, SHORT_MESSAGE_BYTES, parts_of, reply,
    reply_all, reply_stream,
};
use crate::{Error, Program, WorkerContext, message, numbers};

/// The service of a worker.
pub(crate) struct WorkerMethods {
    program: Program,
    lifetime: Arc<Lifetime>,
    identity: Identity,
    /// The silence after which another task counts as lost, and the time limit of a server's answer.
    limits: (Duration, Duration),
    held: Mutex<Held>,
}

/// The coordinator that this worker attends to.
#[derive(Default)]
struct Held {
    attendance: Option<Arc<Attendance>>,
    /// The greatest session so far; calls of smaller ones are refused.
    session: u64,
}

impl Held {
    /// Returns the attendance of a session, unless a coordinator with a greater one has called.
    fn of(&self, session: u64) -> Option<&Arc<Attendance>> {
        self.attendance.as_ref().filter(|attendance| attendance.session == session && session == self.session)
    }
}

/// One coordinator's hold on this worker, with the state of its closures. The next one starts anew, or, if it keeps the
/// variables on the servers, with the datasets and lasting objects of this one. The same coordinator, whose connection
/// had broken, finds the lasting objects.
pub(crate) struct Attendance {
    pub(crate) session: u64,
    pub(crate) epoch: u64,
    pub(crate) worker: u32,
    pub(crate) workers: u32,
    pub(crate) parameters: Arc<Parameters>,
    /// The session in which the servers' contents were made, if a later one may keep them; else 0.
    lineage: u64,
    /// Locked for reading during a change on the servers.
    pub(crate) changing: RwLock<()>,
    /// Whether results of closures that still run are no longer needed.
    pub(crate) over: AtomicBool,
    /// Iterators over datasets, by number.
    pub(crate) resources: Mutex<HashMap<u64, Resource>>,
    /// Iterators of the coordinator before, which are used for the same datasets.
    left: Mutex<HashMap<u64, Resource>>,
    /// Objects that functions keep from one closure to the next. They are not those of the attendance before, whose
    /// last closure may still use them.
    pub(crate) kept: Mutex<Objects>,
    /// Objects that functions of the next attendance find, too.
    pub(crate) lasting: Mutex<Objects>,
    /// Sends closures to the thread that runs them.
    jobs: crossbeam_channel::Sender<Job>,
}

/// Objects of any type, by name.
pub(crate) type Objects = HashMap<String, Arc<dyn Any + Send + Sync>>;

/// A worker's iterator over a dataset.
#[derive(Clone)]
pub(crate) struct Resource {
    pub(crate) dataset: String,
    pub(crate) iterator: Arc<Checkout>,
}

/// How long a thread waits while another one takes an element of the same dataset.
const ELEMENT_TIMEOUT: Duration = Duration::from_secs(600);

/// How often a worker looks whether a change has ended.
const CHANGE_POLL: Duration = Duration::from_millis(5);

/// A closure to run, and the channel for its outcome.
type Job = (Closure, oneshot::Sender<Outcome>);

impl WorkerMethods {
    pub(crate) fn new(
        program: Program,
        lifetime: Arc<Lifetime>,
        identity: Identity,
        limits: (Duration, Duration),
    ) -> WorkerMethods {
        WorkerMethods { program, lifetime, identity, limits, held: Mutex::default() }
    }

    async fn attend(self: Arc<Self>, mut inbox: Inbox) -> Result<Body, Status> {
        let request: AttendWorker = inbox.one().await?;
        if let Some(missing) = self.program.missing(&request.functions, &request.datasets) {
            let problem = format!("its program has no {missing:?}, which the coordinator's has; run the same build");
            return Err(Status::failed_precondition(problem));
        }
        let (worker, workers) = (request.worker, request.workers);
        if worker != self.identity.task.index || worker >= workers || request.session == 0 {
            let task = self.identity.task;
            let problem = format!("{task} was called as worker {worker} of {workers} in session {}", request.session);
            return Err(Status::invalid_argument(problem));
        }
        let (attendance, attended, earlier) = {
            let mut held = self.held.lock();
            if request.session < held.session {
                return Err(Status::failed_precondition(TAKEN_OVER));
            }
            let attendance = Attendance::begin(&request, self.program.clone(), &self.identity.job, self.limits)?;
            held.session = request.session;
            let earlier = held.attendance.replace(attendance.clone());
            if let Some(earlier) = &earlier {
                earlier.over.store(true, Ordering::Release);
                attendance.inherit(earlier);
            }
            (attendance, self.lifetime.attend(), earlier)
        };
        // What a program has kept may take long to drop, or panic; other calls are admitted meanwhile.
        drop(tokio::task::spawn_blocking(move || drop(earlier)));
        let silence = self.limits.0;
        reply_stream(async move |outbox| {
            attended.hold::<AttendWorker>(inbox, &outbox, WorkerState {}, silence).await;
            attendance.over.store(true, Ordering::Release);
            Ok(())
        })
    }

    /// Ends the hold of earlier coordinators. Returns when no change of theirs is on its way to a server, or would be
    /// refused there.
    async fn release(&self, request: ReleaseRequest) -> Result<Body, Status> {
        let (greatest, earlier) = {
            let mut held = self.held.lock();
            let is_newer = request.session > held.session;
            held.session = held.session.max(request.session);
            (held.session, held.attendance.clone().filter(|_| is_newer))
        };
        if let Some(earlier) = earlier {
            earlier.over.store(true, Ordering::Release);
            self.lifetime.release();
            let begun = Instant::now();
            // A call to a server has this limit, too.
            while earlier.changing.try_write().is_none() && begun.elapsed() < self.limits.1 {
                tokio::time::sleep(CHANGE_POLL).await;
            }
        }
        reply(Released { session: greatest })
    }

    /// Returns the current attendance, if it is the one that the call names.
    fn attendance(&self, session: u64, epoch: u64) -> Result<Arc<Attendance>, Status> {
        let held = self.held.lock();
        let meant = held.of(session).filter(|attendance| attendance.epoch == epoch);
        meant.cloned().ok_or_else(elsewhere)
    }

    async fn create_resource(&self, request: ResourceRequest) -> Result<Body, Status> {
        let attendance = self.attendance(request.session, request.epoch)?;
        let left = attendance.left.lock().remove(&request.resource).filter(|left| left.dataset == request.dataset);
        if let Some(left) = left {
            attendance.resources.lock().insert(request.resource, left);
            return reply(Done {});
        }
        let context = InputContext {
            num_input_pipelines: attendance.workers as usize,
            input_pipeline_id: attendance.worker as usize,
            num_replicas_in_sync: 1,
        };
        let program = self.program.clone();
        let name = request.dataset.clone();
        let made = tokio::task::spawn_blocking(move || caught(|| program.make_dataset(&name, &context)));
        let iterator = made.await.map_err(|error| Status::internal(error.to_string()))?;
        let iterator = iterator.map_err(|message| Status::invalid_argument(message.to_string()))?;
        let iterator = Arc::new(Checkout::new(iterator, ELEMENT_TIMEOUT));
        let resource = Resource { dataset: request.dataset, iterator };
        attendance.resources.lock().insert(request.resource, resource);
        reply(Done {})
    }

    async fn run(&self, mut inbox: Inbox) -> Result<Body, Status> {
        let mut closure: Closure = inbox.one().await?;
        let origin = closure.origin.clone().unwrap_or_default();
        let attendance = self.attendance(origin.session, origin.epoch)?;
        let mut arguments = Parts::up_to(message::MAX_VALUE_BYTES);
        arguments.push(std::mem::take(&mut closure.payload))?;
        while std::mem::take(&mut closure.more) {
            let next: Closure = inbox.one().await?;
            arguments.push(next.payload)?;
            closure.more = next.more;
        }
        closure.payload = arguments.join();
        let (done, outcome) = oneshot::channel();
        let busy = "this worker is still busy with another closure";
        attendance.jobs.try_send((closure, done)).map_err(|_| Status::unavailable(busy))?;
        // Waits for as long as the function runs: the coordinator limits that, and ends the call.
        let Outcome { mut problem, pushed, payload, .. } = outcome.await.map_err(|_| elsewhere())?;
        if attendance.over.load(Ordering::Acquire) {
            // The function was told to end early, so its value may be no result.
            return Err(elsewhere());
        }
        let part = move |(payload, more)| Ok(Outcome { problem: problem.take(), pushed, more, payload });
        reply_all(parts_of(payload).map(part))
    }
}

fn elsewhere() -> Status {
    Status::unavailable("this worker was started again, or attends to another coordinator")
}

fn no_method(name: &str) -> Status {
    Status::unimplemented(format!("a worker has no method {name:?}"))
}

impl Methods for WorkerMethods {
    const NAME: &'static str = "distribute.v1.Worker";

    fn admit(&self, method: &str, session: u64) -> Result<usize, Status> {
        let held = self.held.lock();
        let present = held.of(session).is_some();
        match method {
            // These calls begin a session.
            "Attend" => Ok(MAX_HEAD_BYTES),
            "Release" => Ok(SHORT_MESSAGE_BYTES),
            // Only the current coordinator, or any before the first attendance, may end the job; one that was given up
            // ends nothing.
            "Leave" if present || held.session == 0 => Ok(SHORT_MESSAGE_BYTES),
            "Leave" => Err(Status::aborted(TAKEN_OVER)),
            "CreateResource" | "Run" if !present => Err(elsewhere()),
            "CreateResource" => Ok(SHORT_MESSAGE_BYTES),
            "Run" => Ok(MAX_MESSAGE_BYTES),
            other => Err(no_method(other)),
        }
    }

    async fn call(self: Arc<Self>, method: String, mut inbox: Inbox) -> Result<Body, Status> {
        match method.as_str() {
            "Attend" => self.attend(inbox).await,
            "Release" => self.release(inbox.one().await?).await,
            "CreateResource" => self.create_resource(inbox.one().await?).await,
            "Run" => self.run(inbox).await,
            "Leave" => {
                let request = inbox.one::<LeaveRequest>().await?;
                if request.ended {
                    self.lifetime.end(request.failure);
                }
                reply(Done {})
            }
            other => Err(no_method(other)),
        }
    }
}

impl Attendance {
    /// Begins an attendance, with a new thread for its closures, so that one that is still busy for an earlier
    /// attendance delays nothing.
    fn begin(
        request: &AttendWorker,
        program: Program,
        job: &OwnJob,
        limits: (Duration, Duration),
    ) -> Result<Arc<Attendance>, Status> {
        let wire = request.wire.and_then(numbers::dtype);
        let event_loop = EventLoop::start("worker-calls").map_err(|error| {
            Status::resource_exhausted(format!("cannot start the event loop of calls to servers: {error}"))
        })?;
        let parameters =
            Parameters::new(Runner::Worker(event_loop), job, &request.servers, request.session, wire, limits)
                .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (jobs, queue) = crossbeam_channel::bounded::<Job>(1);
        let attendance = Arc::new(Attendance {
            session: request.session,
            epoch: request.epoch,
            worker: request.worker,
            workers: request.workers,
            parameters: Arc::new(parameters),
            lineage: request.lineage,
            changing: RwLock::new(()),
            over: AtomicBool::new(false),
            resources: Mutex::default(),
            left: Mutex::default(),
            kept: Mutex::default(),
            lasting: Mutex::default(),
            jobs,
        });
        // Weak, so that the thread ends when no closure can be sent any more.
        let weak = Arc::downgrade(&attendance);
        let run = move || {
            for (closure, done) in queue {
                let Some(attendance) = weak.upgrade() else { return };
                // Fails only if no caller waits any more.
                let _ = done.send(attendance.run(&program, closure));
            }
        };
        let name = format!("worker-{}", request.worker);
        let thread = std::thread::Builder::new().name(name).spawn(run);
        thread.map_err(|error| Status::resource_exhausted(format!("cannot start a thread: {error}")))?;
        Ok(attendance)
    }

    /// Takes over the lasting objects and unclaimed datasets of an earlier attendance of the same coordinator, or of an
    /// earlier coordinator if this one keeps what that one has made; of that one all datasets.
    fn inherit(&self, earlier: &Attendance) {
        let is_same = self.session == earlier.session;
        let continues = self.lineage != 0 && self.lineage == earlier.lineage;
        if !is_same && !continues {
            return;
        }
        let mut left = std::mem::take(&mut *earlier.left.lock());
        if !is_same {
            left.extend(std::mem::take(&mut *earlier.resources.lock()));
        }
        *self.left.lock() = left;
        *self.lasting.lock() = std::mem::take(&mut *earlier.lasting.lock());
    }

    fn run(self: Arc<Self>, program: &Program, closure: Closure) -> Outcome {
        let origin = closure.origin.unwrap_or_default();
        let parameters = self.parameters.clone();
        parameters.take_noted();
        let context = WorkerContext::new(self, origin);
        let function = program.find(&closure.function).map_err(Failed::Ours);
        let outcome = function.and_then(|function| caught(|| function.run(&context, &closure.payload)));
        let outcome = outcome.map_err(|failed| match parameters.take_noted() {
            Some(noted) => Failed::Ours(noted),
            None => failed,
        });
        match outcome {
            Ok(result) => Outcome { pushed: context.has_pushed(), payload: Bytes::from(result), ..Outcome::default() },
            Err(failed) => Outcome { problem: Some(problem(failed)), ..Outcome::default() },
        }
    }
}

/// Returns the outcome of a function of the program, with a panic as an error.
fn caught<T, E: From<String>>(run: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without words");
        Err(E::from(format!("it panicked: {words}")))
    })
}

fn problem(failed: Failed) -> Problem {
    match failed {
        Failed::Ours(Error::ServerLost { server, why, .. }) => {
            Problem { message: why, server: Some(server), cancelled: false }
        }
        Failed::Ours(error @ Error::Cancelled { .. }) => {
            Problem { message: error.to_string(), server: None, cancelled: true }
        }
        Failed::Ours(error) => Problem { message: error.to_string(), server: None, cancelled: false },
        Failed::Theirs(error) => {
            let mut message = error.to_string();
            // Causes that the message does not contain itself.
            let mut cause = error.source();
            while let Some(source) = cause {
                let words = source.to_string();
                if !message.contains(&words) {
                    message = format!("{message}: {words}");
                }
                cause = source.source();
            }
            Problem { message, server: None, cancelled: false }
        }
    }
}

#[cfg(test)]
mod tests {
    use distribute_cluster::JobId;

    use super::*;

    /// Attends as a coordinator's session, and takes over what an earlier attendance has left.
    fn attend(session: u64, lineage: u64, earlier: Option<&Attendance>) -> Arc<Attendance> {
        let job = OwnJob { id: JobId::new("a").unwrap(), secret: None, tls: None };
        let request = AttendWorker { session, lineage, workers: 1, ..AttendWorker::default() };
        let limits = (Duration::from_secs(1), Duration::from_secs(1));
        let attendance = Attendance::begin(&request, Program::new(), &job, limits).unwrap();
        earlier.into_iter().for_each(|earlier| attendance.inherit(earlier));
        attendance
    }

    fn resource(dataset: &str) -> Resource {
        Resource { dataset: dataset.to_owned(), iterator: Arc::new(Checkout::new(Box::new(()), ELEMENT_TIMEOUT)) }
    }

    fn names(objects: &Mutex<Objects>) -> Vec<String> {
        objects.lock().keys().cloned().collect()
    }

    #[tokio::test]
    async fn lasting_objects_outlive_a_broken_connection_and_coordinators_that_keep_the_variables() {
        for lineage in [0, 7] {
            let first = attend(7, lineage, None);
            first.lasting.lock().insert("lasting".to_owned(), Arc::new(1));
            first.kept.lock().insert("kept".to_owned(), Arc::new(2));
            first.left.lock().insert(3, resource("unclaimed"));
            first.resources.lock().insert(4, resource("claimed"));
            let again = attend(7, lineage, Some(&first));
            assert_eq!(names(&again.lasting), ["lasting"]);
            assert!(again.kept.lock().is_empty() && again.resources.lock().is_empty());
            assert_eq!(again.left.lock().keys().collect::<Vec<_>>(), [&3]);
            again.resources.lock().insert(4, resource("claimed"));
            let next = attend(8, lineage, Some(&again));
            let (lasting, left) = if lineage == 0 { (0, 0) } else { (1, 2) };
            assert_eq!((next.lasting.lock().len(), next.left.lock().len()), (lasting, left));
        }
    }
}

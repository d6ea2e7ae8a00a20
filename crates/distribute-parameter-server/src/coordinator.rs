//! Scheduling functions on workers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_cluster::{Task, TaskType};
use parking_lot::{Condvar, Mutex, MutexGuard};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};

use crate::context::PerWorkerIterator;
use crate::dispatch;
use crate::message;
use crate::progress::Progress;
use crate::queue::ClosureQueue;
use crate::remote_value::RemoteValue;
use crate::steps::ActiveStep;
use crate::strategy::{Inner, ParameterServerOptions, ParameterServerStrategy};
use crate::wire::proto::{Done, JobFailure, LeaveRequest};
use crate::wire::{ps, worker};
use crate::{Error, Program, Result};

/// Schedules functions of a program on the workers of a cluster, and compensates for lost workers.
///
/// A handle: clones are the same coordinator, and [`new`](ClusterCoordinator::new) returns the same one for the same
/// strategy.
///
/// - A function runs on any free worker, one at a time on each. If its worker is lost, it runs again on another one,
///   before those that wait; no other worker stops, and the lost one rejoins when it is back.
/// - The first error of a function is returned once, by the next [`schedule`](ClusterCoordinator::schedule),
///   [`join`](ClusterCoordinator::join) or [`done`](ClusterCoordinator::done). Waiting functions are cancelled, running
///   ones may finish, and further errors are dropped; then the coordinator can be used again.
///
/// # Examples
/// ```no_run
/// use distribute_cluster::TfConfigResolver;
/// use distribute_parameter_server::{ClusterCoordinator, Error, ParameterServerStrategy, Program, WorkerContext};
///
/// let program = Program::new().function("double", |_: &WorkerContext, x: f64| Ok::<_, Error>(2.0 * x));
/// let strategy = ParameterServerStrategy::builder(&TfConfigResolver::from_env()?).build()?;
/// let coordinator = ClusterCoordinator::new(&strategy, program)?;
/// let value = coordinator.schedule("double", &21.0)?;
/// coordinator.join()?;
/// assert_eq!(value.fetch::<f64>()?, 42.0);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.distribute.coordinator.ClusterCoordinator`.
#[derive(Clone)]
pub struct ClusterCoordinator {
    handle: Arc<Handle>,
}

/// Options of a [`ClusterCoordinator`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CoordinatorOptions {
    /// Maximum number of waiting closures; [`schedule`](ClusterCoordinator::schedule) blocks while it is reached.
    /// Default: 262,144.
    pub queue_size: usize,
    /// How changes of a closure that runs more than once are treated. Default: they are made once.
    pub delivery: Delivery,
    /// The longest time that a function may run; its worker then counts as lost. Default: one hour.
    pub closure_timeout: Duration,
    /// How often a closure is started whose workers are lost, before that is an error. Default: 10.
    pub max_attempts: u32,
    /// How long there may be no worker at all. Default: 5 minutes.
    pub worker_timeout: Duration,
}

impl Default for CoordinatorOptions {
    fn default() -> CoordinatorOptions {
        CoordinatorOptions {
            queue_size: 262_144,
            delivery: Delivery::default(),
            closure_timeout: Duration::from_secs(3600),
            max_attempts: 10,
            worker_timeout: Duration::from_secs(300),
        }
    }
}

distribute_types::setters! {
    CoordinatorOptions {
        queue_size: usize,
        delivery: Delivery,
        closure_timeout: Duration,
        max_attempts: u32,
        worker_timeout: Duration,
    }
}

/// How servers treat changes of a closure that was started more than once because a worker was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// Each change is made once on each server; changes that an earlier attempt has made are skipped.
    #[default]
    EffectivelyOnce,
    /// Each change is made as often as it is sent, as in TensorFlow.
    AtLeastOnce,
}

/// The shared state behind all clones of a coordinator; dropping it ends the coordinator.
pub(crate) struct Handle {
    pub(crate) shared: Arc<Shared>,
    strategy: ParameterServerStrategy,
    tasks: Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

/// The state shared by callers and dispatchers.
pub(crate) struct Shared {
    queue: Mutex<ClosureQueue<Scheduled>>,
    /// Wakes waiting callers.
    changed: Condvar,
    /// Wakes waiting dispatchers.
    pub(crate) ready: Notify,
    pub(crate) program: Program,
    pub(crate) options: CoordinatorOptions,
    /// The names of the datasets that every worker creates, by number.
    pub(crate) resources: Mutex<Vec<String>>,
    /// The state of each server.
    pub(crate) servers: watch::Sender<Vec<ServerState>>,
    /// The last attendance of each worker that servers refuse.
    pub(crate) fences: Mutex<HashMap<u32, u64>>,
    pub(crate) workers: Mutex<Vec<WorkerState>>,
    /// When a worker was last seen.
    pub(crate) worker_seen: Mutex<Instant>,
    pub(crate) progress: Progress,
    pub(crate) closing: AtomicBool,
}

/// A scheduled function.
#[derive(Debug)]
pub(crate) struct Scheduled {
    pub(crate) arguments: Bytes,
    pub(crate) value: RemoteValue,
    /// The numbered step that it makes, if it does.
    pub(crate) step: Option<ActiveStep>,
}

impl Drop for Scheduled {
    /// No worker can run it any more; has no effect if it has run.
    fn drop(&mut self) {
        let (what, why) = (self.value.function().to_owned(), "the coordinator has ended".to_owned());
        self.value.set(Err(Error::Cancelled { what, why }));
    }
}

/// The availability of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServerState {
    Ready,
    Recovering,
    Lost,
}

/// The availability of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// The worker takes part.
    Ready,
    /// The worker has not appeared yet, or was lost.
    Lost,
}

impl ClusterCoordinator {
    /// Starts to coordinate the workers of a strategy's cluster; they may appear later.
    ///
    /// # Errors
    /// Currently none; the result allows for failures of starting the coordinator.
    pub fn new(strategy: &ParameterServerStrategy, program: Program) -> Result<ClusterCoordinator> {
        ClusterCoordinator::with_options(strategy, program, CoordinatorOptions::default())
    }

    /// Starts to coordinate the workers of a strategy's cluster, with options. If the strategy has a coordinator
    /// already, returns that one, with its options.
    ///
    /// # Errors
    /// Currently none; the result allows for failures of starting the coordinator.
    pub fn with_options(
        strategy: &ParameterServerStrategy,
        program: Program,
        options: CoordinatorOptions,
    ) -> Result<ClusterCoordinator> {
        let inner = &strategy.inner;
        let mut known = inner.coordinator.lock();
        if let Some(handle) = known.upgrade() {
            return Ok(ClusterCoordinator { handle });
        }
        let workers = inner.workers.len();
        // Servers identify closures, rounds and attendances by numbers, which must not recur within a session.
        let first = inner.coordinators.fetch_add(1, Ordering::Relaxed) << 40;
        let shared = Arc::new(Shared {
            queue: Mutex::new(ClosureQueue::new(options.queue_size, inner.options.updates, workers, first)),
            changed: Condvar::new(),
            ready: Notify::new(),
            program,
            options,
            resources: Mutex::default(),
            servers: watch::Sender::new(vec![ServerState::Ready; inner.parameters.servers()]),
            fences: Mutex::default(),
            workers: Mutex::new(vec![WorkerState::Lost; workers]),
            worker_seen: Mutex::new(Instant::now()),
            progress: Progress::new(stall_limit(&options, &inner.options)),
            closing: AtomicBool::new(false),
        });
        let runtime = inner.parameters.runtime();
        let mut tasks = Vec::new();
        for worker in 0..workers {
            tasks.push(runtime.spawn(dispatch::serve_worker(worker, first, shared.clone(), inner.clone())));
        }
        for server in 0..inner.parameters.servers() {
            tasks.push(runtime.spawn(dispatch::watch_server(server, shared.clone(), inner.clone())));
        }
        let handle = Arc::new(Handle { shared, strategy: strategy.clone(), tasks: Mutex::new(tasks) });
        *known = Arc::downgrade(&handle);
        Ok(ClusterCoordinator { handle })
    }

    /// Returns the strategy whose workers are coordinated.
    pub fn strategy(&self) -> &ParameterServerStrategy {
        &self.handle.strategy
    }

    /// Schedules a function on some worker; returns at once, unless the queue is full. The worker is not specified, and
    /// functions may run concurrently and in another order than they were scheduled.
    ///
    /// # Errors
    /// [`Error::UnknownName`] if the program has no such function; [`Error::Value`] if the arguments do not fit it; the
    /// first error of functions scheduled before; [`Error::Stalled`] if the queue stays full and nothing happens.
    pub fn schedule(&self, function: &str, arguments: &impl Serialize) -> Result<RemoteValue> {
        self.put(function, arguments, || Ok(None))
    }

    /// Schedules a function that makes a numbered step of the training. The number is the program's: the first step may
    /// have any, further ones follow in order, and one that has failed may be scheduled again.
    ///
    /// Each change of a step is made once on each server, as often as the step is scheduled, also by another
    /// coordinator that was [restarted in place](crate::ParameterServerOptions::restart_in_place): that one begins with
    /// [`first_step`](ParameterServerStrategy::first_step), and schedules again all steps from there on. Those that had
    /// ended already run for their results only. The function makes the same changes in the same order whenever it
    /// runs.
    ///
    /// # Errors
    /// The errors of [`schedule`](ClusterCoordinator::schedule); [`Error::Step`] if the number is not the next one;
    /// [`Error::OtherTraining`] if servers have kept something that the program has not made; [`Error::ServerLost`] if
    /// a server does not answer before the first step, or the first one after a restore.
    pub fn schedule_step(&self, step: u64, function: &str, arguments: &impl Serialize) -> Result<RemoteValue> {
        let inner = &self.handle.strategy.inner;
        inner.complete()?;
        self.put(function, arguments, || {
            let admitted = inner.ledger.schedule(step).map_err(|error| inner.failed(error))?;
            Ok(Some(admitted))
        })
    }

    fn put(
        &self,
        function: &str,
        arguments: &impl Serialize,
        step: impl FnOnce() -> Result<Option<ActiveStep>>,
    ) -> Result<RemoteValue> {
        let shared = &self.handle.shared;
        let known = shared.program.find(function)?;
        let wrong = |source| Error::Value { what: format!("the arguments of {function}"), source };
        let arguments = message::encode(arguments).map_err(wrong)?;
        known.check(&arguments).map_err(wrong)?;
        let value = RemoteValue::new(function, Arc::downgrade(shared));
        let begun = Instant::now();
        let mut queue = shared.lock();
        loop {
            if queue.has_failed() {
                return Err(self.take_error(queue));
            }
            if queue.has_room() {
                queue.put(Scheduled { arguments: arguments.into(), value: value.clone(), step: step()? });
                shared.ready.notify_waiters();
                return Ok(value);
            }
            queue = shared.wait(queue, begun, "room in the queue")?;
        }
    }

    /// Waits until all scheduled functions have run. The wait has no fixed deadline, since a training may take days: it
    /// ends at the latest when nothing has happened for longer than all limits of [`CoordinatorOptions`] together
    /// allow.
    ///
    /// # Errors
    /// The first error of a scheduled function, after which all waiting ones are cancelled; [`Error::Stalled`] if
    /// nothing happens any more.
    pub fn join(&self) -> Result<()> {
        let shared = &self.handle.shared;
        let begun = Instant::now();
        let mut queue = shared.lock();
        loop {
            if queue.has_failed() {
                return Err(self.take_error(queue));
            }
            if queue.is_idle() {
                return Ok(());
            }
            queue = shared.wait(queue, begun, "everything that was scheduled")?;
        }
    }

    /// Returns whether all scheduled functions have run.
    ///
    /// # Errors
    /// The first error of a scheduled function, after which all waiting ones are cancelled; [`Error::Stalled`] if
    /// running ones do not end.
    pub fn done(&self) -> Result<bool> {
        let shared = &self.handle.shared;
        let queue = shared.lock();
        if queue.has_failed() {
            return Err(self.take_error(queue));
        }
        Ok(queue.is_idle())
    }

    /// Takes the error to report, which becomes the job's unless a later function succeeds.
    fn take_error(&self, queue: MutexGuard<'_, ClosureQueue<Scheduled>>) -> Error {
        let error = self.handle.shared.take_error(queue);
        self.handle.strategy.inner.note_failure(&error);
        error
    }

    /// Fetches several results.
    ///
    /// # Errors
    /// The first error of [`RemoteValue::fetch`].
    pub fn fetch<R: DeserializeOwned>(&self, values: &[RemoteValue]) -> Result<Vec<R>> {
        values.iter().map(RemoteValue::fetch).collect()
    }

    /// Lets every worker create a dataset of the program, again after it was lost. Its iterator is an argument of
    /// functions, which take elements by [`WorkerContext::next`](crate::WorkerContext::next).
    ///
    /// # Errors
    /// [`Error::UnknownName`] if the program has no such dataset. Errors of creating it on a worker are reported for
    /// scheduled functions.
    pub fn create_per_worker_dataset<T>(&self, dataset: &str) -> Result<PerWorkerDataset<T>> {
        let shared = &self.handle.shared;
        shared.program.check_dataset(dataset)?;
        let mut resources = shared.resources.lock();
        let resource = resources.len() as u64;
        resources.push(dataset.to_owned());
        Ok(PerWorkerDataset { resource, of: std::marker::PhantomData })
    }

    /// Runs a function once for each part of some data, which its first argument identifies, and returns the results in
    /// the order of parts. Each part counts once, even if workers are lost meanwhile.
    ///
    /// The function takes `(EvaluationShard, A)`.
    ///
    /// # Errors
    /// The errors of [`schedule`](ClusterCoordinator::schedule), [`join`](ClusterCoordinator::join) and
    /// [`RemoteValue::fetch`].
    ///
    /// # Source
    /// `pss_evaluation_shards` of `tf.keras.Model.compile`; "auto" there is five for each worker.
    pub fn evaluate<R: DeserializeOwned>(
        &self,
        function: &str,
        shards: usize,
        arguments: &impl Serialize,
    ) -> Result<Vec<R>> {
        let parts = (0..shards).map(|index| EvaluationShard { index, of: shards });
        let values: Vec<RemoteValue> =
            parts.map(|part| self.schedule(function, &(part, arguments))).collect::<Result<_>>()?;
        self.join()?;
        self.fetch(&values)
    }

    /// Returns the availability of each worker.
    pub fn workers(&self) -> Vec<WorkerState> {
        self.handle.shared.workers.lock().clone()
    }

    /// Returns the numbers of waiting and of running closures.
    pub fn counts(&self) -> (usize, usize) {
        self.handle.shared.lock().counts()
    }
}

impl std::fmt::Debug for ClusterCoordinator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("ClusterCoordinator");
        fields.field("counts", &self.counts()).field("workers", &self.workers()).finish_non_exhaustive()
    }
}

/// The part of some data that a function is to evaluate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct EvaluationShard {
    /// The index of the part, from 0.
    pub index: usize,
    /// The number of parts.
    pub of: usize,
}

/// A dataset of which every worker creates its own.
///
/// # Source
/// `ClusterCoordinator.create_per_worker_dataset`.
pub struct PerWorkerDataset<T> {
    resource: u64,
    of: std::marker::PhantomData<fn() -> T>,
}

impl<T> PerWorkerDataset<T> {
    /// Returns a handle on the iterators, of which every worker has one: the same in each call. For another pass from
    /// the beginning, create the dataset again.
    pub fn iter(&self) -> PerWorkerIterator<T> {
        PerWorkerIterator::new(self.resource)
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, ClosureQueue<Scheduled>> {
        self.queue.lock()
    }

    /// Reports a change of the queue, a worker or a server to all waiting threads and tasks.
    pub(crate) fn notify(&self) {
        self.progress.happened();
        self.changed.notify_all();
        self.ready.notify_waiters();
    }

    /// Records whether a worker takes part.
    pub(crate) fn set_worker(&self, worker: usize, state: WorkerState) {
        // Either the worker was seen until now, or it is seen from now on.
        *self.worker_seen.lock() = Instant::now();
        self.workers.lock()[worker] = state;
        self.progress.happened();
    }

    /// Describes the waiting and running functions, and the missing workers.
    pub(crate) fn describe(&self) -> String {
        let (waiting, running) = self.lock().counts();
        let lost: Vec<String> = (0..)
            .zip(self.workers.lock().iter())
            .filter(|(_, state)| **state == WorkerState::Lost)
            .map(|(index, _)| Task::new(TaskType::Worker, index).to_string())
            .collect();
        let lost =
            if lost.is_empty() { "all workers are there".to_owned() } else { format!("without {}", lost.join(", ")) };
        format!("{waiting} functions wait and {running} run; {lost}")
    }

    /// Records the failure of a closure, whose number and value are given, or with `None` of something else.
    pub(crate) fn fail(&self, failed: Option<(u64, &RemoteValue)>, error: Error) {
        let why = error.to_string();
        {
            let mut queue = self.lock();
            if let Some((_, value)) = failed {
                value.set(Err(error.again()));
            }
            // Before a caller can take the error, and schedule the same steps again.
            cancel(queue.fail(failed.map(|(number, _)| number), error), &why);
        }
        self.notify();
    }

    /// Waits until something has changed.
    fn wait<'a>(
        &self,
        mut queue: MutexGuard<'a, ClosureQueue<Scheduled>>,
        begun: Instant,
        what: &str,
    ) -> Result<MutexGuard<'a, ClosureQueue<Scheduled>>> {
        // Dispatchers report everything that ends a wait, including the absence of workers; this deadline holds if one
        // does not.
        match self.progress.left(begun) {
            Ok(left) => {
                self.changed.wait_for(&mut queue, left);
                Ok(queue)
            }
            Err(waited) => {
                drop(queue);
                Err(Error::Stalled { what: what.to_owned(), waited, state: self.describe() })
            }
        }
    }

    /// Takes the error once nothing runs any more, which `closure_timeout` limits.
    fn take_error(&self, mut queue: MutexGuard<'_, ClosureQueue<Scheduled>>) -> Error {
        let begun = Instant::now();
        loop {
            if let Some(error) = queue.take_error() {
                self.ready.notify_waiters();
                return error;
            }
            let Some(error) = queue.error().map(Error::again) else {
                // Another caller has got the error.
                return Error::Cancelled {
                    what: "this".to_owned(),
                    why: "another caller was told the error".to_owned(),
                };
            };
            queue = match self.wait(queue, begun, "functions to end after an error") {
                Ok(queue) => queue,
                // The cause tells more than the fact that other functions do not end.
                Err(_) => return error,
            };
        }
    }
}

/// Returns the longest time without any event, which exceeds all limits within which one must occur.
fn stall_limit(options: &CoordinatorOptions, strategy: &ParameterServerOptions) -> Duration {
    // A dataset may be created before a function runs.
    let of_closure = options.closure_timeout.saturating_mul(2).saturating_add(options.worker_timeout);
    let of_server = strategy.server_timeout.saturating_add(strategy.message_timeout.saturating_mul(4));
    of_closure.saturating_add(of_server).saturating_add(strategy.silence.saturating_mul(4))
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        // An error that no caller took from the queue may have been returned by a value.
        let untold = self.shared.lock().error().map(Error::again);
        if let Some(error) = untold {
            self.strategy.inner.note_failure(&error);
        }
        let ended = Error::Cancelled { what: "the queue".to_owned(), why: "the coordinator has ended".to_owned() };
        self.shared.fail(None, ended);
        let tasks = std::mem::take(&mut *self.tasks.lock());
        self.strategy.inner.parameters.block_on(async {
            tasks.iter().for_each(tokio::task::JoinHandle::abort);
            // Aborted tasks end at once and release the strategy.
            drop(tokio::time::timeout(Duration::from_secs(2), futures_util::future::join_all(tasks)).await);
        });
    }
}

/// Cancels scheduled functions, which ends all waits for their results.
pub(crate) fn cancel(scheduled: impl IntoIterator<Item = Scheduled>, why: &str) {
    for mut scheduled in scheduled {
        drop(scheduled.step.take());
        let what = scheduled.value.function().to_owned();
        scheduled.value.set(Err(Error::Cancelled { what, why: why.to_owned() }));
    }
}

/// Tells workers and servers that the job is over, and its outcome, or that another coordinator will come.
pub(crate) fn leave(inner: &Inner) {
    let (ended, failure) = match inner.verdict() {
        Some(verdict) if verdict.is_retryable => (false, None),
        Some(verdict) => (true, Some(verdict.failure)),
        None if std::thread::panicking() => {
            let message = "the coordinator panicked".to_owned();
            (true, Some(JobFailure { message, configuration: false }))
        }
        None => (true, None),
    };
    let request = LeaveRequest { session: inner.parameters.session(), ended, failure };
    let timeout = Duration::from_secs(2);
    inner.parameters.block_on(async {
        let mut words = tokio::task::JoinSet::new();
        for server in 0..inner.parameters.servers() {
            let (link, request) = (inner.parameters.link(server).clone(), request.clone());
            words.spawn(async move { link.call::<Done>(ps!("Leave"), request, timeout).await });
        }
        for worker in 0..inner.workers.len() {
            if let Ok(link) = inner.link_to_worker(worker, 2 * timeout) {
                let request = request.clone();
                words.spawn(async move { link.call::<Done>(worker!("Leave"), request, timeout).await });
            }
        }
        // Best effort: a task that is not reached waits for a coordinator and gives up in the end.
        while words.join_next().await.is_some() {}
    });
}

//! Scheduling functions on workers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Runtime;
use tokio::sync::{Notify, watch};

use crate::context::PerWorkerIterator;
use crate::dispatch;
use crate::lock::lock;
use crate::message;
use crate::queue::ClosureQueue;
use crate::remote_value::RemoteValue;
use crate::strategy::{Inner, ParameterServerStrategy};
use crate::wire::proto::{Done, LeaveRequest};
use crate::wire::{Link, ps, worker};
use crate::{Error, Program, Result};

/// Schedules functions of a program on the workers of a cluster, and makes up for workers that are lost.
///
/// A handle: clones are the same coordinator, and so is what [`new`](ClusterCoordinator::new) returns for the same strategy.
///
/// - A function runs on any worker that is free, one at a time on each. Where its worker is lost it runs again on another one; no
///   other worker stops, and the lost one takes part again when it is back.
/// - The first error of a function is returned once, by the next [`schedule`](ClusterCoordinator::schedule),
///   [`join`](ClusterCoordinator::join) or [`done`](ClusterCoordinator::done): what waits is cancelled, what runs may end, further
///   errors are dropped, and then the coordinator can be used again.
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

/// How a [`ClusterCoordinator`] behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoordinatorOptions {
    /// Closures that may wait; [`schedule`](ClusterCoordinator::schedule) then waits too. Default: 262,144.
    pub queue_size: usize,
    /// What happens to changes of a closure that runs more than once. Default: they are made once.
    pub delivery: Delivery,
    /// How long a function may run; its worker then counts as lost. Default: one hour.
    pub closure_timeout: Duration,
    /// How often a closure is begun whose workers are lost; then that is an error. Default: 10.
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

/// What servers do with changes of a closure that was begun more than once, because a worker was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// Each is made once, on each server: those that an attempt has made before are passed over.
    #[default]
    EffectivelyOnce,
    /// Each is made as often as it is asked for: what TensorFlow does.
    AtLeastOnce,
}

/// What keeps a coordinator going.
pub(crate) struct Handle {
    pub(crate) shared: Arc<Shared>,
    strategy: ParameterServerStrategy,
    tasks: Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

/// What callers and dispatchers share.
pub(crate) struct Shared {
    queue: Mutex<ClosureQueue<Scheduled>>,
    /// For callers that wait.
    changed: Condvar,
    /// For dispatchers that wait.
    pub(crate) ready: Notify,
    pub(crate) program: Program,
    pub(crate) options: CoordinatorOptions,
    /// Datasets that every worker makes, by number.
    pub(crate) resources: Mutex<Vec<String>>,
    /// Servers: whether each can be used, is being restored, or is lost.
    pub(crate) servers: watch::Sender<Vec<ServerState>>,
    /// Each worker's attendances that servers refuse.
    pub(crate) fences: Mutex<HashMap<u32, u64>>,
    pub(crate) workers: Mutex<Vec<WorkerState>>,
    pub(crate) closing: AtomicBool,
}

/// A function that was scheduled.
#[derive(Debug)]
pub(crate) struct Scheduled {
    pub(crate) arguments: Bytes,
    pub(crate) value: RemoteValue,
}

impl Drop for Scheduled {
    /// Nobody is left who could run it; where it has run, this changes nothing.
    fn drop(&mut self) {
        let (what, why) = (self.value.function().to_owned(), "the coordinator has ended".to_owned());
        self.value.set(Err(Error::Cancelled { what, why }));
    }
}

/// Whether a server can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServerState {
    Ready,
    Recovering,
    Lost,
}

/// Whether a worker takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// It does.
    Ready,
    /// It has not appeared yet, or was lost.
    Lost,
}

impl ClusterCoordinator {
    /// Begins to coordinate the workers of a strategy's cluster; they may appear later.
    ///
    /// # Errors
    /// [`Error::Threads`].
    pub fn new(strategy: &ParameterServerStrategy, program: Program) -> Result<ClusterCoordinator> {
        ClusterCoordinator::with_options(strategy, program, CoordinatorOptions::default())
    }

    /// As [`new`](ClusterCoordinator::new), with options.
    ///
    /// # Errors
    /// As [`new`](ClusterCoordinator::new).
    pub fn with_options(
        strategy: &ParameterServerStrategy,
        program: Program,
        options: CoordinatorOptions,
    ) -> Result<ClusterCoordinator> {
        let inner = &strategy.inner;
        let mut known = lock(&inner.coordinator);
        if let Some(handle) = known.upgrade() {
            return Ok(ClusterCoordinator { handle });
        }
        let workers = inner.workers.len();
        // Servers know closures, rounds and attendances by numbers, which must not come again in one session.
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

    /// The strategy whose workers these are.
    pub fn strategy(&self) -> &ParameterServerStrategy {
        &self.handle.strategy
    }

    /// Has a function run on some worker; returns at once, unless the queue is full. Which worker it will be is not known, and
    /// functions may run beside each other and in another order than they were scheduled.
    ///
    /// # Errors
    /// [`Error::UnknownName`]; [`Error::Value`] where the function takes something else; the first error of what was scheduled
    /// before.
    pub fn schedule(&self, function: &str, arguments: &impl Serialize) -> Result<RemoteValue> {
        let shared = &self.handle.shared;
        let known = shared.program.find(function)?;
        let wrong = |source| Error::Value { what: format!("the arguments of {function}"), source };
        let arguments = message::encode(arguments).map_err(wrong)?;
        known.check(&arguments).map_err(wrong)?;
        let value = RemoteValue::new(function);
        let scheduled = Scheduled { arguments: arguments.into(), value: value.clone() };
        let mut queue = shared.lock();
        loop {
            if queue.has_failed() {
                return Err(shared.take_error(queue));
            }
            if queue.has_room() {
                queue.put(scheduled);
                shared.ready.notify_waiters();
                return Ok(value);
            }
            queue = shared.wait(queue);
        }
    }

    /// Waits until everything that was scheduled has run.
    ///
    /// # Errors
    /// The first error of what was scheduled, after which everything that waited is cancelled.
    pub fn join(&self) -> Result<()> {
        let shared = &self.handle.shared;
        let mut queue = shared.lock();
        loop {
            if queue.has_failed() {
                return Err(shared.take_error(queue));
            }
            if queue.is_idle() {
                return Ok(());
            }
            queue = shared.wait(queue);
        }
    }

    /// Whether everything that was scheduled has run.
    ///
    /// # Errors
    /// As [`join`](ClusterCoordinator::join).
    pub fn done(&self) -> Result<bool> {
        let shared = &self.handle.shared;
        let queue = shared.lock();
        if queue.has_failed() {
            return Err(shared.take_error(queue));
        }
        Ok(queue.is_idle())
    }

    /// Fetches several results.
    ///
    /// # Errors
    /// As [`RemoteValue::fetch`].
    pub fn fetch<R: DeserializeOwned>(&self, values: &[RemoteValue]) -> Result<Vec<R>> {
        values.iter().map(RemoteValue::fetch).collect()
    }

    /// Has every worker make a dataset of the program, again after it was lost; its iterator is an argument of functions, which take
    /// elements by [`WorkerContext::next`](crate::WorkerContext::next).
    ///
    /// # Errors
    /// [`Error::UnknownName`]. What goes wrong with making it on a worker is an error of what is scheduled.
    pub fn create_per_worker_dataset<T>(&self, dataset: &str) -> Result<PerWorkerDataset<T>> {
        let shared = &self.handle.shared;
        shared.program.check_dataset(dataset)?;
        let mut resources = lock(&shared.resources);
        let resource = resources.len() as u64;
        resources.push(dataset.to_owned());
        Ok(PerWorkerDataset { resource, of: std::marker::PhantomData })
    }

    /// Runs a function once for each part of some data, told by its first argument which part it is, and returns the results
    /// in the order of parts. Each part counts once, whatever happens to workers meanwhile.
    ///
    /// The function takes `(EvaluationShard, A)`.
    ///
    /// # Errors
    /// As [`schedule`](ClusterCoordinator::schedule) and [`RemoteValue::fetch`].
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

    /// Whether each worker takes part.
    pub fn workers(&self) -> Vec<WorkerState> {
        lock(&self.handle.shared.workers).clone()
    }

    /// How many closures wait, and how many run.
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

/// Which part of some data a function is to evaluate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct EvaluationShard {
    /// Which part, from 0.
    pub index: usize,
    /// How many parts there are.
    pub of: usize,
}

/// A dataset of which every worker makes its own.
///
/// # Source
/// `ClusterCoordinator.create_per_worker_dataset`.
pub struct PerWorkerDataset<T> {
    resource: u64,
    of: std::marker::PhantomData<fn() -> T>,
}

impl<T> PerWorkerDataset<T> {
    /// Its iterator, of which every worker has its own: the same in each call. For another pass from the beginning, make the
    /// dataset again.
    pub fn iter(&self) -> PerWorkerIterator<T> {
        PerWorkerIterator::new(self.resource)
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, ClosureQueue<Scheduled>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something about the queue has changed.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
        self.ready.notify_waiters();
    }

    /// A closure, or with `None` something besides, has failed.
    pub(crate) fn fail(&self, number: Option<u64>, error: Error) {
        let why = error.to_string();
        let cancelled = self.lock().fail(number, error);
        cancel(cancelled, &why);
        self.notify();
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, ClosureQueue<Scheduled>>) -> MutexGuard<'a, ClosureQueue<Scheduled>> {
        // Dispatchers report everything that ends a wait, workers that stay away included.
        self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    /// The error, once nothing runs any more: limited by `closure_timeout`.
    fn take_error(&self, mut queue: MutexGuard<'_, ClosureQueue<Scheduled>>) -> Error {
        loop {
            if let Some(error) = queue.take_error() {
                self.ready.notify_waiters();
                return error;
            }
            if !queue.has_failed() {
                // Another thread was told.
                return Error::Cancelled {
                    what: "this".to_owned(),
                    why: "another caller was told the error".to_owned(),
                };
            }
            queue = self.wait(queue);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        let ended = Error::Cancelled { what: "the queue".to_owned(), why: "the coordinator has ended".to_owned() };
        self.shared.fail(None, ended);
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        let runtime = self.strategy.inner.parameters.runtime();
        runtime.block_on(async {
            for task in tasks {
                task.abort();
                // Aborted: it ends at once, and with it its hold on the strategy.
                drop(tokio::time::timeout(Duration::from_secs(2), task).await);
            }
        });
    }
}

/// Says to those who wait for results that there will be none.
pub(crate) fn cancel(scheduled: Vec<Scheduled>, why: &str) {
    for scheduled in scheduled {
        let what = scheduled.value.function().to_owned();
        scheduled.value.set(Err(Error::Cancelled { what, why: why.to_owned() }));
    }
}

/// Tells workers and servers that the job is done, or that another coordinator will come.
pub(crate) fn leave(inner: &Inner, runtime: &Runtime) {
    let ended = !inner.failed.load(Ordering::Acquire) && !std::thread::panicking();
    let request = LeaveRequest { session: inner.parameters.session(), ended };
    let patience = Duration::from_secs(2);
    runtime.block_on(async {
        let mut words = tokio::task::JoinSet::new();
        for server in 0..inner.parameters.servers() {
            let link = inner.parameters.link(server).clone();
            words.spawn(async move { link.call::<Done>(ps!("Leave"), request, patience).await });
        }
        for address in &inner.workers {
            if let Ok(link) = Link::new(address, patience) {
                words.spawn(async move { link.call::<Done>(worker!("Leave"), request, patience).await });
            }
        }
        // Best effort: whoever does not hear it waits for a coordinator, and gives up in the end.
        while words.join_next().await.is_some() {}
    });
}

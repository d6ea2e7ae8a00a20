//! Variables on parameter servers: the coordinator's side.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_cluster::threads::Threads;
use distribute_cluster::{ClusterResolver, SimpleResolver, Task, TaskType};
use distribute_device::{DType, Element};
use distribute_rules::OptimizerDescription;
use distribute_train::checkpoint::{Abandoned, RunId};
use distribute_types::{ErrorClass, FailureKind};
use distribute_values::TensorStorage;
use parking_lot::Mutex;
use tonic::Code;

use crate::parameters::{Parameters, ShardInfo, Table, VariableInfo};
use crate::partitioner::{self, Partitioner};
use crate::placement::Placer;
use crate::steps::Ledger;
use crate::variable::ShardedVariable;
use crate::wire::proto::{AttendServer, CreateShard, Done, JobFailure, OptimizerOfShards, ServerState};
use crate::wire::{Addressee, Attendance, Link, OwnJob, is_lost, parts_of, ps};
use crate::{Error, Result, numbers};

mod attachment;
mod builder;
mod checkpoint;
mod continuation;
mod training;

pub(crate) use self::attachment::BETWEEN_ATTEMPTS;
use self::attachment::{Completion, Kept};
pub use self::builder::{ParameterServerOptions, ParameterServerStrategyBuilder};

/// Training against parameter servers: the coordinator creates variables on servers and schedules functions on workers.
///
/// A handle: clones are the same strategy. Dropping the last one ends the job. Workers and servers then end
/// successfully, unless the last outcome was an error: they end with it if another run would also meet it
/// ([`Error::JobFailed`]), else they wait for the next coordinator.
///
/// # Examples
/// ```no_run
/// use distribute_cluster::TfConfigResolver;
/// use distribute_parameter_server::{Error, MinSizePartitioner, ParameterServerStrategy};
/// use distribute_values::HostTensor;
///
/// let cluster = TfConfigResolver::from_env()?;
/// let partitioner = MinSizePartitioner::new(256 << 10, 2);
/// let strategy = ParameterServerStrategy::builder(&cluster).partitioner(partitioner).build()?;
/// let weights = strategy.variable("w", &HostTensor::new(&[4, 2], vec![0.0f32; 8])?)?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.distribute.ParameterServerStrategy` of TensorFlow 2.
#[derive(Clone)]
pub struct ParameterServerStrategy {
    pub(crate) inner: Arc<Inner>,
}

/// The state shared by all handles. Fields are dropped in this order, the threads last.
pub(crate) struct Inner {
    cluster: SimpleResolver,
    pub(crate) parameters: Arc<Parameters>,
    pub(crate) workers: Vec<String>,
    /// The id and the secret of the job.
    pub(crate) job: OwnJob,
    pub(crate) options: ParameterServerOptions,
    partitioner: Option<Box<dyn Partitioner>>,
    /// How this coordinator attends to servers.
    hold: Mutex<AttendServer>,
    /// The session in which the variables were made; 0 if a later one cannot keep them.
    pub(crate) lineage: u64,
    /// Whether an earlier coordinator has made them.
    is_continued: bool,
    pub(crate) ledger: Arc<Ledger>,
    completion: Completion,
    /// Everything created so far, so that a restarted server can be given its part.
    made: Mutex<Created>,
    /// Read by recoveries of single servers, and written by the load of a checkpoint to all: otherwise a recovery could
    /// give its server parts of the checkpoint that the training leaves.
    pub(crate) restoring: tokio::sync::RwLock<()>,
    /// The number that identifies the process of each server that holds its part; 0 before the first attendance. One
    /// that was started again is recorded here when it is restored.
    incarnations: Mutex<Vec<u64>>,
    /// The servers' answers to the coordinator's attendance, which end when they do; taken by the coordinator that
    /// watches them.
    attendances: Mutex<Vec<Option<Attendance<ServerState>>>>,
    pub(crate) coordinator: Mutex<std::sync::Weak<crate::coordinator::Handle>>,
    /// The number of coordinators so far.
    pub(crate) coordinators: AtomicU64,
    /// The last failure, unless a function has succeeded since.
    verdict: Mutex<Option<Verdict>>,
    /// Run the links and the coordinators' tasks; ended by their drop.
    _threads: Threads,
}

/// A failure of the job.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    /// Whether another run may succeed.
    pub(crate) is_retryable: bool,
    pub(crate) failure: JobFailure,
}

/// A description of everything on the servers, without its values.
#[derive(Debug)]
struct Created {
    placer: Placer,
    /// Names of variables that exist or are being created.
    names: BTreeSet<String>,
    /// The number of the next shard.
    next_shard: u32,
    shards: Vec<(usize, CreateShard)>,
    optimizers: Vec<(OptimizerDescription, Vec<String>)>,
    /// The descriptions with which the program has made them, as JSON.
    made_as: Vec<String>,
    /// Contents that servers have kept, and the program has not made again.
    kept: Kept,
    /// The run whose checkpoints fit the servers' contents, once one was saved or loaded.
    run: Option<RunId>,
    /// The checkpoints of which no restarted server gets its part, since an earlier one was loaded.
    abandoned: Abandoned,
}

impl ParameterServerStrategy {
    /// Returns a builder for the cluster that this process coordinates.
    pub fn builder(cluster: &impl ClusterResolver) -> ParameterServerStrategyBuilder {
        ParameterServerStrategyBuilder::new(cluster)
    }

    /// Returns the cluster and this process's task in it, as they were when the builder was made.
    pub fn cluster_resolver(&self) -> &SimpleResolver {
        &self.inner.cluster
    }

    /// Returns the number of workers.
    pub fn num_workers(&self) -> usize {
        self.inner.workers.len()
    }

    /// Returns the number of parameter servers.
    pub fn num_servers(&self) -> usize {
        self.inner.parameters.servers()
    }

    /// Creates a trainable variable.
    ///
    /// # Errors
    /// [`Error::Variable`] if the name is taken or the type is neither f32 nor f64; [`Error::Partition`] if the
    /// partitioner returns an invalid partition; [`Error::Values`] if `initial` cannot be read; [`Error::ServerLost`]
    /// or [`Error::Refused`] if a server cannot create it.
    pub fn variable<L, T: TensorStorage<L>>(&self, name: &str, initial: &T) -> Result<ShardedVariable> {
        self.make(name, true, initial)
    }

    /// Creates a variable that no optimizer updates, such as a counter or a table.
    ///
    /// # Errors
    /// The errors of [`variable`](ParameterServerStrategy::variable), except that any type is allowed.
    pub fn untrained<L, T: TensorStorage<L>>(&self, name: &str, initial: &T) -> Result<ShardedVariable> {
        self.make(name, false, initial)
    }

    fn make<L, T: TensorStorage<L>>(&self, name: &str, trainable: bool, initial: &T) -> Result<ShardedVariable> {
        let (shape, dtype) = (initial.shape(), initial.dtype()?);
        let mut bytes = Bytes::new();
        initial.read(&mut |elements| bytes = Bytes::copy_from_slice(elements.as_bytes()))?;
        let row_bytes = shape.iter().skip(1).product::<usize>() * dtype.size_bytes();
        let part = |rows: Range<usize>| Ok(bytes.slice(rows.start * row_bytes..rows.end * row_bytes));
        self.make_by_parts(name, &shape, dtype, trainable, part)
    }

    /// Creates a trainable variable shard by shard: `initial` is called with each shard's range of rows, so that no
    /// process holds all of them.
    ///
    /// # Shapes
    /// `initial` returns the elements of its rows in row-major order.
    ///
    /// # Errors
    /// The errors of [`variable`](ParameterServerStrategy::variable), and those of `initial`.
    ///
    /// # Source
    /// Initializers that take `shard_info`.
    pub fn variable_by_parts<T: Element>(
        &self,
        name: &str,
        shape: &[usize],
        mut initial: impl FnMut(Range<usize>) -> Result<Vec<T>>,
    ) -> Result<ShardedVariable> {
        let row_len = shape.iter().skip(1).product::<usize>();
        self.make_by_parts(name, shape, T::DTYPE, true, |rows| {
            let (expected, elements) = (rows.len() * row_len, initial(rows)?);
            if elements.len() != expected {
                let problem = format!("its initial part has {} elements, and {expected} are expected", elements.len());
                return Err(Error::Variable { name: name.to_owned(), problem });
            }
            Ok(numbers::to_bytes(elements))
        })
    }

    fn make_by_parts(
        &self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        trainable: bool,
        mut part: impl FnMut(Range<usize>) -> Result<Bytes>,
    ) -> Result<ShardedVariable> {
        let inner = &self.inner;
        if trainable && !matches!(dtype, DType::F32 | DType::F64) {
            let problem = format!(
                "parameters on servers are f32 or f64, and it is {dtype}; ask for 16 bits on the wire (builder: wire) \
                instead, \
                 or make it untrained"
            );
            return Err(inner.failed(Error::Variable { name: name.to_owned(), problem }));
        }
        inner.check_not_begun(name).map_err(|error| inner.failed(error))?;
        if !inner.made.lock().names.insert(name.to_owned()) {
            let problem = "there is one of this name already; give each its own".to_owned();
            return Err(inner.failed(Error::Variable { name: name.to_owned(), problem }));
        }
        // User code, which is the partitioner and the initial values, runs without a lock held.
        let mut reserved = Reserved { inner, name, is_made: false };
        let shards = match &inner.partitioner {
            Some(partitioner) => {
                let shards = partitioner::shards_of(name, shape, dtype, &**partitioner);
                shards.map_err(|error| inner.failed(error))?
            }
            None => 1,
        };
        let row_bytes = shape.iter().skip(1).product::<usize>() * dtype.size_bytes();
        let cut = partitioner::div_cut(shape.first().copied().unwrap_or(1), shards);
        let (first, servers) = {
            let mut made = inner.made.lock();
            let first = made.next_shard;
            made.next_shard += cut.len() as u32;
            let place = |rows: &Range<usize>| made.placer.place((rows.len() * row_bytes) as u64);
            (first, cut.iter().map(place).collect::<Vec<usize>>())
        };
        let about = |(number, rows): (u32, &Range<usize>)| CreateShard {
            session: inner.parameters.session(),
            shard: number,
            variable: name.to_owned(),
            dtype: dtype.code().into(),
            shape: shape.iter().map(|extent| *extent as u64).collect(),
            first_row: rows.start as u64,
            rows: rows.len() as u64,
            shards: shards as u32,
            trainable,
            ..CreateShard::default()
        };
        let abouts: Vec<CreateShard> = (first..).zip(&cut).map(about).collect();
        let abouts: Vec<(usize, CreateShard)> = servers.into_iter().zip(abouts).collect();
        let is_kept = inner.claim_variable(name, &abouts).map_err(|error| inner.failed(error))?;
        let mut infos = Vec::new();
        for ((server, about), rows) in abouts.into_iter().zip(cut) {
            let number = about.shard;
            if !is_kept {
                let payload = part(rows.clone())?;
                // From here on a server may hold a part of it.
                reserved.is_made = true;
                let created =
                    inner.parameters.block_on(inner.create(server, vec![CreateShard { payload, ..about.clone() }]));
                created.map_err(|error| inner.failed(error))?;
            }
            reserved.is_made = true;
            inner.made.lock().shards.push((server, about));
            infos.push(ShardInfo { server, rows, number });
        }
        let (name, shape) = (name.to_owned(), shape.to_vec());
        let info = Arc::new(VariableInfo { name: name.clone(), dtype, shape, trainable, shards: infos });
        // One at a time, since each adds to the table that the one before has left.
        let _turn = inner.made.lock();
        let mut table = Table::clone(&inner.parameters.table());
        table.variables.insert(name, info.clone());
        inner.parameters.set_table(table);
        Ok(ShardedVariable::new(info, inner.parameters.clone()))
    }

    /// Lets servers update variables; returns the number by which workers name this optimizer when they push gradients.
    ///
    /// # Errors
    /// [`Error::Values`] for settings outside their ranges; [`Error::Variable`] for an untrained variable, and with
    /// LAMB, which uses the norms of whole variables, for a split one; [`Error::ServerLost`] or [`Error::Refused`] if a
    /// server cannot create it.
    pub fn optimizer(
        &self,
        description: impl Into<OptimizerDescription>,
        variables: &[&ShardedVariable],
    ) -> Result<u32> {
        let description = description.into();
        description.check().map_err(|error| self.inner.failed(error.into()))?;
        for variable in variables {
            let info = variable.info();
            let wrong = |problem: &str| {
                self.inner.failed(Error::Variable { name: info.name.clone(), problem: problem.to_owned() })
            };
            if !info.trainable {
                return Err(wrong("it was made untrained, so no optimizer updates it"));
            }
            if !description.rule.is_elementwise() && info.shards.len() > 1 {
                return Err(wrong(
                    "it is cut into shards, and this optimizer looks at the norm of whole variables; use AdamW, or a \
                     partitioner that leaves it whole",
                ));
            }
        }
        let inner = &self.inner;
        let name = variables.first().map_or("none", |variable| variable.name());
        inner.check_not_begun(name).map_err(|error| inner.failed(error))?;
        let mut made = inner.made.lock();
        let number = made.optimizers.len() as u32;
        made.optimizers.push((description, variables.iter().map(|variable| variable.name().to_owned()).collect()));
        // The description consists of numbers and names, which are always valid JSON.
        made.made_as.push(serde_json::to_string(&description).unwrap_or_default());
        let requests = inner.optimizer_requests(&made, number, &BTreeMap::new());
        drop(made);
        match inner.claim_optimizer(number, &requests).map_err(|error| inner.failed(error))? {
            None => inner.parameters.block_on(inner.set_optimizers(requests)).map_err(|error| inner.failed(error))?,
            Some((current, differs)) => {
                if let Some((known, _)) = inner.made.lock().optimizers.get_mut(number as usize) {
                    *known = current;
                }
                if differs {
                    self.set_learning_rate(number, current.learning_rate)?;
                }
            }
        }
        inner.parameters.block_on(inner.parameters.refresh()).map_err(|error| inner.failed(error))?;
        Ok(number)
    }

    /// Sets the learning rate for gradients that servers apply from now on.
    ///
    /// All servers are told, also if one of them fails. After an error a server that was not reached keeps its earlier
    /// rate until it is started again: set the rate again.
    ///
    /// # Errors
    /// [`Error::Optimizer`] for a rate outside its range, [`Error::Option`] for an unknown optimizer,
    /// [`Error::ServerLost`] if a server cannot be reached.
    pub fn set_learning_rate(&self, optimizer: u32, learning_rate: f64) -> Result<()> {
        let inner = &self.inner;
        let mut made = inner.made.lock();
        let Some((description, _)) = made.optimizers.get_mut(optimizer as usize) else {
            let given = optimizer.to_string();
            return Err(Error::Option { what: "the optimizer", given, expected: "a number that optimizer() returned" });
        };
        let changed = OptimizerDescription { learning_rate, ..*description };
        changed.check()?;
        *description = changed;
        let mut requests = inner.optimizer_requests(&made, optimizer, &BTreeMap::new());
        drop(made);
        // A request without shards changes an existing optimizer.
        requests.iter_mut().for_each(|(_, request)| request.shards.clear());
        let tell = |request| inner.parameters.block_on(inner.set_optimizers(vec![request]));
        // The first error counts, and servers after that one are told nevertheless.
        requests.into_iter().map(tell).fold(Ok(()), Result::and)
    }

    /// Returns the variables, ordered by name.
    pub fn variables(&self) -> Vec<ShardedVariable> {
        let table = self.inner.parameters.table();
        let variable = |info: &Arc<VariableInfo>| ShardedVariable::new(info.clone(), self.inner.parameters.clone());
        table.variables.values().map(variable).collect()
    }

    /// Returns a variable by its name, if there is one.
    pub fn find(&self, name: &str) -> Option<ShardedVariable> {
        let info = self.inner.parameters.table().variables.get(name).cloned()?;
        Some(ShardedVariable::new(info, self.inner.parameters.clone()))
    }
}

impl std::fmt::Debug for ParameterServerStrategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("ParameterServerStrategy");
        fields.field("workers", &self.num_workers()).field("servers", &self.num_servers()).finish_non_exhaustive()
    }
}

impl Inner {
    /// Creates shards on a server.
    async fn create(&self, server: usize, shards: Vec<CreateShard>) -> Result<()> {
        let parameters = &self.parameters;
        let in_parts = |mut shard: CreateShard| {
            let payload = std::mem::take(&mut shard.payload);
            parts_of(payload).map(move |(payload, more)| CreateShard { payload, more, ..shard.clone() })
        };
        let messages = shards.into_iter().flat_map(in_parts).collect();
        let done = parameters.link(server).tell::<_, Done>(ps!("Create"), messages, parameters.message_timeout()).await;
        done.map(drop).map_err(parameters.failed(server, "Create"))
    }

    /// Returns the requests that create an optimizer on its servers; `steps` holds the steps made so far, by optimizer.
    fn optimizer_requests(
        &self,
        made: &Created,
        number: u32,
        steps: &BTreeMap<u32, u64>,
    ) -> Vec<(usize, OptimizerOfShards)> {
        let Some((description, names)) = made.optimizers.get(number as usize) else { return Vec::new() };
        let mut by_server: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for (server, shard) in made.shards.iter().filter(|(_, shard)| names.contains(&shard.variable)) {
            by_server.entry(*server).or_default().push(shard.shard);
        }
        let request = |(server, shards)| {
            let request = OptimizerOfShards {
                session: self.parameters.session(),
                optimizer: number,
                // The description consists of numbers and names, which are always valid JSON.
                description: serde_json::to_string(description).unwrap_or_default(),
                steps: steps.get(&number).copied().unwrap_or(0),
                shards,
                contributions: self.options.updates.contributions(),
                made_as: made.made_as.get(number as usize).cloned().unwrap_or_default(),
            };
            (server, request)
        };
        by_server.into_iter().map(request).collect()
    }

    async fn set_optimizers(&self, requests: Vec<(usize, OptimizerOfShards)>) -> Result<()> {
        for (server, request) in requests {
            let parameters = &self.parameters;
            let link = parameters.link(server);
            let done = link.call::<Done>(ps!("SetOptimizer"), request, parameters.message_timeout()).await;
            done.map_err(parameters.failed(server, "SetOptimizer"))?;
        }
        Ok(())
    }

    /// Attends to a server, retrying until `timeout` is over; returns the number that identifies its process, and the
    /// attendance.
    pub(crate) async fn attend(&self, server: usize, timeout: Duration) -> Result<(u64, Attendance<ServerState>)> {
        let (parameters, started) = (&self.parameters, Instant::now());
        loop {
            let again = self.incarnations.lock()[server] != 0;
            let (link, request) = (parameters.link(server), AttendServer { again, ..self.hold.lock().clone() });
            match link.attend::<_, ServerState>(ps!("Attend"), request, parameters.message_timeout()).await {
                Ok((state, attendance)) => {
                    return Ok((state.incarnation, attendance));
                }
                Err(status) if is_lost(&status) && started.elapsed() < timeout => {
                    tokio::time::sleep(BETWEEN_ATTEMPTS).await;
                }
                Err(status) if is_lost(&status) => {
                    return Err(parameters.unreachable(server, started, &status));
                }
                // It was changed after it was found, for example by a worker that was not reached.
                Err(status) if status.code() == Code::AlreadyExists && started.elapsed() < timeout => {
                    if !self.find_again(server).await? {
                        return Err(parameters.failed(server, "Attend")(status));
                    }
                }
                Err(status) => return Err(parameters.failed(server, "Attend")(status)),
            }
        }
    }

    /// Returns whether a server's process is the one that holds its part.
    pub(crate) fn has_part(&self, server: usize, incarnation: u64) -> bool {
        self.incarnations.lock()[server] == incarnation
    }

    /// Records the process of a server that holds its part, with its attendance. Until then no other finds the
    /// attendance of a server that was started again.
    pub(crate) fn note_part(&self, server: usize, incarnation: u64, attendance: Attendance<ServerState>) {
        self.incarnations.lock()[server] = incarnation;
        self.attendances.lock()[server] = Some(attendance);
    }

    /// Takes the attendance of a server, to be watched.
    pub(crate) fn take_attendance(&self, server: usize) -> Option<Attendance<ServerState>> {
        self.attendances.lock()[server].take()
    }

    /// Creates a link to a worker.
    ///
    /// # Errors
    /// If the address is invalid.
    pub(crate) fn link_to_worker(&self, worker: usize, silence: Duration) -> Result<Link, tonic::Status> {
        let (job, session) = (self.job.clone(), self.parameters.session());
        let task = Task::new(TaskType::Worker, worker as u32);
        Link::new(&self.workers[worker], &Addressee { job, task, session }, silence)
    }

    /// Records a failure, which workers and servers are told if nothing succeeds afterwards.
    pub(crate) fn note_failure(&self, error: &Error) {
        if matches!(error, Error::Cancelled { .. }) {
            // The cause is another error.
            return;
        }
        let is_unbegun = matches!(error, Error::Step { .. }) && !self.ledger.has_begun();
        if matches!(error, Error::OtherTraining { .. }) || is_unbegun {
            // The program that began the training may come back.
            return self.note(error.to_string(), FailureKind::Retryable);
        }
        self.note(error.to_string(), error.failure_kind());
    }

    fn note(&self, mut message: String, kind: FailureKind) {
        message.truncate(message.floor_char_boundary(MAX_FAILURE_BYTES));
        let failure = JobFailure { message, configuration: kind == FailureKind::Configuration };
        *self.verdict.lock() = Some(Verdict { is_retryable: kind == FailureKind::Retryable, failure });
    }

    pub(crate) fn failed(&self, error: Error) -> Error {
        self.note_failure(&error);
        error
    }

    /// Clears the recorded failure after a function has succeeded.
    pub(crate) fn forget_failure(&self) {
        *self.verdict.lock() = None;
    }

    pub(crate) fn verdict(&self) -> Option<Verdict> {
        self.verdict.lock().clone()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A failure does not end the job: the next coordinator finds workers and servers waiting.
        crate::coordinator::leave(self);
    }
}

/// Reserves the name of a variable that is being created, and releases it if that fails.
struct Reserved<'a> {
    inner: &'a Inner,
    name: &'a str,
    is_made: bool,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if !self.is_made {
            self.inner.made.lock().names.remove(self.name);
        }
    }
}

/// Limit of the message by which workers and servers are told of a failure.
const MAX_FAILURE_BYTES: usize = 4096;

//! The handle that programs hold, and what is behind it.

use std::sync::Arc;

use distribute_cluster::{Coordination, FailureKind};
use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_device::{Device, DeviceSpec};
use distribute_values::{
    Axis, DistributedVariable, Mirrored, PerReplica, Place, Structure, Synchronization, TensorStorage, VariableOptions,
    broadcast_value, gather_structure, reduce_structure, weighed, with_rows,
};

use crate::context::{self, Frame};
use crate::{Error, Recoverable, Replicas, Result};

/// Where the replicas of this process stand among all replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Processes that hold replicas.
    pub workers: usize,
    /// This process among them.
    pub worker: usize,
    /// Replicas in each process.
    pub replicas_per_worker: usize,
}

impl Topology {
    /// The number of replicas in all processes.
    pub fn num_replicas(&self) -> usize {
        self.workers * self.replicas_per_worker
    }

    /// The id of this process's first replica.
    pub fn first_replica(&self) -> usize {
        self.worker * self.replicas_per_worker
    }
}

/// What the author of a strategy implements.
///
/// # Examples
/// ```
/// use distribute_collectives::Options;
/// use distribute_strategy::{Error, Replicas, Strategy, StrategyExtended};
///
/// struct ThreeThreads(Replicas);
///
/// impl StrategyExtended for ThreeThreads {
///     fn name(&self) -> &'static str {
///         "ThreeThreads"
///     }
///     fn replicas(&self) -> &Replicas {
///         &self.0
///     }
///     fn describe(&self) -> String {
///         "three threads of this process".to_owned()
///     }
/// }
///
/// let devices = vec!["CPU:0".parse()?, "CPU:1".parse()?, "CPU:2".parse()?];
/// let strategy = Strategy::new(ThreeThreads(Replicas::local(devices, Options::default())?));
/// let ids = strategy.run_with((), |context, ()| Ok::<_, Error>(context.replica_id()))?;
/// assert_eq!(ids.values(), [0, 1, 2]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.distribute.StrategyExtended`, less what Rust's types say already.
pub trait StrategyExtended: Send + Sync {
    /// The strategy's name, such as `Mirrored`.
    fn name(&self) -> &'static str;

    /// The replicas of this process.
    fn replicas(&self) -> &Replicas;

    /// One line that says what was chosen, for banners.
    fn describe(&self) -> String;

    /// Whether all replicas of this process share one copy of every variable.
    fn shares_variables(&self) -> bool {
        false
    }
}

/// A strategy: where replicas run and how their values are combined. Cheap to clone.
///
/// # Source
/// `tf.distribute.Strategy`.
#[derive(Clone)]
pub struct Strategy {
    extended: Arc<dyn StrategyExtended>,
}

impl Strategy {
    /// The handle of a strategy implementation.
    pub fn new(extended: impl StrategyExtended + 'static) -> Strategy {
        Strategy { extended: Arc::new(extended) }
    }

    /// The strategy of programs that choose none: one replica, on the CPU.
    ///
    /// # Errors
    /// None in practice; the signature is that of all strategies.
    pub fn default_strategy() -> Result<Strategy> {
        crate::one_device::default_strategy()
    }

    /// The strategy that the environment asks for: [`MultiWorkerMirroredStrategy`](crate::MultiWorkerMirroredStrategy)
    /// where TF_CONFIG, RANK and WORLD_SIZE, Open MPI or Slurm say that this process is one of several, else the default.
    ///
    /// # Errors
    /// [`Error::Cluster`] where the variables are wrong or other tasks are missing.
    pub fn from_env() -> Result<Strategy> {
        match distribute_cluster::Membership::from_env()? {
            Some(_) => crate::MultiWorkerMirroredStrategy::builder().build(),
            None => Strategy::default_strategy(),
        }
    }

    /// What the strategy's author implemented.
    pub fn extended(&self) -> &dyn StrategyExtended {
        self.extended.as_ref()
    }

    /// The strategy's name, such as `Mirrored`.
    pub fn name(&self) -> &'static str {
        self.extended.name()
    }

    /// One line that says what was chosen: `MultiWorkerMirrored 2 workers × 1 CPU · tcp`.
    pub fn describe(&self) -> String {
        self.extended.describe()
    }

    /// The number of replicas that train in step, on all processes.
    pub fn num_replicas_in_sync(&self) -> usize {
        self.replicas().topology.num_replicas()
    }

    /// The number of replicas in this process.
    pub fn num_local_replicas(&self) -> usize {
        self.replicas().topology.replicas_per_worker
    }

    /// Where this process stands among all.
    pub fn topology(&self) -> Topology {
        self.replicas().topology
    }

    /// Whether all replicas of this process share one copy of every variable.
    pub fn shares_variables(&self) -> bool {
        self.extended.shares_variables()
    }

    /// A variable with the components that this strategy gives it, all with the initial value of the first replica: on
    /// several workers, the chief's.
    ///
    /// Every worker calls this. An on-read variable has a component per replica under every strategy. What replicas wrote to it
    /// in a run that fails is taken back.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica; the variable's own, such as a mean of integers; the collective's.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::{HostTensor, VariableOptions};
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let step = strategy.variable("step", &HostTensor::scalar(0.0), VariableOptions::default())?;
    /// assert_eq!(step.components().len(), 2);
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.Variable` in a strategy's scope.
    pub fn variable<L, T: TensorStorage<L>>(
        &self,
        name: &str,
        initial: &T,
        options: VariableOptions,
    ) -> Result<DistributedVariable<T>> {
        self.outside_replicas("a variable's creation", "create variables before run")?;
        let groups = self.groups();
        if self.shares_variables() && options.synchronization == Synchronization::OnWrite {
            let component = initial.copied()?;
            let variable = DistributedVariable::shared(name, component, groups.len(), options)?;
            return Ok(self.watching(variable.undoable()));
        }
        let components = (0..groups.len()).map(|_| initial.copied()).collect::<Result<Vec<T>, _>>()?;
        let variable = DistributedVariable::new(name, components, options)?;
        variable.share_initial(&groups)?;
        Ok(self.watching(variable.undoable()))
    }

    /// Has failed runs take back what replicas wrote to a variable.
    fn watching<T>(&self, variable: DistributedVariable<T>) -> DistributedVariable<T> {
        if let Some(undo) = variable.undo() {
            let undo: Arc<dyn Recoverable> = undo.clone();
            self.recover(Arc::downgrade(&undo));
        }
        variable
    }

    /// Runs `body` for each component of a variable on this process, in its [`Place::Update`]: what it writes there is that
    /// component only. A component that replicas share is updated once.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica, and the first error of `body`.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// use distribute_values::{Assignment, HostTensor, VariableOptions};
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let v = strategy.variable("v", &HostTensor::scalar(1.0), VariableOptions::default())?;
    /// strategy.update(&v, |place, v| v.assign(place, Assignment::Add, &HostTensor::scalar(2.0)).map_err(Error::from))?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.distribute.StrategyExtended.update`.
    pub fn update<T, R, E: From<Error>>(
        &self,
        variable: &DistributedVariable<T>,
        mut body: impl FnMut(Place<'_>, &DistributedVariable<T>) -> Result<R, E>,
    ) -> Result<Vec<R>, E> {
        self.outside_replicas("update", "use merge_call")?;
        let updates = if variable.is_shared() { 1 } else { variable.components().len() };
        (0..updates)
            .map(|local| {
                let _frame = context::push(Frame::Update(self.clone()));
                body(Place::Update { local }, variable)
            })
            .collect()
    }

    /// The devices of this process's replicas.
    pub fn devices(&self) -> &[DeviceSpec] {
        &self.replicas().devices
    }

    /// A local replica's device, opened; the same handle each time.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) where it cannot be opened.
    pub fn open_device(&self, local: usize) -> Result<Arc<dyn Device>> {
        self.replicas().device(local)
    }

    /// Whether this process writes what must be written once: checkpoints, summaries, progress.
    pub fn is_chief(&self) -> bool {
        self.replicas().topology.worker == 0
    }

    /// Hands an outcome on. Where it is a failure, the other processes learn the reason in their next collective, which fails:
    /// else they would wait for this one until they notice that it is gone, and would not know why. Where all have agreed to
    /// leave after the last step there is nothing to tell.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Error, Strategy};
    /// fn train(strategy: &Strategy) -> Result<(), Error> {
    ///     // Reads files, runs steps, writes what it has learnt: all of which may fail on one process alone.
    ///     Ok(())
    /// }
    /// let strategy = Strategy::default_strategy()?;
    /// strategy.tell_failure(train(&strategy))?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `report_error_to_cluster` of TensorFlow's coordination service.
    pub fn tell_failure<R, E: std::fmt::Display>(&self, outcome: Result<R, E>) -> Result<R, E> {
        self.tell_failure_as(outcome, |_| FailureKind::Permanent)
    }

    /// As [`tell_failure`](Strategy::tell_failure), for errors of several kinds: the errors of the other processes are of the same kind
    /// as this one, and so are their exit codes.
    pub fn tell_failure_as<R, E: std::fmt::Display>(
        &self,
        outcome: Result<R, E>,
        kind: impl FnOnce(&E) -> FailureKind,
    ) -> Result<R, E> {
        let replicas = self.replicas();
        if let Err(error) = &outcome
            && replicas.topology.workers > 1
            && !replicas.step_word.all_leave()
        {
            let (reason, kind) = (format!("worker {} failed: {error}", replicas.topology.worker), kind(error));
            for (local, group) in replicas.groups().iter().enumerate() {
                group.abort_as(&reason, kind);
                replicas.abort_further_groups(local, &reason, kind);
            }
        }
        outcome
    }

    /// The coordination service of the processes, where there are several.
    pub fn coordination(&self) -> Option<Arc<Coordination>> {
        self.replicas().coordination.clone()
    }

    /// The local ranks of the group of all replicas.
    pub fn groups(&self) -> Arc<Vec<ProcessGroup>> {
        self.replicas().groups()
    }

    /// Reduces the values of all replicas, of every process, to one: tensors, numbers, or nests of them, leaf by leaf.
    ///
    /// With [`Axis::None`] over replicas only; with an axis, over that too, weighted by the number of elements. Values of
    /// replicas without [examples](crate::ReplicaContext::has_examples) are left out.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica: use [`ReplicaContext::all_reduce`](crate::ReplicaContext::all_reduce) there.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ReduceOp;
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// use distribute_values::Axis;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let seen = strategy.run_with((), |context, ()| Ok::<_, Error>((context.replica_id() as u64 + 1, vec![0.5, 0.25])))?;
    /// assert_eq!(strategy.reduce(ReduceOp::Sum, &seen, Axis::None)?, (3, vec![1.0, 0.5]));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.distribute.Strategy.reduce`, and `batch_reduce_to` for lists.
    pub fn reduce<M, S: Structure<M>>(&self, op: ReduceOp, values: &PerReplica<S>, axis: Axis) -> Result<S> {
        self.outside_replicas("reduce", "use the context's all_reduce, or merge_call")?;
        let groups = self.groups();
        if values.examples().is_none() {
            return Ok(reduce_structure(&groups, op, &values.values().iter().collect::<Vec<_>>(), &axis)?);
        }
        let weighed = weighed(&groups, op, values, &axis)?;
        Ok(reduce_structure(&groups, op, &weighed.iter().collect::<Vec<_>>(), &axis)?)
    }

    /// Concatenates the values of all replicas, of every process, along an axis: tensors, or nests of them, leaf by leaf.
    /// Values of replicas without [examples](crate::ReplicaContext::has_examples) are left out.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica: use [`ReplicaContext::all_gather`](crate::ReplicaContext::all_gather) there.
    pub fn gather<M, S: Structure<M>>(&self, values: &PerReplica<S>, axis: usize) -> Result<S> {
        self.outside_replicas("gather", "use the context's all_gather, or merge_call")?;
        if values.examples().is_none() {
            return Ok(gather_structure(&self.groups(), &values.values().iter().collect::<Vec<_>>(), axis)?);
        }
        let with_rows = with_rows(values, axis)?;
        Ok(gather_structure(&self.groups(), &with_rows.iter().collect::<Vec<_>>(), axis)?)
    }

    /// The chief's `value` on every replica, each with a copy of its own; every process calls this.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica: use [`ReplicaContext::broadcast`](crate::ReplicaContext::broadcast) there. The
    /// collective's.
    ///
    /// # Source
    /// `tf.distribute.StrategyExtended.broadcast_to`.
    pub fn broadcast_to<L, T: TensorStorage<L>>(&self, value: &T) -> Result<Mirrored<T>> {
        self.outside_replicas("broadcast_to", "use the context's broadcast, or merge_call")?;
        let groups = self.groups();
        let first = broadcast_value(&groups, value)?;
        let copies: Result<Vec<T>, _> = (1..groups.len()).map(|_| first.copied()).collect();
        Ok(Mirrored::new([first].into_iter().chain(copies?).collect()))
    }

    /// The values of this process's replicas.
    pub fn local_results<T: Clone>(&self, values: &PerReplica<T>) -> Vec<T> {
        values.values().to_vec()
    }

    /// One value per local replica, made by `make` from the replica's id among all replicas.
    ///
    /// # Errors
    /// The first error of `make`.
    ///
    /// # Source
    /// `tf.distribute.Strategy.experimental_distribute_values_from_function`.
    pub fn distribute_values_from_function<T, E>(
        &self,
        mut make: impl FnMut(ValueContext) -> Result<T, E>,
    ) -> Result<PerReplica<T>, E> {
        let topology = self.topology();
        let context = |local| ValueContext {
            replica_id: topology.first_replica() + local,
            num_replicas: topology.num_replicas(),
        };
        let values: Result<Vec<T>, E> = (0..topology.replicas_per_worker).map(|local| make(context(local))).collect();
        Ok(PerReplica::new(values?))
    }

    /// Runs `body` with this strategy as the current one, in the cross-replica context.
    ///
    /// # Errors
    /// [`Error::Context`] inside the scope of another strategy, else what `body` returns.
    pub fn within<R, E: From<Error>>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
        let _frame = context::enter_cross(self)?;
        body()
    }

    /// The place of code outside replicas, for reads and writes of variables.
    pub fn with_place<R>(&self, body: impl FnOnce(Place<'_>) -> R) -> R {
        body(Place::Cross { groups: &self.groups() })
    }

    pub(crate) fn replicas(&self) -> &Replicas {
        self.extended.replicas()
    }

    pub(crate) fn is_same(&self, other: &Strategy) -> bool {
        Arc::ptr_eq(&self.extended, &other.extended)
    }

    fn outside_replicas(&self, what: &'static str, remedy: &'static str) -> Result<()> {
        match context::current(|frame| matches!(frame, Some(Frame::Replica(_)))) {
            true => Err(Error::Context { what, place: "inside a replica", remedy }),
            false => Ok(()),
        }
    }
}

impl std::fmt::Debug for Strategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Strategy").field(&self.describe()).finish()
    }
}

/// What a function that makes a value knows of its replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueContext {
    /// The replica's id among all replicas.
    pub replica_id: usize,
    /// The number of all replicas.
    pub num_replicas: usize,
}

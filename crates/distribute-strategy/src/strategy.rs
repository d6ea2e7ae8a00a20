//! The strategy handle that programs hold, and the trait behind it.

use std::sync::{Arc, Weak};

use distribute_cluster::{Coordination, FailureKind, SimpleResolver};
use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_device::{Device, DeviceSpec};
use distribute_input::InputOptions;
use distribute_values::{
    Axis, CallContext, DistributedVariable, Mirrored, PerReplica, Structure, Synchronization, TensorStorage,
    VariableOptions, broadcast_value, gather_structure, reduce_examples, reduce_structure, with_rows,
};

use crate::context::{self, Frame};
use crate::{Error, LocalUpdates, Recoverable, Replicas, Result, ShardGroups, Sharding, Topology};

/// The interface that authors of strategies implement: where replicas run, how variables are created and updated, and
/// how input is distributed. Values are reduced, broadcast and gathered by the process groups of [`Replicas`], whose
/// algorithms and transports are options of theirs. The strategies of this crate implement it too.
///
/// A strategy may be written over another, whose replicas it returns: see [`LocalUpdates`].
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
/// `tf.distribute.StrategyExtended`, except what Rust's types express already.
pub trait StrategyExtended: Send + Sync {
    /// Returns the strategy's name, such as `Mirrored`.
    fn name(&self) -> &'static str;

    /// Returns the replicas of this process.
    fn replicas(&self) -> &Replicas;

    /// Returns one line that describes the strategy, for banners.
    fn describe(&self) -> String;

    /// Returns the cluster that the strategy was built for, if it has one.
    fn cluster_resolver(&self) -> Option<&SimpleResolver> {
        None
    }

    /// Returns whether all replicas of this process share one copy of every variable. Default: each has its own.
    fn shares_variables(&self) -> bool {
        false
    }

    /// Returns the options with which [`Strategy::variable`] creates a variable for which the program asks for these.
    /// Default: those.
    fn variable_options(&self, name: &str, options: VariableOptions) -> VariableOptions {
        let _ = name;
        options
    }

    /// Returns how replicas update their variables by their own gradients. Default: `None`, by which gradients are
    /// summed over all replicas in every step.
    fn local_updates(&self) -> Option<&dyn LocalUpdates> {
        None
    }

    /// Returns the options with which datasets are distributed for which the program asks for these. Default: those.
    fn input_options(&self, options: InputOptions) -> InputOptions {
        options
    }

    /// Returns how parameters are sharded; `None` if every replica has whole ones. Only strategies of this crate shard,
    /// since the groups for it are created with their [`Replicas`].
    fn sharding(&self) -> Option<Sharding> {
        None
    }

    /// Returns the PJRT devices on which replicas compute; `None` if they compute on the host or on GPUs.
    #[cfg(feature = "pjrt")]
    fn pjrt(&self) -> Option<&crate::PjrtReplicas> {
        None
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
    /// Creates the handle of a strategy implementation.
    pub fn new(extended: impl StrategyExtended + 'static) -> Strategy {
        Strategy { extended: Arc::new(extended) }
    }

    pub(crate) fn from_extended(extended: Arc<dyn StrategyExtended>) -> Strategy {
        Strategy { extended }
    }

    pub(crate) fn downgraded(&self) -> Weak<dyn StrategyExtended> {
        Arc::downgrade(&self.extended)
    }

    /// Returns the implementation behind the handle.
    pub fn extended(&self) -> &dyn StrategyExtended {
        self.extended.as_ref()
    }

    /// Returns the strategy's name, such as `Mirrored`.
    pub fn name(&self) -> &'static str {
        self.extended.name()
    }

    /// Returns one line that describes the strategy: `MultiWorkerMirrored 2 workers × 1 CPU · tcp`.
    pub fn describe(&self) -> String {
        self.extended.describe()
    }

    /// Returns the number of replicas that train in step, over all processes.
    pub fn num_replicas_in_sync(&self) -> usize {
        self.replicas().topology().num_replicas()
    }

    /// Returns the number of components of this process's [`PerReplica`] values: its number of replicas, or, with
    /// tensor parallelism, the number of their ranks.
    pub fn num_local_replicas(&self) -> usize {
        self.replicas().devices.len()
    }

    /// Returns the number of ranks of each replica: 1, or the size of tensor groups; see
    /// [`ReplicaContext::tensor_group`](crate::ReplicaContext::tensor_group). Component `l` of this process's
    /// [`PerReplica`] values is place `l % tensor_parallel` in its tensor group.
    pub fn tensor_parallel(&self) -> usize {
        self.replicas().mesh.tensor()
    }

    /// Returns the position of this process among all, in replicas. The ranks of a tensor group count as one replica.
    pub fn topology(&self) -> Topology {
        self.replicas().topology()
    }

    /// Returns the cluster of the strategy's processes and this process's task in it, as they were when the strategy
    /// was built: those of the resolver or of TF_CONFIG. Returns `None` for a strategy of one process, and where the
    /// launcher's variables give ranks without addresses.
    ///
    /// # Source
    /// `tf.distribute.Strategy.cluster_resolver`.
    pub fn cluster_resolver(&self) -> Option<&SimpleResolver> {
        self.extended.cluster_resolver()
    }

    /// Returns whether all replicas of this process share one copy of every variable.
    pub fn shares_variables(&self) -> bool {
        self.extended.shares_variables()
    }

    /// Returns how this strategy shards parameters; `None` if every replica has whole ones. The integrations of tensor
    /// libraries read it when they create a model's variables.
    pub fn sharding(&self) -> Option<Sharding> {
        self.extended.sharding()
    }

    /// Returns the PJRT devices of this process's replicas, if models run on such devices: in programs that are
    /// compiled for all of them, which the integrations of tensor libraries make.
    #[cfg(feature = "pjrt")]
    pub fn pjrt(&self) -> Option<&crate::PjrtReplicas> {
        self.extended.pjrt()
    }

    /// Returns the local replicas' ranks in the groups of a strategy that shards parameters; `None` if it does not. For
    /// code outside `run`; see [`ReplicaContext::shard_groups`](crate::ReplicaContext::shard_groups).
    pub fn shard_groups(&self) -> Option<Arc<Vec<Arc<ShardGroups>>>> {
        self.replicas().shard_groups()
    }

    /// Creates a variable with the components that this strategy gives it, all with the initial value of the first
    /// replica: on several workers, the chief's.
    ///
    /// Every worker must call this, for the same variables in the same order: the name identifies the variable on all
    /// of them, so it must not depend on the worker. An on-read variable has one component per replica under every
    /// strategy. A failed run's writes to it are undone.
    ///
    /// A process that joins an elastic job takes over the values by the variables' names, if it has created them
    /// before. Parts of on-read sums, and on-read variables without aggregation, stay with their replicas.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica; [`Error::Values`] if the options do not fit, such as a mean of integers, if
    /// workers create different variables, or if a worker is missing or fails.
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
        let options = self.extended.variable_options(name, options);
        let groups = self.groups();
        if self.shares_variables() && options.synchronization == Synchronization::OnWrite {
            let component = initial.copied()?;
            let variable = DistributedVariable::shared(name, component, groups.len(), options)?;
            return Ok(self.watching(variable));
        }
        let components = (0..groups.len()).map(|_| initial.copied()).collect::<Result<Vec<T>, _>>()?;
        let variable = DistributedVariable::new(name, components, options)?;
        variable.share_initial(&groups)?;
        Ok(self.watching(variable))
    }

    /// Saves this state at the beginning of every run, for as long as it has another owner. For state that changes
    /// without this workspace's knowledge, such as the running statistics of a tensor library's layers. Prefer
    /// [`ReplicaContext::recover`](crate::ReplicaContext::recover), called before a change, for other state.
    pub fn recover(&self, state: Weak<dyn Recoverable>) {
        self.replicas().watch(state);
    }

    /// Makes failed runs undo what replicas wrote to a variable, and processes that join an elastic job take over its
    /// value.
    fn watching<L, T: TensorStorage<L>>(&self, variable: DistributedVariable<T>) -> DistributedVariable<T> {
        let watched = variable.clone().undoable();
        if let Some(undo) = watched.undo() {
            let recoverable: Arc<dyn Recoverable> = undo.clone();
            self.recover(Arc::downgrade(&recoverable));
            if self.elastic().is_some() {
                self.replicas().variables.add(undo, variable);
            }
        }
        watched
    }

    /// Runs `body` for each component of a variable in this process, in its [`CallContext::Update`]: a write there
    /// changes that component only. A component that replicas share is updated once.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica, else the first error of `body`.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// use distribute_values::{Assignment, HostTensor, VariableOptions};
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let two = HostTensor::scalar(2.0);
    /// let v = strategy.variable("v", &HostTensor::scalar(1.0), VariableOptions::default())?;
    /// strategy.update(&v, |context, v| v.assign(context, Assignment::Add, &two).map_err(Error::from))?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.distribute.StrategyExtended.update`.
    pub fn update<T, R, E: From<Error>>(
        &self,
        variable: &DistributedVariable<T>,
        mut body: impl FnMut(CallContext<'_>, &DistributedVariable<T>) -> Result<R, E>,
    ) -> Result<Vec<R>, E> {
        self.outside_replicas("update", "use merge_call")?;
        let updates = if variable.is_shared() { 1 } else { variable.components().len() };
        (0..updates)
            .map(|local| {
                let _frame = context::push(Frame::Update(self.clone()));
                body(CallContext::Update { local }, variable)
            })
            .collect()
    }

    /// Returns the devices of this process's replicas.
    pub fn devices(&self) -> &[DeviceSpec] {
        &self.replicas().devices
    }

    /// Opens a local replica's device; returns the same handle each time.
    ///
    /// # Errors
    /// [`Error::Device`] if it cannot be opened.
    pub fn open_device(&self, local: usize) -> Result<Arc<dyn Device>> {
        self.replicas().device(local)
    }

    /// Returns whether this process writes what must be written once: checkpoints, summaries, progress.
    pub fn is_chief(&self) -> bool {
        self.replicas().topology().worker() == 0
    }

    /// Returns an outcome unchanged. If it is a failure, also reports it to the other processes, whose next collective
    /// fails with the reason; otherwise they would wait until they notice that this process is gone, and would not know
    /// why. Nothing is reported if all processes have agreed to leave after the last step.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Error, Strategy};
    /// fn train(strategy: &Strategy) -> Result<(), Error> {
    ///     // Reads files, runs steps, writes what it has learnt: all of which may fail on one process alone.
    ///     Ok(())
    /// }
    /// let strategy = Strategy::default_strategy()?;
    /// strategy.report_failure(train(&strategy))?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `report_error_to_cluster` of TensorFlow's coordination service.
    pub fn report_failure<R, E: std::fmt::Display>(&self, outcome: Result<R, E>) -> Result<R, E> {
        self.report_failure_as(outcome, |_| FailureKind::Permanent)
    }

    /// Returns an outcome unchanged and reports a failure with its kind, like
    /// [`report_failure`](Strategy::report_failure). The errors of the other processes, and thus their exit codes, are
    /// of the same kind.
    pub fn report_failure_as<R, E: std::fmt::Display>(
        &self,
        outcome: Result<R, E>,
        kind: impl FnOnce(&E) -> FailureKind,
    ) -> Result<R, E> {
        let replicas = self.replicas();
        if let Err(error) = &outcome
            && replicas.topology().workers() > 1
            // The members of an elastic job leave one by one.
            && (replicas.elastic().is_some() || !replicas.step.all_leave())
        {
            let (reason, kind) = (format!("worker {} failed: {error}", replicas.topology().worker()), kind(error));
            for (local, group) in replicas.groups().iter().enumerate() {
                group.abort(&reason, kind);
                replicas.abort_further_groups(local, &reason, kind);
            }
        }
        outcome
    }

    /// Returns the coordination service of the processes, if there are several.
    pub fn coordination(&self) -> Option<Arc<Coordination>> {
        self.replicas().coordination()
    }

    /// Returns the local ranks of the group of all replicas. With tensor parallelism there is one group for each place
    /// in a tensor group, and calls for all local ranks make the same operation in each of them.
    pub fn groups(&self) -> Arc<Vec<ProcessGroup>> {
        self.replicas().groups()
    }

    /// Reduces the values of all replicas of all processes to one: tensors, numbers, or nests of them, leaf by leaf.
    ///
    /// [`Axis::None`] reduces over replicas only; an axis, over that axis too, weighted by the number of elements.
    /// Values of replicas without [examples](crate::ReplicaContext::has_examples) are excluded.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica: use [`ReplicaContext::all_reduce`](crate::ReplicaContext::all_reduce)
    /// there. [`Error::Values`] or [`Error::Collective`] if values do not fit together, or a worker is missing or
    /// fails.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ReduceOp;
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// use distribute_values::Axis;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let seen = strategy.run_with((), |context, ()| {
    ///     Ok::<_, Error>((context.replica_id() as u64 + 1, vec![0.5, 0.25]))
    /// })?;
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
            return Ok(reduce_structure(&groups, op, &values.iter().collect::<Vec<_>>(), &axis)?);
        }
        Ok(reduce_examples(&groups, op, values, &axis)?)
    }

    /// Concatenates the values of all replicas of all processes along an axis: tensors, or nests of them, leaf by leaf.
    /// Values of replicas without [examples](crate::ReplicaContext::has_examples) are excluded.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica: use [`ReplicaContext::all_gather`](crate::ReplicaContext::all_gather)
    /// there. [`Error::Values`] or [`Error::Collective`] if values do not fit together, or a worker is missing or
    /// fails.
    pub fn gather<M, S: Structure<M>>(&self, values: &PerReplica<S>, axis: usize) -> Result<S> {
        self.outside_replicas("gather", "use the context's all_gather, or merge_call")?;
        if values.examples().is_none() {
            return Ok(gather_structure(&self.groups(), &values.iter().collect::<Vec<_>>(), axis)?);
        }
        let with_rows = with_rows(values, axis)?;
        Ok(gather_structure(&self.groups(), &with_rows.iter().collect::<Vec<_>>(), axis)?)
    }

    /// Copies the chief's `value` to every replica; every process must call this.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica: use [`ReplicaContext::broadcast`](crate::ReplicaContext::broadcast) there.
    /// [`Error::Values`] or [`Error::Collective`] if values do not fit together, or a worker is missing or fails.
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

    /// Returns the values of this process's replicas.
    pub fn local_results<T: Clone>(&self, values: &PerReplica<T>) -> Vec<T> {
        values.values().to_vec()
    }

    /// Creates one value per local replica by calling `make`.
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
        let context =
            |local| ValueContext { replica_id: self.replicas().id_of(local), num_replicas: topology.num_replicas() };
        let values: Result<Vec<T>, E> = (0..self.num_local_replicas()).map(|local| make(context(local))).collect();
        Ok(PerReplica::new(values?))
    }

    /// Runs `body` with this strategy as the current one, in the cross-replica context.
    ///
    /// # Errors
    /// [`Error::Context`] inside a replica or the scope of another strategy, else the error of `body`.
    pub fn within<R, E: From<Error>>(&self, body: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
        let _frame = context::enter_cross(self)?;
        body()
    }

    /// Calls `body` with the context of code outside replicas, for reads and writes of variables.
    pub fn with_call_context<R>(&self, body: impl FnOnce(CallContext<'_>) -> R) -> R {
        body(CallContext::Cross { groups: &self.groups() })
    }

    pub(crate) fn replicas(&self) -> &Replicas {
        self.extended.replicas()
    }

    pub(crate) fn is_same(&self, other: &Strategy) -> bool {
        Arc::ptr_eq(&self.extended, &other.extended)
    }

    pub(crate) fn outside_replicas(&self, what: &'static str, remedy: &'static str) -> Result<()> {
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

/// The replica for which a value is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueContext {
    /// The replica's id among all replicas.
    pub replica_id: usize,
    /// The number of all replicas.
    pub num_replicas: usize,
}

#[cfg(test)]
mod tests;

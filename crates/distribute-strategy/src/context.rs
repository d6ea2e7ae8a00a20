//! The context of the running code: inside a replica, in the cross-replica context, or in neither.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::FailureKind;
use distribute_collectives::{DeviceGroup, ProcessGroup, Rank, ReduceOp};
use distribute_device::{DeviceKind, DeviceSpec};
use distribute_values::{
    Axis, CallContext, PerReplica, Structure, TensorStorage, broadcast_from, gather_structure, reduce_structure,
};
use parking_lot::Mutex;

use crate::merge::Rendezvous;
use crate::recovery::Recovery;
use crate::{Error, Recoverable, Result, ShardGroups, Strategy};

/// The view that code inside a replica has of its strategy, with the operations of that replica.
///
/// # Source
/// `tf.distribute.ReplicaContext`.
#[derive(Clone)]
pub struct ReplicaContext {
    strategy: Strategy,
    local: usize,
    groups: Arc<Vec<ProcessGroup>>,
    rendezvous: Arc<Rendezvous>,
    recovery: Arc<Recovery>,
}

impl ReplicaContext {
    pub(crate) fn new(
        strategy: &Strategy,
        local: usize,
        groups: Arc<Vec<ProcessGroup>>,
        rendezvous: Arc<Rendezvous>,
        recovery: Arc<Recovery>,
    ) -> ReplicaContext {
        ReplicaContext { strategy: strategy.clone(), local, groups, rendezvous, recovery }
    }

    /// Returns the strategy that runs this replica.
    pub fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    /// Returns this replica's id among all replicas. The ranks of a tensor group are one replica and have one id.
    pub fn replica_id(&self) -> usize {
        self.strategy.replicas().id_of(self.local)
    }

    /// Returns the index of this replica's component in [`PerReplica`] values of its process: its place among the
    /// replicas of the process, or, with tensor parallelism, among their ranks.
    pub fn local_replica_id(&self) -> usize {
        self.local
    }

    /// Returns the number of replicas that train in step, over all processes.
    pub fn num_replicas_in_sync(&self) -> usize {
        self.strategy.num_replicas_in_sync()
    }

    /// Returns this replica's device.
    pub fn device(&self) -> Option<&DeviceSpec> {
        self.strategy.devices().get(self.local)
    }

    /// Returns this replica's rank in the group of all replicas, for collectives on slices. With tensor parallelism,
    /// the members are the ranks that have this one's place in their tensor groups, one of each replica.
    pub fn group(&self) -> &ProcessGroup {
        &self.groups[self.local]
    }

    /// Returns this rank's tensor group: the ranks that hold the parts of one replica's split variables, which are
    /// neighbours in the list of devices. Returns `None` if every rank is a replica by itself.
    ///
    /// The ranks of a tensor group get the same examples and execute the same operations. Calls in this group are made
    /// inside a model's forward and backward, whose order is the same on all of its ranks.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ReduceOp;
    /// use distribute_strategy::{Error, MirroredStrategy};
    ///
    /// let devices = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"];
    /// let strategy = MirroredStrategy::builder().devices(devices).tensor_parallel(2).build()?;
    /// assert_eq!(strategy.num_replicas_in_sync(), 2);
    /// strategy.run_with((), |context, ()| {
    ///     let mut places = [context.tensor_rank() as u64];
    ///     if let Some(group) = context.tensor_group() {
    ///         group.all_reduce(&mut places, ReduceOp::Sum)?;
    ///     }
    ///     Ok::<_, Error>(assert_eq!(places, [0 + 1]))
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `get_tensor_model_parallel_group` of Megatron-LM; a mesh of two dimensions in `tf.experimental.dtensor`.
    pub fn tensor_group(&self) -> Option<Arc<ProcessGroup>> {
        self.strategy.replicas().tensor_group(self.local)
    }

    /// Returns this rank's place in its tensor group; 0 if every rank is a replica by itself.
    pub fn tensor_rank(&self) -> usize {
        self.strategy.replicas().mesh.place_of(self.local)
    }

    /// Returns this replica's rank in a second group of all replicas, for collectives inside a model's forward and
    /// backward.
    ///
    /// Gradients are reduced in [`group`](ReplicaContext::group) during backward, as they become complete, and on a
    /// replica without examples other gradients become complete than on its peers. The order of calls in that group is
    /// therefore not determined by the model; in this group it is. The group is created on the first call, which every
    /// replica must make at the same point.
    ///
    /// # Errors
    /// [`Error::Collective`] if the group cannot be created; [`Error::Context`] if this replica is not a member of its
    /// strategy's group.
    pub fn graph_group(&self) -> Result<Arc<ProcessGroup>> {
        self.strategy.replicas().graph_group(self.local, || {
            let all: Vec<Rank> = (0..self.num_replicas_in_sync()).map(Rank::of).collect();
            let group = self.group().subgroup(&all)?;
            group.ok_or(Error::Context {
                what: "graph_group",
                place: "in a replica that is not a member of its strategy's group",
                remedy: "call it on the context that run passes",
            })
        })
    }

    /// Returns whether this replica has created its [`graph_group`](ReplicaContext::graph_group).
    pub fn has_graph_group(&self) -> bool {
        self.strategy.replicas().has_graph_group(self.local)
    }

    /// Returns this replica's ranks in the groups over which its strategy shards parameters; `None` if it does not.
    pub fn shard_groups(&self) -> Option<Arc<ShardGroups>> {
        self.strategy.replicas().shard_groups()?.get(self.local).cloned()
    }

    /// Drops a value after this replica's closure has ended and its peers have been told how.
    ///
    /// For operations in progress that a failing replica leaves behind: dropping a
    /// [`Work`](distribute_collectives::Work) waits for it, and peers that wait for this replica elsewhere would not
    /// make the call that it waits for.
    pub fn drop_after_run(&self, value: impl Send + 'static) {
        self.recovery.drop_after_run(Box::new(value));
    }

    /// Returns the group of all replicas' devices, for collectives in device memory. It is created on the first call.
    ///
    /// # Ordering
    /// The first call is collective: every replica must make it.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the device cannot be opened, and the errors of [`DeviceGroup::new`].
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let chosen = strategy.run_with((), |context, ()| Ok::<_, Error>(context.device_group()?.chosen()))?;
    /// assert!(strategy.local_results(&chosen)[0].contains("the host's memory"));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn device_group(&self) -> Result<Arc<DeviceGroup>> {
        let make = |device| Ok(DeviceGroup::new(self.group(), device, self.group().options().device_implementation)?);
        self.strategy().replicas().device_group(self.local_replica_id(), make)
    }

    /// Returns the group of all replicas' devices for collectives inside a model's forward and backward, as
    /// [`graph_group`](ReplicaContext::graph_group) is for those in host memory; `None` unless all replicas are on
    /// GPUs. It is created on the first call.
    ///
    /// # Ordering
    /// The first call is collective: every replica must make it at the same point, also those in host memory.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the device cannot be opened, and the errors of
    /// [`graph_group`](ReplicaContext::graph_group) and [`DeviceGroup::new`].
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// strategy.run_with((), |context, ()| {
    ///     assert!(context.graph_device_group()?.is_none());
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn graph_device_group(&self) -> Result<Option<Arc<DeviceGroup>>> {
        let (replicas, local) = (self.strategy().replicas(), self.local_replica_id());
        replicas.graph_device_group(local, || {
            let group = self.graph_group()?;
            let mut on_gpus = [u8::from(replicas.devices[local].kind() == Some(DeviceKind::Gpu))];
            group.all_reduce(&mut on_gpus, ReduceOp::Min)?;
            if on_gpus[0] == 0 {
                return Ok(None);
            }
            Ok(Some(DeviceGroup::new(&group, replicas.device(local)?, group.options().device_implementation)?))
        })
    }

    /// Aborts this replica's groups, so that no peer waits for it.
    pub(crate) fn abort(&self, reason: &str) {
        self.group().abort(reason, FailureKind::Permanent);
        self.strategy.replicas().abort_further_groups(self.local, reason, FailureKind::Permanent);
    }

    /// Records the state that a failure of this run restores.
    pub(crate) fn begin(&self) -> Result<()> {
        self.recovery.begin(self.local)
    }

    /// Announces that this replica makes no further calls in this run.
    pub(crate) fn set_idle(&self) {
        self.strategy.replicas().set_one_idle(&self.groups, self.local, true);
    }

    /// Returns the context of this replica for reads and writes of variables.
    pub fn call_context(&self) -> CallContext<'_> {
        CallContext::Replica { local: self.local, group: self.group() }
    }

    /// Reduces every replica's `value`: a tensor, a number or a nest of them, leaf by leaf. Every replica must call
    /// this.
    ///
    /// # Errors
    /// [`Error::Collective`] or [`Error::Values`] if the replicas' values differ in shape or type, or a replica is
    /// missing or fails.
    pub fn all_reduce<M, S: Structure<M>>(&self, op: ReduceOp, value: &S) -> Result<S> {
        Ok(reduce_structure(std::slice::from_ref(self.group()), op, &[value], &Axis::None)?)
    }

    /// Returns the value of replica `root` on every replica. Every replica must call this.
    ///
    /// # Errors
    /// [`Error::Collective`] if the replicas' values differ in shape or type, or a replica is missing or fails.
    pub fn broadcast<L, T: TensorStorage<L>>(&self, value: &T, root: Rank) -> Result<T> {
        Ok(broadcast_from(std::slice::from_ref(self.group()), value, root)?)
    }

    /// Concatenates every replica's `value` along an axis and returns the result on every replica. Every replica must
    /// call this.
    ///
    /// Shapes may differ in that axis only.
    ///
    /// # Errors
    /// [`distribute_values::Error::Shape`] if other dimensions differ; [`Error::Collective`] or [`Error::Values`] if a
    /// replica is missing or fails.
    pub fn all_gather<M, S: Structure<M>>(&self, value: &S, axis: usize) -> Result<S> {
        Ok(gather_structure(std::slice::from_ref(self.group()), &[value], axis)?)
    }

    /// Waits until every replica has called this, and every rank of it.
    ///
    /// # Errors
    /// [`Error::Collective`] if a replica is missing or fails.
    pub fn barrier(&self) -> Result<()> {
        self.group().barrier()?;
        // All ranks of this place have called; the others of the tensor group know of theirs.
        self.tensor_group().map_or(Ok(()), |group| Ok(group.barrier()?))
    }

    /// Calls `merge` once, in the cross-replica context, with the values of all replicas of this process, and returns
    /// its result on each of them.
    ///
    /// # Errors
    /// [`Error::Merge`] if replicas make different numbers of merge calls, or one of them fails or does not come in
    /// time; then no replica of this process gets a result, and further merge calls of the run fail too. Else the error
    /// of `merge`, on the replica that has called it, and [`Error::Merge`] on the others. Unless the process has one
    /// replica, no further merge call of the run succeeds after that either.
    ///
    /// # Source
    /// `tf.distribute.ReplicaContext.merge_call`. It may be called conditionally, as long as all replicas agree.
    pub fn merge_call<T: Send + 'static, R: Clone + Send + 'static>(
        &self,
        brought: T,
        merge: impl FnOnce(&Strategy, PerReplica<T>) -> Result<R>,
    ) -> Result<R> {
        self.rendezvous.merge(self.local, brought, self.timeout(), |values| {
            let _frame = push(Frame::Cross(self.strategy.clone()));
            merge(&self.strategy, values)
        })
    }

    fn timeout(&self) -> Duration {
        self.group().options().timeout
    }
}

impl ReplicaContext {
    /// Saves this replica's part of a state that is about to change, unless this run has saved it already.
    ///
    /// # Errors
    /// [`Error::NotNoted`] if the state cannot be read.
    ///
    /// # Examples
    /// See [`Recoverable`].
    pub fn recover(&self, state: &Arc<dyn Recoverable>) -> Result<()> {
        self.recovery.keep(self.local, state)
    }

    /// Checks that this process may make a step. For authors of optimizers, to be called before a step changes
    /// anything; [`commit`](ReplicaContext::commit) would refuse it after that.
    ///
    /// # Errors
    /// [`Error::NotBegun`] in the groups of a [generation](crate::Gathering) in which the process has not begun;
    /// [`Error::NotJoined`] if the process is one of several of an elastic job, and has joined none of them.
    pub fn check_ready(&self) -> Result<()> {
        match self.strategy.replicas().has_begun() {
            true => self.strategy.check_joined(),
            false => Err(Error::NotBegun),
        }
    }

    /// Makes this replica's changes so far final. For authors of optimizers, to be called when a step is certain to
    /// succeed on all replicas of this process.
    ///
    /// # Errors
    /// [`Error::NotNoted`] if the state cannot be read, and the errors of [`check_ready`](ReplicaContext::check_ready).
    pub fn commit(&self) -> Result<()> {
        self.check_ready()?;
        self.recovery.commit(self.local)?;
        self.strategy.replicas().count_commit(self.local);
        Ok(())
    }

    /// Returns whether this replica's batch has examples of its own. A replica without any gets a row that another
    /// replica also has, so that no model meets an empty batch; its results have weight 0. They are excluded by
    /// normalisation over all replicas, and by [`Strategy::reduce`] and [`gather`](Strategy::gather) of the run's
    /// results; running statistics and on-read variables of the replica are unchanged.
    ///
    /// A closure that computes a loss or a reduction by hand multiplies it by [`weight`](ReplicaContext::weight). (The
    /// integration of a tensor library may offer a better way for losses, such as `weigh` for candle.)
    pub fn has_examples(&self) -> bool {
        self.recovery.has_examples(self.local)
    }

    /// Returns the weight of this replica's results: 1, or 0 if its batch has no
    /// [examples](ReplicaContext::has_examples).
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ReduceOp;
    /// use distribute_input::Dataset;
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// use distribute_values::Axis;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let mut seen = 0.0;
    /// for batch in &strategy.distribute_dataset(&Dataset::range(0..9).batch(2))? {
    ///     // In the fifth step the second replica has nothing, and gets a row of the first one's.
    ///     let rows = strategy.run_with(batch?, |context, rows| {
    ///         assert_eq!(rows.shape(), [1]);
    ///         context.all_reduce(ReduceOp::Sum, &(context.weight() * rows.shape()[0] as f64))
    ///     })?;
    ///     seen += rows.values()[0];
    /// }
    /// assert_eq!(seen, 9.0);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn weight(&self) -> f64 {
        self.recovery.note_weighed(self.local);
        f64::from(u8::from(self.has_examples()))
    }

    /// Sets whether the batch that this replica works on from now on has examples of its own, for closures that work on
    /// several batches. For batches passed as arguments of a run it is known.
    ///
    /// # Errors
    /// [`Error::NotNoted`] if state that a batch without examples must not change cannot be read or written.
    pub fn begin_batch(&self, has_examples: bool) -> Result<()> {
        self.recovery.begin_batch(self.local, has_examples)
    }

    /// Checks that the [`weight`](ReplicaContext::weight) was read if this replica has no examples. For authors of
    /// optimizers.
    ///
    /// # Errors
    /// [`Error::Unweighed`] if it was not, so that the loss cannot have been multiplied by it.
    pub fn check_weighed(&self) -> Result<()> {
        if self.recovery.is_weighed(self.local) || self.has_examples() {
            Ok(())
        } else {
            Err(Error::Unweighed { replica: self.replica_id() })
        }
    }
}

impl std::fmt::Debug for ReplicaContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplicaContext").field("replica_id", &self.replica_id()).finish_non_exhaustive()
    }
}

/// Returns the context of the replica that the calling code runs in; `None` outside all replicas.
///
/// # Source
/// `tf.distribute.get_replica_context`.
pub fn get_replica_context() -> Option<ReplicaContext> {
    current(|frame| match frame {
        Some(Frame::Replica(context)) => Some(context.clone()),
        _ => None,
    })
}

/// Returns the strategy that the calling code runs under: that of the scope, the replica or the update, or the one that
/// was [set](set_strategy). Outside all of these it is the [default strategy](Strategy::default_strategy), one for the
/// whole process, which is created when it is first asked for.
///
/// # Errors
/// [`Error::Alone`] outside all scopes, if this process is one of several and has joined none of them, and the other
/// errors of [`Strategy::default_strategy`].
///
/// # Examples
/// A function that works under every strategy, and without one:
/// ```
/// use distribute_strategy::{Error, MirroredStrategy, get_strategy, has_strategy};
/// fn per_replica(global_batch: usize) -> Result<usize, Error> {
///     Ok(global_batch / get_strategy()?.num_replicas_in_sync())
/// }
/// let strategy = MirroredStrategy::builder().num_replicas(2).build()?;
/// assert_eq!(strategy.within(|| per_replica(128))?, 64);
/// assert_eq!(per_replica(128)?, 128);
/// assert!(!has_strategy());
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.distribute.get_strategy`.
pub fn get_strategy() -> Result<Strategy> {
    let chosen = current(|frame| match frame {
        Some(Frame::Replica(context)) => Some(context.strategy.clone()),
        Some(Frame::Cross(strategy) | Frame::Update(strategy)) => Some(strategy.clone()),
        None => None,
    });
    if let Some(chosen) = chosen {
        return Ok(chosen);
    }
    // A failure is not kept: the process may join its job, or the environment be corrected.
    static DEFAULT: Mutex<Option<Strategy>> = Mutex::new(None);
    let mut default = DEFAULT.lock();
    match &*default {
        Some(strategy) => Ok(strategy.clone()),
        None => Ok(default.insert(Strategy::default_strategy()?).clone()),
    }
}

/// Sets the current strategy of this thread, as a scope around all following code would; `None` unsets it. Returns the
/// previous one.
///
/// # Errors
/// [`Error::Context`] inside a scope, a replica or an update.
///
/// # Examples
/// ```
/// use distribute_strategy::{OneDeviceStrategy, get_strategy, has_strategy, set_strategy};
/// set_strategy(Some(&OneDeviceStrategy::builder("CPU:0").build()?))?;
/// assert_eq!(get_strategy()?.name(), "OneDevice");
/// set_strategy(None)?;
/// assert!(!has_strategy());
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.experimental_set_strategy`.
pub fn set_strategy(strategy: Option<&Strategy>) -> Result<Option<Strategy>> {
    if STACK.with_borrow(|stack| !stack.is_empty()) {
        return Err(Error::Context {
            what: "set_strategy",
            place: "inside a scope or a replica",
            remedy: "set it before any scope is entered",
        });
    }
    let set = strategy.map(|strategy| Frame::Cross(strategy.clone()));
    let before = BASE.with_borrow_mut(|base| std::mem::replace(base, set));
    Ok(before.and_then(|frame| match frame {
        Frame::Cross(strategy) => Some(strategy),
        _ => None,
    }))
}

/// Returns whether the calling code runs under a strategy that the program has chosen. If not, [`get_strategy`] returns
/// the default one.
///
/// # Source
/// `tf.distribute.has_strategy`.
pub fn has_strategy() -> bool {
    current(|frame| frame.is_some())
}

/// Returns whether the calling code is in the cross-replica context: in a strategy's scope or a merged function.
///
/// # Source
/// `tf.distribute.in_cross_replica_context`.
pub fn in_cross_replica_context() -> bool {
    current(|frame| matches!(frame, Some(Frame::Cross(_))))
}

/// One level of the thread's context.
pub(crate) enum Frame {
    Replica(ReplicaContext),
    Cross(Strategy),
    /// Inside [`Strategy::update`]: neither in a replica nor in the cross-replica context.
    Update(Strategy),
}

thread_local! {
    static STACK: RefCell<Vec<Frame>> = const { RefCell::new(Vec::new()) };
    /// The bottom of the stack: the strategy that was set for this thread.
    static BASE: RefCell<Option<Frame>> = const { RefCell::new(None) };
}

/// Returns whether the calling code was called by a replica of this strategy, for example in a merged function.
pub(crate) fn is_inside_run_of(strategy: &Strategy) -> bool {
    let is_of = |frame: &Frame| matches!(frame, Frame::Replica(context) if context.strategy.is_same(strategy));
    STACK.with_borrow(|stack| stack.iter().any(is_of))
}

pub(crate) fn current<R>(look: impl FnOnce(Option<&Frame>) -> R) -> R {
    STACK.with_borrow(|stack| match stack.last() {
        Some(frame) => look(Some(frame)),
        None => BASE.with_borrow(|base| look(base.as_ref())),
    })
}

/// Leaves the context when it is dropped.
pub(crate) struct Entered(());

impl Drop for Entered {
    fn drop(&mut self) {
        STACK.with_borrow_mut(Vec::pop);
    }
}

pub(crate) fn push(frame: Frame) -> Entered {
    STACK.with_borrow_mut(|stack| stack.push(frame));
    Entered(())
}

/// Enters the cross-replica context of a strategy.
pub(crate) fn enter_cross(strategy: &Strategy) -> Result<Entered> {
    let outcome = current(|frame| match frame {
        Some(Frame::Cross(outer)) if !outer.is_same(strategy) => Err(Error::Context {
            what: "a strategy's scope",
            place: "inside the scope of another strategy",
            remedy: "leave that scope first: strategies cannot be mixed",
        }),
        Some(Frame::Replica(_)) => Err(Error::Context {
            what: "a strategy's scope",
            place: "inside a replica",
            remedy: "enter it outside run, or use merge_call",
        }),
        _ => Ok(()),
    });
    outcome.map(|()| push(Frame::Cross(strategy.clone())))
}

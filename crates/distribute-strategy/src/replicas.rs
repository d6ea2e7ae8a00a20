//! The part of a strategy in this process: its devices, its replicas' threads, and their ranks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use distribute_cluster::{Coordination, FailureKind};
use distribute_collectives::{DeviceGroup, Options, ProcessGroup};
use distribute_device::{Device, DeviceKind, DeviceSpec, Devices};
use parking_lot::{Mutex, RwLock};

use crate::elastic::Elastic;
use crate::generations::Variables;
use crate::mesh::Mesh;
use crate::replica_threads::ReplicaThreads;
use crate::running::Running;
use crate::settings::{INPUT, Settings};
use crate::step_header::StepAgreement;
use crate::waits::InputWait;
use crate::{Error, Recoverable, Result, ShardGroups, Sharding, Topology};

/// The replicas of this process: their devices, their threads and their ranks.
pub struct Replicas {
    place: RwLock<Place>,
    /// The ranks of this process.
    pub(crate) mesh: Mesh,
    pub(crate) devices: Vec<DeviceSpec>,
    /// How the processes change that train together, if they may.
    elastic: Option<Elastic>,
    /// The steps that each local replica has committed.
    commits: Vec<AtomicU64>,
    /// Whether the present members have a common state, so that optimizers may change it.
    begun: AtomicBool,
    pub(crate) threads: ReplicaThreads,
    pub(crate) running: Running,
    /// The states that every run saves; see [`Strategy::recover`](crate::Strategy::recover).
    pub(crate) watched: Mutex<Vec<Weak<dyn Recoverable>>>,
    /// The variables that processes take over from others.
    pub(crate) variables: Variables,
    groups: Arc<RwLock<Arc<Vec<ProcessGroup>>>>,
    /// See [`ReplicaContext::graph_group`](crate::ReplicaContext::graph_group); one per replica, made when first used.
    graph_groups: Mutex<Vec<Option<Arc<ProcessGroup>>>>,
    /// See [`ReplicaContext::tensor_group`](crate::ReplicaContext::tensor_group); one per rank, or none at all.
    tensor_groups: RwLock<Vec<Arc<ProcessGroup>>>,
    /// The local replicas' groups for sharded parameters, if the strategy shards.
    shard_groups: RwLock<Option<LocalShardGroups>>,
    pub(crate) input_wait: InputWait,
    options: Options,
    pub(crate) step: StepAgreement,
    pub(crate) settings: Settings,
    /// The table of devices; `None` for this machine's.
    table: Option<Devices>,
    /// The replicas' devices, opened on first use.
    handles: Mutex<Vec<Option<Arc<dyn Device>>>>,
    /// The groups of the replicas' devices; one per replica, made when first used.
    device_groups: Mutex<Vec<Option<Arc<DeviceGroup>>>>,
    /// See [`ReplicaContext::graph_device_group`](crate::ReplicaContext::graph_device_group); one per replica, made
    /// when first used, or known not to be made.
    graph_device_groups: Mutex<Vec<Option<Option<Arc<DeviceGroup>>>>>,
}

/// This process among all. It changes only between runs, and only in an elastic job.
#[derive(Clone)]
struct Place {
    /// The replicas of all processes, each of which is one tensor group.
    topology: Topology,
    coordination: Option<Arc<Coordination>>,
    /// The number of times that it has changed.
    changes: u64,
}

/// The groups of a strategy that shards parameters.
struct LocalShardGroups {
    sharding: Sharding,
    /// By local replica.
    groups: Arc<Vec<Arc<ShardGroups>>>,
}

impl Replicas {
    /// Creates the replicas of a single process.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) or [`Error::Thread`](crate::Error::Thread) if the group or the
    /// threads cannot be created.
    pub fn local(devices: Vec<DeviceSpec>, options: Options) -> Result<Replicas> {
        Replicas::local_in(Mesh::flat(devices.len()), devices, options)
    }

    /// Creates the replicas of a single process, each of which is one tensor group of the mesh.
    pub(crate) fn local_in(mesh: Mesh, devices: Vec<DeviceSpec>, options: Options) -> Result<Replicas> {
        let groups = mesh.local_groups(&options)?;
        Replicas::new(mesh, devices, groups, None, options)
    }

    /// Creates the replicas of this process in a group of several processes.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) if the group cannot be joined,
    /// [`Error::Thread`](crate::Error::Thread) if the threads cannot be created.
    pub fn joined(devices: Vec<DeviceSpec>, coordination: Arc<Coordination>, options: Options) -> Result<Replicas> {
        Replicas::joined_in(Mesh::flat(devices.len()), devices, coordination, options)
    }

    /// Creates the replicas of this process in a group of several processes, each of which is one tensor group of the
    /// mesh.
    pub(crate) fn joined_in(
        mesh: Mesh,
        devices: Vec<DeviceSpec>,
        coordination: Arc<Coordination>,
        options: Options,
    ) -> Result<Replicas> {
        let groups = mesh.joined_groups(&coordination, &options)?;
        Replicas::new(mesh, devices, groups, Some(coordination), options)
    }

    fn new(
        mesh: Mesh,
        devices: Vec<DeviceSpec>,
        groups: Vec<ProcessGroup>,
        coordination: Option<Arc<Coordination>>,
        options: Options,
    ) -> Result<Replicas> {
        let ranks = devices.len();
        let topology = topology_of(mesh, &groups)?;
        let threads = ReplicaThreads::start(ranks, topology.worker() * ranks)?;
        let place = RwLock::new(Place { topology, coordination, changes: 0 });
        let (groups, graph_groups) = (Arc::new(RwLock::new(Arc::new(groups))), Mutex::new(vec![None; ranks]));
        let tensor_groups = RwLock::new(mesh.tensor_groups(topology.first_replica(), &options)?);
        let step = StepAgreement::default();
        let settings = Settings::default();
        let handles = Mutex::new(vec![None; ranks]);
        let device_groups = Mutex::new(vec![None; ranks]);
        let graph_device_groups = Mutex::new(vec![None; ranks]);
        Ok(Replicas {
            place,
            mesh,
            devices,
            elastic: None,
            commits: (0..ranks).map(|_| AtomicU64::new(0)).collect(),
            begun: AtomicBool::new(true),
            threads,
            running: Running::default(),
            watched: Mutex::default(),
            variables: Variables::default(),
            groups,
            graph_groups,
            tensor_groups,
            shard_groups: RwLock::default(),
            input_wait: InputWait::default(),
            options,
            step,
            settings,
            table: None,
            handles,
            device_groups,
            graph_device_groups,
        })
    }

    /// Looks devices up in this table instead of this machine's.
    pub(crate) fn with_table(self, table: Option<Devices>) -> Replicas {
        Replicas { table, ..self }
    }

    /// Lets the processes change that train together.
    pub(crate) fn with_elastic(self, elastic: impl FnOnce(Arc<RwLock<Arc<Vec<ProcessGroup>>>>) -> Elastic) -> Replicas {
        let elastic = elastic(self.groups.clone());
        Replicas { elastic: Some(elastic), ..self }
    }

    pub(crate) fn elastic(&self) -> Option<&Elastic> {
        self.elastic.as_ref()
    }

    /// Returns the replicas of all processes.
    pub(crate) fn topology(&self) -> Topology {
        self.place.read().topology
    }

    pub(crate) fn coordination(&self) -> Option<Arc<Coordination>> {
        self.place.read().coordination.clone()
    }

    /// Returns how often this process's place among all has changed.
    pub(crate) fn changes(&self) -> u64 {
        self.place.read().changes
    }

    /// Lets optimizers make steps with the members that have been [joined](Replicas::join).
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// Returns whether optimizers may make steps.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Counts a step that a local replica has committed.
    pub(crate) fn count_commit(&self, local: usize) {
        self.commits[local].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of steps that replicas of this process have committed. A step that one of them has committed
    /// is that of all: the others get its values.
    pub(crate) fn commits(&self) -> u64 {
        self.commits.iter().map(|commits| commits.load(Ordering::Relaxed)).max().unwrap_or(0)
    }

    /// Sets that number, for a process that has taken over the state of another.
    pub(crate) fn set_commits(&self, count: u64) {
        self.commits.iter().for_each(|commits| commits.store(count, Ordering::Relaxed));
    }

    /// Makes this process train by itself. Not during a run.
    pub(crate) fn part(&self) -> Result<()> {
        // Passes over data begin again, and declare theirs.
        self.settings.withdraw(INPUT);
        let groups = self.mesh.local_groups(&self.options)?;
        self.take_place(groups, None)?;
        self.begin();
        Ok(())
    }

    /// Makes this process a member of the group of all members of a job, in which optimizers make steps from
    /// [`begin`](Replicas::begin) on. Not during a run.
    pub(crate) fn join(&self, coordination: Arc<Coordination>) -> Result<()> {
        let groups = self.mesh.joined_groups(&coordination, &self.options)?;
        self.begun.store(false, Ordering::Relaxed);
        self.take_place(groups, Some(coordination))
    }

    fn take_place(&self, groups: Vec<ProcessGroup>, coordination: Option<Arc<Coordination>>) -> Result<()> {
        let topology = topology_of(self.mesh, &groups)?;
        self.replace_groups(groups, topology.first_replica())?;
        self.step.ask_again();
        let mut place = self.place.write();
        let changes = place.changes + 1;
        let left = std::mem::replace(&mut *place, Place { topology, coordination, changes });
        drop(place);
        // The last owner of the coordination service leaves the job, which takes up to a second.
        let leave = move || drop(left);
        std::thread::Builder::new().name("leave-job".to_owned()).spawn(leave).map(drop).or(Ok(()))
    }

    /// Lets every run save this state, for as long as it has another owner.
    pub(crate) fn watch(&self, state: Weak<dyn Recoverable>) {
        let mut watched = self.watched.lock();
        watched.retain(|known| known.strong_count() > 0);
        watched.push(state);
    }

    /// Returns a replica's device, the same handle each time.
    pub(crate) fn device(&self, local: usize) -> Result<Arc<dyn Device>> {
        let mut handles = self.handles.lock();
        if let Some(handle) = &handles[local] {
            return Ok(handle.clone());
        }
        let spec = &self.devices[local];
        let table = match (&self.table, spec.kind()) {
            // Any number of logical CPUs may be named.
            (_, Some(DeviceKind::Cpu)) => Devices::with_cpus(spec.index().map_or(1, |index| index as usize + 1))?,
            (Some(table), _) => table.clone(),
            (None, _) => Devices::local(),
        };
        let place = DeviceSpec { job: None, replica: None, task: None, ..spec.clone() };
        Ok(handles[local].insert(table.open(&place)?).clone())
    }

    /// Returns a replica's device group, which `make` creates on the first call.
    pub(crate) fn device_group(
        &self,
        local: usize,
        make: impl FnOnce(Arc<dyn Device>) -> Result<DeviceGroup>,
    ) -> Result<Arc<DeviceGroup>> {
        let held = self.device_groups.lock()[local].clone();
        if let Some(group) = held {
            return Ok(group);
        }
        // All replicas create theirs together, so the lock must not be held meanwhile.
        let group = Arc::new(make(self.device(local)?)?);
        self.device_groups.lock()[local] = Some(group.clone());
        Ok(group)
    }

    /// Returns a replica's device group for its graph, which `make` creates on the first call, if there is one.
    pub(crate) fn graph_device_group(
        &self,
        local: usize,
        make: impl FnOnce() -> Result<Option<DeviceGroup>>,
    ) -> Result<Option<Arc<DeviceGroup>>> {
        let held = self.graph_device_groups.lock()[local].clone();
        if let Some(group) = held {
            return Ok(group);
        }
        // All replicas create theirs together, so the lock must not be held meanwhile.
        let group = make()?.map(Arc::new);
        self.graph_device_groups.lock()[local] = Some(group.clone());
        Ok(group)
    }

    /// Creates the groups for sharded parameters. Every process calls this, outside runs.
    pub(crate) fn shard(&self, sharding: Sharding) -> Result<()> {
        let groups = self.groups();
        let create = |group| -> Box<dyn FnOnce() -> Result<ShardGroups> + Send + '_> {
            Box::new(move || ShardGroups::split(group, sharding.parts, sharding.overlap))
        };
        let created = self.threads.run(groups.iter().map(create).collect());
        let created = created.into_iter().enumerate().map(|(local, outcome)| {
            let panicked = |_| Error::ReplicaPanicked {
                replica: self.id_of(local),
                message: "in the creation of its groups".to_owned(),
            };
            outcome.map_err(panicked)?.map(Arc::new)
        });
        let created = created.collect::<Result<Vec<_>>>()?;
        *self.shard_groups.write() = Some(LocalShardGroups { sharding, groups: Arc::new(created) });
        Ok(())
    }

    pub(crate) fn shard_groups(&self) -> Option<Arc<Vec<Arc<ShardGroups>>>> {
        self.shard_groups.read().as_ref().map(|sharded| sharded.groups.clone())
    }

    fn shard_groups_of(&self, local: usize) -> Option<Arc<ShardGroups>> {
        self.shard_groups()?.get(local).cloned()
    }

    /// Aborts a replica's tensor group, its groups for sharded parameters, its graph group and its device groups, if
    /// they were made.
    pub(crate) fn abort_further_groups(&self, local: usize, reason: &str, kind: FailureKind) {
        if let Some(group) = self.tensor_group(local) {
            group.abort(reason, kind);
        }
        if let Some(groups) = self.shard_groups_of(local) {
            groups.abort(reason, kind);
        }
        // Of device groups, the abort waits for work that all ranks have enqueued, so no lock may be held meanwhile.
        let graph_group = self.graph_groups.lock()[local].clone();
        let device_group = self.device_groups.lock()[local].clone();
        let graph_device_group = self.graph_device_groups.lock()[local].clone().flatten();
        if let Some(group) = graph_group {
            group.abort(reason, kind);
        }
        for group in [device_group, graph_device_group].into_iter().flatten() {
            group.abort(reason);
        }
    }

    /// Sets for all local replicas whether they are between runs; see [`ProcessGroup::set_idle`].
    pub(crate) fn set_idle(&self, groups: &[ProcessGroup], idle: bool) {
        (0..groups.len()).for_each(|local| self.set_one_idle(groups, local, idle));
    }

    /// Sets for one local replica whether it is between runs.
    pub(crate) fn set_one_idle(&self, groups: &[ProcessGroup], local: usize, idle: bool) {
        groups[local].set_idle(idle);
        if let Some(group) = self.tensor_group(local) {
            group.set_idle(idle);
        }
        if let Some(groups) = self.shard_groups_of(local) {
            groups.set_idle(idle);
        }
        let graph_group = self.graph_groups.lock()[local].clone();
        if let Some(group) = graph_group {
            group.set_idle(idle);
        }
    }

    pub(crate) fn has_graph_group(&self, local: usize) -> bool {
        self.graph_groups.lock()[local].is_some()
    }

    /// Returns a replica's graph group, which `make` creates on the first call.
    pub(crate) fn graph_group(
        &self,
        local: usize,
        make: impl FnOnce() -> Result<ProcessGroup>,
    ) -> Result<Arc<ProcessGroup>> {
        let held = self.graph_groups.lock()[local].clone();
        if let Some(group) = held {
            return Ok(group);
        }
        // All replicas create theirs together, so the lock must not be held meanwhile.
        let group = Arc::new(make()?);
        self.graph_groups.lock()[local] = Some(group.clone());
        Ok(group)
    }

    /// Returns the graph groups that were made, by local replica.
    pub(crate) fn graph_groups(&self) -> Vec<Option<Arc<ProcessGroup>>> {
        self.graph_groups.lock().clone()
    }

    /// Returns a rank's tensor group, if replicas have several ranks.
    pub(crate) fn tensor_group(&self, local: usize) -> Option<Arc<ProcessGroup>> {
        self.tensor_groups.read().get(local).cloned()
    }

    /// Returns the id of the replica that a local rank belongs to, among all replicas.
    pub(crate) fn id_of(&self, local: usize) -> usize {
        self.topology().first_replica() + self.mesh.replica_of(local)
    }

    /// Returns how messages name a local rank: `replica 1`, or `tensor rank 0 of replica 1`.
    pub(crate) fn name_of(&self, local: usize) -> String {
        match self.mesh.tensor() {
            1 => format!("replica {}", self.id_of(local)),
            _ => format!("tensor rank {} of replica {}", self.mesh.place_of(local), self.id_of(local)),
        }
    }

    pub(crate) fn groups(&self) -> Arc<Vec<ProcessGroup>> {
        self.groups.read().clone()
    }

    /// Returns the name of the transport between the processes.
    pub fn transport(&self) -> &'static str {
        self.groups().first().map_or("local", ProcessGroup::transport_name)
    }

    /// Replaces the groups that a failed run has aborted, if the replicas are in one process. Several processes are
    /// restarted from a checkpoint instead.
    pub(crate) fn renew(&self) -> Result<()> {
        if self.topology().workers() == 1 {
            self.replace_groups(self.mesh.local_groups(&self.options)?, 0)?;
            let sharding = self.shard_groups.read().as_ref().map(|sharded| sharded.sharding);
            if let Some(sharding) = sharding {
                self.shard(sharding)?;
            }
        }
        Ok(())
    }

    fn replace_groups(&self, groups: Vec<ProcessGroup>, first_replica: usize) -> Result<()> {
        let tensor = self.mesh.tensor_groups(first_replica, &self.options)?;
        *self.groups.write() = Arc::new(groups);
        *self.tensor_groups.write() = tensor;
        self.graph_groups.lock().fill(None);
        self.device_groups.lock().fill(None);
        self.graph_device_groups.lock().fill(None);
        Ok(())
    }
}

/// Returns the replicas of all processes, of which this process has these ranks.
fn topology_of(mesh: Mesh, groups: &[ProcessGroup]) -> Result<Topology> {
    let replicas_per_worker = mesh.replicas();
    let workers = groups.first().map_or(1, |group| group.world_size() / replicas_per_worker);
    let worker = groups.first().map_or(0, ProcessGroup::process);
    Ok(Topology::new(workers, worker, replicas_per_worker).map_err(distribute_input::Error::from)?)
}

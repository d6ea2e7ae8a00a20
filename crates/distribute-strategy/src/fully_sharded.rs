//! Replicas that hold a part each of every large parameter.

use std::time::Duration;

use distribute_cluster::{ClusterResolver, Membership, SimpleResolver};
use distribute_collectives::{Rank, on_local_ranks};
use distribute_device::DeviceSpec;
use distribute_types::{FNV64, fnv1a_64};

use crate::devices::DeviceChoice;
use crate::workers::{Workers, described, tensor_ranks};
use crate::{CommunicationOptions, Error, Replicas, Result, Sharding, Strategy, StrategyExtended};

/// Synchronous training in which each replica holds a part of every large parameter, of its gradient and of the
/// optimizer's state for it (ZeRO stage 3), on several devices of one process, or of several processes.
///
/// A replica gathers the whole of a parameter when the model uses it and drops it afterwards; gradients are
/// reduce-scattered during backward. The integration of the tensor library does both. Its page says what a model needs
/// for it. Small parameters are mirrored.
///
/// Every process runs the same program. Its task is that of TF_CONFIG, of RANK and WORLD_SIZE, of another launcher's
/// variables (see [`Membership::from_env`]), or of a [`ClusterResolver`]; a process that none of them describes trains
/// by itself.
///
/// # Cost
/// With n replicas, parameters, gradients and state take 1/n of the memory that they take under
/// [`MirroredStrategy`](crate::MirroredStrategy), and a step moves half as many bytes again: a gather in forward, a
/// gather in backward and a reduce-scatter, each of which moves half the bytes of an all-reduce.
///
/// # Examples
/// ```
/// use distribute_strategy::FullyShardedStrategy;
/// let strategy = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let sharding = strategy.sharding().expect("this strategy shards");
/// assert_eq!((sharding.parts, sharding.mirrors), (2, 1));
/// assert!(sharding.shards(1 << 20) && !sharding.shards(10));
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
///
/// # Source
/// `torch.distributed.fsdp.fully_shard`; Rajbhandari and others, "ZeRO: memory optimizations toward training trillion
/// parameter models", 2020.
pub struct FullyShardedStrategy {
    replicas: Replicas,
    cluster: Option<SimpleResolver>,
    sharding: Sharding,
}

impl FullyShardedStrategy {
    /// Returns a builder to choose devices, communication, membership and the extent of the sharding.
    pub fn builder() -> FullyShardedBuilder {
        FullyShardedBuilder::default()
    }

    /// The default of [`mirror_below`](FullyShardedBuilder::mirror_below): the biases and norms of a layer, whose
    /// gathers would take longer than the memory is worth. A variable of this size takes 8 KiB in f32.
    pub const MIRROR_BELOW: usize = 2048;
}

/// Builds a [`FullyShardedStrategy`].
#[derive(Clone, Debug, Default)]
pub struct FullyShardedBuilder {
    workers: Workers,
    hybrid: bool,
    shard_over: Option<usize>,
    mirror_below: Option<usize>,
    overlap: Option<bool>,
}

impl FullyShardedBuilder {
    /// Sets the devices of this process's replicas; every process must have the same number. Default: as
    /// [`MirroredBuilder::devices`](crate::MirroredBuilder::devices), where processes of the job on the same machine
    /// divide the GPUs that they see. The number for each is that of the resolver's
    /// [`num_accelerators`](ClusterResolver::num_accelerators), if it contains `GPU`.
    pub fn devices<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> Self {
        self.workers.devices(DeviceChoice::named(devices));
        self
    }

    /// Runs replicas on the first `count` GPUs of this process.
    pub fn num_gpus(mut self, count: usize) -> Self {
        self.workers.devices(DeviceChoice::Gpus(count));
        self
    }

    /// Runs this number of replicas in each process, as
    /// [`MirroredBuilder::num_replicas`](crate::MirroredBuilder::num_replicas) does.
    pub fn num_replicas(mut self, count: usize) -> Self {
        self.workers.devices(DeviceChoice::Replicas(count));
        self
    }

    /// Sets how replicas communicate.
    pub fn communication(mut self, options: CommunicationOptions) -> Self {
        self.workers.communication(options);
        self
    }

    /// Sets the silence after which a process counts as lost, as
    /// [`MultiWorkerMirroredBuilder::heartbeat_timeout`](crate::MultiWorkerMirroredBuilder::heartbeat_timeout) does.
    pub fn heartbeat_timeout(mut self, timeout: Duration) -> Self {
        self.workers.heartbeat_timeout(timeout);
        self
    }

    /// Sets the membership of the cluster, instead of reading it from the environment.
    pub fn membership(mut self, membership: Membership) -> Self {
        self.workers.membership(membership);
        self
    }

    /// Sets the cluster, and this process's task in it, instead of reading them from the environment.
    ///
    /// # Errors
    /// [`Error::Cluster`] if the resolver's description is invalid, or does not name this process's task.
    pub fn cluster_resolver(mut self, resolver: &dyn ClusterResolver) -> Result<Self> {
        self.workers.cluster_resolver(resolver)?;
        Ok(self)
    }

    /// Sets whether parameters are sharded among the replicas of each host only, and mirrored across hosts, so that
    /// gathers stay within a host and one part of each gradient crosses the network. Processes are on one host if
    /// other processes reach them at the same address. Default: false, which shards over all replicas.
    ///
    /// # Source
    /// A device mesh of two dimensions in `torch.distributed.fsdp.fully_shard`.
    pub fn hybrid(mut self, hybrid: bool) -> Self {
        self.hybrid = hybrid;
        self
    }

    /// Sets among how many replicas parameters are sharded; they are mirrored across groups of that many. The number
    /// of all replicas must be a multiple of it. It takes the place of what [`hybrid`](FullyShardedBuilder::hybrid)
    /// finds out.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::FullyShardedStrategy;
    /// let devices = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"];
    /// let strategy = FullyShardedStrategy::builder().devices(devices).shard_over(2).build()?;
    /// let sharding = strategy.sharding().expect("this strategy shards");
    /// assert_eq!((sharding.parts, sharding.mirrors), (2, 2));
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn shard_over(mut self, replicas: usize) -> Self {
        self.shard_over = Some(replicas);
        self
    }

    /// Sets the number of elements below which a variable is mirrored. Default:
    /// [`FullyShardedStrategy::MIRROR_BELOW`].
    pub fn mirror_below(mut self, elements: usize) -> Self {
        self.mirror_below = Some(elements);
        self
    }

    /// Sets whether the parameter that is used next is gathered, and gradients are reduced, while the model computes.
    /// Without, a step takes longer, and a replica needs the least memory: its parts, and one whole parameter and one
    /// whole gradient in moments. Default: true.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::FullyShardedStrategy;
    /// let strategy = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).overlap(false).build()?;
    /// assert!(!strategy.sharding().expect("this strategy shards").overlap);
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    ///
    /// # Source
    /// `limit_all_gathers` and `backward_prefetch` of `torch.distributed.fsdp.FullyShardedDataParallel`.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// Makes each `ranks` neighbours in the list of devices one tensor group, which is one replica, as
    /// [`MirroredBuilder::tensor_parallel`](crate::MirroredBuilder::tensor_parallel) does. Parameters, and the parts of
    /// those that are split among the ranks, are sharded over the replicas. Default: 1.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::FullyShardedStrategy;
    /// let devices = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"];
    /// let strategy = FullyShardedStrategy::builder().devices(devices).tensor_parallel(2).build()?;
    /// let sharding = strategy.sharding().expect("this strategy shards");
    /// assert_eq!((sharding.parts, strategy.tensor_parallel()), (2, 2));
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn tensor_parallel(mut self, ranks: usize) -> Self {
        self.workers.tensor_parallel(ranks);
        self
    }

    /// Connects to the other processes and builds the strategy.
    ///
    /// # Errors
    /// [`Error::Devices`] if the list of devices is invalid; [`Error::Cluster`] if the environment is invalid or tasks
    /// are missing; [`Error::Collective`] if a group cannot be joined; [`Error::SettingsDiffer`] if processes were
    /// given different settings; [`Error::Sharding`] if the replicas cannot be divided as these say.
    pub fn build(mut self) -> Result<Strategy> {
        let (replicas, cluster) = std::mem::take(&mut self.workers).join("FullyShardedStrategy")?;
        let sharding = self.sharding(&replicas)?;
        replicas.shard(sharding)?;
        Ok(Strategy::new(FullyShardedStrategy { replicas, cluster, sharding }))
    }

    /// Compares the settings of all processes, and divides the replicas as they say.
    fn sharding(&self, replicas: &Replicas) -> Result<Sharding> {
        let mirror_below = self.mirror_below.unwrap_or(FullyShardedStrategy::MIRROR_BELOW);
        let overlap = self.overlap.unwrap_or(true);
        let host = replicas.coordination().map_or_else(String::new, |coordination| coordination.local_host());
        let mine = Settings {
            host: fnv1a_64(FNV64, host.bytes()),
            hybrid: u64::from(self.hybrid),
            shard_over: self.shard_over.map_or(u64::MAX, |replicas| replicas as u64),
            mirror_below: mirror_below as u64,
            overlap: u64::from(overlap),
        };
        let groups = replicas.groups();
        let all = on_local_ranks::<_, Error>(&groups, |_, group| {
            Ok(group.start().all_gather(mine.numbers().to_vec(), vec![0; Settings::LEN * group.world_size()])?)
        })?;
        let all: Vec<Settings> =
            all.unwrap_or_default()[1].chunks_exact(Settings::LEN).map(Settings::from_numbers).collect();
        if let Some(other) = all.iter().position(|other| other.text() != mine.text()) {
            let name = |rank: Rank| groups.first().map_or_else(String::new, |group| group.rank_name(rank).to_owned());
            return Err(Error::SettingsDiffer {
                here: name(Rank::of(replicas.topology().first_replica())),
                mine: mine.text(),
                there: name(Rank::of(other)),
                theirs: all[other].text(),
            });
        }
        let hosts: Vec<u64> = all.iter().map(|settings| settings.host).collect();
        let parts = parts(&hosts, self.hybrid, self.shard_over)?;
        Ok(Sharding { parts, mirrors: hosts.len() / parts, mirror_below, overlap })
    }
}

/// The settings of a process that decide how parameters are sharded.
#[derive(Clone, Copy)]
struct Settings {
    /// A digest of the host.
    host: u64,
    hybrid: u64,
    shard_over: u64,
    mirror_below: u64,
    overlap: u64,
}

impl Settings {
    const LEN: usize = 5;

    fn numbers(self) -> [u64; Settings::LEN] {
        [self.host, self.hybrid, self.shard_over, self.mirror_below, self.overlap]
    }

    fn from_numbers(numbers: &[u64]) -> Settings {
        let at = |index: usize| numbers.get(index).copied().unwrap_or_default();
        Settings { host: at(0), hybrid: at(1), shard_over: at(2), mirror_below: at(3), overlap: at(4) }
    }

    /// Returns what must be equal on all processes.
    fn text(&self) -> String {
        let over = match self.shard_over {
            u64::MAX if self.hybrid == 1 => "sharded over each host".to_owned(),
            u64::MAX => "sharded over all replicas".to_owned(),
            replicas => format!("sharded over {replicas} replicas"),
        };
        let overlap = if self.overlap == 1 { "with" } else { "without" };
        format!("parameters are {over} and mirrored below {} elements, {overlap} overlap", self.mirror_below)
    }
}

/// Returns the number of parts of a variable, from the host of each replica.
fn parts(hosts: &[u64], hybrid: bool, shard_over: Option<usize>) -> Result<usize> {
    let all = hosts.len();
    match shard_over {
        Some(replicas) if replicas > 0 && all.is_multiple_of(replicas) => Ok(replicas),
        Some(replicas) => {
            let problem = format!(
                "shard_over is {replicas}, but there are {all} replicas; give a number that divides it, from 1 to {all}"
            );
            Err(Error::Sharding { problem })
        }
        None if !hybrid => Ok(all),
        None => {
            let runs: Vec<usize> = hosts.chunk_by(|one, other| one == other).map(<[u64]>::len).collect();
            let mut different = hosts.to_vec();
            different.sort_unstable();
            different.dedup();
            if runs.iter().all(|run| *run == runs[0]) && runs.len() == different.len() {
                return Ok(runs[0]);
            }
            let problem = format!(
                "hybrid needs hosts with equal numbers of replicas that follow each other, but by host there are \
                 {runs:?} replicas on {} hosts; start as many processes on every host, one host after another, or set \
                 shard_over",
                different.len()
            );
            Err(Error::Sharding { problem })
        }
    }
}

impl StrategyExtended for FullyShardedStrategy {
    fn name(&self) -> &'static str {
        "FullySharded"
    }

    fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    fn cluster_resolver(&self) -> Option<&SimpleResolver> {
        self.cluster.as_ref()
    }

    fn sharding(&self) -> Option<Sharding> {
        Some(self.sharding)
    }

    fn describe(&self) -> String {
        let topology = self.replicas.topology();
        let place = if topology.workers() == 1 {
            let names: Vec<String> = self.replicas.devices.iter().map(DeviceSpec::short).collect();
            let ranks = tensor_ranks(&self.replicas);
            format!("{} replicas{ranks} ({})", topology.replicas_per_worker(), names.join(", "))
        } else {
            described(&self.replicas)
        };
        match self.sharding {
            Sharding { mirrors: 1, .. } => format!("FullySharded {place}"),
            Sharding { parts, mirrors, .. } => format!("FullySharded {place} · {parts} parts × {mirrors} mirrors"),
        }
    }
}

#[cfg(test)]
mod tests {
    use distribute_collectives::ReduceOp;

    use super::*;

    fn strategy(replicas: usize, shard_over: Option<usize>) -> Result<Strategy> {
        let builder = FullyShardedStrategy::builder().devices((0..replicas).map(|index| format!("CPU:{index}")));
        match shard_over {
            Some(replicas) => builder.shard_over(replicas).build(),
            None => builder.build(),
        }
    }

    #[test]
    fn hosts_decide_what_hybrid_shards_over() {
        assert_eq!(parts(&[7; 4], false, None).unwrap(), 4);
        assert_eq!(parts(&[7; 4], true, None).unwrap(), 4);
        assert_eq!(parts(&[7, 7, 9, 9], true, None).unwrap(), 2);
        assert_eq!(parts(&[7, 8, 9], true, None).unwrap(), 1);
        assert_eq!(parts(&[7, 7, 9, 9], true, Some(4)).unwrap(), 4);
        for (hosts, over) in [(&[7, 9, 7, 9][..], None), (&[7, 7, 9][..], None), (&[7; 4][..], Some(3))] {
            let told = parts(hosts, true, over).unwrap_err().to_string();
            assert!(told.contains("shard_over"), "{told}");
        }
        assert!(parts(&[7; 4], false, Some(0)).is_err());
    }

    #[test]
    fn every_replica_knows_its_part_and_its_groups() {
        for (replicas, over) in [(1, None), (3, None), (4, Some(2)), (4, Some(1)), (4, Some(4))] {
            let strategy = strategy(replicas, over).unwrap();
            let sharding = strategy.sharding().unwrap();
            assert_eq!(
                (sharding.parts, sharding.mirrors),
                (over.unwrap_or(replicas), replicas / over.unwrap_or(replicas))
            );
            strategy
                .run_with((), |context, ()| {
                    let groups = context.shard_groups().unwrap();
                    let me = context.replica_id();
                    assert_eq!(groups.gathers().rank().index(), sharding.part_of(me));
                    assert_eq!(groups.reductions().rank().index(), sharding.part_of(me));
                    assert_eq!(groups.gathers().world_size(), sharding.parts);
                    assert_eq!(groups.mirrors().is_some(), sharding.mirrors > 1);
                    let mut sum = [me as u64];
                    groups.gathers().all_reduce(&mut sum, ReduceOp::Sum)?;
                    let first = me - sharding.part_of(me);
                    assert_eq!(sum[0], (first..first + sharding.parts).sum::<usize>() as u64);
                    if let Some(mirrors) = groups.mirrors() {
                        assert_eq!(mirrors.rank().index(), sharding.shard_group_of(me));
                        let mut sum = [me as u64];
                        mirrors.all_reduce(&mut sum, ReduceOp::Sum)?;
                        let all = (0..replicas).filter(|id| sharding.part_of(*id) == sharding.part_of(me));
                        assert_eq!(sum[0], all.sum::<usize>() as u64);
                    }
                    Ok::<_, Error>(())
                })
                .unwrap();
        }
    }

    #[test]
    fn a_failure_reaches_the_groups_and_they_are_renewed() {
        let strategy = strategy(2, None).unwrap();
        let told = parking_lot::Mutex::new(String::new());
        let failed = strategy.run_with((), |context, ()| {
            if context.replica_id() == 1 {
                return Err(Error::NoData);
            }
            let groups = context.shard_groups().ok_or(Error::NoData)?;
            let outcome = groups.gathers().barrier();
            *told.lock() = outcome.as_ref().map_or_else(ToString::to_string, |()| String::new());
            Ok(outcome?)
        });
        assert!(matches!(failed, Err(Error::NoData)), "{failed:?}");
        assert!(told.lock().contains("replica 1 failed"), "{}", told.lock());
        let renewed = strategy.run_with((), |context, ()| {
            let groups = context.shard_groups().ok_or(Error::NoData)?;
            groups.gathers().barrier()?;
            Ok::<_, Error>(groups.reductions().barrier()?)
        });
        renewed.unwrap();
    }

    #[test]
    fn work_that_a_failure_leaves_is_not_waited_for_before_peers_know() {
        let strategy = strategy(2, None).unwrap();
        let began = std::time::Instant::now();
        let failed = strategy.run_with((), |context, ()| {
            let groups = context.shard_groups().ok_or(Error::NoData)?;
            if context.replica_id() == 1 {
                // The other replica never makes this call.
                context.drop_after_run(groups.reductions().start().barrier()?);
                return Err(Error::NoData);
            }
            Ok(groups.gathers().barrier()?)
        });
        assert!(matches!(failed, Err(Error::NoData)), "{failed:?}");
        assert!(began.elapsed() < std::time::Duration::from_secs(60));
    }

    #[test]
    fn other_strategies_shard_nothing() {
        let strategy = crate::MirroredStrategy::builder().build().unwrap();
        assert!(strategy.sharding().is_none() && strategy.shard_groups().is_none());
        let outcome = strategy.run_with((), |context, ()| Ok::<_, Error>(context.shard_groups().is_none()));
        assert_eq!(outcome.unwrap().values(), [true]);
    }
}

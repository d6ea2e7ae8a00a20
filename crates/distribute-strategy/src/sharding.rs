//! How a strategy shards parameters, and the groups over which it does.

use std::time::Duration;

use distribute_cluster::FailureKind;
use distribute_collectives::{OwnedBuffers, ProcessGroup, Work};

use crate::{Error, Result, Strategy};

/// How a strategy shards parameters: see [`Strategy::sharding`](crate::Strategy::sharding).
///
/// Replicas that follow each other form a shard group and hold one part each of every sharded variable; the replicas
/// with the same part in all shard groups mirror each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sharding {
    /// The number of parts of a sharded variable, which is the number of replicas of a shard group.
    pub parts: usize,
    /// The number of shard groups; 1 unless parameters are sharded within hosts and mirrored across them.
    pub mirrors: usize,
    /// Variables with fewer elements are not sharded; every replica has a copy.
    pub mirror_below: usize,
    /// Whether parameters are gathered before their use, and gradients reduced, while the model computes.
    pub overlap: bool,
}

impl Sharding {
    /// Returns whether a variable with this many elements is sharded.
    pub fn shards(&self, elements: usize) -> bool {
        self.parts > 1 && elements >= self.mirror_below.max(1)
    }

    /// Returns the part of every sharded variable that a replica holds, from its id among all replicas.
    pub fn part_of(&self, replica_id: usize) -> usize {
        replica_id % self.parts.max(1)
    }

    /// Returns the number of the shard group that a replica is in, from its id among all replicas.
    pub fn shard_group_of(&self, replica_id: usize) -> usize {
        replica_id / self.parts.max(1)
    }
}

/// One replica's ranks in the groups of a strategy that shards parameters.
///
/// Parameters are gathered when the model uses them, and gradients are reduced when they are complete; their order
/// relative to each other is not determined, so each has a group of its own.
///
/// The groups are created with the strategy, and again after a failed run. A group outlives its strategy only in
/// operations that are still in progress.
#[derive(Debug)]
pub struct ShardGroups {
    gathers: ProcessGroup,
    reductions: ProcessGroup,
    mirrors: Option<ProcessGroup>,
    overlap: bool,
}

impl ShardGroups {
    /// Creates this replica's groups. Every replica calls this, each on a thread of its own.
    pub(crate) fn split(all: &ProcessGroup, parts: usize, overlap: bool) -> Result<ShardGroups> {
        let me = all.rank().index();
        let (part, group) = (number(me % parts)?, number(me / parts)?);
        // The parent's order is kept, so that the rank in a shard group is the part.
        let member = |group: Option<ProcessGroup>| {
            group.ok_or(Error::Context {
                what: "the creation of shard groups",
                place: "in a replica that is in none",
                remedy: "create the strategy anew",
            })
        };
        let gathers = member(all.split(Some(group), 0)?)?;
        let reductions = member(all.split(Some(group), 0)?)?;
        let mirrors = match all.world_size() > parts {
            true => Some(member(all.split(Some(part), 0)?)?),
            false => None,
        };
        Ok(ShardGroups { gathers, reductions, mirrors, overlap })
    }

    /// Returns the rank in the group of the replicas that hold the other parts, for gathering parameters. The rank is
    /// the [part](Sharding::part_of).
    pub fn gathers(&self) -> &ProcessGroup {
        &self.gathers
    }

    /// Returns the rank in a second group of the same replicas, for reducing gradients.
    pub fn reductions(&self) -> &ProcessGroup {
        &self.reductions
    }

    /// Returns the rank in the group of the replicas that hold the same part, one of each shard group; `None` if there
    /// is one shard group. The rank is the number of the shard group.
    pub fn mirrors(&self) -> Option<&ProcessGroup> {
        self.mirrors.as_ref()
    }

    /// Returns whether parameters are gathered before their use, and gradients reduced, while the model computes; see
    /// [`Sharding::overlap`].
    pub fn overlap(&self) -> bool {
        self.overlap
    }

    fn all(&self) -> impl Iterator<Item = &ProcessGroup> {
        [Some(&self.gathers), Some(&self.reductions), self.mirrors.as_ref()].into_iter().flatten()
    }

    pub(crate) fn abort(&self, reason: &str, kind: FailureKind) {
        self.all().for_each(|group| group.abort(reason, kind));
    }

    pub(crate) fn set_idle(&self, idle: bool) {
        self.all().for_each(|group| group.set_idle(idle));
    }

    pub(crate) fn waited(&self) -> Duration {
        self.all().map(ProcessGroup::waited).sum()
    }
}

impl Strategy {
    /// Starts an operation, or none, on the shard groups of each local replica, waits for all of them, and returns
    /// their memory by local replica. For code outside `run` that acts for all replicas of its process; nothing is
    /// started if the strategy does not shard.
    ///
    /// # Errors
    /// The first error of starting an operation or of waiting for it.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ReduceOp;
    /// use distribute_strategy::{Error, FullyShardedStrategy};
    /// let strategy = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let sums = strategy.on_shard_groups(|local, groups| {
    ///     Ok::<_, Error>(Some(groups.gathers().start().all_reduce(vec![local as u64], ReduceOp::Sum)?))
    /// })?;
    /// assert_eq!(sums, [Some(vec![1]), Some(vec![1])]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn on_shard_groups<B: OwnedBuffers, E: From<distribute_collectives::Error>>(
        &self,
        mut begin: impl FnMut(usize, &ShardGroups) -> Result<Option<Work<B>>, E>,
    ) -> Result<Vec<Option<B>>, E> {
        let all = self.shard_groups().unwrap_or_default();
        let mut works = Vec::with_capacity(all.len());
        for (local, groups) in all.iter().enumerate() {
            match begin(local, groups) {
                Ok(work) => works.push(work),
                Err(error) => {
                    // Works that were started wait for the other ranks, which will not make the call any more.
                    let reason = "an operation could not be begun on every replica of its process";
                    all.iter().for_each(|groups| groups.abort(reason, FailureKind::Permanent));
                    return Err(error);
                }
            }
        }
        works.into_iter().map(|work| Ok(work.map(Work::wait).transpose()?)).collect()
    }
}

fn number(index: usize) -> Result<u32> {
    u32::try_from(index).map_err(|_| Error::Sharding { problem: format!("replica {index} is out of range") })
}

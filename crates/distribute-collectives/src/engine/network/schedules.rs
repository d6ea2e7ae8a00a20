//! The choice of the schedule by which a call is exchanged between processes.

use std::sync::{Arc, Mutex};

use crate::call::{Call, Kind, ScheduleId};
use crate::engine::context::GroupContext;
use crate::engine::plan::LocalPlan;
use crate::schedule::{
    Algorithm, Link, Schedule, binomial_broadcast, binomial_reduce, dissemination_all_gather, dissemination_barrier,
    hierarchical_all_reduce, ordered_reduce, ordered_reduce_scatter, ring_all_gather, ring_all_gather_v,
    ring_reduce_scatter, ring_reduce_scatter_v,
};
use crate::sync::lock;

/// Size from which bytes between hosts cost more than steps within them.
const LEVELS_BYTES: usize = 64 * 1024;

/// Chooses schedules, equally on all processes.
pub(super) struct Schedules {
    algorithm: Algorithm,
    link: Link,
    processes: usize,
    /// The host of each process, if there are several hosts and some hold several processes.
    hosts: Option<Vec<usize>>,
    /// The schedule of the last call: training repeats its calls, and building a schedule takes longer than a short
    /// message.
    last: Mutex<Option<(ScheduleKey, Arc<IdentifiedSchedule>)>>,
}

/// The key of a schedule: the call without its number, and whether ranks are combined in order.
type ScheduleKey = (Call, bool);

/// A schedule, and the identity by which processes check that they follow the same one.
pub(super) struct IdentifiedSchedule {
    pub(super) id: ScheduleId,
    pub(super) steps: Schedule,
}

impl IdentifiedSchedule {
    fn named(name: &str, steps: Schedule) -> IdentifiedSchedule {
        IdentifiedSchedule { id: ScheduleId::new(name, &[]), steps }
    }

    /// Creates the schedule of a call that has only one algorithm.
    fn only(steps: Schedule) -> IdentifiedSchedule {
        IdentifiedSchedule { id: ScheduleId::ONLY, steps }
    }
}

impl Schedules {
    pub(super) fn new(algorithm: Algorithm, link: Link, processes: usize, hosts: Option<&[usize]>) -> Schedules {
        let hosts = hosts.filter(|hosts| has_levels(hosts)).map(<[usize]>::to_vec);
        Schedules { algorithm, link, processes, hosts, last: Mutex::new(None) }
    }

    /// Returns the algorithm of an all-reduce, regardless of hosts.
    pub(super) fn algorithm_for(&self, bytes: usize) -> Algorithm {
        self.algorithm.choose(bytes, self.processes, &self.link)
    }

    /// Returns the schedule of a call; `plan` is needed for calls with a count per rank.
    pub(super) fn of(
        &self,
        call: &Call,
        context: &GroupContext,
        plan: Option<&LocalPlan>,
        ordered: bool,
        process: usize,
    ) -> Arc<IdentifiedSchedule> {
        if matches!(call.kind, Kind::AllGatherV | Kind::ReduceScatterV) {
            // The call holds only a digest of counts per rank, which cannot serve as a key.
            return Arc::new(self.build(call, context, plan, ordered, process));
        }
        let key = (Call { sequence: 0, op: None, ..*call }, ordered);
        if let Some((known, schedule)) = &*lock(&self.last)
            && *known == key
        {
            return schedule.clone();
        }
        // Built without holding the lock, since the algorithm may be a user's.
        let schedule = Arc::new(self.build(call, context, plan, ordered, process));
        *lock(&self.last) = Some((key, schedule.clone()));
        schedule
    }

    fn build(
        &self,
        call: &Call,
        context: &GroupContext,
        plan: Option<&LocalPlan>,
        ordered: bool,
        process: usize,
    ) -> IdentifiedSchedule {
        let processes = self.processes;
        let count = call.count as usize;
        let root = call.root.map_or(0, |root| root.index() / context.local_ranks);
        let named = IdentifiedSchedule::named;
        let only = IdentifiedSchedule::only;
        let process_counts = || plan.map(LocalPlan::process_counts).unwrap_or_default();
        match call.kind {
            Kind::AllReduce if ordered => named("ordered-tree", Algorithm::Tree.schedule(process, processes, count)),
            Kind::Reduce if ordered => named("ordered-tree", ordered_reduce(process, processes, root, count)),
            Kind::ReduceScatter if ordered => {
                named("ordered-tree", ordered_reduce_scatter(process, &vec![count / processes; processes]))
            }
            Kind::ReduceScatterV if ordered => {
                named("ordered-tree", ordered_reduce_scatter(process, &process_counts()))
            }
            Kind::AllReduce => self.all_reduce(call, process),
            Kind::Broadcast => only(binomial_broadcast(process, processes, root, count)),
            Kind::Reduce => named("tree", binomial_reduce(process, processes, root, count)),
            Kind::AllGather => {
                let total = count * context.world_size();
                // Both move the same bytes; the ring keeps each of them on one link, dissemination takes fewer steps.
                let step_s = (total * call.dtype.size_bytes()) as f64 / processes as f64 * self.link.per_byte_s;
                match step_s < self.link.latency_s {
                    true => named("dissemination", dissemination_all_gather(process, processes, total)),
                    false => named("ring", ring_all_gather(process, processes, total)),
                }
            }
            Kind::ReduceScatter => named("ring", ring_reduce_scatter(process, processes, count)),
            Kind::AllGatherV => only(ring_all_gather_v(process, &process_counts())),
            Kind::ReduceScatterV => named("ring", ring_reduce_scatter_v(process, &process_counts())),
            Kind::Barrier => only(dissemination_barrier(process, processes)),
            // Blocks go directly from rank to rank, without a schedule.
            _ => only(Schedule::new()),
        }
    }

    fn all_reduce(&self, call: &Call, process: usize) -> IdentifiedSchedule {
        let count = call.count as usize;
        let bytes = count * call.dtype.size_bytes();
        match &self.hosts {
            // Short messages take fewer steps in a flat schedule.
            Some(hosts) if self.algorithm == Algorithm::Auto && bytes > LEVELS_BYTES => IdentifiedSchedule {
                id: ScheduleId::new("hierarchical", hosts),
                steps: hierarchical_all_reduce(process, hosts, count),
            },
            _ => {
                let algorithm = self.algorithm_for(bytes);
                let steps = algorithm.schedule(process, self.processes, count);
                match &algorithm {
                    // A custom algorithm may have the name of a built-in one.
                    Algorithm::Custom(_) => IdentifiedSchedule::named(&format!("custom {}", algorithm.name()), steps),
                    known => IdentifiedSchedule::named(known.name(), steps),
                }
            }
        }
    }
}

/// Returns whether there are several hosts and some hold several processes.
fn has_levels(hosts: &[usize]) -> bool {
    let mut different = hosts.to_vec();
    different.sort_unstable();
    different.dedup();
    1 < different.len() && different.len() < hosts.len()
}

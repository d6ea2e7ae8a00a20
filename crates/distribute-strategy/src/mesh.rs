//! The mesh of ranks: data replicas, each of which is a tensor group of neighbouring ranks.

use std::sync::Arc;

use distribute_cluster::Coordination;
use distribute_collectives::{Options, ProcessGroup};

use crate::{Error, Result};

/// The shape of a process's part of the mesh. Rank `l` of a process is place `l % tensor` in the tensor group of its
/// replica `l / tensor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mesh {
    /// Ranks of this process: its devices.
    ranks: usize,
    /// Ranks of each tensor group.
    tensor: usize,
}

impl Mesh {
    /// Checks that tensor groups of `tensor` ranks divide a process's `devices`.
    pub(crate) fn new(strategy: &'static str, devices: usize, tensor: usize) -> Result<Mesh> {
        if tensor > 0 && devices.is_multiple_of(tensor) {
            return Ok(Mesh { ranks: devices, tensor });
        }
        let problem = format!(
            "tensor_parallel({tensor}) cannot divide the {devices} devices of a process into groups; give a number of \
             ranks from 1 on that divides them, since the ranks of a tensor group are in one process"
        );
        Err(Error::Devices { strategy, problem })
    }

    /// Returns the mesh in which every rank is a replica.
    pub(crate) fn flat(devices: usize) -> Mesh {
        Mesh { ranks: devices, tensor: 1 }
    }

    /// Returns the number of ranks of a tensor group.
    pub(crate) fn tensor(self) -> usize {
        self.tensor
    }

    /// Returns the number of data replicas of this process.
    pub(crate) fn replicas(self) -> usize {
        self.ranks / self.tensor
    }

    /// Returns the data replica, among those of this process, that a local rank belongs to.
    pub(crate) fn replica_of(self, local: usize) -> usize {
        local / self.tensor
    }

    /// Returns a local rank's place in its tensor group.
    pub(crate) fn place_of(self, local: usize) -> usize {
        local % self.tensor
    }

    /// Creates the groups of equal places, in which replicas combine their values, for a single process.
    pub(crate) fn local_groups(self, options: &Options) -> Result<Vec<ProcessGroup>> {
        self.interleaved(options, |options| Ok(ProcessGroup::local_with(self.replicas(), options)?))
    }

    /// Joins the groups of equal places of all processes.
    pub(crate) fn joined_groups(
        self,
        coordination: &Arc<Coordination>,
        options: &Options,
    ) -> Result<Vec<ProcessGroup>> {
        self.interleaved(options, |options| Ok(ProcessGroup::join(coordination, self.replicas(), options)?))
    }

    /// Creates one group for each place, and returns their local ranks in the order of this process's ranks.
    fn interleaved(
        self,
        options: &Options,
        make: impl Fn(&Options) -> Result<Vec<ProcessGroup>>,
    ) -> Result<Vec<ProcessGroup>> {
        if self.tensor == 1 {
            return make(options);
        }
        let place = |place: usize| match place {
            // Under its own name, a process with another number of replicas is refused in words.
            0 => make(options),
            _ => make(&options.clone().name(format!("{}/tensor rank {place}", options.name))),
        };
        let mut places = (0..self.tensor).map(|at| Ok(place(at)?.into_iter())).collect::<Result<Vec<_>>>()?;
        Ok((0..self.ranks).filter_map(|local| places[self.place_of(local)].next()).collect())
    }

    /// Creates the tensor groups of this process, one handle for each rank; none if every rank is a replica.
    pub(crate) fn tensor_groups(self, first_replica: usize, options: &Options) -> Result<Vec<Arc<ProcessGroup>>> {
        if self.tensor == 1 {
            return Ok(Vec::new());
        }
        let mut all = Vec::with_capacity(self.ranks);
        for replica in 0..self.replicas() {
            let name = format!("tensor group of replica {}", first_replica + replica);
            // Other ways to combine devices' values are for gradients.
            let options = options.clone().name(name).cross_device_ops(None);
            all.extend(ProcessGroup::local_with(self.tensor, &options)?.into_iter().map(Arc::new));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use distribute_collectives::ReduceOp;
    use distribute_input::Dataset;
    use distribute_values::Axis;
    use parking_lot::Mutex;
    use rand_chacha::rand_core::Rng;

    use super::*;
    use crate::{CommunicationOptions, MirroredStrategy, Strategy};

    #[test]
    fn neighbours_form_a_tensor_group() {
        let mesh = Mesh::new("MirroredStrategy", 6, 3).unwrap();
        assert_eq!((mesh.replicas(), mesh.tensor()), (2, 3));
        let places: Vec<_> = (0..6).map(|local| (mesh.replica_of(local), mesh.place_of(local))).collect();
        assert_eq!(places, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
        let groups = mesh.local_groups(&Options::default()).unwrap();
        let ranks: Vec<_> = groups.iter().map(|group| (group.rank().index(), group.world_size())).collect();
        assert_eq!(ranks, [(0, 2), (0, 2), (0, 2), (1, 2), (1, 2), (1, 2)]);
        let groups = mesh.tensor_groups(4, &Options::default()).unwrap();
        let ranks: Vec<_> = groups.iter().map(|group| (group.rank().index(), group.name().to_owned())).collect();
        let of = |replica: usize| format!("tensor group of replica {replica}");
        assert_eq!(ranks, [(0, of(4)), (1, of(4)), (2, of(4)), (0, of(5)), (1, of(5)), (2, of(5))]);
    }

    #[test]
    fn groups_that_do_not_divide_the_devices_are_refused() {
        for tensor in [0, 2, 4] {
            let text = Mesh::new("MirroredStrategy", 3, tensor).unwrap_err().to_string();
            assert!(text.contains(&format!("tensor_parallel({tensor})")) && text.contains("3 devices"), "{text}");
        }
        assert!(Mesh::flat(3).tensor_groups(0, &Options::default()).unwrap().is_empty());
    }

    fn two_by_two() -> Strategy {
        let devices = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"];
        let communication = CommunicationOptions::default().timeout(Duration::from_secs(20));
        MirroredStrategy::builder().devices(devices).tensor_parallel(2).communication(communication).build().unwrap()
    }

    #[test]
    fn values_are_combined_over_replicas_and_not_over_their_ranks() {
        let strategy = two_by_two();
        assert_eq!(strategy.describe(), "Mirrored 2 replicas × 2 tensor ranks (CPU:0, CPU:1, CPU:2, CPU:3)");
        assert_eq!((strategy.num_replicas_in_sync(), strategy.num_local_replicas()), (2, 4));
        let ids = strategy.run_with((), |context, ()| {
            context.barrier()?;
            let sum = context.all_reduce(ReduceOp::Sum, &(10 + context.replica_id() as u64))?;
            let in_graph = context.graph_group()?.world_size();
            Ok::<_, Error>((context.replica_id(), context.tensor_rank(), context.num_replicas_in_sync(), sum, in_graph))
        });
        let expected = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(replica, place)| (replica, place, 2, 21, 2));
        assert_eq!(ids.unwrap().values(), expected);
        let values = strategy.distribute_values_from_function(|of| Ok::<_, Error>(of.replica_id as u64 + 1)).unwrap();
        assert_eq!(values.values(), [1, 1, 2, 2]);
        assert_eq!(strategy.reduce(ReduceOp::Sum, &values, Axis::None).unwrap(), 3);
        let random = strategy.random(7);
        let drawn = strategy.run_with((), |context, ()| Ok::<_, Error>(random.next(context).next_u64())).unwrap();
        let drawn = drawn.values();
        assert!(drawn[0] == drawn[1] && drawn[2] == drawn[3] && drawn[0] != drawn[2], "{drawn:?}");
    }

    #[test]
    fn the_ranks_of_a_replica_get_the_same_examples() {
        let strategy = two_by_two();
        let data = strategy.distribute_dataset(&Dataset::range(0..5).batch(4)).unwrap();
        let steps: Vec<_> = data.iter().map(|step| step.unwrap()).collect();
        let rows = |step: usize| steps[step].values().iter().map(|part| part.as_slice().to_vec()).collect::<Vec<_>>();
        assert_eq!(rows(0), [[0, 1], [0, 1], [2, 3], [2, 3]]);
        // The second replica has none, and gets a row that stands in.
        assert_eq!(rows(1), [[4], [4], [4], [4]]);
        assert_eq!(steps[1].examples(), Some(&[true, true, false, false][..]));
    }

    #[test]
    fn a_failure_reaches_all_ranks_and_the_next_run_works() {
        let strategy = two_by_two();
        for failing in 0..4 {
            let seen = Mutex::new(Vec::new());
            let outcome = strategy.run_with((), |context, ()| {
                if context.local_replica_id() == failing {
                    return Err(Error::NoData);
                }
                // Two steps: the group that fails first differs from rank to rank.
                let mut number = [1u64];
                let group = context.tensor_group().unwrap();
                let outcome = group.all_reduce(&mut number, ReduceOp::Sum).map_err(Error::from);
                let outcome = outcome.and_then(|()| context.barrier());
                seen.lock().push(outcome.as_ref().map_err(ToString::to_string).err());
                outcome
            });
            assert!(matches!(outcome, Err(Error::NoData)), "{outcome:?}");
            let name = format!("tensor rank {} of replica {} failed", failing % 2, failing / 2);
            for told in seen.into_inner() {
                assert!(told.as_ref().is_some_and(|told| told.contains(&name)), "{name}: {told:?}");
            }
            strategy.run_with((), |context, ()| context.barrier()).unwrap();
        }
    }
}

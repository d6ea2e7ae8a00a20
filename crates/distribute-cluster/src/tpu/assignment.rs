//! Which cores of a TPU slice belong to which replica.

use super::ring::ring;
use super::topology::{Coordinates, Topology, TpuCore, unravel};
use crate::{Error, Result};

/// The cores of each replica, by replica and logical core.
///
/// # Examples
/// ```
/// use distribute_cluster::tpu::{AssignmentOptions, DeviceAssignment, Topology};
/// let hosts = vec![vec![[0, 0, 0, 0], [0, 0, 0, 1]], vec![[1, 0, 0, 0], [1, 0, 0, 1]]];
/// let topology = Topology::new([2, 1, 1, 2], hosts)?;
/// // Two replicas of both cores of a chip.
/// let options = AssignmentOptions::default().computation_shape([1, 1, 1, 2]).num_replicas(2);
/// let assignment = DeviceAssignment::build(topology, options)?;
/// assert_eq!(assignment.core(1, 0)?.device_name(None), "/task:1/device:TPU:0");
/// assert_eq!(assignment.replicas_at(1, 0), [1]);
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.tpu.experimental.DeviceAssignment`. Rings follow an order of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAssignment {
    topology: Topology,
    /// By replica and logical core.
    cores: Vec<Vec<(Coordinates, TpuCore)>>,
}

/// The order in which replicas and their logical cores are placed on chips.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceOrder {
    /// A ring where possible, else the order of the mesh.
    #[default]
    Auto,
    /// Each chip is next to the one before it. Needs replicas of whole chips that fill the mesh, and no stride.
    Ring,
    /// The order of coordinates.
    Mesh,
}

/// Settings of [`DeviceAssignment::build`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AssignmentOptions {
    /// The number of cores of a replica in each dimension of the mesh. Default: 1 in each.
    pub computation_shape: [u32; 4],
    /// The distance between a replica's cores in each dimension. Default: 1 in each.
    pub computation_stride: [u32; 4],
    /// The number of replicas. Default: 1.
    pub num_replicas: u32,
    /// The order of chips. Default: [`DeviceOrder::Auto`].
    pub order: DeviceOrder,
}

impl Default for AssignmentOptions {
    fn default() -> AssignmentOptions {
        let ones = [1; 4];
        AssignmentOptions {
            computation_shape: ones,
            computation_stride: ones,
            num_replicas: 1,
            order: DeviceOrder::Auto,
        }
    }
}

distribute_types::setters! {
    AssignmentOptions {
        computation_shape: [u32; 4],
        computation_stride: [u32; 4],
        num_replicas: u32,
        order: DeviceOrder,
    }
}

impl DeviceAssignment {
    /// Creates an assignment from the coordinates of each replica's logical cores.
    ///
    /// # Errors
    /// [`Error::Config`] if replicas have different numbers of cores, or if there is no device at a place. Replicas may
    /// share cores.
    pub fn new(topology: Topology, core_assignment: Vec<Vec<Coordinates>>) -> Result<DeviceAssignment> {
        let per_replica = core_assignment.first().map_or(0, Vec::len);
        if let Some(other) = core_assignment.iter().position(|cores| cores.len() != per_replica) {
            let given = format!("{per_replica} of replica 0, {} of replica {other}", core_assignment[other].len());
            return Err(wrong("replicas have unequal numbers of cores", given, "the same number for every replica"));
        }
        let core = |at: Coordinates| {
            let expected = format!("a place with a device in the mesh {:?}", topology.mesh_shape());
            let core = topology.core_at(at);
            Ok((at, core.ok_or_else(|| wrong("there is no device at a place", format!("{at:?}"), &expected))?))
        };
        let cores = core_assignment.into_iter().map(|cores| cores.into_iter().map(core).collect());
        let cores = cores.collect::<Result<_>>()?;
        Ok(DeviceAssignment { topology, cores })
    }

    /// Assigns cores to replicas of a shape. Replicas do not share cores. In a mesh in which devices are missing,
    /// replicas take the devices in the order of tasks.
    ///
    /// # Errors
    /// [`Error::Config`] if an entry of the shape or stride is below 1, if a replica or all of them together do not fit
    /// in the mesh, if a ring is required where there is none, or if there is a stride in a mesh in which devices are
    /// missing.
    pub fn build(topology: Topology, options: AssignmentOptions) -> Result<DeviceAssignment> {
        let AssignmentOptions { computation_shape: shape, computation_stride: stride, num_replicas, order } = options;
        let mesh = topology.mesh_shape();
        for (name, entries) in [("computation_shape", shape), ("computation_stride", stride)] {
            if entries.contains(&0) {
                let problem = format!("an entry of {name} is not positive");
                return Err(wrong(&problem, format!("{entries:?}"), "four entries from 1"));
            }
        }
        let footprint = zip(shape, stride, u32::saturating_mul);
        if footprint.iter().zip(mesh).any(|(footprint, mesh)| *footprint > mesh) {
            let expected = format!("at most {mesh:?}");
            return Err(wrong(
                "the footprint of a replica does not fit in the mesh",
                format!("{footprint:?}"),
                &expected,
            ));
        }
        let counts =
            zip(zip(mesh, footprint, |mesh, footprint| mesh / footprint), stride, |blocks, stride| blocks * stride);
        let most: u32 = counts.iter().product();
        let is_broken = topology.num_tasks() * topology.num_devices_per_task() < mesh.iter().product();
        let most = match is_broken {
            true => topology.num_tasks() * topology.num_devices_per_task() / shape.iter().product::<u32>(),
            false => most,
        };
        if num_replicas > most {
            let problem = format!("{num_replicas} replicas of shape {shape:?} and stride {stride:?} do not fit");
            return Err(wrong(&problem, num_replicas.to_string(), &format!("at most {most} in the mesh {mesh:?}")));
        }
        let is_tiled = !is_broken && shape[3] == mesh[3] && stride == [1; 4] && num_replicas == most;
        if order == DeviceOrder::Ring && !is_tiled {
            let expected = "replicas of whole chips that fill the mesh, without stride";
            return Err(wrong("a ring is not possible", format!("{num_replicas} of shape {shape:?}"), expected));
        }
        let cores = if is_broken {
            if stride != [1; 4] {
                let expected = "a stride of 1: devices are missing in the mesh";
                return Err(wrong("a stride is not possible", format!("{stride:?}"), expected));
            }
            in_task_order(&topology, shape.iter().product(), num_replicas)
        } else if is_tiled && order != DeviceOrder::Mesh {
            in_rings(shape, counts)
        } else {
            in_blocks(shape, stride, near_cube(counts, num_replicas), num_replicas)
        };
        DeviceAssignment::new(topology, cores)
    }

    /// Returns the topology.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the number of replicas.
    pub fn num_replicas(&self) -> u32 {
        self.cores.len() as u32
    }

    /// Returns the number of cores of each replica.
    pub fn num_cores_per_replica(&self) -> u32 {
        self.cores.first().map_or(0, Vec::len) as u32
    }

    /// Returns the coordinates of a logical core of a replica.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such replica or core.
    pub fn coordinates(&self, replica: u32, logical_core: u32) -> Result<Coordinates> {
        Ok(self.at(replica, logical_core)?.0)
    }

    /// Returns the task and the device of a logical core of a replica.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such replica or core.
    pub fn core(&self, replica: u32, logical_core: u32) -> Result<TpuCore> {
        Ok(self.at(replica, logical_core)?.1)
    }

    /// Returns the replicas whose logical core is a device of a task, in ascending order; none if the task has none.
    pub fn replicas_at(&self, task: u32, logical_core: u32) -> Vec<u32> {
        let is_there = |cores: &[(Coordinates, TpuCore)]| {
            cores.get(logical_core as usize).is_some_and(|(_, core)| core.task == task)
        };
        (0u32..).zip(&self.cores).filter(|(_, cores)| is_there(cores)).map(|(replica, _)| replica).collect()
    }

    fn at(&self, replica: u32, logical_core: u32) -> Result<(Coordinates, TpuCore)> {
        let core = self.cores.get(replica as usize).and_then(|cores| cores.get(logical_core as usize));
        core.copied().ok_or_else(|| {
            let given = format!("core {logical_core} of replica {replica}");
            let expected = format!("one of {} replicas of {}", self.num_replicas(), self.num_cores_per_replica());
            wrong("there is no such core", given, &expected)
        })
    }
}

/// Returns how many replicas there are in each dimension: as near to a cube as the limits allow, the scarcest dimension
/// first, and the core before the chip where two are alike, so that replicas fill chips.
fn near_cube(limits: [u32; 4], num_replicas: u32) -> [u32; 4] {
    let mut dimensions = [3, 0, 1, 2];
    // Stable: among equals the core stays first.
    dimensions.sort_by_key(|dimension| limits[*dimension]);
    let (mut shape, mut remaining) = ([1; 4], num_replicas);
    for (place, dimension) in dimensions.into_iter().enumerate() {
        let wanted = root(remaining, 4 - place as u32);
        shape[dimension] = wanted.min(limits[dimension]).max(1);
        remaining = remaining.div_ceil(shape[dimension]);
    }
    shape
}

/// Returns the smallest integer whose power is not below `n`.
fn root(n: u32, power: u32) -> u32 {
    let reaches = |base: u32| u64::from(base).checked_pow(power).is_none_or(|result| result >= u64::from(n));
    let (mut low, mut high) = (0, n);
    while low < high {
        let middle = low + (high - low) / 2;
        (low, high) = if reaches(middle) { (low, middle) } else { (middle + 1, high) };
    }
    low
}

/// Places replicas one after another in the mesh, the core first to change, then x, y and z.
fn in_blocks(shape: [u32; 4], stride: [u32; 4], replicas: [u32; 4], num_replicas: u32) -> Vec<Vec<Coordinates>> {
    let cells: u32 = shape.iter().product();
    let footprint = zip(shape, stride, |shape, stride| shape * stride);
    let block = |mut replica: u32| {
        let mut position = [0; 4];
        for dimension in [3, 0, 1, 2] {
            (position[dimension], replica) = (replica % replicas[dimension], replica / replicas[dimension]);
        }
        let outer = zip(position, stride, |position, stride| position / stride);
        let inner = zip(position, stride, |position, stride| position % stride);
        let start =
            zip(zip(outer, footprint, |outer, footprint| outer * footprint), inner, |start, inner| start + inner);
        let cell =
            |cell| zip(start, zip(unravel(cell, shape), stride, |at, stride| at * stride), |start, at| start + at);
        (0..cells).map(cell).collect()
    };
    (0..num_replicas).map(block).collect()
}

/// Places replicas of whole chips along a ring, and the chips of each along a ring too.
fn in_rings(shape: [u32; 4], replicas: [u32; 4]) -> Vec<Vec<Coordinates>> {
    let [width, height, depth, cores] = shape;
    let inner = ring([width, height, depth]);
    let outer = ring([replicas[0], replicas[1], replicas[2]]);
    let replica = |[x, y, z]: [u32; 3]| {
        let chips = inner.iter().map(move |[a, b, c]| [x * width + a, y * height + b, z * depth + c]);
        chips.flat_map(|[x, y, z]| (0..cores).map(move |core| [x, y, z, core])).collect()
    };
    outer.into_iter().map(replica).collect()
}

/// Gives replicas the devices in the order of tasks.
fn in_task_order(topology: &Topology, cells: u32, num_replicas: u32) -> Vec<Vec<Coordinates>> {
    let devices: Vec<Coordinates> = topology.device_coordinates().iter().flatten().copied().collect();
    devices.chunks(cells as usize).take(num_replicas as usize).map(<[_]>::to_vec).collect()
}

fn zip(a: [u32; 4], b: [u32; 4], with: impl Fn(u32, u32) -> u32) -> [u32; 4] {
    std::array::from_fn(|at| with(a[at], b[at]))
}

fn wrong(problem: &str, given: String, expected: &str) -> Error {
    Error::config("TPU device assignment", problem, given, expected, "Correct the shape or the number of replicas.")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::topology::tests::full;
    use super::*;

    fn options(shape: [u32; 4], num_replicas: u32) -> AssignmentOptions {
        AssignmentOptions::default().computation_shape(shape).num_replicas(num_replicas)
    }

    fn built(mesh: [u32; 4], options: AssignmentOptions) -> Result<DeviceAssignment> {
        DeviceAssignment::build(full(mesh, mesh[3] as usize), options)
    }

    #[test]
    fn replicas_of_one_core_fill_chips_first() {
        let assignment = built([2, 2, 1, 2], options([1; 4], 4)).unwrap();
        let places: Vec<_> = (0..4).map(|replica| assignment.coordinates(replica, 0).unwrap()).collect();
        assert_eq!(places, [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]);
        assert_eq!((assignment.replicas_at(0, 0), assignment.replicas_at(2, 0)), (vec![0, 1], vec![2, 3]));
        assert_eq!((assignment.replicas_at(1, 0), assignment.replicas_at(0, 1)), (vec![], vec![]));
    }

    #[test]
    fn a_stride_interleaves_replicas() {
        let options = options([2, 1, 1, 1], 2).computation_stride([2, 1, 1, 1]).order(DeviceOrder::Mesh);
        let assignment = built([4, 1, 1, 1], options).unwrap();
        let of = |replica| [0, 1].map(|core| assignment.coordinates(replica, core).unwrap()[0]);
        assert_eq!((of(0), of(1)), ([0, 2], [1, 3]));
    }

    #[test]
    fn chips_of_a_full_mesh_form_a_ring() {
        let assignment = built([2, 2, 1, 2], options([2, 2, 1, 2], 1)).unwrap();
        let chips: Vec<_> = (0..8).map(|core| assignment.coordinates(0, core).unwrap()).collect();
        let xy: Vec<_> = chips.iter().step_by(2).map(|[x, y, ..]| (*x, *y)).collect();
        assert_eq!(xy, [(0, 0), (1, 0), (1, 1), (0, 1)]);
        assert_eq!(chips.iter().map(|at| at[3]).collect::<Vec<_>>(), [0, 1, 0, 1, 0, 1, 0, 1]);
        let text = built([2, 2, 1, 2], options([1; 4], 1).order(DeviceOrder::Ring)).unwrap_err().to_string();
        assert!(text.contains("a ring is not possible"), "{text}");
    }

    #[test]
    fn missing_devices_leave_the_order_of_tasks() {
        let tasks = vec![vec![[1, 0, 0, 0], [1, 0, 0, 1]], vec![[0, 0, 0, 0], [0, 0, 0, 1]]];
        let topology = Topology::new([3, 1, 1, 2], tasks).unwrap();
        let assignment = DeviceAssignment::build(topology.clone(), options([1, 1, 1, 2], 2)).unwrap();
        assert_eq!(assignment.core(0, 1).unwrap(), TpuCore { task: 0, device: 1 });
        assert_eq!(assignment.core(1, 0).unwrap(), TpuCore { task: 1, device: 0 });
        for (options, words) in [
            (options([1, 1, 1, 2], 3), "3 replicas of shape [1, 1, 1, 2] and stride [1, 1, 1, 1] do not fit"),
            (options([1; 4], 1).computation_stride([2, 1, 1, 1]), "devices are missing in the mesh"),
        ] {
            let text = DeviceAssignment::build(topology.clone(), options).unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn every_mistake_is_a_sentence() {
        for (outcome, words) in [
            (built([2, 2, 1, 2], options([0, 1, 1, 1], 1)), "an entry of computation_shape is not positive"),
            (built([2, 2, 1, 2], options([1; 4], 1).computation_stride([1, 0, 1, 1])), "computation_stride is not"),
            (built([2, 2, 1, 2], options([3, 1, 1, 1], 1)), "does not fit in the mesh. Given: [3, 1, 1, 1]"),
            (built([2, 2, 1, 2], options([u32::MAX; 4], 1)), "does not fit in the mesh"),
            (built([2, 2, 1, 2], options([1; 4], 9)), "9 replicas of shape"),
            (DeviceAssignment::new(full([1; 4], 1), vec![vec![[1, 0, 0, 0]]]), "there is no device at a place"),
            (DeviceAssignment::new(full([1; 4], 1), vec![vec![], vec![[0; 4]]]), "unequal numbers of cores"),
        ] {
            let text = outcome.unwrap_err().to_string();
            assert!(text.starts_with("TPU device assignment: ") && text.contains(words), "{text}");
        }
        let text = built([1; 4], options([1; 4], 1)).unwrap().core(0, 1).unwrap_err().to_string();
        assert!(text.contains("core 1 of replica 0"), "{text}");
    }

    proptest! {
        #[test]
        fn replicas_have_their_shape_and_share_no_core(
            shape in prop::array::uniform4(1u32..4),
            stride in prop::array::uniform4(1u32..3),
            blocks in prop::array::uniform4(1u32..3),
            share in 0u32..=100,
            order in prop::sample::select(vec![DeviceOrder::Auto, DeviceOrder::Mesh]),
        ) {
            let mesh = zip(zip(shape, stride, |a, b| a * b), blocks, |a, b| a * b);
            let most: u32 = zip(blocks, stride, |a, b| a * b).iter().product();
            let wanted = (most * share / 100).max(1);
            let options = options(shape, wanted).computation_stride(stride).order(order);
            let assignment = built(mesh, options).unwrap();
            let cells: u32 = shape.iter().product();
            prop_assert_eq!((assignment.num_replicas(), assignment.num_cores_per_replica()), (wanted, cells));
            let mut all = BTreeSet::new();
            for replica in 0..wanted {
                let own: Vec<_> = (0..cells).map(|core| assignment.coordinates(replica, core).unwrap()).collect();
                for dimension in 0..4 {
                    let places: BTreeSet<u32> = own.iter().map(|at| at[dimension]).collect();
                    let first = *places.first().unwrap();
                    let expected: BTreeSet<u32> =
                        (0..shape[dimension]).map(|at| first + at * stride[dimension]).collect();
                    prop_assert_eq!(places, expected);
                }
                for (core, at) in (0..).zip(own) {
                    prop_assert!(all.insert(at), "{at:?} twice");
                    let device = assignment.core(replica, core).unwrap();
                    prop_assert_eq!(assignment.topology().coordinates(device), Some(at));
                    prop_assert!(assignment.replicas_at(device.task, core).contains(&replica));
                }
            }
        }

        #[test]
        fn roots_are_the_smallest(n in 0u32..100_000, power in 1u32..5) {
            let found = u64::from(root(n, power));
            prop_assert!(found.pow(power) >= u64::from(n));
            prop_assert!(found == 0 || (found - 1).pow(power) < u64::from(n));
        }
    }
}

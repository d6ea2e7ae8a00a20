//! The mesh of a TPU slice's cores.

use crate::{Error, Result, TaskType};

/// The place of a core in a mesh: x, y and z of its chip, and its number in the chip.
pub type Coordinates = [u32; 4];

/// A core of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TpuCore {
    /// The index of the task.
    pub task: u32,
    /// The number of the core among those of the task.
    pub device: u32,
}

impl TpuCore {
    /// Returns the name of the core as a device, such as `/job:worker/task:1/device:TPU:3`.
    pub fn device_name(&self, job: Option<TaskType>) -> String {
        format!("{}/task:{}/device:TPU:{}", job_prefix(job), self.task, self.device)
    }

    /// Returns the name of the CPU of the core's host, such as `/job:worker/task:1/device:CPU:0`.
    pub fn host_name(&self, job: Option<TaskType>) -> String {
        format!("{}/task:{}/device:CPU:0", job_prefix(job), self.task)
    }
}

fn job_prefix(job: Option<TaskType>) -> String {
    job.map(|job| format!("/job:{job}")).unwrap_or_default()
}

/// The mesh of a slice's cores, and which task has which of them.
///
/// # Examples
/// ```
/// use distribute_cluster::tpu::{Topology, TpuCore};
/// // Two hosts with one chip of two cores each.
/// let hosts = vec![vec![[0, 0, 0, 0], [0, 0, 0, 1]], vec![[1, 0, 0, 0], [1, 0, 0, 1]]];
/// let topology = Topology::new([2, 1, 1, 2], hosts)?;
/// assert_eq!((topology.num_tasks(), topology.num_devices_per_task()), (2, 2));
/// assert_eq!(topology.core_at([1, 0, 0, 1]), Some(TpuCore { task: 1, device: 1 }));
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.tpu.experimental.Topology`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    mesh_shape: [u32; 4],
    device_coordinates: Vec<Vec<Coordinates>>,
    /// The core at each place of the mesh, the last coordinate first to change.
    cores: Vec<Option<TpuCore>>,
}

impl Topology {
    /// The largest number of places in a mesh.
    pub const MAX_CORES: u32 = 1 << 20;

    /// Creates a topology from the shape of the mesh and the coordinates of each task's devices. Places of the mesh may
    /// be missing.
    ///
    /// # Errors
    /// [`Error::Config`] if the shape has an entry below 1 or more than [`MAX_CORES`](Topology::MAX_CORES) places, if
    /// tasks have different numbers of devices, or if coordinates are outside the mesh or given twice.
    pub fn new(mesh_shape: [u32; 4], device_coordinates: Vec<Vec<Coordinates>>) -> Result<Topology> {
        let given = || format!("{mesh_shape:?}");
        let places = mesh_shape.iter().try_fold(1u32, |places, size| places.checked_mul(*size));
        if mesh_shape.contains(&0) {
            return Err(wrong("an entry of mesh_shape is not positive", given(), "four entries from 1"));
        }
        let expected = format!("at most {} cores", Topology::MAX_CORES);
        let too_large = || wrong("mesh_shape has too many cores", given(), &expected);
        let places = places.filter(|places| *places <= Topology::MAX_CORES).ok_or_else(too_large)?;
        let devices = device_coordinates.first().map_or(0, Vec::len);
        if let Some(other) = device_coordinates.iter().position(|task| task.len() != devices) {
            let given = format!("{devices} of task 0, {} of task {other}", device_coordinates[other].len());
            let expected = "the same number of devices for every task";
            return Err(wrong("device_coordinates has unequal numbers of cores per task", given, expected));
        }
        let mut topology = Topology { mesh_shape, device_coordinates, cores: vec![None; places as usize] };
        for (task, devices) in (0u32..).zip(&topology.device_coordinates) {
            for (device, at) in (0u32..).zip(devices) {
                let (core, given) = (TpuCore { task, device }, format!("{at:?} of device {device} of task {task}"));
                let Some(place) = topology.place(*at) else {
                    let expected = format!("coordinates below {mesh_shape:?}");
                    return Err(wrong("device_coordinates is outside the mesh", given, &expected));
                };
                if let Some(other) = topology.cores[place].replace(core) {
                    let expected = format!("a place other than that of device {} of task {}", other.device, other.task);
                    return Err(wrong("device_coordinates has two devices at one place", given, &expected));
                }
            }
        }
        Ok(topology)
    }

    /// Returns the numbers of places in x, y and z, and of cores in a chip.
    pub fn mesh_shape(&self) -> [u32; 4] {
        self.mesh_shape
    }

    /// Returns the coordinates of each task's devices.
    pub fn device_coordinates(&self) -> &[Vec<Coordinates>] {
        &self.device_coordinates
    }

    /// Returns the number of tasks.
    pub fn num_tasks(&self) -> u32 {
        self.device_coordinates.len() as u32
    }

    /// Returns the number of devices of each task.
    pub fn num_devices_per_task(&self) -> u32 {
        self.device_coordinates.first().map_or(0, Vec::len) as u32
    }

    /// Returns the core at a place; `None` if there is none, or if the place is outside the mesh.
    pub fn core_at(&self, coordinates: Coordinates) -> Option<TpuCore> {
        self.cores[self.place(coordinates)?]
    }

    /// Returns the coordinates of a core, if there is such a core.
    pub fn coordinates(&self, core: TpuCore) -> Option<Coordinates> {
        self.device_coordinates.get(core.task as usize)?.get(core.device as usize).copied()
    }

    /// Returns the places of the mesh without a core.
    pub fn missing_devices(&self) -> Vec<Coordinates> {
        let missing = self.cores.iter().enumerate().filter(|(_, core)| core.is_none());
        missing.map(|(place, _)| unravel(place as u32, self.mesh_shape)).collect()
    }

    fn place(&self, at: Coordinates) -> Option<usize> {
        let is_inside = at.iter().zip(&self.mesh_shape).all(|(at, size)| at < size);
        is_inside
            .then(|| at.iter().zip(&self.mesh_shape).fold(0, |place, (at, size)| place * *size as usize + *at as usize))
    }
}

/// Returns the coordinates of a place of a mesh, counted with the last coordinate first to change.
pub(super) fn unravel(mut place: u32, shape: [u32; 4]) -> Coordinates {
    let mut coordinates = [0; 4];
    for (at, size) in coordinates.iter_mut().zip(shape).rev() {
        (*at, place) = (place % size, place / size);
    }
    coordinates
}

fn wrong(problem: &str, given: String, expected: &str) -> Error {
    Error::config("TPU topology", problem, given, expected, "Correct the description of the slice.")
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A full mesh whose chips are dealt out to tasks one after another.
    pub(in super::super) fn full(shape: [u32; 4], devices_per_task: usize) -> Topology {
        let places: Vec<Coordinates> = (0..shape.iter().product()).map(|place| unravel(place, shape)).collect();
        Topology::new(shape, places.chunks(devices_per_task).map(<[_]>::to_vec).collect()).unwrap()
    }

    #[test]
    fn cores_have_tasks_and_names() {
        let topology = full([2, 2, 1, 2], 2);
        assert_eq!(
            (topology.num_tasks(), topology.num_devices_per_task(), topology.mesh_shape()),
            (4, 2, [2, 2, 1, 2])
        );
        let core = topology.core_at([1, 0, 0, 1]).unwrap();
        assert_eq!((core, topology.coordinates(core)), (TpuCore { task: 2, device: 1 }, Some([1, 0, 0, 1])));
        assert_eq!(core.device_name(None), "/task:2/device:TPU:1");
        assert_eq!(core.device_name(Some(TaskType::Worker)), "/job:worker/task:2/device:TPU:1");
        assert_eq!(core.host_name(Some(TaskType::Worker)), "/job:worker/task:2/device:CPU:0");
        assert_eq!(
            (topology.core_at([2, 0, 0, 0]), topology.coordinates(TpuCore { task: 4, device: 0 })),
            (None, None)
        );
        assert_eq!(topology.missing_devices(), Vec::<Coordinates>::new());
    }

    #[test]
    fn missing_devices_are_found() {
        let topology = Topology::new([2, 1, 1, 2], vec![vec![[0, 0, 0, 0]], vec![[1, 0, 0, 1]]]).unwrap();
        assert_eq!(topology.missing_devices(), [[0, 0, 0, 1], [1, 0, 0, 0]]);
        assert_eq!(Topology::new([1; 4], Vec::new()).unwrap().num_devices_per_task(), 0);
    }

    #[test]
    fn every_mistake_is_a_sentence() {
        let one = vec![[0, 0, 0, 0]];
        for (shape, devices, words) in [
            ([0, 1, 1, 1], vec![], "an entry of mesh_shape is not positive. Given: [0, 1, 1, 1]"),
            ([1 << 20, 2, 1, 1], vec![], "mesh_shape has too many cores"),
            ([u32::MAX; 4], vec![], "mesh_shape has too many cores"),
            ([2, 1, 1, 1], vec![one.clone(), vec![]], "unequal numbers of cores per task. Given: 1 of task 0, 0 of"),
            ([1; 4], vec![vec![[0, 0, 0, 1]]], "outside the mesh. Given: [0, 0, 0, 1] of device 0 of task 0"),
            ([1; 4], vec![one.clone(), one.clone()], "two devices at one place"),
        ] {
            let text = Topology::new(shape, devices).unwrap_err().to_string();
            assert!(text.starts_with("TPU topology: ") && text.contains(words), "{text}");
        }
    }

    proptest! {
        #[test]
        fn places_and_cores_are_inverse(shape in prop::array::uniform4(1u32..5), per_task in 1usize..5) {
            let cores: u32 = shape.iter().product();
            prop_assume!((cores as usize).is_multiple_of(per_task));
            let topology = full(shape, per_task);
            for place in 0..cores {
                let at = unravel(place, shape);
                let core = topology.core_at(at).unwrap();
                prop_assert_eq!(topology.coordinates(core), Some(at));
                prop_assert_eq!(core.task * per_task as u32 + core.device, place);
            }
        }
    }
}

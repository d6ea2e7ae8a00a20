//! Cross-device operations: reductions between the devices of one process that replace the engine's own.

use std::fmt;
use std::sync::Arc;

use distribute_arithmetic as arithmetic;
use distribute_device::{BufferMut, BufferRef, DType, DeviceKind, DeviceSpec};

use crate::{DeviceImplementation, ReduceOp};

/// Combines the values of one process's devices instead of the group's own reduction. Values of other processes are
/// combined afterwards by the group's [`Algorithm`](crate::Algorithm).
///
/// # Examples
/// Sends eight bits of each value, as for a slow link between devices:
/// ```
/// use distribute_collectives::{BufferMut, CrossDeviceOps, Options, ProcessGroup, ReduceOp};
///
/// struct EightBits;
///
/// impl CrossDeviceOps for EightBits {
///     fn name(&self) -> &str {
///         "eight bits"
///     }
///     fn all_reduce(&self, _: ReduceOp, devices: &mut [BufferMut<'_>]) {
///         let mut sums = vec![0.0f32; devices[0].len()];
///         for device in devices.iter() {
///             let Ok(values) = device.as_slice::<f32>() else { return };
///             let largest = values.iter().fold(f32::MIN_POSITIVE, |largest, value| value.abs().max(largest));
///             for (sum, value) in sums.iter_mut().zip(values) {
///                 *sum += (value / largest * 127.0).round() * largest / 127.0;
///             }
///         }
///         for device in devices {
///             device.as_mut_slice().expect("they are all f32").copy_from_slice(&sums);
///         }
///     }
/// }
///
/// let options = Options::default().cross_device_ops(Some(EightBits.into()));
/// let ranks = ProcessGroup::local_with(2, &options)?;
/// std::thread::scope(|scope| {
///     for group in &ranks {
///         scope.spawn(|| {
///             let mut values = [1.0f32, 0.3];
///             group.all_reduce(&mut values, ReduceOp::Sum).expect("both ranks take part");
///             assert!(values[0] == 2.0 && (values[1] - 0.6).abs() < 0.01);
///         });
///     }
/// });
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.CrossDeviceOps`.
pub trait CrossDeviceOps: Send + Sync {
    /// Returns the name for banners and reports.
    fn name(&self) -> &str;

    /// Combines the devices' values element by element; every device gets the result.
    ///
    /// All devices hold the same number of elements of the same type. `op` is never [`ReduceOp::Mean`]: a mean is a sum
    /// that is divided afterwards. The function is called for each reduction that combines the values of this process's
    /// devices in place, by one thread while the devices' own threads wait.
    fn all_reduce(&self, op: ReduceOp, devices: &mut [BufferMut<'_>]);

    /// Returns how many of the `total` bytes of a step's gradients to reduce together. Default: the group's options
    /// decide.
    fn bytes_per_pack(&self, total: usize) -> Option<usize> {
        let _ = total;
        None
    }

    /// Returns an error, in words, if the values of these devices, those of one process, cannot be combined so.
    /// Default: an error for GPUs, whose gradients are reduced in their own memory, while
    /// [`all_reduce`](CrossDeviceOps::all_reduce) is given host memory.
    ///
    /// # Errors
    /// The problem, and what to do.
    fn check(&self, devices: &[DeviceSpec]) -> Result<(), String> {
        in_host_memory(self.name(), devices)
    }

    /// Returns how groups of GPUs reduce values in their own memory. Default: the group's options decide.
    fn device_implementation(&self) -> Option<DeviceImplementation> {
        None
    }

    /// Returns a warning for users with these devices, which is logged once.
    fn caution(&self, devices: &[DeviceSpec]) -> Option<String> {
        let _ = devices;
        None
    }
}

/// A shared [`CrossDeviceOps`].
#[derive(Clone)]
pub struct SharedCrossDeviceOps(Arc<dyn CrossDeviceOps>);

impl<T: CrossDeviceOps + 'static> From<T> for SharedCrossDeviceOps {
    fn from(ops: T) -> SharedCrossDeviceOps {
        SharedCrossDeviceOps(Arc::new(ops))
    }
}

impl std::ops::Deref for SharedCrossDeviceOps {
    type Target = dyn CrossDeviceOps;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl PartialEq for SharedCrossDeviceOps {
    fn eq(&self, other: &SharedCrossDeviceOps) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for SharedCrossDeviceOps {}

impl fmt::Debug for SharedCrossDeviceOps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl SharedCrossDeviceOps {
    /// Reduces the ranks' bytes as elements of one type.
    pub(crate) fn reduce(&self, dtype: DType, op: ReduceOp, buffers: &mut [&mut [u8]]) {
        let op = if op == ReduceOp::Mean { ReduceOp::Sum } else { op };
        let devices: Result<Vec<BufferMut<'_>>, _> =
            buffers.iter_mut().map(|bytes| BufferMut::from_bytes(dtype, bytes)).collect();
        // The ranks' memory holds elements of this type.
        if let Ok(mut devices) = devices {
            self.all_reduce(op, &mut devices);
        }
    }

    /// Computes the mean over `n` ranks, all of this process.
    pub(crate) fn mean(&self, dtype: DType, n: u32, buffers: &mut [&mut [u8]]) {
        let Some((accumulated, per_element)) = arithmetic::mean_accumulator(dtype) else {
            self.reduce(dtype, ReduceOp::Sum, buffers);
            return buffers.iter_mut().for_each(|buffer| arithmetic::divide(dtype, buffer, n));
        };
        // The sum may overflow this type even if the mean does not.
        let len = buffers.first().map_or(0, |buffer| buffer.len() / dtype.size_bytes());
        let mut memory = vec![0u64; (len * per_element * accumulated.size_bytes()).div_ceil(8)];
        let sum = &mut bytemuck::cast_slice_mut(&mut memory)[..len * per_element * accumulated.size_bytes()];
        let sources: Vec<&[u8]> = buffers.iter().map(|buffer| &**buffer).collect();
        self.accumulate_mean(dtype, n, &sources, sum);
        for buffer in buffers {
            arithmetic::finish_mean(dtype, n, sum, buffer);
        }
    }

    /// Sums `sources` into the [accumulator](arithmetic::mean_accumulator) of a mean over `n` ranks.
    pub(crate) fn accumulate_mean(&self, dtype: DType, n: u32, sources: &[&[u8]], sum: &mut [u8]) {
        let Some((accumulated, _)) = arithmetic::mean_accumulator(dtype) else { return };
        let mut memory: Vec<Vec<u64>> = sources.iter().map(|_| vec![0u64; sum.len().div_ceil(8)]).collect();
        let mut parts: Vec<&mut [u8]> =
            memory.iter_mut().map(|memory| &mut bytemuck::cast_slice_mut(memory)[..sum.len()]).collect();
        for (part, source) in parts.iter_mut().zip(sources) {
            arithmetic::accumulate_mean(dtype, n, &[source], part);
        }
        self.reduce(accumulated, ReduceOp::Sum, &mut parts);
        // Every device has the sum.
        if let Some(first) = parts.first() {
            sum.copy_from_slice(first);
        }
    }
}

/// Copies all values to one device, combines them there, and copies the result back.
///
/// # Examples
/// ```
/// use distribute_collectives::{BufferMut, BufferRef, Options, ProcessGroup, ReduceOp, ReductionToOneDevice};
///
/// // Sums in f32 that never exceed 100, on the second device.
/// let limited = |_: ReduceOp, mut sum: BufferMut<'_>, value: BufferRef<'_>| {
///     if let (Ok(sum), Ok(value)) = (sum.as_mut_slice::<f32>(), value.as_slice::<f32>()) {
///         sum.iter_mut().zip(value).for_each(|(sum, value)| *sum = (*sum + value).min(100.0));
///     }
/// };
/// let ops = ReductionToOneDevice::new().reduce_to(1).accumulate_by(limited);
/// let ranks = ProcessGroup::local_with(2, &Options::default().cross_device_ops(Some(ops.into())))?;
/// std::thread::scope(|scope| {
///     for group in &ranks {
///         scope.spawn(|| {
///             let mut values = [1.0f32, 70.0];
///             group.all_reduce(&mut values, ReduceOp::Sum).expect("both ranks take part");
///             assert_eq!(values, [2.0, 100.0]);
///         });
///     }
/// });
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.ReductionToOneDevice`, with its arguments `reduce_to_device` and `accumulation_fn`.
#[derive(Clone, Default)]
pub struct ReductionToOneDevice {
    device: usize,
    accumulate: Option<Arc<Accumulate>>,
}

/// Combines a value into a sum.
type Accumulate = dyn Fn(ReduceOp, BufferMut<'_>, BufferRef<'_>) + Send + Sync;

impl ReductionToOneDevice {
    /// Combines values on the first device, by the group's own arithmetic.
    pub fn new() -> ReductionToOneDevice {
        ReductionToOneDevice::default()
    }

    /// Sets the device on which values are combined, by its place among those of the process. Default: 0.
    pub fn reduce_to(self, device: usize) -> ReductionToOneDevice {
        ReductionToOneDevice { device, ..self }
    }

    /// Sets the function that combines a device's values into those of the device on which they are combined, for each
    /// other device in order. Both have as many elements, of one type. Means are sums that are divided afterwards.
    /// Default: the group's own arithmetic.
    pub fn accumulate_by(
        self,
        accumulate: impl Fn(ReduceOp, BufferMut<'_>, BufferRef<'_>) + Send + Sync + 'static,
    ) -> ReductionToOneDevice {
        ReductionToOneDevice { accumulate: Some(Arc::new(accumulate)), ..self }
    }
}

impl fmt::Debug for ReductionToOneDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("ReductionToOneDevice");
        text.field("device", &self.device).field("has_own_arithmetic", &self.accumulate.is_some()).finish()
    }
}

impl CrossDeviceOps for ReductionToOneDevice {
    fn name(&self) -> &str {
        "reduction to one device"
    }

    fn all_reduce(&self, op: ReduceOp, devices: &mut [BufferMut<'_>]) {
        let all: Vec<usize> = (0..devices.len()).collect();
        let whole = 0..devices.first().map_or(0, BufferMut::len_bytes);
        let main = self.device.min(devices.len().saturating_sub(1));
        match &self.accumulate {
            None => combine(op, devices, &all, main, &whole),
            Some(accumulate) => {
                for member in all.iter().filter(|member| **member != main) {
                    if let Ok([main, member]) = devices.get_disjoint_mut([main, *member]) {
                        accumulate(op, main.reborrow(), member.as_ref());
                    }
                }
            }
        }
        copy(devices, main, &all, &whole);
    }

    fn check(&self, devices: &[DeviceSpec]) -> Result<(), String> {
        if self.device >= devices.len() {
            return Err(format!(
                "values are to be combined on device {}, but the process has {}, which count from 0",
                self.device,
                devices.len()
            ));
        }
        in_host_memory(self.name(), devices)
    }
}

/// Returns an error if a device's gradients are not in host memory.
fn in_host_memory(name: &str, devices: &[DeviceSpec]) -> Result<(), String> {
    match devices.iter().find(|device| device.kind() == Some(DeviceKind::Gpu)) {
        None => Ok(()),
        Some(device) => Err(format!(
            "{name} combines values in host memory, but gradients of {} are reduced in its own; leave it out, or use \
             NcclAllReduce",
            device.short()
        )),
    }
}

/// Combines within two halves of the devices, exchanges between the halves, and broadcasts the result within each.
/// Suited to machines whose halves have faster connections within than between them. The exchange of different parts of
/// the values uses different devices.
///
/// # Source
/// `tf.distribute.HierarchicalCopyAllReduce`.
#[derive(Clone, Copy, Debug)]
pub struct HierarchicalCopyAllReduce {
    num_packs: usize,
}

impl HierarchicalCopyAllReduce {
    /// Divides a step's gradients into `num_packs` packs, each reduced as soon as it is complete; with 0 every gradient
    /// is reduced separately.
    pub fn new(num_packs: usize) -> HierarchicalCopyAllReduce {
        HierarchicalCopyAllReduce { num_packs }
    }
}

impl CrossDeviceOps for HierarchicalCopyAllReduce {
    fn name(&self) -> &str {
        "hierarchical copy"
    }

    fn all_reduce(&self, op: ReduceOp, devices: &mut [BufferMut<'_>]) {
        let size = devices.first().map_or(1, |device| device.dtype().size_bytes());
        let len = devices.first().map_or(0, BufferMut::len_bytes);
        let half = devices.len().div_ceil(2);
        let (left, right): (Vec<usize>, Vec<usize>) = (0..devices.len()).partition(|device| *device < half);
        let part = (len / size).div_ceil(half.max(1)) * size;
        for (turn, start) in (0..len).step_by(part.max(1)).enumerate() {
            let range = start..(start + part).min(len);
            let mains: Vec<usize> = [&left, &right]
                .into_iter()
                .filter(|group| !group.is_empty())
                .map(|group| {
                    let main = group[turn % group.len()];
                    combine(op, devices, group, main, &range);
                    main
                })
                .collect();
            combine(op, devices, &mains, mains[0], &range);
            copy(devices, mains[0], &mains, &range);
            for (group, main) in [left.as_slice(), right.as_slice()].into_iter().zip(&mains) {
                copy(devices, *main, group, &range);
            }
        }
    }

    fn bytes_per_pack(&self, total: usize) -> Option<usize> {
        Some(pack_bytes(self.num_packs, total))
    }
}

/// NVIDIA's collectives between GPUs. On other devices it logs a warning and works like [`ReductionToOneDevice`].
///
/// # Source
/// `tf.distribute.NcclAllReduce`, which falls back in the same way.
#[derive(Clone, Copy, Debug)]
pub struct NcclAllReduce {
    num_packs: usize,
}

impl NcclAllReduce {
    /// Divides a step's gradients into `num_packs` packs, each reduced as soon as it is complete; with 0 every gradient
    /// is reduced separately.
    pub fn new(num_packs: usize) -> NcclAllReduce {
        NcclAllReduce { num_packs }
    }
}

impl CrossDeviceOps for NcclAllReduce {
    fn name(&self) -> &str {
        "nccl"
    }

    fn all_reduce(&self, op: ReduceOp, devices: &mut [BufferMut<'_>]) {
        // Memory that is passed here is host memory.
        ReductionToOneDevice::new().all_reduce(op, devices);
    }

    fn bytes_per_pack(&self, total: usize) -> Option<usize> {
        Some(pack_bytes(self.num_packs, total))
    }

    fn device_implementation(&self) -> Option<DeviceImplementation> {
        Some(DeviceImplementation::Nccl)
    }

    /// GPUs are reduced by NCCL in their own memory, others in host memory.
    fn check(&self, _: &[DeviceSpec]) -> Result<(), String> {
        Ok(())
    }

    fn caution(&self, devices: &[DeviceSpec]) -> Option<String> {
        let other = devices.iter().find(|device| device.kind() != Some(DeviceKind::Gpu))?;
        let device = other.short();
        Some(format!(
            "NCCL was asked for, but {device} is not a GPU; values are copied to one device and combined there"
        ))
    }
}

fn pack_bytes(num_packs: usize, total: usize) -> usize {
    if num_packs == 0 { 1 } else { total.div_ceil(num_packs).max(1) }
}

/// Combines `range` of all `members` into `main`, in the order of members after it.
fn combine(
    op: ReduceOp,
    devices: &mut [BufferMut<'_>],
    members: &[usize],
    main: usize,
    range: &std::ops::Range<usize>,
) {
    for member in members.iter().filter(|member| **member != main) {
        if let Ok([main, member]) = devices.get_disjoint_mut([main, *member]) {
            let dtype = main.dtype();
            arithmetic::combine(
                dtype,
                op.combine(),
                &mut main.as_bytes_mut()[range.clone()],
                &member.as_bytes()[range.clone()],
            );
        }
    }
}

fn copy(devices: &mut [BufferMut<'_>], from: usize, to: &[usize], range: &std::ops::Range<usize>) {
    for target in to.iter().filter(|target| **target != from) {
        if let Ok([from, target]) = devices.get_disjoint_mut([from, *target]) {
            target.as_bytes_mut()[range.clone()].copy_from_slice(&from.as_bytes()[range.clone()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, ProcessGroup};

    /// Returns the result on each rank of an all-reduce of `count` values, which differ between ranks.
    fn reduced(ops: impl CrossDeviceOps + 'static, ranks: usize, count: usize, op: ReduceOp) -> Vec<Vec<f64>> {
        let options = Options { cross_device_ops: Some(ops.into()), ..Options::default() };
        let groups = ProcessGroup::local_with(ranks, &options).unwrap();
        std::thread::scope(|scope| {
            let run = |group: &ProcessGroup| {
                let mut values: Vec<f64> = (0..count).map(|at| (at * 10 + group.rank().index() + 1) as f64).collect();
                group.all_reduce(&mut values, op).unwrap();
                values
            };
            let handles: Vec<_> = groups.iter().map(|group| scope.spawn(move || run(group))).collect();
            handles.into_iter().map(|handle| handle.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_way_combines_all_values_on_all_devices() {
        for ranks in 1..=8 {
            for count in [0, 1, 3, 1000] {
                for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
                    let expected: Vec<f64> = (0..count)
                        .map(|at| {
                            let all = (1..=ranks).map(|rank| (at * 10 + rank) as f64);
                            match op {
                                ReduceOp::Max => all.fold(0.0, f64::max),
                                ReduceOp::Mean => all.sum::<f64>() / ranks as f64,
                                _ => all.sum(),
                            }
                        })
                        .collect();
                    let all = vec![expected; ranks];
                    assert_eq!(reduced(ReductionToOneDevice::new(), ranks, count, op), all, "{ranks} × {count} {op}");
                    let to_last = ReductionToOneDevice::new().reduce_to(ranks - 1);
                    assert_eq!(reduced(to_last, ranks, count, op), all, "{ranks} × {count} {op}");
                    assert_eq!(
                        reduced(HierarchicalCopyAllReduce::new(1), ranks, count, op),
                        all,
                        "{ranks} × {count} {op}"
                    );
                    assert_eq!(reduced(NcclAllReduce::new(1), ranks, count, op), all, "{ranks} × {count} {op}");
                }
            }
        }
    }

    #[test]
    fn a_root_gets_the_sum_too() {
        let options = Options { cross_device_ops: Some(ReductionToOneDevice::new().into()), ..Options::default() };
        let groups = ProcessGroup::local_with(3, &options).unwrap();
        std::thread::scope(|scope| {
            for group in &groups {
                scope.spawn(move || {
                    let mut values = [1.0f32, 2.0];
                    group.reduce(&mut values, ReduceOp::Sum, crate::Rank(2)).unwrap();
                    assert!(group.rank().0 != 2 || values == [3.0, 6.0], "{values:?}");
                });
            }
        });
    }

    #[test]
    fn a_function_of_ones_own_combines_on_the_device_that_was_chosen() {
        // From the right: the value of the device, then those of the others in order.
        let digits = |_: ReduceOp, mut sum: BufferMut<'_>, value: BufferRef<'_>| {
            let (sum, value) = (sum.as_mut_slice::<f64>().unwrap(), value.as_slice::<f64>().unwrap());
            sum.iter_mut().zip(value).for_each(|(sum, value)| *sum = *sum * 10.0 + value);
        };
        let ops = || ReductionToOneDevice::new().accumulate_by(digits);
        assert_eq!(reduced(ops(), 3, 1, ReduceOp::Sum), vec![vec![123.0]; 3]);
        assert_eq!(reduced(ops().reduce_to(2), 3, 1, ReduceOp::Sum), vec![vec![312.0]; 3]);
    }

    #[test]
    fn devices_that_cannot_be_combined_are_refused() {
        let devices = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect::<Vec<DeviceSpec>>();
        let (cpus, mixed) = (devices(&["CPU:0", "CPU:1"]), devices(&["CPU:0", "GPU:1"]));
        ReductionToOneDevice::new().reduce_to(1).check(&cpus).unwrap();
        let problem = ReductionToOneDevice::new().reduce_to(2).check(&cpus).unwrap_err();
        assert!(problem.contains("on device 2, but the process has 2"), "{problem}");
        for problem in [ReductionToOneDevice::new().check(&mixed), HierarchicalCopyAllReduce::new(1).check(&mixed)] {
            let problem = problem.unwrap_err();
            assert!(problem.contains("GPU:1") && problem.contains("NcclAllReduce"), "{problem}");
        }
        NcclAllReduce::new(1).check(&mixed).unwrap();
        assert_eq!(NcclAllReduce::new(1).device_implementation(), Some(DeviceImplementation::Nccl));
    }

    #[test]
    fn packs_and_cautions() {
        assert_eq!(HierarchicalCopyAllReduce::new(3).bytes_per_pack(10), Some(4));
        assert_eq!(NcclAllReduce::new(0).bytes_per_pack(10), Some(1));
        assert_eq!(ReductionToOneDevice::new().bytes_per_pack(10), None);
        let cpu: DeviceSpec = "CPU:0".parse().unwrap();
        assert!(NcclAllReduce::new(1).caution(&[cpu]).is_some_and(|caution| caution.contains("CPU:0 is not a GPU")));
    }
}

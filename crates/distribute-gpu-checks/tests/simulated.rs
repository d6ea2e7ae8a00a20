//! Every check on GPUs that are simulated in the host's memory; the kernels are compiled for the CPU.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(clippy::print_stdout, reason = "a test says what it has checked")]

#[path = "simulated/failures.rs"]
mod failures;
#[path = "simulated/gpu_library.rs"]
mod gpu_library;
#[path = "simulated/lent.rs"]
mod lent;
#[path = "simulated/optimizers.rs"]
mod optimizers;

use std::sync::{Arc, Mutex, Weak};

use distribute_gpu_checks::{Gpus, Outcome, checks};
use distribute_testkit::skipped;
use tempfile::TempDir;

/// Returns the folder of compiled kernels, which tests that run at the same time share.
fn cache() -> Arc<TempDir> {
    static SHARED: Mutex<Weak<TempDir>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap();
    shared.upgrade().unwrap_or_else(|| {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        *shared = Arc::downgrade(&folder);
        folder
    })
}

/// Runs the checks whose names begin with `area` on simulated GPUs.
fn holds(test: &str, area: &str, settings: &[(&str, &str)]) {
    let cache = cache();
    let folder = cache.path().to_string_lossy();
    let all: Vec<(&str, &str)> = settings.iter().copied().chain([("DISTRIBUTE_KERNEL_CACHE", &*folder)]).collect();
    if !simulated_cuda::inside(test, &all) {
        return;
    }
    let gpus = Gpus::find().unwrap();
    assert!(gpus.are_simulated(), "a real GPU answers");
    let mut held = 0;
    for check in checks().iter().filter(|check| check.name.starts_with(area)) {
        match check.run(&gpus).0 {
            Ok(Outcome::Passed(tried)) => {
                println!("passed: {} ({tried})", check.name);
                held += 1;
            }
            Ok(Outcome::Skipped(reason)) => skipped(format_args!("{} ({reason})", check.name)),
            Err(error) => panic!("{}: {error}", check.name),
        }
    }
    assert!(held > 0, "no check of {area} was run");
}

#[test]
fn memory() {
    holds("memory", "memory", &[]);
}

#[test]
fn memory_without_pools() {
    holds("memory_without_pools", "memory", &[("SIMULATED_CUDA_POOLS", "0")]);
}

#[test]
fn copies() {
    holds("copies", "copies", &[]);
}

#[test]
fn copies_without_peer_access() {
    holds("copies_without_peer_access", "copies", &[("SIMULATED_CUDA_PEER", "none")]);
}

#[test]
fn streams() {
    holds("streams", "streams", &[]);
}

#[test]
fn kernels() {
    holds("kernels", "kernels", &[]);
}

#[test]
fn packing() {
    holds("packing", "packing", &[]);
}

#[test]
fn optimizers() {
    holds("optimizers", "optimizers", &[]);
}

#[test]
fn collectives() {
    holds("collectives", "collectives", &[("SIMULATED_CUDA_DEVICES", "3")]);
}

#[test]
fn collectives_in_any_order_of_streams() {
    let settings = [("SIMULATED_CUDA_DEVICES", "3"), ("SIMULATED_CUDA_DELAY_US", "500")];
    holds("collectives_in_any_order_of_streams", "collectives", &settings);
}

#[test]
fn collectives_without_peer_access() {
    let settings = [("SIMULATED_CUDA_DEVICES", "3"), ("SIMULATED_CUDA_PEER", "0-1,1-0")];
    holds("collectives_without_peer_access", "collectives", &settings);
}

#[test]
fn nccl_is_not_taken_for_parts_of_one_gpu() {
    holds("nccl_is_not_taken_for_parts_of_one_gpu", "nccl", &[]);
}

#[test]
fn nccl_reduces_on_parts_of_one_gpu_if_it_may() {
    let folder = tempfile::tempdir().unwrap();
    let library = simulated_nccl::install(folder.path()).unwrap().to_string_lossy().into_owned();
    let settings = [
        ("SIMULATED_CUDA_DEVICES", "1"),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
        ("SIMULATED_NCCL_VERSION", "23003"),
        ("DISTRIBUTE_NCCL_LIBRARY", library.as_str()),
    ];
    holds("nccl_reduces_on_parts_of_one_gpu_if_it_may", "nccl", &settings);
}

#[test]
fn nccl_reduces_on_gpus_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let library = simulated_nccl::install(folder.path()).unwrap().to_string_lossy().into_owned();
    let settings = [("SIMULATED_CUDA_DEVICES", "3"), ("DISTRIBUTE_NCCL_LIBRARY", library.as_str())];
    holds("nccl_reduces_on_gpus_of_their_own", "nccl", &settings);
}

#[test]
fn nccl_reduces_in_any_order_of_streams() {
    let folder = tempfile::tempdir().unwrap();
    let library = simulated_nccl::install(folder.path()).unwrap().to_string_lossy().into_owned();
    let settings = [
        ("SIMULATED_CUDA_DEVICES", "2"),
        ("SIMULATED_CUDA_DELAY_US", "500"),
        ("DISTRIBUTE_NCCL_LIBRARY", library.as_str()),
    ];
    holds("nccl_reduces_in_any_order_of_streams", "nccl", &settings);
}

#[test]
fn replicas_of_a_strategy_reduce_in_the_memory_of_their_parts_of_a_gpu() {
    use distribute_collectives::ReduceOp;
    use distribute_device::{DType, DeviceKind, Devices, HostBuffer};
    use distribute_strategy::{Error, MirroredStrategy};

    let test = "replicas_of_a_strategy_reduce_in_the_memory_of_their_parts_of_a_gpu";
    if !simulated_cuda::inside(test, &[("SIMULATED_CUDA_DEVICES", "1"), ("DISTRIBUTE_KERNEL_CACHE", "")]) {
        return;
    }
    let absent = MirroredStrategy::builder().devices(["GPU:0", "GPU:1"]).build().unwrap_err().to_string();
    assert!(absent.contains("GPU:1") && absent.contains("this process has GPU:0"), "{absent}");
    let halves = Devices::local().split(DeviceKind::Gpu, 0, &[Some(1 << 20), Some(1 << 20)]).unwrap();
    let builder = MirroredStrategy::builder().devices(["GPU:0", "GPU:1"]).logical_devices(halves);
    let strategy = builder.build().unwrap();
    assert_eq!(strategy.describe(), "Mirrored 2 replicas (GPU:0, GPU:1)");
    for round in 0..3 {
        let sums = strategy.run_with((), |context, ()| {
            let group = context.device_group()?;
            assert!(group.chosen().contains("GPU:0 and GPU:1 are on one GPU"), "{}", group.chosen());
            let (device, deadline) = (group.device(), std::time::Instant::now() + std::time::Duration::from_secs(20));
            let (stream, values) = (device.create_stream()?, device.allocate(8)?);
            assert!(matches!(device.allocate(2 << 20), Err(distribute_device::Error::DeviceMemory { .. })));
            let mine = [context.replica_id() as f32 + 1.0, round as f32];
            stream.copy_from_host(HostBuffer::from_slice(&mine)?, 0, &values)?;
            group.all_reduce(&values, DType::F32, ReduceOp::Sum, &*stream)?;
            let sum = stream.copy_to_host(&values, device.allocate_host(8)?, 0)?.wait(deadline)?;
            // The group of the model's graph is another one.
            let Some(graph) = context.graph_device_group()? else { panic!("no group of the graph") };
            assert!(graph.chosen().contains("kernels"), "{}", graph.chosen());
            graph.all_reduce(&values, DType::F32, ReduceOp::Max, &*stream)?;
            let most = stream.copy_to_host(&values, device.allocate_host(8)?, 0)?.wait(deadline)?;
            assert_eq!(most.as_slice::<f32>()?, sum.as_slice::<f32>()?);
            Ok::<_, Error>(sum.as_slice::<f32>()?.to_vec())
        });
        for sum in strategy.local_results(&sums.unwrap()) {
            assert_eq!(sum, [3.0, 2.0 * round as f32]);
        }
        // A failed run leaves no group; the next one makes its own.
        let failed = strategy.run_with((), |context, ()| match context.replica_id() {
            0 => Err(Error::Merge { replica: 0, problem: "as this test wants it".to_owned() }),
            _ => {
                let (group, values) = (context.device_group()?, strategy.open_device(1)?.allocate(4)?);
                let stream = group.device().create_stream()?;
                Ok(group.all_reduce(&values, DType::F32, ReduceOp::Sum, &*stream)?)
            }
        });
        let told = failed.unwrap_err().to_string();
        assert!(told.contains("as this test wants it"), "{told}");
    }
    // All replicas know that one of them is in host memory.
    let mixed = MirroredStrategy::builder().devices(["GPU:0", "CPU:0"]).build().unwrap();
    let groups = mixed.run_with((), |context, ()| Ok::<_, Error>(context.graph_device_group()?.is_some()));
    assert_eq!(groups.unwrap().values(), [false, false]);
}

/// Rows of a dataset, in host memory or on the device that they were copied to.
#[derive(Clone, Debug)]
struct Rows {
    values: Vec<u32>,
    device: Option<String>,
}

/// The library of [`Rows`].
enum OwnLibrary {}

impl distribute_input::Element<OwnLibrary> for Rows {
    fn stack(items: &[Rows]) -> distribute_input::Result<Rows> {
        Self::concat(items)
    }

    fn rows(&self) -> distribute_input::Result<usize> {
        Ok(self.values.len())
    }

    fn row(&self, index: usize) -> distribute_input::Result<Rows> {
        self.slice(index..index + 1)
    }

    fn slice(&self, rows: std::ops::Range<usize>) -> distribute_input::Result<Rows> {
        Ok(Rows { values: self.values[rows].to_vec(), device: None })
    }

    fn gather(&self, rows: &[usize]) -> distribute_input::Result<Rows> {
        Ok(Rows { values: rows.iter().map(|row| self.values[*row]).collect(), device: None })
    }

    fn concat(items: &[Rows]) -> distribute_input::Result<Rows> {
        Ok(Rows { values: items.iter().flat_map(|item| item.values.clone()).collect(), device: None })
    }

    fn spec(&self) -> Vec<distribute_input::ElementSpec> {
        vec![distribute_input::ElementSpec::new(&[self.values.len()], "u32")]
    }

    fn fetch_to_device(
        self,
        device: &std::sync::Arc<dyn distribute_device::Device>,
    ) -> Result<Rows, distribute_input::BoxError> {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let (stream, copy) = (device.create_stream()?, device.allocate(4 * self.values.len())?);
        stream.copy_from_host(distribute_device::HostBuffer::from_slice(&self.values)?, 0, &copy)?;
        let host = device.allocate_host(4 * self.values.len())?;
        let values = stream.copy_to_host(&copy, host, 0)?.wait(deadline)?.as_slice::<u32>()?.to_vec();
        Ok(Rows { values, device: Some(device.spec().short()) })
    }
}

#[test]
fn a_strategy_finds_all_gpus_and_batches_arrive_on_them() {
    use distribute_device::Devices;
    use distribute_input::{Dataset, InputOptions};
    use distribute_strategy::MirroredStrategy;

    let test = "a_strategy_finds_all_gpus_and_batches_arrive_on_them";
    if !simulated_cuda::inside(test, &[("SIMULATED_CUDA_DEVICES", "3"), ("DISTRIBUTE_KERNEL_CACHE", "")]) {
        return;
    }
    let all = MirroredStrategy::builder().logical_devices(Devices::local()).build().unwrap();
    assert_eq!(all.describe(), "Mirrored 3 replicas (GPU:0, GPU:1, GPU:2)");
    let strategy = MirroredStrategy::builder().num_gpus(2).build().unwrap();
    assert_eq!(strategy.describe(), "Mirrored 2 replicas (GPU:0, GPU:1)");
    let error = MirroredStrategy::builder().num_gpus(4).build().unwrap_err().to_string();
    assert!(error.contains("num_gpus asks for 4 devices, but this process has 3 GPUs"), "{error}");

    let rows = Dataset::from_tensor_slices(Rows { values: (0..6).collect(), device: None }).batch(4);
    let parts = |options: InputOptions| -> Vec<Vec<(Vec<u32>, Option<String>)>> {
        let data = strategy.distribute_dataset_with(&rows, options).unwrap().with_empty_batches();
        let steps = data.iter().map(|step| step.unwrap().values().to_vec());
        steps.map(|step| step.into_iter().map(|part| (part.values, part.device)).collect()).collect()
    };
    let on = |values: &[u32], device: Option<&str>| (values.to_vec(), device.map(str::to_owned));
    let fetched = parts(InputOptions::default());
    let expected =
        |first, second| vec![vec![on(&[0, 1], first), on(&[2, 3], second)], vec![on(&[4, 5], first), on(&[], second)]];
    assert_eq!(fetched, expected(Some("GPU:0"), Some("GPU:1")));
    assert_eq!(parts(InputOptions::default().fetch_to_device(false)), expected(None, None));
}

/// Host memory that is freed together with its owner.
struct Watched {
    buffer: distribute_device::HostBuffer,
    _owner: std::sync::Arc<()>,
}

impl distribute_device::HostMemory for Watched {
    fn as_bytes(&self) -> &[u8] {
        self.buffer.as_bytes()
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_bytes_mut()
    }

    fn is_pinned(&self) -> bool {
        false
    }
}

#[test]
fn a_copy_whose_end_the_driver_cannot_tell_keeps_its_host_buffer() {
    use std::sync::{Arc, Weak};

    use distribute_device::{Devices, Error, HostBuffer};

    // Out of memory at the event of one of the copies, which is enqueued.
    let settings = [
        ("SIMULATED_CUDA_DEVICES", "1"),
        ("SIMULATED_CUDA_FAIL", "cuEventRecord:6:2"),
        ("DISTRIBUTE_KERNEL_CACHE", ""),
    ];
    if !simulated_cuda::inside("a_copy_whose_end_the_driver_cannot_tell_keeps_its_host_buffer", &settings) {
        return;
    }
    let device = Devices::local().open(&"GPU:0".parse().unwrap()).unwrap();
    let (stream, memory) = (device.create_stream().unwrap(), device.allocate(64).unwrap());
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let watched = || -> (HostBuffer, Weak<()>) {
        let owner = Arc::new(());
        let watch = Arc::downgrade(&owner);
        let memory = Watched { buffer: HostBuffer::zeroed(64).unwrap(), _owner: owner };
        (HostBuffer::from_memory(Box::new(memory)).unwrap(), watch)
    };
    let mut failed = 0;
    for round in 0..10 {
        let (buffer, watch) = watched();
        let copy = match round % 2 {
            0 => stream.copy_from_host(buffer, 0, &memory),
            _ => stream.copy_to_host(&memory, buffer, 0),
        };
        match copy {
            Ok(mut copy) => drop(copy.wait(deadline).unwrap()),
            Err(Error::Cuda { operation: "recording an event", .. }) => {
                assert!(watch.upgrade().is_some(), "the buffer is freed while the copy may use it");
                failed += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(failed, 1);
    stream.synchronize(deadline).unwrap();
}

//! Failures amid collectives of simulated GPUs: errors for all ranks, and nothing left behind for later steps.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::{Duration, Instant};

use distribute_collectives::{DType, DeviceGroup, DeviceImplementation, Options, ProcessGroup, ReduceOp};
use distribute_device::cuda::{Combine, CudaDevice, CudaStream};
use distribute_device::{Device, DeviceBuffer, DeviceKind, Devices, HostBuffer, Stream};
use distribute_optim::{Clip, HostError, LossScale, Optimizer, Sgd};
use distribute_strategy::{MirroredStrategy, Strategy};

use crate::gpu_library::{FAILING_REPLACEMENTS, GpuLoss, GpuModel, OnGpu};
use crate::lent::Lent;

/// Lets a GPU wait for longer than the host needs to find out about a failure.
const PAUSE: Duration = Duration::from_millis(400);

/// A rank of a group of two GPUs.
struct Rank {
    index: usize,
    device: Arc<CudaDevice>,
    stream: CudaStream,
    group: DeviceGroup,
}

/// Runs `act` on two ranks, each with its own GPU.
fn on_two_gpus<R: Send>(asked: DeviceImplementation, act: impl Fn(&Rank) -> R + Sync) -> Vec<R> {
    let options = Options::default().timeout(Duration::from_secs(20));
    let groups = ProcessGroup::local_with(2, &options).unwrap();
    let devices = Devices::local();
    let run = |group: &ProcessGroup, index: usize| {
        let logical = devices.of_kind(DeviceKind::Gpu).nth(index).unwrap().clone();
        let device = Arc::new(CudaDevice::new(logical).unwrap());
        let group = DeviceGroup::new(group, device.clone() as Arc<dyn Device>, asked).unwrap();
        let stream = device.stream().unwrap();
        act(&Rank { index, device, stream, group })
    };
    let run = &run;
    std::thread::scope(|scope| {
        let started = groups.iter().enumerate().map(|(index, group)| scope.spawn(move || run(group, index)));
        let ranks: Vec<_> = started.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

impl Rank {
    fn pause(&self) {
        let pause = || {
            std::thread::sleep(PAUSE);
            Ok(())
        };
        self.stream.launch_host(Box::new(pause)).unwrap();
    }

    fn write(&self, values: &[f32], to: &DeviceBuffer) {
        self.stream.copy_from_host(HostBuffer::from_slice(values).unwrap(), 0, to).unwrap();
    }

    fn read(&self, buffer: &DeviceBuffer) -> Vec<f32> {
        let memory = self.device.allocate_host(buffer.len_bytes()).unwrap();
        let memory = self.stream.copy_to_host(buffer, memory, 0).unwrap().wait(deadline()).unwrap();
        memory.as_slice::<f32>().unwrap().to_vec()
    }
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Runs a test with two simulated GPUs and NCCL. Returns whether this is the process of that.
fn with_nccl(test: &str, settings: &[(&str, &str)]) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let library = simulated_nccl::install(folder.path()).unwrap().to_string_lossy().into_owned();
    let cache = folder.path().to_string_lossy().into_owned();
    let own = [("DISTRIBUTE_NCCL_LIBRARY", library.as_str()), ("DISTRIBUTE_KERNEL_CACHE", &cache)];
    let all: Vec<(&str, &str)> = settings.iter().copied().chain(own).collect();
    simulated_cuda::inside(test, &all)
}

#[test]
fn a_collective_that_is_aborted_while_it_is_enqueued_is_an_error() {
    // One rank's call is refused after the other one's was enqueued, and while the event after that is being recorded.
    let settings =
        [("SIMULATED_NCCL_FAIL", "ncclAllReduce:2:3:100000"), ("SIMULATED_CUDA_SLOW", "cuEventRecord:250000")];
    if !with_nccl("failures::a_collective_that_is_aborted_while_it_is_enqueued_is_an_error", &settings) {
        return;
    }
    let outcomes = on_two_gpus(DeviceImplementation::Nccl, |rank| {
        let values = rank.device.allocate(4096).unwrap();
        let call = rank.group.all_reduce(&values, DType::F32, ReduceOp::Sum, &rank.stream);
        call.map_err(|error| error.to_string())?;
        rank.stream.synchronize(deadline()).map_err(|error| error.to_string())
    });
    assert!(outcomes.iter().all(|outcome| outcome.is_err()), "{outcomes:?}");
}

#[test]
fn memory_may_be_freed_after_a_failed_call() {
    // After a kernel of each, one of the ranks cannot launch its own of the collective. That of the other one uses the
    // memory of both.
    let settings = [("SIMULATED_CUDA_FAIL", "cuLaunchKernel:4:2"), ("SIMULATED_CUDA_DELAY_US", "500")];
    if !with_nccl("failures::memory_may_be_freed_after_a_failed_call", &settings) {
        return;
    }
    let outcomes = on_two_gpus(DeviceImplementation::Kernels, |rank| {
        let lent = Lent::new(&rank.device, 1 << 16);
        rank.stream.fill(&lent.buffer, 0).unwrap();
        // The kernels are compiled before the pause.
        rank.stream.reduce(Combine::Sum, DType::F32, &[&lent.buffer], &[&lent.buffer], 1).unwrap();
        if rank.index == 0 {
            rank.pause();
        }
        let call = rank.group.all_reduce(&lent.buffer, DType::F32, ReduceOp::Sum, &rank.stream);
        // In the order of the stream, like a tensor library.
        lent.free(&rank.stream);
        assert!(call.is_err());
        // The kernels have ended by then.
        std::thread::sleep(2 * PAUSE);
        rank.stream.synchronize(deadline()).map_err(|error| error.to_string())
    });
    assert_eq!(outcomes, [Ok(()), Ok(())]);
}

#[test]
fn kernels_reach_memory_of_a_tensor_library_on_another_gpu() {
    if !with_nccl("failures::kernels_reach_memory_of_a_tensor_library_on_another_gpu", &[]) {
        return;
    }
    let sums = on_two_gpus(DeviceImplementation::Kernels, |rank| {
        let lent = Lent::new(&rank.device, 4000);
        rank.write(&[1.0 + rank.index as f32; 1000], &lent.buffer);
        rank.group.all_reduce(&lent.buffer, DType::F32, ReduceOp::Sum, &rank.stream).unwrap();
        let sum = rank.read(&lent.buffer);
        lent.free(&rank.stream);
        sum
    });
    assert_eq!(sums, [vec![3.0; 1000], vec![3.0; 1000]]);
}

/// NCCL's kernels write into the results of ranks of their process, as this kernel of ours does.
#[test]
fn a_group_by_nccl_opens_the_memory_of_its_gpus_to_each_other() {
    if !with_nccl("failures::a_group_by_nccl_opens_the_memory_of_its_gpus_to_each_other", &[]) {
        return;
    }
    let own = Mutex::new(Vec::new());
    let barrier = Barrier::new(2);
    let sums = on_two_gpus(DeviceImplementation::Nccl, |rank| {
        assert!(rank.group.chosen().contains("NCCL"), "{}", rank.group.chosen());
        let (lent, pooled) = (Lent::new(&rank.device, 64), rank.device.allocate(64).unwrap());
        rank.write(&[1.0; 16], &lent.buffer);
        rank.write(&[2.0; 16], &pooled);
        rank.stream.synchronize(deadline()).unwrap();
        own.lock().unwrap().extend([lent.buffer.clone(), pooled]);
        barrier.wait();
        let all = own.lock().unwrap().clone();
        let (all, sum): (Vec<&DeviceBuffer>, _) = (all.iter().collect(), rank.device.allocate(64).unwrap());
        rank.stream.reduce(Combine::Sum, DType::F32, &all, &[&sum], 1).unwrap();
        let sum = rank.read(&sum);
        barrier.wait();
        sum
    });
    assert_eq!(sums, [vec![6.0; 16], vec![6.0; 16]]);
}

/// Two replicas of a variable of four elements.
fn model(strategy: &Strategy) -> GpuModel {
    GpuModel::new(strategy, &[("w", vec![0.5; 4])])
}

fn two_gpus() -> Strategy {
    MirroredStrategy::builder().num_gpus(2).build().unwrap()
}

fn step(strategy: &Strategy, model: &GpuModel, optimizer: &Optimizer<OnGpu>) -> Result<(), HostError> {
    let run = strategy.run_with(optimizer, |context, optimizer| {
        let local = context.local_replica_id();
        optimizer.minimize(context, &GpuLoss(vec![Some(model.put(local, &[1.0 + local as f32; 4]))]))
    });
    run.map(drop)
}

#[test]
fn training_continues_after_a_failed_reduction() {
    // The reduction of one replica in the second step, while the other one's is enqueued.
    let settings = [("SIMULATED_NCCL_FAIL", "ncclAllReduce:4:3:100000")];
    if !with_nccl("failures::training_continues_after_a_failed_reduction", &settings) {
        return;
    }
    let strategy = two_gpus();
    let model = model(&strategy);
    let optimizer = Sgd::new(0.25).build(&model).unwrap().clip(Clip::GlobalNorm(100.0)).unwrap();
    let optimizer = optimizer.scale_losses(LossScale::fixed(8.0)).unwrap();
    step(&strategy, &model, &optimizer).unwrap();
    let told = step(&strategy, &model, &optimizer).unwrap_err().to_string();
    assert!(told.contains("NCCL"), "{told}");
    assert!((0..2).all(|local| model.values(local) == [[-0.25; 4]]));
    step(&strategy, &model, &optimizer).unwrap();
    assert!((0..2).all(|local| model.values(local) == [[-1.0; 4]]));
}

#[test]
fn a_replica_that_fails_after_its_step_does_not_spoil_those_of_others() {
    let test = "failures::a_replica_that_fails_after_its_step_does_not_spoil_those_of_others";
    if !with_nccl(test, &[]) {
        return;
    }
    let strategy = two_gpus();
    let model = model(&strategy);
    let optimizer = Sgd::new(0.25).build(&model).unwrap();
    step(&strategy, &model, &optimizer).unwrap();
    let failed = strategy.run_with(&optimizer, |context, optimizer| {
        let local = context.local_replica_id();
        let loss = GpuLoss(vec![Some(model.put(local, &[1.0 + local as f32; 4]))]);
        if local == 1 {
            model.pause(1, PAUSE);
        }
        optimizer.minimize(context, &loss)?;
        // While the reductions are enqueued.
        match local {
            1 => Err(distribute_strategy::Error::Merge { replica: 1, problem: "as this test wants it".into() }.into()),
            _ => Ok(()),
        }
    });
    let told = failed.map(drop).map_err(|error: HostError| error.to_string()).unwrap_err();
    assert!(told.contains("as this test wants it"), "{told}");
    // The step is made.
    assert!((0..2).all(|local| model.values(local) == [[-1.0; 4]]));
    step(&strategy, &model, &optimizer).unwrap();
    assert!((0..2).all(|local| model.values(local) == [[-1.75; 4]]));
}

#[test]
fn collectives_with_different_tags_are_an_error_on_all_gpus() {
    if !with_nccl("failures::collectives_with_different_tags_are_an_error_on_all_gpus", &[]) {
        return;
    }
    for asked in [DeviceImplementation::Kernels, DeviceImplementation::Nccl] {
        let outcomes = on_two_gpus(asked, |rank| {
            let values = rank.device.allocate(64).unwrap();
            rank.write(&[1.0; 16], &values);
            // Two layers of equal size, which the ranks reach in different orders.
            let layers = if rank.index == 0 { [1, 2] } else { [2, 1] };
            let reduce = |tag| rank.group.all_reduce_tagged(&values, DType::F32, ReduceOp::Sum, tag, &rank.stream);
            let outcome = layers.into_iter().try_for_each(reduce).map_err(|error| error.to_string());
            (outcome, rank.read(&values))
        });
        for (outcome, values) in outcomes {
            assert!(outcome.as_ref().is_err_and(|error| error.contains("all_reduce")), "{asked:?}: {outcome:?}");
            assert_eq!(values, [1.0; 16], "values of different layers were added up");
        }
    }
}

#[test]
fn memory_of_another_gpu_is_an_error_that_names_both() {
    if !with_nccl("failures::memory_of_another_gpu_is_an_error_that_names_both", &[]) {
        return;
    }
    for asked in [DeviceImplementation::Kernels, DeviceImplementation::Nccl] {
        let buffers: Mutex<Vec<(usize, DeviceBuffer)>> = Mutex::default();
        let barrier = Barrier::new(2);
        let outcomes = on_two_gpus(asked, |rank| {
            buffers.lock().unwrap().push((rank.index, rank.device.allocate(64).unwrap()));
            barrier.wait();
            let all = buffers.lock().unwrap().clone();
            let other = &all.iter().find(|(index, _)| *index != rank.index).unwrap().1;
            let call = rank.group.all_reduce(other, DType::F32, ReduceOp::Sum, &rank.stream);
            barrier.wait();
            call.unwrap_err().to_string()
        });
        for error in outcomes {
            assert!(error.contains("this buffer") && error.contains("GPU:0") && error.contains("GPU:1"), "{error}");
        }
    }
}

#[test]
fn groups_are_found_while_another_replica_aborts_its_own() {
    if !with_nccl("failures::groups_are_found_while_another_replica_aborts_its_own", &[]) {
        return;
    }
    let strategy = two_gpus();
    let (release, held) = mpsc::channel::<()>();
    let (release, held, enqueued) = (Mutex::new(release), Mutex::new(Some(held)), Barrier::new(2));
    let took = Mutex::new(None);
    let failed = strategy.run_with((), |context, ()| {
        let group = context.device_group()?;
        let (stream, values) = (group.device().create_stream()?, group.device().allocate(4)?);
        if context.local_replica_id() == 1 {
            let held = held.lock().unwrap().take().unwrap();
            stream.launch_host(Box::new(move || {
                let _ = held.recv_timeout(Duration::from_secs(5));
                Ok(())
            }))?;
        }
        let reduced = group.all_reduce(&values, DType::F32, ReduceOp::Sum, &*stream);
        enqueued.wait();
        reduced?;
        if context.local_replica_id() == 0 {
            // The abort lets the reduction finish, which replica 1's GPU has not reached.
            return Err(distribute_strategy::Error::Merge { replica: 0, problem: "as this test wants it".to_owned() });
        }
        let limit = deadline();
        while context.group().failure().is_none() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(200));
        let started = Instant::now();
        let found = context.device_group();
        *took.lock().unwrap() = Some(started.elapsed());
        release.lock().unwrap().send(()).unwrap();
        found.map(drop)
    });
    let told = failed.map(drop).unwrap_err().to_string();
    assert!(told.contains("as this test wants it"), "{told}");
    let took = took.into_inner().unwrap();
    assert!(took.is_some_and(|took| took < Duration::from_secs(3)), "{took:?}");
}

#[test]
fn streams_are_replaced_later_if_that_fails_after_a_failed_step() {
    let settings = [("SIMULATED_NCCL_FAIL", "ncclAllReduce:4:3:100000")];
    if !with_nccl("failures::streams_are_replaced_later_if_that_fails_after_a_failed_step", &settings) {
        return;
    }
    let strategy = two_gpus();
    let model = model(&strategy);
    // The host waits for the norm.
    let optimizer = Sgd::new(0.25).build(&model).unwrap().clip(Clip::GlobalNorm(100.0)).unwrap();
    step(&strategy, &model, &optimizer).unwrap();
    // Those of both replicas, after the failed step.
    FAILING_REPLACEMENTS.store(2, Ordering::SeqCst);
    let told = step(&strategy, &model, &optimizer).unwrap_err().to_string();
    assert!(!told.contains("taken back"), "{told}");
    assert_eq!(FAILING_REPLACEMENTS.load(Ordering::SeqCst), 0);
    step(&strategy, &model, &optimizer).unwrap();
    assert!((0..2).all(|local| model.values(local) == [[-1.0; 4]]));
}

#[test]
fn a_kept_kernel_that_was_cut_is_compiled_again() {
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().to_string_lossy();
    if !simulated_cuda::inside(
        "failures::a_kept_kernel_that_was_cut_is_compiled_again",
        &[("DISTRIBUTE_KERNEL_CACHE", &folder)],
    ) {
        return;
    }
    let kept = || {
        let folder = std::env::var_os("DISTRIBUTE_KERNEL_CACHE").unwrap();
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        files.collect::<Vec<std::path::PathBuf>>()
    };
    let twice = || {
        // Kernels stay as long as their GPU is open.
        let device = CudaDevice::new(Devices::local().of_kind(DeviceKind::Gpu).next().unwrap().clone()).unwrap();
        let (stream, values) = (device.stream().unwrap(), device.allocate(8).unwrap());
        stream.copy_from_host(HostBuffer::from_slice(&[1.0f32, 2.0]).unwrap(), 0, &values).unwrap();
        stream.reduce(Combine::Sum, DType::F32, &[&values, &values], &[&values], 1).unwrap();
        let memory = stream.copy_to_host(&values, device.allocate_host(8).unwrap(), 0).unwrap().wait(deadline());
        assert_eq!(memory.unwrap().as_slice::<f32>().unwrap(), [2.0, 4.0]);
    };
    twice();
    let [file] = &kept()[..] else { panic!("{:?}", kept()) };
    let whole = std::fs::read(file).unwrap();
    for left in [0, 1, 40, whole.len() / 2, whole.len() - 1] {
        std::fs::write(file, &whole[..left]).unwrap();
        twice();
        assert!(std::fs::read(file).unwrap() == whole, "{left} bytes");
    }
}

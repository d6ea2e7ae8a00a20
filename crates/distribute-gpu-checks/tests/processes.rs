//! Groups of devices over several processes, on simulated GPUs: their results, and the errors of the others when one
//! dies.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(clippy::print_stdout, reason = "members say how they ended")]

#[path = "simulated/gpu_library.rs"]
mod gpu_library;

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_cluster::{Coordination, CoordinationOptions, Membership};
use distribute_collectives::{DeviceGroup, DeviceImplementation, Options, ProcessGroup, Rank, ReduceOp};
use distribute_device::cuda::CudaDevice;
use distribute_device::{DType, Device, DeviceBuffer, DeviceKind, Devices, HostBuffer, Stream};
use distribute_optim::{HostError, Sgd};
use distribute_strategy::{CommunicationOptions, MultiWorkerMirroredStrategy};
use distribute_testkit::{Job, Ports, Signal};

use crate::gpu_library::{GpuLoss, GpuModel};

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable that selects what the members of a job do.
const SCENARIO: &str = "DEVICE_SCENARIO";

/// The variable for the number of ranks of each process, each with a part of the one GPU that the process sees.
const LOCAL: &str = "DEVICE_LOCAL_RANKS";

/// The variable that is `nccl` if NCCL is asked for.
const ASKED: &str = "DEVICE_IMPLEMENTATION";

/// The body of the processes of the other tests.
#[test]
#[ignore = "a process that other tests start"]
fn member() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    let local: usize = std::env::var(LOCAL).unwrap().parse().unwrap();
    let membership = Membership::from_env().unwrap().unwrap();
    let heartbeats = CoordinationOptions::from_env()
        .unwrap()
        .heartbeat_interval(Duration::from_millis(200))
        .heartbeat_timeout(Duration::from_secs(2));
    let coordination = Arc::new(Coordination::start(&membership, heartbeats).unwrap());
    let options = Options::from_env().unwrap().timeout(Duration::from_secs(20));
    let groups = ProcessGroup::join(&coordination, local, &options).unwrap();
    let devices = Devices::local().split(DeviceKind::Gpu, 0, &vec![None; local]).unwrap();
    let gpus: Vec<_> = devices.of_kind(DeviceKind::Gpu).take(local).cloned().collect();
    std::thread::scope(|scope| {
        for (group, gpu) in groups.iter().zip(gpus) {
            let scenario = scenario.as_str();
            scope.spawn(move || {
                let outcome = act(scenario, group, CudaDevice::new(gpu).unwrap());
                match outcome {
                    Ok(()) => println!("outcome: fine"),
                    Err(error) => println!("outcome: {error}"),
                }
            });
        }
    });
}

/// The body of the processes that train.
#[test]
#[ignore = "a process that other tests start"]
fn trainer() {
    if std::env::var(SCENARIO).is_err() {
        return;
    }
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(20));
    let builder = MultiWorkerMirroredStrategy::builder().devices(["GPU:0"]).communication(communication);
    let strategy = builder.heartbeat_timeout(Duration::from_secs(2)).build().unwrap();
    let model = GpuModel::new(&strategy, &[("w", vec![0.5; 4])]);
    let optimizer = Sgd::new(0.25).build(&model).unwrap();
    let step = |pause: Option<Duration>| {
        let run = strategy.run_with(&optimizer, |context, optimizer| {
            let loss = GpuLoss(vec![Some(model.put(0, &[1.0 + context.replica_id() as f32; 4]))]);
            pause.into_iter().for_each(|pause| model.pause(0, pause));
            optimizer.minimize(context, &loss)?;
            Ok::<_, HostError>(context.device_group()?.chosen())
        });
        run.map(|chosen| chosen.values()[0].clone())
    };
    println!("chosen: {}", step(None).unwrap());
    println!("ready");
    // Rank 1's GPU does not come to the reduction, which both processes enqueue.
    match step((strategy.topology().worker() == 1).then_some(DEADLINE)) {
        Ok(_) => println!("outcome: fine"),
        Err(error) => println!("outcome: {error}"),
    }
    println!("left: {:?}", model.values(0));
}

fn act(
    scenario: &str,
    group: &ProcessGroup,
    device: CudaDevice,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let device = Arc::new(device);
    let by_nccl = std::env::var(ASKED).is_ok_and(|asked| asked == "nccl");
    let asked = if by_nccl { DeviceImplementation::Nccl } else { DeviceImplementation::Auto };
    let group = DeviceGroup::new(group, device.clone() as Arc<dyn Device>, asked)?;
    println!("chosen: {}", group.chosen());
    let (stream, deadline) = (device.stream()?, || Instant::now() + Duration::from_secs(20));
    let (me, ranks) = (group.rank().index(), group.world_size());
    let put = |values: &[f32]| {
        let buffer = device.allocate(size_of_val(values))?;
        stream.copy_from_host(HostBuffer::from_slice(values)?, 0, &buffer)?;
        Ok::<_, distribute_device::Error>(buffer)
    };
    let get = |buffer: &DeviceBuffer| {
        let memory = stream.copy_to_host(buffer, device.allocate_host(buffer.len_bytes())?, 0)?.wait(deadline())?;
        Ok::<_, distribute_device::Error>(memory.as_slice::<f32>()?.to_vec())
    };
    let total = (1..=ranks).sum::<usize>() as f32;
    let step = |op: ReduceOp, count: usize| {
        let values: Vec<f32> = (0..count).map(|at| ((me + 1) * (at % 13)) as f32).collect();
        let buffer = put(&values)?;
        group.all_reduce(&buffer, DType::F32, op, &stream)?;
        let divisor = if op == ReduceOp::Mean { ranks as f32 } else { 1.0 };
        let sums = get(&buffer)?;
        assert!(sums.iter().enumerate().all(|(at, sum)| *sum == total * (at % 13) as f32 / divisor), "{op} of {count}");
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    };
    step(ReduceOp::Sum, 3_000_000)?;
    step(ReduceOp::Mean, 1001)?;
    let values = put(&[me as f32; 3])?;
    group.broadcast(&values, DType::F32, Rank(1), &stream)?;
    assert_eq!(get(&values)?, [1.0; 3]);
    let (mine, all) = (put(&[me as f32, 0.5])?, put(&vec![0.0; 2 * ranks])?);
    group.all_gather(&mine, &all, DType::F32, &stream)?;
    assert_eq!(get(&all)?, (0..ranks).flat_map(|rank| [rank as f32, 0.5]).collect::<Vec<_>>());
    group.reduce_scatter(&all, &mine, DType::F32, ReduceOp::Mean, &stream)?;
    assert_eq!(get(&mine)?, [me as f32, 0.5]);
    println!("ready");
    match scenario {
        "endless" => loop {
            step(ReduceOp::Sum, 100_000)?;
        },
        // Both have made the call, but rank 1's GPU does not reach it.
        "enqueued" => {
            if me == 1 {
                stream.launch_host(Box::new(|| {
                    std::thread::sleep(Duration::from_secs(30));
                    Ok(())
                }))?;
            }
            group.all_reduce(&values, DType::F32, ReduceOp::Max, &stream)?;
            println!("enqueued");
            Ok(stream.synchronize(deadline())?)
        }
        // All ranks have made the call, and process 1's GPUs do not reach it. Rank 1, which does not lead its process,
        // is told to give up.
        "aborted" => std::thread::scope(|scope| {
            if me == 3 {
                stream.launch_host(Box::new(|| {
                    std::thread::sleep(Duration::from_secs(30));
                    Ok(())
                }))?;
            }
            if me == 1 {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(700));
                    group.abort("as this test wants it");
                });
            }
            let started = Instant::now();
            let call = group.all_reduce(&values, DType::F32, ReduceOp::Max, &stream);
            println!("returned after {} s", started.elapsed().as_secs());
            Ok(call?)
        }),
        _ => Ok(()),
    }
}

/// The GPUs and the NCCL of two processes.
#[derive(Clone, Copy, PartialEq)]
enum Gpus {
    /// Each has its own, and there is no NCCL.
    OwnWithoutNccl,
    Own,
    /// One for both, which NCCL is set to accept.
    Shared,
}

/// Builds a job of two processes with this many ranks each, whose body is the test of a name.
fn job(body: &str, scenario: &str, local: usize, folder: &Path, gpus: Gpus) -> Job {
    simulated_cuda::install(folder).unwrap();
    if gpus != Gpus::OwnWithoutNccl {
        simulated_nccl::install(folder).unwrap();
    }
    let port = Ports::reserve(1).unwrap().release()[0];
    let path: Vec<OsString> = std::env::var_os("LD_LIBRARY_PATH").into_iter().collect();
    let paths =
        std::env::join_paths([folder.to_owned()].into_iter().chain(path.iter().flat_map(std::env::split_paths)));
    Job::of_test(body)
        .unwrap()
        .env(SCENARIO, scenario)
        .env(LOCAL, local.to_string())
        .env("LD_LIBRARY_PATH", paths.unwrap().to_string_lossy())
        .env("DISTRIBUTE_KERNEL_CACHE", folder.join("kernels").to_string_lossy())
        .env("WORLD_SIZE", "2")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", "1")
        .env("DISTRIBUTE_PORT", port.to_string())
        .env("NCCL_MULTI_RANK_GPU_ENABLE", if gpus == Gpus::Shared { "1" } else { "0" })
        .env("SIMULATED_NCCL_VERSION", "23003")
        .env(ASKED, if gpus == Gpus::Shared { "nccl" } else { "auto" })
        .task_env(move |rank| {
            let gpu = if gpus == Gpus::Shared { 0 } else { rank };
            let place = [("RANK", rank.to_string()), ("CUDA_VISIBLE_DEVICES", gpu.to_string())];
            place.map(|(name, value)| (name.to_owned(), value)).to_vec()
        })
        .tasks(2)
        .start()
        .unwrap()
}

fn finishes(local: usize, gpus: Gpus, chosen: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job("member", "all", local, folder.path(), gpus);
    for outcome in job.wait_all(DEADLINE).unwrap() {
        assert!(outcome.success(), "{outcome:?}");
    }
    for rank in 0..2 {
        let printed = job.printed(rank).unwrap();
        assert!(printed.matches("outcome: fine").count() == local && printed.contains(chosen), "{printed}");
    }
}

#[test]
fn nccl_takes_gpus_of_several_processes() {
    finishes(1, Gpus::Own, "by NCCL: every rank has a GPU of its own");
}

#[test]
fn nccl_takes_one_gpu_of_several_processes_if_it_may() {
    finishes(1, Gpus::Shared, "by NCCL: it was asked for");
}

#[test]
fn without_nccl_processes_go_through_the_host() {
    finishes(1, Gpus::OwnWithoutNccl, "by kernels in the GPUs' memory: no NCCL for GPU:0");
}

#[test]
fn parts_of_gpus_reduce_within_their_process_first() {
    finishes(
        2,
        Gpus::Own,
        "GPU:0 and GPU:1 are on one GPU, which NCCL does not take twice; between processes through the host",
    );
}

/// Kills one of two processes, and checks the other one's error and its delay.
fn killed(scenario: &str, gpus: Gpus) {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job("member", scenario, 1, folder.path(), gpus);
    let line = if scenario == "enqueued" { "enqueued" } else { "ready" };
    for rank in 0..2 {
        job.wait_for_line(rank, line, DEADLINE).unwrap();
    }
    std::thread::sleep(Duration::from_millis(200));
    job.kill(1, Signal::KILL).unwrap();
    let started = Instant::now();
    let told = job.wait_for_line(0, "outcome:", DEADLINE).unwrap();
    let took = started.elapsed();
    assert!(told.contains("lost") || told.contains("NCCL"), "{told}");
    assert!(took < Duration::from_secs(5), "{told} after {took:?}");
    println!("after {took:?}: {told}");
    job.wait(0, DEADLINE).unwrap();
}

#[test]
fn a_killed_peer_is_an_error_under_nccl() {
    killed("endless", Gpus::Own);
}

#[test]
fn a_killed_peer_is_an_error_for_work_that_nccl_has_enqueued() {
    killed("enqueued", Gpus::Own);
}

#[test]
fn a_killed_peer_is_an_error_through_the_host() {
    killed("endless", Gpus::OwnWithoutNccl);
}

#[test]
fn any_rank_ends_the_wait_of_its_process_for_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job("member", "aborted", 2, folder.path(), Gpus::Own);
    job.wait_for_line(0, "returned after", DEADLINE).unwrap();
    // Nothing in it ends before its GPU does.
    job.kill(1, Signal::KILL).unwrap();
    job.wait(0, DEADLINE).unwrap();
    let printed = job.printed(0).unwrap();
    let took: Vec<u64> = printed
        .lines()
        .filter_map(|line| line.split_once("returned after ")?.1.strip_suffix(" s")?.parse().ok())
        .collect();
    assert!(took.len() == 2 && took.iter().all(|seconds| *seconds < 10), "{printed}");
    assert!(printed.contains("as this test wants it"), "{printed}");
}

#[test]
fn an_update_is_not_made_from_reductions_that_a_killed_peer_has_not_finished() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job("trainer", "train", 1, folder.path(), Gpus::Own);
    for rank in 0..2 {
        job.wait_for_line(rank, "ready", DEADLINE).unwrap();
    }
    // Time for the second step's calls on the host.
    std::thread::sleep(Duration::from_millis(700));
    job.kill(1, Signal::KILL).unwrap();
    let told = job.wait_for_line(0, "outcome:", DEADLINE).unwrap();
    assert!(told.contains("lost") || told.contains("NCCL"), "{told}");
    let left = job.wait_for_line(0, "left:", DEADLINE).unwrap();
    assert!(left.contains("[[-0.25, -0.25, -0.25, -0.25]]"), "{left}");
    job.wait(0, DEADLINE).unwrap();
    let printed = job.printed(0).unwrap();
    assert!(printed.contains("by NCCL"), "{printed}");
}

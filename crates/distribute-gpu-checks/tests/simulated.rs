//! Every check on GPUs that are simulated in the host's memory; the kernels are compiled for the CPU.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(clippy::print_stdout, reason = "what was skipped is said")]

use distribute_gpu_checks::{Gpus, Outcome, checks};

/// Runs the checks whose names begin with `area` on simulated GPUs.
fn holds(test: &str, area: &str, settings: &[(&str, &str)]) {
    let cache = std::env::temp_dir().join(format!("distribute-gpu-checks-{}", std::process::id()));
    let cache_text = cache.to_string_lossy().into_owned();
    let all: Vec<(&str, &str)> =
        settings.iter().copied().chain([("DISTRIBUTE_KERNEL_CACHE", cache_text.as_str())]).collect();
    if !simulated_cuda::inside(test, &all) {
        let _ = std::fs::remove_dir_all(cache);
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
            Ok(Outcome::Skipped(reason)) => println!("skipped: {} ({reason})", check.name),
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

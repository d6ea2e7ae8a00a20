//! NCCL, if it is installed.

use std::sync::Arc;

use distribute_collectives::DeviceImplementation;
use distribute_device::cuda::CudaDevice;
use nccl_sys::{Library, Version};

use super::collectives::{moves, on_ranks, reduce};
use crate::Result;
use crate::check::{Entry, Outcome, ensure, passed};
use crate::gpu::Gpus;

pub(super) const CHECKS: [Entry; 2] = [
    ("nccl: several GPUs reduce by NCCL", several),
    ("nccl: two ranks on one GPU use kernels and say why, or NCCL if it may", shared),
];

fn several(gpus: &Gpus) -> Result<Outcome> {
    let library = match Library::load() {
        Ok(library) => library,
        Err(error) => return Ok(Outcome::Skipped(error.to_string())),
    };
    let all = match gpus.on_each(gpus.infos().len())? {
        Some(all) if all.len() > 1 => all,
        _ => return Ok(Outcome::Skipped("there is one GPU; two are needed".to_owned())),
    };
    reduce(gpus, &all, DeviceImplementation::Auto, "NCCL")?;
    moves(&all, DeviceImplementation::Nccl)?;
    passed(format!("{} GPUs, NCCL {}", all.len(), library.version()))
}

fn shared(gpus: &Gpus) -> Result<Outcome> {
    let devices = gpus.on_first(2, None)?;
    let said = chosen(&devices, DeviceImplementation::Nccl)?;
    let is_told = std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value == "1");
    if is_told && Library::load().is_ok_and(|library| library.version() >= Version::new(2, 30, 0)) {
        ensure(said.iter().all(|said| said.contains("by NCCL")), || said.concat())?;
        reduce(gpus, &devices, DeviceImplementation::Nccl, "NCCL")?;
        moves(&devices, DeviceImplementation::Nccl)?;
        let by_itself = chosen(&devices, DeviceImplementation::Auto)?;
        ensure(by_itself.iter().all(|said| said.contains("kernels")), || by_itself.concat())?;
        return passed(said[0].clone());
    }
    for said in said {
        ensure(said.contains("kernels") && said.contains("on one GPU"), || said.clone())?;
    }
    passed("by kernels; NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30 would let it reduce here")
}

/// Returns which backend each rank has.
fn chosen(devices: &[Arc<CudaDevice>], asked: DeviceImplementation) -> Result<Vec<String>> {
    on_ranks(devices, asked, |group, _, _| Ok(group.chosen()))?.into_iter().collect()
}

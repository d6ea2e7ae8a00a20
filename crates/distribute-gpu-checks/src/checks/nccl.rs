//! NCCL, if it is installed.

use distribute_collectives::DeviceImplementation;
use nccl_sys::Library;

use super::collectives::{moves, reduce};
use crate::Result;
use crate::check::{Entry, Outcome, ensure, passed};
use crate::gpu::Gpus;

pub(super) const CHECKS: [Entry; 2] =
    [("nccl: several GPUs reduce by NCCL", several), ("nccl: two ranks on one GPU use kernels, and say why", shared)];

fn several(gpus: &Gpus) -> Result<Outcome> {
    let library = match Library::load() {
        Ok(library) => library,
        Err(error) => return Ok(Outcome::Skipped(error.to_string())),
    };
    let all = match gpus.on_each(gpus.infos().len())? {
        Some(all) if all.len() > 1 => all,
        _ => return Ok(Outcome::Skipped("there is one GPU; two are needed".to_owned())),
    };
    reduce(&all, DeviceImplementation::Auto, "NCCL")?;
    moves(&all, DeviceImplementation::Nccl)?;
    passed(format!("{} GPUs, NCCL {}", all.len(), library.version()))
}

fn shared(gpus: &Gpus) -> Result<Outcome> {
    let devices = gpus.on_first(2, None)?;
    let said = super::collectives::on_ranks(&devices, DeviceImplementation::Nccl, |group, _, _| Ok(group.chosen()))?;
    for said in said {
        let said = said?;
        ensure(said.contains("kernels") && said.contains("on one GPU"), || said.clone())?;
    }
    passed("what is said")
}

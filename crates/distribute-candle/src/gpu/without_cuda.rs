//! A build whose candle knows no GPUs: nothing here can be made.

use candle_core::{Device, Tensor};
use distribute_device::DeviceKind;
use distribute_device::absence;
use distribute_strategy::{ReplicaContext, Strategy};
use distribute_values::UpdateRule;

use crate::model::Parts;
use crate::optimizer::StepCounts;
use crate::plan::Plan;
use crate::reducer::Reduced;
use crate::{Error, Result};

/// What keeps the others from being made.
#[derive(Clone, Copy, Debug)]
enum Never {}

/// A replica's buckets on its GPU.
#[derive(Debug)]
pub(crate) struct GpuReduction(Never);

/// One step's gradients on their way.
pub(crate) struct GpuStep(Never);

/// One step's gradients, summed over all replicas.
pub(crate) struct GpuSum(Never);

pub(super) fn candle_device(strategy: &Strategy, local: usize) -> Result<Device> {
    let device = strategy.devices().get(local).map_or_else(String::new, |device| device.short());
    let problem = match absence(DeviceKind::Gpu) {
        reason if reason.contains("no CUDA support") => reason,
        _ => "candle was built without CUDA (Cargo feature candle-cuda)".to_owned(),
    };
    Err(Error::NoGpu { device, problem })
}

impl GpuReduction {
    /// None, since a replica of this build is on a CPU.
    pub(crate) fn new(_: &ReplicaContext, _: &Parts, _: &Plan) -> Result<Option<GpuReduction>> {
        Ok(None)
    }

    pub(crate) fn begin(&self, _: &ReplicaContext) -> Result<GpuStep> {
        match self.0 {}
    }
}

impl GpuStep {
    pub(crate) fn push(&mut self, _: usize, _: Tensor) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn has(&self, _: usize) -> bool {
        match self.0 {}
    }

    pub(crate) fn finish(self, _: Vec<u32>) -> Result<(GpuSum, Vec<u32>)> {
        match self.0 {}
    }
}

impl GpuSum {
    pub(crate) fn into_tensors(self, _: &Parts, _: usize) -> Result<Vec<Reduced>> {
        match self.0 {}
    }

    pub(crate) fn variables(&self) -> Vec<usize> {
        match self.0 {}
    }

    pub(crate) fn apply(
        &self,
        _: &Parts,
        _: usize,
        _: UpdateRule,
        _: (&StepCounts, f64),
        _: &dyn Fn(usize) -> Vec<Tensor>,
    ) -> Result<bool> {
        match self.0 {}
    }
}

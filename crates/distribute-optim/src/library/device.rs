//! Gradients that are reduced and applied in the memory of accelerators.

use std::fmt::Debug;

use distribute_strategy::ReplicaContext;

use super::TensorLibrary;
use crate::gradient::Reduced;
use crate::plan::Plan;
use crate::{Parameters, StepCounts, UpdateRule};

/// How a tensor library's gradients are reduced and applied where they are, on an accelerator.
pub trait DeviceExchange<L: TensorLibrary>: Debug + Send + Sized {
    /// One step's gradients on their way.
    type Step: Send;

    /// One step's gradients, summed over all replicas, in the accelerator's memory.
    type Sum;

    /// Prepares a replica's buckets, in its first step; `None` if the replica is on the host. Every replica calls this.
    ///
    /// # Errors
    /// Those of the device and of collectives.
    fn new(context: &ReplicaContext, parameters: &Parameters<L>, plan: &Plan) -> Result<Option<Self>, L::Error>;

    /// Begins a step; after a failed run the replicas have another group.
    ///
    /// # Errors
    /// Those of collectives.
    fn begin(&self, context: &ReplicaContext) -> Result<Self::Step, L::Error>;

    /// Returns whether a variable's gradient has come.
    fn has(step: &Self::Step, index: usize) -> bool;

    /// Takes a gradient, and begins to reduce its bucket if that is now full.
    ///
    /// # Errors
    /// Those of the device and of collectives.
    fn push(step: &mut Self::Step, index: usize, gradient: L::Tensor) -> Result<(), L::Error>;

    /// Sums `flags` over all replicas, and orders what comes later behind the reductions. Returns both sums.
    ///
    /// # Errors
    /// Those of the device and of collectives.
    fn finish(step: Self::Step, flags: Vec<u32>) -> Result<(Self::Sum, Vec<u32>), L::Error>;

    /// The variables that got a gradient on some replica.
    fn variables(sum: &Self::Sum) -> Vec<usize>;

    /// Copies the gradients to tensors of their own, for what there is no kernel for.
    ///
    /// # Errors
    /// Those of the device.
    fn into_tensors(sum: Self::Sum, parameters: &Parameters<L>, local: usize) -> Result<Vec<Reduced<L>>, L::Error>;

    /// Steps all parameters of a replica in few launches. Returns false, having done nothing, if there is no kernel for the rule.
    ///
    /// # Errors
    /// Those of the device.
    fn apply(sum: &Self::Sum, step: &DeviceUpdate<'_, L>) -> Result<bool, L::Error>;
}

/// What a step does on an accelerator.
pub struct DeviceUpdate<'a, L: TensorLibrary> {
    /// The model's variables.
    pub parameters: &'a Parameters<L>,
    /// The replica among those of this process.
    pub local: usize,
    /// The arithmetic.
    pub rule: UpdateRule,
    /// The number of each variable's step, from 1.
    pub counts: &'a StepCounts,
    /// The learning rate.
    pub learning_rate: f64,
    /// The slots of a variable on this replica, and behind them the master copy of one of 16 bits.
    pub slots: &'a dyn Fn(usize) -> Vec<L::Tensor>,
}

/// For libraries whose tensors are in host memory only.
#[derive(Clone, Copy, Debug)]
pub enum NoDevices {}

impl<L: TensorLibrary> DeviceExchange<L> for NoDevices {
    type Step = NoDevices;
    type Sum = NoDevices;

    fn new(_: &ReplicaContext, _: &Parameters<L>, _: &Plan) -> Result<Option<NoDevices>, L::Error> {
        Ok(None)
    }

    fn begin(&self, _: &ReplicaContext) -> Result<NoDevices, L::Error> {
        match *self {}
    }

    fn has(step: &NoDevices, _: usize) -> bool {
        match *step {}
    }

    fn push(step: &mut NoDevices, _: usize, _: L::Tensor) -> Result<(), L::Error> {
        match *step {}
    }

    fn finish(step: NoDevices, _: Vec<u32>) -> Result<(NoDevices, Vec<u32>), L::Error> {
        match step {}
    }

    fn variables(sum: &NoDevices) -> Vec<usize> {
        match *sum {}
    }

    fn into_tensors(sum: NoDevices, _: &Parameters<L>, _: usize) -> Result<Vec<Reduced<L>>, L::Error> {
        match sum {}
    }

    fn apply(sum: &NoDevices, _: &DeviceUpdate<'_, L>) -> Result<bool, L::Error> {
        match *sum {}
    }
}

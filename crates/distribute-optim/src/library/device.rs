//! Gradients that are reduced and applied in the memory of accelerators.

use std::fmt::Debug;

use distribute_collectives::Compression;
use distribute_strategy::ReplicaContext;

use super::TensorLibrary;
use crate::gradient::Reduced;
use crate::plan::Plan;
use crate::{Clip, Parameters, StepCounts, UpdateRule};

/// The exchange of a tensor library's gradients on an accelerator: reduced and applied without a copy to the host.
pub trait DeviceExchange<L: TensorLibrary>: Debug + Send + Sized {
    /// One step's gradients, which are being reduced.
    type Step: Send;

    /// One step's gradients, summed over all replicas, in the accelerator's memory.
    type Sum;

    /// Prepares a replica's buckets in its first step. Returns `None` if the replica is on the host. Every replica
    /// calls this.
    ///
    /// # Errors
    /// The library's error if a buffer cannot be allocated, a collective fails, or gradients cannot be compressed in
    /// this way on the accelerator.
    fn new(
        context: &ReplicaContext,
        parameters: &Parameters<L>,
        plan: &Plan,
        compression: &Compression,
    ) -> Result<Option<Self>, L::Error>;

    /// Reverts what an uncommitted step has left in the state of the compression.
    fn take_back(&self);

    /// Replaces the streams that an uncommitted step has used: a failure of one of its collectives would be an error of
    /// everything that comes later in them.
    ///
    /// # Errors
    /// The library's error if a stream cannot be created, or the step's work does not end in time.
    fn replace_streams(&mut self) -> Result<(), L::Error>;

    /// Starts a step. The context's group may be a new one, since a failed run replaces it.
    ///
    /// # Errors
    /// The collective's error if the group has failed.
    fn begin(&self, context: &ReplicaContext) -> Result<Self::Step, L::Error>;

    /// Returns whether a variable's gradient was pushed.
    fn has(step: &Self::Step, index: usize) -> bool;

    /// Adds a gradient, and starts to reduce its bucket when the bucket is complete.
    ///
    /// # Errors
    /// The library's error if a copy or a collective fails.
    fn push(step: &mut Self::Step, index: usize, gradient: L::Tensor) -> Result<(), L::Error>;

    /// Sums `flags` over all replicas, and orders later operations after the reductions. Returns both sums.
    ///
    /// A step is committed when this has returned on all replicas. So it must not return before reductions have
    /// finished that the loss of another process can still spoil.
    ///
    /// # Errors
    /// The library's error if a copy or a collective fails.
    fn finish(step: Self::Step, flags: Vec<u32>) -> Result<(Self::Sum, Vec<u32>), L::Error>;

    /// Returns the indices of the variables that got a gradient on some replica.
    fn variables(sum: &Self::Sum) -> Vec<usize>;

    /// Copies the gradients into tensors of their own, for operations on the host.
    ///
    /// # Errors
    /// The library's error if a copy fails.
    fn into_tensors(sum: Self::Sum, parameters: &Parameters<L>, local: usize) -> Result<Vec<Reduced<L>>, L::Error>;

    /// Divides, limits and applies the gradients of a replica in few launches. Changes nothing if a gradient is not
    /// finite and there is a loss scale.
    ///
    /// # Errors
    /// The library's error if a launch or a copy fails.
    fn apply(sum: &Self::Sum, step: &DeviceUpdate<'_, L>) -> Result<DeviceOutcome, L::Error>;
}

/// The inputs of an update on an accelerator.
pub struct DeviceUpdate<'a, L: TensorLibrary> {
    /// The model's variables.
    pub parameters: &'a Parameters<L>,
    /// The index of the replica in this process.
    pub local: usize,
    /// The number of each variable's step, from 1.
    pub counts: &'a StepCounts,
    /// Returns a variable's slots on this replica, followed by its f32 copy if it has 16 bits.
    pub slots: &'a dyn Fn(usize) -> Vec<L::Tensor>,
    /// The arithmetic.
    pub step: DeviceStep,
}

/// The arithmetic of an update on an accelerator, equal for all variables and on all replicas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceStep {
    /// The optimizer's rule.
    pub rule: UpdateRule,
    /// The learning rate.
    pub learning_rate: f64,
    /// The loss scale that gradients are divided by. With one, a gradient that is not finite makes the step a skipped
    /// one.
    pub loss_scale: Option<f64>,
    /// The limit of the divided gradients.
    pub clip: Option<Clip>,
    /// The sum of squares of divided gradients that are not applied by this update, and belong to the global norm.
    pub other_squares: f64,
}

/// The outcome of an update on an accelerator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceOutcome {
    /// Whether the gradients were finite, or there was not a loss scale; otherwise nothing was changed.
    pub finite: bool,
    /// The gradients' norm before they were limited, if [`Clip::GlobalNorm`] needed it.
    pub gradient_norm: Option<f64>,
}

/// The exchange of libraries whose tensors are in host memory only; it has no values.
#[derive(Clone, Copy, Debug)]
pub enum NoDevices {}

impl<L: TensorLibrary> DeviceExchange<L> for NoDevices {
    type Step = NoDevices;
    type Sum = NoDevices;

    fn new(_: &ReplicaContext, _: &Parameters<L>, _: &Plan, _: &Compression) -> Result<Option<NoDevices>, L::Error> {
        Ok(None)
    }

    fn take_back(&self) {
        match *self {}
    }

    fn replace_streams(&mut self) -> Result<(), L::Error> {
        match *self {}
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

    fn apply(sum: &NoDevices, _: &DeviceUpdate<'_, L>) -> Result<DeviceOutcome, L::Error> {
        match *sum {}
    }
}

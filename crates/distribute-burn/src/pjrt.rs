//! Models on the devices of PJRT plugins, such as TPUs.
//!
//! burn's capture backend records what a model computes from its inputs, forward and backward. The record is lowered to
//! a program, to which the optimizer adds the reduction and the update, and which is compiled once for all replicas.
//! Variables are buffers of the devices, which each step replaces; host memory has copies where they are asked for.

mod execution;
mod leaves;
mod program;
mod resident;
mod trace;

pub(crate) use execution::{Programs, StepInputs, StepOutputs};
pub(crate) use leaves::{Feed, Fill, Leaf, collect};
pub(crate) use resident::Resident;
pub(crate) use trace::{
    Output, begin_statistics, float_id, float_input, int_input, is_tracing, record_step, record_with,
    refuse_second_model, refuse_without_statistics, targets_checked, traced_parameter, weighed,
};

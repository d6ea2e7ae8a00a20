//! The memory that a replica needs for training, apart from what forward and backward keep.

use std::fmt;

use super::Optimizer;
use crate::library::bytes;
use crate::{TensorLibrary, Variable};

/// The sizes in bytes of what the first replica of a process holds for training: all are those of tensors that exist,
/// none is an estimate. It does not include intermediate results of forward and backward; the peak of a process does.
///
/// Replicas that share one copy of the variables, as under `CentralStorageStrategy`, share these bytes.
///
/// # Examples
/// ```
/// use distribute_optim::{Adam, HostError, HostLoss, HostModel};
/// use distribute_strategy::MirroredStrategy;
/// use distribute_values::HostTensor;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[8], vec![0.5; 8])?)])?;
/// let optimizer = Adam::new(0.1).build(&model)?;
/// strategy.run_with(&optimizer, |context, optimizer| {
///     optimizer.minimize(context, &HostLoss(vec![Some(HostTensor::new(&[8], vec![0.25; 8])?)]))
/// })?;
/// let memory = optimizer.memory();
/// assert_eq!((memory.parameter_bytes, memory.gradient_bytes, memory.state_bytes), (32, Some(32), Some(64)));
/// assert_eq!(memory.to_string(), "parameters 32 B, gradients 32 B in 1 bucket, optimizer state 64 B");
/// # Ok::<(), HostError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryReport {
    /// All variables of the model, trained or not; of sharded ones the replica's parts.
    pub parameter_bytes: usize,
    /// The gradients of a step; of sharded variables the replica's parts, and of those that are [reduced by
    /// rows](Optimizer::sparse_gradients) all rows, though a library that reports some has no others. `None` before the
    /// first step, and where compiled programs hold them.
    pub gradient_bytes: Option<usize>,
    /// The gradients in each bucket, which are reduced in one operation; they are a part of `gradient_bytes`.
    pub bucket_bytes: Vec<usize>,
    /// The optimizer's state, on the replica's device or in host memory; sharded state exists from the first step on.
    /// `None` for a tensor library's own optimizer.
    pub state_bytes: Option<usize>,
    /// The slots of [local updates](distribute_strategy::LocalUpdates::slots), in host memory, such as the outer
    /// parameters of [`DilocoStrategy`](distribute_strategy::DilocoStrategy). They exist from the first step on.
    pub local_slot_bytes: usize,
}

impl<L: TensorLibrary> Optimizer<L> {
    /// Returns the sizes of what the first replica of this process holds for training.
    pub fn memory(&self) -> MemoryReport {
        let variables = self.parameters.variables();
        let of_variable = |variable: &Variable<L>| variable.components().first().map_or(0, bytes::<L>);
        let bucket_bytes: Vec<usize> = self.states.plan().map_or_else(Vec::new, |plan| {
            let tensors = plan.buckets().tensors();
            let of_member = |index: &usize| tensors[*index].len() * tensors[*index].dtype.size_bytes();
            plan.gradients().iter().map(|bucket| bucket.members.iter().map(of_member).sum()).collect()
        });
        let (plan, order) = (self.states.plan(), self.states.parts_order());
        // Those of sharded variables, and those that are reduced by rows, are in no bucket.
        let alone = order.iter().flat_map(|order| order.iter()).chain(plan.iter().flat_map(|plan| plan.rows()));
        let alone: usize = alone.map(|index| of_variable(&variables[*index])).sum();
        // Gradients that are not exchanged are in no bucket either.
        let is_local = self.parameters.local_updates
            && plan.is_none()
            && self.states.first(|state| state.standing.steps > 0) == Some(true);
        let local = variables.iter().filter(|variable| is_local && variable.is_trainable()).map(of_variable);
        let alone = alone + local.sum::<usize>();
        let has_stepped = plan.is_some() || order.is_some() || is_local;
        MemoryReport {
            parameter_bytes: variables.iter().map(of_variable).sum(),
            gradient_bytes: has_stepped.then(|| bucket_bytes.iter().sum::<usize>() + alone),
            bucket_bytes,
            state_bytes: self.library.is_none().then(|| self.state_bytes()),
            local_slot_bytes: self.states.first(|state| state.local.bytes()).unwrap_or(0),
        }
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "parameters {}", Bytes(self.parameter_bytes))?;
        if let Some(gradients) = self.gradient_bytes {
            write!(f, ", gradients {}", Bytes(gradients))?;
            match &self.bucket_bytes[..] {
                [] => {}
                [_] => write!(f, " in 1 bucket")?,
                buckets => {
                    let largest = Bytes(buckets.iter().copied().max().unwrap_or(0));
                    write!(f, " in {} buckets of at most {largest}", buckets.len())?;
                }
            }
        }
        if let Some(state) = self.state_bytes {
            write!(f, ", optimizer state {}", Bytes(state))?;
        }
        match self.local_slot_bytes {
            0 => Ok(()),
            slots => write!(f, ", slots of local updates {}", Bytes(slots)),
        }
    }
}

/// Displays a size in the largest unit of which there is one at least.
struct Bytes(usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..KIB => write!(f, "{} B", self.0),
            KIB..MIB => write!(f, "{:.1} KiB", bytes / KIB as f64),
            MIB..GIB => write!(f, "{:.1} MiB", bytes / MIB as f64),
            _ => write!(f, "{:.1} GiB", bytes / GIB as f64),
        }
    }
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unknown_is_left_out_and_units_fit() {
        let memory = MemoryReport { parameter_bytes: 1023, ..MemoryReport::default() };
        assert_eq!(memory.to_string(), "parameters 1023 B");
        let memory = MemoryReport {
            parameter_bytes: KIB,
            gradient_bytes: Some(3 << 29),
            bucket_bytes: vec![1 << 30, 1 << 29],
            state_bytes: Some(5 << 19),
            local_slot_bytes: 3 * KIB,
        };
        let expected = "parameters 1.0 KiB, gradients 1.5 GiB in 2 buckets of at most 1.0 GiB, \
            optimizer state 2.5 MiB, \
            slots of local updates 3.0 KiB";
        assert_eq!(memory.to_string(), expected);
    }
}

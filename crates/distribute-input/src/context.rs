//! The context of an input function.

use distribute_types::Topology;

use crate::{Error, Result};

/// The description of the pipeline that an input function must create.
///
/// # Source
/// `tf.distribute.InputContext`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputContext {
    /// The number of input pipelines over all workers.
    pub num_input_pipelines: usize,
    /// The index of this pipeline, from 0.
    pub input_pipeline_id: usize,
    /// The number of replicas in sync over all workers.
    pub num_replicas_in_sync: usize,
}

impl InputContext {
    /// Returns the context that an input function of this worker receives.
    pub fn of(topology: &Topology) -> InputContext {
        InputContext {
            num_input_pipelines: topology.workers(),
            input_pipeline_id: topology.worker(),
            num_replicas_in_sync: topology.num_replicas(),
        }
    }

    /// Returns the per-replica batch size for a global batch.
    ///
    /// # Errors
    /// [`Error::NotDivisible`] if the global batch is not a multiple of the number of replicas.
    pub fn per_replica_batch_size(&self, global_batch: usize) -> Result<usize> {
        let replicas = self.num_replicas_in_sync;
        match global_batch.checked_rem(replicas) {
            Some(0) => Ok(global_batch / replicas),
            _ => Err(Error::NotDivisible { global_batch, replicas }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_global_batch_is_divided_by_all_replicas() {
        let context = InputContext::of(&Topology::new(2, 1, 4).unwrap());
        assert_eq!(context, InputContext { num_input_pipelines: 2, input_pipeline_id: 1, num_replicas_in_sync: 8 });
        assert_eq!(context.per_replica_batch_size(64).unwrap(), 8);
        let text = context.per_replica_batch_size(12).unwrap_err().to_string();
        assert!(text.contains("12") && text.contains("multiple of 8"), "{text}");
        let none = InputContext { num_input_pipelines: 1, input_pipeline_id: 0, num_replicas_in_sync: 0 };
        assert!(none.per_replica_batch_size(4).is_err());
    }
}

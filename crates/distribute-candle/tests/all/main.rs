//! All integration tests, in one binary, which is linked once.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod batch_norm;
mod checkpoints;
mod common;
mod diloco;
mod dropout;
mod elastic;
mod embeddings;
mod empty_replicas;
mod failures;
mod layers;
mod local_updates;
mod numbers;
mod optimizers;
mod parameter_servers;
mod preemption;
mod pretrained;
mod recompute;
mod rows;
mod served;
mod sharded;
mod sharded_meshes;
mod sums_of_16_bits;
mod tensor_parallel;
mod trainer;
mod training;
mod worker_replicas;

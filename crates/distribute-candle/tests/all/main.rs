//! All integration tests, in one binary, which is linked once.

mod batch_norm;
mod checkpoints;
mod common;
mod empty_replicas;
mod failures;
mod numbers;
mod optimizers;
mod parameter_servers;
mod pretrained;
mod trainer;
mod training;

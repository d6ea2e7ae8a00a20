//! All integration tests, in one binary, which is linked once.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod burn;
mod burn_sharded;
mod checkpoints;
#[cfg(feature = "data-service")]
mod data_service;
mod derive;
mod digit_files;
mod elastic;
mod estimator;
mod examples;
mod mnist;
mod parameter_servers;
mod pictures;
mod recommender;
mod sequences;
mod settings;

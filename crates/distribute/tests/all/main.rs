//! All integration tests, in one binary, which is linked once.

mod checkpoints;
mod derive;
mod estimator;
mod examples;
mod mnist;
mod parameter_servers;
mod settings;

//! All integration tests, in one binary: each waits for programs most of the time, in which others can run.
#![expect(clippy::unwrap_used, reason = "tests")]

#[cfg(feature = "tls")]
mod certs;
mod data_service;
mod doctor;
mod elastic;
mod hosts;
mod manifest;
mod run;
mod status;
#[cfg(feature = "status")]
mod top;

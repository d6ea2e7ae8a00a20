//! All integration tests but those that count memory, in one binary, which is linked once.
#![cfg(all(unix, feature = "checkpoint"))]
#![expect(clippy::unwrap_used, reason = "tests")]

mod elastic;
#[cfg(feature = "kubeflow")]
mod kubeflow;
#[cfg(feature = "object-store")]
mod object_store;
#[cfg(feature = "status")]
mod status;

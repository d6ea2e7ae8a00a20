//! Functions of the caller that run in stream order.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::{Error, Result};

/// A function of the caller that runs on the host in stream order.
pub type HostFn = Box<dyn FnOnce() -> Result<(), Box<dyn std::error::Error + Send + Sync>> + Send>;

/// Runs a host function and converts a panic to an error.
pub(crate) fn call(function: HostFn) -> Result<()> {
    match catch_unwind(AssertUnwindSafe(function)) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(source)) => Err(Error::HostFunction { source }),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let message = text.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(Error::HostPanic { message: message.unwrap_or_else(|| "(the panic has no message)".to_owned()) })
        }
    }
}

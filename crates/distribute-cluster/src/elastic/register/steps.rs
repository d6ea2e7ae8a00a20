//! The steps of a register's file, of which tests make one the last.

use std::io::Result as IoResult;
use std::path::Path;

/// Outside of tests, nothing is counted.
#[derive(Clone, Debug, Default)]
pub(super) struct Steps {}

impl Steps {
    pub(super) fn before(&self, _: &'static str, _: &Path) -> IoResult<()> {
        Ok(())
    }
}

//! No faults: those of tests are in `faults.rs`.

use std::io;
use std::path::Path;

/// Outside tests, no faults are injected.
#[derive(Clone, Debug, Default)]
pub(super) struct Faults;

impl Faults {
    pub(super) fn before(&self, _: &'static str, _: &Path) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn torn<'a>(&self, _: &'a [u8]) -> Option<&'a [u8]> {
        None
    }

    pub(super) fn spawn(&self) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn exchange(&self) -> io::Result<()> {
        Ok(())
    }
}

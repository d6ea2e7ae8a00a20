//! `distribute certs` in a build without TLS: an error in words.

use std::convert::Infallible;
use std::path::{Path, PathBuf};

use crate::args::Certs;
use crate::error::Error;

/// Fails.
///
/// # Errors
/// [`Error::Certificates`].
pub(crate) fn run(args: &Certs) -> Result<String, Error> {
    Err(absent(format!("{:?}", args.command)))
}

/// An authority that ends with a job; there is none in this build.
#[derive(Debug)]
pub(crate) struct Ephemeral(Infallible);

impl Ephemeral {
    /// Fails.
    ///
    /// # Errors
    /// [`Error::Certificates`].
    pub(crate) fn create(_: &Path) -> Result<Ephemeral, Error> {
        Err(absent("--tls".to_owned()))
    }

    pub(crate) fn issue(&self, _: &str) -> Result<[(&'static str, PathBuf); 3], Error> {
        match self.0 {}
    }
}

fn absent(given: String) -> Error {
    Error::Certificates {
        problem: "this program is built without TLS".to_owned(),
        given,
        remedy: "build it with the cargo feature `tls`",
    }
}

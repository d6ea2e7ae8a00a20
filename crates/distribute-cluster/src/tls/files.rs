//! Reading of certificates and keys.

use std::fs::{self, Metadata};
use std::path::Path;
use std::time::SystemTime;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use super::TlsFiles;
use crate::bounded_file::{self, Unread};
use crate::{Error, Result};

/// The time, length and number of a file, by which a change is noticed without reading it. A file that was renamed over
/// another one has another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp(Option<SystemTime>, u64, u64);

/// The stamps of all files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamps([Option<Stamp>; 3]);

impl Stamps {
    pub(super) fn of(files: &TlsFiles) -> Stamps {
        let stamp = |path: &Path| {
            let metadata = fs::metadata(path).ok()?;
            Some(Stamp(metadata.modified().ok(), metadata.len(), number(&metadata)))
        };
        Stamps([&files.authority, &files.certificate, &files.key].map(|path| stamp(path)))
    }
}

#[cfg(unix)]
fn number(metadata: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

#[cfg(not(unix))]
fn number(_: &Metadata) -> u64 {
    0
}

/// The contents of the files.
pub(super) struct Contents {
    pub(super) authority: Vec<CertificateDer<'static>>,
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
}

impl Contents {
    /// Reads all files.
    ///
    /// # Errors
    /// [`Error::Config`] if one cannot be read, is too long or holds something else, or if others than its owner can
    /// read or change the key.
    pub(super) fn read(files: &TlsFiles) -> Result<Contents> {
        let authority = certificates(AUTHORITY, &files.authority)?;
        let chain = certificates(CERTIFICATE, &files.certificate)?;
        let subject = "the private key (DISTRIBUTE_TLS_KEY)";
        let bytes = bounded(subject, &files.key, true)?;
        let key = PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| {
            wrong(subject, &files.key, error.to_string(), "a private key in PEM, not encrypted", ISSUE)
        })?;
        Ok(Contents { authority, chain, key })
    }
}

fn certificates(subject: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = bounded(subject, path, false)?;
    let expected = "certificates in PEM";
    let found: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&bytes)
        .collect::<Result<_, _>>()
        .map_err(|error| wrong(subject, path, error.to_string(), expected, ISSUE))?;
    match found.len() {
        1..=MAX_CERTIFICATES => Ok(found),
        0 => Err(wrong(subject, path, "there is no certificate in it".to_owned(), expected, ISSUE)),
        many => Err(wrong(subject, path, format!("there are {many} certificates in it"), "at most 32", ISSUE)),
    }
}

/// Reads a file of bounded length; one that is private is refused if others can read or change it.
fn bounded(subject: &'static str, path: &Path, private: bool) -> Result<Zeroizing<Vec<u8>>> {
    let bytes = bounded_file::read(path, MAX_BYTES + 1, private).map_err(|unread| {
        let (expected, remedy) = match unread {
            Unread::Io(_) => ("a file that can be read", "Correct the path, or create the file."),
            Unread::NotAFile => ("a file", "Give the path of a file."),
            Unread::NotPrivate(_) => (
                "a file that only its owner can read",
                "Run `chmod 600` on it, and issue another certificate if others may have read it.",
            ),
        };
        wrong(subject, path, unread.to_string(), expected, remedy)
    })?;
    match bytes.len() > MAX_BYTES {
        true => Err(wrong(subject, path, "it is too long".to_owned(), "at most 256 KiB", ISSUE)),
        false => Ok(bytes),
    }
}

pub(super) fn wrong(subject: &'static str, path: &Path, problem: String, expected: &str, remedy: &str) -> Error {
    Error::config(subject, problem, path.to_string_lossy(), expected, remedy)
}

/// The subjects of errors.
pub(super) const AUTHORITY: &str = "the authority's certificates (DISTRIBUTE_TLS_CA)";
pub(super) const CERTIFICATE: &str = "the certificate (DISTRIBUTE_TLS_CERT)";

/// The remedy of a file that cannot be used.
pub(super) const ISSUE: &str = "Issue it again, such as by `distribute certs issue`.";

/// Size limit of a file.
const MAX_BYTES: usize = 256 * 1024;

/// The largest number of certificates in a file.
const MAX_CERTIFICATES: usize = 32;

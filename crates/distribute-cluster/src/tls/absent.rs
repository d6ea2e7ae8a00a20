//! The types of TLS in a build without it: no value of them exists.

use std::io::{IoSlice, Read, Result as IoResult, Write};

use super::{TlsFiles, TlsProblem};
use crate::{Error, Result, environment};

/// The certificate of this process; there is none without the cargo feature `tls`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobTls {}

impl JobTls {
    /// Returns `None`, because this program is built without TLS.
    ///
    /// # Errors
    /// [`Error::Config`] if variables ask for TLS.
    pub fn from_env() -> Result<Option<JobTls>> {
        environment::read(|variable| JobTls::from_vars(variable))
    }

    /// Reads the variables like [`from_env`](JobTls::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`], as for [`from_env`](JobTls::from_env).
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Option<JobTls>> {
        match TlsFiles::from_vars(variable)? {
            None => Ok(None),
            Some(files) => JobTls::open(files).map(Some),
        }
    }

    /// Fails, because this program is built without TLS.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn open(files: TlsFiles) -> Result<JobTls> {
        Err(Error::config(
            "TLS",
            "certificates are given, and this program is built without TLS",
            files.certificate.to_string_lossy(),
            "the cargo feature `tls`",
            "Build it with the feature, or unset DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY.",
        ))
    }

    /// Returns the files of the certificate.
    pub fn files(&self) -> &TlsFiles {
        match *self {}
    }

    /// Verifies this process's own certificate.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn check(&self) -> Result<()> {
        match *self {}
    }
}

/// One side of a connection; there is none without the cargo feature `tls`.
#[derive(Debug)]
pub enum Session {}

impl Session {
    /// Begins the handshake of a caller.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn calling(tls: &JobTls) -> Result<Session, TlsProblem> {
        match *tls {}
    }

    /// Begins the handshake of a listener.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn listening(tls: &JobTls) -> Result<Session, TlsProblem> {
        match *tls {}
    }

    /// Returns whether the handshake is over.
    pub fn is_open(&self) -> bool {
        match *self {}
    }

    /// Returns whether the other side has begun a handshake in earnest: its first message was whole.
    pub fn has_begun(&self) -> bool {
        match *self {}
    }

    /// Returns bytes that only the two sides of this connection can know.
    pub fn binding(&self) -> [u8; 32] {
        match *self {}
    }

    /// Returns whether encrypted bytes wait to be sent.
    pub fn wants_write(&self) -> bool {
        match *self {}
    }

    /// Continues the handshake.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn advance<S: Read + Write>(&mut self, _: &mut S) -> IoResult<bool> {
        match *self {}
    }

    /// Reads what the other side has sent.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn read<S: Read + Write>(&mut self, _: &mut S, _: &mut [u8]) -> IoResult<usize> {
        match *self {}
    }

    /// Encrypts and sends bytes.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn write<S: Write>(&mut self, _: &mut S, _: &[IoSlice<'_>]) -> IoResult<usize> {
        match *self {}
    }

    /// Sends encrypted bytes that wait.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn flush<S: Write>(&mut self, _: &mut S) -> IoResult<()> {
        match *self {}
    }

    /// Tells the other side that nothing more comes.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn close<S: Write>(&mut self, _: &mut S) -> IoResult<()> {
        match *self {}
    }
}

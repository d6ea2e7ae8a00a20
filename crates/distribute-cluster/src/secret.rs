//! The secret of a job, by which its processes prove to each other that they belong to it.
//!
//! The process that opens a connection and the one that accepts it exchange fresh random challenges, and each proves
//! that it knows the secret without sending it: [`Calling`] and [`Listening`] are the two sides of that exchange,
//! without sockets. Nothing that a peer says is used before it has proved the secret. What follows on the connection is
//! neither encrypted nor protected against changes: that needs [TLS](crate::tls), inside of which the exchange runs
//! then, or a private network.

use std::fmt;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use hmac::digest::FixedOutput;
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use crate::bounded_file::{self, Unread};
use crate::{Error, Result, environment};

#[cfg(feature = "coordination")]
mod call;
mod exposure;
mod handshake;
mod problem;
mod refusals;

#[cfg(feature = "coordination")]
pub(crate) use call::identify;
pub use exposure::{exposed_address, warn_if_exposed};
pub use handshake::{Calling, Event, Listening, Terms};
pub use problem::Problem;
pub use refusals::Refusals;

/// The secret of a job: the same bytes in all of its processes.
///
/// A process with a secret refuses connections that do not prove the same one, and connects to none that does not.
/// Its bytes are not printed, and are overwritten when the last clone is dropped. Recorded proofs allow guesses of the
/// secret to be tried offline, so it must be random, such as the output of `openssl rand -hex 32`.
///
/// # Examples
/// ```
/// use distribute_cluster::JobSecret;
/// let secret = JobSecret::new("9b1c5f0a7be24c0d8f3e")?;
/// assert_eq!(format!("{secret:?}"), "JobSecret(..)");
/// assert!(JobSecret::new("too short").is_err());
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
#[derive(Clone)]
pub struct JobSecret(Arc<Zeroizing<[u8; KEY_BYTES]>>);

impl JobSecret {
    /// The fewest bytes of a secret.
    pub const MIN_BYTES: usize = 16;

    /// The most bytes of a secret.
    pub const MAX_BYTES: usize = 4096;

    /// Creates a secret from its bytes.
    ///
    /// # Errors
    /// [`Error::Config`] for fewer than [`MIN_BYTES`](JobSecret::MIN_BYTES) or more than
    /// [`MAX_BYTES`](JobSecret::MAX_BYTES) bytes.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<JobSecret> {
        JobSecret::checked("the job secret", bytes.as_ref())
    }

    /// Returns the secret that DISTRIBUTE_JOB_SECRET_FILE or DISTRIBUTE_JOB_SECRET gives, or `None` if neither is set.
    ///
    /// # Errors
    /// [`Error::Config`] if both are set, if the secret is too short or too long, or if the file cannot be read or can
    /// be read or changed by others than its owner.
    pub fn from_env() -> Result<Option<JobSecret>> {
        environment::read(|variable| JobSecret::from_vars(variable))
    }

    /// Reads the secret like [`from_env`](JobSecret::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`], as for [`from_env`](JobSecret::from_env).
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Option<JobSecret>> {
        JobSecret::from_named_vars(JOB_VARIABLES, variable)
    }

    /// Reads the secret of a data service, from DISTRIBUTE_DATA_SERVICE_SECRET_FILE or DISTRIBUTE_DATA_SERVICE_SECRET.
    /// It is not that of a job, because several jobs may read from one service.
    ///
    /// # Errors
    /// [`Error::Config`], as for [`from_env`](JobSecret::from_env).
    pub fn of_data_service() -> Result<Option<JobSecret>> {
        environment::read(|variable| JobSecret::from_named_vars(DATA_SERVICE_VARIABLES, variable))
    }

    /// Reads a secret from a file: its bytes without a newline at the end.
    ///
    /// # Errors
    /// [`Error::Config`] if the file cannot be read, can be read or changed by others than its owner, or if the secret
    /// is too short or too long.
    pub fn from_file(path: impl AsRef<Path>) -> Result<JobSecret> {
        JobSecret::read("the file of the job secret", path.as_ref())
    }

    /// Draws a random secret and writes it to a new file that only its owner can read.
    ///
    /// # Errors
    /// [`Error::Random`] if the system returns no random numbers, [`Error::Config`] if the file exists or cannot be
    /// written.
    pub fn create_file(path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut drawn = Zeroizing::new([0; DRAWN_BYTES]);
        getrandom::fill(&mut *drawn).map_err(|error| Error::Random(error.to_string()))?;
        let mut text = Zeroizing::new([0; 2 * DRAWN_BYTES]);
        for (byte, digits) in drawn.iter().zip(text.chunks_exact_mut(2)) {
            digits.copy_from_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let written = options.open(path).and_then(|mut file| {
            file.write_all(&*text)?;
            file.write_all(b"\n")
        });
        written.map_err(|error| {
            let given = path.to_string_lossy();
            let remedy = "Make its folder writable, or give the secret by DISTRIBUTE_JOB_SECRET_FILE.";
            Error::config("the file of the job secret", error.to_string(), given, "a new file", remedy)
        })
    }

    fn from_named_vars(names: Variables, variable: impl Fn(&str) -> Option<String>) -> Result<Option<JobSecret>> {
        let variable = environment::set(&variable);
        match (variable(names.file), variable(names.text).map(Zeroizing::new)) {
            (None, None) => Ok(None),
            (Some(path), None) => JobSecret::read(names.file, Path::new(path.trim())).map(Some),
            (None, Some(text)) => JobSecret::checked(names.text, text.as_bytes()).map(Some),
            (Some(path), Some(_)) => {
                let problem = format!("{} is set, too", names.text);
                Err(Error::config(names.file, problem, path, "one of the two", "Unset one of them."))
            }
        }
    }

    fn read(subject: &'static str, path: &Path) -> Result<JobSecret> {
        // Enough for the longest secret with the end of its line, and for one byte too many.
        let bytes = bounded_file::read(path, JobSecret::MAX_BYTES + 3, true).map_err(|unread| {
            let expected = "a file of 16 bytes to 4 KiB that only its owner can read";
            let remedy = match unread {
                Unread::Io(_) => "Correct the path, or create the file.",
                Unread::NotAFile => "Give the path of a file.",
                Unread::NotPrivate(_) => "Run `chmod 600` on it, and use another secret if others may have read it.",
            };
            Error::config(subject, unread.to_string(), path.to_string_lossy(), expected, remedy)
        })?;
        JobSecret::checked(subject, &bytes)
    }

    fn checked(subject: &'static str, bytes: &[u8]) -> Result<JobSecret> {
        let bytes = bytes.strip_suffix(b"\n").map_or(bytes, |bytes| bytes.strip_suffix(b"\r").unwrap_or(bytes));
        let problem = match bytes.len() {
            len if len < JobSecret::MIN_BYTES => format!("the secret has {len} bytes only"),
            len if len > JobSecret::MAX_BYTES => format!("the secret has more than {} bytes", JobSecret::MAX_BYTES),
            _ => return Ok(JobSecret::of(bytes)),
        };
        let remedy = "Draw one by `openssl rand -hex 32`.";
        Err(Error::config(subject, problem, "a secret, which is not shown", "16 to 4096 bytes", remedy))
    }

    /// Derives the key of HMAC from the secret's bytes: padded with zeros, or hashed first if they exceed a block.
    fn of(bytes: &[u8]) -> JobSecret {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        match key.get_mut(..bytes.len()) {
            Some(start) => start.copy_from_slice(bytes),
            None => key[..PROOF_BYTES].copy_from_slice(&Sha256::digest(bytes)),
        }
        JobSecret(Arc::new(key))
    }

    /// Returns the authentication code of these fields, each of which is preceded by its length.
    fn code(&self, fields: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.mac(fields).finalize_fixed().into()
    }

    /// Compares the authentication code of these fields in constant time.
    fn verifies(&self, fields: &[&[u8]], code: &[u8]) -> bool {
        self.mac(fields).verify_slice(code).is_ok()
    }

    fn mac(&self, fields: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = <Hmac<Sha256> as hmac::digest::KeyInit>::new((&**self.0).into());
        for field in fields {
            mac.update(&(field.len() as u64).to_be_bytes());
            mac.update(field);
        }
        mac
    }
}

impl PartialEq for JobSecret {
    fn eq(&self, other: &JobSecret) -> bool {
        const SAME: &[&[u8]] = &[b"distribute: the same secret"];
        self.verifies(SAME, &other.code(SAME))
    }
}

impl Eq for JobSecret {}

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret(..)")
    }
}

/// Returns whether a variable holds a secret, so that its value must not be shown.
pub(crate) fn is_secret(variable: &str) -> bool {
    [JOB_VARIABLES, DATA_SERVICE_VARIABLES].iter().any(|names| names.text == variable)
}

/// The remedy of a missing or wrong secret of a job.
pub const JOB_REMEDY: &str =
    "set DISTRIBUTE_JOB_SECRET_FILE, or DISTRIBUTE_JOB_SECRET, to the same secret for every process of the job";

/// The remedy of a missing or wrong secret of a data service.
pub const DATA_SERVICE_REMEDY: &str = "set DISTRIBUTE_DATA_SERVICE_SECRET_FILE, or DISTRIBUTE_DATA_SERVICE_SECRET, to \
                                       the same secret for the dispatcher, the data workers and the training program";

/// The variables that give a secret: the path of a file, or the text itself.
#[derive(Clone, Copy)]
struct Variables {
    file: &'static str,
    text: &'static str,
}

const JOB_VARIABLES: Variables = Variables { file: "DISTRIBUTE_JOB_SECRET_FILE", text: "DISTRIBUTE_JOB_SECRET" };

const DATA_SERVICE_VARIABLES: Variables =
    Variables { file: "DISTRIBUTE_DATA_SERVICE_SECRET_FILE", text: "DISTRIBUTE_DATA_SERVICE_SECRET" };

/// The size of a block of SHA-256, which is that of HMAC's key.
const KEY_BYTES: usize = 64;

/// The size of an authentication code.
const PROOF_BYTES: usize = 32;

/// The bytes of a secret that is drawn, each of which is written as two digits.
const DRAWN_BYTES: usize = 32;

const HEX: &[u8; 16] = b"0123456789abcdef";

#[cfg(test)]
mod tests;

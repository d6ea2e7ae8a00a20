//! Objects in stores that clusters share, by blocking calls: `s3://`, `gs://` and `az://` (by the crate
//! `object_store`), and `memory://` for tests.
//!
//! The crate knows nothing of checkpoints or datasets. Requests run on a small runtime of their own; every call returns
//! by a deadline, and repeats what a lost connection has interrupted.
//!
//! - [`Place`]: a path or URL as a program gives it: in the file system (also as `file://`), or in a store.
//! - [`Location`]: an object, or a folder of objects: read, write, create, list, copy, delete.
//! - [`Upload`]: an object in parts, which appears only when it is complete.
//! - [`ObjectReader`]: an object as [`std::io::Read`] and [`std::io::Seek`], read ahead.
//! - [`Cache`]: copies of objects in a local folder of limited size.
//!
//! Settings and credentials come from the environment, as `object_store` reads them: `AWS_*`, `GOOGLE_*`, `AZURE_*`.
//!
//! # Examples
//! ```
//! use distribute_storage::Location;
//!
//! let folder = Location::open("memory://example/run")?;        // or s3://bucket/run
//! folder.join("notes.txt").write("step 1")?;
//! assert_eq!(folder.join("notes.txt").read(100)?, "step 1");
//! assert_eq!(folder.list()?[0].name, "notes.txt");
//! # Ok::<(), distribute_storage::Error>(())
//! ```
//!
//! # Invariants
//! - An object is replaced as a whole: a reader sees the earlier content or the later one.
//! - Errors and `Debug` name URLs, codes and remedies, never a credential.

mod cache;
mod client;
mod connect;
mod environment;
mod error;
mod location;
#[cfg(test)]
mod odd;
mod place;
mod reader;
mod runtime;
mod upload;

pub use cache::{Cache, Cached};
pub use error::{Error, Result};
pub use location::{Listed, Location, Meta};
pub use place::{Place, is_url};
pub use reader::ObjectReader;
pub use upload::{PART_BYTES, Upload};

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

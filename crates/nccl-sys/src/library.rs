//! An open NCCL.
#![expect(unsafe_code, reason = "a C library is opened, and its functions are called")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use crate::functions::{Functions, since};
use crate::{Attempt, Code, Error, Problem, Search, UniqueId, Version};

macro_rules! call {
    ($library:expr, $function:ident($($argument:expr),*)) => {{
        const NAME: &str = stringify!($function);
        let function = $library.find($library.functions().$function, NAME)?;
        // SAFETY: the enclosing method's own contract is what NCCL asks of these arguments.
        let code = unsafe { function($($argument),*) };
        $library.check(NAME, code)
    }};
}

mod collectives;
mod comms;
mod groups;
mod memory;

/// An opaque communicator of NCCL.
#[derive(Debug)]
#[repr(C)]
pub struct NcclComm {
    opaque: [u8; 0],
}

/// `ncclComm_t`: a communicator, or null.
pub type Comm = *mut NcclComm;

/// `cudaStream_t`, which is the same as the driver's `CUstream`; null for the default stream.
pub type Stream = *mut c_void;

/// The progress of a call that succeeded.
#[must_use = "a non-blocking communicator may still be at it"]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The call is complete. Operations on a stream are enqueued, not finished.
    Done,
    /// The communicator is non-blocking and the call is in progress: until
    /// [`comm_async_error`](Library::comm_async_error) no longer returns [`Code::IN_PROGRESS`], only it and
    /// [`comm_abort`](Library::comm_abort) may be called.
    InProgress,
}

/// An open NCCL. Clones are cheap and refer to the same library.
///
/// NCCL is never unloaded, since its threads may still be running after the last communicator is destroyed.
///
/// # Safety
/// Each `unsafe` method is one C call. NCCL requires for all of them:
/// - a communicator was created by this library and is neither destroyed nor aborted, or is null where NCCL permits
///   that; threads do not use it concurrently, except by `comm_async_error` and `comm_abort`;
/// - buffers are in memory that the communicator's device can access, hold as many elements as the operation reads or
///   writes, and live until the stream has completed the operation;
/// - within a group, pointers stay valid until [`group_end`](Library::group_end) has returned; for a non-blocking
///   communicator, until it is no longer in progress;
/// - the current CUDA device is the communicator's.
#[derive(Clone)]
pub struct Library {
    inner: Arc<Inner>,
}

struct Inner {
    functions: Functions,
    version: Version,
    path: PathBuf,
}

impl Library {
    /// Opens NCCL from the default places; see [`Search`].
    ///
    /// # Errors
    /// [`Error::NotFound`] with every file tried, if none is usable: install NCCL, or name its file.
    pub fn load() -> Result<Self, Error> {
        Self::open(&Search::new())
    }

    /// Opens the first NCCL of at least [`Version::OLDEST`] that the search finds.
    ///
    /// The files are trusted: their initialisers run, and symbols with the names of NCCL's functions are assumed to be
    /// those.
    ///
    /// # Errors
    /// [`Error::NotFound`] with every file tried, if none is usable: install NCCL, or name its file.
    pub fn open(search: &Search) -> Result<Self, Error> {
        let plan = search.plan();
        let mut attempts = Vec::new();
        for place in &plan.places {
            let files = place.files();
            if files.is_empty() {
                attempts.push(Attempt { file: place.pattern(), problem: Problem::NoSuchFile });
            }
            for file in files {
                match Inner::open(&file) {
                    Ok(inner) => return Ok(Self { inner: Arc::new(inner) }),
                    Err(problem) => attempts.push(Attempt { file, problem }),
                }
            }
        }
        Err(Error::NotFound { named_by: plan.named_by, attempts })
    }

    /// Returns the library's version, as reported when it was opened.
    #[must_use]
    pub fn version(&self) -> Version {
        self.inner.version
    }

    /// Returns the library's file, as found by the system's loader.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Returns whether the library has a function with the given C name; false for functions that this crate does not
    /// bind.
    ///
    /// # Examples
    /// ```no_run
    /// # let nccl = nccl_sys::Library::load()?;
    /// if nccl.has("ncclAlltoAll") { /* otherwise send and receive in a group */ }
    /// # Ok::<(), nccl_sys::Error>(())
    /// ```
    #[must_use]
    pub fn has(&self, function: &str) -> bool {
        self.functions().has(function).unwrap_or(false)
    }

    /// Calls `ncclGetErrorString`: returns NCCL's description of a code.
    #[must_use]
    pub fn error_string(&self, code: Code) -> String {
        let Some(function) = self.functions().ncclGetErrorString else { return String::new() };
        // SAFETY: any integer may be passed.
        let text = unsafe { function(code) };
        // SAFETY: the answer is a constant of the library, which is never unloaded, or null.
        unsafe { owned(text) }
    }

    /// Calls `ncclGetLastError`: returns NCCL's message about the last failure in this process, or `None` if there was
    /// none.
    ///
    /// The message is shared by all communicators and threads of the process, and kept by calls that succeed.
    #[must_use]
    pub fn last_error(&self) -> Option<String> {
        let function = self.functions().ncclGetLastError?;
        // SAFETY: NCCL does not read the communicator, which may be null.
        let text = unsafe { function(ptr::null_mut()) };
        // SAFETY: the answer is a buffer of the library that is always zero-terminated; a failure on another thread may
        // garble it.
        let text = unsafe { owned(text) };
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// Calls `ncclGetUniqueId`: creates an id by which ranks meet, to be sent to all of them. The calling process must
    /// live until they have met.
    ///
    /// # Errors
    /// [`Error::Call`] if there is no network interface to meet on (`NCCL_SOCKET_IFNAME` selects it).
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId::from_bytes([0; UniqueId::BYTES]);
        let _: Progress = call!(self, ncclGetUniqueId(&mut id))?;
        Ok(id)
    }

    fn functions(&self) -> &Functions {
        &self.inner.functions
    }

    fn find<F>(&self, function: Option<F>, name: &'static str) -> Result<F, Error> {
        function.ok_or_else(|| Error::Missing {
            function: name,
            since: since(name),
            found: self.version(),
            path: self.path().to_owned(),
        })
    }

    fn check(&self, function: &'static str, code: Code) -> Result<Progress, Error> {
        match code {
            Code::SUCCESS => Ok(Progress::Done),
            Code::IN_PROGRESS => Ok(Progress::InProgress),
            code => Err(self.error(function, code)),
        }
    }

    /// Returns the error for a code that `function` returned, or that [`comm_async_error`](Self::comm_async_error)
    /// reported.
    #[must_use]
    pub fn error(&self, function: &'static str, code: Code) -> Error {
        Error::Call {
            function,
            code,
            name: code.name(self.version()),
            text: self.error_string(code),
            last: self.last_error(),
        }
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("version", &self.version()).field("path", &self.path()).finish()
    }
}

impl Inner {
    fn open(file: &Path) -> Result<Self, Problem> {
        // SAFETY: the file is trusted, as `Library::open` documents.
        let library =
            unsafe { libloading::Library::new(file) }.map_err(|error| Problem::Loader(loader_words(&error)))?;
        let functions = Functions::of(&library);
        let version = functions.ncclGetVersion.ok_or(Problem::NotNccl)?;
        let mut number: c_int = 0;
        // SAFETY: NCCL writes an integer to the address.
        match unsafe { version(&mut number) } {
            Code::SUCCESS => {}
            code => return Err(Problem::NoVersion(code)),
        }
        let found = Version::from_code(number);
        if found < Version::OLDEST {
            return Err(Problem::TooOld(found));
        }
        // Not unloaded: its threads may run for as long as the process lives.
        let _ = ManuallyDrop::new(library);
        Ok(Self {
            functions,
            version: found,
            path: file_of(version as *const c_void).unwrap_or_else(|| file.to_owned()),
        })
    }
}

fn loader_words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the file that an address was loaded from.
#[cfg(unix)]
fn file_of(address: *const c_void) -> Option<PathBuf> {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let mut info = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: any address may be passed; the answer goes to `info`.
    let known = unsafe { libc::dladdr(address, &mut info) } != 0;
    if !known || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name belongs to the loaded library, which is never unloaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

#[cfg(not(unix))]
fn file_of(_: *const c_void) -> Option<PathBuf> {
    None
}

/// Copies a C string; null becomes an empty string.
///
/// # Safety
/// The text is null, or is zero-terminated and valid during the call.
unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: guaranteed by the caller.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;

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

/// A communicator of NCCL: nothing is known of it but its address.
#[derive(Debug)]
#[repr(C)]
pub struct NcclComm {
    opaque: [u8; 0],
}

/// `ncclComm_t`: a communicator, or null.
pub type Comm = *mut NcclComm;

/// `cudaStream_t`, which is the same as the driver's `CUstream`; null for the default stream.
pub type Stream = *mut c_void;

/// How far a call that succeeded has come.
#[must_use = "a non-blocking communicator may still be at it"]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The call has done all that it does. Operations on a stream are enqueued, not finished.
    Done,
    /// The communicator is non-blocking and still at it: nothing else may be asked of it but
    /// [`comm_async_error`](Library::comm_async_error), until that is no longer [`Code::IN_PROGRESS`], and
    /// [`comm_abort`](Library::comm_abort).
    InProgress,
}

/// An open NCCL. Clones are cheap and stand for the same library.
///
/// NCCL is never unloaded again, as threads of its own may still run in it when the last communicator is gone.
///
/// # Safety
/// The `unsafe` methods are one call of C each. What NCCL asks of every one of them:
/// - a communicator is one that this library has made and that is neither destroyed nor aborted, or null where NCCL says so;
///   several threads do not use one at a time, but for `comm_async_error` and `comm_abort`;
/// - buffers lie in memory that the communicator's device reaches, hold as many elements as the operation reads or writes,
///   and stay until the stream has passed the operation;
/// - within a group, what pointers point to stays until [`group_end`](Library::group_end) has returned; for a non-blocking
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
    /// Opens NCCL from the usual places; see [`Search`] for them.
    ///
    /// # Errors
    /// [`Error::NotFound`] with every file tried: install NCCL, or name its file.
    pub fn load() -> Result<Self, Error> {
        Self::open(&Search::new())
    }

    /// Opens the first NCCL of at least [`Version::OLDEST`] that the search finds.
    ///
    /// The files are trusted: their initialisers run, and what has the names of NCCL's functions is taken for them.
    ///
    /// # Errors
    /// [`Error::NotFound`] with every file tried: install NCCL, or name its file.
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

    /// The library's version, as it told when it was opened.
    #[must_use]
    pub fn version(&self) -> Version {
        self.inner.version
    }

    /// The library's file, as the system's loader has found it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Whether the library has a function, by its C name; false also for one that this crate does not bind.
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

    /// `ncclGetErrorString`: NCCL's sentence about a code.
    #[must_use]
    pub fn error_string(&self, code: Code) -> String {
        let Some(function) = self.functions().ncclGetErrorString else { return String::new() };
        // SAFETY: every integer may be asked about.
        let text = unsafe { function(code) };
        // SAFETY: the answer is a constant of the library, which is never unloaded, or null.
        unsafe { owned(text) }
    }

    /// `ncclGetLastError`: NCCL's words about the last failure in this process, `None` where there was none.
    ///
    /// They are one text for the whole process, whatever the communicator or thread, and stay after calls that succeed.
    #[must_use]
    pub fn last_error(&self) -> Option<String> {
        let function = self.functions().ncclGetLastError?;
        // SAFETY: NCCL does not read the communicator, which may be null.
        let text = unsafe { function(ptr::null_mut()) };
        // SAFETY: the answer is a buffer of the library that always has a final zero; another thread's failure may garble it.
        let text = unsafe { owned(text) };
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// `ncclGetUniqueId`: a name under which ranks meet, to be carried to all of them. The calling process must live until
    /// they have met.
    ///
    /// # Errors
    /// [`Error::Call`] where there is no network interface to meet on (`NCCL_SOCKET_IFNAME` chooses it).
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

    /// The error of a code that `function` returned, or that [`comm_async_error`](Self::comm_async_error) told.
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
        // SAFETY: the file is trusted, as `Library::open` says.
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
        // Its threads may run in it for as long as the process lives.
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

/// The file that an address was loaded from.
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
    // SAFETY: any address may be asked about; the answer goes to `info`.
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

/// # Safety
/// The text is null, or ends in zero and stays during the call.
unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as this function asks.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;

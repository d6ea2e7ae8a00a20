//! An open plugin.
#![expect(unsafe_code, reason = "a C library is opened, and its functions are called")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::{ManuallyDrop, transmute};
use std::path::{Path, PathBuf};
use std::ptr;
use std::slice;
use std::sync::Arc;

use crate::search::is_libtpu;
use crate::{
    Arguments, Attempt, Code, Error, ErrorDestroyArgs, ErrorGetCodeArgs, ErrorMessageArgs, Function, PjrtError,
    Problem, Search, Version,
};

/// The place of the first function in the table, in bytes: the table's size, its extensions and its version are before
/// it.
pub const TABLE_START: usize = 40;

/// The bytes of a table with the functions for errors.
pub(crate) const LEAST_TABLE: usize = TABLE_START + 3 * size_of::<usize>();

/// Any function of the table but the two that return nothing. Pointers to arguments of all types are passed alike.
type Entry = unsafe extern "C" fn(*mut c_void) -> *mut PjrtError;

/// `PJRT_Error_Destroy` and `PJRT_Error_Message`.
type EntryWithoutResult = unsafe extern "C" fn(*mut c_void);

/// An open plugin. Clones are cheap and refer to the same plugin.
///
/// A plugin is never unloaded, since its threads may still be running after the last client is destroyed.
#[derive(Clone)]
pub struct Library {
    inner: Arc<Inner>,
}

struct Inner {
    entries: [Option<Entry>; Function::ALL.len()],
    destroy: EntryWithoutResult,
    message: EntryWithoutResult,
    get_code: Entry,
    table_bytes: usize,
    version: Version,
    path: PathBuf,
}

impl Library {
    /// Opens the first usable plugin that the search finds. The plugin is not initialised.
    ///
    /// The files are trusted: their initialisers run, and a function `GetPjrtApi` is assumed to be PJRT's.
    ///
    /// # Errors
    /// [`Error::NotFound`] with every file tried, if none is usable: install a plugin, or name its file.
    pub fn open(search: &Search) -> Result<Self, Error> {
        let plan = search.plan();
        let mut attempts = Vec::new();
        for place in &plan.places {
            let files = place.files();
            if files.is_empty() {
                attempts.push(Attempt { file: place.pattern(), problem: Problem::NoSuchFile });
            }
            for file in files {
                match Inner::open(&file, search) {
                    Ok(inner) => return Ok(Self { inner: Arc::new(inner) }),
                    Err(problem) => attempts.push(Attempt { file, problem }),
                }
            }
        }
        Err(Error::NotFound { named_by: plan.named_by, attempts })
    }

    /// Returns the version of the interface that the plugin implements.
    #[must_use]
    pub fn version(&self) -> Version {
        self.inner.version
    }

    /// Returns the plugin's file, as found by the system's loader.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Returns whether the plugin has a function.
    #[must_use]
    pub fn has(&self, function: Function) -> bool {
        self.inner.entries[function.index()].is_some()
    }

    /// Calls the function of these arguments, with their `struct_size` set.
    ///
    /// # Errors
    /// [`Error::Missing`] if the plugin lacks the function; [`Error::Call`] if it returns an error, which is destroyed.
    ///
    /// # Safety
    /// - Pointers of the arguments are null where the header permits that, or point to what the header says, for as
    ///   long as it says; objects were created by this plugin and are not destroyed.
    /// - The plugin was initialised, except for `PJRT_Plugin_Initialize`.
    pub unsafe fn call<A: Arguments>(&self, arguments: &mut A) -> Result<(), Error> {
        let function = A::FUNCTION;
        let entry = self.inner.entries[function.index()].ok_or_else(|| self.missing(function))?;
        let arguments = ptr::from_mut(arguments);
        // SAFETY: the trait promises that the struct begins with its size.
        unsafe { arguments.cast::<usize>().write(A::STRUCT_SIZE) };
        if function == Function::PJRT_Error_Destroy || function == Function::PJRT_Error_Message {
            // SAFETY: these two return nothing; a pointer to a function may have any type while it is not called.
            let entry = unsafe { transmute::<Entry, EntryWithoutResult>(entry) };
            // SAFETY: the caller's contract is what PJRT asks of these arguments.
            unsafe { entry(arguments.cast()) };
            return Ok(());
        }
        // SAFETY: as above.
        let error = unsafe { entry(arguments.cast()) };
        // SAFETY: an error that a call returns is its caller's.
        unsafe { self.check(function, error) }
    }

    /// Turns an error that a function returned, or that a callback was given, into a value, and destroys it. Null is
    /// success.
    ///
    /// # Errors
    /// [`Error::Call`] with the code and the text of an error that is not null.
    ///
    /// # Safety
    /// The error is null, or was made by this plugin and is not destroyed; the caller owns it.
    pub unsafe fn check(&self, function: Function, error: *mut PjrtError) -> Result<(), Error> {
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: the error is valid, as the caller promises.
        let text = unsafe { self.text(error) };
        let mut get = ErrorGetCodeArgs { error, ..ErrorGetCodeArgs::new() };
        // SAFETY: as above.
        let failed = unsafe { (self.inner.get_code)(ptr::from_mut(&mut get).cast()) };
        let code = if failed.is_null() { get.code } else { Code::UNKNOWN };
        for error in [failed, error] {
            let mut destroy = ErrorDestroyArgs { error, ..ErrorDestroyArgs::new() };
            // SAFETY: null may be destroyed; the other is the caller's, who no longer uses it.
            unsafe { (self.inner.destroy)(ptr::from_mut(&mut destroy).cast()) };
        }
        Err(Error::Call { function: function.name(), code, text })
    }

    /// Copies the text of an error.
    ///
    /// # Safety
    /// The error is valid.
    unsafe fn text(&self, error: *mut PjrtError) -> String {
        let mut message = ErrorMessageArgs { error, ..ErrorMessageArgs::new() };
        // SAFETY: the error is valid, as the caller promises.
        unsafe { (self.inner.message)(ptr::from_mut(&mut message).cast()) };
        // SAFETY: the text lives as long as the error.
        unsafe { text(message.message, message.message_size.min(LONGEST_TEXT)) }
    }

    fn missing(&self, function: Function) -> Error {
        let end = TABLE_START + (function.index() + 1) * size_of::<usize>();
        Error::Missing {
            function: function.name(),
            found: self.version(),
            path: self.path().to_owned(),
            reason: if end > self.inner.table_bytes { "its table ends before it" } else { "its entry is null" },
        }
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("version", &self.version()).field("path", &self.path()).finish()
    }
}

impl Inner {
    fn open(file: &Path, search: &Search) -> Result<Self, Problem> {
        // SAFETY: the file is trusted, as `Library::open` documents.
        let library =
            unsafe { libloading::Library::new(file) }.map_err(|error| Problem::Loader(loader_text(&error)))?;
        // SAFETY: a function of this name has this type, by the header.
        let get = unsafe { library.get::<unsafe extern "C" fn() -> *const u8>(b"GetPjrtApi\0") };
        let get = *get.map_err(|_| Problem::NotPlugin)?;
        // Not unloaded: its threads may run for as long as the process lives.
        let _ = ManuallyDrop::new(library);
        let path = file_of(get as *const c_void).unwrap_or_else(|| file.to_owned());
        if (is_libtpu(&path) || is_libtpu(file)) && search.asks_in_vain() {
            return Err(Problem::MetadataQuery);
        }
        // SAFETY: the function takes no arguments.
        let table = unsafe { get() };
        if table.is_null() {
            return Err(Problem::NoTable);
        }
        // SAFETY: every table begins with its size, and is a constant of the plugin.
        let table_bytes = unsafe { table.cast::<usize>().read() };
        if table_bytes < LEAST_TABLE {
            return Err(Problem::ShortTable(table_bytes));
        }
        // SAFETY: the size was checked; a size, a pointer and the size of the version's struct precede the numbers.
        let [major, minor] = unsafe { table.add(VERSION_NUMBERS).cast::<[c_int; 2]>().read() };
        let version = Version { major, minor };
        if version.major != Version::HEADER.major {
            return Err(Problem::Version(version));
        }
        let mut entries = [None; Function::ALL.len()];
        for function in Function::ALL {
            let start = TABLE_START + function.index() * size_of::<usize>();
            if start + size_of::<usize>() <= table_bytes {
                // SAFETY: the table has the entry, which is a function or null.
                entries[function.index()] = unsafe { table.add(start).cast::<Option<Entry>>().read() };
            }
        }
        let needed = |function: Function| entries[function.index()].ok_or(Problem::NoErrors(function.name()));
        let without_result = |function| {
            // SAFETY: the function returns nothing, by the header.
            needed(function).map(|entry| unsafe { transmute::<Entry, EntryWithoutResult>(entry) })
        };
        Ok(Self {
            destroy: without_result(Function::PJRT_Error_Destroy)?,
            message: without_result(Function::PJRT_Error_Message)?,
            get_code: needed(Function::PJRT_Error_GetCode)?,
            entries,
            table_bytes,
            version,
            path,
        })
    }
}

fn loader_text(error: &libloading::Error) -> String {
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

/// Copies a text of `size` bytes; null becomes an empty string, and bytes that are not UTF-8 replacement characters.
///
/// # Safety
/// The text is null, or has as many bytes, which are valid during the call.
unsafe fn text(text: *const c_char, size: usize) -> String {
    if text.is_null() || size == 0 {
        return String::new();
    }
    // SAFETY: guaranteed by the caller; the size is limited by its caller.
    let bytes = unsafe { slice::from_raw_parts(text.cast::<u8>(), size) };
    String::from_utf8_lossy(bytes).into_owned()
}

/// The place of the version's two numbers in the table: after the table's size, its extensions, and the size and the
/// extensions of the version's struct.
const VERSION_NUMBERS: usize = 4 * size_of::<usize>();

/// The bytes of an error's text that are kept.
const LONGEST_TEXT: usize = 1 << 20;

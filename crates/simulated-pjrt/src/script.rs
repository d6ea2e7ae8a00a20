//! The script of a plugin.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, OsStr, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Behaviour of the plugin; by default it does everything right.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Script {
    /// The version of the interface, major and minor.
    pub version: (i32, i32),
    /// The number of functions in the table, which may be cut; `None` for all.
    pub functions: Option<usize>,
    /// The size that the table tells, in place of the true one.
    pub table_bytes: Option<usize>,
    /// Whether `GetPjrtApi` returns null.
    pub no_table: bool,
    /// Functions whose entries are null.
    pub null: Vec<String>,
    /// For functions, the least size of their argument structs, in place of the header's.
    pub needs_bytes: BTreeMap<String, usize>,
    /// Failures of calls.
    pub fail: Vec<Fail>,
    /// For functions, how many milliseconds they take.
    pub slow_ms: BTreeMap<String, u64>,
    /// Failures of events by their kind, `host`, `ready`, `download` or `execute`: the nth event, from 1, fires with
    /// the error.
    pub event_errors: Vec<Fail>,
    /// Kinds of events that do not fire before [`Installed::release`](crate::Installed::release).
    pub stuck: Vec<String>,
    /// For kinds of events, how many milliseconds later they fire, on a thread of the plugin.
    pub late_ms: BTreeMap<String, u64>,
    /// The number of devices.
    pub devices: usize,
    /// The place of each device: x, y and z of its chip, and the number of its core there.
    pub places: Vec<[i64; 4]>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            version: (0, 81),
            functions: None,
            table_bytes: None,
            no_table: false,
            null: Vec::new(),
            needs_bytes: BTreeMap::new(),
            fail: Vec::new(),
            slow_ms: BTreeMap::new(),
            event_errors: Vec::new(),
            stuck: Vec::new(),
            late_ms: BTreeMap::new(),
            devices: 4,
            places: Vec::new(),
        }
    }
}

/// A failure of the nth call of a function, or of the nth event of a kind.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fail {
    /// The function's name in C, or the kind of event.
    pub what: String,
    /// Which call, from 1; 0 for all.
    pub nth: u64,
    /// The code of the error.
    pub code: i32,
    /// The text, which need not be UTF-8; `None` for null.
    pub text: Option<Vec<u8>>,
}

impl Fail {
    /// Creates a failure with a text.
    #[must_use]
    pub fn new(what: &str, nth: u64, code: i32, text: &str) -> Self {
        Self { what: what.to_owned(), nth, code, text: Some(text.as_bytes().to_vec()) }
    }
}

/// The name of the script's file, next to the shared object.
pub(crate) const FILE: &str = "script.json";

static SCRIPT: LazyLock<Script> = LazyLock::new(|| {
    let file = own_file().and_then(|file| Some(file.parent()?.join(FILE)));
    let text = file.and_then(|file| fs::read_to_string(file).ok());
    text.and_then(|text| serde_json::from_str(&text).ok()).expect("install writes a script next to the plugin")
});
static COUNTS: LazyLock<Mutex<HashMap<String, u64>>> = LazyLock::new(Mutex::default);

/// Returns the script.
pub(crate) fn script() -> &'static Script {
    &SCRIPT
}

/// Waits if the call is slow, counts it, and returns the failure that it must have.
pub(crate) fn before(function: &str) -> Result<(), Failure> {
    if let Some(ms) = SCRIPT.slow_ms.get(function) {
        sleep(Duration::from_millis(*ms));
    }
    chosen(&SCRIPT.fail, function)
}

/// Counts an event and returns the failure that it must fire with.
pub(crate) fn event(kind: &str) -> Result<(), Failure> {
    chosen(&SCRIPT.event_errors, kind)
}

fn chosen(failures: &[Fail], what: &str) -> Result<(), Failure> {
    if !failures.iter().any(|fail| fail.what == what) {
        return Ok(());
    }
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = counts.entry(what.to_owned()).or_default();
    *count += 1;
    let fail = failures.iter().find(|fail| fail.what == what && (fail.nth == *count || fail.nth == 0));
    fail.map_or(Ok(()), |fail| Err(Failure { code: fail.code, text: fail.text.clone() }))
}

/// Returns the file that this code was loaded from.
#[expect(unsafe_code, reason = "the loader is asked")]
fn own_file() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: any address may be passed; the answer goes to `info`.
    let known = unsafe { libc::dladdr(own_file as *const c_void, &mut info) } != 0;
    if !known || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name belongs to the library that runs this code.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(Path::new(OsStr::from_bytes(name.to_bytes())).to_owned())
}

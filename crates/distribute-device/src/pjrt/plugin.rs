//! Open plugins.
#![expect(unsafe_code, reason = "functions of a plugin are called")]

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar};
use std::time::Instant;

use pjrt_sys::{Arguments, Function, Library, PjrtError, PluginAttributesArgs, PluginInitializeArgs, Search, Version};

use super::bounded;
use super::value::{Attributes, attributes};
use crate::mutex::Mutex;
use crate::{Error, Result};

/// A plugin that is open and initialised. Clones are cheap and refer to the same plugin.
///
/// A plugin belongs to the process: it is initialised once, and never unloaded. Opening its file again returns the same
/// one.
#[derive(Clone)]
pub struct Plugin {
    inner: Arc<Inner>,
}

struct Inner {
    library: Library,
    abandoned_clients: AtomicUsize,
}

/// The state of a file that was opened.
enum Opened {
    /// A thread initialises it.
    Starting,
    Ready(Plugin),
}

/// The plugins of this process, by their files.
static OPENED: Mutex<Vec<(PathBuf, Opened)>> = Mutex::new(Vec::new());
static CHANGED: Condvar = Condvar::new();

impl Plugin {
    /// Opens the plugin that the search finds, and initialises it.
    ///
    /// libtpu is used by one process at a time; another one gets an error from `PJRT_Plugin_Initialize`.
    ///
    /// # Errors
    /// - [`Error::PjrtPlugin`] with every file tried if none is usable, or if the plugin lacks a function without which
    ///   objects cannot be freed.
    /// - [`Error::Pjrt`] if the plugin cannot be initialised.
    /// - [`Error::Deadline`] if it is not initialised in time. It then continues to be initialised, and may be opened
    ///   later.
    pub fn open(search: &Search, deadline: Instant) -> Result<Plugin> {
        let library = Library::open(search).map_err(|error| failure("PJRT", error))?;
        if let Some(missing) = NEEDED.iter().find(|function| !library.has(**function)) {
            let (name, version) = (missing.name(), library.version());
            let problem = format!(
                "the PJRT plugin {} of version {version} has no {name}, which this program needs; install a newer one",
                library.path().display()
            );
            return Err(Error::PjrtPlugin { problem });
        }
        let path = library.path().to_owned();
        let timeout = deadline.saturating_duration_since(Instant::now());
        let mut opened = OPENED.wait_while(&CHANGED, timeout, |opened| {
            opened.iter().any(|(file, state)| *file == path && matches!(state, Opened::Starting))
        });
        match opened.iter().find(|(file, _)| *file == path) {
            Some((_, Opened::Ready(plugin))) => return Ok(plugin.clone()),
            Some((_, Opened::Starting)) => {
                let operation = format!("the initialisation of {} by another thread", path.display());
                let state = "the plugin has not returned".to_owned();
                return Err(Error::Deadline { operation, waited: timeout, state });
            }
            None => opened.push((path.clone(), Opened::Starting)),
        }
        drop(opened);
        let operation = format!("the initialisation of {}", path.display());
        bounded::run(&operation, deadline, move || initialise(library)).inspect_err(|error| {
            if matches!(error, Error::Thread { .. } | Error::HostPanic { .. }) {
                settle(&path, None);
            }
        })
    }

    /// Returns the version of the interface that the plugin implements.
    pub fn version(&self) -> Version {
        self.inner.library.version()
    }

    /// Returns the plugin's file.
    pub fn path(&self) -> &Path {
        self.inner.library.path()
    }

    /// Returns the plugin's attributes, such as `xla_version`; none if it lacks the function.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin returns an error.
    ///
    /// # Source
    /// `PJRT_Plugin_Attributes`.
    pub fn attributes(&self) -> Result<Attributes> {
        if !self.inner.library.has(Function::PJRT_Plugin_Attributes) {
            return Ok(Attributes::new());
        }
        let mut arguments = PluginAttributesArgs::new();
        // SAFETY: the plugin is initialised.
        unsafe { self.call(self, &mut arguments) }?;
        // SAFETY: the list lives as long as the process.
        Ok(unsafe { attributes(arguments.attributes, arguments.num_attributes) })
    }

    /// Returns the oldest and the newest version of StableHLO that the plugin reads, as lists such as `[1, 13, 3]`;
    /// `None` if it does not tell them.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin returns an error.
    pub fn stablehlo_versions(&self) -> Result<Option<(Vec<i64>, Vec<i64>)>> {
        let attributes = self.attributes()?;
        let version = |name: &str| Some(attributes.get(name)?.as_integers()?.to_vec());
        Ok(version("stablehlo_minimum_version").zip(version("stablehlo_current_version")))
    }

    /// Returns the number of clients that were dropped and could not be destroyed, because the plugin had not finished
    /// an operation. They stay in memory.
    pub fn abandoned_clients(&self) -> usize {
        // Relaxed: the number guards nothing.
        self.inner.abandoned_clients.load(Ordering::Relaxed)
    }

    pub(super) fn abandon_client(&self) {
        self.inner.abandoned_clients.fetch_add(1, Ordering::Relaxed);
    }

    /// Calls the function of these arguments. An error names `subject`.
    ///
    /// # Safety
    /// As for [`Library::call`]; the plugin is initialised.
    pub(super) unsafe fn call<A: Arguments>(&self, subject: &dyn fmt::Display, arguments: &mut A) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.inner.library.call(arguments) }.map_err(|error| failure(subject, error))
    }

    /// Calls a function that frees an object. An error is ignored: nothing can be done about it in a drop.
    ///
    /// # Safety
    /// As for [`call`](Self::call).
    pub(super) unsafe fn free<A: Arguments>(&self, arguments: &mut A) {
        // SAFETY: guaranteed by the caller.
        let _ = unsafe { self.inner.library.call(arguments) };
    }

    /// Takes an error that a callback was given.
    ///
    /// # Safety
    /// The error is null, or the callback's.
    pub(super) unsafe fn check(&self, call: Function, error: *mut PjrtError) -> Result<(), pjrt_sys::Error> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.inner.library.check(call, error) }
    }
}

/// Formats "PJRT plugin" and the file.
impl fmt::Display for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PJRT plugin {}", self.path().display())
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.library.fmt(f)
    }
}

/// Initialises a plugin and tells those who wait for it.
fn initialise(library: Library) -> Result<Plugin> {
    // SAFETY: the file's entry in `OPENED` lets one thread at a time do so, and none after it succeeded.
    let answer = unsafe { library.call(&mut PluginInitializeArgs::new()) };
    let path = library.path().to_owned();
    let subject = format!("PJRT plugin {}", path.display());
    match answer {
        Ok(()) => {
            let plugin = Plugin { inner: Arc::new(Inner { library, abandoned_clients: AtomicUsize::new(0) }) };
            settle(&path, Some(plugin.clone()));
            Ok(plugin)
        }
        Err(error) => {
            settle(&path, None);
            Err(failure(&subject, error))
        }
    }
}

/// Notes the end of an initialisation.
fn settle(path: &Path, plugin: Option<Plugin>) {
    let mut opened = OPENED.lock();
    opened.retain(|(file, _)| file != path);
    opened.extend(plugin.map(|plugin| (path.to_owned(), Opened::Ready(plugin))));
    drop(opened);
    CHANGED.notify_all();
}

/// Returns the error of a call for `subject`.
pub(super) fn failure(subject: impl fmt::Display, error: pjrt_sys::Error) -> Error {
    match error {
        pjrt_sys::Error::Call { function, code, text } => {
            Error::Pjrt { subject: subject.to_string(), call: function, code: code.0, name: code.name(), text }
        }
        other => Error::PjrtPlugin { problem: other.to_string() },
    }
}

/// Functions without which objects cannot be freed, and ends not be noticed.
const NEEDED: [Function; 7] = [
    Function::PJRT_Plugin_Initialize,
    Function::PJRT_Event_Destroy,
    Function::PJRT_Event_OnReady,
    Function::PJRT_Client_Destroy,
    Function::PJRT_Executable_Destroy,
    Function::PJRT_LoadedExecutable_Destroy,
    Function::PJRT_Buffer_Destroy,
];

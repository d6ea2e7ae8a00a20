//! Installation of the shared object.
#![expect(unsafe_code, reason = "functions of the installed plugin are called")]

use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::failure::Live;
use crate::script::{self, Script};

/// A plugin in a folder.
#[derive(Debug, Clone)]
pub struct Installed {
    path: PathBuf,
}

/// Copies the plugin to `dir`, as `plugin.so`, with its script.
///
/// Cargo builds the shared object with every package that depends on this one, including by dev-dependencies.
///
/// # Errors
/// The I/O error if the shared object is not next to the running program, or the files cannot be written.
pub fn install(dir: &Path, script: &Script) -> Result<Installed> {
    install_as(&dir.join("plugin.so"), script)
}

fn install_as(path: &Path, script: &Script) -> Result<Installed> {
    if path.exists() {
        // It may be open, and code that runs must not be overwritten.
        return Err(Error::new(ErrorKind::AlreadyExists, format!("{} is there already", path.display())));
    }
    let program = env::current_exe()?;
    let built = find(&program).ok_or_else(|| {
        let text = format!("{FILE} is not next to {}; `cargo build -p simulated-pjrt` makes it", program.display());
        Error::new(ErrorKind::NotFound, text)
    })?;
    fs::copy(built, path)?;
    fs::write(path.with_file_name(script::FILE), serde_json::to_string(script)?)?;
    Ok(Installed { path: path.to_owned() })
}

impl Installed {
    /// Returns the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the numbers of objects that the program has not destroyed.
    ///
    /// # Panics
    /// If the plugin is not open.
    #[must_use]
    pub fn live(&self) -> Live {
        let mut counts = [0; Live::COUNT];
        // SAFETY: the function has this type.
        let live = unsafe { self.get::<unsafe extern "C" fn(*mut [usize; Live::COUNT])>(b"simulated_pjrt_live\0") };
        // SAFETY: it writes the numbers.
        unsafe { live(&mut counts) };
        Live::of(counts)
    }

    /// Fires all events that are stuck, and those to come.
    ///
    /// # Panics
    /// If the plugin is not open.
    pub fn release(&self) {
        // SAFETY: the function has this type.
        let release = unsafe { self.get::<unsafe extern "C" fn()>(b"simulated_pjrt_release\0") };
        // SAFETY: it takes no arguments.
        unsafe { release() };
    }

    /// Returns a function.
    ///
    /// # Safety
    /// The function has the type.
    unsafe fn get<F: Copy>(&self, name: &[u8]) -> F {
        // SAFETY: the plugin is this crate's.
        let library = unsafe { libloading::Library::new(&self.path) }.expect("the plugin can be opened");
        // SAFETY: guaranteed by the caller.
        let function = *unsafe { library.get::<F>(name) }.expect("the plugin has the function");
        // It stays open, as plugins do.
        std::mem::forget(library);
        function
    }
}

/// Finds the shared object: test programs are in `PROFILE/deps`, examples next to it; files in `deps` are never stale.
fn find(program: &Path) -> Option<PathBuf> {
    let folders = program.ancestors().skip(1).flat_map(|folder| [folder.join("deps"), folder.to_owned()]);
    folders.map(|folder| folder.join(FILE)).find(|file| file.is_file())
}

const FILE: &str = "libsimulated_pjrt.so";

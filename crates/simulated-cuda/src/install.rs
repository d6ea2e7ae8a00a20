//! Installation of the stand-in where a program finds it.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Links the shared object into `directory` under the names that loaders of CUDA search for, and returns the object's
/// path. Existing links are replaced.
///
/// # Errors
/// The I/O error if cargo has not built the object next to the running program, or a link cannot be created.
pub fn install(directory: &Path) -> io::Result<PathBuf> {
    let object = built_object(&env::current_exe()?)?;
    for name in NAMES {
        let link = directory.join(name);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => symlink(&object, &link)?,
        }
    }
    Ok(object)
}

/// Returns a command that searches `directory` for libraries before all others.
pub fn command(program: impl AsRef<OsStr>, directory: &Path) -> Command {
    let others = env::var_os(PATH);
    let others = others.as_deref().map(env::split_paths).into_iter().flatten();
    // A directory whose name contains a colon cannot be part of a list of directories.
    let path = env::join_paths([directory.to_owned()].into_iter().chain(others)).unwrap_or_else(|_| directory.into());
    let mut command = Command::new(program);
    command.env(PATH, path);
    command
}

/// Returns the path of the shared object. Cargo puts it into `deps`, next to tests, or, when building this package
/// itself, one directory above.
fn built_object(program: &Path) -> io::Result<PathBuf> {
    let directories = program.ancestors().skip(1).take(3);
    let candidates = directories.flat_map(|directory| [directory.join(OBJECT), directory.join("deps").join(OBJECT)]);
    candidates.into_iter().find(|candidate| candidate.is_file()).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("{OBJECT}: not near {}; build simulated-cuda", program.display()),
        )
    })
}

const OBJECT: &str = "libsimulated_cuda.so";
const PATH: &str = "LD_LIBRARY_PATH";
const NAMES: &[&str] = &["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libnvrtc.so.13"];

//! Installation of the shared object under NCCL's name.

use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Links the simulated NCCL as `libnccl.so.2` in `dir` and returns that path.
///
/// Cargo builds the shared object with every package that depends on this one, including by dev-dependencies.
///
/// # Errors
/// The I/O error if the shared object is not next to the running program, or the link cannot be created.
///
/// # Examples
/// ```no_run
/// let library = simulated_nccl::install("/tmp/simulated".as_ref())?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn install(dir: &Path) -> Result<PathBuf> {
    let program = env::current_exe()?;
    let built = find(&program).ok_or_else(|| {
        let text = format!("{FILE} is not next to {}; `cargo build -p simulated-nccl` makes it", program.display());
        Error::new(ErrorKind::NotFound, text)
    })?;
    let link = dir.join("libnccl.so.2");
    match fs::remove_file(&link) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    symlink(built, &link)?;
    Ok(link)
}

/// Finds the shared object: test programs are in `PROFILE/deps`, examples next to it; files in `deps` are never stale.
fn find(program: &Path) -> Option<PathBuf> {
    let folders = program.ancestors().skip(1).flat_map(|folder| [folder.join("deps"), folder.to_owned()]);
    folders.map(|folder| folder.join(FILE)).find(|file| file.is_file())
}

const FILE: &str = "libsimulated_nccl.so";

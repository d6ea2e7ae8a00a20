//! Compiled programs on disk.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};

use super::{Client, CompileOptions, Executable};
use crate::whole_file::{HEADER, Magic, PART, read_checked, write_checked};
use crate::{Error, Result, environment};

/// A folder of compiled programs, which several processes may use at once.
///
/// A program is found again by a hash (SHA-256) of its text, its options, the plugin's file and version, the platform's
/// version, the kinds of the client's devices, and the flags in the environment: `XLA_FLAGS`, with the content of the
/// file that it may name, and `LIBTPU_INIT_ARGS`. Files are written under another name and renamed, so that no process
/// reads a part of one. The programs that were used least recently are removed when the folder grows too large.
///
/// # Examples
/// ```no_run
/// use std::time::{Duration, Instant};
/// use distribute_device::pjrt::{CacheOutcome, Client, CompileOptions, ProgramCache};
///
/// # fn compiled(client: Client, program: &str) -> distribute_device::Result<()> {
/// let cache = ProgramCache::open("/var/cache/programs", 1 << 30)?;
/// let soon = Instant::now() + Duration::from_secs(600);
/// let (executable, outcome) = cache.get_or_compile(&client, program, &CompileOptions::default(), soon)?;
/// if let CacheOutcome::Replaced { problem } = outcome {
///     eprintln!("compiled again: {problem}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ProgramCache {
    folder: PathBuf,
    limit_bytes: u64,
}

/// Where a program of a [`ProgramCache`] came from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheOutcome {
    /// It was read from the folder.
    Found,
    /// It was not there: it was compiled, and written.
    Stored,
    /// The file that was there could not be used: it was compiled, and written anew.
    Replaced {
        /// The problem of the file.
        problem: String,
    },
    /// It was compiled, and could not be written: the next process compiles it again.
    NotStored {
        /// Why it was not written.
        problem: String,
    },
}

impl ProgramCache {
    /// Opens a folder, which is created if it does not exist, for at most `limit_bytes` bytes of programs.
    ///
    /// # Errors
    /// [`Error::ProgramCache`] if the folder cannot be created.
    pub fn open(folder: impl Into<PathBuf>, limit_bytes: u64) -> Result<ProgramCache> {
        let folder = folder.into();
        match fs::create_dir_all(&folder) {
            Ok(()) => Ok(ProgramCache { folder, limit_bytes }),
            Err(source) => Err(Error::ProgramCache { path: folder, source }),
        }
    }

    /// Returns the program, from the folder if it is there, else compiled.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the program or the options are malformed; [`Error::Operands`] if the options do not fit each
    /// other; [`Error::Deadline`]. A file that cannot be read or written is not an error, but told by the outcome.
    pub fn get_or_compile(
        &self,
        client: &Client,
        program: impl AsRef<[u8]>,
        options: &CompileOptions,
        deadline: Instant,
    ) -> Result<(Executable, CacheOutcome)> {
        let program = program.as_ref();
        let file = self.file(client, program, &options.encode()?);
        let problem = match read_checked(&file, MAGIC, self.limit_bytes) {
            Ok(None) => None,
            Ok(Some(serialized)) => match client.load(serialized, deadline) {
                Ok(executable) => {
                    // Its time is that of its last use.
                    let _ =
                        File::options().append(true).open(&file).and_then(|file| file.set_modified(SystemTime::now()));
                    return Ok((executable, CacheOutcome::Found));
                }
                Err(late @ Error::Deadline { .. }) => return Err(late),
                Err(error) => Some(format!("{}: {error}", file.display())),
            },
            Err(problem) => Some(format!("{}: {problem}", file.display())),
        };
        let executable = client.compile(program, options, deadline)?;
        let written = executable.program().serialize().map_err(|error| error.to_string()).and_then(|serialized| {
            self.write(&file, &serialized).map_err(|error| format!("{}: {error}", file.display()))
        });
        let outcome = match (written, problem) {
            (Err(problem), _) => CacheOutcome::NotStored { problem },
            (Ok(()), Some(problem)) => CacheOutcome::Replaced { problem },
            (Ok(()), None) => CacheOutcome::Stored,
        };
        Ok((executable, outcome))
    }

    /// Returns the file of a program.
    fn file(&self, client: &Client, program: &[u8], options: &[u8]) -> PathBuf {
        let plugin = client.plugin();
        let mut kinds = String::new();
        for device in client.devices() {
            kinds += &format!("{}\n", device.description().kind);
        }
        let flags = flags();
        let mut hash = Sha256::new();
        for part in [
            program,
            options,
            plugin.path().as_os_str().as_encoded_bytes(),
            plugin.version().to_string().as_bytes(),
            client.platform_name().as_bytes(),
            client.platform_version().as_bytes(),
            kinds.as_bytes(),
            &flags,
        ] {
            // With their lengths, so that the end of one part is not the beginning of the next.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        self.folder.join(format!("{}.{PROGRAM}", hexadecimal(&hash.finalize())))
    }

    /// Writes a program under another name, renames it, and makes room.
    fn write(&self, file: &Path, program: &[u8]) -> io::Result<()> {
        let len_bytes = (HEADER + program.len()) as u64;
        if len_bytes > self.limit_bytes {
            let text =
                format!("{len_bytes} bytes are more than the {} of the cache; raise its limit", self.limit_bytes);
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
        }
        write_checked(file, MAGIC, program)?;
        self.make_room(file);
        Ok(())
    }

    /// Removes the programs that were used least recently, but not `newest`, until the others are within the limit,
    /// and parts that a process has left behind. Errors are ignored: another process may remove the same files.
    fn make_room(&self, newest: &Path) {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let mut programs = Vec::new();
        for entry in entries {
            let (path, Ok(facts)) = (entry.path(), entry.metadata()) else { continue };
            let used = facts.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension().and_then(|extension| extension.to_str()) {
                Some(PROGRAM) => programs.push((path == *newest, used, facts.len(), path)),
                Some(PART) if used.elapsed().is_ok_and(|age| age > STALE) => drop(fs::remove_file(&path)),
                _ => {}
            }
        }
        programs.sort();
        let mut total: u64 = programs.iter().map(|(_, _, len_bytes, _)| len_bytes).sum();
        for (_, _, len_bytes, path) in programs {
            if total <= self.limit_bytes || path == *newest {
                break;
            }
            if fs::remove_file(&path).is_ok() {
                total -= len_bytes;
            }
        }
    }
}

/// Returns the flags in the environment that change how plugins compile.
fn flags() -> Vec<u8> {
    let mut flags = Vec::new();
    for name in FLAGS {
        // An empty variable sets nothing.
        let value = environment::value(name).unwrap_or_default();
        // XLA reads a value that is not a flag as the name of a file of them.
        let is_file = !value.is_empty() && !value.as_encoded_bytes().starts_with(b"-");
        let content = if is_file { fs::read(&value).unwrap_or_default() } else { Vec::new() };
        for part in [value.as_encoded_bytes(), &content] {
            flags.extend((part.len() as u64).to_le_bytes());
            flags.extend(part);
        }
    }
    flags
}

/// The variables of the environment from which XLA and libtpu take flags.
const FLAGS: [&str; 2] = ["XLA_FLAGS", "LIBTPU_INIT_ARGS"];

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Begins a file of a program.
const MAGIC: &Magic = b"DPJRT\0\0\x01";
const PROGRAM: &str = "pjrt";

/// The age at which a part was left behind by a process that has ended.
const STALE: Duration = Duration::from_secs(3600);

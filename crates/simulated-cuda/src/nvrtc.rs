//! The run-time compiler: kernels are compiled as C by the system's compiler.

mod image;
mod options;

use std::fs::{self, File};
use std::io;
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::registry::Registry;
use crate::settings::settings;

pub(crate) use image::{cubin, object_of, ptx};
pub(crate) use options::{Options, SUPPORTED};

/// A program and, after its compilation, the output.
pub(crate) struct Program {
    pub(crate) handle: usize,
    pub(crate) source: String,
    pub(crate) name: String,
    pub(crate) output: Mutex<Output>,
}

#[derive(Default)]
pub(crate) struct Output {
    pub(crate) log: Vec<u8>,
    pub(crate) ptx: Option<Vec<u8>>,
    /// Only for a real architecture, `sm_..`.
    pub(crate) cubin: Option<Vec<u8>>,
}

/// An `nvrtcResult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct NvrtcCode(pub(crate) u32);

impl NvrtcCode {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const INVALID_INPUT: Self = Self(3);
    pub(crate) const INVALID_PROGRAM: Self = Self(4);
    pub(crate) const INVALID_OPTION: Self = Self(5);
    pub(crate) const COMPILATION: Self = Self(6);
    pub(crate) const INTERNAL_ERROR: Self = Self(11);
}

impl Program {
    /// Compiles the program; the log contains the compiler's messages.
    pub(crate) fn compile(&self, options: &Options) -> Result<Output, Output> {
        match self.run_compiler(options) {
            Ok((log, Some(object))) => {
                let arch = options.arch();
                let cubin = options.is_real().then(|| cubin(&object, arch));
                Ok(Output { log, ptx: Some(ptx(&object, arch)), cubin })
            }
            Ok((log, None)) => Err(Output { log, ..Output::default() }),
            Err(error) => {
                let log = format!("{}: {error}; kernels of simulated devices need a C compiler\n", settings().compiler);
                Err(Output { log: log.into_bytes(), ..Output::default() })
            }
        }
    }

    /// Returns the compiler's messages, and the object if there is one.
    fn run_compiler(&self, options: &Options) -> io::Result<(Vec<u8>, Option<Vec<u8>>)> {
        let directory = tempfile::tempdir()?;
        let [source, object, log] = ["kernels.c", "kernels.so", "log"].map(|name| directory.path().join(name));
        let name = self.name.replace(['"', '\\', '\n'], "_");
        fs::write(&source, format!("{PRELUDE}\n#line 1 \"{name}\"\n{}\n", self.source))?;
        let mut compiler = Command::new(&settings().compiler)
            .args(FLAGS)
            .args(options.definitions())
            .arg("-o")
            .arg(&object)
            .arg(&source)
            .arg("-lm")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .spawn()?;
        let start = Instant::now();
        let status = loop {
            if let Some(status) = compiler.try_wait()? {
                break status;
            }
            if start.elapsed() > settings().deadline {
                compiler.kill()?;
                compiler.wait()?;
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            thread::sleep(Duration::from_millis(2));
        };
        let object = if status.success() { Some(fs::read(&object)?) } else { None };
        Ok((fs::read(&log)?, object))
    }
}

/// Returns the registry of programs.
pub(crate) fn programs() -> &'static Registry<Program> {
    static PROGRAMS: OnceLock<Registry<Program>> = OnceLock::new();
    PROGRAMS.get_or_init(Registry::new)
}

const PRELUDE: &str = include_str!("nvrtc/prelude.h");

/// Results must equal those of the host, so there is no contraction and no reordering. What C++ rejects, C must reject
/// too.
const FLAGS: &[&str] = &[
    "-O2",
    "-shared",
    "-fPIC",
    "-x",
    "c",
    "-std=gnu11",
    "-fgnu89-inline",
    "-fno-fast-math",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Werror=implicit-function-declaration",
    "-Werror=implicit-int",
    "-Werror=int-conversion",
    "-Werror=incompatible-pointer-types",
    "-Wl,-z,defs",
];

//! Whether the code for candle on GPUs compiles, where NVIDIA's compiler is not installed.
//!
//! candle's build script compiles kernels, which a check of Rust code does not use. A script that writes empty files
//! stands for the compiler, so that nothing has to be installed. What is built with it must not be run.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::text;

/// Stands for `nvcc`: answers with a version, and creates the files that it is asked for.
const COMPILER: &str = r#"#!/bin/sh
case " $* " in *" --version "*) echo "Cuda compilation tools, release 13.0, V13.0.0"; exit 0;; esac
folder= previous=
for argument in "$@"; do
  case "$previous" in
    -o|--output-file) : > "$argument" ;;
    --output-directory) folder=$argument ;;
  esac
  previous=$argument
done
test -n "$folder" || exit 0
for argument in "$@"; do
  case "$argument" in *.cu) : > "$folder/$(basename "$argument" .cu).ptx" ;; esac
done
"#;

/// Checks and lints the crates that have code for candle on GPUs.
pub(crate) fn run() -> Result<(), String> {
    let root = make(Path::new("target/stub-cuda"))?;
    let compiler = root.join("bin/nvcc");
    let mut command = Command::new("cargo");
    command.args(["clippy", "--locked", "--all-targets", "--features", "distribute/candle-cuda"]);
    for package in ["distribute", "distribute-candle", "distribute-gpu-training"] {
        command.args(["--package", package]);
    }
    command.args(["--", "-D", "warnings"]);
    // A target folder of its own: what is compiled with empty kernels must not become part of a program.
    command.env("CARGO_TARGET_DIR", root.join("target"));
    command.env("CUDA_HOME", &root).env("CUDA_PATH", &root).env("NVCC", &compiler);
    command.env("CUDA_COMPUTE_CAP", "90").env("CUDARC_CUDA_VERSION", "13000");
    match command.status().map_err(text)? {
        status if status.success() => Ok(()),
        status => Err(format!("cargo clippy with candle-cuda failed: {status}")),
    }
}

/// Creates a folder with the files of a toolkit that build scripts look for.
fn make(root: &Path) -> Result<PathBuf, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", root.display());
    for folder in ["bin", "include", "lib64"] {
        std::fs::create_dir_all(root.join(folder)).map_err(failed)?;
    }
    let compiler = root.join("bin/nvcc");
    std::fs::write(&compiler, COMPILER).map_err(failed)?;
    std::fs::set_permissions(&compiler, std::fs::Permissions::from_mode(0o755)).map_err(failed)?;
    std::fs::write(root.join("include/cuda.h"), "").map_err(failed)?;
    root.canonicalize().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_writes_the_files_that_are_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let root = make(&folder.path().join("cuda")).unwrap();
        let compile = |arguments: &[&str]| {
            let output =
                Command::new(root.join("bin/nvcc")).args(arguments).current_dir(folder.path()).output().unwrap();
            assert!(output.status.success());
            String::from_utf8(output.stdout).unwrap()
        };
        assert!(compile(&["--version"]).contains("release 13.0"));
        compile(&["--ptx", "--output-directory", ".", "-O3", "src/affine.cu"]);
        compile(&["--lib", "-o", "libmoe.a", "a.o"]);
        for name in ["affine.ptx", "libmoe.a"] {
            assert!(std::fs::read(folder.path().join(name)).unwrap().is_empty(), "{name}");
        }
    }
}

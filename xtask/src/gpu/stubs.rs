//! Libraries to link with where CUDA's own are not installed: every function that cudarc names, with nothing in it. The
//! real ones take their place when the program starts.

use std::path::Path;
use std::process::Command;

use crate::error::text;

/// A library that programs with CUDA are linked with.
struct Library {
    /// The module of cudarc that declares its functions.
    module: &'static str,
    name: &'static str,
    /// The name that the loader looks for.
    so_name: &'static str,
}

/// Libraries of CUDA 13.
const LIBRARIES: [Library; 5] = [
    Library { module: "driver", name: "cuda", so_name: "libcuda.so.1" },
    Library { module: "cublas", name: "cublas", so_name: "libcublas.so.13" },
    Library { module: "cublaslt", name: "cublasLt", so_name: "libcublasLt.so.13" },
    Library { module: "curand", name: "curand", so_name: "libcurand.so.10" },
    Library { module: "nvrtc", name: "nvrtc", so_name: "libnvrtc.so.13" },
];

/// Makes them in a folder, with the C compiler.
pub(super) fn make(cudarc: &Path, folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(text)?;
    for Library { module, name, so_name } in LIBRARIES {
        let declarations = cudarc.join("src").join(module).join("sys/mod.rs");
        let rust = std::fs::read_to_string(&declarations);
        let rust = rust.map_err(|error| format!("{}: {error}", declarations.display()))?;
        let source = folder.join(format!("{name}.c"));
        std::fs::write(&source, empty_functions(&rust)).map_err(text)?;
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-fno-builtin", "-nostdlib", "-w", "-o"]);
        compile.arg(folder.join(format!("lib{name}.so"))).arg(format!("-Wl,-soname,{so_name}")).arg(&source);
        let status = compile.status().map_err(|error| format!("cc could not be started: {error}"))?;
        if !status.success() {
            return Err(format!("cc failed on {}: {status}", source.display()));
        }
        std::fs::remove_file(&source).map_err(text)?;
    }
    Ok(())
}

/// Bindings declare what they link with as `fn name(…)` within `extern "C"`, without `pub`.
fn empty_functions(rust: &str) -> String {
    let names = rust.lines().filter_map(|line| {
        let (name, _) = line.trim_start().strip_prefix("fn ")?.split_once('(')?;
        (name.starts_with("cu") || name.starts_with("nvrtc")).then_some(name)
    });
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names.dedup();
    names.iter().map(|name| format!("void {name}(void) {{}}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_foreign_function_once_and_no_other() {
        let rust = r#"
pub unsafe fn cuInit(Flags: ::core::ffi::c_uint) -> CUresult {
    #[cfg(feature = "dynamic-loading")]
    {
        type _F = unsafe extern "C" fn(::core::ffi::c_uint) -> CUresult;
        let _f = load::<_F>("cuInit");
    }
    {
        extern "C" {
            fn cuInit(Flags: ::core::ffi::c_uint) -> CUresult;
        }
        cuInit(Flags)
    }
}
            fn cuInit(Flags: ::core::ffi::c_uint) -> CUresult;
            fn nvrtcVersion(major: *mut ::core::ffi::c_int) -> nvrtcResult;
    fn default() -> Self {
"#;
        assert_eq!(empty_functions(rust), "void cuInit(void) {}\nvoid nvrtcVersion(void) {}\n");
    }
}

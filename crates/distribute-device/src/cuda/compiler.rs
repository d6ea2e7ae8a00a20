//! Kernels, compiled at run time for the GPU and cached.

use std::collections::HashMap;
use std::ffi::CString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use cudarc::nvrtc::{Ptx, result as nvrtc, sys};
use libloading::Library;

use super::driver::{failed, why};
use super::source::Module;
use crate::mutex::Mutex;
use crate::whole_file::{Magic, read_checked, write_checked};
use crate::{Error, Result, environment};

/// Compiled kernels of one GPU.
#[derive(Debug)]
pub(super) struct Kernels {
    capability: (u32, u32),
    modules: Mutex<HashMap<Module, Arc<CudaModule>>>,
    functions: Mutex<HashMap<(Module, &'static str), CudaFunction>>,
}

/// An open NVRTC library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Compiler {
    pub(super) version: (i32, i32),
    /// Supported architectures, such as 90 for compute capability 9.0.
    architectures: Vec<u32>,
}

/// Returns NVRTC's version, major and minor. Kernels require NVRTC.
///
/// # Errors
/// [`Error::Nvrtc`] if the library is not found or its calls fail.
///
/// # Source
/// `nvrtcVersion`.
pub fn compiler_version() -> Result<(u32, u32)> {
    let (major, minor) = Compiler::find()?.version;
    Ok((u32::try_from(major).unwrap_or_default(), u32::try_from(minor).unwrap_or_default()))
}

/// Results equal those of the CPU bit for bit only if products and sums are not fused.
const OPTIONS: [&str; 2] = ["--fmad=false", "--std=c++17"];

impl Kernels {
    pub(super) fn new(capability: (u32, u32)) -> Kernels {
        Kernels { capability, modules: Mutex::default(), functions: Mutex::default() }
    }

    /// Returns a kernel, compiling it on first use.
    pub(super) fn function(
        &self,
        context: &Arc<CudaContext>,
        module: Module,
        name: &'static str,
    ) -> Result<CudaFunction> {
        let mut functions = self.functions.lock();
        if let Some(function) = functions.get(&(module, name)) {
            return Ok(function.clone());
        }
        let loaded = self.module(context, module)?;
        let function = loaded.load_function(name).map_err(|error| failed("finding a kernel", name, error))?;
        functions.insert((module, name), function.clone());
        Ok(function)
    }

    fn module(&self, context: &Arc<CudaContext>, module: Module) -> Result<Arc<CudaModule>> {
        let mut modules = self.modules.lock();
        if let Some(loaded) = modules.get(&module) {
            return Ok(Arc::clone(loaded));
        }
        let load = |image| context.load_module(Ptx::from_binary(image));
        let compiler = Compiler::find()?;
        let options = compiler.options(self.capability)?;
        let source = module.source();
        let file = cache_file(&compiler, &options, &source);
        // A cached file that is damaged or cannot be loaded is compiled again and overwritten.
        let cached = file.as_ref().and_then(|file| kept(file)).and_then(|image| load(image).ok());
        let loaded = match cached {
            Some(loaded) => loaded,
            None => {
                let image = compiler.compile(&module.name(), &source, &options)?;
                file.iter().for_each(|file| keep(file, &image));
                load(image).map_err(|error| failed("loading kernels", &module.name(), error))?
            }
        };
        modules.insert(module, Arc::clone(&loaded));
        Ok(loaded)
    }
}

impl Compiler {
    /// Finds NVRTC and opens it.
    pub(super) fn find() -> Result<Compiler> {
        static FOUND: Mutex<Option<Compiler>> = Mutex::new(None);
        let mut found = FOUND.lock();
        if found.is_none() {
            open()?;
            *found = Some(Compiler::ask().map_err(|error| lost(format!("it does not answer: {error:?}")))?);
        }
        found.clone().ok_or_else(|| lost("it does not answer".to_owned()))
    }

    fn ask() -> Result<Compiler, nvrtc::NvrtcError> {
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: both outlive the call.
        unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result()?;
        // SAFETY: it outlives the call.
        unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result()?;
        let mut architectures = vec![0; usize::try_from(count).unwrap_or_default()];
        // SAFETY: the buffer has room for the number of entries just returned.
        unsafe { sys::nvrtcGetSupportedArchs(architectures.as_mut_ptr()) }.result()?;
        let architectures = architectures.into_iter().filter_map(|arch| u32::try_from(arch).ok()).collect();
        Ok(Compiler { version: (major, minor), architectures })
    }

    /// Returns the compiler options for a GPU: its own machine code, or PTX, which the driver compiles.
    fn options(&self, (major, minor): (u32, u32)) -> Result<Vec<String>> {
        let wanted = major * 10 + minor;
        let known = self.architectures.iter().filter(|known| **known <= wanted).max();
        let target = match known {
            Some(known) if *known == wanted => format!("sm_{wanted}"),
            Some(known) => format!("compute_{known}"),
            None => {
                let (a, b) = self.version;
                return Err(lost(format!(
                    "NVRTC {a}.{b} makes no code for compute capability {major}.{minor}; install one that does"
                )));
            }
        };
        Ok([format!("--gpu-architecture={target}")].into_iter().chain(OPTIONS.map(str::to_owned)).collect())
    }

    /// Returns machine code, or PTX if the options request a virtual architecture.
    fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<Vec<u8>> {
        let refused = |problem: String| Error::Kernel { name: name.to_owned(), problem };
        let text = |text: &str| CString::new(text).map_err(|error| refused(error.to_string()));
        let (source, file) = (text(source)?, text(name)?);
        let program = nvrtc::create_program(&source, Some(&file)).map_err(|error| refused(format!("{error:?}")))?;
        let program = Program(program);
        // SAFETY: the program was made above and lives until the end.
        if let Err(error) = unsafe { nvrtc::compile_program(program.0, options) } {
            // SAFETY: as above.
            let log = unsafe { nvrtc::get_program_log(program.0) }.unwrap_or_default();
            let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).take_while(|byte| *byte != 0).collect();
            return Err(refused(format!("{error:?}: {}", String::from_utf8_lossy(&log).trim())));
        }
        let machine_code = options.iter().any(|option| option.contains("=sm_"));
        let image = if machine_code { program.machine_code() } else { program.ptx() };
        let image = image.map_err(|error| refused(format!("{error:?}")))?;
        // The driver takes an address without a length.
        if image.is_empty() { Err(refused("NVRTC returned no code".to_owned())) } else { Ok(image) }
    }
}

/// A program of NVRTC, freed on drop.
struct Program(sys::nvrtcProgram);

impl Program {
    fn machine_code(&self) -> Result<Vec<u8>, nvrtc::NvrtcError> {
        let mut size = 0;
        // SAFETY: the program lives, and `size` outlives the call.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut size) }.result()?;
        let mut code = vec![0u8; size];
        // SAFETY: the buffer has room for the number of bytes just returned.
        unsafe { sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast()) }.result()?;
        Ok(code)
    }

    fn ptx(&self) -> Result<Vec<u8>, nvrtc::NvrtcError> {
        // SAFETY: the program lives.
        let text = unsafe { nvrtc::get_ptx(self.0) }?;
        Ok(text.into_iter().map(|byte| byte as u8).collect())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was made by NVRTC and is destroyed here only.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

/// Opens the library before cudarc looks it up by name, so that the loader finds it.
fn open() -> Result<()> {
    let named = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11"].map(PathBuf::from);
    let given = environment::path("DISTRIBUTE_NVRTC_LIBRARY");
    let candidates = given.clone().into_iter().chain(named).chain(in_usual_places());
    let mut tried = Vec::new();
    for file in candidates {
        // SAFETY: NVRTC's initialisers may run in any process.
        match unsafe { Library::new(&file) } {
            Ok(library) => {
                stays(library);
                open_builtins(&file);
                return Ok(());
            }
            Err(error) if given.as_ref() == Some(&file) => {
                return Err(lost(format!(
                    "DISTRIBUTE_NVRTC_LIBRARY names a file that cannot be opened: {}",
                    why(&error)
                )));
            }
            Err(error) => tried.push(why(&error)),
        }
    }
    Err(lost(format!("tried {}", tried.join("; "))))
}

/// Opens the builtins library, which NVRTC loads by name when it first compiles, even if only NVRTC's own folder
/// contains it.
fn open_builtins(file: &Path) {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let beside = folder.into_iter().flat_map(children);
    for part in beside.filter(|path| file_name(path).starts_with("libnvrtc-builtins.so")) {
        // SAFETY: it is a part of NVRTC, whose initialisers may run in any process. If it fails, NVRTC itself reports
        // that.
        if let Ok(library) = unsafe { Library::new(part) } {
            stays(library);
        }
    }
}

/// Keeps a library open: the loader finds it by name only while it is open.
fn stays(library: Library) {
    std::mem::forget(library);
}

/// Returns the paths at which toolkits and Python packages install NVRTC.
fn in_usual_places() -> Vec<PathBuf> {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(environment::path);
    let toolkits = toolkits.chain([PathBuf::from("/usr/local/cuda")]).map(|root| root.join("lib64"));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(environment::path);
    let home = env::home_dir().map(|home| home.join(".local"));
    let pythons = environments.chain(home).chain([PathBuf::from("/usr/local"), PathBuf::from("/usr")]);
    let packages = pythons.flat_map(|root| children(&root.join("lib"))).flat_map(|python| {
        ["site-packages", "dist-packages"].map(|packages| python.join(packages).join("nvidia")).into_iter()
    });
    let wheels = packages.flat_map(|nvidia| [nvidia.join("cu13/lib"), nvidia.join("cuda_nvrtc/lib")]);
    let folders = toolkits.chain(wheels);
    folders.flat_map(|folder| children(&folder)).filter(|file| file_name(file).starts_with("libnvrtc.so")).collect()
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let mut children: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    children.sort();
    children
}

fn lost(problem: String) -> Error {
    Error::Nvrtc { problem }
}

/// Returns the cache file of the code compiled from exactly this text, or `None` if the cache is disabled.
fn cache_file(compiler: &Compiler, options: &[String], source: &str) -> Option<PathBuf> {
    let folder = match environment::path("DISTRIBUTE_KERNEL_CACHE") {
        Some(folder) if folder.as_os_str().is_empty() => return None,
        Some(folder) => folder,
        None => environment::path("XDG_CACHE_HOME")
            .or_else(|| env::home_dir().map(|home| home.join(".cache")))?
            .join("distribute/kernels"),
    };
    let mut hasher = DefaultHasher::new();
    (compiler.version, options, source).hash(&mut hasher);
    Some(folder.join(format!("{:016x}.cubin", hasher.finish())))
}

/// Keeps code in the cache. Errors are ignored: without the cache, start-up is only slower.
fn keep(file: &Path, image: &[u8]) {
    let folder = file.parent().map_or(Ok(()), fs::create_dir_all);
    let _ = folder.and_then(|()| write_checked(file, MAGIC, image));
}

/// Returns the code of a cached file, if there is one that is not damaged. The driver takes an address without a
/// length, so it must not get a part of a file.
fn kept(file: &Path) -> Option<Vec<u8>> {
    read_checked(file, MAGIC, LIMIT_BYTES).ok().flatten()
}

/// Begins a cached file.
const MAGIC: &Magic = b"DCUDA\0\0\x01";

/// No compiled module has as many bytes; the largest ones have some hundred thousand.
const LIMIT_BYTES: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use distribute_testkit::skipped;

    use super::*;

    /// Returns the compiler, or prints that the test is skipped because it is missing.
    fn compiler() -> Option<Compiler> {
        Compiler::find().inspect_err(|error| skipped(error)).ok()
    }

    #[test]
    fn every_kernel_compiles_for_every_architecture() {
        let Some(compiler) = compiler() else { return };
        for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
            let Ok(options) = compiler.options(capability) else {
                skipped(format_args!("NVRTC {:?} knows nothing as old as {capability:?}", compiler.version));
                continue;
            };
            for module in Module::all() {
                let image = compiler.compile(&module.name(), &module.source(), &options);
                let image = image.unwrap_or_else(|error| panic!("{capability:?}: {error}"));
                assert!(image.len() > 500, "{} for {capability:?}: {} bytes", module.name(), image.len());
            }
        }
    }

    #[test]
    fn a_wrong_kernel_is_told_with_its_file_and_line() {
        let Some(compiler) = compiler() else { return };
        let options = compiler.options((9, 0)).unwrap();
        let source = "#line 7 \"wrong.cu\"\nextern \"C\" __global__ void wrong() { int x = y; }\n";
        let error = compiler.compile("wrong.cu", source, &options).unwrap_err().to_string();
        assert!(error.contains("wrong.cu(7)") && error.contains("\"y\""), "{error}");
    }

    #[test]
    fn an_older_gpu_gets_its_own_code_and_a_newer_one_what_its_driver_translates() {
        let compiler = Compiler { version: (12, 4), architectures: vec![70, 80, 90] };
        assert_eq!(compiler.options((8, 0)).unwrap()[0], "--gpu-architecture=sm_80");
        assert_eq!(compiler.options((12, 0)).unwrap()[0], "--gpu-architecture=compute_90");
        let error = compiler.options((6, 1)).unwrap_err().to_string();
        assert!(error.contains("compute capability 6.1"), "{error}");
    }

    #[test]
    fn gpus_of_a_process_that_keep_the_same_code_never_show_a_part_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let (file, image) = (folder.path().join("a.cubin"), vec![7; 1 << 20]);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        keep(&file, &image);
                        assert!(kept(&file).unwrap() == image);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn code_is_kept_by_its_text_and_options() {
        let compiler = Compiler { version: (13, 0), architectures: vec![90] };
        let file = |source: &str, option: &str| cache_file(&compiler, &[option.to_owned()], source);
        let Some(first) = file("a", "b") else { return skipped("DISTRIBUTE_KERNEL_CACHE is empty") };
        assert_eq!(file("a", "b"), Some(first.clone()));
        assert!(file("ab", "").is_some_and(|other| other != first));
        let newer = Compiler { version: (13, 1), ..compiler.clone() };
        assert_ne!(cache_file(&newer, &["b".to_owned()], "a"), Some(first));
    }
}

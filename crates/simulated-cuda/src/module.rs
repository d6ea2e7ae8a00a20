//! Modules: compiled kernels loaded into this process, and their launches.

use std::ffi::{CStr, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use libloading::Library;

use crate::context::Context;
use crate::error::{Code, Result};
use crate::ffi::report;
use crate::memory::MEMORY;
use crate::random::random;
use crate::registry::{Registry, locked};
use crate::settings::settings;

/// A loaded module.
pub(crate) struct Module {
    pub(crate) handle: usize,
    /// Handle of its context.
    pub(crate) context: usize,
    library: Arc<Loaded>,
    /// Handles of the functions looked up so far, by name.
    functions: Mutex<Vec<(Vec<u8>, usize)>>,
}

/// A kernel of a module. It keeps the module's code loaded while a launch is queued.
pub(crate) struct Function {
    pub(crate) handle: usize,
    /// Handle of the context of its module.
    pub(crate) context: usize,
    pub(crate) max_threads: u32,
    pub(crate) param_bytes: usize,
    name: String,
    run: Trampoline,
    clear: Clear,
    /// The number of launches that have run.
    launches: AtomicU32,
    _library: Arc<Loaded>,
}

/// A kernel with its arguments at the time of the launch.
pub(crate) struct Launch {
    pub(crate) function: Arc<Function>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    /// The struct that the kernel takes, aligned for every C type.
    pub(crate) params: Box<[u128]>,
}

/// A shared object loaded from an anonymous file.
struct Loaded {
    library: Library,
    /// The loader identifies objects by name, and the name contains this file descriptor, so no other file may have it
    /// while the object is loaded. Fields are dropped in this order.
    _file: File,
}

/// The function that the prelude generates for a `KERNEL`: arguments; dimensions of the grid and a block, and whether
/// threads run in descending order; and a seed.
type Trampoline = unsafe extern "C" fn(*const *const c_void, *const u32, u64);

/// Zeroes the padding of the kernel's struct.
type Clear = unsafe extern "C" fn(*mut c_void);

/// All modules, by handle.
pub(crate) static MODULES: Registry<Module> = Registry::new();

/// All functions that were looked up, by handle.
pub(crate) static FUNCTIONS: Registry<Function> = Registry::new();

impl Module {
    /// Loads a shared object.
    pub(crate) fn load(context: &Context, object: &[u8]) -> Result<Arc<Self>> {
        let loaded = Loaded::new(object).map_err(|error| {
            report(format_args!("module: {error}"));
            Code::OPERATING_SYSTEM
        })?;
        let library = Arc::new(loaded);
        let context = context.handle;
        Ok(MODULES.insert(|handle| Self { handle, context, library, functions: Mutex::default() }))
    }

    /// Returns the kernel with a name; the handle is the same each time.
    pub(crate) fn function(&self, name: &CStr) -> Result<usize> {
        let mut functions = locked(&self.functions);
        if let Some((_, handle)) = functions.iter().find(|(known, _)| known == name.to_bytes()) {
            return Ok(*handle);
        }
        let name = name.to_str().map_err(|_| Code::NOT_FOUND)?;
        let param_bytes = self.constant::<u64>(&format!("{name}_params")).ok_or(Code::NOT_FOUND)?;
        let max_threads = self.constant::<u32>(&format!("{name}_threads")).ok_or(Code::NOT_FOUND)?;
        // SAFETY: the prelude defines a trampoline under the name of each kernel that has the other symbols.
        let run = unsafe { self.library.library.get::<Trampoline>(name) }.map_err(|_| Code::NOT_FOUND)?;
        // SAFETY: the prelude defines a function of this type under a name with this suffix.
        let clear =
            unsafe { self.library.library.get::<Clear>(format!("{name}_clear")) }.map_err(|_| Code::NOT_FOUND)?;
        let function = FUNCTIONS.insert(|handle| Function {
            handle,
            context: self.context,
            max_threads,
            param_bytes: usize::try_from(param_bytes).unwrap_or(usize::MAX),
            name: name.to_owned(),
            run: *run,
            clear: *clear,
            launches: AtomicU32::new(0),
            _library: self.library.clone(),
        });
        functions.push((name.as_bytes().to_vec(), function.handle));
        Ok(function.handle)
    }

    /// Removes the functions, whose handles are invalid without their module.
    pub(crate) fn unload(&self) {
        for (_, handle) in locked(&self.functions).drain(..) {
            FUNCTIONS.remove(handle);
        }
    }

    fn constant<T: Copy>(&self, name: &str) -> Option<T> {
        // SAFETY: the prelude defines symbols with these suffixes as constants of the requested types.
        let symbol = unsafe { self.library.library.get::<*const T>(name) }.ok()?;
        // SAFETY: it is the address of a constant in a loaded object.
        Some(unsafe { symbol.read() })
    }
}

impl Function {
    /// Copies the struct that the kernel takes, since the caller may change it as soon as the launch has returned.
    ///
    /// # Safety
    ///
    /// `source` points to such a struct.
    pub(crate) unsafe fn copy_params(&self, source: *const u8) -> Box<[u128]> {
        let mut copied = vec![0_u128; self.param_bytes.div_ceil(size_of::<u128>())].into_boxed_slice();
        let target = copied.as_mut_ptr().cast::<u8>();
        // SAFETY: the caller promises as many bytes as the kernel's struct has, and `copied` has at least as many.
        unsafe { target.copy_from_nonoverlapping(source, self.param_bytes) };
        // SAFETY: there is such a struct now, aligned for every type.
        unsafe { (self.clear)(target.cast()) };
        copied
    }
}

impl Loaded {
    fn new(object: &[u8]) -> std::result::Result<Self, Box<dyn std::error::Error>> {
        use std::io::Write as _;

        let file = rustix::fs::memfd_create("simulated-cuda-module", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut file = File::from(file);
        file.write_all(object)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        // SAFETY: the object is compiled from the caller's kernels and has no initialisers of its own.
        let library = unsafe { Library::new(path) }?;
        Ok(Self { library, _file: file })
    }
}

impl Launch {
    /// Runs all blocks, unless an argument points to memory that the kernel may not access.
    pub(crate) fn run(&self, context: &Context) -> Result {
        let live = MEMORY.live();
        let words = self.params.iter().flat_map(|pair| [*pair as usize, (*pair >> 64) as usize]);
        for (place, word) in words.enumerate() {
            if let Err(what) = live.check_argument(context, word) {
                let (device, name, byte) = (context.device, &self.function.name, place * 8);
                report(format_args!(
                    "device {device}: kernel {name}: byte {byte} of its argument points to {what}: {word:#x}"
                ));
                return Err(Code::ILLEGAL_ADDRESS);
            }
        }
        let arguments = [self.params.as_ptr().cast::<c_void>()];
        let [x, y, z] = self.grid;
        // Threads that depend on each other between two barriers compute something else in the other order. Relaxed:
        // the number only alternates.
        let descends = self.function.launches.fetch_add(1, Ordering::Relaxed) % 2;
        let dimensions = [x, y, z, self.block[0], self.block[1], self.block[2], descends];
        let mut seed = settings().seed;
        let seed = random(&mut seed);
        // SAFETY: the trampoline reads one struct, whose bytes were copied at the launch, and seven numbers. The
        // kernel's memory accesses are the caller's responsibility, as on a GPU; memory that it can access is not freed
        // while `live` is held.
        unsafe { (self.function.run)(arguments.as_ptr(), dimensions.as_ptr(), seed) };
        Ok(())
    }
}

//! The CUDA driver next to this library, or as found by the system's loader.
#![expect(unsafe_code, reason = "the driver is a C library")]

use std::env;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::{fs, ptr};

use libloading::Library;
use nccl_sys::{Code, Stream};

use crate::failure::Failure;

/// A function that a stream runs.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// The driver's functions that are used here; those that a driver may lack are optional.
pub(crate) struct Cuda {
    launch: unsafe extern "C" fn(Stream, HostFunction, *mut c_void) -> c_int,
    current_device: Option<unsafe extern "C" fn(*mut c_int) -> c_int>,
    device_count: Option<unsafe extern "C" fn(*mut c_int) -> c_int>,
    bus_id: Option<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int>,
    is_capturing: Option<unsafe extern "C" fn(Stream, *mut c_uint) -> c_int>,
    allocate: Option<unsafe extern "C" fn(*mut u64, usize) -> c_int>,
    free: Option<unsafe extern "C" fn(u64) -> c_int>,
    attribute: Option<unsafe extern "C" fn(*mut c_void, c_uint, u64) -> c_int>,
}

static CUDA: LazyLock<Option<Cuda>> = LazyLock::new(Cuda::open);

/// Returns the driver, if there is one.
pub(crate) fn cuda() -> Option<&'static Cuda> {
    CUDA.as_ref()
}

impl Cuda {
    fn open() -> Option<Self> {
        let beside = own_file().map(|file| file.with_file_name(SONAME)).filter(|file| file.exists());
        let names = beside.into_iter().chain([PathBuf::from(SONAME)]);
        // SAFETY: the file is a CUDA driver, simulated or not, whose initialisers may run.
        let library = names.filter_map(|name| unsafe { Library::new(name) }.ok()).next()?;
        let cuda = Self {
            launch: find(&library, c"cuLaunchHostFunc")?,
            current_device: find(&library, c"cuCtxGetDevice"),
            device_count: find(&library, c"cuDeviceGetCount"),
            bus_id: find(&library, c"cuDeviceGetPCIBusId"),
            is_capturing: find(&library, c"cuStreamIsCapturing"),
            allocate: find(&library, c"cuMemAlloc_v2"),
            free: find(&library, c"cuMemFree_v2"),
            attribute: find(&library, c"cuPointerGetAttribute"),
        };
        // Not unloaded: its functions are called for as long as the process lives.
        let _ = std::mem::ManuallyDrop::new(library);
        Some(cuda)
    }

    /// Enqueues a function on a stream.
    pub(crate) fn launch(&self, stream: Stream, function: HostFunction, data: *mut c_void) -> Result<(), Failure> {
        // SAFETY: the stream is the caller's; the function matches the data, which live until it has run.
        check("cuLaunchHostFunc", unsafe { (self.launch)(stream, function, data) })
    }

    /// Returns the current context's device.
    pub(crate) fn current_device(&self) -> Option<c_int> {
        let mut device = 0;
        // SAFETY: an integer is written.
        (unsafe { self.current_device?(&mut device) } == 0).then_some(device)
    }

    pub(crate) fn device_count(&self) -> Option<c_int> {
        let mut count = 0;
        // SAFETY: an integer is written.
        (unsafe { self.device_count?(&mut count) } == 0).then_some(count)
    }

    /// Returns a device's name, which is unique among all machines.
    pub(crate) fn identity(&self, device: c_int) -> Option<String> {
        let mut bus_id = [0 as c_char; 32];
        // SAFETY: up to 32 characters are written.
        let known = unsafe { self.bus_id?(bus_id.as_mut_ptr(), 32, device) } == 0;
        if !known {
            return None;
        }
        // SAFETY: the driver zero-terminates the text.
        let bus_id = unsafe { CStr::from_ptr(bus_id.as_ptr()) };
        Some(format!("{} of host {}", bus_id.to_string_lossy(), host()))
    }

    /// Returns whether the stream is being captured into a graph.
    pub(crate) fn is_capturing(&self, stream: Stream) -> bool {
        let mut status = 0;
        let Some(function) = self.is_capturing else { return false };
        // SAFETY: the stream is the caller's; an integer is written.
        (unsafe { function(stream, &mut status) } == 0) && status == 1
    }

    /// Checks that kernels of a device may use the memory at an address: it is the device's, or pinned host memory.
    pub(crate) fn check_memory(&self, name: &str, memory: *const c_void, device: c_int) -> Result<(), Failure> {
        const MEMORY_TYPE: c_uint = 2;
        const DEVICE_ORDINAL: c_uint = 9;
        const DEVICE_MEMORY: c_int = 2;
        const INVALID_VALUE: c_int = 1;
        let Some(function) = self.attribute else { return Ok(()) };
        let ask = |attribute| {
            let mut value: c_int = 0;
            // SAFETY: both attributes are integers of this size; any address may be asked for.
            let code = unsafe { function((&raw mut value).cast(), attribute, memory.expose_provenance() as u64) };
            match code {
                INVALID_VALUE => Err(Failure::argument(format!("{name} is not a valid pointer"))),
                code => check("cuPointerGetAttribute", code).map(|()| value),
            }
        };
        let (kind, owner) = (ask(MEMORY_TYPE)?, ask(DEVICE_ORDINAL)?);
        if kind == DEVICE_MEMORY && owner != device {
            let text = format!("{name} allocated on device {owner} mismatches with NCCL device {device}");
            return Err(Failure::argument(text));
        }
        Ok(())
    }

    pub(crate) fn allocate(&self, size: usize) -> Result<*mut c_void, Failure> {
        let function = self.allocate.ok_or_else(|| Failure::new(Code::UNHANDLED_CUDA_ERROR, "no cuMemAlloc_v2"))?;
        let mut address = 0;
        // SAFETY: an address is written.
        check("cuMemAlloc_v2", unsafe { function(&mut address, size) })?;
        Ok(ptr::with_exposed_provenance_mut(address as usize))
    }

    pub(crate) fn free(&self, memory: *mut c_void) -> Result<(), Failure> {
        let function = self.free.ok_or_else(|| Failure::new(Code::UNHANDLED_CUDA_ERROR, "no cuMemFree_v2"))?;
        // SAFETY: the caller passes memory of `allocate`.
        check("cuMemFree_v2", unsafe { function(memory.expose_provenance() as u64) })
    }
}

fn check(function: &str, code: c_int) -> Result<(), Failure> {
    match code {
        0 => Ok(()),
        code => Err(Failure::new(Code::UNHANDLED_CUDA_ERROR, format!("Cuda failure {code} in {function}"))),
    }
}

fn find<F: Copy>(library: &Library, name: &CStr) -> Option<F> {
    // SAFETY: the driver's header gives the functions of these names these types.
    let function = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
    function.ok().map(|function| *function)
}

/// Returns the identity by which NCCL distinguishes machines.
fn host() -> String {
    let given = env::var("NCCL_HOSTID").ok();
    given.or_else(|| fs::read_to_string("/proc/sys/kernel/hostname").ok()).unwrap_or_default().trim().to_owned()
}

/// Returns the file that this library was loaded from.
fn own_file() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: the address is of this library; the answer goes to `info`.
    let known = unsafe { libc::dladdr(own_file as *const c_void, &mut info) } != 0;
    if !known || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name belongs to this library, which is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

const SONAME: &str = "libcuda.so.1";

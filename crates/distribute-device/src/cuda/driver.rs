//! The gate to the driver: nothing calls it before the functions that are needed were found.
//!
//! cudarc panics if a library or one of its functions is missing, so both are looked up here first.

use std::sync::OnceLock;

use cudarc::driver::{DriverError, result, sys};
use libloading::Library;

use crate::{Error, Result, environment};

/// A driver that was found and initialised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Driver {
    /// The newest CUDA version that it supports: 13000 is 13.0.
    pub(super) version: i32,
    pub(super) devices: u32,
}

/// The functions that this module calls beyond those of CUDA 11.0; a driver that lacks one is too old.
const NEEDED: [&str; 13] = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetMemPool",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolSetAccess",
    "cuMemPoolSetAttribute",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuLaunchHostFunc",
    "cuDeviceGetP2PAttribute",
];

const FILES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Returns the driver, or a clause that says why it cannot be used.
pub(crate) fn driver() -> Result<Driver, &'static str> {
    // A driver cannot be initialised twice or unloaded from a process, so the result is kept.
    static FOUND: OnceLock<Result<Driver, String>> = OnceLock::new();
    FOUND.get_or_init(find).as_ref().copied().map_err(String::as_str)
}

fn find() -> Result<Driver, String> {
    let mut tried = Vec::new();
    let library = FILES.iter().find_map(|file| {
        // SAFETY: the driver's initialisers may run in any process.
        unsafe { Library::new(*file) }.map_err(|error| tried.push(why(&error))).ok()
    });
    let Some(library) = library else {
        let remedy = "install the NVIDIA driver, or in a container pass the GPUs on";
        return Err(format!("the driver's library cannot be opened ({}); {remedy}", tried.join("; ")));
    };
    if let Some(missing) = NEEDED.iter().find(|name| !has(&library, name)) {
        return Err(format!("the driver has no {missing}; update it to one for CUDA 11.4 or newer"));
    }
    result::init().map_err(|error| format!("the driver refused to start: {}", words(error)))?;
    let count = result::device::get_count().map_err(|error| format!("the driver counts no GPUs: {}", words(error)))?;
    let mut version = 0;
    // SAFETY: `version` outlives the call.
    let answer = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    answer.result().map_err(|error| format!("the driver does not tell its version: {}", words(error)))?;
    match u32::try_from(count) {
        Ok(devices) if devices > 0 => Ok(Driver { version, devices }),
        _ => Err(format!("the driver shows no GPU to this process{}", hidden())),
    }
}

/// Returns a clause about variables that hide GPUs, if any.
fn hidden() -> String {
    match environment::text("CUDA_VISIBLE_DEVICES") {
        Some(value) => format!(" (CUDA_VISIBLE_DEVICES is {value:?}; unset it or name GPUs that are there)"),
        None => String::new(),
    }
}

fn has(library: &Library, name: &str) -> bool {
    // SAFETY: the function is only looked up, never called through this type.
    unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok()
}

/// Returns the loader's own message, which is the cause of the error.
pub(super) fn why(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the driver's name and description of an error.
pub(super) fn words(error: DriverError) -> String {
    let name = error.error_name().map_or_else(|_| format!("{:?}", error.0), |name| name.to_string_lossy().into_owned());
    let mut text = error.error_string().map_or_else(|_| String::new(), |text| format!(": {}", text.to_string_lossy()));
    if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE {
        text += &hidden();
    }
    name + &text
}

/// Returns the error of a driver call on `device`.
pub(super) fn failed(operation: &'static str, device: &str, error: DriverError) -> Error {
    Error::Cuda { operation, device: device.to_owned(), cause: words(error) }
}

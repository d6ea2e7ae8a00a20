//! Memory of a GPU that another library has allocated, as tensor libraries do.

#![expect(unsafe_code, reason = "functions of the driver")]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use distribute_device::DeviceBuffer;
use distribute_device::cuda::{CudaDevice, CudaStream};
use libloading::Library;

/// Memory of a GPU's default pool.
pub(super) struct Lent {
    driver: Library,
    address: u64,
    pub(super) buffer: DeviceBuffer,
}

impl Lent {
    pub(super) fn new(device: &CudaDevice, len_bytes: usize) -> Lent {
        type Allocate = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> c_int;
        device.make_current().unwrap();
        // SAFETY: it is the simulated driver, which is open already.
        let driver = unsafe { Library::new("libcuda.so.1") }.unwrap();
        // SAFETY: the driver's function of this name has this type.
        let allocate = unsafe { driver.get::<Allocate>("cuMemAllocAsync") }.unwrap();
        let mut address = 0;
        // SAFETY: the address outlives the call.
        assert_eq!(unsafe { allocate(&raw mut address, len_bytes, std::ptr::null_mut()) }, 0);
        // SAFETY: it was just allocated with that length, and `free` is called after the operations on it.
        let buffer = unsafe { device.lend(address, len_bytes, Arc::new(())) };
        Lent { driver, address, buffer }
    }

    /// Frees the memory in the order of a stream.
    pub(super) fn free(self, stream: &CudaStream) {
        type Free = unsafe extern "C" fn(u64, *mut c_void) -> c_int;
        // SAFETY: the driver's function of this name has this type.
        let free = unsafe { self.driver.get::<Free>("cuMemFreeAsync") }.unwrap();
        // SAFETY: it was allocated above, and is freed once.
        assert_eq!(unsafe { free(self.address, stream.handle()) }, 0);
    }
}

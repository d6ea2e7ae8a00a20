//! The stand-in under cudarc's safe layer, in processes of their own.
#![expect(unsafe_code, reason = "cudarc's launches and uninitialised memory")]
#![expect(clippy::unwrap_used, reason = "tests")]

mod errors;
mod graphs;
mod kernels;
mod memory;
mod streams;

use std::ffi::c_void;
use std::process::{Command, Stdio};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use distribute_testkit::skipped;

/// Defines the kernel convention, and a kernel that adds a number.
const ADD: &str = r#"
#ifndef KERNEL
#define KERNEL(name, Params, threads) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Params p)
#endif
struct AddParams { float *data; unsigned long long len; float value; };
typedef struct AddParams AddParams;
static __device__ __forceinline__ unsigned long long first(void) {
  return (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
}
KERNEL(add, AddParams, 256) {
  for (unsigned long long i = first(); i < p.len; i += (unsigned long long)gridDim.x * blockDim.x) {
    p.data[i] += p.value;
  }
}
"#;

#[derive(Clone, Copy)]
#[repr(C)]
struct AddParams {
    data: u64,
    len: u64,
    value: f32,
}

// SAFETY: it is the kernel's parameter type and has no host pointers.
unsafe impl cudarc::driver::DeviceRepr for AddParams {}

/// Returns a kernel of `source`, or `None` if there is no C compiler: the test is then skipped.
fn kernel(context: &Arc<CudaContext>, source: &str, name: &str) -> Option<CudaFunction> {
    if !has_compiler() {
        skipped("kernels need a C compiler, cc");
        return None;
    }
    let options = CompileOptions { arch: Some("compute_90"), ..CompileOptions::default() };
    let ptx = compile_ptx_with_opts(source, options).unwrap();
    Some(context.load_module(ptx).unwrap().load_function(name).unwrap())
}

fn has_compiler() -> bool {
    let quiet = Command::new("cc").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

fn code<T>(result: Result<T, DriverError>) -> CUresult {
    result.err().map_or(CUresult::CUDA_SUCCESS, |error| error.0)
}

/// Enqueues a function call on the stream.
fn call_in<F: FnOnce() + Send + 'static>(stream: &CudaStream, function: F) {
    extern "C" fn call<F: FnOnce()>(data: *mut c_void) {
        // SAFETY: it is the box created below, and the stream calls this once.
        let function = unsafe { Box::from_raw(data.cast::<F>()) };
        function();
    }
    let data = Box::into_raw(Box::new(function)).cast();
    // SAFETY: the stream lives, and the function takes this argument.
    let called = unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(call::<F>), data) };
    assert_eq!(called, CUresult::CUDA_SUCCESS);
}

//! Injected failures, and permanent errors.

use cudarc::driver::{CudaContext, result, sys};
use simulated_cuda::inside;

use super::{call_in, code};

#[test]
fn a_call_fails_when_it_is_told_to() {
    if !inside(
        "errors::a_call_fails_when_it_is_told_to",
        &[("SIMULATED_CUDA_FAIL", "cuStreamCreate:2:999;cuMemAllocAsync:1:2")],
    ) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    assert_eq!(code(context.new_stream()), sys::CUresult::CUDA_ERROR_UNKNOWN);
    assert_eq!(code(context.new_stream()), sys::CUresult::CUDA_SUCCESS);
    assert_eq!(code(stream.alloc_zeros::<u8>(1)), sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    assert_eq!(code(stream.alloc_zeros::<u8>(1)), sys::CUresult::CUDA_SUCCESS);
}

#[test]
fn memory_freed_before_a_queued_copy_breaks_the_context() {
    if !inside("errors::memory_freed_before_a_queued_copy_breaks_the_context", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let [one, other] = [(); 2].map(|()| context.new_stream().unwrap());
    let (release, wait) = std::sync::mpsc::channel::<()>();
    call_in(&one, move || {
        let _ = wait.recv_timeout(std::time::Duration::from_secs(60));
    });
    // SAFETY: the memory is freed too early on purpose: the simulation detects it and copies nothing.
    let address = unsafe { result::malloc_async(one.cu_stream(), 8) }.unwrap();
    // SAFETY: as above.
    unsafe { result::memset_d8_async(address, 0, 8, one.cu_stream()) }.unwrap();
    // SAFETY: as above.
    unsafe { result::free_async(address, other.cu_stream()) }.unwrap();
    other.synchronize().unwrap();
    release.send(()).unwrap();
    assert_eq!(code(one.synchronize()), sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(code(other.synchronize()), sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn the_name_of_a_function_that_is_not_exported_is_refused() {
    let test = "errors::the_name_of_a_function_that_is_not_exported_is_refused";
    if !inside(test, &[("SIMULATED_CUDA_FAIL", "cuStreamCreat:1:999")]) {
        return;
    }
    assert_eq!(code(CudaContext::new(0)), sys::CUresult::CUDA_ERROR_UNKNOWN);
}

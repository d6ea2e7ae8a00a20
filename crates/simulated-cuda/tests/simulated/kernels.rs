//! Kernels: compilation, loading and launches.

use cudarc::driver::{CudaContext, DevicePtr as _, DevicePtrMut as _, LaunchConfig, PushKernelArg as _, sys};
use cudarc::nvrtc::{CompileError, Ptx, compile_ptx};
use distribute_testkit::skipped;
use simulated_cuda::inside;

use super::{ADD, AddParams, code, kernel};

#[test]
fn a_kernel_runs_on_every_element() {
    if !inside("kernels::a_kernel_runs_on_every_element", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let Some(add) = kernel(&context, ADD, "add") else { return };
    let stream = context.new_stream().unwrap();
    for len in [1, 255, 256, 257, 10_000_usize] {
        let host: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let mut data = stream.clone_htod(&host).unwrap();
        let mut params = AddParams { data: data.device_ptr_mut(&stream).0, len: len as u64, value: 0.5 };
        let grid = (len.div_ceil(256).min(7) as u32, 1, 1);
        let config = LaunchConfig { grid_dim: grid, block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel takes these parameters, and the memory has the length that they contain.
        unsafe { stream.launch_builder(&add).arg(&params).launch(config) }.unwrap();
        // The parameters at the time of the launch count; later changes have no effect.
        params.value = f32::NAN;
        assert!(params.value.is_nan());
        let expected: Vec<f32> = host.iter().map(|x| x + 0.5).collect();
        assert_eq!(stream.clone_dtoh(&data).unwrap(), expected);
    }
}

#[test]
fn a_kernel_may_use_half_precision_atomics_and_bits() {
    if !inside("kernels::a_kernel_may_use_half_precision_atomics_and_bits", &[]) {
        return;
    }
    let source = r#"
        #ifdef DISTRIBUTE_SIMULATED
        typedef _Float16 half;
        #endif
        typedef struct { half *values; unsigned int *is_bad; float factor; unsigned int len; } ScaleParams;
        __device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }
        __device__ inline float scaled(float x, float factor) { return sqrtf(x * x) * factor; }
        KERNEL(scale, ScaleParams, 128) {
          const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i >= p.len) return;
          const float x = (float)p.values[i];
          if (!is_finite(x)) atomicOr(p.is_bad, 1u);
          p.values[i] = (half)scaled(x, p.factor);
        }"#;
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct ScaleParams {
        values: u64,
        is_bad: u64,
        factor: f32,
        len: u32,
    }
    // SAFETY: it is the kernel's parameter type and has no host pointers.
    unsafe impl cudarc::driver::DeviceRepr for ScaleParams {}

    let context = CudaContext::new(0).unwrap();
    let Some(scale) = kernel(&context, source, "scale") else { return };
    let stream = context.new_stream().unwrap();
    let config = LaunchConfig { grid_dim: (3, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
    for (last, bad) in [(0x3C00_u16, 0_u32), (0x7C00, 1)] {
        let mut halves = [0x4000_u16; 300];
        halves[299] = last;
        let (values, is_bad) = (stream.clone_htod(&halves).unwrap(), stream.alloc_zeros::<u32>(1).unwrap());
        let (values_at, is_bad_at) = (values.device_ptr(&stream).0, is_bad.device_ptr(&stream).0);
        let params = ScaleParams { values: values_at, is_bad: is_bad_at, factor: 2.0, len: 300 };
        // SAFETY: the kernel takes these parameters, and the memory has the length that they contain.
        unsafe { stream.launch_builder(&scale).arg(&params).launch(config) }.unwrap();
        assert_eq!(stream.clone_dtoh(&values).unwrap()[..299], [0x4400; 299]);
        assert_eq!(stream.clone_dtoh(&is_bad).unwrap(), [bad]);
    }
}

#[test]
fn blocks_run_in_another_order() {
    if !inside("kernels::blocks_run_in_another_order", &[]) {
        return;
    }
    let source = r#"
        typedef struct { unsigned int *next, *order; } OrderParams;
        KERNEL(order, OrderParams, 1) {
          p.order[atomicAdd(p.next, 1u)] = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        }"#;
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct OrderParams {
        next: u64,
        order: u64,
    }
    // SAFETY: it is the kernel's parameter type and has no host pointers.
    unsafe impl cudarc::driver::DeviceRepr for OrderParams {}

    let context = CudaContext::new(0).unwrap();
    let Some(order) = kernel(&context, source, "order") else { return };
    let stream = context.new_stream().unwrap();
    let next = stream.alloc_zeros::<u32>(1).unwrap();
    let seen = stream.alloc_zeros::<u32>(60).unwrap();
    let params = OrderParams { next: next.device_ptr(&stream).0, order: seen.device_ptr(&stream).0 };
    let config = LaunchConfig { grid_dim: (5, 4, 3), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel takes these parameters, and writes one number for each of 60 blocks.
    unsafe { stream.launch_builder(&order).arg(&params).launch(config) }.unwrap();
    let mut blocks = stream.clone_dtoh(&seen).unwrap();
    assert!(!blocks.is_sorted());
    blocks.sort_unstable();
    assert_eq!(blocks, (0..60).collect::<Vec<_>>());
}

#[test]
fn threads_of_a_block_run_in_the_other_order_in_every_second_launch() {
    if !inside("kernels::threads_of_a_block_run_in_the_other_order_in_every_second_launch", &[]) {
        return;
    }
    let source = r#"
        typedef struct { unsigned int *next, *order; } OrderParams;
        typedef struct { unsigned int threads; } Shared;
        PHASED_KERNEL(order, OrderParams, Shared, 2, 64) {
          const unsigned int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
          if (phase == 0 && thread == 0) shared->threads = blockDim.x * blockDim.y * blockDim.z;
          if (phase == 1 && thread < shared->threads) p->order[atomicAdd(p->next, 1u)] = thread;
        }"#;
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct OrderParams {
        next: u64,
        order: u64,
    }
    // SAFETY: it is the kernel's parameter type and has no host pointers.
    unsafe impl cudarc::driver::DeviceRepr for OrderParams {}

    let context = CudaContext::new(0).unwrap();
    let Some(order) = kernel(&context, source, "order") else { return };
    let stream = context.new_stream().unwrap();
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (2, 3, 2), shared_mem_bytes: 0 };
    let orders = [(); 3].map(|()| {
        let (next, seen) = (stream.alloc_zeros::<u32>(1).unwrap(), stream.alloc_zeros::<u32>(12).unwrap());
        let params = OrderParams { next: next.device_ptr(&stream).0, order: seen.device_ptr(&stream).0 };
        // SAFETY: the kernel takes these parameters, and writes one number for each of 12 threads.
        unsafe { stream.launch_builder(&order).arg(&params).launch(config) }.unwrap();
        stream.clone_dtoh(&seen).unwrap()
    });
    let ascending: Vec<u32> = (0..12).collect();
    let descending: Vec<u32> = (0..12).rev().collect();
    assert_eq!(orders, [ascending.clone(), descending, ascending]);
}

#[test]
fn a_source_with_an_error_gives_the_compilers_log() {
    if !inside("kernels::a_source_with_an_error_gives_the_compilers_log", &[]) {
        return;
    }
    if !super::has_compiler() {
        return skipped("kernels need a C compiler, cc");
    }
    for (source, said) in
        [("int f(void) { return nothing; }", "nothing"), ("void f(void) { __syncthreads(); }", "__sync")]
    {
        match compile_ptx(source) {
            Err(CompileError::CompileError { log, .. }) => {
                let log = log.to_string_lossy();
                assert!(log.contains(said) && log.contains("default_program:1"), "{log}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn without_a_compiler_the_log_says_so() {
    let variables = [("SIMULATED_CUDA_CC", "no-such-compiler")];
    if !inside("kernels::without_a_compiler_the_log_says_so", &variables) {
        return;
    }
    match compile_ptx("") {
        Err(CompileError::CompileError { log, .. }) => {
            assert!(log.to_string_lossy().contains("need a C compiler"), "{log:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn images_and_launches_that_do_not_fit_are_refused() {
    if !inside("kernels::images_and_launches_that_do_not_fit_are_refused", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let foreign = context.load_module(Ptx::from_src(".version 8.0"));
    assert_eq!(code(foreign), sys::CUresult::CUDA_ERROR_INVALID_IMAGE);
    let Some(add) = kernel(&context, ADD, "add") else { return };
    let text = compile_ptx(ADD).unwrap().to_src();
    let module = context.load_module(Ptx::from_src(text)).unwrap();
    assert_eq!(code(module.load_function("sub")), sys::CUresult::CUDA_ERROR_NOT_FOUND);
    let stream = context.new_stream().unwrap();
    let params = AddParams { data: 0, len: 0, value: 0.0 };
    for (grid_dim, block_dim) in [((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (257, 1, 1)), ((1, 65536, 1), (1, 1, 1))] {
        let config = LaunchConfig { grid_dim, block_dim, shared_mem_bytes: 0 };
        // SAFETY: the kernel takes these parameters, and accesses no memory when there are no elements.
        let launched = unsafe { stream.launch_builder(&add).arg(&params).launch(config) };
        assert_eq!(code(launched), sys::CUresult::CUDA_ERROR_INVALID_VALUE, "{grid_dim:?} {block_dim:?}");
    }
}

#[test]
fn a_kernel_needs_access_to_a_peers_memory() {
    if !inside("kernels::a_kernel_needs_access_to_a_peers_memory", &[]) {
        return;
    }
    let [one, other] = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
    let Some(add) = kernel(&one, ADD, "add") else { return };
    let stream = one.new_stream().unwrap();
    other.bind_to_thread().unwrap();
    // SAFETY: it is filled before it is read, and never freed.
    let address = unsafe { cudarc::driver::result::malloc_sync(4) }.unwrap();
    // SAFETY: four bytes were allocated.
    unsafe { cudarc::driver::result::memcpy_htod_sync(address, &[1.0_f32]) }.unwrap();
    let launch = || {
        let params = AddParams { data: address, len: 1, value: 1.0 };
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel takes these parameters, and the memory has one element.
        unsafe { stream.launch_builder(&add).arg(&params).launch(config) }.unwrap();
        stream.synchronize()
    };
    one.bind_to_thread().unwrap();
    // SAFETY: both contexts live.
    let enabled = unsafe { sys::cuCtxEnablePeerAccess(other.cu_ctx(), 0) };
    assert_eq!(enabled, sys::CUresult::CUDA_SUCCESS);
    assert_eq!(code(launch()), sys::CUresult::CUDA_SUCCESS);
    // SAFETY: both contexts live.
    let disabled = unsafe { sys::cuCtxDisablePeerAccess(other.cu_ctx()) };
    assert_eq!(disabled, sys::CUresult::CUDA_SUCCESS);
    assert_eq!(code(launch()), sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(code(one.synchronize()), sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "the context stays broken");
    other.bind_to_thread().unwrap();
    let mut value = [0.0_f32];
    // SAFETY: four bytes were allocated.
    unsafe { cudarc::driver::result::memcpy_dtoh_sync(&mut value, address) }.unwrap();
    assert_eq!(value, [2.0]);
}

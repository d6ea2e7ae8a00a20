//! Devices, memory and copies.

use cudarc::driver::{CudaContext, DevicePtr as _, result, sys};
use simulated_cuda::{POISON, inside};

use super::code;

#[test]
fn devices_are_visible_as_the_variable_says() {
    if !inside(
        "memory::devices_are_visible_as_the_variable_says",
        &[
            ("SIMULATED_CUDA_DEVICES", "3"),
            ("CUDA_VISIBLE_DEVICES", "2,0"),
            ("SIMULATED_CUDA_MEMORY_MIB", "16"),
            ("SIMULATED_CUDA_ARCH", "8.6"),
        ],
    ) {
        return;
    }
    assert_eq!(CudaContext::device_count(), Ok(2));
    let context = CudaContext::new(0).unwrap();
    assert_eq!(context.name().unwrap(), "Simulated CUDA device");
    assert_eq!(context.compute_capability(), Ok((8, 6)));
    assert_eq!(context.total_mem(), Ok(16 << 20));
    assert_eq!(context.mem_get_info(), Ok((16 << 20, 16 << 20)));
    assert_eq!(context.uuid().unwrap().bytes[15], 2, "the uuid is the physical device's");
    assert_eq!(code(CudaContext::new(2)), sys::CUresult::CUDA_ERROR_INVALID_DEVICE);
}

#[test]
fn no_device_is_an_error_of_init() {
    if !inside("memory::no_device_is_an_error_of_init", &[("SIMULATED_CUDA_DEVICES", "0")]) {
        return;
    }
    assert_eq!(code(result::init()), sys::CUresult::CUDA_ERROR_NO_DEVICE);
}

#[test]
fn copies_go_to_the_device_and_back() {
    if !inside("memory::copies_go_to_the_device_and_back", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let host: Vec<u32> = (0..10_000).collect();
    let device = stream.clone_htod(&host).unwrap();
    let copy = stream.clone_dtod(&device.slice(100..)).unwrap();
    assert_eq!(stream.clone_dtoh(&copy).unwrap(), host[100..]);
    let zeros = stream.alloc_zeros::<u16>(77).unwrap();
    assert_eq!(stream.clone_dtoh(&zeros).unwrap(), [0; 77]);
    // SAFETY: every byte pattern is valid.
    let fresh = unsafe { stream.alloc::<u8>(100) }.unwrap();
    assert_eq!(stream.clone_dtoh(&fresh).unwrap(), [POISON; 100]);
}

#[test]
fn pinned_memory_holds_what_is_copied() {
    if !inside("memory::pinned_memory_holds_what_is_copied", &[("SIMULATED_CUDA_DELAY_US", "500")]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    // SAFETY: it is written before it is read.
    let mut pinned = unsafe { context.alloc_pinned::<f32>(1000) }.unwrap();
    pinned.as_mut_slice().unwrap().fill(2.5);
    let device = stream.clone_htod(&pinned).unwrap();
    pinned.as_mut_slice().unwrap().fill(0.0);
    stream.memcpy_dtoh(&device, &mut pinned).unwrap();
    assert_eq!(pinned.as_slice().unwrap(), [2.5; 1000]);
}

#[test]
fn peers_copy_each_others_memory() {
    if !inside("memory::peers_copy_each_others_memory", &[("SIMULATED_CUDA_DELAY_US", "200")]) {
        return;
    }
    let [one, other] = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
    let [from, to] = [&one, &other].map(|context| context.new_stream().unwrap());
    let source = from.clone_htod(&[7_u64; 500]).unwrap();
    let copy = to.clone_dtod(&source).unwrap();
    assert_eq!(to.clone_dtoh(&copy).unwrap(), [7; 500]);
}

#[test]
fn memory_ends_and_comes_back() {
    if !inside("memory::memory_ends_and_comes_back", &[("SIMULATED_CUDA_MEMORY_MIB", "4")]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let most = stream.alloc_zeros::<u8>(3 << 20).unwrap();
    assert_eq!(code(stream.alloc_zeros::<u8>(2 << 20)), sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    drop(most);
    stream.alloc_zeros::<u8>(2 << 20).unwrap();
    // SAFETY: the memory is not used.
    assert_eq!(code(unsafe { result::malloc_sync(5 << 20) }), sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
}

#[test]
fn what_was_not_allocated_is_refused() {
    if !inside("memory::what_was_not_allocated_is_refused", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.default_stream();
    let invalid = sys::CUresult::CUDA_ERROR_INVALID_VALUE;
    // SAFETY: the address belongs to no allocation.
    assert_eq!(code(unsafe { result::free_sync(0x1234) }), invalid);
    // SAFETY: the memory is freed once; the second time is the test.
    let address = unsafe { result::malloc_sync(100) }.unwrap();
    // SAFETY: as above.
    assert_eq!(code(unsafe { result::free_sync(address) }), sys::CUresult::CUDA_SUCCESS);
    // SAFETY: as above.
    assert_eq!(code(unsafe { result::free_sync(address) }), invalid);
    let short = stream.alloc_zeros::<u8>(10).unwrap();
    let (start, _guard) = short.device_ptr(&stream);
    // SAFETY: the copy is longer than the memory, and is rejected.
    assert_eq!(code(unsafe { result::memcpy_htod_sync(start, &[0_u8; 11]) }), invalid);
    assert_eq!(code(context.synchronize()), sys::CUresult::CUDA_SUCCESS, "a refused call harms nothing");
}

#[test]
fn without_pools_memory_is_allocated_at_once() {
    if !inside("memory::without_pools_memory_is_allocated_at_once", &[("SIMULATED_CUDA_POOLS", "0")]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    assert!(!context.has_async_alloc());
    let stream = context.new_stream().unwrap();
    let memory = stream.alloc_zeros::<u8>(256).unwrap();
    assert_eq!(context.mem_get_info(), Ok(((1 << 30) - 256, 1 << 30)));
    drop(memory);
    assert_eq!(context.mem_get_info(), Ok((1 << 30, 1 << 30)));
}

#[test]
fn memory_of_a_pool_is_reached_by_whom_the_pool_lets() {
    if !inside("memory::memory_of_a_pool_is_reached_by_whom_the_pool_lets", &[("SIMULATED_CUDA_PEER", "1-0")]) {
        return;
    }
    CudaContext::new(0).unwrap();
    let access = |id| sys::CUmemAccessDesc {
        location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id },
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    for (owner, other, allowed) in
        [(0, 1, sys::CUresult::CUDA_SUCCESS), (1, 0, sys::CUresult::CUDA_ERROR_INVALID_DEVICE)]
    {
        // SAFETY: it is a valid device.
        let pool = unsafe { result::device::get_default_mem_pool(owner) }.unwrap();
        let mut can = 0;
        // SAFETY: there is one description, and room for one number.
        assert_eq!(unsafe { sys::cuMemPoolSetAccess(pool, &access(other), 1) }, allowed);
        // SAFETY: as above.
        assert_eq!(unsafe { sys::cuDeviceCanAccessPeer(&mut can, other, owner) }, sys::CUresult::CUDA_SUCCESS);
        assert_eq!(can == 1, allowed == sys::CUresult::CUDA_SUCCESS);
    }
}

#[test]
fn a_context_ends_with_its_last_user_and_begins_again() {
    if !inside("memory::a_context_ends_with_its_last_user_and_begins_again", &[("SIMULATED_CUDA_MEMORY_MIB", "4")]) {
        return;
    }
    for _ in 0..3 {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let data = stream.clone_htod(&[1_u8; 10]).unwrap();
        // SAFETY: the memory is not used; it is freed with the context.
        unsafe { result::malloc_sync(3 << 20) }.unwrap();
        assert_eq!(stream.clone_dtoh(&data).unwrap(), [1; 10]);
    }
}

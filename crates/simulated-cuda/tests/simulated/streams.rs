//! Streams and events.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, DevicePtr as _, LaunchConfig, PushKernelArg as _, sys};
use simulated_cuda::inside;

use super::{ADD, AddParams, call_in, code, kernel};

#[test]
fn an_event_orders_two_streams() {
    if !inside("streams::an_event_orders_two_streams", &[("SIMULATED_CUDA_DELAY_US", "300")]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let Some(add) = kernel(&context, ADD, "add") else { return };
    // SAFETY: this test orders its streams itself.
    unsafe { context.disable_event_tracking() };
    let [one, other] = [(); 2].map(|()| context.new_stream().unwrap());
    let data = one.alloc_zeros::<f32>(1000).unwrap();
    let params = AddParams { data: data.device_ptr(&one).0, len: 1000, value: 1.0 };
    let config = LaunchConfig { grid_dim: (4, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
    for _ in 0..20 {
        for (stream, next) in [(&one, &other), (&other, &one)] {
            // SAFETY: the kernel takes these parameters, and the memory has the length that they contain.
            unsafe { stream.launch_builder(&add).arg(&params).launch(config) }.unwrap();
            next.wait(&stream.record_event(None).unwrap()).unwrap();
        }
    }
    assert_eq!(one.clone_dtoh(&data).unwrap(), [40.0; 1000]);
}

#[test]
fn streams_run_beside_the_caller_and_each_other() {
    if !inside("streams::streams_run_beside_the_caller_and_each_other", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let [held, free] = [(); 2].map(|()| context.new_stream().unwrap());
    let (release, wait) = mpsc::channel::<()>();
    call_in(&held, move || {
        let _ = wait.recv_timeout(Duration::from_secs(60));
    });
    let event = held.record_event(None).unwrap();
    assert_eq!(event.try_is_complete(), Ok(false));
    free.synchronize().unwrap();
    assert_eq!(code(free.clone_dtoh(&free.alloc_zeros::<u8>(5).unwrap())), sys::CUresult::CUDA_SUCCESS);
    release.send(()).unwrap();
    event.synchronize().unwrap();
    assert_eq!(event.try_is_complete(), Ok(true));
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    if !inside("streams::a_destroyed_stream_finishes_its_work", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let (send, receive) = mpsc::channel();
    let (release, wait) = mpsc::channel::<()>();
    call_in(&stream, move || {
        let _ = wait.recv_timeout(Duration::from_secs(60));
        send.send(()).unwrap();
    });
    drop(stream);
    release.send(()).unwrap();
    receive.recv_timeout(Duration::from_secs(60)).unwrap();
}

#[test]
fn elapsed_time_is_between_marks_and_needs_timing() {
    if !inside("streams::elapsed_time_is_between_marks_and_needs_timing", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let timing = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let begun = Instant::now();
    let start = stream.record_event(timing).unwrap();
    call_in(&stream, || std::thread::sleep(Duration::from_millis(20)));
    let end = stream.record_event(timing).unwrap();
    let elapsed = start.elapsed_ms(&end).unwrap();
    assert!(elapsed >= 20.0 && elapsed <= begun.elapsed().as_secs_f32() * 1000.0, "{elapsed} ms");
    let untimed = stream.record_event(None).unwrap();
    assert_eq!(code(start.elapsed_ms(&untimed)), sys::CUresult::CUDA_ERROR_INVALID_HANDLE);
}

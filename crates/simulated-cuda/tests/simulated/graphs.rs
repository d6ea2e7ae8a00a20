//! Captured work.

use cudarc::driver::{CudaContext, DevicePtr as _, LaunchConfig, PushKernelArg as _, sys};
use simulated_cuda::inside;

use super::{ADD, AddParams, call_in, code, kernel};

#[test]
fn a_graph_repeats_what_two_streams_did() {
    if !inside("graphs::a_graph_repeats_what_two_streams_did", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let Some(add) = kernel(&context, ADD, "add") else { return };
    // SAFETY: this test orders its streams itself.
    unsafe { context.disable_event_tracking() };
    let [origin, branch] = [(); 2].map(|()| context.new_stream().unwrap());
    let data = origin.alloc_zeros::<f32>(10).unwrap();
    origin.synchronize().unwrap();
    let params = AddParams { data: data.device_ptr(&origin).0, len: 10, value: 1.0 };
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    origin.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    branch.wait(&origin.record_event(None).unwrap()).unwrap();
    for stream in [&origin, &branch] {
        // SAFETY: the kernel takes these parameters, and the memory has the length that they contain.
        unsafe { stream.launch_builder(&add).arg(&params).launch(config) }.unwrap();
    }
    origin.wait(&branch.record_event(None).unwrap()).unwrap();
    let flags = sys::CUgraphInstantiate_flags(0);
    let graph = origin.end_capture(flags).unwrap().expect("work was captured");
    assert_eq!(origin.clone_dtoh(&data).unwrap(), [0.0; 10], "a capture does nothing yet");
    graph.launch().unwrap();
    graph.launch().unwrap();
    assert_eq!(origin.clone_dtoh(&data).unwrap(), [4.0; 10]);
}

#[test]
fn a_capture_refuses_waits_and_unjoined_work() {
    if !inside("graphs::a_capture_refuses_waits_and_unjoined_work", &[]) {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let [origin, branch] = [(); 2].map(|()| context.new_stream().unwrap());
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let flags = sys::CUgraphInstantiate_flags(0);
    origin.begin_capture(mode).unwrap();
    assert_eq!(code(origin.synchronize()), sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(code(origin.end_capture(flags)), sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    origin.begin_capture(mode).unwrap();
    branch.wait(&origin.record_event(None).unwrap()).unwrap();
    call_in(&branch, || ());
    assert_eq!(code(origin.end_capture(flags)), sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    origin.synchronize().unwrap();
    branch.synchronize().unwrap();
}

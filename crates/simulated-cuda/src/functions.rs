//! The names of the exported functions, by which settings refuse others.

/// Returns whether calls of a function can be slowed down or made to fail.
pub(crate) fn is_exported(function: &str) -> bool {
    EXPORTED.contains(&function)
}

/// In alphabetical order; a test compares it with the functions that are defined.
#[rustfmt::skip]
pub(crate) const EXPORTED: &[&str] = &[
    "cuCtxCreate_v2", "cuCtxCreate_v4", "cuCtxDestroy_v2", "cuCtxDisablePeerAccess", "cuCtxEnablePeerAccess",
    "cuCtxGetApiVersion", "cuCtxGetCacheConfig", "cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxGetFlags", "cuCtxGetId",
    "cuCtxGetLimit", "cuCtxGetStreamPriorityRange", "cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2",
    "cuCtxSetCacheConfig", "cuCtxSetCurrent", "cuCtxSetFlags", "cuCtxSetLimit", "cuCtxSynchronize",
    "cuDeviceCanAccessPeer", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetByPCIBusId", "cuDeviceGetCount",
    "cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool", "cuDeviceGetName", "cuDeviceGetP2PAttribute",
    "cuDeviceGetPCIBusId", "cuDeviceGetUuid", "cuDeviceGetUuid_v2", "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxSetFlags_v2", "cuDeviceSetMemPool", "cuDeviceTotalMem_v2", "cuDriverGetVersion",
    "cuEventCreate", "cuEventDestroy_v2", "cuEventElapsedTime", "cuEventElapsedTime_v2", "cuEventQuery",
    "cuEventRecord", "cuEventRecordWithFlags", "cuEventSynchronize", "cuFuncGetAttribute", "cuFuncSetAttribute",
    "cuFuncSetCacheConfig", "cuGetErrorName", "cuGetErrorString", "cuGraphDestroy", "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuGraphUpload", "cuInit", "cuLaunchHostFunc", "cuLaunchKernel",
    "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAllocHost_v2", "cuMemAlloc_v2", "cuMemFreeAsync",
    "cuMemFreeHost", "cuMemFree_v2", "cuMemGetAddressRange_v2", "cuMemGetInfo_v2", "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2", "cuMemHostGetFlags", "cuMemHostRegister_v2", "cuMemHostUnregister",
    "cuMemPoolCreate", "cuMemPoolDestroy", "cuMemPoolGetAccess", "cuMemPoolGetAttribute", "cuMemPoolSetAccess",
    "cuMemPoolSetAttribute", "cuMemPoolTrimTo", "cuMemcpy", "cuMemcpyAsync", "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoD_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoH_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyHtoD_v2",
    "cuMemcpyPeer", "cuMemcpyPeerAsync", "cuMemsetD16Async", "cuMemsetD16_v2", "cuMemsetD32Async", "cuMemsetD32_v2",
    "cuMemsetD8Async", "cuMemsetD8_v2", "cuModuleGetFunction", "cuModuleGetGlobal_v2", "cuModuleLoad",
    "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleUnload", "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", "cuOccupancyMaxPotentialBlockSize",
    "cuOccupancyMaxPotentialBlockSizeWithFlags", "cuPointerGetAttribute", "cuPointerGetAttributes", "cuProfilerStart",
    "cuProfilerStop", "cuStreamBeginCapture_v2", "cuStreamCreate", "cuStreamCreateWithPriority", "cuStreamDestroy_v2",
    "cuStreamEndCapture", "cuStreamGetCtx", "cuStreamGetDevice", "cuStreamGetFlags", "cuStreamGetId",
    "cuStreamGetPriority", "cuStreamIsCapturing", "cuStreamQuery", "cuStreamSynchronize", "cuStreamWaitEvent",
    "nvrtcCompileProgram", "nvrtcCreateProgram", "nvrtcDestroyProgram", "nvrtcGetCUBIN", "nvrtcGetCUBINSize",
    "nvrtcGetNumSupportedArchs", "nvrtcGetPTX", "nvrtcGetPTXSize", "nvrtcGetProgramLog", "nvrtcGetProgramLogSize",
    "nvrtcGetSupportedArchs", "nvrtcVersion",
];

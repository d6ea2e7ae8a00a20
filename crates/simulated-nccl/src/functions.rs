//! The names of the exported functions, by which settings refuse others.

/// Returns whether calls of a function can be made to fail.
pub(crate) fn is_exported(function: &str) -> bool {
    EXPORTED.contains(&function)
}

/// In alphabetical order; a test compares it with the functions that are defined.
#[rustfmt::skip]
pub(crate) const EXPORTED: &[&str] = &[
    "ncclAllGather", "ncclAllReduce", "ncclAlltoAll", "ncclBcast", "ncclBroadcast", "ncclCommAbort", "ncclCommCount",
    "ncclCommCuDevice", "ncclCommDeregister", "ncclCommDestroy", "ncclCommFinalize", "ncclCommGetAsyncError",
    "ncclCommInitAll", "ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommRegister", "ncclCommShrink",
    "ncclCommSplit", "ncclCommUserRank", "ncclGather", "ncclGetUniqueId", "ncclGetVersion", "ncclGroupEnd",
    "ncclGroupSimulateEnd", "ncclGroupStart", "ncclMemAlloc", "ncclMemFree", "ncclRecv", "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy", "ncclReduce", "ncclReduceScatter", "ncclScatter", "ncclSend",
];

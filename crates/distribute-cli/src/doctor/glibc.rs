//! The version of the C library, which prebuilt NCCL and CUDA libraries require.

/// Returns `None` if another C library is linked.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "the C library tells its version by a C function only")]
pub(crate) fn version() -> Option<String> {
    // SAFETY: the function has no arguments and accesses no memory of this program.
    let version = unsafe { libc::gnu_get_libc_version() };
    // SAFETY: it returns a static string of the library, which ends in a zero byte.
    let version = unsafe { std::ffi::CStr::from_ptr(version) };
    Some(version.to_string_lossy().into_owned())
}

#[cfg(not(target_env = "gnu"))]
pub(crate) fn version() -> Option<String> {
    None
}

//! The version of the C library, which prebuilt NCCL and CUDA libraries ask for.

/// `None` where another C library is linked.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "the C library tells its version by a C function only")]
pub(crate) fn version() -> Option<String> {
    // SAFETY: it takes nothing and touches nothing of ours.
    let version = unsafe { libc::gnu_get_libc_version() };
    // SAFETY: it returns a text of the library that ends in a zero byte and lives as long as the process.
    let version = unsafe { std::ffi::CStr::from_ptr(version) };
    Some(version.to_string_lossy().into_owned())
}

#[cfg(not(target_env = "gnu"))]
pub(crate) fn version() -> Option<String> {
    None
}

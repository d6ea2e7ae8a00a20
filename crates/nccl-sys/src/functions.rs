//! The table of NCCL's functions, each of which may be missing from a library.
#![expect(unsafe_code, reason = "functions of a C library are looked up by name and given their types")]

use std::ffi::{c_char, c_int, c_void};

use crate::library::{Comm, Stream};
use crate::{Code, Config, DataType, RedOp, ScalarResidence, SimInfo, UniqueId, Version};

macro_rules! functions {
    ($(($major:literal, $minor:literal) $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// Pointers to the functions that the library has.
        #[expect(non_snake_case, reason = "the names are NCCL's")]
        #[derive(Debug)]
        pub(crate) struct Functions {
            $(pub(crate) $name: Option<unsafe extern "C" fn($($argument),*) -> $result>,)*
        }

        impl Functions {
            /// Looks up all functions.
            pub(crate) fn of(library: &libloading::Library) -> Self {
                Self {
                    $($name: {
                        // SAFETY: a library with ncclGetVersion is NCCL, whose header gives the function this type.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0")) };
                        found.ok().map(|function| *function)
                    },)*
                }
            }

            /// Returns whether the library has a function; `None` if this crate does not bind it.
            pub(crate) fn has(&self, name: &str) -> Option<bool> {
                match name {
                    $(stringify!($name) => Some(self.$name.is_some()),)*
                    _ => None,
                }
            }
        }

        /// Returns the version that introduced a function of the table.
        pub(crate) fn since(name: &str) -> Version {
            match name {
                $(stringify!($name) => Version::new($major, $minor, 0),)*
                _ => Version::OLDEST,
            }
        }
    };
}

functions! {
    (2, 0) ncclGetVersion(*mut c_int) -> Code;
    (2, 0) ncclGetUniqueId(*mut UniqueId) -> Code;
    (2, 0) ncclGetErrorString(Code) -> *const c_char;
    (2, 13) ncclGetLastError(Comm) -> *const c_char;

    (2, 0) ncclCommInitRank(*mut Comm, c_int, UniqueId, c_int) -> Code;
    (2, 14) ncclCommInitRankConfig(*mut Comm, c_int, UniqueId, c_int, *mut Config<'_>) -> Code;
    (2, 0) ncclCommInitAll(*mut Comm, c_int, *const c_int) -> Code;
    (2, 14) ncclCommFinalize(Comm) -> Code;
    (2, 0) ncclCommDestroy(Comm) -> Code;
    (2, 4) ncclCommAbort(Comm) -> Code;
    (2, 4) ncclCommGetAsyncError(Comm, *mut Code) -> Code;
    (2, 18) ncclCommSplit(Comm, c_int, c_int, *mut Comm, *mut Config<'_>) -> Code;
    (2, 27) ncclCommShrink(Comm, *mut c_int, c_int, *mut Comm, *mut Config<'_>, c_int) -> Code;
    (2, 0) ncclCommCount(Comm, *mut c_int) -> Code;
    (2, 0) ncclCommCuDevice(Comm, *mut c_int) -> Code;
    (2, 0) ncclCommUserRank(Comm, *mut c_int) -> Code;

    (2, 0) ncclAllReduce(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> Code;
    (2, 2) ncclBroadcast(*const c_void, *mut c_void, usize, DataType, c_int, Comm, Stream) -> Code;
    (2, 0) ncclReduce(*const c_void, *mut c_void, usize, DataType, RedOp, c_int, Comm, Stream) -> Code;
    (2, 0) ncclReduceScatter(*const c_void, *mut c_void, usize, DataType, RedOp, Comm, Stream) -> Code;
    (2, 0) ncclAllGather(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> Code;
    (2, 28) ncclAlltoAll(*const c_void, *mut c_void, usize, DataType, Comm, Stream) -> Code;
    (2, 28) ncclGather(*const c_void, *mut c_void, usize, DataType, c_int, Comm, Stream) -> Code;
    (2, 28) ncclScatter(*const c_void, *mut c_void, usize, DataType, c_int, Comm, Stream) -> Code;
    (2, 7) ncclSend(*const c_void, usize, DataType, c_int, Comm, Stream) -> Code;
    (2, 7) ncclRecv(*mut c_void, usize, DataType, c_int, Comm, Stream) -> Code;

    (2, 0) ncclGroupStart() -> Code;
    (2, 0) ncclGroupEnd() -> Code;
    (2, 22) ncclGroupSimulateEnd(*mut SimInfo) -> Code;

    (2, 11) ncclRedOpCreatePreMulSum(*mut RedOp, *mut c_void, DataType, ScalarResidence, Comm) -> Code;
    (2, 11) ncclRedOpDestroy(RedOp, Comm) -> Code;
    (2, 19) ncclCommRegister(Comm, *mut c_void, usize, *mut *mut c_void) -> Code;
    (2, 19) ncclCommDeregister(Comm, *mut c_void) -> Code;
    (2, 19) ncclMemAlloc(*mut *mut c_void, usize) -> Code;
    (2, 19) ncclMemFree(*mut c_void) -> Code;
}

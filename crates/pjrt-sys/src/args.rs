//! Argument structs, one for each function that the crate binds.
#![expect(unsafe_code, reason = "a trait promises layouts, and zeroed bytes become structs of C")]

use crate::Function;

/// Defines argument structs in the layout of C.
macro_rules! arguments {
    ($($(#[$meta:meta])* struct $name:ident for $function:ident {
        $($direction:ident $field:ident: $type:ty,)*
    })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy)]
        #[repr(C)]
        pub struct $name {
            /// The size of the struct in bytes, without padding at its end.
            pub struct_size: usize,
            /// A list of extensions, or null.
            pub extension_start: *mut ::std::ffi::c_void,
            $(
                #[doc = concat!("An ", stringify!($direction), " of the call.")]
                pub $field: $type,
            )*
        }

        // SAFETY: the layout is that of the header, which tests compare. Zeroed bytes are null pointers, zero, false
        // and absent functions.
        unsafe impl crate::Arguments for $name {
            const FUNCTION: crate::Function = crate::Function::$function;
            const STRUCT_SIZE: usize = {
                #[allow(unused_mut, reason = "a struct may have no further fields")]
                let mut end = 16;
                $(if ::std::mem::offset_of!($name, $field) + size_of::<$type>() > end {
                    end = ::std::mem::offset_of!($name, $field) + size_of::<$type>();
                })*
                end
            };

            fn new() -> Self {
                // SAFETY: zeroed bytes are a valid struct, as said above.
                let zeroed: Self = unsafe { ::std::mem::zeroed() };
                Self { struct_size: Self::STRUCT_SIZE, ..zeroed }
            }
        }
    )*};
}

mod buffer;
mod client;
mod device;
mod error;
mod event;
mod executable;
mod loaded;
mod plugin;
mod topology;

pub use buffer::*;
pub use client::*;
pub use device::*;
pub use error::*;
pub use event::*;
pub use executable::*;
pub use loaded::*;
pub use plugin::*;
pub use topology::*;

/// The arguments of one function of PJRT.
///
/// # Examples
/// ```
/// use pjrt_sys::{Arguments, BufferIsDeletedArgs, Function};
///
/// let arguments = BufferIsDeletedArgs::new();
/// assert_eq!(arguments.struct_size, 25);
/// assert!(arguments.buffer.is_null());
/// assert_eq!(BufferIsDeletedArgs::FUNCTION, Function::PJRT_Buffer_IsDeleted);
/// ```
///
/// # Safety
/// The struct has the layout of the function's argument struct in the header, begins with `struct_size` and
/// `extension_start`, and the function returns a `PJRT_Error*` or nothing.
pub unsafe trait Arguments: Sized {
    /// The function that takes these arguments.
    const FUNCTION: Function;
    /// The size of the struct in bytes, without padding at its end.
    const STRUCT_SIZE: usize;

    /// Creates a struct with `struct_size` set and all else zero.
    #[must_use]
    fn new() -> Self;
}

#[cfg(test)]
mod tests;

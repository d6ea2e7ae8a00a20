//! Opaque objects, structs that arguments point to, and callbacks.
#![expect(unsafe_code, reason = "callbacks of C are unsafe functions, and zeroed bytes become structs of C")]

use std::ffi::{c_char, c_int, c_void};

use crate::Code;

macro_rules! opaque {
    ($($(#[$meta:meta])* $name:ident)*) => {$(
        $(#[$meta])*
        #[derive(Debug)]
        #[repr(C)]
        pub struct $name {
            opaque: [u8; 0],
        }
    )*};
}

opaque! {
    /// An opaque `PJRT_Error`.
    PjrtError
    /// An opaque `PJRT_Event`.
    Event
    /// An opaque `PJRT_Client`.
    Client
    /// An opaque `PJRT_Device`.
    Device
    /// An opaque `PJRT_DeviceDescription`.
    DeviceDescription
    /// An opaque `PJRT_Memory`.
    Memory
    /// An opaque `PJRT_TopologyDescription`.
    TopologyDescription
    /// An opaque `PJRT_Executable`.
    Executable
    /// An opaque `PJRT_LoadedExecutable`.
    LoadedExecutable
    /// An opaque `PJRT_SerializedExecutable`.
    SerializedExecutable
    /// An opaque `PJRT_Buffer`.
    Buffer
    /// An opaque `PJRT_ExecuteContext`.
    ExecuteContext
}

/// `PJRT_Event_OnReadyCallback`: takes the event's error, which it must destroy, or null, and the argument that was
/// registered.
pub type OnReadyCallback = unsafe extern "C" fn(error: *mut PjrtError, user_arg: *mut c_void);

/// `PJRT_CallbackError`: makes the error that a callback returns; copies the text.
pub type CallbackError =
    unsafe extern "C" fn(code: Code, message: *const c_char, message_size: usize) -> *mut PjrtError;

/// Frees the value that a key-value callback gave.
pub type ValueDeleter = unsafe extern "C" fn(value: *mut c_char);

/// `PJRT_KeyValueGetCallback`: waits for a key.
pub type KeyValueGetCallback = unsafe extern "C" fn(arguments: *mut KeyValueGetArgs) -> *mut PjrtError;

/// `PJRT_KeyValueTryGetCallback`: reads a key, without waiting.
pub type KeyValueTryGetCallback = unsafe extern "C" fn(arguments: *mut KeyValueTryGetArgs) -> *mut PjrtError;

/// `PJRT_KeyValuePutCallback`: writes a key.
pub type KeyValuePutCallback = unsafe extern "C" fn(arguments: *mut KeyValuePutArgs) -> *mut PjrtError;

/// `PJRT_NamedValue_Type`: which field of a [`NamedValueUnion`] is set, open to future values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct ValueType(pub c_int);

impl ValueType {
    /// A text of `value_size` bytes.
    pub const STRING: Self = Self(0);
    /// An integer.
    pub const INT64: Self = Self(1);
    /// A list of `value_size` integers.
    pub const INT64_LIST: Self = Self(2);
    /// A number in 32 bits.
    pub const FLOAT: Self = Self(3);
    /// A truth value.
    pub const BOOL: Self = Self(4);
}

/// The value of a [`NamedValue`].
#[derive(Clone, Copy)]
#[repr(C)]
pub union NamedValueUnion {
    /// For [`ValueType::STRING`].
    pub string_value: *const c_char,
    /// For [`ValueType::INT64`].
    pub int64_value: i64,
    /// For [`ValueType::INT64_LIST`].
    pub int64_array_value: *const i64,
    /// For [`ValueType::FLOAT`].
    pub float_value: f32,
    /// For [`ValueType::BOOL`]: 0 or 1.
    pub bool_value: u8,
}

/// `PJRT_NamedValue`: an option or an attribute.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NamedValue {
    /// The size of the struct in bytes; the distance between elements of a list is `size_of` this struct.
    pub struct_size: usize,
    /// A list of extensions, or null.
    pub extension_start: *mut c_void,
    /// The name, without a zero at its end.
    pub name: *const c_char,
    /// The length of the name in bytes.
    pub name_size: usize,
    /// Which field of the value is set.
    pub kind: ValueType,
    /// The value.
    pub value: NamedValueUnion,
    /// The number of elements of a text or a list; else 1.
    pub value_size: usize,
}

impl NamedValue {
    /// Creates a nameless zero.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            struct_size: size_of::<Self>(),
            extension_start: std::ptr::null_mut(),
            name: std::ptr::null(),
            name_size: 0,
            kind: ValueType::INT64,
            value: NamedValueUnion { int64_value: 0 },
            value_size: 1,
        }
    }
}

impl Default for NamedValue {
    fn default() -> Self {
        Self::new()
    }
}

/// Defines structs that are no arguments of functions of the table.
macro_rules! structs {
    ($($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy)]
        #[repr(C)]
        pub struct $name {
            /// The size of the struct in bytes, without padding at its end.
            pub struct_size: usize,
            /// A list of extensions, or null.
            pub extension_start: *mut c_void,
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl $name {
            /// Creates a struct with `struct_size` set and all else zero.
            #[must_use]
            pub fn new() -> Self {
                let mut end = 0;
                $(end = end.max(std::mem::offset_of!(Self, $field) + size_of::<$type>());)*
                // SAFETY: zeroed bytes are null pointers, zero and absent functions.
                let zeroed: Self = unsafe { std::mem::zeroed() };
                Self { struct_size: end, ..zeroed }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new()
            }
        }
    )*};
}

structs! {
    /// `PJRT_Program`: code in one of the formats "mlir", "hlo" and "hlo_with_config".
    Program {
        /// The code.
        code: *mut c_char,
        /// The size of the code in bytes.
        code_size: usize,
        /// The name of the format.
        format: *const c_char,
        /// The length of the name in bytes.
        format_size: usize,
    }

    /// `PJRT_Buffer_MemoryLayout_Tiled`: the order of dimensions in memory, and tiles.
    TiledLayout {
        /// Dimensions from the fastest to the slowest.
        minor_to_major: *const i64,
        /// The number of dimensions.
        minor_to_major_size: usize,
        /// The sizes of all tiles, one after another.
        tile_dims: *const i64,
        /// The number of dimensions of each tile.
        tile_dim_sizes: *const usize,
        /// The number of tiles.
        num_tiles: usize,
    }

    /// `PJRT_Buffer_MemoryLayout` with a [`TiledLayout`].
    MemoryLayout {
        /// The layout.
        tiled: TiledLayout,
        /// 0: the layout is tiled.
        kind: c_int,
    }

    /// `PJRT_ExecuteOptions`.
    ExecuteOptions {
        /// Not bound; null.
        send_callbacks: *mut c_void,
        /// Not bound; null.
        recv_callbacks: *mut c_void,
        /// 0.
        num_send_ops: usize,
        /// 0.
        num_recv_ops: usize,
        /// A number of this execution that is the same on all hosts of a program.
        launch_id: c_int,
        /// The places of arguments that are not donated, whatever the program says.
        non_donatable_input_indices: *const i64,
        /// The number of these places.
        num_non_donatable_input_indices: usize,
        /// A context, or null.
        context: *mut ExecuteContext,
        /// The place in the caller's source for messages, zero-terminated, or null.
        call_location: *const c_char,
        /// The length of the next two lists.
        num_tasks: usize,
        /// Tasks of the job, or null.
        task_ids: *mut c_int,
        /// The incarnation of each task, or null.
        incarnation_ids: *mut i64,
    }

    /// `PJRT_KeyValueGetCallback_Args`, which the plugin gives.
    KeyValueGetArgs {
        /// The key.
        key: *const c_char,
        /// The length of the key in bytes.
        key_size: usize,
        /// The time limit in milliseconds.
        timeout_in_ms: c_int,
        /// Makes errors.
        callback_error: *const Option<CallbackError>,
        /// The pointer that was given to `PJRT_Client_Create`.
        user_arg: *mut c_void,
        /// Output: the value.
        value: *mut c_char,
        /// Output: the size of the value in bytes.
        value_size: usize,
        /// Output: frees the value.
        value_deleter_callback: Option<ValueDeleter>,
    }

    /// `PJRT_KeyValueTryGetCallback_Args`, which the plugin gives.
    KeyValueTryGetArgs {
        /// The key.
        key: *const c_char,
        /// The length of the key in bytes.
        key_size: usize,
        /// Makes errors.
        callback_error: *const Option<CallbackError>,
        /// The pointer that was given to `PJRT_Client_Create`.
        user_arg: *mut c_void,
        /// Output: the value.
        value: *mut c_char,
        /// Output: the size of the value in bytes.
        value_size: usize,
        /// Output: frees the value.
        value_deleter_callback: Option<ValueDeleter>,
    }

    /// `PJRT_KeyValuePutCallback_Args`, which the plugin gives.
    KeyValuePutArgs {
        /// The key.
        key: *const c_char,
        /// The length of the key in bytes.
        key_size: usize,
        /// The value.
        value: *const c_char,
        /// The size of the value in bytes.
        value_size: usize,
        /// Makes errors.
        callback_error: *const Option<CallbackError>,
        /// The pointer that was given to `PJRT_Client_Create`.
        user_arg: *mut c_void,
    }
}

//! The table of functions.
#![expect(unsafe_code, reason = "the table of C is made of addresses")]

use std::sync::LazyLock;

use pjrt_sys::{Arguments, Function, TABLE_START};

use crate::script::script;
use crate::{buffers, clients, events, failure, programs, topologies};

/// Defines functions of C: their arguments are compared with the header's, and failures are injected.
macro_rules! functions {
    ($(fn $name:ident($argument:tt: $type:ty) $body:block)*) => {$(
        pub(crate) unsafe extern "C" fn $name(arguments: *mut $type) -> *mut pjrt_sys::PjrtError {
            let body = |$argument: &mut $type| -> Result<(), crate::failure::Failure> { $body };
            // SAFETY: the caller passes its arguments.
            unsafe { crate::failure::enter(arguments, body) }
        }
    )*};
}
pub(crate) use functions;

/// The table, as words.
static TABLE: LazyLock<Box<[usize]>> = LazyLock::new(|| {
    let script = script();
    let mut table = vec![0; TABLE_START / WORD + Function::ALL.len()];
    let mut set = |function: Function, address: usize| {
        if !script.null.iter().any(|null| null == function.name()) {
            table[TABLE_START / WORD + function.index()] = address;
        }
    };
    macro_rules! set {
        ($($function:path,)*) => {$( set(function_of($function), $function as *const () as usize); )*};
    }
    set(Function::PJRT_Error_Destroy, failure::destroy as *const () as usize);
    set(Function::PJRT_Error_Message, failure::message as *const () as usize);
    set! {
        failure::get_code, events::destroy, events::is_ready, events::error, events::on_ready, clients::initialize,
        clients::attributes, clients::create, clients::destroy, clients::platform_name, clients::platform_version,
        clients::process_index, clients::all_devices, clients::addressable_devices, clients::default_assignment,
        clients::description, clients::local_hardware_id, clients::memory_stats, clients::id,
        clients::description_process, clients::kind, clients::debug_string, clients::description_attributes,
        buffers::upload, buffers::destroy, buffers::element_type, buffers::dimensions, buffers::on_device_size,
        buffers::device, buffers::delete, buffers::is_deleted, buffers::copy_to_device, buffers::download,
        buffers::is_on_cpu, buffers::ready, programs::compile, programs::destroy, programs::name,
        programs::num_replicas, programs::num_partitions, programs::num_outputs, programs::optimized,
        programs::serialize, programs::destroy_loaded, programs::get_executable, programs::devices,
        programs::execute, programs::load, topologies::of_client, topologies::create, topologies::destroy,
        topologies::platform_name, topologies::platform_version, topologies::descriptions, topologies::attributes,
        topologies::compile,
    }
    let functions = script.functions.unwrap_or(Function::ALL.len());
    table.truncate(TABLE_START / WORD + functions);
    table[0] = script.table_bytes.unwrap_or(table.len() * WORD);
    table[2] = 24;
    // Two numbers in one word, the first at the lower address.
    let [low, high] = [script.version.0, script.version.1].map(i32::to_ne_bytes);
    let mut version = [0; WORD];
    version[..4].copy_from_slice(&low);
    version[4..].copy_from_slice(&high);
    table[4] = usize::from_ne_bytes(version);
    table.into_boxed_slice()
});

const WORD: usize = size_of::<usize>();

/// Returns the place of a function by the type of its arguments.
fn function_of<A: Arguments, R>(_: unsafe extern "C" fn(*mut A) -> R) -> Function {
    A::FUNCTION
}

/// Returns the table.
#[unsafe(no_mangle)]
extern "C" fn GetPjrtApi() -> *const usize {
    if script().no_table { std::ptr::null() } else { TABLE.as_ptr() }
}

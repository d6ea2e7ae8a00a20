//! The plugin, clients and devices.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Arc;

use pjrt_sys::{
    ClientAddressableDevicesArgs, ClientCreateArgs, ClientDefaultDeviceAssignmentArgs, ClientDestroyArgs,
    ClientDevicesArgs, ClientPlatformNameArgs, ClientPlatformVersionArgs, ClientProcessIndexArgs, Code, Device,
    DeviceDescriptionAttributesArgs, DeviceDescriptionDebugStringArgs, DeviceDescriptionIdArgs,
    DeviceDescriptionKindArgs, DeviceDescriptionProcessIndexArgs, DeviceGetDescriptionArgs, DeviceLocalHardwareIdArgs,
    DeviceMemoryStatsArgs, KeyValueGetArgs, KeyValuePutArgs, KeyValueTryGetArgs, NamedValue, NamedValueUnion,
    PluginAttributesArgs, PluginInitializeArgs, ValueType,
};

use crate::failure::{Failure, Kind, MAKE_ERROR, give, take, take_error};
use crate::script::script;
use crate::table::functions;

/// A client: its devices, at addresses that stay.
pub(crate) struct Client {
    pub(crate) devices: Arc<[DeviceObject]>,
    pub(crate) pointers: Vec<usize>,
}

/// A device, which is its own description.
pub(crate) struct DeviceObject {
    pub(crate) id: i32,
    name: String,
    attributes: [NamedValue; 2],
}

// SAFETY: the attributes point to constants.
unsafe impl Send for DeviceObject {}
// SAFETY: as above.
unsafe impl Sync for DeviceObject {}

/// The place of a device whose own the script does not tell.
const PLACE: [i64; 4] = [1, 2, 3, 1];
const PLATFORM: &str = "simulated";
const VERSION: &str = "simulated 1";
const DEVICE_KIND: &str = "Simulated v1";

fn named(name: &'static str, kind: ValueType, value: NamedValueUnion, value_size: usize) -> NamedValue {
    NamedValue { name: name.as_ptr().cast(), name_size: name.len(), kind, value, value_size, ..NamedValue::new() }
}

/// Makes devices.
pub(crate) fn devices(count: usize) -> Arc<[DeviceObject]> {
    let places = &script().places;
    let device = |id: usize| {
        let [x, y, z, core] = places.get(id).copied().unwrap_or(PLACE);
        // Descriptions are read as long as the plugin is there.
        let coords: &'static [i64; 3] = Box::leak(Box::new([x, y, z]));
        let list = NamedValueUnion { int64_array_value: coords.as_ptr() };
        let coords = named("coords", ValueType::INT64_LIST, list, coords.len());
        let core = named("core_on_chip", ValueType::INT64, NamedValueUnion { int64_value: core }, 1);
        DeviceObject { id: id as i32, name: format!("SIM_{id}"), attributes: [coords, core] }
    };
    (0..count).map(device).collect()
}

/// Returns the addresses of devices, as lists of C have them.
pub(crate) fn pointers(devices: &[DeviceObject]) -> Vec<usize> {
    devices.iter().map(|device| ptr::from_ref(device).expose_provenance()).collect()
}

/// # Safety
/// The pointer is a client that is not destroyed.
pub(crate) unsafe fn client<'a>(client: *mut pjrt_sys::Client) -> &'a Client {
    // SAFETY: guaranteed by the caller.
    unsafe { &*client.cast::<Client>() }
}

/// # Safety
/// The pointer is a device or a description whose client or topology is not destroyed.
pub(crate) unsafe fn device<'a, T>(device: *mut T) -> &'a DeviceObject {
    // SAFETY: guaranteed by the caller.
    unsafe { &*device.cast::<DeviceObject>() }
}

functions! {
    fn initialize(_: PluginInitializeArgs) { Ok(()) }

    fn attributes(arguments: PluginAttributesArgs) {
        static OLDEST: [i64; 3] = [0, 9, 0];
        static NEWEST: [i64; 3] = [1, 13, 3];
        let list = |version: &'static [i64; 3]| NamedValueUnion { int64_array_value: version.as_ptr() };
        let oldest = named("stablehlo_minimum_version", ValueType::INT64_LIST, list(&OLDEST), 3);
        let newest = named("stablehlo_current_version", ValueType::INT64_LIST, list(&NEWEST), 3);
        let name = NamedValueUnion { string_value: PLATFORM.as_ptr().cast() };
        let name = named("name", ValueType::STRING, name, PLATFORM.len());
        let truth = named("truth", ValueType::BOOL, NamedValueUnion { bool_value: 1 }, 1);
        let number = named("number", ValueType::FLOAT, NamedValueUnion { float_value: 0.5 }, 1);
        let future = named("future", ValueType(77), NamedValueUnion { int64_value: 0 }, 1);
        let list = Box::leak(Box::new([oldest, newest, name, truth, number, future]));
        (arguments.attributes, arguments.num_attributes) = (list.as_ptr(), list.len());
        Ok(())
    }

    fn create(arguments: ClientCreateArgs) {
        let (list, count) = (arguments.create_options, arguments.num_options);
        // SAFETY: the caller passes as many options.
        let options: &[NamedValue] = unsafe { std::slice::from_raw_parts(list, count) };
        let mut count = script().devices;
        for option in options {
            // SAFETY: an option has a name.
            let name = unsafe { std::slice::from_raw_parts(option.name.cast::<u8>(), option.name_size) };
            if name == b"device_count" && option.kind == ValueType::INT64 {
                // SAFETY: the type says which field is set.
                count = unsafe { option.value.int64_value } as usize;
            }
        }
        if arguments.kv_get_callback.is_some() {
            // SAFETY: the caller passes callbacks and their argument.
            unsafe { meet(arguments) }?;
        }
        let devices = devices(count);
        let pointers = pointers(&devices);
        arguments.client = give(Kind::Client, Client { devices, pointers });
        Ok(())
    }

    fn destroy(arguments: ClientDestroyArgs) {
        // SAFETY: the caller passes its client.
        unsafe { take::<Client, _>(Kind::Client, arguments.client) };
        Ok(())
    }

    fn platform_name(arguments: ClientPlatformNameArgs) {
        (arguments.platform_name, arguments.platform_name_size) = (PLATFORM.as_ptr().cast(), PLATFORM.len());
        Ok(())
    }

    fn platform_version(arguments: ClientPlatformVersionArgs) {
        (arguments.platform_version, arguments.platform_version_size) = (VERSION.as_ptr().cast(), VERSION.len());
        Ok(())
    }

    fn process_index(arguments: ClientProcessIndexArgs) {
        arguments.process_index = 0;
        Ok(())
    }

    fn all_devices(arguments: ClientDevicesArgs) {
        // SAFETY: the caller passes its client.
        let client = unsafe { client(arguments.client) };
        (arguments.devices, arguments.num_devices) = (client.pointers.as_ptr().cast(), client.pointers.len());
        Ok(())
    }

    fn addressable_devices(arguments: ClientAddressableDevicesArgs) {
        // SAFETY: the caller passes its client.
        let list = unsafe { client(arguments.client) }.pointers.as_slice();
        (arguments.addressable_devices, arguments.num_addressable_devices) = (list.as_ptr().cast(), list.len());
        Ok(())
    }

    fn default_assignment(arguments: ClientDefaultDeviceAssignmentArgs) {
        let count = arguments.num_replicas as usize * arguments.num_partitions as usize;
        // SAFETY: the caller passes its client.
        if count > unsafe { client(arguments.client) }.devices.len() || count > arguments.default_assignment_size {
            return Err(Failure::new(Code::INVALID_ARGUMENT, format!("{count} devices are not there")));
        }
        for place in 0..count {
            // SAFETY: the list has as many places.
            unsafe { arguments.default_assignment.add(place).write(place as i32) };
        }
        Ok(())
    }

    fn description(arguments: DeviceGetDescriptionArgs) {
        arguments.device_description = arguments.device.cast();
        Ok(())
    }

    fn local_hardware_id(arguments: DeviceLocalHardwareIdArgs) {
        // SAFETY: the caller passes a device.
        arguments.local_hardware_id = unsafe { device(arguments.device) }.id;
        Ok(())
    }

    fn memory_stats(arguments: DeviceMemoryStatsArgs) {
        (arguments.bytes_in_use, arguments.bytes_limit, arguments.bytes_limit_is_set) = (1000, 5000, true);
        Ok(())
    }

    fn id(arguments: DeviceDescriptionIdArgs) {
        // SAFETY: the caller passes a description.
        arguments.id = unsafe { device(arguments.device_description) }.id;
        Ok(())
    }

    fn description_process(arguments: DeviceDescriptionProcessIndexArgs) {
        arguments.process_index = 0;
        Ok(())
    }

    fn kind(arguments: DeviceDescriptionKindArgs) {
        (arguments.device_kind, arguments.device_kind_size) = (DEVICE_KIND.as_ptr().cast(), DEVICE_KIND.len());
        Ok(())
    }

    fn debug_string(arguments: DeviceDescriptionDebugStringArgs) {
        // SAFETY: the caller passes a description.
        let name = &unsafe { device(arguments.device_description) }.name;
        (arguments.debug_string, arguments.debug_string_size) = (name.as_ptr().cast(), name.len());
        Ok(())
    }

    fn description_attributes(arguments: DeviceDescriptionAttributesArgs) {
        // SAFETY: the caller passes a description.
        let list = &unsafe { device(arguments.device_description) }.attributes;
        (arguments.attributes, arguments.num_attributes) = (list.as_ptr(), list.len());
        Ok(())
    }
}

/// Writes and reads the store, as the processes of one client do, and checks its answers.
///
/// # Safety
/// The arguments have callbacks and their argument.
unsafe fn meet(arguments: &ClientCreateArgs) -> Result<(), Failure> {
    let wrong = |text: &str| Err(Failure::new(Code::INTERNAL, text));
    let (Some(get), Some(put), Some(try_get)) =
        (arguments.kv_get_callback, arguments.kv_put_callback, arguments.kv_try_get_callback)
    else {
        return wrong("a callback is null");
    };
    let (key, absent, value): (&[u8], &[u8], &[u8]) = (b"simulated/key", b"simulated/absent", b"a\0value");
    let mut written = KeyValuePutArgs {
        key: key.as_ptr().cast(),
        key_size: key.len(),
        value: value.as_ptr().cast(),
        value_size: value.len(),
        callback_error: &raw const MAKE_ERROR,
        user_arg: arguments.kv_put_user_arg,
        ..KeyValuePutArgs::new()
    };
    // SAFETY: key and value live during the call.
    if let Some(failure) = unsafe { take_error(put(&mut written)) } {
        return Err(failure);
    }
    let reads = |key: &[u8], timeout_in_ms, user_arg: *mut c_void| KeyValueGetArgs {
        key: key.as_ptr().cast::<c_char>(),
        key_size: key.len(),
        timeout_in_ms,
        callback_error: &raw const MAKE_ERROR,
        user_arg,
        ..KeyValueGetArgs::new()
    };
    let mut read = reads(key, 1000, arguments.kv_get_user_arg);
    // SAFETY: the key lives during the call.
    if let Some(failure) = unsafe { take_error(get(&mut read)) } {
        return Err(failure);
    }
    // SAFETY: the store has lent as many bytes.
    let found = unsafe { std::slice::from_raw_parts(read.value.cast::<u8>(), read.value_size) }.to_vec();
    match read.value_deleter_callback {
        // SAFETY: the value is no longer used.
        Some(delete) => unsafe { delete(read.value) },
        None => return wrong("the value cannot be given back"),
    }
    if found != value {
        return wrong("the store gives another value than was put");
    }
    let mut read = reads(absent, 20, arguments.kv_get_user_arg);
    // SAFETY: the key lives during the call.
    if unsafe { take_error(get(&mut read)) }.is_none_or(|failure| failure.code != Code::DEADLINE_EXCEEDED.0) {
        return wrong("a key without a value gives another code than DEADLINE_EXCEEDED");
    }
    let mut read = KeyValueTryGetArgs {
        key: absent.as_ptr().cast(),
        key_size: absent.len(),
        callback_error: &raw const MAKE_ERROR,
        user_arg: arguments.kv_try_get_user_arg,
        ..KeyValueTryGetArgs::new()
    };
    // SAFETY: the key lives during the call.
    if unsafe { take_error(try_get(&mut read)) }.is_none_or(|failure| failure.code != Code::NOT_FOUND.0) {
        return wrong("a key without a value gives another code than NOT_FOUND");
    }
    Ok(())
}

/// Returns the device of a pointer among those of a client.
pub(crate) fn place_of(client: &Client, device: *mut Device) -> usize {
    client.pointers.iter().position(|pointer| *pointer == device.addr()).unwrap_or(0)
}

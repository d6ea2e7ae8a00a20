//! Programs.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pjrt_sys::{
    ClientCompileArgs, Code, ExecutableDeserializeAndLoadArgs, ExecutableDestroyArgs, ExecutableNameArgs,
    ExecutableNumOutputsArgs, ExecutableNumPartitionsArgs, ExecutableNumReplicasArgs, ExecutableOptimizedProgramArgs,
    ExecutableSerializeArgs, LoadedExecutableAddressableDevicesArgs, LoadedExecutableDestroyArgs,
    LoadedExecutableExecuteArgs, LoadedExecutableGetExecutableArgs, SerializedExecutable,
};
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::buffers::{Buffer, buffer};
use crate::clients::client;
use crate::events::event;
use crate::failure::{Failure, Kind, give, take};
use crate::table::functions;

/// A compiled program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Program {
    name: String,
    text: String,
    arguments: usize,
    /// For arguments that are donated, the output.
    aliases: BTreeMap<usize, usize>,
    replicas: usize,
    partitions: usize,
    devices: Vec<i64>,
}

struct Loaded {
    program: Arc<Program>,
    /// The addresses of the devices.
    devices: Vec<usize>,
}

/// `CompileOptionsProto`, `ExecutableBuildOptionsProto` and `DeviceAssignmentProto` of XLA, as far as they are read.
#[derive(Clone, PartialEq, Message)]
struct Options {
    #[prost(message, optional, tag = "3")]
    build: Option<Build>,
}

#[derive(Clone, PartialEq, Message)]
struct Build {
    #[prost(int64, tag = "4")]
    replicas: i64,
    #[prost(int64, tag = "5")]
    partitions: i64,
    #[prost(message, optional, tag = "9")]
    assignment: Option<Assignment>,
}

#[derive(Clone, PartialEq, Message)]
struct Assignment {
    #[prost(message, repeated, tag = "3")]
    partitions: Vec<Partition>,
}

#[derive(Clone, PartialEq, Message)]
struct Partition {
    #[prost(int64, repeated, tag = "1")]
    devices: Vec<i64>,
}

fn invalid(text: impl Into<String>) -> Failure {
    Failure::new(Code::INVALID_ARGUMENT, text)
}

impl Program {
    /// # Safety
    /// The program is code of the size that it tells, and so are the options.
    pub(crate) unsafe fn new(
        program: *const pjrt_sys::Program,
        options: *const c_char,
        options_size: usize,
    ) -> Result<Self, Failure> {
        // SAFETY: guaranteed by the caller.
        let program = unsafe { &*program };
        // SAFETY: guaranteed by the caller.
        let text = unsafe { std::slice::from_raw_parts(program.code.cast::<u8>(), program.code_size) };
        // SAFETY: guaranteed by the caller.
        let options = unsafe { std::slice::from_raw_parts(options.cast::<u8>(), options_size) };
        // SAFETY: guaranteed by the caller.
        let format = unsafe { std::slice::from_raw_parts(program.format.cast::<u8>(), program.format_size) };
        let text = String::from_utf8(text.to_vec()).map_err(|_| invalid("the program is not UTF-8"))?;
        if !text.contains("module") || format != b"mlir" {
            return Err(invalid("Failed to parse the program: expected a module in MLIR"));
        }
        let build = Options::decode(options).map_err(|error| invalid(error.to_string()))?.build.unwrap_or_default();
        let devices = build.assignment.map(|assignment| assignment.partitions.into_iter().flat_map(|row| row.devices));
        let devices = devices.map_or_else(|| (0..build.replicas).collect(), Iterator::collect);
        let signature = text.split("@main(").nth(1).and_then(|rest| rest.split(") ->").next()).unwrap_or(&text);
        // Programs that people wrote, or that `distribute-hlo` has printed.
        let prefix = if signature.contains("%arg0:") { "%arg" } else { "%" };
        let arguments = (0..).take_while(|place| signature.contains(&format!("{prefix}{place}:"))).count();
        let mut aliases = BTreeMap::new();
        for place in 0..arguments {
            let of_argument = signature.split(&format!("{prefix}{place}:")).nth(1).unwrap_or_default();
            let of_argument = of_argument.split('%').next().unwrap_or_default();
            let output = of_argument.split("tf.aliasing_output = ").nth(1).unwrap_or_default();
            if let Ok(output) = output.split(' ').next().unwrap_or_default().parse() {
                aliases.insert(place, output);
            }
        }
        let name = text.split('@').nth(1).and_then(|rest| rest.split([' ', '(']).next()).unwrap_or("main").to_owned();
        let (replicas, partitions) = (build.replicas as usize, build.partitions as usize);
        Ok(Self { name, text, arguments, aliases, replicas, partitions, devices })
    }

    /// # Safety
    /// The pointer is a client that is not destroyed.
    unsafe fn load(self, of: *mut pjrt_sys::Client) -> Result<*mut pjrt_sys::LoadedExecutable, Failure> {
        // SAFETY: guaranteed by the caller.
        let client = unsafe { client(of) };
        let find = |id: &i64| {
            let place = client.devices.iter().position(|device| i64::from(device.id) == *id);
            let place = place.ok_or_else(|| invalid(format!("No matching device found for device_id {id}")))?;
            Ok(client.pointers[place])
        };
        let devices = self.devices.iter().map(find).collect::<Result<_, _>>()?;
        Ok(give(Kind::Loaded, Loaded { program: Arc::new(self), devices }))
    }
}

/// # Safety
/// The pointer is an executable that is not destroyed.
unsafe fn program<'a>(executable: *const pjrt_sys::Executable) -> &'a Program {
    // SAFETY: guaranteed by the caller.
    unsafe { &*executable.cast::<Arc<Program>>() }
}

/// Gives a program that is not loaded.
pub(crate) fn give_program(program: Program) -> *mut pjrt_sys::Executable {
    give(Kind::Executable, Arc::new(program))
}

const MAGIC: &str = "SIMULATED PJRT 1\n";

unsafe extern "C" fn delete_serialized(serialized: *mut SerializedExecutable) {
    // SAFETY: the caller passes what `serialize` gave.
    unsafe { take::<String, _>(Kind::Value, serialized) };
}

functions! {
    fn compile(arguments: ClientCompileArgs) {
        // SAFETY: the caller passes a program and options.
        let program = unsafe {
            Program::new(arguments.program, arguments.compile_options, arguments.compile_options_size)
        }?;
        // SAFETY: the caller passes its client.
        arguments.executable = unsafe { program.load(arguments.client) }?;
        Ok(())
    }

    fn load(arguments: ExecutableDeserializeAndLoadArgs) {
        // SAFETY: the caller passes bytes of this size.
        let bytes = unsafe {
            let (bytes, size) = (arguments.serialized_executable.cast::<u8>(), arguments.serialized_executable_size);
            std::slice::from_raw_parts(bytes, size)
        };
        let rest = bytes.strip_prefix(MAGIC.as_bytes()).ok_or_else(|| invalid("not a serialized program"))?;
        let program: Program = serde_json::from_slice(rest).map_err(|error| invalid(error.to_string()))?;
        // SAFETY: the caller passes its client.
        arguments.loaded_executable = unsafe { program.load(arguments.client) }?;
        Ok(())
    }

    fn destroy(arguments: ExecutableDestroyArgs) {
        // SAFETY: the caller passes its executable.
        unsafe { take::<Arc<Program>, _>(Kind::Executable, arguments.executable) };
        Ok(())
    }

    fn destroy_loaded(arguments: LoadedExecutableDestroyArgs) {
        // SAFETY: the caller passes its executable.
        unsafe { take::<Loaded, _>(Kind::Loaded, arguments.executable) };
        Ok(())
    }

    fn get_executable(arguments: LoadedExecutableGetExecutableArgs) {
        // SAFETY: the caller passes its executable.
        let loaded = unsafe { &*arguments.loaded_executable.cast::<Loaded>() };
        arguments.executable = give(Kind::Executable, Arc::clone(&loaded.program));
        Ok(())
    }

    fn devices(arguments: LoadedExecutableAddressableDevicesArgs) {
        // SAFETY: the caller passes its executable.
        let devices = &unsafe { &*arguments.executable.cast::<Loaded>() }.devices;
        (arguments.addressable_devices, arguments.num_addressable_devices) = (devices.as_ptr().cast(), devices.len());
        Ok(())
    }

    fn name(arguments: ExecutableNameArgs) {
        // SAFETY: the caller passes its executable.
        let name = &unsafe { program(arguments.executable) }.name;
        (arguments.executable_name, arguments.executable_name_size) = (name.as_ptr().cast(), name.len());
        Ok(())
    }

    fn num_replicas(arguments: ExecutableNumReplicasArgs) {
        // SAFETY: the caller passes its executable.
        arguments.num_replicas = unsafe { program(arguments.executable) }.replicas;
        Ok(())
    }

    fn num_partitions(arguments: ExecutableNumPartitionsArgs) {
        // SAFETY: the caller passes its executable.
        arguments.num_partitions = unsafe { program(arguments.executable) }.partitions;
        Ok(())
    }

    fn num_outputs(arguments: ExecutableNumOutputsArgs) {
        // SAFETY: the caller passes its executable.
        arguments.num_outputs = unsafe { program(arguments.executable) }.arguments;
        Ok(())
    }

    fn optimized(arguments: ExecutableOptimizedProgramArgs) {
        // SAFETY: the caller passes its executable and a place for a program.
        let (text, place) = unsafe { (&program(arguments.executable).text, &mut *arguments.program) };
        (place.format, place.format_size) = (c"mlir".as_ptr(), 4);
        if place.code.is_null() {
            place.code_size = text.len();
        } else {
            // SAFETY: the place has the size that was told before.
            unsafe { ptr::copy_nonoverlapping(text.as_ptr(), place.code.cast(), text.len()) };
        }
        Ok(())
    }

    fn serialize(arguments: ExecutableSerializeArgs) {
        // SAFETY: the caller passes its executable.
        let text = serde_json::to_string(unsafe { program(arguments.executable) });
        let text = MAGIC.to_owned() + &text.map_err(|error| invalid(error.to_string()))?;
        (arguments.serialized_bytes, arguments.serialized_bytes_size) = (text.as_ptr().cast(), text.len());
        arguments.serialized_executable = give(Kind::Value, text);
        arguments.serialized_executable_deleter = Some(delete_serialized);
        Ok(())
    }

    fn execute(arguments: LoadedExecutableExecuteArgs) {
        // SAFETY: the caller passes its executable.
        let loaded = unsafe { &*arguments.executable.cast::<Loaded>() };
        let (devices, count) = (arguments.num_devices, arguments.num_args);
        if devices != loaded.devices.len() || count != loaded.program.arguments {
            return Err(invalid(format!("Attempted to execute with {devices} lists of {count} arguments")));
        }
        // SAFETY: the caller passes options.
        let options = unsafe { &*arguments.options };
        // SAFETY: the list has as many places.
        let kept = unsafe {
            let (places, count) = (options.non_donatable_input_indices, options.num_non_donatable_input_indices);
            std::slice::from_raw_parts(places, count)
        };
        for device in 0..devices {
            for place in 0..count {
                // SAFETY: lists and buffers are as many as are told.
                unsafe { buffer(*(*arguments.argument_lists.add(device)).add(place)) }.usable()?;
            }
        }
        for device in 0..devices {
            for place in 0..count {
                // SAFETY: as above.
                let given = unsafe { buffer(*(*arguments.argument_lists.add(device)).add(place)) };
                let donated = loaded.program.aliases.contains_key(&place) && !kept.contains(&(place as i64));
                given.deleted.fetch_or(donated, Ordering::SeqCst);
                let output = Buffer {
                    element_type: given.element_type,
                    dims: given.dims.clone(),
                    data: Arc::clone(&given.data),
                    deleted: AtomicBool::new(false),
                    device: loaded.devices[device],
                    place: given.place,
                };
                // SAFETY: the outputs are as many as are told.
                unsafe { *(*arguments.output_lists.add(device)).add(place) = give(Kind::Buffer, output) };
            }
            if !arguments.device_complete_events.is_null() {
                // SAFETY: the events are as many as the devices.
                unsafe { *arguments.device_complete_events.add(device) = event("execute", || {}) };
            }
        }
        Ok(())
    }
}

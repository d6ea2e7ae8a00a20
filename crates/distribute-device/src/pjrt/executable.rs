//! Programs on the devices of a client, and their execution.
#![expect(unsafe_code, reason = "functions of a plugin are called")]

use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use pjrt_sys::{
    Arguments, ClientCompileArgs, ExecutableDeserializeAndLoadArgs, Function, LoadedExecutableAddressableDevicesArgs,
    LoadedExecutableDestroyArgs, LoadedExecutableExecuteArgs, LoadedExecutableGetExecutableArgs,
};

use super::buffer::{Shape, foreign};
use super::client::same;
use super::element_type::buffer_type;
use super::handle::Handle;
use super::program::Owner;
use super::topology::mlir;
use super::value::list_of;
use super::{Buffer, Client, CompileOptions, CompiledProgram, Completion, ElementType, PjrtDevice, bounded};
use crate::{Error, Result};

/// A program that is loaded on devices of a client. Clones are cheap.
#[derive(Clone)]
pub struct Executable {
    inner: Arc<Inner>,
}

struct Inner {
    loaded: Loaded,
    program: CompiledProgram,
    /// The devices of this process, in the order of argument lists.
    devices: Vec<PjrtDevice>,
    num_outputs: usize,
    /// The shape of each output that the plugin tells, if it is static and of a known type.
    shapes: Vec<Option<Arc<Shape>>>,
}

/// The plugin's executable.
struct Loaded {
    raw: Handle<pjrt_sys::LoadedExecutable>,
    client: Client,
}

/// Options of an execution.
///
/// # Examples
/// ```
/// use distribute_device::pjrt::ExecuteOptions;
/// let options = ExecuteOptions::new().keeping([0]).with_launch_id(7);
/// # let _ = options;
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExecuteOptions {
    kept: Vec<i64>,
    launch_id: i32,
}

/// An execution that was started: its outputs, which may be used at once, and its end on each device.
#[derive(Debug)]
pub struct Execution {
    outputs: Vec<Vec<Buffer>>,
    completion: Completion,
}

impl ExecuteOptions {
    /// Creates options: arguments are donated as the program says, and the launch id is 0.
    pub fn new() -> ExecuteOptions {
        ExecuteOptions::default()
    }

    /// Keeps the arguments at these places, which the program would else take for its outputs.
    #[must_use]
    pub fn keeping(mut self, places: impl IntoIterator<Item = u32>) -> ExecuteOptions {
        self.kept.extend(places.into_iter().map(i64::from));
        self
    }

    /// Sets the number of the execution, which must be the same on all hosts of a program. Default: 0.
    #[must_use]
    pub fn with_launch_id(mut self, launch_id: i32) -> ExecuteOptions {
        self.launch_id = launch_id;
        self
    }
}

impl Client {
    /// Compiles a program, StableHLO as text or as bytecode, and loads it on its devices.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the program or the options are malformed; [`Error::Operands`] if the options do not fit each
    /// other; [`Error::Deadline`].
    ///
    /// # Source
    /// `PJRT_Client_Compile`.
    pub fn compile(
        &self,
        program: impl AsRef<[u8]>,
        options: &CompileOptions,
        deadline: Instant,
    ) -> Result<Executable> {
        let (client, program, options) = (self.clone(), program.as_ref().to_vec(), options.encode()?);
        let operation = format!("the compilation of a program of {} bytes", program.len());
        bounded::run(&operation, deadline, move || Executable::compile(client, program, &options))
    }

    /// Loads a program that [`serialize`](CompiledProgram::serialize) has returned, by the same version of the
    /// plugin.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin cannot read it; [`Error::Deadline`].
    ///
    /// # Source
    /// `PJRT_Executable_DeserializeAndLoad`.
    pub fn load(&self, serialized: impl AsRef<[u8]>, deadline: Instant) -> Result<Executable> {
        let (client, serialized) = (self.clone(), serialized.as_ref().to_vec());
        let operation = format!("the loading of a program of {} bytes", serialized.len());
        bounded::run(&operation, deadline, move || Executable::load(client, &serialized))
    }
}

impl Executable {
    fn compile(client: Client, mut program: Vec<u8>, options: &[u8]) -> Result<Executable> {
        let program = mlir(&mut program);
        let mut compile = ClientCompileArgs {
            client: client.inner.raw.as_ptr(),
            program: &raw const program,
            compile_options: options.as_ptr().cast(),
            compile_options_size: options.len(),
            ..Arguments::new()
        };
        // SAFETY: program and options live during the call.
        unsafe { client.plugin().call(&client, &mut compile) }?;
        // SAFETY: the call gives the executable to its caller.
        unsafe { Executable::own(client, compile.executable, Function::PJRT_Client_Compile) }
    }

    fn load(client: Client, serialized: &[u8]) -> Result<Executable> {
        let mut load = ExecutableDeserializeAndLoadArgs {
            client: client.inner.raw.as_ptr(),
            serialized_executable: serialized.as_ptr().cast(),
            serialized_executable_size: serialized.len(),
            ..Arguments::new()
        };
        // SAFETY: the bytes live during the call.
        unsafe { client.plugin().call(&client, &mut load) }?;
        // SAFETY: the call gives the executable to its caller.
        unsafe { Executable::own(client, load.loaded_executable, Function::PJRT_Executable_DeserializeAndLoad) }
    }

    /// Takes an executable that a call has returned.
    ///
    /// # Safety
    /// The pointer is null, or the caller's own executable of the client.
    unsafe fn own(client: Client, raw: *mut pjrt_sys::LoadedExecutable, call: Function) -> Result<Executable> {
        let loaded = Loaded { raw: Handle::new(raw, call.name())?, client };
        let (raw, client) = (loaded.raw, loaded.client.clone());
        let plugin = client.plugin();
        let mut get = LoadedExecutableGetExecutableArgs { loaded_executable: raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { plugin.call(&client, &mut get) }?;
        let owner = Owner::Client { _client: client.clone() };
        let name = Function::PJRT_LoadedExecutable_GetExecutable.name();
        // SAFETY: the call gives the executable to its caller.
        let program = unsafe { CompiledProgram::own(plugin, owner, get.executable, name) }?;
        let mut list = LoadedExecutableAddressableDevicesArgs { executable: raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { plugin.call(&program, &mut list) }?;
        // SAFETY: the list lives as long as the executable.
        let pointers = unsafe { list_of(list.addressable_devices, list.num_addressable_devices) };
        let all = client.devices();
        let find = |pointer: &*mut pjrt_sys::Device| {
            let unknown = || Error::PjrtPlugin { problem: format!("{plugin} loaded {program} on an unknown device") };
            all.iter().find(|device| device.raw().as_ptr() == *pointer).cloned().ok_or_else(unknown)
        };
        let devices = pointers.iter().map(find).collect::<Result<Vec<_>>>()?;
        let num_outputs = program.num_outputs()?;
        // They save questions to the plugin later; without them nothing is lost.
        let told = program.outputs().unwrap_or_default();
        let known = |(kind, dims): (Option<ElementType>, Vec<i64>)| Shape::of(buffer_type(kind?), &dims).map(Arc::new);
        let mut shapes: Vec<_> = told.into_iter().map(known).collect();
        shapes.resize(num_outputs, None);
        Ok(Executable { inner: Arc::new(Inner { loaded, program, devices, num_outputs, shapes }) })
    }

    /// Returns the client.
    pub fn client(&self) -> &Client {
        &self.inner.loaded.client
    }

    /// Returns the compiled program, to be asked for its sizes and to be serialized.
    pub fn program(&self) -> &CompiledProgram {
        &self.inner.program
    }

    /// Returns the devices of this process that run the program, in the order of argument lists.
    pub fn devices(&self) -> &[PjrtDevice] {
        &self.inner.devices
    }

    /// Runs the program and waits for its end on all devices. Returns the outputs of each device.
    ///
    /// # Shapes
    /// `arguments` has a list for each of [`devices`](Self::devices), in that order, with the program's arguments on
    /// that device. Arguments that the program donates are deleted.
    ///
    /// # Errors
    /// [`Error::Operands`] and [`Error::Foreign`] for wrong arguments, as [`launch`](Self::launch) says;
    /// [`Error::Pjrt`] names the device that failed, [`Error::Deadline`] those that have not ended.
    pub fn execute(&self, arguments: &[Vec<&Buffer>], deadline: Instant) -> Result<Vec<Vec<Buffer>>> {
        let execution = self.launch(arguments, &ExecuteOptions::new())?;
        execution.wait(deadline)?;
        Ok(execution.into_outputs())
    }

    /// Starts the program on all its devices of this process.
    ///
    /// # Ordering
    /// Processes that run one program on devices of all of them must launch it in the same order.
    ///
    /// # Errors
    /// - [`Error::Operands`] if there is not a list for each device, or they differ in length; for several devices, if
    ///   an argument is on another device, was deleted, or has another shape than on the first device.
    /// - [`Error::Foreign`] if a buffer is of another client.
    /// - [`Error::Pjrt`] if the plugin refuses the arguments, such as for their number or their sizes.
    ///
    /// # Source
    /// `PJRT_LoadedExecutable_Execute`.
    pub fn launch(&self, arguments: &[Vec<&Buffer>], options: &ExecuteOptions) -> Result<Execution> {
        let inner = &*self.inner;
        let (devices, outputs) = (inner.devices.len(), inner.num_outputs);
        let num_args = self.check(arguments)?;
        let given: Vec<Vec<_>> =
            arguments.iter().map(|list| list.iter().map(|buffer| buffer.raw()).collect()).collect();
        let lists: Vec<_> = given.iter().map(|list| list.as_ptr()).collect();
        let mut made = vec![vec![ptr::null_mut::<pjrt_sys::Buffer>(); outputs]; devices];
        let places: Vec<_> = made.iter_mut().map(|list| list.as_mut_ptr()).collect();
        let mut events = vec![ptr::null_mut::<pjrt_sys::Event>(); devices];
        let mut execute_options = pjrt_sys::ExecuteOptions {
            launch_id: options.launch_id,
            non_donatable_input_indices: options.kept.as_ptr(),
            num_non_donatable_input_indices: options.kept.len(),
            ..pjrt_sys::ExecuteOptions::new()
        };
        let mut execute = LoadedExecutableExecuteArgs {
            executable: inner.loaded.raw.as_ptr(),
            options: &raw mut execute_options,
            argument_lists: lists.as_ptr(),
            num_devices: devices,
            num_args,
            output_lists: places.as_ptr(),
            device_complete_events: events.as_mut_ptr(),
            ..Arguments::new()
        };
        // Programs of two threads come to all devices in the same order; else each could wait for the other.
        let _order = (devices > 1).then(|| inner.loaded.client.inner.launches.lock());
        // SAFETY: all lists have the sizes that are told, and live during the call; buffers are of this client.
        unsafe { inner.loaded.client.plugin().call(self, &mut execute) }?;
        self.started(&made, &events)
    }

    /// Checks the arguments and returns their number on each device.
    ///
    /// On several devices, what the plugin would refuse on one of them alone is refused here: the others would wait in
    /// collectives for it. XLA's plugin for CPUs ends the process after 40 s of that.
    fn check(&self, arguments: &[Vec<&Buffer>]) -> Result<usize> {
        let wrong = |problem| Error::Operands { operation: "the execution of a program", problem };
        let devices = self.inner.devices.len();
        if arguments.len() != devices {
            return Err(wrong(format!(
                "{} lists of arguments were given for {self}, which runs on {devices} devices; give a list for each",
                arguments.len()
            )));
        }
        let num_args = arguments.first().map_or(0, Vec::len);
        if let Some(place) = arguments.iter().position(|list| list.len() != num_args) {
            return Err(wrong(format!(
                "{num_args} arguments were given for {}, and {} for {}; give all that {self} takes",
                self.inner.devices[0],
                arguments[place].len(),
                self.inner.devices[place]
            )));
        }
        let client = &self.inner.loaded.client;
        if let Some(other) = arguments.iter().flatten().find(|buffer| !same(&buffer.client, client)) {
            return Err(foreign("buffer", &other.client, client));
        }
        for (list, device) in arguments.iter().zip(&self.inner.devices).take(if devices > 1 { devices } else { 0 }) {
            for (place, (buffer, first)) in list.iter().zip(&arguments[0]).enumerate() {
                if buffer.is_deleted()? {
                    return Err(wrong(format!(
                        "argument {place} for {device} was deleted or donated before; give the output that has \
                         replaced it"
                    )));
                }
                let (on, shape, expected) = (buffer.device()?, buffer.shape()?, first.shape()?);
                if on != *device {
                    return Err(wrong(format!("argument {place} for {device} is on {on}; copy it there")));
                }
                if shape != expected {
                    return Err(wrong(format!(
                        "argument {place} is {shape} on {device}, and {expected} on {}; give equal shapes",
                        self.inner.devices[0]
                    )));
                }
            }
        }
        Ok(num_args)
    }

    /// Takes the outputs and the events of an execution.
    fn started(&self, made: &[Vec<*mut pjrt_sys::Buffer>], events: &[*mut pjrt_sys::Event]) -> Result<Execution> {
        let inner = &*self.inner;
        let call = Function::PJRT_LoadedExecutable_Execute;
        // All are taken before the first error is returned, so that none is lost.
        let mut outputs: Vec<Vec<Result<Buffer>>> = Vec::with_capacity(made.len());
        for (list, device) in made.iter().zip(&inner.devices) {
            let own = |(raw, shape): (&*mut pjrt_sys::Buffer, &Option<Arc<Shape>>)| {
                // SAFETY: the call gives the buffers to its caller.
                let buffer = unsafe { Buffer::own(&inner.loaded.client, *raw, call) }?;
                Ok(buffer.with_facts(shape.as_ref(), device))
            };
            outputs.push(list.iter().zip(&inner.shapes).map(own).collect());
        }
        let subjects = inner.devices.iter().map(|device| format!("{self} on {device}")).collect();
        let completion = Completion::new(call, subjects, None);
        let mut failed = None;
        for (place, event) in events.iter().enumerate() {
            match Handle::new(*event, call.name()) {
                Ok(event) => {
                    let plugin = inner.loaded.client.plugin();
                    // SAFETY: the call gives the event to its caller.
                    let answer =
                        unsafe { completion.register(place, plugin, &inner.loaded.client.inner.pending, event, None) };
                    failed = failed.or(answer.err());
                }
                Err(_) => completion.end(place),
            }
        }
        match failed {
            Some(error) => Err(error),
            None => {
                let outputs = outputs.into_iter().map(|list| list.into_iter().collect()).collect::<Result<_>>()?;
                Ok(Execution { outputs, completion })
            }
        }
    }
}

/// Formats "program" and the name.
impl fmt::Display for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.program.fmt(f)
    }
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executable")
            .field("name", &self.inner.program.name())
            .field("devices", &self.inner.devices)
            .field("num_outputs", &self.inner.num_outputs)
            .finish()
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let mut destroy = LoadedExecutableDestroyArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable is this value's. Executions of the plugin that run keep it.
        unsafe { self.client.plugin().free(&mut destroy) };
    }
}

impl Execution {
    /// Waits for the end on all devices, or for a failure on one.
    ///
    /// # Errors
    /// [`Error::Pjrt`] names the device that failed, [`Error::Deadline`] those that have not ended.
    pub fn wait(&self, deadline: Instant) -> Result<()> {
        self.completion.wait(deadline)
    }

    /// Returns whether all devices have ended.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// Returns the outputs of each device. Programs and copies may use them before the execution has ended.
    pub fn outputs(&self) -> &[Vec<Buffer>] {
        &self.outputs
    }

    /// Takes the first `count` outputs of each device, without waiting; [`outputs`](Self::outputs) are then the others.
    pub fn take_outputs(&mut self, count: usize) -> Vec<Vec<Buffer>> {
        self.outputs.iter_mut().map(|all| all.drain(..count.min(all.len())).collect()).collect()
    }

    /// Returns the outputs of each device, without waiting.
    pub fn into_outputs(self) -> Vec<Vec<Buffer>> {
        self.outputs
    }
}

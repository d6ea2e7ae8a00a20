//! Topologies: devices to compile for, which need not be there.
#![expect(unsafe_code, reason = "functions of a plugin are called")]

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use pjrt_sys::{
    Arguments, ClientTopologyDescriptionArgs, CompileArgs, Function, Program, TopologyDescription,
    TopologyDescriptionAttributesArgs, TopologyDescriptionCreateArgs, TopologyDescriptionDestroyArgs,
    TopologyDescriptionGetDeviceDescriptionsArgs, TopologyDescriptionPlatformNameArgs,
    TopologyDescriptionPlatformVersionArgs,
};

use super::handle::Handle;
use super::plugin::Plugin;
use super::program::Owner;
use super::value::{Attributes, Value, attributes, list_of, text, to_named};
use super::{Client, CompileOptions, CompiledProgram, DeviceDescription, bounded};
use crate::Result;

/// Devices and how they are connected. Programs can be compiled for them on a machine without any of them. Clones are
/// cheap.
#[derive(Clone)]
pub struct Topology {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    plugin: Plugin,
    raw: Handle<TopologyDescription>,
    /// The client that owns it; `None` if it is this value's.
    client: Option<Client>,
    platform_name: String,
    platform_version: String,
    devices: Vec<DeviceDescription>,
}

impl Topology {
    /// Creates the topology with a name that the plugin knows, such as `v5e:2x4` of libtpu.
    ///
    /// # Errors
    /// [`Error::Pjrt`](crate::Error::Pjrt) if the plugin does not know it, or knows none;
    /// [`Error::Operands`](crate::Error::Operands) for an option of unknown type.
    ///
    /// # Source
    /// `PJRT_TopologyDescription_Create`.
    pub fn create(plugin: &Plugin, name: &str, options: &[(String, Value)]) -> Result<Topology> {
        let options = to_named(options)?;
        let mut create = TopologyDescriptionCreateArgs {
            topology_name: name.as_ptr().cast(),
            topology_name_size: name.len(),
            create_options: options.as_ptr(),
            num_options: options.len(),
            ..Arguments::new()
        };
        // SAFETY: name and options live during the call.
        unsafe { plugin.call(&format_args!("topology {name:?}"), &mut create) }?;
        // SAFETY: the call gives the topology to its caller.
        unsafe { Topology::own(plugin, create.topology, None) }
    }

    /// Returns the platform, such as `tpu`.
    pub fn platform_name(&self) -> &str {
        &self.inner.platform_name
    }

    /// Returns the version of the platform's software, as the plugin writes it.
    pub fn platform_version(&self) -> &str {
        &self.inner.platform_version
    }

    /// Returns the devices.
    pub fn devices(&self) -> &[DeviceDescription] {
        &self.inner.devices
    }

    /// Returns further properties, which depend on the plugin.
    ///
    /// # Errors
    /// [`Error::Pjrt`](crate::Error::Pjrt) if the plugin does not tell them.
    pub fn attributes(&self) -> Result<Attributes> {
        let inner = &self.inner;
        let mut get = TopologyDescriptionAttributesArgs { topology: inner.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the topology exists.
        unsafe { inner.plugin.call(self, &mut get) }?;
        // SAFETY: the list lives as long as the topology.
        Ok(unsafe { attributes(get.attributes, get.num_attributes) })
    }

    /// Compiles a program, StableHLO as text or as bytecode, without loading it.
    ///
    /// # Errors
    /// As for [`Client::compile`].
    ///
    /// # Source
    /// `PJRT_Compile`.
    pub fn compile(
        &self,
        program: impl AsRef<[u8]>,
        options: &CompileOptions,
        deadline: Instant,
    ) -> Result<CompiledProgram> {
        let (topology, mut code, options) = (self.clone(), program.as_ref().to_vec(), options.encode()?);
        let operation = format!("the compilation of a program of {} bytes for {self}", code.len());
        bounded::run(&operation, deadline, move || {
            let program = mlir(&mut code);
            let inner = &topology.inner;
            let mut compile = CompileArgs {
                topology: inner.raw.as_ptr(),
                program: &raw const program,
                compile_options: options.as_ptr().cast(),
                compile_options_size: options.len(),
                client: inner.client.as_ref().map_or(std::ptr::null_mut(), |client| client.inner.raw.as_ptr()),
                ..Arguments::new()
            };
            // SAFETY: program and options live during the call.
            unsafe { inner.plugin.call(&topology, &mut compile) }?;
            let owner = Owner::Topology { _topology: Arc::clone(inner) };
            // SAFETY: the call gives the executable to its caller.
            unsafe { CompiledProgram::own(&inner.plugin, owner, compile.executable, Function::PJRT_Compile.name()) }
        })
    }

    /// Takes a topology that a call has returned.
    ///
    /// # Safety
    /// The pointer is null, or a topology of the client, or the caller's own without one.
    unsafe fn own(plugin: &Plugin, raw: *mut TopologyDescription, client: Option<Client>) -> Result<Topology> {
        let raw = Handle::new(raw, Function::PJRT_TopologyDescription_Create.name())?;
        let (name, version) = (String::new(), String::new());
        let (platform_name, platform_version) = (name, version);
        let mut inner =
            Inner { plugin: plugin.clone(), raw, client, platform_name, platform_version, devices: Vec::new() };
        inner.read()?;
        Ok(Topology { inner: Arc::new(inner) })
    }
}

impl Client {
    /// Returns the topology of the client's devices.
    ///
    /// # Errors
    /// [`Error::Pjrt`](crate::Error::Pjrt) if the plugin does not tell it.
    ///
    /// # Source
    /// `PJRT_Client_TopologyDescription`.
    pub fn topology(&self) -> Result<Topology> {
        let mut get = ClientTopologyDescriptionArgs { client: self.inner.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the client exists.
        unsafe { self.plugin().call(self, &mut get) }?;
        // SAFETY: the topology is the client's.
        unsafe { Topology::own(self.plugin(), get.topology, Some(self.clone())) }
    }
}

/// Formats "topology", the platform and the number of devices.
impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "topology of {} {} devices", self.devices().len(), self.platform_name())
    }
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Topology({self})")
    }
}

impl Inner {
    /// Reads what does not change.
    fn read(&mut self) -> Result<()> {
        let (plugin, topology) = (self.plugin.clone(), self.raw.as_ptr());
        let mut name = TopologyDescriptionPlatformNameArgs { topology, ..Arguments::new() };
        // SAFETY: the topology exists.
        unsafe { plugin.call(&plugin, &mut name) }?;
        // SAFETY: the text lives as long as the topology.
        self.platform_name = unsafe { text(name.platform_name, name.platform_name_size) };
        let mut version = TopologyDescriptionPlatformVersionArgs { topology, ..Arguments::new() };
        // SAFETY: the topology exists.
        unsafe { plugin.call(&plugin, &mut version) }?;
        // SAFETY: the text lives as long as the topology.
        self.platform_version = unsafe { text(version.platform_version, version.platform_version_size) };
        let mut list = TopologyDescriptionGetDeviceDescriptionsArgs { topology, ..Arguments::new() };
        // SAFETY: the topology exists.
        unsafe { plugin.call(&plugin, &mut list) }?;
        // SAFETY: the list lives as long as the topology.
        for description in unsafe { list_of(list.descriptions, list.num_descriptions) } {
            let call = Function::PJRT_TopologyDescription_GetDeviceDescriptions.name();
            let description = Handle::new(description, call)?;
            // SAFETY: descriptions live as long as the topology.
            self.devices.push(unsafe { DeviceDescription::read(&plugin, description.as_ptr()) }?);
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.client.is_none() {
            let mut destroy = TopologyDescriptionDestroyArgs { topology: self.raw.as_ptr(), ..Arguments::new() };
            // SAFETY: the topology is this value's.
            unsafe { self.plugin.free(&mut destroy) };
        }
    }
}

/// Returns code in MLIR as C has it. It points into `code`.
pub(super) fn mlir(code: &mut [u8]) -> Program {
    let format = "mlir";
    Program {
        code: code.as_mut_ptr().cast(),
        code_size: code.len(),
        format: format.as_ptr().cast(),
        format_size: format.len(),
        ..Program::new()
    }
}

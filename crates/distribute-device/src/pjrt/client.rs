//! Clients: the devices of a plugin that this process may use.
#![expect(unsafe_code, reason = "functions of a plugin are called")]

use std::fmt;
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pjrt_sys::{
    Arguments, ClientAddressableDevicesArgs, ClientCreateArgs, ClientDefaultDeviceAssignmentArgs, ClientDestroyArgs,
    ClientDevicesArgs, ClientPlatformNameArgs, ClientPlatformVersionArgs, ClientProcessIndexArgs, Function,
};

use super::completion::Pending;
use super::device::Facts;
use super::handle::Handle;
use super::key_value::{self, KeyValueStore};
use super::plugin::Plugin;
use super::value::{Value, list_of, text, to_named};
use super::{CompileOptions, Executable, PjrtDevice, bounded};
use crate::{Error, Result};

/// The devices of a plugin, open for use. Clones are cheap and refer to the same client.
///
/// It is destroyed with its last clone, device, buffer and executable, once the plugin has finished all operations. If
/// it has not within [`ClientOptions::with_close_timeout`], the client stays in memory.
#[derive(Clone)]
pub struct Client {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) plugin: Plugin,
    pub(super) raw: Handle<pjrt_sys::Client>,
    pub(super) pending: Arc<Pending>,
    pub(super) devices: Vec<Facts>,
    close_timeout: Duration,
    store: Option<key_value::Shared>,
    platform_name: String,
    platform_version: String,
    process_index: i32,
}

/// Options of a [`Client`].
///
/// # Examples
/// ```
/// use distribute_device::pjrt::ClientOptions;
/// // XLA's plugin for CPUs has as many devices as this option says.
/// let options = ClientOptions::new().with("cpu_device_count", 8);
/// # let _ = options;
/// ```
#[derive(Clone)]
pub struct ClientOptions {
    values: Vec<(String, Value)>,
    store: Option<Arc<dyn KeyValueStore>>,
    close_timeout: Duration,
}

impl ClientOptions {
    /// Creates options without values and without a store.
    pub fn new() -> ClientOptions {
        ClientOptions { values: Vec::new(), store: None, close_timeout: Duration::from_secs(10) }
    }

    /// Adds an option of the plugin. Plugins may ignore options that they do not know.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> ClientOptions {
        self.values.push((name.to_owned(), value.into()));
        self
    }

    /// Sets the store by which the processes of a client on several hosts meet. Default: none.
    #[must_use]
    pub fn with_key_value_store(mut self, store: Arc<dyn KeyValueStore>) -> ClientOptions {
        self.store = Some(store);
        self
    }

    /// Sets how long the drop of a client waits for operations that have not ended. Default: 10 s.
    #[must_use]
    pub fn with_close_timeout(mut self, timeout: Duration) -> ClientOptions {
        self.close_timeout = timeout;
        self
    }
}

impl Default for ClientOptions {
    fn default() -> ClientOptions {
        ClientOptions::new()
    }
}

impl fmt::Debug for ClientOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("ClientOptions");
        text.field("values", &self.values).field("has_store", &self.store.is_some());
        text.field("close_timeout", &self.close_timeout).finish()
    }
}

impl Client {
    /// Opens the devices of a plugin. Clients of several processes wait for each other, by their store.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if there are no devices, or the processes do not meet; [`Error::Deadline`]; [`Error::Operands`]
    /// for an option of unknown type.
    ///
    /// # Source
    /// `PJRT_Client_Create`.
    pub fn create(plugin: &Plugin, options: ClientOptions, deadline: Instant) -> Result<Client> {
        let plugin = plugin.clone();
        bounded::run(&format!("the client of {plugin}"), deadline, move || Client::create_now(plugin, &options))
    }

    fn create_now(plugin: Plugin, options: &ClientOptions) -> Result<Client> {
        let values = to_named(&options.values)?;
        let store = options.store.clone().map(Box::new);
        let mut arguments =
            ClientCreateArgs { create_options: values.as_ptr(), num_options: values.len(), ..Arguments::new() };
        if let Some(store) = &store {
            let user_arg = key_value::user_arg(store);
            arguments.kv_get_callback = Some(key_value::get);
            arguments.kv_get_user_arg = user_arg;
            arguments.kv_put_callback = Some(key_value::put);
            arguments.kv_put_user_arg = user_arg;
            arguments.kv_try_get_callback = Some(key_value::try_get);
            arguments.kv_try_get_user_arg = user_arg;
        }
        // SAFETY: the options live during the call, the store until the client is destroyed.
        unsafe { plugin.call(&plugin, &mut arguments) }?;
        let raw = Handle::new(arguments.client, Function::PJRT_Client_Create.name())?;
        let mut inner = Inner {
            plugin,
            raw,
            pending: Arc::default(),
            devices: Vec::new(),
            close_timeout: options.close_timeout,
            store,
            platform_name: String::new(),
            platform_version: String::new(),
            process_index: 0,
        };
        inner.read()?;
        Ok(Client { inner: Arc::new(inner) })
    }

    /// Returns the plugin.
    pub fn plugin(&self) -> &Plugin {
        &self.inner.plugin
    }

    /// Returns the name of the platform, such as `tpu` or `cpu`.
    pub fn platform_name(&self) -> &str {
        &self.inner.platform_name
    }

    /// Returns the version of the platform's software, as the plugin writes it.
    pub fn platform_version(&self) -> &str {
        &self.inner.platform_version
    }

    /// Returns the number of this process among those of the client, from 0.
    pub fn process_index(&self) -> i32 {
        self.inner.process_index
    }

    /// Returns all devices, also those of other processes.
    pub fn devices(&self) -> Vec<PjrtDevice> {
        (0..self.inner.devices.len()).map(|place| PjrtDevice::new(self, place)).collect()
    }

    /// Returns the devices of this process.
    pub fn addressable_devices(&self) -> Vec<PjrtDevice> {
        self.devices().into_iter().filter(PjrtDevice::is_addressable).collect()
    }

    /// Returns the device with a number; `None` if there is none.
    pub fn device(&self, id: i32) -> Option<PjrtDevice> {
        let place = self.inner.devices.iter().position(|device| device.description.id == id)?;
        Some(PjrtDevice::new(self, place))
    }

    /// Returns the numbers of the devices that the plugin would assign to a program: for each replica, those of its
    /// partitions.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if there are not as many devices; [`Error::Operands`] if a number is 0 or too large.
    ///
    /// # Source
    /// `PJRT_Client_DefaultDeviceAssignment`.
    pub fn default_device_assignment(&self, replicas: usize, partitions: usize) -> Result<Vec<Vec<i32>>> {
        let wrong = || Error::Operands {
            operation: "a device assignment",
            problem: format!("{replicas} replicas of {partitions} partitions were given; give 1 to 65536 in all"),
        };
        let count = replicas.checked_mul(partitions).filter(|count| (1..=65536).contains(count)).ok_or_else(wrong)?;
        let mut ids = vec![0; count];
        let mut arguments = ClientDefaultDeviceAssignmentArgs {
            client: self.inner.raw.as_ptr(),
            num_replicas: i32::try_from(replicas).map_err(|_| wrong())?,
            num_partitions: i32::try_from(partitions).map_err(|_| wrong())?,
            default_assignment_size: count,
            default_assignment: ids.as_mut_ptr(),
            ..Arguments::new()
        };
        // SAFETY: the list has as many places as are told.
        unsafe { self.inner.plugin.call(self, &mut arguments) }?;
        Ok(ids.chunks(partitions).map(<[i32]>::to_vec).collect())
    }

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

    /// Loads a program that [`serialize`](super::CompiledProgram::serialize) has returned, by the same version of the
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

/// Formats the platform and the file of the plugin.
impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} client of {}", self.platform_name(), self.inner.plugin)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Client");
        text.field("platform_name", &self.platform_name()).field("devices", &self.inner.devices.len());
        text.field("plugin", &self.inner.plugin).finish()
    }
}

impl Inner {
    /// Reads what does not change.
    fn read(&mut self) -> Result<()> {
        let (plugin, client) = (self.plugin.clone(), self.raw.as_ptr());
        let mut name = ClientPlatformNameArgs { client, ..Arguments::new() };
        // SAFETY: the client exists.
        unsafe { plugin.call(&plugin, &mut name) }?;
        // SAFETY: the text lives as long as the client.
        self.platform_name = unsafe { text(name.platform_name, name.platform_name_size) };
        let mut version = ClientPlatformVersionArgs { client, ..Arguments::new() };
        // SAFETY: the client exists.
        unsafe { plugin.call(&plugin, &mut version) }?;
        // SAFETY: the text lives as long as the client.
        self.platform_version = unsafe { text(version.platform_version, version.platform_version_size) };
        let mut process = ClientProcessIndexArgs { client, ..Arguments::new() };
        // SAFETY: the client exists.
        unsafe { plugin.call(&plugin, &mut process) }?;
        self.process_index = process.process_index;
        let mut local = ClientAddressableDevicesArgs { client, ..Arguments::new() };
        // SAFETY: the client exists.
        unsafe { plugin.call(&plugin, &mut local) }?;
        // SAFETY: the list lives as long as the client.
        let local = unsafe { list_of(local.addressable_devices, local.num_addressable_devices) };
        let mut all = ClientDevicesArgs { client, ..Arguments::new() };
        // SAFETY: the client exists.
        unsafe { plugin.call(&plugin, &mut all) }?;
        // SAFETY: the list lives as long as the client.
        let all = unsafe { list_of(all.devices, all.num_devices) };
        for device in all {
            let is_addressable = local.contains(&device);
            let device = Handle::new(device, Function::PJRT_Client_Devices.name())?;
            // SAFETY: devices live as long as the client.
            self.devices.push(unsafe { Facts::read(&plugin, device, is_addressable) }?);
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.pending.wait(self.close_timeout) {
            self.plugin.abandon_client();
            // The plugin may still call it.
            mem::forget(self.store.take());
            return;
        }
        let mut arguments = ClientDestroyArgs { client: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: all objects of the client were freed, since each keeps it, and all its operations have ended.
        unsafe { self.plugin.free(&mut arguments) };
    }
}

/// Returns whether two values are of one client.
pub(super) fn same(one: &Client, other: &Client) -> bool {
    ptr::eq(Arc::as_ptr(&one.inner), Arc::as_ptr(&other.inner))
}

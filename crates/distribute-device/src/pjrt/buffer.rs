//! Values on devices.
#![expect(unsafe_code, reason = "functions of a plugin are called")]

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pjrt_sys::{
    Arguments, BufferCopyToDeviceArgs, BufferDeleteArgs, BufferDestroyArgs, BufferDeviceArgs, BufferDimensionsArgs,
    BufferElementTypeArgs, BufferIsDeletedArgs, BufferIsOnCpuArgs, BufferOnDeviceSizeInBytesArgs, BufferReadyEventArgs,
    BufferToHostBufferArgs, BufferType, ClientBufferFromHostBufferArgs, Function, HostBufferSemantics, MemoryLayout,
    TiledLayout,
};

use super::client::same;
use super::element_type::{buffer_type, of_buffer};
use super::handle::Handle;
use super::plugin::Plugin;
use super::value::list_of;
use super::{Client, Completion, ElementType, PjrtDevice};
use crate::{Element, Error, HostBuffer, Result};

/// A value on a device: an array of elements. It is freed when it is dropped.
///
/// Its elements may still be computed, or be copied to the device; operations that use them wait for that on the
/// device.
pub struct Buffer {
    pub(super) client: Client,
    raw: Handle<pjrt_sys::Buffer>,
    /// Read from the plugin when it is first asked for.
    shape: OnceLock<Arc<Shape>>,
    device: OnceLock<PjrtDevice>,
}

/// Type and sizes of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) element_type: ElementType,
    pub(super) dims: Vec<usize>,
}

/// A copy from a device to host memory. Dropping it does not wait: the copy continues.
#[derive(Debug)]
#[must_use = "the copy's memory is only given by `wait`"]
pub struct Download {
    completion: Completion,
}

impl PjrtDevice {
    /// Starts a copy of host memory to the device. The memory is kept, and cannot be changed, until the plugin has read
    /// it.
    ///
    /// # Shapes
    /// `memory` has the elements of `dims` in row-major order; no dimensions for a scalar.
    ///
    /// # Errors
    /// [`Error::Operands`] if the sizes differ, or a truth value is neither 0 nor 1;
    /// [`Error::Pjrt`] if the device has not enough memory.
    ///
    /// # Source
    /// `PJRT_Client_BufferFromHostBuffer`, `kImmutableUntilTransferCompletes`.
    pub fn upload(
        &self,
        element_type: ElementType,
        dims: &[usize],
        memory: impl Into<Arc<HostBuffer>>,
    ) -> Result<Buffer> {
        Buffer::upload(self, element_type, dims, memory.into())
    }

    /// Copies elements to the device, as [`upload`](Self::upload) does.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the copy cannot be allocated; else those of [`upload`](Self::upload).
    pub fn upload_slice<T: Element>(&self, elements: &[T], dims: &[usize]) -> Result<Buffer> {
        self.upload(T::DTYPE.into(), dims, HostBuffer::from_slice(elements)?)
    }
}

impl Buffer {
    /// Takes a buffer that a call has returned.
    ///
    /// # Safety
    /// The pointer is null or the caller's own buffer of this client.
    pub(super) unsafe fn own(client: &Client, raw: *mut pjrt_sys::Buffer, call: Function) -> Result<Buffer> {
        let raw = Handle::new(raw, call.name())?;
        Ok(Buffer { client: client.clone(), raw, shape: OnceLock::new(), device: OnceLock::new() })
    }

    /// Notes what is known of a program's output.
    pub(super) fn with_facts(self, shape: Option<&Arc<Shape>>, device: &PjrtDevice) -> Buffer {
        if let Some(shape) = shape {
            let _ = self.shape.set(Arc::clone(shape));
        }
        let _ = self.device.set(device.clone());
        self
    }

    fn upload(
        device: &PjrtDevice,
        element_type: ElementType,
        dims: &[usize],
        memory: Arc<HostBuffer>,
    ) -> Result<Buffer> {
        let bytes = size_bytes(element_type, dims).ok_or_else(|| wrong(device, element_type, dims, "is too large"))?;
        if bytes != memory.len_bytes() {
            let problem = format!("needs {bytes} bytes, and {} were given; give one for each", memory.len_bytes());
            return Err(wrong(device, element_type, dims, &problem));
        }
        if element_type == ElementType::Bool && memory.as_bytes().iter().any(|byte| *byte > 1) {
            return Err(wrong(device, element_type, dims, "has a byte that is neither 0 nor 1; write truth values so"));
        }
        let client = device.client();
        let inner = &client.inner;
        let signed: Vec<i64> = dims.iter().map(|dim| *dim as i64).collect();
        let completion = Completion::new(Function::PJRT_Client_BufferFromHostBuffer, vec![device.to_string()], None);
        let mut arguments = ClientBufferFromHostBufferArgs {
            client: inner.raw.as_ptr(),
            data: memory.as_bytes().as_ptr().cast(),
            kind: buffer_type(element_type),
            dims: signed.as_ptr(),
            num_dims: signed.len(),
            host_buffer_semantics: HostBufferSemantics::IMMUTABLE_UNTIL_TRANSFER_COMPLETES,
            device: device.raw().as_ptr(),
            ..Arguments::new()
        };
        // SAFETY: the memory has the elements, as was checked, and is kept by the registration below until it was read.
        unsafe { inner.plugin.call(device, &mut arguments) }?;
        // SAFETY: the call gives the buffer to its caller.
        let buffer = unsafe { Buffer::own(client, arguments.buffer, Function::PJRT_Client_BufferFromHostBuffer) };
        match Handle::new(arguments.done_with_host_buffer, Function::PJRT_Client_BufferFromHostBuffer.name()) {
            // SAFETY: the call gives the event to its caller.
            Ok(event) => unsafe {
                completion.register(0, &inner.plugin, &inner.pending, event, Some(memory))?;
            },
            Err(missing) => {
                // Nothing tells when the memory was read.
                std::mem::forget(memory);
                return Err(missing);
            }
        }
        let shape = Shape { element_type, dims: dims.to_vec() };
        Ok(buffer?.with_facts(Some(&Arc::new(shape)), device))
    }

    /// Returns the client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the device that has the value.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the buffer was deleted.
    pub fn device(&self) -> Result<PjrtDevice> {
        if let Some(device) = self.device.get() {
            return Ok(device.clone());
        }
        let mut get = BufferDeviceArgs { buffer: self.raw(), ..Arguments::new() };
        // SAFETY: the buffer exists.
        unsafe { self.plugin().call(&"a buffer", &mut get) }?;
        let devices = self.client.devices();
        let unknown = || Error::PjrtPlugin { problem: format!("{} gave a device of no client", self.plugin()) };
        let device = devices.into_iter().find(|device| device.raw().as_ptr() == get.device).ok_or_else(unknown)?;
        Ok(self.device.get_or_init(|| device).clone())
    }

    /// Returns the type of the elements.
    ///
    /// # Errors
    /// [`Error::Operands`] for a type that this crate does not know; [`Error::Pjrt`].
    pub fn element_type(&self) -> Result<ElementType> {
        Ok(self.shape()?.element_type)
    }

    /// Returns the sizes of the dimensions; none for a scalar.
    ///
    /// # Errors
    /// [`Error::Operands`] for a type that this crate does not know; [`Error::Pjrt`] if the plugin returns an error.
    pub fn dims(&self) -> Result<Vec<usize>> {
        Ok(self.shape()?.dims.clone())
    }

    pub(super) fn shape(&self) -> Result<&Arc<Shape>> {
        if let Some(shape) = self.shape.get() {
            return Ok(shape);
        }
        let mut kind = BufferElementTypeArgs { buffer: self.raw(), ..Arguments::new() };
        // SAFETY: the buffer exists.
        unsafe { self.plugin().call(self, &mut kind) }?;
        let mut get = BufferDimensionsArgs { buffer: self.raw(), ..Arguments::new() };
        // SAFETY: the buffer exists.
        unsafe { self.plugin().call(self, &mut get) }?;
        // SAFETY: the list lives as long as the buffer.
        let dims = unsafe { list_of(get.dims, get.num_dims) };
        let shape = Shape::of(kind.kind, &dims).ok_or_else(|| Error::Operands {
            operation: "the shape of a buffer",
            problem: format!(
                "the plugin gave type {} and sizes {dims:?}; use static shapes of the types of ElementType",
                kind.kind.0
            ),
        })?;
        Ok(self.shape.get_or_init(|| Arc::new(shape)))
    }

    /// Returns the memory that the value takes on its device, padding included.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the buffer was deleted.
    pub fn on_device_bytes(&self) -> Result<usize> {
        let mut get = BufferOnDeviceSizeInBytesArgs { buffer: self.raw(), ..Arguments::new() };
        // SAFETY: the buffer exists.
        unsafe { self.plugin().call(self, &mut get) }?;
        Ok(get.on_device_size_in_bytes)
    }

    /// Returns whether the value is in memory of the host.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin returns an error.
    pub fn is_on_cpu(&self) -> Result<bool> {
        let mut get = BufferIsOnCpuArgs { buffer: self.raw(), ..Arguments::new() };
        // SAFETY: the buffer exists.
        unsafe { self.plugin().call(self, &mut get) }?;
        Ok(get.is_on_cpu)
    }

    /// Returns whether the value was deleted, or donated to a program.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin returns an error.
    pub fn is_deleted(&self) -> Result<bool> {
        let mut get = BufferIsDeletedArgs { buffer: self.raw(), ..Arguments::new() };
        // SAFETY: the buffer exists.
        unsafe { self.plugin().call(self, &mut get) }?;
        Ok(get.is_deleted)
    }

    /// Frees the value's memory once the operations that use it have ended. Later uses are errors.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin returns an error.
    pub fn delete(&self) -> Result<()> {
        let mut delete = BufferDeleteArgs { buffer: self.raw(), ..Arguments::new() };
        // SAFETY: the buffer exists.
        unsafe { self.plugin().call(self, &mut delete) }
    }

    /// Returns the completion of the operation that computes or copies the value.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the buffer was deleted.
    ///
    /// # Source
    /// `PJRT_Buffer_ReadyEvent`.
    pub fn ready(&self) -> Result<Completion> {
        let mut get = BufferReadyEventArgs { buffer: self.raw(), ..Arguments::new() };
        // SAFETY: the buffer exists.
        unsafe { self.plugin().call(self, &mut get) }?;
        let completion = Completion::new(Function::PJRT_Buffer_ReadyEvent, vec![self.to_string()], None);
        let event = Handle::new(get.event, Function::PJRT_Buffer_ReadyEvent.name())?;
        let inner = &self.client.inner;
        // SAFETY: the call gives the event to its caller.
        unsafe { completion.register(0, &inner.plugin, &inner.pending, event, None) }?;
        Ok(completion)
    }

    /// Starts a copy to another device of the same client.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a device of another client; [`Error::Pjrt`].
    ///
    /// # Source
    /// `PJRT_Buffer_CopyToDevice`.
    pub fn copy_to(&self, device: &PjrtDevice) -> Result<Buffer> {
        if !same(&self.client, device.client()) {
            return Err(foreign("buffer", &self.client, device.client()));
        }
        let mut copy =
            BufferCopyToDeviceArgs { buffer: self.raw(), dst_device: device.raw().as_ptr(), ..Arguments::new() };
        // SAFETY: buffer and device are of one client.
        unsafe { self.plugin().call(self, &mut copy) }?;
        // SAFETY: the call gives the buffer to its caller.
        unsafe { Buffer::own(&self.client, copy.dst_buffer, Function::PJRT_Buffer_CopyToDevice) }
    }

    /// Starts a copy to host memory, in row-major order.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the memory cannot be allocated; [`Error::Pjrt`] if the buffer was deleted;
    /// [`Error::Operands`] if the plugin wants more memory than the elements take.
    ///
    /// # Source
    /// `PJRT_Buffer_ToHostBuffer`.
    pub fn download(&self) -> Result<Download> {
        let (element_type, dims) = (self.element_type()?, self.dims()?);
        let too_large = || Error::Operands {
            operation: "a copy to the host",
            problem: format!("{element_type}{dims:?} is too large for this machine's addresses; split it"),
        };
        let bytes = size_bytes(element_type, &dims).ok_or_else(too_large)?;
        let minor_to_major: Vec<i64> = (0..dims.len() as i64).rev().collect();
        let mut layout = MemoryLayout {
            tiled: TiledLayout {
                minor_to_major: minor_to_major.as_ptr(),
                minor_to_major_size: minor_to_major.len(),
                ..TiledLayout::new()
            },
            ..MemoryLayout::new()
        };
        let arguments = |layout, dst: *mut c_void, dst_size| BufferToHostBufferArgs {
            src: self.raw(),
            host_layout: layout,
            dst,
            dst_size,
            ..Arguments::new()
        };
        let mut ask = arguments(&raw mut layout, std::ptr::null_mut(), 0);
        // SAFETY: null as the destination asks for the size; the layout lives during the call.
        unsafe { self.plugin().call(self, &mut ask) }?;
        if ask.dst_size != bytes {
            return Err(Error::Operands {
                operation: "a copy to the host",
                problem: format!(
                    "{element_type}{dims:?} has {bytes} bytes, and the plugin gives {}; use another type",
                    ask.dst_size
                ),
            });
        }
        let call = Function::PJRT_Buffer_ToHostBuffer;
        let completion = Completion::new(call, vec![self.to_string()], Some(HostBuffer::zeroed(bytes)?));
        let (memory, len_bytes) = completion.memory();
        let mut copy = arguments(&raw mut layout, memory, len_bytes);
        // SAFETY: the memory has this size, and stays until the copy has ended, by the registration below.
        unsafe { self.plugin().call(self, &mut copy) }?;
        let inner = &self.client.inner;
        match Handle::new(copy.event, call.name()) {
            // SAFETY: the call gives the event to its caller.
            Ok(event) => unsafe { completion.register(0, &inner.plugin, &inner.pending, event, None) }?,
            Err(missing) => {
                // Nothing tells when the memory was written.
                std::mem::forget(completion);
                return Err(missing);
            }
        }
        Ok(Download { completion })
    }

    /// Copies the value to host memory and waits for that.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the copy, or the operation that computes the value, failed, or the buffer was deleted;
    /// [`Error::Deadline`]; [`Error::HostMemory`] if the memory cannot be allocated.
    pub fn read(&self, deadline: Instant) -> Result<HostBuffer> {
        self.download()?.wait(deadline)
    }

    /// Copies the elements to the host and waits for that.
    ///
    /// # Errors
    /// [`Error::Operands`] if they have another type; else as for [`read`](Self::read).
    pub fn to_vec<T: Element>(&self, deadline: Instant) -> Result<Vec<T>> {
        let held = self.element_type()?;
        if held != T::DTYPE.into() {
            return Err(Error::Operands {
                operation: "a copy to the host",
                problem: format!("elements of {} were asked for, and the buffer holds {held}; ask for that", T::DTYPE),
            });
        }
        Ok(self.read(deadline)?.as_slice::<T>()?.to_vec())
    }

    pub(super) fn raw(&self) -> *mut pjrt_sys::Buffer {
        self.raw.as_ptr()
    }

    fn plugin(&self) -> &Plugin {
        self.client.plugin()
    }
}

/// Formats "a buffer" and the platform.
impl fmt::Display for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device() {
            Ok(device) => write!(f, "a buffer on {device}"),
            Err(_) => write!(f, "a buffer of the {} client", self.client.platform_name()),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({self})")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut destroy = BufferDestroyArgs { buffer: self.raw(), ..Arguments::new() };
        // SAFETY: the buffer is this value's. Operations of the plugin that use its memory keep it.
        unsafe { self.plugin().free(&mut destroy) };
    }
}

impl Shape {
    /// Returns the shape that a plugin tells, if it is static and of a known type.
    pub(super) fn of(buffer_type: BufferType, dims: &[i64]) -> Option<Shape> {
        let dims = dims.iter().map(|dim| usize::try_from(*dim).ok()).collect::<Option<_>>()?;
        Some(Shape { element_type: of_buffer(buffer_type)?, dims })
    }
}

/// Formats the type and the sizes: `f32[2, 3]`.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.element_type, self.dims)
    }
}

impl Download {
    /// Waits for the copy and returns the memory.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the copy, or the operation that computes the value, failed; [`Error::Deadline`].
    pub fn wait(self, deadline: Instant) -> Result<HostBuffer> {
        self.completion.wait(deadline)?;
        self.completion.take_memory().ok_or(Error::TransferTaken)
    }

    /// Returns whether the copy has ended.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }
}

/// Returns the size of an array in bytes, or `None` if it is not the size of memory.
fn size_bytes(element_type: ElementType, dims: &[usize]) -> Option<usize> {
    let elements = dims.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim))?;
    if dims.iter().any(|dim| i64::try_from(*dim).is_err()) {
        return None;
    }
    elements.checked_mul(element_type.size_bytes()).filter(|bytes| isize::try_from(*bytes).is_ok())
}

fn wrong(device: &PjrtDevice, element_type: ElementType, dims: &[usize], problem: &str) -> Error {
    Error::Operands {
        operation: "a copy to a device of PJRT",
        problem: format!("{element_type}{dims:?} for {device} {problem}"),
    }
}

/// Returns the error of an object that is used with another client than its own.
pub(super) fn foreign(what: &'static str, owner: &Client, user: &Client) -> Error {
    Error::Foreign {
        what,
        owner: owner.to_string(),
        user: user.to_string(),
        remedy: "use objects of one client together, or copy over the host",
    }
}

//! Buffers.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pjrt_sys::{
    BufferCopyToDeviceArgs, BufferDeleteArgs, BufferDestroyArgs, BufferDeviceArgs, BufferDimensionsArgs,
    BufferElementTypeArgs, BufferIsDeletedArgs, BufferIsOnCpuArgs, BufferOnDeviceSizeInBytesArgs, BufferReadyEventArgs,
    BufferToHostBufferArgs, BufferType, ClientBufferFromHostBufferArgs, Code,
};

use crate::clients::{client, place_of};
use crate::events::event;
use crate::failure::{Failure, Kind, give, take};
use crate::table::functions;

/// A buffer.
pub(crate) struct Buffer {
    pub(crate) element_type: BufferType,
    pub(crate) dims: Vec<i64>,
    pub(crate) data: Data,
    pub(crate) deleted: AtomicBool,
    /// The address of the device.
    pub(crate) device: usize,
    /// The device's number.
    pub(crate) place: usize,
}

pub(crate) type Data = Arc<Mutex<Vec<u8>>>;

impl Buffer {
    pub(crate) fn size_bytes(&self) -> usize {
        let size = match self.element_type.0 {
            1 | 2 | 6 => 1,
            3 | 7 | 10 | 13 => 2,
            4 | 8 | 11 => 4,
            _ => 8,
        };
        self.dims.iter().product::<i64>() as usize * size
    }

    pub(crate) fn usable(&self) -> Result<(), Failure> {
        match self.deleted.load(Ordering::SeqCst) {
            true => Err(Failure::new(Code::INVALID_ARGUMENT, "Buffer has been deleted or donated.")),
            false => Ok(()),
        }
    }
}

/// # Safety
/// The pointer is a buffer that is not destroyed.
pub(crate) unsafe fn buffer<'a>(buffer: *mut pjrt_sys::Buffer) -> &'a Buffer {
    // SAFETY: guaranteed by the caller.
    unsafe { &*buffer.cast::<Buffer>() }
}

functions! {
    fn upload(arguments: ClientBufferFromHostBufferArgs) {
        // SAFETY: the caller passes as many sizes.
        let dims = unsafe { std::slice::from_raw_parts(arguments.dims, arguments.num_dims) }.to_vec();
        // SAFETY: the caller passes its client.
        let place = place_of(unsafe { client(arguments.client) }, arguments.device);
        let data = Data::default();
        let made = Buffer {
            element_type: arguments.kind,
            dims,
            data: Arc::clone(&data),
            deleted: AtomicBool::new(false),
            device: arguments.device.expose_provenance(),
            place,
        };
        let (source, size) = (arguments.data.expose_provenance(), made.size_bytes());
        arguments.done_with_host_buffer = event("host", move || {
            // SAFETY: the program keeps the memory until this event.
            let bytes = unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance::<u8>(source), size) };
            *data.lock().unwrap_or_else(PoisonError::into_inner) = bytes.to_vec();
        });
        arguments.buffer = give(Kind::Buffer, made);
        Ok(())
    }

    fn destroy(arguments: BufferDestroyArgs) {
        // SAFETY: the caller passes its buffer.
        unsafe { take::<Buffer, _>(Kind::Buffer, arguments.buffer) };
        Ok(())
    }

    fn element_type(arguments: BufferElementTypeArgs) {
        // SAFETY: the caller passes its buffer.
        arguments.kind = unsafe { buffer(arguments.buffer) }.element_type;
        Ok(())
    }

    fn dimensions(arguments: BufferDimensionsArgs) {
        // SAFETY: the caller passes its buffer.
        let dims = &unsafe { buffer(arguments.buffer) }.dims;
        (arguments.dims, arguments.num_dims) = (dims.as_ptr(), dims.len());
        Ok(())
    }

    fn on_device_size(arguments: BufferOnDeviceSizeInBytesArgs) {
        // SAFETY: the caller passes its buffer.
        arguments.on_device_size_in_bytes = unsafe { buffer(arguments.buffer) }.size_bytes();
        Ok(())
    }

    fn device(arguments: BufferDeviceArgs) {
        // SAFETY: the caller passes its buffer.
        arguments.device = ptr::with_exposed_provenance_mut(unsafe { buffer(arguments.buffer) }.device);
        Ok(())
    }

    fn delete(arguments: BufferDeleteArgs) {
        // SAFETY: the caller passes its buffer.
        unsafe { buffer(arguments.buffer) }.deleted.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn is_deleted(arguments: BufferIsDeletedArgs) {
        // SAFETY: the caller passes its buffer.
        arguments.is_deleted = unsafe { buffer(arguments.buffer) }.deleted.load(Ordering::SeqCst);
        Ok(())
    }

    fn is_on_cpu(arguments: BufferIsOnCpuArgs) {
        arguments.is_on_cpu = true;
        Ok(())
    }

    fn copy_to_device(arguments: BufferCopyToDeviceArgs) {
        // SAFETY: the caller passes its buffer.
        let source = unsafe { buffer(arguments.buffer) };
        source.usable()?;
        // SAFETY: the caller passes a device of the same client.
        let place = unsafe { crate::clients::device(arguments.dst_device) }.id as usize;
        let copy = Buffer {
            element_type: source.element_type,
            dims: source.dims.clone(),
            data: Arc::clone(&source.data),
            deleted: AtomicBool::new(false),
            device: arguments.dst_device.expose_provenance(),
            place,
        };
        arguments.dst_buffer = give(Kind::Buffer, copy);
        Ok(())
    }

    fn ready(arguments: BufferReadyEventArgs) {
        // SAFETY: the caller passes its buffer.
        unsafe { buffer(arguments.buffer) }.usable()?;
        arguments.event = event("ready", || {});
        Ok(())
    }

    fn download(arguments: BufferToHostBufferArgs) {
        // SAFETY: the caller passes its buffer.
        let source = unsafe { buffer(arguments.src) };
        source.usable()?;
        // SAFETY: a layout that is not null has as many dimensions as it tells.
        let order = unsafe { arguments.host_layout.as_ref().map(|layout| layout.tiled) };
        let order = order.map(|tiled| {
            // SAFETY: as above.
            unsafe { std::slice::from_raw_parts(tiled.minor_to_major, tiled.minor_to_major_size) }.to_vec()
        });
        // Without one a plugin gives the order of the device, whatever it is.
        if order != Some((0..source.dims.len() as i64).rev().collect()) {
            return Err(Failure::new(Code::UNIMPLEMENTED, format!("the order of dimensions {order:?}")));
        }
        let needed = source.size_bytes();
        if arguments.dst.is_null() {
            arguments.dst_size = needed;
            return Ok(());
        }
        if arguments.dst_size < needed {
            return Err(Failure::new(Code::INVALID_ARGUMENT, format!("{needed} bytes are needed")));
        }
        let (place, data) = (arguments.dst.expose_provenance(), Arc::clone(&source.data));
        arguments.event = event("download", move || {
            let data = data.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the program keeps the memory until this event; its size was compared.
            unsafe { ptr::copy_nonoverlapping(data.as_ptr(), ptr::with_exposed_provenance_mut(place), data.len()) };
        });
        Ok(())
    }
}

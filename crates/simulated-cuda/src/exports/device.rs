//! Initialisation, errors and devices.

use std::ffi::{CStr, c_char};
use std::ptr;

use crate::device::{NAME, device, devices, initialise};
use crate::error::Code;
use crate::ffi::{Out, Text, exports};
use crate::settings::settings;

exports! {
    fn cuInit(flags: u32) {
        if flags == 0 { initialise() } else { Err(Code::INVALID_VALUE) }
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        version.set(settings().driver_version)
    }

    fn cuGetErrorName(code: Code, name: Out<*const c_char>) {
        name.set(code.name().map_or(ptr::null(), CStr::as_ptr))?;
        code.name().map(drop).ok_or(Code::INVALID_VALUE)
    }

    fn cuGetErrorString(code: Code, text: Out<*const c_char>) {
        text.set(code.text().map_or(ptr::null(), CStr::as_ptr))?;
        code.text().map(drop).ok_or(Code::INVALID_VALUE)
    }

    fn cuDeviceGetCount(count: Out<i32>) {
        count.set(i32::try_from(devices().len()).unwrap_or(i32::MAX))
    }

    fn cuDeviceGet(found: Out<i32>, ordinal: i32) {
        device(ordinal)?;
        found.set(ordinal)
    }

    fn cuDeviceGetName(name: Out<u8>, room: i32, ordinal: i32) {
        device(ordinal)?;
        text_to(&name, room, NAME)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, ordinal: i32) {
        bytes.set(device(ordinal)?.total_bytes as usize)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: u32, ordinal: i32) {
        value.set(device(ordinal)?.attribute(attribute)?)
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, ordinal: i32) {
        uuid.set(device(ordinal)?.uuid())
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, ordinal: i32) {
        uuid.set(device(ordinal)?.uuid())
    }

    fn cuDeviceGetPCIBusId(id: Out<u8>, room: i32, ordinal: i32) {
        text_to(&id, room, &device(ordinal)?.pci_bus_id())
    }

    fn cuDeviceGetByPCIBusId(found: Out<i32>, id: Text) {
        let id = id.get().and_then(|id| id.to_str().ok()).ok_or(Code::INVALID_VALUE)?;
        let wanted = devices().iter().find(|device| device.pci_bus_id().eq_ignore_ascii_case(id));
        found.set(wanted.ok_or(Code::INVALID_DEVICE)?.ordinal as i32)
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, from: i32, to: i32) {
        can.set(i32::from(device(from)?.reaches(device(to)?)))
    }

    fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: u32, from: i32, to: i32) {
        let (source, target) = (device(from)?, device(to)?);
        if from == to {
            return Err(Code::INVALID_DEVICE);
        }
        match attribute {
            // Performance rank: all links are equal.
            1 => value.set(0),
            2..=4 => value.set(i32::from(source.reaches(target))),
            5 => value.set(0),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn cuProfilerStart() {
        Ok(())
    }

    fn cuProfilerStop() {
        Ok(())
    }
}

/// Writes a zero-terminated text, truncated to the available room.
fn text_to(place: &Out<u8>, room: i32, text: &str) -> crate::error::Result {
    let room = usize::try_from(room).ok().filter(|&room| room > 0).ok_or(Code::INVALID_VALUE)?;
    let bytes: Vec<u8> = text.bytes().take(room - 1).chain([0]).collect();
    place.set_all(&bytes, room)
}

//! Images of modules: the compiler creates them, `cuModuleLoadData` reads them. It receives no length, so they contain
//! it.

use std::ptr;

use crate::device::Device;
use crate::error::{Code, Result};
use crate::settings::Arch;

/// Creates an image with machine code: magic, architecture, length, object.
pub(crate) fn cubin(object: &[u8], arch: Arch) -> Vec<u8> {
    [CUBIN, &number(arch).to_le_bytes(), &(object.len() as u64).to_le_bytes(), object].concat()
}

/// Creates an image as zero-terminated text, since programs may store it as a string.
pub(crate) fn ptx(object: &[u8], arch: Arch) -> Vec<u8> {
    let mut text = [PTX, format!("{:08x}{:016x}\n", number(arch), object.len()).as_bytes()].concat();
    text.extend(object.iter().flat_map(|byte| [HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]));
    text.push(0);
    text
}

/// Returns the object in the image at an address, if the device can run it.
///
/// # Errors
/// `INVALID_IMAGE` if it is not an image of this crate, `NO_BINARY_FOR_GPU` if it is for other devices.
pub(crate) fn object_of(image: usize, device: &Device) -> Result<Vec<u8>> {
    if starts_with(image, CUBIN) {
        let header = read(image + CUBIN.len(), 12);
        let arch = u32::from_le_bytes(header[..4].try_into().expect("four bytes"));
        let len = u64::from_le_bytes(header[4..].try_into().expect("eight bytes"));
        // Machine code runs on devices of the same major version.
        let ours = number(device.arch);
        if arch / 10 != ours / 10 || arch > ours {
            return Err(Code::NO_BINARY_FOR_GPU);
        }
        return Ok(read(image + CUBIN.len() + 12, usize::try_from(len).map_err(|_| Code::INVALID_IMAGE)?));
    }
    if !starts_with(image, PTX) {
        return Err(Code::INVALID_IMAGE);
    }
    let header = read(image + PTX.len(), 25);
    let (arch, len) = (hex(&header[..8])?, hex(&header[8..24])?);
    if arch > u64::from(number(device.arch)) {
        return Err(Code::NO_BINARY_FOR_GPU);
    }
    let len = usize::try_from(len).map_err(|_| Code::INVALID_IMAGE)?;
    let digits = read(image + PTX.len() + 25, len * 2);
    digits.chunks(2).map(|pair| Ok(hex(pair)? as u8)).collect()
}

/// Returns whether an image starts with a magic; reads byte by byte, since the image may be any short text.
fn starts_with(image: usize, mark: &[u8]) -> bool {
    image != 0 && mark.iter().enumerate().all(|(offset, &byte)| read(image + offset, 1) == [byte])
}

fn read(address: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: C callers promise an image; each caller here has checked the magic, and images with it have the length
    // that they contain. Of other images no byte after the first difference is read, and texts end with a zero byte.
    unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance::<u8>(address), bytes) }.to_vec()
}

fn hex(digits: &[u8]) -> Result<u64> {
    let text = str::from_utf8(digits).map_err(|_| Code::INVALID_IMAGE)?;
    u64::from_str_radix(text, 16).map_err(|_| Code::INVALID_IMAGE)
}

fn number(arch: Arch) -> u32 {
    arch.major * 10 + arch.minor
}

const CUBIN: &[u8] = b"simulated CUBIN\0";
const PTX: &[u8] = b"// simulated PTX ";
const HEX: &[u8; 16] = b"0123456789abcdef";

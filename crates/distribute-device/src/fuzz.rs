//! Decoders of bytes from outside, for fuzzers and for the replay of their corpora. Not part of the public interface.
//!
//! Each function decodes its input, checks what it decoded, and returns whether the input was accepted. The crate has
//! them in its tests, and in builds by cargo-fuzz, which sets `cfg(fuzzing)`.

#[cfg(test)]
mod tests;

use crate::{DType, DeviceSpec, parse_device_list};

/// The names of devices and of types, and lists of devices.
pub fn device_names(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(dtype) = text.parse::<DType>() {
        assert_eq!(dtype.name(), text);
    }
    let list = parse_device_list(text.split(',')).inspect(|list| {
        let again = parse_device_list(list.iter().map(ToString::to_string));
        assert_eq!(again.as_ref().ok(), Some(list));
    });
    let Ok(spec) = text.parse::<DeviceSpec>() else { return list.is_ok() };
    let shown = spec.to_string();
    assert_eq!(shown.parse::<DeviceSpec>().as_ref().ok(), Some(&spec), "{shown}");
    true
}

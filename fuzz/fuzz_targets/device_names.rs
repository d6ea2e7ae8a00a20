#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    distribute_device::fuzz::device_names(bytes);
});

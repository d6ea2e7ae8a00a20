#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    distribute_data_service::fuzz::data_service(bytes);
});

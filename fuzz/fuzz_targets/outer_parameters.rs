#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    distribute_parameter_server::fuzz::outer_parameters(bytes);
});

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    distribute_cluster::fuzz::handshake_between(bytes);
});

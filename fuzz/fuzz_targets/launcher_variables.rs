#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    distribute_cluster::fuzz::launcher_variables(bytes);
});

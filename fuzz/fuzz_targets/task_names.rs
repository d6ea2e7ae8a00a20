#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    distribute_cluster::fuzz::task_names(bytes);
});

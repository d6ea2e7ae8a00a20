#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    distribute_collectives::fuzz::shared_memory(bytes);
});

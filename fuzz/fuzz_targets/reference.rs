//! Feeds `reference` of the hub crate.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tierkeep_hub::fuzzing::reference(bytes);
});

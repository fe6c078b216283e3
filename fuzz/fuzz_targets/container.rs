//! Feeds `container` of `targets/plans.rs`.
#![no_main]

#[path = "../targets/plans.rs"]
#[allow(dead_code, reason = "each target uses one function of it")]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = targets::container(bytes);
});

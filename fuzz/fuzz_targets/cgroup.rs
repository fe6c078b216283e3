//! Feeds `cgroup` of `targets/doctor.rs`.
#![no_main]

#[path = "../targets/doctor.rs"]
#[allow(dead_code, reason = "each target uses one function of it")]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = targets::cgroup(bytes);
});

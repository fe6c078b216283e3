//! A stand-in for NVIDIA's management library, built by `tests/gpus.rs` with one of several machines:
//! `two` (two cards, one busy and one divided), `no_total` (a device that reports no memory),
//! `all_of_it` (a device that reports the system's memory), `failing` (no driver behind the library),
//! `broken` (a driver that knows its devices' number alone). Signatures are those of nvml.h.
#![crate_type = "cdylib"]
#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::os::raw::{c_char, c_int, c_uint, c_ulonglong};

const SUCCESS: c_int = 0;
const NOT_SUPPORTED: c_int = 3;
const DRIVER_NOT_LOADED: c_int = 9;
const GPU_IS_LOST: c_int = 15;
const UNKNOWN: c_int = 999;

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct Memory {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// A handle is the index of a device plus one; instances of a divided device are from 100 on.
type Device = usize;

// SAFETY: as NVML asks of its callers, pointers are to places that may be written.
unsafe fn text(from: &str, to: *mut c_char, length: c_uint) -> c_int {
    if from.len() >= length as usize {
        return UNKNOWN;
    }
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe {
        std::ptr::copy_nonoverlapping(from.as_ptr(), to.cast::<u8>(), from.len());
        to.add(from.len()).write(0);
    }
    SUCCESS
}

// SAFETY: as NVML asks of its callers, pointers are to places that may be written.
unsafe fn number(value: Option<c_uint>, to: *mut c_uint) -> c_int {
    match value {
        Some(value) => {
            // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
            unsafe { to.write(value) };
            SUCCESS
        }
        None => NOT_SUPPORTED,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    if cfg!(machine = "failing") { DRIVER_NOT_LOADED } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(to: *mut c_char, length: c_uint) -> c_int {
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { text("570.86.10", to, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_int {
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { number(Some(if cfg!(machine = "two") { 2 } else { 1 }), count) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(
    index: c_uint,
    device: *mut Device,
) -> c_int {
    if cfg!(machine = "broken") {
        return GPU_IS_LOST;
    }
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { device.write(index as usize + 1) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(
    device: Device,
    to: *mut c_char,
    length: c_uint,
) -> c_int {
    let name = match (cfg!(machine = "two"), device) {
        (true, 1) => "NVIDIA L40S",
        (true, _) => "NVIDIA H100 80GB HBM3",
        (false, _) => "NVIDIA GB10",
    };
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { text(name, to, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(
    device: Device,
    to: *mut c_char,
    length: c_uint,
) -> c_int {
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { text(&format!("GPU-0000000{device}"), to, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut Memory) -> c_int {
    let (total, reserved, free) = match device {
        100.. => (20_000_000_000, 0, 20_000_000_000),
        _ if cfg!(machine = "no_total") => return NOT_SUPPORTED,
        _ if cfg!(machine = "all_of_it") => (128 << 30, 0, 100 << 30),
        1 => (48_305_799_168, 500_000_000, 47_700_000_000),
        _ => (85_520_809_984, 600_000_000, 3_000_000_000),
    };
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe {
        (*memory).total = total;
        (*memory).reserved = reserved;
        (*memory).free = free;
        (*memory).used = total - reserved - free;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Device,
    major: *mut c_int,
    minor: *mut c_int,
) -> c_int {
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe {
        major.write(if device == 1 { 8 } else { 9 });
        minor.write(if device == 1 { 9 } else { 0 });
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxPcieLinkGeneration(
    device: Device,
    to: *mut c_uint,
) -> c_int {
    let generation = if device == 1 { 4 } else { 5 };
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { number(cfg!(machine = "two").then_some(generation), to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxPcieLinkWidth(_device: Device, to: *mut c_uint) -> c_int {
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { number(cfg!(machine = "two").then_some(16), to) }
}

/// The second card sits in a slot of eight lanes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrPcieLinkWidth(device: Device, to: *mut c_uint) -> c_int {
    let width = if device == 1 { 16 } else { 8 };
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { number(cfg!(machine = "two").then_some(width), to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxClockInfo(
    device: Device,
    kind: c_uint,
    to: *mut c_uint,
) -> c_int {
    let is_memory = kind == 2;
    let mhz = if device == 1 { 9001 } else { 2619 };
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { number((cfg!(machine = "two") && is_memory).then_some(mhz), to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryBusWidth(device: Device, to: *mut c_uint) -> c_int {
    let bits = if device == 1 { 384 } else { 5120 };
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { number(cfg!(machine = "two").then_some(bits), to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: Device,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> c_int {
    if device == 1 {
        return NOT_SUPPORTED;
    }
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe {
        current.write(1);
        pending.write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(_device: Device, to: *mut c_uint) -> c_int {
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { number(Some(7), to) }
}

/// Two of seven are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    _device: Device,
    index: c_uint,
    instance: *mut Device,
) -> c_int {
    if index > 1 {
        return 6;
    }
    // SAFETY: as NVML asks of its callers, pointers are to places that may be written.
    unsafe { instance.write(100 + index as usize) };
    SUCCESS
}

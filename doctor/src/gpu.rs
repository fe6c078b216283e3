//! NVIDIA's graphics processors.
//!
//! Owns the questions to NVIDIA's management library, which is loaded at run time. Refuses to fail:
//! a machine without a driver is a fact, not an error. Nothing is guessed from a product's name. Other
//! makers' devices are in `gpu_sysfs`.

use std::path::Path;

use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::fact::Fact;
use crate::facts::{GpuFact, GpuVendor};
use crate::gpu_sysfs;
use crate::memory::gigabytes;
use crate::parse;
use crate::tree::Tree;

/// No machine has more devices; a count beyond is a driver's mistake.
const MAX_DEVICES: u32 = 256;

/// Devices that report as much memory as the host has, within this, report the host's.
const SAME_MEMORY_BYTES: u64 = 1 << 20;

/// The devices of NVIDIA's driver. `library` replaces the usual names of its library;
/// `host_total_bytes` is the system's memory.
pub(crate) fn probe(
    tree: &Tree,
    library: Option<&Path>,
    host_total_bytes: Option<u64>,
) -> Fact<Vec<GpuFact>> {
    if library.is_none() && !tree.is_live() {
        return Fact::unknown("a recorded tree has no GPU driver to ask");
    }
    match load(library) {
        Ok(nvml) => devices(&nvml, host_total_bytes),
        Err(error) => {
            let mut reason = format!("no NVIDIA driver: {}", one_line(&error));
            let cards = gpu_sysfs::nvidia_cards(tree);
            if !cards.is_empty() {
                reason.push_str(&format!("; there is an NVIDIA card at {}", cards.join(", ")));
            }
            Fact::unknown(reason)
        }
    }
}

/// Where the library is looked for: drivers install it under its versioned name, and the Windows
/// Subsystem for Linux in a folder of its own.
const LIBRARY: &str = "libnvidia-ml.so.1";
const LIBRARY_IN_WSL: &str = "/usr/lib/wsl/lib/libnvidia-ml.so.1";

/// Loads the library and initialises it; of several failures the first is the one to tell.
fn load(library: Option<&Path>) -> Result<Nvml, NvmlError> {
    if let Some(path) = library {
        return Nvml::builder().lib_path(path.as_os_str()).init();
    }
    if cfg!(not(target_os = "linux")) {
        return Nvml::init();
    }
    let init = |path: &str| Nvml::builder().lib_path(path.as_ref()).init();
    init(LIBRARY).or_else(|first| init(LIBRARY_IN_WSL).map_err(|_| first))
}

fn devices(nvml: &Nvml, host_total_bytes: Option<u64>) -> Fact<Vec<GpuFact>> {
    let driver_version = fact(nvml.sys_driver_version(), "nvmlSystemGetDriverVersion");
    match nvml.device_count() {
        Ok(count) => {
            let one = |index| GpuFact {
                driver_version: driver_version.clone(),
                ..device(nvml, index, host_total_bytes)
            };
            Fact::read((0..count.min(MAX_DEVICES)).map(one).collect(), "NVIDIA management library")
        }
        Err(error) => {
            Fact::unknown(format!("NVIDIA driver lists no devices: {}", one_line(&error)))
        }
    }
}

fn device(nvml: &Nvml, index: u32, host_total_bytes: Option<u64>) -> GpuFact {
    let facts = GpuFact { index, vendor: GpuVendor::Nvidia, ..GpuFact::default() };
    let device = match nvml.device_by_index(index) {
        Ok(device) => device,
        Err(error) => {
            let reason = format!("device {index} cannot be opened: {}", one_line(&error));
            return unopened(facts, &reason);
        }
    };
    let capability = device.cuda_compute_capability();
    let facts = GpuFact {
        name: fact(device.name(), "nvmlDeviceGetName"),
        uuid: fact(device.uuid(), "nvmlDeviceGetUUID"),
        memory_bandwidth_bytes_per_s: memory_bandwidth(&device),
        compute_capability: fact(capability, "nvmlDeviceGetCudaComputeCapability")
            .map(|capability| format!("{}.{}", capability.major, capability.minor)),
        mig: mig(&device),
        ..facts
    };
    with_link(with_memory(facts, &device, host_total_bytes), &device)
}

/// What is said of a device that the driver lists and does not open.
fn unopened(facts: GpuFact, reason: &str) -> GpuFact {
    GpuFact {
        name: Fact::unknown(reason),
        uuid: Fact::unknown(reason),
        memory_total_bytes: Fact::unknown(reason),
        memory_free_bytes: Fact::unknown(reason),
        memory_reserved_bytes: Fact::unknown(reason),
        memory_bandwidth_bytes_per_s: Fact::unknown(reason),
        is_unified: Fact::unknown(reason),
        link_generation: Fact::unknown(reason),
        link_width: Fact::unknown(reason),
        link_bytes_per_s: Fact::unknown(reason),
        compute_capability: Fact::unknown(reason),
        mig: Fact::unknown(reason),
        ..facts
    }
}

/// Memory, and whose it is. Devices without memory of their own report none, a total of zero, or the
/// system's.
fn with_memory(facts: GpuFact, device: &Device<'_>, host_total_bytes: Option<u64>) -> GpuFact {
    const FROM: &str = "nvmlDeviceGetMemoryInfo_v2";
    let shared = |why: &str| {
        let reason = format!("{why}: its memory is the system's");
        (
            Fact::unknown(reason.clone()),
            Fact::unknown(reason.clone()),
            Fact::estimated(true, reason),
        )
    };
    let is_the_hosts =
        |total: u64| host_total_bytes.is_some_and(|host| host.abs_diff(total) <= SAME_MEMORY_BYTES);
    let mut reserved = None;
    let (total, free, is_unified) = match device.memory_info() {
        Ok(info) if info.total == 0 => shared("the driver reports no memory of its own"),
        Ok(info) if is_the_hosts(info.total) => {
            shared("the driver reports just as much memory as the system has")
        }
        Ok(info) => {
            reserved = Some(info.reserved);
            let free = info.free.min(info.total);
            let is_unified = Fact::read(false, "the driver reports memory of its own");
            (Fact::read(info.total, FROM), Fact::read(free, FROM), is_unified)
        }
        Err(NvmlError::NotSupported) => shared("the driver has no memory to report"),
        Err(error) => {
            let reason = one_line(&error);
            (Fact::unknown(reason.clone()), Fact::unknown(reason.clone()), Fact::unknown(reason))
        }
    };
    let memory_reserved_bytes = match reserved {
        Some(bytes) => Fact::read(bytes, FROM),
        None => Fact::unknown(total.detail()),
    };
    GpuFact {
        memory_total_bytes: total,
        memory_free_bytes: free,
        memory_reserved_bytes,
        is_unified,
        ..facts
    }
}

/// The link. Its generation falls while a device idles, so the best that device and slot reach counts;
/// its width does not, so what was negotiated counts: a slot may have fewer lanes than the device.
fn with_link(facts: GpuFact, device: &Device<'_>) -> GpuFact {
    let link_generation = fact(device.max_pcie_link_gen(), "nvmlDeviceGetMaxPcieLinkGeneration");
    let link_width = match device.current_pcie_link_width() {
        Ok(width) if width > 0 => Fact::read(width, "nvmlDeviceGetCurrPcieLinkWidth"),
        Ok(_) | Err(_) => fact(device.max_pcie_link_width(), "nvmlDeviceGetMaxPcieLinkWidth"),
    };
    let link_bytes_per_s = link_rate(&link_generation, &link_width);
    GpuFact { link_generation, link_width, link_bytes_per_s, ..facts }
}

/// What a link carries, from its generation and width.
pub(crate) fn link_rate(generation: &Fact<u32>, width: &Fact<u32>) -> Fact<f64> {
    match (generation.value(), width.value()) {
        (Some(&generation), Some(&width)) => match parse::link_bytes_per_s(generation, width) {
            Some(rate) if rate > 0.0 => {
                Fact::estimated(rate, format!("PCIe {generation} x{width}, less its encoding"))
            }
            Some(_) | None => Fact::unknown(format!(
                "the rate of PCIe generation {generation} with {width} lanes is not known here"
            )),
        },
        (None, _) => Fact::unknown(generation.detail()),
        (_, None) => Fact::unknown(width.detail()),
    }
}

/// Clock times bus width, two transfers a clock: the driver reports the clock so that this holds for
/// GDDR and HBM alike.
fn memory_bandwidth(device: &Device<'_>) -> Fact<f64> {
    let clock = device.max_clock_info(Clock::Memory);
    let clock = fact(clock, "nvmlDeviceGetMaxClockInfo");
    let width = fact(device.memory_bus_width(), "nvmlDeviceGetMemoryBusWidth");
    match (clock.value(), width.value()) {
        (Some(&mhz), Some(&bits)) if mhz > 0 && bits > 0 => Fact::estimated(
            f64::from(mhz) * 1e6 * 2.0 * f64::from(bits) / 8.0,
            format!("{mhz} MHz, two transfers a clock, {bits} bits wide"),
        ),
        (Some(mhz), Some(bits)) => {
            Fact::unknown(format!("the driver reports {mhz} MHz and {bits} bits"))
        }
        (None, _) => Fact::unknown(format!("memory clock: {}", clock.detail())),
        (_, None) => Fact::unknown(format!("memory bus width: {}", width.detail())),
    }
}

/// Whether the device is divided. Then only its instances can be used, and they are named.
fn mig(device: &Device<'_>) -> Fact<String> {
    const FROM: &str = "nvmlDeviceGetMigMode";
    match device.mig_mode() {
        Ok(mode) => {
            let word = |is_enabled: bool| if is_enabled { "enabled" } else { "disabled" };
            let (current, pending) = (word(mode.current == 1), word(mode.pending == 1));
            let mut detail = FROM.to_owned();
            if mode.current == 1 {
                detail.push_str(&format!("; {}", instances(device)));
            }
            if current != pending {
                detail.push_str(&format!("; {pending} after a reset"));
            }
            Fact::read(current.to_owned(), detail)
        }
        Err(NvmlError::NotSupported) => Fact::read("not supported".to_owned(), FROM),
        Err(error) => Fact::unknown(one_line(&error)),
    }
}

/// The instances of a divided device, in words.
fn instances(device: &Device<'_>) -> String {
    let most = device.mig_device_count().unwrap_or(0).min(MAX_DEVICES);
    let memory = |index| device.mig_device_by_index(index).ok()?.memory_info().ok();
    let all: Vec<String> =
        (0..most).filter_map(memory).map(|memory| gigabytes(memory.total)).collect();
    match all.as_slice() {
        [] => "it has no instance".to_owned(),
        all => format!("instances of {}", all.join(", ")),
    }
}

fn fact<T>(result: Result<T, NvmlError>, detail: &str) -> Fact<T> {
    Fact::from_read(result.map_err(|error| one_line(&error)), detail)
}

fn one_line(error: &NvmlError) -> String {
    let text = match error {
        // The name of the crate that loads libraries tells nobody anything.
        NvmlError::LibloadingError(error) => error.to_string(),
        error => error.to_string(),
    };
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

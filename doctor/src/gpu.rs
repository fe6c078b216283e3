//! Graphics processors.
//!
//! Owns the questions to NVIDIA's management library, which is loaded at run time. Refuses to fail:
//! a machine without a driver is a fact, not an error. Nothing is guessed from a product's name.

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::fact::Fact;
use crate::facts::{GpuFact, GpuFacts};

/// GPU facts of the running machine.
pub(crate) fn probe() -> GpuFacts {
    let nvidia = match load() {
        Ok(nvml) => devices(&nvml),
        Err(error) => Fact::unknown(format!("no NVIDIA driver: {}", one_line(&error))),
    };
    GpuFacts { nvidia, others: Fact::unknown("not looked for yet") }
}

/// Drivers install the library under its versioned name; the plain one comes with developer files.
fn load() -> Result<Nvml, NvmlError> {
    if cfg!(target_os = "linux")
        && let Ok(nvml) = Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init()
    {
        return Ok(nvml);
    }
    Nvml::init()
}

fn devices(nvml: &Nvml) -> Fact<Vec<GpuFact>> {
    let driver_version = fact(nvml.sys_driver_version(), "nvmlSystemGetDriverVersion");
    match nvml.device_count() {
        Ok(count) => {
            let all = (0..count).map(|index| device(nvml, index, driver_version.clone())).collect();
            Fact::read(all, "NVIDIA management library")
        }
        Err(error) => {
            Fact::unknown(format!("NVIDIA driver lists no devices: {}", one_line(&error)))
        }
    }
}

fn device(nvml: &Nvml, index: u32, driver_version: Fact<String>) -> GpuFact {
    match nvml.device_by_index(index) {
        Ok(device) => {
            let memory = memory(&device);
            GpuFact {
                index,
                name: fact(device.name(), "nvmlDeviceGetName"),
                memory_total_bytes: memory.clone().map(|(total, _)| total),
                memory_free_bytes: memory.map(|(_, free)| free),
                compute_capability: fact(
                    device.cuda_compute_capability(),
                    "nvmlDeviceGetCudaComputeCapability",
                )
                .map(|capability| format!("{}.{}", capability.major, capability.minor)),
                driver_version,
                ..GpuFact::default()
            }
        }
        Err(error) => {
            let reason = format!("device {index} cannot be opened: {}", one_line(&error));
            GpuFact {
                index,
                name: Fact::unknown(reason.clone()),
                memory_total_bytes: Fact::unknown(reason.clone()),
                memory_free_bytes: Fact::unknown(reason.clone()),
                compute_capability: Fact::unknown(reason),
                driver_version,
                ..GpuFact::default()
            }
        }
    }
}

/// Total and free memory. A total of zero is what devices without memory of their own may report.
fn memory(device: &Device<'_>) -> Fact<(u64, u64)> {
    match device.memory_info() {
        Ok(info) if info.total == 0 => Fact::unknown("the driver reports no memory of its own"),
        Ok(info) => Fact::read((info.total, info.free), "nvmlDeviceGetMemoryInfo"),
        Err(error) => Fact::unknown(one_line(&error)),
    }
}

fn fact<T>(result: Result<T, NvmlError>, detail: &str) -> Fact<T> {
    Fact::from_read(result.map_err(|error| one_line(&error)), detail)
}

fn one_line(error: &NvmlError) -> String {
    let text = error.to_string();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

//! Graphics processors that the kernel alone knows: AMD's and Intel's.
//!
//! Owns what `/sys/class/drm` says of them. Refuses to tell a device's memory from its name, and to
//! call memory its own where nothing says so.

use crate::fact::Fact;
use crate::facts::{GpuFact, GpuVendor};
use crate::gpu::link_rate;
use crate::parse;
use crate::tree::Tree;

const FOLDER: &str = "/sys/class/drm";
const KFD_NODES: &str = "/sys/class/kfd/kfd/topology/nodes";

/// Where Intel's processors have their own graphics; cards are elsewhere.
const INTEL_INTEGRATED: &str = "0000:00:02.0";

/// Devices of other makers than NVIDIA, in the kernel's order.
pub(crate) fn probe(tree: &Tree) -> Fact<Vec<GpuFact>> {
    let names = match tree.list(FOLDER) {
        Ok(names) => names,
        Err(error) if error.is_missing() && tree.exists("/sys/class") => {
            return Fact::read(Vec::new(), format!("there is no {FOLDER}"));
        }
        Err(error) => return Fact::unknown(error.to_string()),
    };
    let mut cards: Vec<u32> =
        names.iter().filter_map(|name| name.strip_prefix("card")?.parse().ok()).collect();
    cards.sort_unstable();
    let mut gpus: Vec<GpuFact> = Vec::new();
    for card in cards {
        let device = CardFolder { tree, path: format!("{FOLDER}/card{card}/device") };
        let vendor = match device.read("vendor").as_deref() {
            Ok("0x1002") => GpuVendor::Amd,
            Ok("0x8086") => GpuVendor::Intel,
            // NVIDIA's are its driver's to tell; others are displays of servers and virtual machines.
            Ok(_) | Err(_) => continue,
        };
        let index = gpus.iter().filter(|gpu| gpu.vendor == vendor).count();
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        gpus.push(device.facts(index, vendor));
    }
    Fact::read(gpus, FOLDER)
}

/// Where the bus has cards of NVIDIA, whether or not a driver serves them.
pub(crate) fn nvidia_cards(tree: &Tree) -> Vec<String> {
    const DEVICES: &str = "/sys/bus/pci/devices";
    let is_card = |address: &String| {
        let read = |file: &str| tree.read_value(format!("{DEVICES}/{address}/{file}"));
        // Class 3 is that of display controllers; the same cards have sound devices too.
        read("vendor").is_ok_and(|vendor| vendor == "0x10de")
            && read("class").is_ok_and(|class| class.starts_with("0x03"))
    };
    tree.list(DEVICES).unwrap_or_default().into_iter().filter(is_card).collect()
}

/// The device folder of one card.
struct CardFolder<'tree> {
    tree: &'tree Tree,
    path: String,
}

impl CardFolder<'_> {
    fn read(&self, file: &str) -> Result<String, String> {
        let value = self.tree.read_value(format!("{}/{file}", self.path));
        value.map_err(|error| error.to_string())
    }

    fn text(&self, file: &str) -> Fact<String> {
        match self.read(file) {
            Ok(text) if !text.is_empty() => Fact::read(text, format!("{}/{file}", self.path)),
            Ok(_) => Fact::unknown(format!("{}/{file} is empty", self.path)),
            Err(reason) => Fact::unknown(reason),
        }
    }

    fn bytes(&self, file: &str) -> Fact<u64> {
        let path = format!("{}/{file}", self.path);
        match self.read(file).map(|text| text.parse()) {
            Ok(Ok(bytes)) => Fact::read(bytes, path),
            Ok(Err(_)) => Fact::unknown(format!("{path} is not a number")),
            Err(reason) => Fact::unknown(reason),
        }
    }

    fn facts(&self, index: u32, vendor: GpuVendor) -> GpuFact {
        let total = match vendor {
            GpuVendor::Amd => self.bytes("mem_info_vram_total"),
            // The xe driver tells it of each tile; the first stands for cards of one.
            GpuVendor::Intel => self.bytes("tile0/physical_vram_size_bytes"),
            GpuVendor::Nvidia => Fact::unknown("told by its own driver"),
        };
        let is_unified = match vendor {
            GpuVendor::Amd => self.is_unified_amd(),
            GpuVendor::Intel => self.is_unified_intel(&total),
            GpuVendor::Nvidia => Fact::unknown("told by its own driver"),
        };
        let used = self.bytes("mem_info_vram_used");
        let (memory_total_bytes, memory_free_bytes) = if is_unified.value() == Some(&true) {
            let reason = format!("its memory is the system's: {}", is_unified.detail());
            (Fact::unknown(reason.clone()), Fact::unknown(reason))
        } else {
            let free = match (total.value(), used.value()) {
                (Some(total), Some(used)) => Fact::read(
                    total.saturating_sub(*used),
                    "mem_info_vram_total less mem_info_vram_used",
                ),
                (None, _) => Fact::unknown(total.detail()),
                (_, None) => Fact::unknown(used.detail()),
            };
            (total, free)
        };
        let name = match self.text("product_name") {
            name if name.is_unknown() => Fact::unknown(self.pci_name()),
            name => name,
        };
        let (link_generation, link_width) = self.link();
        GpuFact {
            index,
            vendor,
            name,
            uuid: self.text("unique_id"),
            memory_total_bytes,
            memory_free_bytes,
            memory_reserved_bytes: Fact::unknown("sysfs does not tell"),
            memory_bandwidth_bytes_per_s: Fact::unknown("sysfs does not tell"),
            is_unified,
            link_bytes_per_s: link_rate(&link_generation, &link_width),
            link_generation,
            link_width,
            compute_capability: Fact::unknown("not an NVIDIA device"),
            driver_version: self.driver(),
            mig: Fact::read("not supported".to_owned(), "not an NVIDIA device"),
        }
    }

    /// Why there is no name, with the numbers by which it can be looked up.
    fn pci_name(&self) -> String {
        let id = |file: &str| {
            self.read(file).map_or("?".to_owned(), |id| id.trim_start_matches("0x").to_owned())
        };
        format!("sysfs has no name; PCI id {}:{}", id("vendor"), id("device"))
    }

    /// The kernel module and, where it says one, its version; most come with the kernel.
    fn driver(&self) -> Fact<String> {
        let folder = self.tree.path(format!("{}/driver", self.path));
        let name = std::fs::read_link(folder)
            .ok()
            .and_then(|link| link.file_name().map(|name| name.to_string_lossy().into_owned()));
        let Some(name) = name else { return Fact::unknown("no driver serves it") };
        match self.tree.read_value(format!("/sys/module/{name}/version")) {
            Ok(version) => Fact::read(format!("{name} {version}"), "/sys/module"),
            Err(_) => Fact::read(format!("{name} of the kernel"), format!("{}/driver", self.path)),
        }
    }

    /// The kernel's compute driver has a node for each device; one that has cores of a CPU as well
    /// as those of a GPU is both in one package with one memory.
    fn is_unified_amd(&self) -> Fact<bool> {
        let location = self.pci_address().and_then(|address| parse::parse_pci_location(&address));
        let nodes = self.tree.list(KFD_NODES).unwrap_or_default();
        for node in nodes {
            let file = format!("{KFD_NODES}/{node}/properties");
            let Ok(text) = self.tree.read(&file) else { continue };
            let value = |name: &str| parse::parse_kfd_property(&text, name);
            if location.is_some() && value("location_id") == location {
                let has_both = value("simd_count").is_some_and(|count| count > 0)
                    && value("cpu_cores_count").is_some_and(|count| count > 0);
                return Fact::read(has_both, file);
            }
        }
        // The maker of memory chips is told only of cards that have some.
        match self.read("mem_info_vram_vendor") {
            Ok(vendor) if !vendor.is_empty() && vendor != "unknown" => {
                Fact::read(false, format!("memory by {vendor} (mem_info_vram_vendor)"))
            }
            Ok(_) | Err(_) => Fact::unknown("sysfs does not tell whose memory it has"),
        }
    }

    fn is_unified_intel(&self, total: &Fact<u64>) -> Fact<bool> {
        match self.pci_address().as_deref() {
            _ if total.value().is_some_and(|&bytes| bytes > 0) => {
                Fact::read(false, "the driver reports memory of its own")
            }
            Some(INTEL_INTEGRATED) => Fact::estimated(
                true,
                format!("at {INTEL_INTEGRATED}, where Intel's processors have their own graphics"),
            ),
            Some(_) | None => Fact::unknown("sysfs does not tell whose memory it has"),
        }
    }

    /// Its place on the bus: `device` is a link into the tree of devices.
    fn pci_address(&self) -> Option<String> {
        let folder = self.tree.path(&self.path).canonicalize().ok()?;
        Some(folder.file_name()?.to_string_lossy().into_owned())
    }

    /// As for NVIDIA's: the best generation, and the width that was negotiated.
    fn link(&self) -> (Fact<u32>, Fact<u32>) {
        let fact = |file: &str, parse: fn(&str) -> Option<u32>| match self.read(file) {
            Ok(text) => match parse(&text) {
                Some(value) => Fact::read(value, format!("{}/{file}", self.path)),
                None => Fact::unknown(format!("{}/{file} says {text}", self.path)),
            },
            Err(reason) => Fact::unknown(reason),
        };
        let width = match fact("current_link_width", parse::parse_link_width) {
            width if width.is_unknown() => fact("max_link_width", parse::parse_link_width),
            width => width,
        };
        (fact("max_link_speed", parse::parse_link_generation), width)
    }
}
